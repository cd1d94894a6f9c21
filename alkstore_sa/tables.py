"""The shape of the data in the database: declarative classes, and the Core tables that statements name.

Every constraint and index has a short name of its own, and no naming convention applies. Alembic owns the schema: nothing here
issues DDL.
"""

from datetime import datetime, timedelta
from typing import Final, cast

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    column,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.schema import SchemaConst

from alkstore_sa.constructs import Span, UtcInstant

PREFIX: Final = "alkstore_"

metadata: Final = MetaData()
"""Every `alkstore_*` table, for Alembic's `target_metadata`."""

_JobId: Final = BigInteger().with_variant(Integer, "sqlite")


class _Row(DeclarativeBase):
    metadata = metadata


class _JobColumns:
    """What a live and a dead job have in common, the id apart."""

    queue: Mapped[str] = mapped_column(Text)
    task: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[str | None] = mapped_column(Text)  # a JSON object of str to str
    payload: Mapped[str] = mapped_column(Text)  # exactly what the codec returned
    priority: Mapped[int] = mapped_column(SmallInteger)
    attempts: Mapped[int] = mapped_column(Integer)
    max_attempts: Mapped[int] = mapped_column(Integer)
    fence: Mapped[int] = mapped_column(BigInteger)  # claims ever made on this row; never lowered
    visibility_timeout: Mapped[timedelta] = mapped_column(Span)
    base_backoff: Mapped[timedelta] = mapped_column(Span)
    enqueued_at: Mapped[datetime] = mapped_column(UtcInstant)
    run_at: Mapped[datetime] = mapped_column(UtcInstant)
    expires_at: Mapped[datetime | None] = mapped_column(UtcInstant)
    worker_id: Mapped[str | None] = mapped_column(Text)
    schedule: Mapped[str | None] = mapped_column(Text)
    scheduled_for: Mapped[datetime | None] = mapped_column(UtcInstant)
    last_error: Mapped[str | None] = mapped_column(Text)


class JobRow(_JobColumns, _Row):
    """A live job: ready, delayed or claimed."""

    __tablename__ = "alkstore_job"

    id: Mapped[int] = mapped_column(_JobId, Identity(), sort_order=-1)
    state: Mapped[str] = mapped_column(Text)
    claim_expires_at: Mapped[datetime | None] = mapped_column(UtcInstant)

    __table_args__ = (
        PrimaryKeyConstraint("id", name="alkstore_job_pk"),
        CheckConstraint("state IN ('ready', 'delayed', 'claimed')", name="alkstore_job_state"),
        {"sqlite_autoincrement": True},
    )


class DeadRow(_JobColumns, _Row):
    """A job that will not run again unless somebody replays it."""

    __tablename__ = "alkstore_dead"

    id: Mapped[int] = mapped_column(_JobId, autoincrement=False, sort_order=-1)
    died_at: Mapped[datetime] = mapped_column(UtcInstant)

    __table_args__ = (PrimaryKeyConstraint("id", name="alkstore_dead_pk"),)


class LockRow(_Row):
    """A lock by name, held or free. A row is never deleted, so that its token only ever rises."""

    __tablename__ = "alkstore_lock"

    name: Mapped[str] = mapped_column(Text)
    owner: Mapped[str | None] = mapped_column(Text)  # null: free
    token: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[datetime] = mapped_column(UtcInstant)

    __table_args__ = (PrimaryKeyConstraint("name", name="alkstore_lock_pk"),)


class ScheduleRow(_Row):
    """A schedule: where its grid goes on, and what each of its jobs is stamped with."""

    __tablename__ = "alkstore_schedule"

    name: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Text)
    interval: Mapped[timedelta] = mapped_column(Span)  # what the spec says, for statements that compare it
    queue: Mapped[str] = mapped_column(Text)
    task: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[str | None] = mapped_column(Text)
    payload: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    max_attempts: Mapped[int] = mapped_column(Integer)
    visibility_timeout: Mapped[timedelta] = mapped_column(Span)
    base_backoff: Mapped[timedelta] = mapped_column(Span)
    expires: Mapped[timedelta | None] = mapped_column(Span)  # of each job, from its fire on
    next_fire_at: Mapped[datetime] = mapped_column(UtcInstant)
    paused: Mapped[bool] = mapped_column(Boolean)
    failures: Mapped[int] = mapped_column(Integer)  # in a row
    retry_at: Mapped[datetime | None] = mapped_column(UtcInstant)  # null: it did not fail
    last_error: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (PrimaryKeyConstraint("name", name="alkstore_schedule_pk"),)


