"""Hints that work may have come: LISTEN on PostgreSQL, the file's change counter on SQLite, and the wait that uses them.

A wake is only a hint. Whoever waits also looks at the next known deadline and at a poll floor, so that a lost notification, a pooler
without LISTEN or a dropped connection costs latency, never a job.
"""

import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import Connection

from alkstore_sa.engines import Database
from alkstore_sa.errors import StoreClosed
from alkstore_sa.stop import Latch, StopToken, wait_for

log: Final = logging.getLogger(__name__)

DATA_VERSION_SECONDS: Final = 0.05
PROBE_SECONDS: Final = 30.0
PROBE_ANSWER_SECONDS: Final = 5.0
FIRST_LISTEN_SECONDS: Final = 2.0
LONGEST_RECONNECT_SECONDS: Final = 30.0
CONTENDED_SECONDS: Final = 0.1  # until the next look at work that is there but that somebody else has locked


class Bell:
    """Rings in this process when a commit anywhere may have brought work to a queue. One per store; silent until somebody waits."""

    def __init__(self, database: Database, *, waking: bool) -> None:
        self.database: Final = database
        self._waking = waking
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ears: dict[str, set[Latch]] = defaultdict(set)
        self._rings: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._first_attempt = threading.Event()
        self._hearing = False  # since its last failure the source has shown that it works
        self._stop: StopToken | None = None

    def rings(self, queue: str) -> int:
        """Give a number that changes at each ring for this very queue."""
        if self._pid != os.getpid():
            self._reset()
        return self._rings.setdefault(queue, 0)

    def ring(self, queue: str) -> None:
        """Wake whoever waits for `queue`, since there is work in it."""
        with self._changed:
            if queue in self._rings:
                self._rings[queue] += 1
            for ear in self._ears.get(queue, ()):
                ear.set()

    def ring_all(self) -> None:
        """Let everybody who waits look for work, since there may be some in any queue."""
        with self._changed:
            for ears in self._ears.values():
                for ear in ears:
                    ear.set()

    @contextmanager
    def listening(self, queue: str) -> Iterator[Latch]:
        """Give a latch that is set at each ring for `queue`; the source of rings is started if it does not run."""
        self.rings(queue)
        ear = Latch()
        with self._changed:
            self._ears[queue].add(ear)
            if self._waking and self._thread is None:
                self._stop = StopToken()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="alkstore-wake", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            if self._waking:
                self._first_attempt.wait(FIRST_LISTEN_SECONDS)
            yield ear
        finally:
            with self._changed:
                self._ears[queue].discard(ear)
            ear.close()

    def close(self) -> None:
        """Stop the source and wake everybody."""
        if self._pid != os.getpid():
            return
        self.ring_all()
        if self._stop is not None and self._thread is not None:
            self._stop.cancel()
            with self._changed:
                self._changed.notify_all()
            self._thread.join(5)

    def _run(self, stop: StopToken) -> None:
        hear = self._hear_notifications if self.database.dialect == "postgresql" else self._watch_file
        failures = 0
        while not stop.cancelled:
            try:
                with self.database.open_apart() as connection:
                    if not hear(connection, stop):
                        return
            except StoreClosed:
                return
            except Exception as error:  # noqa: BLE001 - whatever ends it, the listener comes back
                failures = 1 if self._hearing else failures + 1
                self._hearing = False
                level = logging.WARNING if failures == 1 else logging.DEBUG  # a pooler without LISTEN fails for ever: say it once
                log.log(level, "waiting without wakes, by polling, until the listener is back: %s", error)
            finally:
                self._first_attempt.set()
            stop.wait(min(LONGEST_RECONNECT_SECONDS, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1))

    # -- PostgreSQL -------------------------------------------------------------------------------------------------

    def _hear_notifications(self, connection: Connection, stop: StopToken) -> bool:
        driver: Any = connection.connection.dbapi_connection
        if not isinstance(driver, psycopg.Connection):
            log.warning("no wakes with the driver %s: waiting by polling", self.database.engine.dialect.driver)
            return False
        probe = f"alkstore_probe_{uuid4().hex}"
        for channel in (self.database.channel, probe):
            driver.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._first_attempt.set()
        self.ring_all()  # listen first, then look
        answered = True
        next_probe = time.monotonic()
        while not stop.cancelled:
            if time.monotonic() >= next_probe:
                if not answered:
                    raise OSError("no notification comes through: a pooler in transaction mode, or a dead connection")
                driver.execute("SELECT pg_notify(%s, '')", [probe])
                answered = False
                next_probe = time.monotonic() + PROBE_ANSWER_SECONDS
            else:
                wait_for((driver, stop), next_probe - time.monotonic())
            for notification in driver.notifies(timeout=0):
                if notification.channel == probe:
                    answered = self._hearing = True
                    next_probe = time.monotonic() + PROBE_SECONDS
                else:
                    self.ring(notification.payload)
        return True

    # -- SQLite -----------------------------------------------------------------------------------------------------

    def _watch_file(self, connection: Connection, stop: StopToken) -> bool:
        seen: object = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: stop.cancelled or any(self._ears.values()))
            if stop.cancelled:
                return True
            version = connection.exec_driver_sql("PRAGMA data_version").scalar()
            if version != seen:
                seen = version
                self.ring_all()
            self._hearing = True
            self._first_attempt.set()
            stop.wait(DATA_VERSION_SECONDS)


class Waiter:
    """The wait of one queue's handle: for a wake, a deadline or the poll floor, whichever is first."""

    def __init__(self, bell: Bell, queue: str, poll: timedelta, look: Callable[[], tuple[bool, timedelta | None]]) -> None:
        self._bell = bell
        self._queue = queue
        self._poll = poll.total_seconds()
        self._look = look  # is there a ready row, and how long until the next deadline
        self._seen: int | None = None
        self._came_up_empty = False
        self.overdue = False  # the last look found a row past its deadline, which a promotion must make ready

    def before_claim(self) -> None:
        """Remember which wakes the claim that follows will have seen the work of."""
        self.overdue = False
        self._seen = self._bell.rings(self._queue)

    def after_claim(self, claimed: int) -> None:
        """Remember whether the claim found anything."""
        self._came_up_empty = not claimed

    def wait(self, timeout: float, stop: StopToken | None = None) -> bool:
        """Block until it is worth looking (True), or until `timeout` seconds passed or `stop` was cancelled (False)."""
        end = time.monotonic() + timeout
        floor = time.monotonic() + self._poll * random.uniform(0.8, 1)
        with self._bell.listening(self._queue) as ear:
            while not (stop is not None and stop.cancelled):
                ear.clear()
                rings = self._bell.rings(self._queue)
                missed = self._seen is not None and rings != self._seen
                self._seen = rings
                if missed:
                    return True
                next_look = self._next_look()
                if next_look <= time.monotonic():
                    return True
                rung = wait_for((ear,) if stop is None else (ear, stop), min(end, floor, next_look) - time.monotonic())
                self._bell.database.refuse_closed()
                if not rung:
                    self.overdue = self.overdue or time.monotonic() >= next_look
                    return time.monotonic() < end
        return False

    def _next_look(self) -> float:
        ready, until = self._look()
        now = time.monotonic()
        self.overdue = until is not None and until <= timedelta(0)
        if ready or self.overdue:
            return now + CONTENDED_SECONDS if self._came_up_empty else now
        return float("inf") if until is None else now + until.total_seconds()
