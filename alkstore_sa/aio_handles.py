"""Queues, claims, leases and outboxes as an asynchronous application holds them: each verb is the core's own, run across the bridge.

What belongs here: awaiting, and who is given what. What does not: anything that the blocking handles decide already.
"""

import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar, Unpack

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from alkstore_sa._options import Duration, EnqueueOptions
from alkstore_sa._payload import Payload
from alkstore_sa.aio_jobs import AsyncJobs, Halting, give_back
from alkstore_sa.bridge import Crossing, across, interruptible
from alkstore_sa.deliveries import Delivery, Outbox
from alkstore_sa.handles import JobHandle, Queue
from alkstore_sa.locks import Lease
from alkstore_sa.records import Job
from alkstore_sa.stop import StopToken

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

AsyncTx: TypeAlias = AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection
"""What an asynchronous application brings its open transaction in."""


async def joined(tx: AsyncTx, verb: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a verb with `_tx` in an asynchronous caller's transaction.

    Raises:
        TypeError: `tx` is no AsyncSession, async_scoped_session or AsyncConnection.
    """
    bind = tx() if isinstance(tx, async_scoped_session) else tx
    if not isinstance(bind, (AsyncSession, AsyncConnection)):
        kind = type(tx).__name__
        raise TypeError(f"{kind} is no AsyncSession, async_scoped_session or AsyncConnection: a synchronous one is for a Store's verbs")
    return await bind.run_sync(verb, *args, **kwargs)


class _Field(Generic[T]):
    """A field of the handle beneath, as it is now."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = getattr(instance.handle, self._name)
        return value


class AsyncJobHandle:
    """A claim, as `JobHandle` is one; its verbs are coroutines."""

    __slots__ = ("handle",)

    id = _Field[int]()
    fence = _Field[int]()
    queue = _Field[str]()
    worker_id = _Field[str]()
    attempts = _Field[int]()
    max_attempts = _Field[int]()
    priority = _Field[int]()
    enqueued_at = _Field[datetime]()
    claim_expires_at = _Field[datetime]()
    visibility_timeout = _Field[timedelta]()
    task = _Field[str | None]()
    headers = _Field[Mapping[str, str]]()
    schedule = _Field[str | None]()
    scheduled_for = _Field[datetime | None]()
    last_error = _Field[str | None]()
    settled = _Field[bool]()
    buried = _Field[bool]()
    lost = _Field[threading.Event]()
    payload = _Field[Payload]()

    def __init__(self, handle: JobHandle) -> None:
        self.handle: Final = handle

    def __repr__(self) -> str:
        return f"<Async{repr(self.handle)[1:]}"

    async def ack(self) -> bool:
        """Delete the job, which is done. As `JobHandle.ack`."""
        return await across(self.handle.ack)

    async def ack_tx(self, tx: AsyncTx) -> None:
        """Delete the job inside the caller's transaction. As `JobHandle.ack_tx`."""
        await joined(tx, self.handle.ack_tx)

    async def retry(self, error: str | BaseException, delay: Duration | None = None) -> bool:
        """Put the job back with `error`, to run again later. As `JobHandle.retry`."""
        return await across(self.handle.retry, error, delay)

    async def fail(self, error: str | BaseException) -> bool:
        """Send the job to the dead at once. As `JobHandle.fail`."""
        return await across(self.handle.fail, error)

    async def release(self, delay: Duration | None = None, error: str | BaseException | None = None) -> bool:
        """Give the job back, its attempt uncounted. As `JobHandle.release`."""
        return await across(self.handle.release, delay, error)

    async def heartbeat(self, ttl: Duration | None = None) -> bool:
        """Move the claim's end. As `JobHandle.heartbeat`."""
        return await across(self.handle.heartbeat, ttl)


AsyncDelivery: TypeAlias = Callable[[AsyncJobHandle], Awaitable[None]]
"""What delivers a message of an outbox; it is awaited."""


class _Shared:
    """The verbs that a queue and an outbox share."""

    def __init__(self, beneath: Queue | Outbox) -> None:
        self._beneath: Final = beneath

    async def enqueue(self, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job and return its id; committed when this returns. As `Queue.enqueue`."""
        return await across(self._beneath.enqueue, payload, **options)

    async def enqueue_tx(self, tx: AsyncTx, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job through the caller's transaction and return its id. As `Queue.enqueue_tx`."""
        return await joined(tx, self._beneath.enqueue_tx, payload, **options)

    async def enqueue_many(self, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a job for each payload, all or none. As `Queue.enqueue_many`."""
        return await across(self._beneath.enqueue_many, payloads, **options)

    async def enqueue_many_tx(self, tx: AsyncTx, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a job for each payload through the caller's transaction. As `Queue.enqueue_many_tx`."""
        return await joined(tx, self._beneath.enqueue_many_tx, payloads, **options)

    async def dead(self, *, limit: int = 100, after: int | None = None) -> Sequence[Job]:
        """List the dead jobs by ascending id. As `Queue.dead`."""
        return await across(self._beneath.dead, limit=limit, after=after)

    async def replay(self, job_id: int) -> bool:
        """Bring a dead job back. As `Queue.replay`."""
        return await across(self._beneath.replay, job_id)

    async def replay_all(self, *, limit: int | None = None) -> int:
        """Bring dead jobs back. As `Queue.replay_all`."""
        return await across(self._beneath.replay_all, limit=limit)

    async def purge_dead(self, *, older_than: Duration) -> int:
        """Delete old dead jobs. As `Queue.purge_dead`."""
        return await across(self._beneath.purge_dead, older_than=older_than)


class AsyncQueue(_Shared):
    """A queue by name, as `Queue` is one; its verbs are coroutines. For one event loop at a time."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self.name: Final = queue.name
        self._queue: Final = queue

    async def claim(self, worker_id: str, limit: int = 1) -> list[AsyncJobHandle]:
        """Claim up to `limit` jobs. As `Queue.claim`; cancelled, it gives back what it claimed."""
        return [AsyncJobHandle(job) for job in await Crossing().run(lambda: self._queue.claim(worker_id, limit), give_back)]

    async def claim_one(self, worker_id: str) -> AsyncJobHandle | None:
        """Claim one job, or None where there is none."""
        claimed = await self.claim(worker_id)
        return claimed[0] if claimed else None

    async def ack_many(self, jobs: Iterable[AsyncJobHandle]) -> int:
        """Delete the jobs whose claims still stand, in one statement. As `Queue.ack_many`."""
        return await across(self._queue.ack_many, [job.handle for job in jobs])

    async def wait(self, timeout: Duration) -> bool:
        """Wait until it is worth claiming: True; False once `timeout` is over. As `Queue.wait`."""
        return await across(self._queue.wait, timeout)

    def jobs(self, worker_id: str, stop: StopToken) -> AsyncIterator[AsyncJobHandle]:
        """Claim jobs one at a time, waiting between them, until `stop` is cancelled. As `Queue.jobs`.

        Cancelled, or closed by `aclose()`, it gives back the claim that it has not yet yielded.
        """
        return AsyncJobs(self._queue, worker_id, stop, AsyncJobHandle)


class AsyncOutbox(_Shared):
    """An outbox by name, as `Outbox` is one; its verbs are coroutines."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(outbox)
        self.name: Final = outbox.name
        self._outbox: Final = outbox

    async def run_once(self, worker_id: str, delivery: AsyncDelivery) -> bool:
        """Claim one message, await `delivery` with its handle, and settle it; False where there is none. As `Outbox.run_once`.

        Cancelled, it cancels the delivery, gives the message back uncounted, and takes at most 5 s for both.
        """
        deliver = _bridged(delivery)
        return await Crossing().run(lambda: self._outbox.run_once(worker_id, deliver))

    async def run(self, worker_id: str, delivery: AsyncDelivery, stop: StopToken) -> None:
        """Deliver messages until `stop` is cancelled. As `Outbox.run`; a cancellation is as that of `run_once`."""
        deliver = _bridged(delivery)
        crossing = Crossing()
        await crossing.run(lambda: self._outbox.run(worker_id, deliver, Halting(stop, crossing)))


class AsyncLease:
    """A lock that this process holds, as `Lease` is one; its verbs are coroutines."""

    name = _Field[str]()
    owner = _Field[str]()
    token = _Field[int]()
    expires_at = _Field[datetime]()
    lost = _Field[threading.Event]()
    held = _Field[bool]()
    released = _Field[bool]()

    def __init__(self, lease: Lease) -> None:
        self.handle: Final = lease

    def __repr__(self) -> str:
        return f"<Async{repr(self.handle)[1:]}"

    async def renew(self, ttl: Duration | None = None) -> bool:
        """Put the end to `ttl` from now. As `Lease.renew`."""
        return await across(self.handle.renew, ttl)

    async def release(self) -> bool:
        """Free the name. As `Lease.release`."""
        return await across(self.handle.release)


def _bridged(delivery: AsyncDelivery) -> Delivery:
    for function in (delivery, getattr(delivery, "__call__", None)):  # noqa: B004 - an object may be callable by a method
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{delivery!r} would not run when it is awaited: a delivery is an `async def` without yield")

    async def delivered(job: JobHandle) -> None:
        returned: object = delivery(AsyncJobHandle(job))
        if not inspect.isawaitable(returned):
            raise TypeError("the delivery returned no awaitable: deliver by an `async def`")
        await returned

    return lambda job: interruptible(lambda: delivered(job))