class FireRow(_Row):
    """What became of a boundary, or of a range of them: the second belt against firing it twice."""

    __tablename__ = "alkstore_fire"

    schedule: Mapped[str] = mapped_column(Text)
    boundary: Mapped[datetime] = mapped_column(UtcInstant)
    through: Mapped[datetime] = mapped_column(UtcInstant)  # the last boundary of a skipped range
    fired_at: Mapped[datetime] = mapped_column(UtcInstant)
    job_id: Mapped[int | None] = mapped_column(BigInteger)  # null: skipped
    skipped: Mapped[int] = mapped_column(BigInteger)
    caught_up: Mapped[bool] = mapped_column(Boolean)

    __table_args__ = (PrimaryKeyConstraint("schedule", "boundary", name="alkstore_fire_pk"),)


class WorkerRow(_Row):
    """A worker as it showed itself last; nothing but what people see depends on it."""

    __tablename__ = "alkstore_worker"

    id: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    queues: Mapped[str] = mapped_column(Text)  # JSON lists: what it serves, which tasks it knows, whose raw jobs it handles
    tasks: Mapped[str] = mapped_column(Text)
    raw_queues: Mapped[str] = mapped_column(Text)
    running: Mapped[int] = mapped_column(Integer)
    done: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    handler_ms: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime] = mapped_column(UtcInstant)
    seen_at: Mapped[datetime] = mapped_column(UtcInstant)

    __table_args__ = (PrimaryKeyConstraint("id", name="alkstore_worker_pk"),)


class PauseRow(_Row):
    """A queue that workers do not claim from for the time being."""

    __tablename__ = "alkstore_pause"

    queue: Mapped[str] = mapped_column(Text)
    paused_at: Mapped[datetime] = mapped_column(UtcInstant)

    __table_args__ = (PrimaryKeyConstraint("queue", name="alkstore_pause_pk"),)


jobs: Final = cast(Table, JobRow.__table__)
dead: Final = cast(Table, DeadRow.__table__)
locks: Final = cast(Table, LockRow.__table__)
schedules: Final = cast(Table, ScheduleRow.__table__)
fires: Final = cast(Table, FireRow.__table__)
workers: Final = cast(Table, WorkerRow.__table__)
pauses: Final = cast(Table, PauseRow.__table__)

_ready: Final = column("state") == "ready"
_delayed: Final = column("state") == "delayed"
_claimed: Final = column("state") == "claimed"
_active: Final = ~column("paused", Boolean)
_failing: Final = column("retry_at").is_not(None)
_expiring: Final = _ready & column("expires_at").is_not(None)

Index("alkstore_job_ready", jobs.c.queue, jobs.c.priority.desc(), jobs.c.run_at, jobs.c.id, postgresql_where=_ready, sqlite_where=_ready)
Index("alkstore_job_delayed", jobs.c.queue, jobs.c.run_at, postgresql_where=_delayed, sqlite_where=_delayed)
Index("alkstore_job_claimed", jobs.c.queue, jobs.c.claim_expires_at, postgresql_where=_claimed, sqlite_where=_claimed)
Index("alkstore_job_expiring", jobs.c.queue, jobs.c.expires_at, postgresql_where=_expiring, sqlite_where=_expiring)
Index("alkstore_dead_queue", dead.c.queue, dead.c.id)
Index("alkstore_dead_died", dead.c.queue, dead.c.died_at)
Index("alkstore_schedule_due", schedules.c.next_fire_at, schedules.c.name, postgresql_where=_active, sqlite_where=_active)
Index("alkstore_schedule_retry", schedules.c.retry_at, postgresql_where=_failing, sqlite_where=_failing)
Index("alkstore_fire_age", fires.c.fired_at)


def metadata_for(*, schema: str | None = None) -> MetaData:
    """Give a copy of `metadata` whose tables lie in `schema`, for a host that keeps them apart (PostgreSQL)."""
    copy = MetaData(schema=schema)
    for table in metadata.tables.values():
        table.to_metadata(copy, schema=SchemaConst.RETAIN_SCHEMA if schema is None else schema)
    return copy
