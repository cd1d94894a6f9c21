"""The token that stops a loop, and the one way in which this library waits: for a token, a wake or a deadline, whichever is first.

A latch is a pair of sockets of which one becomes readable and stays so: it can be waited for together with other latches, by threads
and by event loops, and it can be set inside a signal handler, where the lock of an Event might be held already.
"""

import asyncio
import os
import selectors
import signal
import socket
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

from alkstore_sa.bridge import interruptible, on_loop

LONGEST_SLEEP: Final = 86_400.0  # seconds; a selector takes no more


class Latch:
    """Set once, readable until cleared. Each process has its own: a forked child never touches its parent's."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._pair = socket.socketpair()
        for end in self._pair:
            end.setblocking(False)
        self._end = weakref.finalize(self, _close, self._pair)  # in a dropped cycle a socket could be finalized before its latch
        self._end.atexit = False

    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        if self._pid != os.getpid():
            self.close()  # a child closes its copies; the parent's stay open
            self._open()
        return self._pair

    def fileno(self) -> int:
        """Give the descriptor that is readable once the latch is set."""
        return self._sockets()[0].fileno()

    def set(self) -> None:
        """Make the latch readable; safe in any thread, in a signal handler, and any number of times."""
        with suppress(OSError):  # full, so set already
            self._sockets()[1].send(b"\0")

    def clear(self) -> bool:
        """Make the latch unreadable until it is set again; return whether it was set."""
        was_set = False
        with suppress(BlockingIOError):
            while self._sockets()[0].recv(4096):
                was_set = True
        return was_set

    def close(self) -> None:
        """Close both sockets."""
        self._end()


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        end.close()


class StopToken:
    """Tells a loop to stop. Thread-safe; once cancelled it stays so."""

    def __init__(self) -> None:
        self._cancelled = False
        self._latch = Latch()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel; never blocks, and may be called in a signal handler."""
        self._cancelled = True
        self._latch.set()

    def fileno(self) -> int:
        """Give a descriptor that is readable once the token is cancelled, for `select` and its kin."""
        if self._cancelled:
            self._latch.set()  # in a forked child the latch is a new one
        return self._latch.fileno()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the token is cancelled or `timeout` seconds passed; return whether it is cancelled."""
        if not self._cancelled:
            wait_for((self,), timeout)
        return self._cancelled

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Wait as `wait` does without blocking the running event loop."""
        if self._cancelled:
            return True
        await readable((self,), timeout)
        return self._cancelled

    def on_signals(self, *signals: int) -> "StopToken":
        """Cancel at any of `signals` (by default SIGTERM and SIGINT), and return the token.

        Main thread only; never inside a web server, whose own handlers this would replace. The handler sets an attribute and writes a
        byte, nothing else.
        """
        for number in signals or (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.cancel())
        return self


class Waitable(Protocol):
    """Anything with a descriptor that becomes readable."""

    def fileno(self) -> int:
        """Give the descriptor."""
        ...


def wait_for(waitables: Iterable[Waitable], timeout: float | None) -> bool:
    """Block until one of `waitables` is readable or `timeout` seconds passed; return whether one is readable.

    Across SQLAlchemy's bridge it is the call that blocks, not the event loop.
    """
    if on_loop():
        return interruptible(lambda: readable(waitables, timeout))
    with selectors.DefaultSelector() as selector:
        for waitable in waitables:
            selector.register(waitable.fileno(), selectors.EVENT_READ)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if selector.select(None if left is None else min(left, LONGEST_SLEEP)):
                return True
            if left is not None and left <= 0:
                return False


async def readable(waitables: Iterable[Waitable], timeout: float | None) -> bool:
    """Wait as `wait_for` does without blocking the running event loop."""
    loop = asyncio.get_running_loop()
    one = asyncio.Event()
    duplicates = [os.dup(waitable.fileno()) for waitable in waitables]  # a loop takes one reader per descriptor, and others may wait too
    for duplicate in duplicates:
        loop.add_reader(duplicate, one.set)
    try:
        await asyncio.wait_for(one.wait(), None if timeout is None or timeout > LONGEST_SLEEP else max(0.0, timeout))
    except TimeoutError:
        return False
    finally:
        for duplicate in duplicates:
            loop.remove_reader(duplicate)
            os.close(duplicate)
    return True
