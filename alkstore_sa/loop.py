"""Async handlers on one event loop in a thread of its own, a task each."""

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from alkstore_sa.runs import Bench, Run, conclude, note_settled
from alkstore_sa.sessions import Sessions
from alkstore_sa.tasks import Around

SETTLING_THREADS: Final = 4
CLOSING_SECONDS: Final = 2.0


class LoopCrew:
    """Runs async handlers; what they fail with is settled in threads, so that the loop never waits for the database of the worker.

    Connections that an async engine opened on a loop work there alone: so `engine`'s pool is emptied before the loop is closed.
    """

    def __init__(self, bench: Bench, sessions: Sessions, around: Around | None, engine: AsyncEngine | None) -> None:
        self._bench = bench
        self._sessions = sessions
        self._around = around
        self._engine = engine
        self._settlers = ThreadPoolExecutor(SETTLING_THREADS, thread_name_prefix="alkstore-settler")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="alkstore-loop", daemon=True)
        self._thread.start()

    def start(self, runs: Iterable[Run]) -> None:
        """Start runs on the loop."""
        self._loop.call_soon_threadsafe(self._start, list(runs))

    def close(self) -> None:
        """Stop the loop; one that a handler blocks ends as soon as it can."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_SECONDS)
        self._settlers.shutdown(wait=False)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        if self._engine is not None:
            self._loop.run_until_complete(self._engine.dispose())
        self._loop.close()

    def _start(self, runs: list[Run]) -> None:
        for run in runs:
            run.task = _task(self._perform(run), self._loop)  # the run is held, and so is its task

    async def _perform(self, run: Run) -> None:
        run.began_at = time.monotonic()
        try:
            front, named = run.handler.arguments(run.job)
            if self._around is None:
                if run.handler.timeout is None and run.handler.session is None:
                    await run.handler.function(*front, **named)
                else:
                    await self._sessions.call_awaited(run, front, named)
            else:
                with self._around(run.job):
                    await self._sessions.call_awaited(run, front, named)
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit or cancellation is its own failure, not the loop's
            run.error = error
        run.ended_at = time.monotonic()
        if run.error is not None and not run.abandoned:
            self._settlers.submit(self._settle, run)  # not awaited: the task may yet be cancelled
            return
        if run.error is None and not run.job.settled:
            run.awaits_ack = True
        elif run.error is None and run.handler.session is None:
            note_settled(run)
        self._bench.end(run)

    def _settle(self, run: Run) -> None:
        try:
            conclude(run)
        finally:
            self._bench.end(run)


def _task(coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, eager_start=True)
    return asyncio.Task(coroutine, loop=loop)
