"""Sync handlers in threads. A batch is shared through one queue that the threads take from; there is no Future per job."""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from alkstore_sa.runs import SETTLING_TRIES, Bench, Limiter, Overrun, Run, conclude, log, note_settled
from alkstore_sa.sessions import Sessions, refuse_awaitable
from alkstore_sa.tasks import Around

_BLANK: Final = contextvars.Context()


class ThreadCrew:
    """As many threads as are needed, at most one per slot.

    At any time at most one thread is on its way to work. When it arrives and more is left, it calls the next one: handlers that wait get
    a thread each at once, and handlers that are over in no time are not run by a crowd.
    """

    def __init__(self, slots: int, bench: Bench, sessions: Sessions, around: Around | None) -> None:
        self._slots = slots
        self._bench = bench
        self._sessions = sessions
        self._around = around
        self._waiting: Final[deque[Run]] = deque()
        self._changed = threading.Condition()
        self._warnings = Limiter()
        self._threads = 0
        self._idle = 0
        self._coming = False
        self._closed = False

    def start(self, runs: Iterable[Run]) -> None:
        """Hand over runs to be started as soon as a thread is free."""
        self._waiting.extend(runs)
        self._call_another()

    def withdraw(self) -> list[Run]:
        """Take back what has not started."""
        withdrawn = []
        while (run := self._take()) is not None:
            withdrawn.append(run)
        return withdrawn

    def close(self) -> None:
        """Let the threads end as soon as they have nothing to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self) -> Run | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _call_another(self) -> None:
        with self._changed:
            if self._coming or not self._waiting:
                return
            if self._idle:
                self._coming = True
                self._changed.notify()
            elif self._threads < self._slots:
                self._coming = True
                self._threads += 1
                try:
                    threading.Thread(target=self._work, name=f"alkstore-handler-{self._threads}", daemon=True).start()
                except RuntimeError as error:
                    self._coming = False
                    self._threads -= 1
                    if not self._threads:
                        raise
                    if self._warnings.lets_through("threads"):
                        log.warning("%s handler threads are all that there can be (%s)", self._threads, error)

    def _work(self) -> None:
        while self._await_work():
            while (run := self._take()) is not None:
                if self._waiting and not self._coming:
                    self._call_another()
                try:
                    self._perform(run)
                finally:
                    self._bench.end(run)

    def _await_work(self) -> bool:
        with self._changed:
            self._coming = False
            self._idle += 1
            while not self._waiting and not self._closed:
                self._changed.wait()
                self._coming = False
            self._idle -= 1
            return bool(self._waiting)

    def _perform(self, run: Run) -> None:
        if run.handler.session is None:
            run.start()  # else once it has a place among the sessions
        try:
            _BLANK.copy().run(self._call, run)
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit is its failure, not the worker's end
            if not run.overran:  # else that is why, and it is being settled
                run.error = error
        run.ended_at = time.monotonic()
        if run.deferred and run.handler.timeout is not None:
            run.error = Overrun(run.handler.timeout)
        elif run.overran or (run.abandoned and run.error is not None):
            return
        if run.error is not None:
            conclude(run, tries=1 if run.abandoned else SETTLING_TRIES)
        elif not run.job.settled:
            run.awaits_ack = True
        elif run.handler.session is None:
            note_settled(run)

    def _call(self, run: Run) -> None:
        if self._around is None:
            self._run_handler(run)
            return
        with self._around(run.job):
            self._run_handler(run)

    def _run_handler(self, run: Run) -> None:
        front, named = run.handler.arguments(run.job)
        if run.handler.session is None:
            refuse_awaitable(run.handler.function(*front, **named))
        else:
            self._sessions.call(run, front, named)
