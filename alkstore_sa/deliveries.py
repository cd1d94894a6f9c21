"""The outbox as an application holds it: messages written with its rows, and the loop that delivers them at least once."""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, Unpack, cast

from alkstore_sa._options import Duration, EnqueueOptions
from alkstore_sa._payload import Payload
from alkstore_sa.handles import JobHandle, Queue
from alkstore_sa.patience import Patience
from alkstore_sa.records import Job
from alkstore_sa.seam import Tx
from alkstore_sa.stop import StopToken

log: Final = logging.getLogger(__name__)

Delivery: TypeAlias = Callable[[JobHandle], None]


class Outbox:
    """An outbox by name. Its messages are jobs of a queue of the engine's own, which nothing else can reach.

    Stamps: `visibility_timeout` 60 s, `max_attempts` 5, `base_backoff` 5 s.
    """

    def __init__(self, name: str, queue: Queue) -> None:
        self.name: Final = name
        self._queue: Final = queue

    def enqueue(self, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a message and return its id; committed when this returns. As `Queue.enqueue`."""
        return self._queue.enqueue(payload, **options)

    def enqueue_tx(self, tx: Tx, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a message through the caller's transaction and return its id. As `Queue.enqueue_tx`."""
        return self._queue.enqueue_tx(tx, payload, **options)

    def enqueue_many(self, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a message for each payload, all or none. As `Queue.enqueue_many`."""
        return self._queue.enqueue_many(payloads, **options)

    def enqueue_many_tx(self, tx: Tx, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a message for each payload through the caller's transaction. As `Queue.enqueue_many_tx`."""
        return self._queue.enqueue_many_tx(tx, payloads, **options)

    def run_once(self, worker_id: str, delivery: Delivery) -> bool:
        """Claim one message, call `delivery` with its handle, and settle it; False where there is none.

        A return acks. An `Exception` retries after 5, 10, 20, 40 s, and with the fifth the message is dead, with that exception's text.
        Any other `BaseException` gives the message back and propagates. A message that the delivery settled itself stays as it left it.
        No transaction is open meanwhile and nothing heartbeats: a delivery longer than 60 s calls `job.heartbeat()`. Delivery is at
        least once; `job.id` is the same each time, for the receiver to deduplicate by.

        Raises:
            TypeError: `delivery` is a coroutine function; nothing is claimed.
        """
        _refuse_async(delivery)
        job = self._queue.claim_one(worker_id)
        if job is None:
            return False
        deliver(job, delivery)
        return True

    def run(self, worker_id: str, delivery: Delivery, stop: StopToken) -> None:
        """Deliver messages as `run_once` does, waiting between them, until `stop` is cancelled.

        A database that is away is waited for; a message whose settling it did not answer comes again once its claim lapsed.
        """
        _refuse_async(delivery)
        patience = Patience(stop)
        for job in self._queue.jobs(worker_id, stop):
            with patience.with_the_database():
                deliver(job, delivery)

    def dead(self, *, limit: int = 100, after: int | None = None) -> Sequence[Job]:
        """List the dead messages by ascending id. As `Queue.dead`."""
        return self._queue.dead(limit=limit, after=after)

    def replay(self, job_id: int) -> bool:
        """Bring a dead message back. As `Queue.replay`."""
        return self._queue.replay(job_id)

    def replay_all(self, *, limit: int | None = None) -> int:
        """Bring dead messages back. As `Queue.replay_all`."""
        return self._queue.replay_all(limit=limit)

    def purge_dead(self, *, older_than: Duration) -> int:
        """Delete old dead messages. As `Queue.purge_dead`."""
        return self._queue.purge_dead(older_than=older_than)


def deliver(job: JobHandle, delivery: Delivery) -> None:
    """Call `delivery` with a claimed message and settle it by what comes of that; what it settled itself stays."""
    try:
        _call(delivery, job)
    except Exception as error:  # noqa: BLE001 - the delivery's failure, whatever it is, becomes the message's
        stands = _retry(job, error)
        log.info("delivery of message %s failed: %s", job.id, type(error).__name__, extra={"job_id": job.id, "queue": job.queue})
    except BaseException:
        if not job.settled:
            try:
                job.release()
            except Exception as error:  # noqa: BLE001 - nothing may keep an interrupt from propagating; the claim lapses by itself
                log.warning("message %s could not be given back: %s", job.id, type(error).__name__, extra={"job_id": job.id})
        raise
    else:
        stands = job.settled or job.ack()
    if not stands:
        log.warning("the claim of message %s was lost while it was delivered", job.id, extra={"job_id": job.id, "queue": job.queue})


def _retry(job: JobHandle, error: Exception) -> bool:
    """Retry the message, also where an `ack_tx` of it was rolled back with the error; tell whether this claim settled it.

    Where the delivery left the transaction of its `ack_tx` open, that one decides: a retry would wait for it, perhaps for ever.
    """
    return job.is_pending or job.retry(error) or job.settled


def _call(delivery: Delivery, job: JobHandle) -> None:
    returned = cast(Callable[[JobHandle], object], delivery)(job)
    if inspect.isawaitable(returned):
        getattr(returned, "close", getattr(returned, "cancel", lambda: None))()
        raise TypeError("the delivery returned an awaitable, which nobody awaits: deliver synchronously")


def _refuse_async(delivery: Delivery) -> None:
    if not callable(delivery):
        raise TypeError(f"{delivery!r} is no callable")
    for function in (delivery, getattr(delivery, "__call__", None)):  # noqa: B004 - an object may be callable by a coroutine method
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{delivery!r} would not run when it is called: a delivery is a plain function")
