"""FastAPI and Starlette: a lifespan that serves schedules and runs a worker beside the application, and the store as a dependency.

What belongs here: starting and stopping with the server. What does not: verbs, and anything that one framework alone has.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any, Final, cast

from alkstore_sa.aio import AsyncStore
from alkstore_sa.errors import NotBound, SchemaMissing
from alkstore_sa.patience import Patience
from alkstore_sa.stop import StopToken
from alkstore_sa.worker import Worker

try:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection
except ImportError as error:
    raise ImportError("alkstore_sa.fastapi needs FastAPI or Starlette: pip install 'alkstore-sa[fastapi]'") from error

log: Final = logging.getLogger(__name__)

STATE: Final = "alkstore"
CLOSING_SECONDS: Final = 5.0
GRACE_SECONDS: Final = 2.0  # breaking handlers off takes up to two seconds more, and then their jobs are given back
_LOOK_SECONDS: Final = 0.02


def lifespan(
    store: AsyncStore, *, serve_schedules: bool = False, worker: Worker | None = None
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Make the `lifespan=` of an application: `running` for as long as the server runs."""

    def live(app: Starlette) -> AbstractAsyncContextManager[None]:
        return running(app, store, serve_schedules=serve_schedules, worker=worker)

    return live


@asynccontextmanager
async def running(app: Starlette, store: AsyncStore, *, serve_schedules: bool = False, worker: Worker | None = None) -> AsyncIterator[None]:
    """Give the application the store, and run beside it what is asked for; for the lifespan of an application that has one already.

    `serve_schedules`: stand by for the scheduler, of which one process of all leads. `worker`: run it in a daemon thread, for small
    deployments; it has a blocking Store of its own, and its handlers have at most 2 s of its grace to end, so that it has time to give
    back the jobs of the others. Both wait for tables that are not there yet. Leaving stops both, waits for at most 5 s, and closes the
    store. Starts nothing else, and handles no signals.
    """
    setattr(app.state, STATE, store)
    stop = StopToken()
    schedules = asyncio.create_task(_serve(store, stop)) if serve_schedules else None
    thread = None
    if worker is not None:
        thread = threading.Thread(target=_work, args=(_hurried(worker), stop), name="alkstore-worker", daemon=True)
        thread.start()
    try:
        yield
    finally:
        stop.cancel()
        await _ended(schedules, thread)
        await store.close()


def store_of(connection: HTTPConnection) -> AsyncStore:
    """Give the store of the application that a request or websocket belongs to: for `Depends(store_of)`.

    Raises:
        NotBound: the application does not run in a `lifespan` of ours.
    """
    store = getattr(connection.app.state, STATE, None)
    if store is None:
        raise NotBound("this application has no store: make it with `lifespan=alkstore_sa.fastapi.lifespan(store)`")
    return cast(AsyncStore, store)


async def _serve(store: AsyncStore, stop: StopToken) -> None:
    patience = Patience(stop)
    while not stop.cancelled:
        try:
            await store.serve_schedules(stop)
        except SchemaMissing as error:  # an application may be started before it is migrated
            await stop.wait_async(patience.failed(error))
        except Exception:
            log.exception("the scheduler failed; other processes may serve the schedules")
            return


def _hurried(worker: Worker) -> Worker:
    """Give the same worker with a grace that leaves it time to give back what it holds before the server ends."""
    hurried = copy(worker)
    hurried._grace = min(worker._grace, GRACE_SECONDS)  # noqa: SLF001 - a copy that nobody has seen yet
    return hurried


def _work(worker: Worker, stop: StopToken) -> None:
    patience = Patience(stop)
    while not stop.cancelled:
        try:
            worker.run(stop)
        except SchemaMissing as error:
            patience.outlast(error)
        except Exception:
            log.exception("the worker failed; its jobs wait for other workers")
            return
        else:
            return


async def _ended(schedules: "asyncio.Task[Any] | None", thread: threading.Thread | None) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + CLOSING_SECONDS
    if schedules is not None:
        await asyncio.wait({schedules}, timeout=CLOSING_SECONDS)
        schedules.cancel()
    while thread is not None and thread.is_alive() and loop.time() < end:  # noqa: ASYNC110 - a thread has no event to await
        await asyncio.sleep(_LOOK_SECONDS)
    if thread is not None and thread.is_alive():
        log.warning("the worker has not ended in time: what it still holds lapses, and another worker takes it")
