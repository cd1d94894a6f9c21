"""Builders for live jobs: enqueue, promote, claim, settle."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Insert,
    Integer,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    case,
    column,
    delete,
    insert,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.sql.expression import FromClause

from alkstore_sa._options import Timing
from alkstore_sa.constructs import (
    NumberColumn,
    Span,
    TextColumn,
    UtcInstant,
    clock_now,
    constant,
    in_picked,
    instant_of,
    json_texts,
    later,
    parallel,
    raw,
    statement_now,
    wake,
)
from alkstore_sa.tables import jobs, schedules

READY: Final = constant("ready")
DELAYED: Final = constant("delayed")
CLAIMED: Final = constant("claimed")

CLAIM_COLUMNS: Final = (
    jobs.c.id,
    jobs.c.queue,
    jobs.c.task,
    jobs.c.headers,
    jobs.c.payload,
    jobs.c.priority,
    jobs.c.run_at,
    jobs.c.attempts,
    jobs.c.max_attempts,
    jobs.c.fence,
    jobs.c.visibility_timeout,
    jobs.c.base_backoff,
    jobs.c.enqueued_at,
    jobs.c.claim_expires_at,
    jobs.c.worker_id,
    jobs.c.schedule,
    jobs.c.scheduled_for,
    jobs.c.last_error,
)
"""What a claim brings back, instants and spans in microseconds: a handle takes it apart by position."""

_DELAY: Final = bindparam("job_delay", type_=Span)
_EXPIRES: Final = bindparam("job_expires", type_=Span)
_RUN_AT: Final = bindparam("job_run_at", type_=UtcInstant)
_QUEUE: Final = bindparam("job_queue", type_=Text)
_LIMIT: Final = bindparam("job_limit", type_=Integer)
_ERROR: Final = bindparam("job_error", type_=Text)
_ID: Final = bindparam("job_id", type_=BigInteger)
_CHANNEL: Final = bindparam("wake_channel", type_=Text)

HELD: Final = and_(jobs.c.id == _ID, jobs.c.fence == bindparam("job_fence", type_=BigInteger), jobs.c.state == CLAIMED)
"""The fence: this very claim still stands. Whether its time is over is not looked at."""

LAPSED: Final = and_(jobs.c.state == CLAIMED, jobs.c.claim_expires_at <= statement_now())
DUE: Final = and_(jobs.c.state == DELAYED, jobs.c.run_at <= statement_now())


def shown_state() -> ColumnElement[str]:
    """Give the state under which a live row shows: ready as soon as it is due or its claim lapsed."""
    return case((or_(LAPSED, DUE), READY), else_=jobs.c.state)


def _woken(waking: bool, queue: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    return [wake(_CHANNEL, queue)] if waking else []


_STAMPED: Final = ("task", "headers", "priority", "max_attempts", "visibility_timeout", "base_backoff")
_STAMPS: Final = {"queue": _QUEUE} | {name: bindparam(f"job_{name}", type_=jobs.c[name].type) for name in _STAMPED}


def _enqueued(
    timing: Timing, expires: ColumnElement[Any] | None, payload: ColumnElement[str], stamps: Mapping[str, ColumnElement[Any]] = _STAMPS
) -> dict[str, ColumnElement[Any]]:
    """Give what a new job's columns hold, whoever enqueues it."""
    now = statement_now()
    run_at = {"now": now, "delay": later(now, _DELAY), "run_at": _RUN_AT}[timing]
    state = {"now": READY, "delay": DELAYED, "run_at": case((_RUN_AT <= now, READY), else_=DELAYED)}[timing]
    return {
        **stamps,
        "payload": payload,
        "state": state,
        "attempts": constant(0),
        "fence": constant(0),
        "enqueued_at": now,
        "run_at": run_at,
        "expires_at": null() if expires is None else later(now, expires),
    }


