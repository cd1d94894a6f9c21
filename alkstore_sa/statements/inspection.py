"""Builders that only look: jobs live and dead as one, counts per queue, the next deadline."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Integer,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    null,
    or_,
    select,
    tuple_,
    union,
    union_all,
)
from sqlalchemy.sql.expression import CompoundSelect, Executable, Subquery

from alkstore_sa.constructs import Span, UtcInstant, constant, microseconds_between, statement_now
from alkstore_sa.records import JobState
from alkstore_sa.statements.jobs import CLAIMED, DELAYED, DUE, LAPSED, READY, shown_state
from alkstore_sa.tables import dead, jobs

DEAD_COUNTED: Final = 100_000

_LIMIT: Final = bindparam("job_limit", type_=Integer)
_QUEUE: Final = bindparam("job_queue", type_=Text)

_SHOWN: Final = [column.name for column in jobs.c if column.name not in ("state", "claim_expires_at")]


def _live() -> Select[Any]:
    return select(
        *(jobs.c[name] for name in _SHOWN), jobs.c.claim_expires_at, shown_state().label("state"), null().cast(UtcInstant).label("died_at")
    )


def _dead() -> Select[Any]:
    return select(
        *(dead.c[name] for name in _SHOWN),
        null().cast(UtcInstant).label("claim_expires_at"),
        constant("dead").label("state"),
        dead.c.died_at,
    )


def select_job() -> CompoundSelect[Any]:
    """Look one job up by id, live or dead, in one statement."""
    wanted = bindparam("job_id", type_=BigInteger)
    return union_all(_live().where(jobs.c.id == wanted), _dead().where(dead.c.id == wanted))


def select_jobs(state: JobState | None, by_queue: bool, by_task: bool, after: bool) -> Select[Any]:
    """List jobs by ascending id, of one state or of all."""
    pages: list[Subquery] = []
    if state != JobState.DEAD:
        pages.append(_page(_live() if state is None else _live().where(_shows(state)), jobs, by_queue, by_task, after))
    if state in (None, JobState.DEAD):
        pages.append(_page(_dead(), dead, by_queue, by_task, after))
    listed = union_all(*(select(page) for page in pages)).subquery("listed") if len(pages) > 1 else pages[0]
    return select(listed).order_by(listed.c.id).limit(_LIMIT)


def _shows(state: JobState) -> Any:
    """Say of a live row that it shows under `state`, in terms that the indexes serve."""
    return {
        JobState.READY: or_(jobs.c.state == READY, DUE, LAPSED),
        JobState.DELAYED: and_(jobs.c.state == DELAYED, jobs.c.run_at > statement_now()),
        JobState.CLAIMED: and_(jobs.c.state == CLAIMED, jobs.c.claim_expires_at > statement_now()),
    }[state]


def _page(part: Select[Any], table: Table, by_queue: bool, by_task: bool, after: bool) -> Subquery:
    if by_queue:
        part = part.where(table.c.queue == _QUEUE)
    if by_task:
        part = part.where(table.c.task == bindparam("job_task", type_=Text))
    if after:
        part = part.where(table.c.id > bindparam("job_after", type_=BigInteger))
    return part.order_by(table.c.id).limit(_LIMIT).subquery()


def count_queues() -> Executable:
    """Count the jobs of every queue by state; dead ones only up to a bound, since their number has none."""
    due = or_(jobs.c.state == READY, DUE, LAPSED)
    live = (
        select(
            jobs.c.queue,
            func.count().filter(due).label("ready"),
            func.count().filter(jobs.c.state == DELAYED, ~DUE).label("delayed"),
            func.count().filter(jobs.c.state == CLAIMED, ~LAPSED).label("claimed"),
            func.min(case((due, jobs.c.run_at)), type_=UtcInstant).label("oldest"),
        )
        .group_by(jobs.c.queue)
        .subquery("live")
    )
    names = _dead_queues()
    every = union(select(live.c.queue), select(names.c.queue).where(names.c.queue.is_not(None))).subquery("every")
    counted = (
        select(literal_column("1"))
        .where(dead.c.queue == every.c.queue)
        .limit(constant(DEAD_COUNTED + 1))
        .correlate(every)
        .subquery("counted")
    )
    buried = select(func.count()).select_from(counted).scalar_subquery()
    age = microseconds_between(live.c.oldest, statement_now())
    zero = constant(0)
    return (
        select(
            every.c.queue,
            func.coalesce(live.c.ready, zero).label("ready"),
            func.coalesce(live.c.delayed, zero).label("delayed"),
            func.coalesce(live.c.claimed, zero).label("claimed"),
            buried.label("dead"),
            case((live.c.oldest.is_not(None), age), else_=null().cast(Span)).label("oldest_due_age"),
        )
        .select_from(every.outerjoin(live, live.c.queue == every.c.queue))
        .order_by(every.c.queue)
    )


def _dead_queues() -> Any:
    """Walk the distinct queue names of the dead table, one index look-up each."""
    names = select(func.min(dead.c.queue).label("queue")).cte("names", recursive=True)
    following = select(func.min(dead.c.queue)).where(dead.c.queue > names.c.queue).correlate(names).scalar_subquery()
    return names.union_all(select(following).where(names.c.queue.is_not(None)))


def select_now() -> Select[Any]:
    """Read the database's clock."""
    return select(statement_now())


def count_ahead() -> Executable:
    """Count, up to a bound, the ready jobs of a queue that are claimed before a given one."""
    placed = (bindparam("job_run_at", type_=UtcInstant), bindparam("job_id", type_=BigInteger))
    priority = bindparam("job_priority", type_=Integer)
    before = or_(jobs.c.priority > priority, and_(jobs.c.priority == priority, tuple_(jobs.c.run_at, jobs.c.id) < tuple_(*placed)))
    ahead = select(literal_column("1")).where(jobs.c.queue == _QUEUE, jobs.c.state == READY, before).limit(_LIMIT).subquery("ahead")
    return select(func.count()).select_from(ahead)


def select_dead() -> Select[Any]:
    """List the dead jobs of a queue by ascending id."""
    return _dead().where(dead.c.queue == _QUEUE, dead.c.id > bindparam("job_after", type_=BigInteger)).order_by(dead.c.id).limit(_LIMIT)


def select_next_deadline() -> Executable:
    """Say whether a queue has a ready row, and how long it is until its next delayed row is due or its next claim lapses."""
    now = statement_now()
    ready = select(constant(1)).where(jobs.c.queue == _QUEUE, jobs.c.state == READY).limit(constant(1)).scalar_subquery()
    run_at = _soonest(DELAYED, "run_at")
    lapse = _soonest(CLAIMED, "claim_expires_at")
    return select(
        ready.label("ready"), microseconds_between(now, run_at).label("until_due"), microseconds_between(now, lapse).label("until_lapse")
    )


def _soonest(state: Any, deadline: str) -> Any:
    row = jobs.alias()
    return (
        select(row.c[deadline])
        .where(row.c.queue == _QUEUE, row.c.state == state)
        .order_by(row.c[deadline])
        .limit(constant(1))
        .scalar_subquery()
    )
