"""Builders for the history of fires: what is recorded of a range, fires and skips going in, old rows going out."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Insert,
    Integer,
    Text,
    and_,
    bindparam,
    column,
    delete,
    exists,
    false,
    func,
    insert,
    null,
    select,
    union_all,
)
from sqlalchemy.sql.expression import Executable

from alkstore_sa.constructs import (
    NumberColumn,
    Span,
    TextColumn,
    UtcInstant,
    constant,
    in_picked,
    instant_of,
    later,
    microseconds_of,
    parallel,
    row_address,
    statement_now,
)
from alkstore_sa.tables import fires, jobs, schedules

_NAMES: Final = bindparam("fire_schedules", type_=TextColumn)
_LIMIT: Final = bindparam("fire_limit", type_=Integer)
_OLDEST: Final = later(statement_now(), bindparam("minus_age", type_=Span))


def _ranges(name: str, *more: str) -> Any:
    arrays = (bindparam(array, type_=NumberColumn) for array in ("fire_boundaries", "fire_throughs", *more))
    columns = (column(f"c{place}", BigInteger) for place in range(1, 3 + len(more)))
    return parallel(_NAMES, *arrays).table_valued(column("c0", Text), *columns, column("ord", BigInteger), name=name)


def select_recorded() -> Executable:
    """Give the rows that speak for a boundary within a schedule's range, for each of many ranges.

    Rows do not overlap, so of those before a range only the last can reach into it.
    """
    item = _ranges("item")
    before = fires.alias("before")
    last = select(func.max(before.c.boundary, type_=UtcInstant)).where(
        before.c.schedule == item.c.c0, before.c.boundary < instant_of(item.c.c1)
    )
    start = func.coalesce(last.scalar_subquery(), instant_of(item.c.c1))
    return select(
        fires.c.schedule, microseconds_of(fires.c.boundary).label("boundary"), microseconds_of(fires.c.through).label("through")
    ).select_from(
        item.join(
            fires,
            and_(
                fires.c.schedule == item.c.c0,
                fires.c.boundary >= start,
                fires.c.boundary <= instant_of(item.c.c2),
                fires.c.through >= instant_of(item.c.c1),
            ),
        )
    )


def insert_fires() -> Insert:
    """Record the fires that became these jobs."""
    item = parallel(bindparam("job_ids", type_=NumberColumn)).table_valued(column("c0", BigInteger), column("ord", BigInteger), name="item")
    caught_up = later(jobs.c.scheduled_for, schedules.c.interval) <= instant_of(bindparam("horizon", type_=BigInteger))
    values = {
        "schedule": jobs.c.schedule,
        "boundary": jobs.c.scheduled_for,
        "through": jobs.c.scheduled_for,
        "fired_at": statement_now(),
        "job_id": jobs.c.id,
        "skipped": constant(0),
        "caught_up": caught_up,
    }
    source = item.join(jobs, jobs.c.id == item.c.c0).join(schedules, schedules.c.name == jobs.c.schedule)
    return insert(fires).from_select(list(values), select(*values.values()).select_from(source))


def insert_skips() -> Insert:
    """Record ranges that were skipped."""
    item = _ranges("item", "fire_counts")
    values = {
        "schedule": item.c.c0,
        "boundary": instant_of(item.c.c1),
        "through": instant_of(item.c.c2),
        "fired_at": statement_now(),
        "job_id": null(),
        "skipped": item.c.c3,
        "caught_up": false(),
    }
    return insert(fires).from_select(list(values), select(*values.values()).select_from(item))


def select_history() -> Executable:
    """List the history of one schedule, newest first."""
    return select(fires).where(fires.c.schedule == bindparam("fire_schedule", type_=Text)).order_by(fires.c.boundary.desc()).limit(_LIMIT)


def prune_schedules() -> Executable:
    """Delete what these schedules have in the history beyond so many rows or an age, at most a batch, never their newest row.

    The surplus and the aged are two ranges of the key, so that where they end is looked up once per schedule and not at every row.
    """
    kept, old = fires.alias("kept"), fires.alias("old")
    item = parallel(_NAMES).table_valued(column("c0", Text), column("ord", BigInteger), name="item")
    newest = select(kept.c.boundary).where(kept.c.schedule == item.c.c0).order_by(kept.c.boundary.desc()).limit(constant(1))
    surplus = newest.offset(bindparam("fire_kept", type_=Integer))
    address = select(row_address(old.c.boundary).label("address"))
    reaching = (
        address.select_from(item.join(old, and_(old.c.schedule == item.c.c0, old.c.boundary <= surplus.scalar_subquery()))),
        address.select_from(item.join(old, and_(old.c.schedule == item.c.c0, old.c.boundary < newest.scalar_subquery()))).where(
            old.c.fired_at < _OLDEST
        ),
    )
    picked = select(union_all(*reaching).subquery("doomed").c.address).limit(_LIMIT)
    return delete(fires).where(in_picked(row_address(fires.c.boundary), picked)).returning(fires.c.schedule)


def prune_old() -> Executable:
    """Delete a batch of what the history has beyond an age, of whichever schedule, never a schedule's newest row."""
    old, newer = fires.alias("old"), fires.alias("newer")
    succeeded = exists().where(newer.c.schedule == old.c.schedule, newer.c.boundary > old.c.boundary)
    picked = select(row_address(old.c.boundary)).where(old.c.fired_at < _OLDEST, succeeded).order_by(old.c.fired_at).limit(_LIMIT)
    return delete(fires).where(in_picked(row_address(fires.c.boundary), picked)).returning(fires.c.schedule)
