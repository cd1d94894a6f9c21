"""The two sides that a call of the core may come from: a thread of its own, or an event loop across SQLAlchemy's greenlet bridge.

The core is written once, as blocking code. Where it lets time pass, it asks here which side it is on, so that a loop goes on turning.
What belongs here: crossing, waiting, and being cancelled while across. What does not: statements, connections, latches.
"""

import asyncio
import contextvars
import importlib.util
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import concurrency

from alkstore_sa.errors import AlkstoreError

P = ParamSpec("P")
R = TypeVar("R")

GRACE_SECONDS: Final = 3.0  # for what is under way when the caller is cancelled: a statement, or a delivery that cleans up
LAST_SECONDS: Final = 2.0  # for giving back what is held, after that was cut off

_HAS_GREENLET: Final = importlib.util.find_spec("greenlet") is not None
_CROSSING: Final[contextvars.ContextVar["Crossing | None"]] = contextvars.ContextVar("alkstore_crossing", default=None)


def on_loop() -> bool:
    """Tell whether this is blocking code that an event loop runs across the bridge."""
    return _HAS_GREENLET and bool(concurrency.in_greenlet())


def pause(seconds: float) -> None:
    """Let time pass, for this call alone."""
    if on_loop():
        interruptible(lambda: asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def interruptible(awaited: Callable[[], Awaitable[R]]) -> R:
    """Await, from blocking code across the bridge, what `awaited` gives; a cancellation of the caller's may strike here."""
    crossing = _CROSSING.get()
    return concurrency.await_only(awaited()) if crossing is None else crossing.wait(awaited)


async def across(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run blocking code of the core on the running loop; a cancellation strikes wherever it is, and costs the connection."""
    return await concurrency.greenlet_spawn(partial(function, *args, **kwargs))


class Crossing:
    """One call across the bridge whose caller may be cancelled without harm: the call then ends at a place of its own choosing.

    It runs in a task of its own. A cancellation strikes it where it waits, never in the middle of a transaction; it has 5 s to give
    back what it holds, however often its caller is cancelled meanwhile, and is cut off after that.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._pending = False
        self._waiting: asyncio.Future[Any] | None = None

    async def run(self, function: Callable[[], R], undo: Callable[[R], object] | None = None) -> R:
        """Run `function`; where the caller is cancelled, `undo` is given the result that nobody will take."""
        task = _task(self._entered(function))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await self._leave(task, undo)
            raise

    def wait(self, awaited: Callable[[], Awaitable[R]]) -> R:
        """Await, from within, what may be interrupted."""
        self._strike()
        context = contextvars.copy_context()
        context.run(_CROSSING.set, None)
        self._waiting = future = asyncio.get_running_loop().create_task(_awaited(awaited), context=context)
        try:
            return concurrency.await_only(future)
        except asyncio.CancelledError:
            self._pending = False
            future.cancel()
            raise
        finally:
            self._waiting = None

    def interrupt(self) -> None:
        """Strike the call where it waits, or where it waits next."""
        self.interrupted = self._pending = True
        if self._waiting is not None:
            self._waiting.cancel()

    def acknowledge(self) -> bool:
        """Tell whether the caller was cancelled; whoever is told so ends by itself, and is not struck any more."""
        if self.interrupted:
            self._pending = False
        return self.interrupted

    def _strike(self) -> None:
        if self._pending:
            self._pending = False
            raise asyncio.CancelledError

    async def _entered(self, function: Callable[[], R]) -> R:
        _CROSSING.set(self)
        return await concurrency.greenlet_spawn(function)

    async def _leave(self, task: "asyncio.Task[R]", undo: Callable[[R], object] | None) -> None:
        cut_off = asyncio.get_running_loop().time() + GRACE_SECONDS
        if not task.done():
            self.interrupt()
            await _until(task, cut_off)
        if not task.done():
            task.cancel()
            await _until(task, cut_off + LAST_SECONDS)
        if task.done() and not task.cancelled() and task.exception() is None and undo is not None:
            await _until(_task(_undone(undo, task.result())), cut_off + LAST_SECONDS)


_KEPT: Final[set["asyncio.Task[Any]"]] = set()  # a loop holds its tasks weakly, and one that was cut off may still have to end


def _task(coroutine: Coroutine[Any, Any, R]) -> "asyncio.Task[R]":
    task = asyncio.get_running_loop().create_task(coroutine)
    _KEPT.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: "asyncio.Task[Any]") -> None:
    _KEPT.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that nothing is said of an error which its caller was cancelled too early to see


async def _awaited(awaited: Callable[[], Awaitable[R]]) -> R:
    return await awaited()


async def _undone(undo: Callable[[R], object], result: R) -> None:
    with suppress(SQLAlchemyError, AlkstoreError, OSError):  # what cannot be given back now ends by its own time
        await concurrency.greenlet_spawn(undo, result)


async def _until(task: "asyncio.Task[Any]", end: float) -> None:
    loop = asyncio.get_running_loop()
    while not task.done() and (left := end - loop.time()) > 0:
        with suppress(asyncio.CancelledError):  # the first cancellation is passed on by the caller; a second one must not cut this short
            await asyncio.wait({task}, timeout=left)


class Beside(Protocol):
    """Something of ours that runs beside its caller."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        ...

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end."""
        ...


class BesideInThread:
    """Runs beside in a daemon thread."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._thread = threading.Thread(target=function, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(seconds)


class BesideOnLoop:
    """Runs beside as a task of the loop that the caller is on."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        context.run(_CROSSING.set, None)
        self._task = self._loop.create_task(concurrency.greenlet_spawn(function), name=name, context=context)
        self._task.add_done_callback(_forget)

    @property
    def running(self) -> bool:
        """Whether the task has not ended, nor its loop."""
        return not self._task.done() and not self._loop.is_closed()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the task's end, unless it belongs to another loop."""
        if self.running and on_loop() and asyncio.get_running_loop() is self._loop:
            concurrency.await_only(asyncio.wait({self._task}, timeout=seconds))
