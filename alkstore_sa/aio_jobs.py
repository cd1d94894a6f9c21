"""The loop over a queue's jobs on an event loop, and the token by which a cancelled caller ends a loop of the core."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from alkstore_sa.bridge import Crossing
from alkstore_sa.handles import JobHandle, Queue
from alkstore_sa.stop import StopToken, wait_for

H = TypeVar("H")


class Halting(StopToken):
    """The application's token to a loop of the core; cancelled, too, once the call across the bridge was."""

    def __init__(self, stop: StopToken, crossing: Crossing) -> None:  # no latch of its own: it waits for the application's
        self._stop = stop
        self._crossing = crossing

    @property
    def cancelled(self) -> bool:
        """Whether either was."""
        return self._stop.cancelled or self._crossing.acknowledge()

    def cancel(self) -> None:
        """Cancel the application's token."""
        self._stop.cancel()

    def fileno(self) -> int:
        """Give the descriptor of the application's token."""
        return self._stop.fileno()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as the application's token does."""
        if not self.cancelled:
            wait_for((self,), timeout)
        return self.cancelled


class AsyncJobs(AsyncIterator[H], Generic[H]):
    """Yields a queue's jobs as they can be claimed. Ended by its token, a cancellation, or `aclose()`, it keeps no claim."""

    def __init__(self, queue: Queue, worker_id: str, stop: StopToken, made: Callable[[JobHandle], H]) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._stop = stop
        self._made = made
        self._crossing: Crossing | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def __anext__(self) -> H:
        if self._closed:
            raise StopAsyncIteration
        if self._crossing is not None:
            raise RuntimeError("this iterator is waited for already: each consumer needs jobs() of its own")
        self._crossing = crossing = Crossing()
        self._idle.clear()
        try:
            job = await crossing.run(lambda: self._next(crossing), _give_one_back)
            if job is not None and self._closed:
                await Crossing().run(lambda: _give_one_back(job))
                job = None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            job = None
        finally:
            self._crossing = None
            self._idle.set()
        if job is None:
            self._closed = True
            raise StopAsyncIteration
        return self._made(job)

    async def aclose(self) -> None:
        """End, at once where it waits, and give back a claim that was not yet yielded."""
        self._closed = True
        if self._crossing is not None:
            self._crossing.interrupt()
            await self._idle.wait()

    def _next(self, crossing: Crossing) -> JobHandle | None:
        return next(self._queue.jobs(self._worker_id, Halting(self._stop, crossing)), None)


def give_back(jobs: Sequence[JobHandle]) -> None:
    """Give back claims that nobody will see."""
    for job in jobs:
        job.release()


def _give_one_back(job: JobHandle | None) -> None:
    if job is not None:
        job.release()
