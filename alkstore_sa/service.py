"""A worker as a process: an application found by name, signals, a scheduler beside it, exit codes."""

import atexit
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from alkstore_sa import migrate
from alkstore_sa.errors import InvalidOption, NotBound
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store
from alkstore_sa.tasks import Tasks
from alkstore_sa.worker import Worker, verified

log: Final = logging.getLogger("alkstore_sa.worker")

WORN_OUT: Final = 1
SCHEDULER_SECONDS: Final = 5.0
JOINING_SECONDS: Final = 1.0


def load_app(app: str) -> Tasks:
    """Find Tasks as `find_app` does, for what needs a Store.

    Raises:
        InvalidOption: it is not found, or is something else.
        NotBound: its tasks have no store, or an AsyncStore alone.
    """
    found = find_app(app)
    if found.store is None:
        raise NotBound(
            f"--app {app!r} is bound to an AsyncStore alone, and a worker needs a Store: bind one beside it, `tasks.bind(Store(…))`"
        )
    return found


def find_app(app: str) -> Tasks:
    """Find the bound Tasks, or the callable that returns one, that `module:attribute` names; the working directory counts.

    Raises:
        InvalidOption: it is not found, or is something else.
        NotBound: its tasks have no store of either kind.
    """
    module, colon, attribute = app.partition(":")
    if not (module and colon and attribute):
        raise InvalidOption(f"--app {app!r} is not of the form module:attribute")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise InvalidOption(f"--app {app!r}: there is no module {error.name!r} here") from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise InvalidOption(f"--app {app!r}: {step!r} is not in it")
        found = getattr(found, step)
    if callable(found) and not isinstance(found, Tasks):
        found = found()
    if not isinstance(found, Tasks):
        raise InvalidOption(f"--app {app!r} is a {type(found).__name__}, not a Tasks or a callable that returns one")
    if found.store is None and found.async_store is None:
        raise NotBound(f"--app {app!r} has no store: write `tasks.bind(store)` where it is made")
    return found


def serve(
    tasks: Tasks,
    *,
    queues: Iterable[str],
    outboxes: Iterable[str],
    concurrency: int,
    grace: float,
    max_jobs: int | None,
    upgrade: bool,
    everything: bool,
) -> int:
    """Run a worker in this process until a signal or its own end, and give the exit code. `everything`: all queues, outboxes, schedules.

    The first SIGTERM or SIGINT stops it with grace; a second one ends the process at once and releases nothing.
    """
    store = tasks.store
    if store is None:
        raise NotBound("these tasks have no store: write `tasks.bind(store)`")
    if upgrade:
        migrate.upgrade(store.engine, schema=store.parts.database.schema)
    for module in tasks.imports:
        importlib.import_module(module)
    stop = StopToken()
    _hear_signals(stop)
    chosen = list(queues)
    named = list(outboxes)
    if everything:
        chosen, named = chosen or list(tasks.queues), named or list(tasks.outboxes)
    worker = Worker(store, tasks, queues=chosen or None, outboxes=named, concurrency=concurrency, grace=grace, max_jobs=max_jobs)
    if not everything:
        return _leave(worker, stop, None)
    if not verified(store, stop):
        return 0
    return _leave(worker, stop, _Scheduler(store, stop), idle=not (chosen or named))


class _Scheduler:
    """The scheduler's loop in a thread beside the worker; if it fails, the process stops."""

    def __init__(self, store: Store, stop: StopToken) -> None:
        self._store = store
        self._stop = stop
        self.failed = False
        self.thread = threading.Thread(target=self._run, name="alkstore-scheduler", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._store.serve_schedules(self._stop)
        except Exception:
            log.exception("the scheduler failed: stopping")
            self.failed = True
            self._stop.cancel()


def _leave(worker: Worker, stop: StopToken, scheduler: _Scheduler | None, *, idle: bool = False) -> int:
    """Work to the end, and give the exit code; where threads hang, end the process here."""
    hanging = 0
    code = 0
    if idle:
        stop.wait()
    else:
        report = worker.run(stop)
        hanging = report.abandoned
        code = WORN_OUT if report.worn_out else 0
    stop.cancel()
    if scheduler is not None:
        scheduler.thread.join(SCHEDULER_SECONDS)
        hanging += scheduler.thread.is_alive()
        code = code or int(scheduler.failed)
    if hanging:
        _exit(code)
    _bound_the_exit(code)
    return code


def _exit(code: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _bound_the_exit(code: int) -> None:
    """Let Python's end wait for threads for a moment only: one that a handler gave work with `asyncio.to_thread` may be at it for long."""
    ending, joined = threading.Event(), threading.Event()
    vars(threading)["_register_atexit"](ending.set)  # run before Python joins threads, by nothing public
    atexit.register(joined.set)  # run once it has joined them

    def watch() -> None:
        ending.wait()
        if not joined.wait(JOINING_SECONDS):
            log.warning("leaving without threads that handlers have started: they do not end")
            _exit(code)

    threading.Thread(target=watch, name="alkstore-exit", daemon=True).start()


def _hear_signals(stop: StopToken) -> None:
    heard_before = False  # `stop` does not tell: a scheduler that failed cancels it too

    def heard(number: int, _frame: FrameType | None) -> None:
        nonlocal heard_before
        if heard_before:
            os._exit(128 + number)
        heard_before = True
        stop.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heard)
