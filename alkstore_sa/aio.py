"""The store on an event loop: every verb of `Store` as a coroutine over the very same core.

What belongs here: which verb is awaited, and how. What does not: anything that `Store` decides already.
"""

import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from datetime import datetime
from typing import Final, Self, TypeVar, Unpack

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from alkstore_sa._options import Duration, EnqueueOptions, Stamps
from alkstore_sa._payload import Codec, Payload
from alkstore_sa.aio_handles import AsyncLease, AsyncOutbox, AsyncQueue, AsyncTx, joined
from alkstore_sa.aio_jobs import Halting
from alkstore_sa.bridge import Crossing, across
from alkstore_sa.bridged import BridgedDatabase, JoiningDatabase, async_engine_for
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption
from alkstore_sa.locks import Lease
from alkstore_sa.records import Fire, Job, JobState, LockInfo, QueueStats, Schedule, TickReport, WorkerInfo
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store

T = TypeVar("T")


class AsyncStore:
    """Durable queues and outboxes as tables in the database of an asynchronous application; `Store` says what each verb does.

    `bind` is the application's AsyncEngine, or a URL, for which one is made; psycopg, asyncpg and aiosqlite are its drivers. The verbs
    with `_tx` take an AsyncSession, async_scoped_session or AsyncConnection. `sync` is the blocking surface for `run_sync`, which has
    the verbs with `_tx` alone. For one event loop at a time, like the engine. Making a store opens no connection.

    Raises:
        InvalidOption: as for `Store`; a driver that blocks; `greenlet` is not installed.
    """

    engine: AsyncEngine
    sync: Store

    def __init__(
        self, bind: AsyncEngine | URL | str, *, schema: str | None = None, codec: Codec | None = None, wake: bool = True, poll: Duration = 5
    ) -> None:
        self.engine, owned = _engine(bind)
        self._store: Final[Store] = _Over(BridgedDatabase(self.engine, schema=schema, owned=owned), codec=codec, wake=wake, poll=poll)
        self.sync = _Over(JoiningDatabase(self.engine, schema=schema, owned=False), codec=codec, wake=wake, poll=poll)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop waiting, refuse every later call with `StoreClosed`, and dispose of what the store made itself."""
        self.sync.parts.database.refuse_later_calls()
        await across(self._store.close)

    @asynccontextmanager
    async def begin(self, *, single: bool = False) -> AsyncIterator[AsyncConnection]:
        """Give a connection in a transaction of the store's own, or in autocommit where `single`. As `Store.begin`."""
        async with _entered(self._store.begin(single=single)) as connection:
            yield AsyncConnection(self.engine, connection)

    @property
    def beneath(self) -> Store:
        """The store whose verbs these are, only to be called across the bridge: for the rooms above."""
        return self._store

    async def verify(self) -> None:
        """Inspect the database. As `Store.verify`."""
        await across(self._store.verify)

    # -- queues -----------------------------------------------------------------------------------------------------

    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration | None = None,
        max_attempts: int | None = None,
        base_backoff: Duration | None = None,
    ) -> AsyncQueue:
        """Give a handle on the queue `name`, without a round trip. As `Store.queue`."""
        return AsyncQueue(
            self._store.queue(name, visibility_timeout=visibility_timeout, max_attempts=max_attempts, base_backoff=base_backoff)
        )

    async def enqueue(self, queue: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job and return its id. As `Queue.enqueue`."""
        return await across(self._store.enqueue, queue, payload, **options)

    async def enqueue_tx(self, tx: AsyncTx, queue: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job through the caller's transaction and return its id. As `Queue.enqueue_tx`."""
        return await joined(tx, self._store.enqueue_tx, queue, payload, **options)

    async def get_job(self, job_id: int) -> Job | None:
        """Picture a job, live or dead. As `Store.get_job`."""
        return await across(self._store.get_job, job_id)

    async def jobs(
        self,
        *,
        queue: str | None = None,
        state: JobState | None = None,
        task: str | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> Sequence[Job]:
        """Picture jobs, live and dead, by ascending id. As `Store.jobs`."""
        return await across(self._store.jobs, queue=queue, state=state, task=task, limit=limit, after=after)

    async def cancel(self, job_id: int) -> bool:
        """Remove a live job, whoever holds it. As `Store.cancel`."""
        return await across(self._store.cancel, job_id)

    async def queues(self) -> Sequence[QueueStats]:
        """Count the jobs of every queue that has any, by state. As `Store.queues`."""
        return await across(self._store.queues)

    async def workers(self) -> Sequence[WorkerInfo]:
        """List the workers as they showed themselves last. As `Store.workers`."""
        return await across(self._store.workers)

    async def pause_queue(self, name: str) -> bool:
        """Let workers claim nothing more from the queue. As `Store.pause_queue`."""
        return await across(self._store.pause_queue, name)

    async def resume_queue(self, name: str) -> bool:
        """Let workers claim from the queue again. As `Store.resume_queue`."""
        return await across(self._store.resume_queue, name)

    async def pause_outbox(self, name: str) -> bool:
        """Let workers deliver nothing more of the outbox. As `Store.pause_outbox`."""
        return await across(self._store.pause_outbox, name)

    async def resume_outbox(self, name: str) -> bool:
        """Let workers deliver the outbox again. As `Store.resume_outbox`."""
        return await across(self._store.resume_outbox, name)

    async def paused_queues(self) -> Mapping[str, datetime]:
        """Tell which queues are paused, and since when. As `Store.paused_queues`."""
        return await across(self._store.paused_queues)

    # -- locks ------------------------------------------------------------------------------------------------------

    async def try_lock(self, name: str, ttl: Duration = 60, *, owner: str | None = None) -> AsyncLease | None:
        """Take the lock `name` if it is free or lapsed; None: somebody else has it. As `Store.try_lock`."""
        lease = await Crossing().run(lambda: self._store.try_lock(name, ttl, owner=owner), _free)
        return None if lease is None else AsyncLease(lease)

    def lock(
        self, name: str, ttl: Duration = 60, *, owner: str | None = None, wait: Duration = 0, keep_alive: bool = False
    ) -> AbstractAsyncContextManager[AsyncLease]:
        """Hold the lock `name` for the length of an `async with` body. As `Store.lock`; `keep_alive` renews it by a task of the loop."""
        return _leased(self._store.lock(name, ttl, owner=owner, wait=wait, keep_alive=keep_alive))

    async def locks(self) -> Sequence[LockInfo]:
        """List the locks that somebody holds. As `Store.locks`."""
        return await across(self._store.locks)

    # -- scheduler --------------------------------------------------------------------------------------------------

    async def schedule(
        self,
        name: str,
        spec: str,
        queue: str,
        payload: Payload = None,
        *,
        priority: int = 0,
        max_attempts: int | None = None,
        expires: Duration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Schedule:
        """Register the schedule `name`, or change it. As `Store.schedule`."""
        return await across(
            self._store.schedule,
            name,
            spec,
            queue,
            payload,
            priority=priority,
            max_attempts=max_attempts,
            expires=expires,
            headers=headers,
        )

    async def stamped_schedule(
        self,
        name: str,
        spec: str,
        queue: str,
        payload: Payload,
        stamps: Stamps,
        *,
        task: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> Schedule:
        """Register a schedule whose jobs are of `task` and stamped as given: for the rooms above."""
        return await across(self._store.stamped_schedule, name, spec, queue, payload, stamps, task=task, **options)

    async def unschedule(self, name: str) -> bool:
        """Forget the schedule. As `Store.unschedule`."""
        return await across(self._store.unschedule, name)

    async def pause_schedule(self, name: str) -> bool:
        """Stop the schedule from firing until it is resumed. As `Store.pause_schedule`."""
        return await across(self._store.pause_schedule, name)

    async def resume_schedule(self, name: str) -> bool:
        """Let a paused schedule fire again. As `Store.resume_schedule`."""
        return await across(self._store.resume_schedule, name)

    async def schedules(self) -> Sequence[Schedule]:
        """Picture the schedules, by name. As `Store.schedules`."""
        return await across(self._store.schedules)

    async def schedule_history(self, name: str, *, limit: int = 100) -> Sequence[Fire]:
        """List what became of a schedule's boundaries, newest first. As `Store.schedule_history`."""
        return await across(self._store.schedule_history, name, limit=limit)

    async def tick(self) -> TickReport:
        """Fire what is due now, once, without leadership. As `Store.tick`."""
        return await across(self._store.tick)

    async def run_schedules(self, stop: StopToken) -> None:
        """Lead the scheduler until `stop` is cancelled. As `Store.run_schedules`; cancelled itself, it gives the leadership back first."""
        crossing = Crossing()
        await crossing.run(lambda: self._store.run_schedules(Halting(stop, crossing)))

    async def serve_schedules(self, stop: StopToken) -> None:
        """Lead the scheduler whenever no other process does. As `Store.serve_schedules`; a cancellation is as that of `run_schedules`."""
        crossing = Crossing()
        await crossing.run(lambda: self._store.serve_schedules(Halting(stop, crossing)))

    # -- outbox -----------------------------------------------------------------------------------------------------

    def outbox(self, name: str) -> AsyncOutbox:
        """Give a handle on the outbox `name`, without a round trip. As `Store.outbox`."""
        return AsyncOutbox(self._store.outbox(name))

    async def outbox_enqueue_tx(self, tx: AsyncTx, outbox: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a message through the caller's transaction and return its id. As `Outbox.enqueue_tx`."""
        return await joined(tx, self._store.outbox_enqueue_tx, outbox, payload, **options)

    def stamped_queue(self, name: str, stamps: Stamps, *, task: str | None = None) -> AsyncQueue:
        """Give a handle on a queue whose jobs are of `task` and stamped as given: for the rooms above."""
        return AsyncQueue(self._store.stamped_queue(name, stamps, task=task))


class _Over(Store):
    """A store over a database that was made before."""

    def __init__(self, database: Database, *, codec: Codec | None, wake: bool, poll: Duration) -> None:
        self._made = database
        super().__init__(database.engine, schema=database.schema, codec=codec, wake=wake, poll=poll)

    def _opened(self, bind: Engine | URL | str, schema: str | None) -> Database:
        del bind, schema
        return self._made


def _engine(bind: AsyncEngine | URL | str) -> tuple[AsyncEngine, bool]:
    if importlib.util.find_spec("greenlet") is None:
        raise InvalidOption("an AsyncStore needs greenlet: pip install 'alkstore-sa[asyncio]'")
    if isinstance(bind, AsyncEngine):
        return bind, False
    if not isinstance(bind, (str, URL)):
        raise TypeError(f"{type(bind).__name__} is no AsyncEngine or database URL; for an Engine use a Store")
    return async_engine_for(bind), True


@asynccontextmanager
async def _entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave across the bridge; a cancellation in between leaves first, and takes at most 5 s."""
    value = await Crossing().run(manager.__enter__, lambda _value: manager.__exit__(None, None, None))
    try:
        yield value
    except BaseException as error:
        failure = error
        if not await Crossing().run(lambda: manager.__exit__(type(failure), failure, failure.__traceback__)):
            raise
    else:
        await Crossing().run(lambda: manager.__exit__(None, None, None))


@asynccontextmanager
async def _leased(manager: AbstractContextManager[Lease]) -> AsyncIterator[AsyncLease]:
    async with _entered(manager) as lease:
        yield AsyncLease(lease)


def _free(lease: Lease | None) -> None:
    if lease is not None:
        lease.release()
