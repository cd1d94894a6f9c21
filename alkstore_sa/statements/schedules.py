"""Builders for schedules: register, pause, list, and what a tick reads and advances."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    Text,
    Update,
    bindparam,
    case,
    column,
    delete,
    false,
    func,
    null,
    or_,
    select,
    true,
    type_coerce,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import Executable, TableValuedAlias

from alkstore_sa.constructs import (
    NumberColumn,
    Span,
    TextColumn,
    UtcInstant,
    clock_now,
    constant,
    instant_of,
    later,
    microseconds_between,
    microseconds_of,
    parallel,
    statement_now,
    wake,
)
from alkstore_sa.tables import schedules

_NAME: Final = bindparam("schedule_name", type_=Text)
_INTERVAL: Final = bindparam("schedule_interval", type_=Span)
_ERROR: Final = bindparam("schedule_error", type_=Text)
_NAMES: Final = bindparam("schedule_names", type_=TextColumn)
_BESIDES: Final = bindparam("schedules_besides", type_=TextColumn)
_HORIZON: Final = instant_of(bindparam("horizon", type_=BigInteger))
_BOUNDARIES: Final = bindparam("schedule_boundaries", type_=NumberColumn)
_LIMIT: Final = bindparam("schedule_limit", type_=Integer)

_STAMPED: Final = ("task", "headers", "priority", "max_attempts", "visibility_timeout", "base_backoff", "expires")
_SOUND: Final = {"failures": constant(0), "retry_at": null(), "last_error": null()}

_GRID: Final = (  # in whole microseconds, as the arithmetic has them
    type_coerce(schedules.c.interval, BigInteger).label("interval"),
    microseconds_of(schedules.c.next_fire_at).label("next_fire_at"),
)
SHOWN: Final = tuple(column for column in schedules.c if column.name not in ("interval", "failures", "retry_at"))


def _woken(waking: bool) -> list[ColumnElement[Any]]:
    return [wake(bindparam("wake_channel", type_=Text), bindparam("wake_queue", type_=Text))] if waking else []


def _texts(names: ColumnElement[Any]) -> TableValuedAlias:
    return parallel(names).table_valued(column("c0", Text), column("ord", BigInteger), name="item")


def upsert_schedule(waking: bool) -> Executable:
    """Register a schedule by name. The same interval keeps the next boundary, another one starts a new grid from now.

    A boundary further ahead than one interval, left behind by a clock that was stepped, is put to one interval from now.
    """
    restart = later(clock_now(), _INTERVAL)
    given: dict[str, Any] = {
        "spec": bindparam("schedule_spec", type_=Text),
        "interval": _INTERVAL,
        "queue": bindparam("job_queue", type_=Text),
        "payload": bindparam("job_payload", type_=Text),
        **{name: bindparam(f"job_{name}", type_=schedules.c[name].type) for name in _STAMPED},
        **_SOUND,
    }
    restarts = or_(schedules.c.interval != _INTERVAL, schedules.c.next_fire_at > restart)
    return (
        insert(schedules)
        .values(name=_NAME, next_fire_at=restart, paused=false(), **given)
        .on_conflict_do_update(
            index_elements=[schedules.c.name],
            set_={**given, "next_fire_at": case((restarts, restart), else_=schedules.c.next_fire_at)},
        )
        .returning(*SHOWN, *_woken(waking))
    )


def lock_schedule() -> Executable:
    """Lock one schedule's row, and say where its grid stands and what time it is."""
    return select(*_GRID, schedules.c.paused, microseconds_of(clock_now()).label("now")).where(schedules.c.name == _NAME).with_for_update()


def delete_schedule(waking: bool) -> Executable:
    """Unregister: its jobs and its history stay."""
    return delete(schedules).where(schedules.c.name == _NAME).returning(schedules.c.name, *_woken(waking))


def pause_schedule() -> Update:
    """Let no boundary fire from now on."""
    return update(schedules).where(schedules.c.name == _NAME).values(paused=true()).returning(schedules.c.name)


