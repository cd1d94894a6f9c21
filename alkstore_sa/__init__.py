"""Durable job queues, leases, a scheduler and a transactional outbox as tables in the database that an application already has."""

from alkstore_sa._options import Duration, EnqueueOptions
from alkstore_sa._payload import Codec, Payload
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
    ReservedName,
    SchemaMissing,
    SchemaOutdated,
    StoreClosed,
)
from alkstore_sa.handles import JobHandle, Queue
from alkstore_sa.locks import Lease
from alkstore_sa.records import Fire, Job, JobState, LockInfo, QueueStats, Schedule, Tick, TickReport
from alkstore_sa.seam import Tx
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store
from alkstore_sa.tables import metadata, metadata_for

__all__ = [
    "AlkstoreError",
    "ClaimLost",
    "Codec",
    "Delivery",
    "Duration",
    "EnqueueOptions",
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
    "Outbox",
    "Payload",
    "Queue",
    "QueueStats",
    "ReservedName",
    "Schedule",
    "SchemaMissing",
    "SchemaOutdated",
    "StopToken",
    "Store",
    "StoreClosed",
    "Tick",
    "TickReport",
    "Tx",
    "metadata",
    "metadata_for",
    "prepare_sqlite",
]
