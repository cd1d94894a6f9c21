"""Jobs run on the calling thread, one after the other, as a worker would settle them."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Final, Literal, Protocol, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from alkstore_sa._options import whole
from alkstore_sa._payload import Payload
from alkstore_sa.errors import InvalidOption, NotBound
from alkstore_sa.handles import JobHandle
from alkstore_sa.outbox import backing_queue
from alkstore_sa.outcomes import Fail, Retry, Snooze
from alkstore_sa.runs import Outcome, Run, conclude, note_settled
from alkstore_sa.sessions import Sessions, refuse_awaitable
from alkstore_sa.store import Parts, Store
from alkstore_sa.tasks import AsyncSessionFactory, SessionFactory, Tasks
from alkstore_sa.testing.joining import place

Lender: TypeAlias = Callable[[], Connection]
Errors: TypeAlias = Literal["raise", "record"]

WORKER_ID: Final = "run_due"
UNKNOWN_PAUSE: Final = 30.0
MOST_RUNS: Final = 1_000_000


@dataclass(frozen=True)
class RanJob:
    """One run of a job, settled. `outcome` is in words; `error` is what the handler raised."""

    id: int
    queue: str
    task: str | None
    payload: Payload
    attempts: int
    outcome: str
    error: BaseException | None


class Awaiting(Protocol):
    """How async handlers come to their end."""

    def sessions(self, lender: Lender | None) -> AsyncSessionFactory | None:
        """Give what makes their AsyncSessions, on the joined connection where there is a lender; None: there is no engine for them."""
        ...

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end."""
        ...


def run_due(tasks: Tasks, limit: int = 1000, errors: Errors = "raise") -> list[RanJob]:
    """Run what is due on the queues and outboxes of `tasks` on this thread, and what that enqueues, at most `limit` runs.

    Each run is settled as a worker settles it: done, retried with its backoff, snoozed, dead. Handlers with a Session get one on the
    connection that the store joined, or one of the registry's `session_factory`. Async handlers run to their end on an event loop of
    this call. After each run that failed, `errors="raise"` raises what the handler raised, the job being settled already; a handler's
    own `Retry`, `Snooze` or `Fail` is no failure. A `timeout` ends async handlers, as a worker does; heartbeats and concurrency are a
    worker's, and so are the timeouts of other handlers: here there are none.

    Raises:
        InvalidOption: an option; this is called from a running event loop; a handler takes an AsyncSession, and the store is joined or
            there is no `async_engine`; or (with `errors="raise"`) no handler is registered for a job, which is given back.
        NotBound: the tasks have no store.
    """
    if tasks.store is None:
        raise NotBound("these tasks have no store yet: write `tasks.bind(store)` first")
    with closing(_OwnLoop(tasks)) as loop:
        return settled_runs(tasks, tasks.store, loop, limit, errors)


def settled_runs(tasks: Tasks, store: Store, awaiting: Awaiting, limit: int, errors: Errors) -> list[RanJob]:
    """Run what is due in `store`, as `run_due` says."""
    whole("limit", limit, 1, MOST_RUNS)
    if errors not in ("raise", "record"):
        raise InvalidOption(f"errors {errors!r} is none of 'raise', 'record'")
    ran: list[RanJob] = []
    runs = _Runs(tasks, store, awaiting)
    for job in itertools.islice(runs.claimed(), limit):
        one = runs.settle(job)
        ran.append(one)
        if errors == "raise" and one.error is not None and not isinstance(one.error, (Retry, Snooze, Fail)):
            raise one.error
    return ran


