"""Builders for what workers show of themselves, and for pauses of queues."""

from typing import Any, Final

from sqlalchemy import BigInteger, Integer, Select, Text, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import Executable

from alkstore_sa.constructs import Span, constant, later, statement_now
from alkstore_sa.tables import pauses, workers

_ID: Final = bindparam("worker", type_=Text)
_QUEUE: Final = bindparam("pause_queue", type_=Text)
_SAID: Final = {
    **{name: bindparam(f"worker_{name}", type_=Text) for name in ("host", "queues", "tasks", "raw_queues")},
    **{name: bindparam(f"worker_{name}", type_=Integer) for name in ("pid", "running")},
    **{name: bindparam(f"worker_{name}", type_=BigInteger) for name in ("done", "failed", "handler_ms")},
}


def upsert_worker() -> Executable:
    """Write what a worker says of itself, and when; its start is that of its first word."""
    now = statement_now()
    return (
        insert(workers)
        .values(id=_ID, started_at=now, seen_at=now, **_SAID)
        .on_conflict_do_update(index_elements=[workers.c.id], set_={**_SAID, "seen_at": now})
        .returning(workers.c.id)
    )


def delete_worker() -> Executable:
    """Forget a worker that leaves."""
    return delete(workers).where(workers.c.id == _ID).returning(workers.c.id)


def delete_silent() -> Executable:
    """Forget the workers that were silent for longer than a given time."""
    limit = later(statement_now(), bindparam("minus_age", type_=Span))
    return delete(workers).where(workers.c.seen_at < limit).returning(workers.c.id)


def select_workers() -> Select[Any]:
    """List the workers, and whether each was seen within a given time."""
    limit = later(statement_now(), bindparam("minus_age", type_=Span))
    return select(*workers.c, (workers.c.seen_at >= limit).label("alive")).order_by(workers.c.id)


def insert_pause() -> Executable:
    """Pause a queue; no row where it is paused already."""
    return (
        insert(pauses)
        .values(queue=_QUEUE, paused_at=statement_now())
        .on_conflict_do_nothing(index_elements=[pauses.c.queue])
        .returning(constant(1))
    )


def delete_pause() -> Executable:
    """Resume a queue."""
    return delete(pauses).where(pauses.c.queue == _QUEUE).returning(pauses.c.queue)


def select_pauses() -> Select[Any]:
    """List the paused queues and since when they are."""
    return select(*pauses.c).order_by(pauses.c.queue)
