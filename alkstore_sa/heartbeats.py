"""Heartbeats of everything that a worker holds: one statement for all, from a thread and on a connection of their own."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from datetime import datetime
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from alkstore_sa.engines import Database
from alkstore_sa.errors import AlkstoreError, SchemaMissing, StoreClosed
from alkstore_sa.handles import shortest_visibility
from alkstore_sa.presence import Presence
from alkstore_sa.queues import Jobs
from alkstore_sa.runs import Bench, Run
from alkstore_sa.stop import Latch, wait_for

log: Final = logging.getLogger("alkstore_sa.worker")

BEATS_PER_VISIBILITY: Final = 3
LONGEST_INTERVAL: Final = 100.0
SHORTEST_INTERVAL: Final = 0.05
TIME_LIMIT: Final = 5.0
SHORTEST_LIMIT: Final = 1.0  # a connection whose process stands still for as long within a transaction is ended


class Heart:
    """Keeps the claims on a bench alive until they are off it, and tells the runs whose claims are gone.

    A claim that was not renewed is looked at again: one whose row somebody else has locked (by an open `ack_tx`, say) still stands.
    """

    def __init__(self, jobs: Jobs, bench: Bench, gate: "threading.Lock | None", presence: Presence) -> None:
        self._presence = presence
        self._jobs = jobs
        self._database: Database = jobs.database
        self._bench = bench
        self._gate = gate
        self._latch = Latch()
        self._closed = False
        self._interval = LONGEST_INTERVAL
        self._pacing = threading.Lock()
        self._connection: Connection | None = None
        self._kept = ExitStack()
        self._thread = threading.Thread(target=self._run, name="alkstore-heart", daemon=True)
        self._thread.start()

    def quicken(self, visibility: float) -> None:
        """Beat at least three times within `visibility` seconds from now on."""
        interval = max(SHORTEST_INTERVAL, visibility / BEATS_PER_VISIBILITY)
        with self._pacing:
            quickened = interval < self._interval
            self._interval = min(self._interval, interval)
        if quickened:
            self._latch.set()

    def close(self) -> None:
        """End the thread and its connection."""
        self._closed = True
        self._latch.set()
        self._thread.join(TIME_LIMIT)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed:
            due = min(last + self._interval, self._presence.next_at)
            if wait_for((self._latch,), max(0.0, due - time.monotonic())):
                self._latch.clear()  # quickened, or closed
            now = time.monotonic()
            renewing, showing = now >= last + self._interval, now >= self._presence.next_at
            try:
                if renewing:
                    last = now
                    self._beat()
                if showing and not self._closed:
                    self._presence.beat(self._connected(), self._gate, max(SHORTEST_LIMIT, min(TIME_LIMIT, self._interval / 2)))
            except (SQLAlchemyError, SchemaMissing, OSError) as error:
                log.warning("a heartbeat failed (%s): again at the next one", type(error).__name__)
                self._let_go()
                last = time.monotonic() - self._interval + min(1.0, self._interval)
                self._presence.next_at = max(self._presence.next_at, time.monotonic() + 1.0)
            except StoreClosed:
                return
        self._take_leave()

    def _beat(self) -> None:
        self._interval = LONGEST_INTERVAL  # what is claimed from here on quickens it anew
        runs = self._current()
        if runs:
            self.quicken(shortest_visibility(run.job for run in runs))
        connection = self._connected()  # kept even while there is nothing to renew
        if not runs:
            return
        with self._gate or nullcontext():
            renewed, standing = self._renew(connection, [run.key for run in runs])
        for run in runs:
            if (end := renewed.get(run.job.id)) is not None:
                run.job.claim_expires_at = end
            elif run.job.id not in standing:
                _tell(run)
        if locked := standing - renewed.keys():
            log.debug("%s running jobs are locked by another transaction, their claims were not extended", len(locked))

    def _current(self) -> list[Run]:
        """Give the runs to renew, one a job; an older run of a job that this very worker claimed again since is told so."""
        newest: dict[int, Run] = {}
        held = [run for run in list(self._bench.held.values()) if not run.overran or run.deferred]
        for run in sorted(held, key=lambda run: run.key):
            if (older := newest.get(run.job.id)) is not None:
                _tell(older)
            newest[run.job.id] = run
        return list(newest.values())

    def _renew(self, connection: Connection, claims: Sequence[tuple[int, int]]) -> tuple[dict[int, datetime], set[int]]:
        """Extend what nobody has locked; return the new ends, and what stands beside them."""
        with self._database.transaction_on(connection, limit=TIME_LIMIT):
            renewed = self._jobs.heartbeat_many(connection, claims)
            left = [claim for claim in claims if claim[0] not in renewed]
            return renewed, self._jobs.standing(connection, left) if left else set()

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.invalidated:
            self._let_go()
            self._connection = self._kept.enter_context(self._database.open_apart())
        return self._connection

    def _take_leave(self) -> None:
        try:
            self._presence.leave(self._connected())
        except (SQLAlchemyError, AlkstoreError, OSError) as error:
            log.debug("this worker stays listed for a while (%s)", type(error).__name__)
        self._let_go()

    def _let_go(self) -> None:
        self._connection = None
        self._kept.close()


def _tell(run: Run) -> None:
    """Tell a run that its claim is gone, unless it has just ended or committed: then that is why."""
    job = run.job
    if run.ended_at or job.settled or job.lost.is_set():
        return
    job.lost.set()
    log.warning("the claim of job %s is gone while it runs", job.id, extra=run.fields)
    if run.handler.is_async:
        run.interrupt()