class _Runs:
    """The runs of one call."""

    def __init__(self, tasks: Tasks, store: Store, awaiting: Awaiting) -> None:
        self._tasks = tasks
        self._store = store
        self._parts: Parts = store.parts
        self._queues = [*tasks.queues, *(backing_queue(name) for name in tasks.outboxes)]
        self._awaiting = awaiting
        lender = self._parts.database.lender
        factory = partial(_session, tasks.session_factory or sessionmaker(store.engine), store.engine, lender)
        self._sessions = Sessions(self._parts.database, 1, factory, awaiting.sessions(lender), None, in_use=())

    def claimed(self) -> Iterator[JobHandle]:
        """Claim one job after the other, the queues in turn, until all are empty."""
        database, jobs = self._parts.database, self._parts.jobs
        found = True
        while found:
            found = False
            for queue in self._queues:
                for row in database.run(jobs.claim_fresh, queue, WORKER_ID, 1):
                    found = True
                    yield JobHandle(jobs, row)

    def settle(self, job: JobHandle) -> RanJob:
        """Run one job and settle it."""
        handler = self._tasks.handler(job.queue, job.task)
        if handler is None:
            error = InvalidOption(f"no handler is registered for {f'task {job.task!r}' if job.task else f'jobs of queue {job.queue!r}'}")
            job.release(UNKNOWN_PAUSE, str(error))
            return _told(job, Outcome.RELEASED, error)
        run = Run(job, handler, time.monotonic())
        run.start()
        try:
            with nullcontext() if self._tasks.around is None else self._tasks.around(job):
                self._call(run)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the handler's failure
            run.error = error
        run.ended_at = time.monotonic()
        self._conclude(run)
        if run.outcome is Outcome.DEAD and self._tasks.on_dead is not None and (buried := self._store.get_job(job.id)) is not None:
            self._tasks.on_dead(buried)
        return _told(job, run.outcome or Outcome.DONE, run.error)

    def _call(self, run: Run) -> None:
        front, named = run.handler.arguments(run.job)
        if run.handler.is_async:
            self._awaiting.run(self._sessions.call_awaited(run, front, named))
        elif run.handler.session is not None:
            self._sessions.call(run, front, named)
        else:
            refuse_awaitable(run.handler.function(*front, **named))

    @staticmethod
    def _conclude(run: Run) -> None:
        if run.error is not None:
            conclude(run)
        elif run.commit_sent:
            run.outcome = Outcome.DONE
        elif run.job.settled:
            note_settled(run)
        else:
            run.outcome = Outcome.DONE if run.job.ack() else Outcome.LOST


class _OwnLoop:
    """An event loop that is made when an async handler comes."""

    def __init__(self, tasks: Tasks) -> None:
        self._engine = tasks.async_engine
        self._runner: asyncio.Runner | None = None

    def sessions(self, lender: Lender | None) -> AsyncSessionFactory | None:
        """Give sessions that live on this loop, and so cannot join."""
        if lender is not None:
            return _unjoinable
        return None if self._engine is None else async_sessionmaker(self._engine)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            coroutine.close()
            raise InvalidOption("run_due runs async handlers on a loop of its own: on a running one, await alkstore_sa.testing.aio.run_due")
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(coroutine)

    def close(self) -> None:
        """End the loop, and the connections that were opened on it."""
        if self._runner is not None:
            with self._runner as runner:
                if self._engine is not None:
                    runner.run(self._engine.dispose())


def _unjoinable() -> AsyncSession:
    raise InvalidOption(
        "an AsyncSession cannot join this test's transaction: run such a task on a store that is not joined,"
        " or join an AsyncStore by alkstore_sa.testing.aio"
    )


def _session(factory: SessionFactory, engine: Engine, lender: Lender | None) -> Session:
    session = factory()
    if lender is not None:
        join_session(session, engine, lender)
    return session


def join_session(session: Session, engine: Engine, lender: Lender) -> None:
    """Let a handler's Session, whatever kind its factory makes, send what is for the database of `engine` to the joined connection."""
    chosen = session.get_bind

    def get_bind(_session: Session, *args: Any, **kwargs: Any) -> Any:
        found = chosen(*args, **kwargs)
        return lender() if place(found.engine.url) == place(engine.url) else found

    session.get_bind = MethodType(get_bind, session)  # type: ignore[method-assign]
    session.join_transaction_mode = "create_savepoint"


def _told(job: JobHandle, outcome: Outcome, error: BaseException | None) -> RanJob:
    try:
        payload = job.payload
    except ValueError:
        payload = None
    return RanJob(job.id, job.queue, job.task, payload, job.attempts, str(outcome), error)
