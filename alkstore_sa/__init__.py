"""Durable job queues, leases, a scheduler and a transactional outbox as tables in the database that an application already has."""

from typing import TYPE_CHECKING, Any

from alkstore_sa._options import Duration, EnqueueOptions
from alkstore_sa._payload import Codec, Payload
from alkstore_sa.aio import AsyncStore
from alkstore_sa.aio_handles import AsyncDelivery, AsyncJobHandle, AsyncLease, AsyncOutbox, AsyncQueue, AsyncTx
from alkstore_sa.deliveries import Delivery, Outbox
from alkstore_sa.errors import (
    AlkstoreError,
    ClaimLost,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    InvalidSpec,
    LeadershipLost,
    LeaseLost,
    LockHeld,
    NotBound,
    ReservedName,
    SchemaMissing,
    SchemaOutdated,
    StoreClosed,
)
from alkstore_sa.handles import JobHandle, Queue
from alkstore_sa.locks import Lease
from alkstore_sa.outcomes import Fail, Retry, Snooze
from alkstore_sa.records import Fire, Job, JobState, LockInfo, QueueStats, Schedule, Tick, TickReport, WorkerInfo
from alkstore_sa.seam import Tx
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store
from alkstore_sa.tables import metadata, metadata_for
from alkstore_sa.task import Call, Task
from alkstore_sa.tasks import Tasks

if TYPE_CHECKING:
    from alkstore_sa.coordinator import WorkerReport
    from alkstore_sa.worker import Worker

__all__ = [
    "AlkstoreError",
    "AsyncDelivery",
    "AsyncJobHandle",
    "AsyncLease",
    "AsyncOutbox",
    "AsyncQueue",
    "AsyncStore",
    "AsyncTx",
    "Call",
    "ClaimLost",
    "Codec",
    "Delivery",
    "Duration",
    "EnqueueOptions",
    "Fail",
    "Fire",
    "InvalidName",
    "InvalidOption",
    "InvalidPayload",
    "InvalidSpec",
    "Job",
    "JobHandle",
    "JobState",
    "LeadershipLost",
    "Lease",
    "LeaseLost",
    "LockHeld",
    "LockInfo",
    "NotBound",
    "Outbox",
    "Payload",
    "Queue",
    "QueueStats",
    "ReservedName",
    "Retry",
    "Schedule",
    "SchemaMissing",
    "SchemaOutdated",
    "Snooze",
    "StopToken",
    "Store",
    "StoreClosed",
    "Task",
    "Tasks",
    "Tick",
    "TickReport",
    "Tx",
    "Worker",
    "WorkerInfo",
    "WorkerReport",
    "metadata",
    "metadata_for",
    "prepare_sqlite",
]


def __getattr__(name: str) -> Any:
    """Load the worker when it is first asked for: a process that only enqueues does without it."""
    if name == "Worker":
        from alkstore_sa.worker import Worker  # noqa: PLC0415

        return Worker
    if name == "WorkerReport":
        from alkstore_sa.coordinator import WorkerReport  # noqa: PLC0415

        return WorkerReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
