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
from typing import Final
from uuid import uuid4

from sqlalchemy import Connection

from alkstore_sa.bridge import Beside
from alkstore_sa.engines import Database
from alkstore_sa.errors import StoreClosed
from alkstore_sa.lines import line_on
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
        self._changed = threading.Lock()
        self._ears: dict[str, set[Latch]] = defaultdict(set)
        self._rings: dict[str, int] = {}
        self._source: _Source | None = None
        self._polling = False
        self._hearing = False  # since its last failure the source has shown that it works

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
            source = self._started()
        try:
            if source is not None:
                source.attended.set()
                if not source.tried:
                    wait_for((source.attempted,), FIRST_LISTEN_SECONDS)
            yield ear
        finally:
            with self._changed:
                self._ears[queue].discard(ear)
            ear.close()

    @property
    def tried(self) -> bool:
        """Whether the source runs and has tried to hear."""
        return self._source is not None and self._source.tried

    def close(self) -> None:
        """Stop the source and wake everybody."""
        if self._pid != os.getpid():
            return
        self.ring_all()
        if self._source is not None:
            self._source.stop.cancel()
            self._source.join(5)

    def _started(self) -> "_Source | None":
        if not self._waking or self._polling:
            return None
        if self._source is None or not self._source.running:
            self._source = source = _Source()
            source.beside = self.database.beside(lambda: self._run(source), "alkstore-wake")
        return self._source

    def _run(self, source: "_Source") -> None:
        stop = source.stop
        hear = self._hear_notifications if self.database.dialect == "postgresql" else self._watch_file
        failures = 0
        while not stop.cancelled:
            try:
                with self.database.open_apart() as connection:
                    if not hear(connection, source):
                        self._polling = True
                        return
            except StoreClosed:
                return
            except Exception as error:  # noqa: BLE001 - whatever ends it, the listener comes back
                failures = 1 if self._hearing else failures + 1
                self._hearing = False
                level = logging.WARNING if failures == 1 else logging.DEBUG  # a pooler without LISTEN fails for ever: say it once
                log.log(level, "waiting without wakes, by polling, until the listener is back: %s", error)
            finally:
                source.has_tried()
            stop.wait(min(LONGEST_RECONNECT_SECONDS, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1))

    # -- PostgreSQL -------------------------------------------------------------------------------------------------

    def _hear_notifications(self, connection: Connection, source: "_Source") -> bool:
        stop = source.stop
        line = line_on(connection)
        if line is None:
            log.warning("no wakes with the driver %s: waiting by polling", self.database.engine.dialect.driver)
            return False
        probe = f"alkstore_probe_{uuid4().hex}"
        for channel in (self.database.channel, probe):
            line.listen(channel)
        source.has_tried()
        self.ring_all()  # listen first, then look
        answered = True
        next_probe = time.monotonic()
        while not stop.cancelled:
            if time.monotonic() >= next_probe:
                if not answered:
                    raise OSError("no notification comes through: a pooler in transaction mode, or a dead connection")
                line.notify(probe)
                answered = False
                next_probe = time.monotonic() + PROBE_ANSWER_SECONDS
            else:
                wait_for((line, stop), next_probe - time.monotonic())
            for channel, payload in line.heard():
                if channel == probe:
                    answered = self._hearing = True
                    next_probe = time.monotonic() + PROBE_SECONDS
                else:
                    self.ring(payload)
        return True

    # -- SQLite -----------------------------------------------------------------------------------------------------

    def _watch_file(self, connection: Connection, source: "_Source") -> bool:
        stop = source.stop
        seen: object = None
        while True:
            source.attended.clear()
            if not self._anybody_waits():
                wait_for((source.attended, stop), None)
            if stop.cancelled:
                return True
            version = connection.exec_driver_sql("PRAGMA data_version").scalar()
            if version != seen:
                seen = version
                self.ring_all()
            self._hearing = True
            source.has_tried()
            stop.wait(DATA_VERSION_SECONDS)

    def _anybody_waits(self) -> bool:
        with self._changed:
            return any(self._ears.values())


class _Source:
    """What runs beside and hears of wakes: it is told when somebody waits, and tells when it first tried."""

    def __init__(self) -> None:
        self.stop: Final = StopToken()
        self.attended: Final = Latch()
        self.attempted: Final = Latch()
        self.tried = False
        self.beside: Beside | None = None

    @property
    def running(self) -> bool:
        """Whether it hears still."""
        return self.beside is not None and self.beside.running

    def has_tried(self) -> None:
        """Let those go on who wait for the first attempt to hear, whatever came of it."""
        self.tried = True
        self.attempted.set()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        if self.beside is not None:
            self.beside.join(seconds)


def poll_wait(poll: float) -> float:
    """Give the seconds until the next look though nothing came: at most `poll`, and not the same for everybody who fell idle at once."""
    return poll * random.uniform(0.8, 1)


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
        floor = time.monotonic() + poll_wait(self._poll)
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