def insert_job(timing: Timing, expiring: bool, waking: bool) -> Insert:
    """Enqueue one job and return its id; no row where its `run_at` lies past its expiry."""
    values = _enqueued(timing, _EXPIRES if expiring else None, bindparam("job_payload", type_=Text))
    statement = insert(jobs)
    if timing == "run_at" and expiring:
        one = select(*values.values()).where(_RUN_AT <= later(statement_now(), _EXPIRES))
        statement = statement.from_select(list(values), one, include_defaults=False)
    else:
        statement = statement.values(values)
    return statement.returning(jobs.c.id, *_woken(waking, _QUEUE))


def insert_jobs(timing: Timing, expiring: bool, waking: bool, checked: bool) -> Insert:
    """Enqueue a job for each text of a JSON array, in its order, and return their ids in no order.

    `checked`: no row where their `run_at` lies past their expiry, as in `insert_job`.
    """
    item = json_texts(bindparam("job_payloads", type_=Text)).table_valued(column("key", Integer), column("value", Text), name="item")
    values = _enqueued(timing, _EXPIRES if expiring else None, item.c.value)
    many = select(*values.values()).select_from(item).order_by(item.c.key)
    if checked and timing == "run_at" and expiring:
        many = many.where(_RUN_AT <= later(statement_now(), _EXPIRES))
    statement = insert(jobs).from_select(list(values), many, include_defaults=False)
    return statement.returning(jobs.c.id, *_woken(waking, _QUEUE))


def insert_fired(waking: bool) -> Insert:
    """Enqueue a job for each pair of a schedule's name and a boundary, in their order; stamps and payload are the schedule's.

    A job's time to live counts from now, not from its boundary. Returns the ids, in no order.
    """
    item = parallel(bindparam("fire_schedules", type_=TextColumn), bindparam("fire_boundaries", type_=NumberColumn)).table_valued(
        column("c0", Text), column("c1", BigInteger), column("ord", BigInteger), name="item"
    )
    stamps = {name: schedules.c[name] for name in _STAMPS}
    values = _enqueued("now", schedules.c.expires, schedules.c.payload, stamps)
    values |= {"schedule": schedules.c.name, "scheduled_for": instant_of(item.c.c1)}
    many = select(*values.values()).select_from(schedules.join(item, schedules.c.name == item.c.c0)).order_by(item.c.ord)
    statement = insert(jobs).from_select(list(values), many, include_defaults=False)
    return statement.returning(jobs.c.id, *_woken(waking, jobs.c.queue))


def promote_jobs() -> Update:
    """Make ready what is due or lapsed in a queue and may run again, at most a batch of each; the rest is left to be buried."""
    return (
        update(jobs)
        .where(or_(in_picked(jobs.c.id, _overdue(DELAYED, "run_at")), in_picked(jobs.c.id, _overdue(CLAIMED, "claim_expires_at"))))
        .values(state=READY, worker_id=null(), claim_expires_at=null())
        .returning(jobs.c.id)
    )


def _overdue(state: ColumnElement[str], deadline: str) -> Select[Any]:
    due = jobs.alias("due")
    return (
        select(due.c.id)
        .where(due.c.queue == _QUEUE, due.c.state == state, due.c[deadline] <= statement_now(), due.c.attempts < due.c.max_attempts)
        .order_by(due.c[deadline])
        .limit(_LIMIT)
        .with_for_update(skip_locked=True)
    )


def claim_jobs() -> Update:
    """Claim up to a limit of ready jobs of a queue for a worker; the rows come back in no order."""
    due = jobs.alias("due")
    picked = (
        select(due.c.id)
        .where(
            due.c.queue == _QUEUE,
            due.c.state == READY,
            or_(due.c.expires_at.is_(None), due.c.expires_at > statement_now()),
            due.c.attempts < due.c.max_attempts,
        )
        .order_by(due.c.priority.desc(), due.c.run_at, due.c.id)
        .limit(_LIMIT)
        .with_for_update(skip_locked=True)
    )
    return (
        update(jobs)
        .where(in_picked(jobs.c.id, picked))
        .values(
            state=CLAIMED,
            worker_id=bindparam("job_worker", type_=Text),
            attempts=jobs.c.attempts + constant(1),
            fence=jobs.c.fence + constant(1),
            claim_expires_at=later(clock_now(), jobs.c.visibility_timeout),
        )
        .returning(*map(raw, CLAIM_COLUMNS))
    )