def resume_schedule(waking: bool) -> Update:
    """Let boundaries fire again, from a given one on."""
    boundary = instant_of(bindparam("schedule_boundary", type_=BigInteger))
    resumed: dict[str, Any] = {"paused": false(), "next_fire_at": boundary, **_SOUND}
    return update(schedules).where(schedules.c.name == _NAME).values(resumed).returning(schedules.c.name, *_woken(waking))


def select_schedules() -> Select[Any]:
    """List the schedules by name."""
    return select(*SHOWN).order_by(schedules.c.name)


def select_due(onward: bool, besides: bool, alone: bool) -> Select[Any]:
    """Lock a batch of due schedules, the longest due first, and say what time it is.

    `onward` measures by the instant at which the pass began instead of by now.
    """
    return _due(
        select(schedules.c.name, schedules.c.spec, *_GRID, microseconds_of(statement_now()).label("now")),
        onward,
        besides,
        alone,
    ).with_for_update()


def select_due_names(onward: bool, besides: bool) -> Select[Any]:
    """Name a batch of due schedules without locking or reading them."""
    return _due(select(schedules.c.name), onward, besides, alone=False)


def _due(statement: Any, onward: bool, besides: bool, alone: bool) -> Select[Any]:
    horizon = _HORIZON if onward else statement_now()
    statement = statement.where(
        ~schedules.c.paused, schedules.c.next_fire_at <= horizon, or_(schedules.c.retry_at.is_(None), schedules.c.retry_at <= horizon)
    )
    if alone:
        statement = statement.where(schedules.c.name == _NAME)
    return _but(statement, besides).order_by(schedules.c.next_fire_at, schedules.c.name).limit(_LIMIT)


def _but(statement: Select[Any], besides: bool) -> Select[Any]:
    return statement.where(schedules.c.name.not_in(select(_texts(_BESIDES).c.c0))) if besides else statement


def advance_schedules() -> Update:
    """Put schedules to their next boundaries; what went wrong with them before is over."""
    item = parallel(_NAMES, _BOUNDARIES).table_valued(column("c0", Text), column("c1", BigInteger), column("ord", BigInteger), name="item")
    advanced: dict[str, Any] = {"next_fire_at": instant_of(item.c.c1), **_SOUND}
    return update(schedules).where(schedules.c.name == item.c.c0).values(advanced)


def fail_schedule() -> Update:
    """Record that a schedule could not be fired, and put its next try off by a given time; its boundary stays."""
    return (
        update(schedules)
        .where(schedules.c.name == _NAME)
        .values(
            failures=schedules.c.failures + constant(1),
            last_error=_ERROR,
            retry_at=later(clock_now(), _retry_pause()),
        )
        .returning(schedules.c.failures)
    )


def _retry_pause() -> ColumnElement[Any]:
    """Give 2, 4, 8, … seconds, at most 300, for the failures in a row that the row had before this one."""
    second = 1_000_000
    doublings = [(schedules.c.failures == constant(n), constant(2 ** (n + 1) * second)) for n in range(8)]
    return case(*doublings, else_=constant(300 * second))


def select_soonest(besides: bool) -> Executable:
    """Say when an active schedule has its next boundary or its next try, and how long it is until then."""
    boundary = (
        _but(select(schedules.c.next_fire_at.label("at")).where(~schedules.c.paused, schedules.c.retry_at.is_(None)), besides)
        .order_by(schedules.c.next_fire_at)
        .limit(constant(1))
        .subquery("boundary")
    )
    retry = (
        _but(select(schedules.c.retry_at.label("at")).where(~schedules.c.paused, schedules.c.retry_at.is_not(None)), besides)
        .order_by(schedules.c.retry_at)
        .limit(constant(1))
        .subquery("retry")
    )
    known = union_all(select(boundary.c.at), select(retry.c.at)).subquery("known")
    soonest = func.min(known.c.at, type_=UtcInstant)
    return select(soonest.label("at"), microseconds_between(clock_now(), soonest).label("until"))


def pull_back_schedules() -> Update:
    """Put every boundary that is further ahead than one interval to one interval from now: the clock was stepped."""
    return (
        update(schedules)
        .where(schedules.c.next_fire_at > later(statement_now(), schedules.c.interval))
        .values(next_fire_at=later(clock_now(), schedules.c.interval))
        .returning(schedules.c.name)
    )
