"""The same helpers for tests on a running event loop: an AsyncStore, in the transaction of an AsyncSession or AsyncConnection.

Nothing is decided here: each crosses the bridge to the blocking helper of its name.
"""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from alkstore_sa import aio_handles
from alkstore_sa._options import Duration
from alkstore_sa.aio import AsyncStore
from alkstore_sa.aio_handles import AsyncTx
from alkstore_sa.bridge import across, interruptible
from alkstore_sa.errors import NotBound
from alkstore_sa.records import Job
from alkstore_sa.seam import Tx
from alkstore_sa.store import Store
from alkstore_sa.task import Task
from alkstore_sa.tasks import AsyncSessionFactory, Tasks
from alkstore_sa.testing import asserting, clock
from alkstore_sa.testing.joining import connection_for, refuse_unjoinable
from alkstore_sa.testing.running import Errors, Lender, RanJob, join_session, settled_runs

__all__ = ["RanJob", "advance", "assert_enqueued", "joined", "run_due"]

S = TypeVar("S", AsyncStore, Store)


@asynccontextmanager
async def joined(store: S, session_or_connection: AsyncTx) -> AsyncIterator[S]:
    """Let every verb of `store` run inside the given transaction, as `alkstore_sa.testing.joined` does, for this asyncio task.

    Tasks that are started inside the block join too, and it is one connection: let them not use it at the same time. A Store beside the
    AsyncStore is joined by a call of its own; its verbs are for blocking code across the bridge then, as `run_due` calls sync handlers.

    Raises:
        TypeError: it is no AsyncSession, async_scoped_session or AsyncConnection.
        InvalidOption: as for `alkstore_sa.testing.joined`.
    """
    beneath = _beneath(store)

    def checked(tx: Tx) -> Tx:
        refuse_unjoinable(tx, beneath)
        return tx

    tx = await aio_handles.joined(session_or_connection, checked)
    with beneath.parts.database.joining(lambda: connection_for(tx)):
        yield store


async def run_due(tasks: Tasks, limit: int = 1000, errors: Errors = "raise") -> list[RanJob]:
    """Run what is due in the AsyncStore of `tasks`, as `alkstore_sa.testing.run_due` does, on the running loop.

    Async handlers run on it; an AsyncSession is on the joined connection, or on the registry's `async_engine` (default: the store's).
    Sync handlers run in its thread, which they block, and a Session is on the joined connection as well. A JobHandle's own verbs are
    blocking, and so for sync handlers alone.

    Raises:
        InvalidOption: as for `alkstore_sa.testing.run_due`, but that both kinds of sessions join.
        NotBound: the tasks have no AsyncStore.
    """
    store = tasks.async_store
    if store is None:
        raise NotBound("these tasks have no AsyncStore yet: write `tasks.bind(AsyncStore(…))` first")
    return await across(settled_runs, tasks, store.beneath, _RunningLoop(store, tasks.async_engine), limit, errors)


async def assert_enqueued(session_or_store: AsyncStore | AsyncTx, task: Task[..., Any], /, **kwargs: Any) -> Job:
    """Assert that a job of `task` is stored whose arguments are the given ones, as `alkstore_sa.testing.assert_enqueued` does."""
    if isinstance(session_or_store, AsyncStore):
        return await across(partial(asserting.assert_enqueued, session_or_store.beneath, task, **kwargs))
    return await aio_handles.joined(session_or_store, lambda tx: asserting.assert_enqueued(tx, task, **kwargs))


async def advance(store: AsyncStore, delta: Duration) -> None:
    """Let `delta` pass for everything that is stored, as `alkstore_sa.testing.advance` does."""
    await across(clock.advance, store.beneath, delta)


class _RunningLoop:
    """The loop that the test runs on, seen from blocking code across the bridge."""

    def __init__(self, store: AsyncStore, engine: AsyncEngine | None) -> None:
        self._engine: Final = store.engine.sync_engine
        self._made: Final = async_sessionmaker(engine or store.engine)

    def sessions(self, lender: Lender | None) -> AsyncSessionFactory | None:
        """Give sessions on the joined connection, else on the engine."""
        return self._made if lender is None else partial(self._joined, lender)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Await a coroutine."""
        interruptible(lambda: coroutine)

    def _joined(self, lender: Lender) -> AsyncSession:
        session = self._made()
        join_session(session.sync_session, self._engine, lender)
        return session


def _beneath(store: AsyncStore | Store) -> Store:
    return store.beneath if isinstance(store, AsyncStore) else store