def delete_held() -> Executable:
    """Ack: delete the job if this claim of it still stands."""
    return delete(jobs).where(HELD).returning(jobs.c.id)


def delete_held_many(skip_locked: bool) -> Executable:
    """Ack many claims at once, locking in id order so that two such statements cannot deadlock."""
    return delete(jobs).where(in_picked(jobs.c.id, _held_many(skip_locked=skip_locked))).returning(jobs.c.id, jobs.c.fence)


def extend_held_many() -> Update:
    """Heartbeat of many claims: put the end of each whose row nobody has locked to its own visibility timeout from now."""
    return (
        update(jobs)
        .where(in_picked(jobs.c.id, _held_many(skip_locked=True)))
        .values(claim_expires_at=later(clock_now(), jobs.c.visibility_timeout))
        .returning(jobs.c.id, jobs.c.claim_expires_at)
    )


def select_held_many() -> Select[Any]:
    """Look which of many claims still stand."""
    held, pairs = _held_and_pairs()
    return select(held.c.id).select_from(pairs).where(held.c.state == CLAIMED)


def _held_many(*, skip_locked: bool) -> Select[Any]:
    held, pairs = _held_and_pairs()
    picked = select(held.c.id).select_from(pairs).where(held.c.state == CLAIMED).order_by(held.c.id)
    return picked.with_for_update(of=held, skip_locked=skip_locked)


def _held_and_pairs() -> tuple[FromClause, FromClause]:
    pair = parallel(bindparam("job_ids", type_=NumberColumn), bindparam("job_fences", type_=NumberColumn)).table_valued(
        column("c0", BigInteger), column("c1", BigInteger), column("ord", BigInteger), name="pair"
    )
    held = jobs.alias("held")
    return held, held.join(pair, and_(held.c.id == pair.c.c0, held.c.fence == pair.c.c1))


def extend_held(given: bool) -> Update:
    """Heartbeat: put the claim's end to a given time from now, or to the row's own visibility timeout.

    The row is locked first: an update works its values out before it waits for a row, and again only if the row was changed meanwhile.
    """
    length = bindparam("job_ttl", type_=Span) if given else jobs.c.visibility_timeout
    held = select(jobs.c.id).where(HELD).with_for_update()
    return (
        update(jobs)
        .where(in_picked(jobs.c.id, held))
        .values(claim_expires_at=later(clock_now(), length))
        .returning(jobs.c.claim_expires_at)
    )


def retry_held(delayed: bool, waking: bool) -> Update:
    """Put a claimed job back for its next attempt, unless its attempts are used up or it expires before."""
    next_run = later(statement_now(), _DELAY)
    return (
        update(jobs)
        .where(HELD, jobs.c.attempts < jobs.c.max_attempts, or_(jobs.c.expires_at.is_(None), next_run <= jobs.c.expires_at))
        .values(**_unclaimed(DELAYED if delayed else READY), run_at=next_run, last_error=_ERROR)
        .returning(jobs.c.id, *_woken(waking, jobs.c.queue))
    )


def release_held(delayed: bool, erring: bool, waking: bool) -> Update:
    """Give a claimed job back with its attempt uncounted; its fence stays as high as it is."""
    values = _unclaimed(DELAYED if delayed else READY)
    values["attempts"] = jobs.c.attempts - constant(1)
    if delayed:
        values["run_at"] = later(statement_now(), _DELAY)
    if erring:
        values["last_error"] = _ERROR
    return update(jobs).where(HELD).values(**values).returning(jobs.c.id, *_woken(waking, jobs.c.queue))


def _unclaimed(state: ColumnElement[str]) -> dict[str, Any]:
    return {"state": state, "worker_id": null(), "claim_expires_at": null()}


def delete_live() -> Executable:
    """Cancel: delete a live job, whoever holds it."""
    return delete(jobs).where(jobs.c.id == _ID).returning(jobs.c.id)
