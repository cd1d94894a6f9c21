"""Builders for the way into the dead table and out of it.

A move is two statements in one transaction: the INSERT locks and copies, the DELETE takes away what was copied.
"""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Insert,
    Integer,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    insert,
    null,
    or_,
    select,
)

from alkstore_sa.constructs import Span, constant, later, statement_now, wake
from alkstore_sa.statements.jobs import HELD, LAPSED, READY
from alkstore_sa.tables import dead, jobs

MAX_ATTEMPTS_EXCEEDED: Final = "max attempts exceeded"
EXPIRED: Final = "expired"

_QUEUE: Final = bindparam("job_queue", type_=Text)
_LIMIT: Final = bindparam("job_limit", type_=Integer)
_ID: Final = bindparam("job_id", type_=BigInteger)
_MOVED_AS_THEY_ARE: Final = [column.name for column in dead.c if column.name not in ("last_error", "died_at")]


def bury_held() -> Insert:
    """Copy a claimed job into the dead table with the error of its last attempt."""
    return _bury(select(jobs).where(HELD), bindparam("job_error", type_=Text))


def bury_overdue() -> Insert:
    """Copy a batch of a queue's jobs that nobody may run any more: lapsed with no attempt left, or past their expiry."""
    exhausted = and_(LAPSED, jobs.c.attempts >= jobs.c.max_attempts)
    late = jobs.c.expires_at <= statement_now()
    unclaimed_and_late = and_(jobs.c.state == READY, jobs.c.expires_at.is_not(None), late)
    overdue = select(jobs).where(jobs.c.queue == _QUEUE, or_(exhausted, and_(LAPSED, late), unclaimed_and_late)).limit(_LIMIT)
    return _bury(overdue, case((exhausted, constant(MAX_ATTEMPTS_EXCEEDED)), else_=constant(EXPIRED)), skip_locked=True)


def _bury(doomed: Select[Any], error: ColumnElement[Any], *, skip_locked: bool = False) -> Insert:
    columns = [jobs.c[name] for name in _MOVED_AS_THEY_ARE]
    locked = doomed.with_only_columns(*columns, error, statement_now()).with_for_update(skip_locked=skip_locked)
    return insert(dead).from_select([*_MOVED_AS_THEY_ARE, "last_error", "died_at"], locked, include_defaults=False).returning(dead.c.id)


def revive_dead(one: bool, waking: bool) -> Insert:
    """Copy one dead job of a queue, or a batch in id order, back among the live: ready, no attempt used, no expiry, the fence kept."""
    fresh = {
        "state": READY,
        "attempts": constant(0),
        "expires_at": null(),
        "run_at": statement_now(),
        "worker_id": null(),
        "claim_expires_at": null(),
    }
    kept = [column.name for column in jobs.c if column.name not in fresh]
    chosen = _chosen(one).with_only_columns(*(dead.c[name] for name in kept), *fresh.values())
    columns = [wake(bindparam("wake_channel", type_=Text), _QUEUE)] if waking else []
    return insert(jobs).from_select([*kept, *fresh], chosen, include_defaults=False).returning(jobs.c.id, *columns)


def _chosen(one: bool) -> Select[Any]:
    of_queue = select(dead).where(dead.c.queue == _QUEUE).with_for_update(skip_locked=not one)
    return of_queue.where(dead.c.id == _ID) if one else of_queue.order_by(dead.c.id).limit(_LIMIT)


def purge_dead() -> Executable:
    """Delete a batch of a queue's jobs that died longer ago than a given time."""
    old = dead.alias("old")
    picked = (
        select(old.c.id)
        .where(old.c.queue == _QUEUE, old.c.died_at <= later(statement_now(), bindparam("minus_age", type_=Span)))
        .order_by(old.c.died_at)
        .limit(_LIMIT)
        .with_for_update(skip_locked=True)
    )
    return delete(dead).where(dead.c.id.in_(picked.correlate(None))).returning(dead.c.id)


def delete_moved(from_table: Table) -> Executable:
    """Delete the rows that were copied into the other table, by their ids."""
    return delete(from_table).where(from_table.c.id.in_(bindparam("moved_ids", type_=BigInteger, expanding=True)))
