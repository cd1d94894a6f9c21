"""Sessions that handlers are given: a fresh one per job, whose one commit carries the ack."""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from alkstore_sa.engines import Database
from alkstore_sa.errors import ClaimLost, InvalidOption
from alkstore_sa.outcomes import Snooze
from alkstore_sa.runs import Overrun, Run
from alkstore_sa.sqlite import is_busy
from alkstore_sa.statements.jobs import delete_held

log: Final = logging.getLogger("alkstore_sa.worker")

BUSY_PAUSE: Final = 0.1
CANCEL_SECONDS: Final = 2.0
GATE_POLL_SECONDS: Final = 0.005


class Sessions:
    """Makes the sessions of one worker's runs, at most as many at once as their pools give connections.

    `gate` is held by whoever writes to a SQLite file: one Session handler at a time, or the worker itself.
    """

    def __init__(
        self,
        database: Database,
        slots: int,
        factory: Callable[[], Session],
        async_factory: Callable[[], AsyncSession] | None,
        async_engine: Engine | None,
        *,
        in_use: Collection[str | None],
    ) -> None:
        self.gate: Final = threading.Lock() if database.dialect == "sqlite" else None
        self._database = database
        self._closed = False
        self._factory = factory
        self._async_factory = async_factory
        most = _most(_engine_of(factory) or database.engine, slots)
        most_async = slots if async_engine is None else _most(async_engine, slots)
        self._places = threading.Semaphore(most)
        self._async_places = asyncio.Semaphore(most_async)
        for kind, what, places in (("sync", "a Session", most), ("async", "an AsyncSession", most_async)):
            if kind in in_use and places < slots:
                log.warning(
                    "at most %s of %s slots run handlers with %s at once: its engine's pool has no more connections", places, slots, what
                )

    def call(self, run: Run, front: list[Any], named: dict[str, Any]) -> None:
        """Call a sync handler with a session, and commit it with the ack; an exception rolls it back and passes."""
        with self._places, self._through_gate():
            self._start(run)
            session = self._factory()
            with _Guard(run, session, self._database) as guard:
                try:
                    guard.begin()
                    with self._database.lent():
                        returned = run.handler.function(*run.handler.with_session(front, session), **named)
                    refuse_awaitable(returned)
                    if not guard.committed:
                        guard.by_worker = True
                        session.commit()
                except BaseException as error:
                    if guard.outlived(error):
                        return
                    with suppress(SQLAlchemyError):
                        session.rollback()
                    guard.rolled_back()
                    raise
                finally:
                    guard.let_go()
                    with suppress(SQLAlchemyError):
                        session.close()

    async def call_awaited(self, run: Run, front: list[Any], named: dict[str, Any]) -> None:
        """Call an async handler, with a session if it takes one.

        Raises `Overrun` once its timeout is over, which begins when it has its place and SQLite's gate, as for a sync handler.
        """
        if run.handler.session is None:
            await _in_time(run, run.handler.function(*front, **named))
            return
        if self._async_factory is None:
            raise InvalidOption("a handler with an AsyncSession needs async_engine=")
        async with self._async_places, self._through_gate_async():
            self._start(run)
            await _in_time(run, self._call_async(run, self._async_factory(), front, named))

    def close(self) -> None:
        """Let no further run begin: what waits for its place, or for the gate, is given back uncounted."""
        self._closed = True

    def _start(self, run: Run) -> None:
        if self._closed:
            raise Snooze(0)
        run.start()

    async def _call_async(self, run: Run, session: AsyncSession, front: list[Any], named: dict[str, Any]) -> None:
        with _Guard(run, session.sync_session, self._database) as guard:
            try:
                await session.run_sync(lambda _session: guard.begin())
                with self._database.lent():
                    await run.handler.function(*run.handler.with_session(front, session), **named)
                if not guard.committed:
                    guard.by_worker = True
                    await session.commit()
            except BaseException as error:
                if guard.outlived(error):
                    return
                with suppress(SQLAlchemyError):
                    await session.rollback()
                guard.rolled_back()
                raise
            finally:
                with suppress(SQLAlchemyError):
                    await session.close()

    @contextmanager
    def _through_gate(self) -> Iterator[None]:
        if self.gate is None:
            yield
            return
        with self.gate:
            yield

    @asynccontextmanager
    async def _through_gate_async(self) -> AsyncIterator[None]:
        if self.gate is None:
            yield
            return
        # whoever holds it may be a thread, and an executor's wait could outlive its task, and keep the gate
        while not self.gate.acquire(blocking=False):  # noqa: ASYNC110
            await asyncio.sleep(GATE_POLL_SECONDS)
        try:
            yield
        finally:
            self.gate.release()


class _Guard:
    """Watches one session: who may commit it, and that the ack is in that commit."""

    def __init__(self, run: Run, session: Session, database: Database) -> None:
        self._run = run
        self._session = session
        self._database = database
        self._lock = threading.Lock()
        self._driver: Any = None
        self.by_worker = False
        self.committed = False

    def __enter__(self) -> Self:
        for name, hook in self._hooks():
            event.listen(self._session, name, hook)
        self._run.on_interrupt(self._cancel_statement)
        return self

    def __exit__(self, *exc: object) -> None:
        for name, hook in self._hooks():
            event.remove(self._session, name, hook)

    def _hooks(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        return (
            ("before_commit", self._before_commit),
            ("after_commit", self._after_commit),
            ("after_begin", self._after_begin),
            ("do_orm_execute", self._refuse_late),
            ("before_flush", self._refuse_late),
        )

    def begin(self) -> None:
        """Take SQLite's write lock before the handler starts: a busy file gives the job back uncounted."""
        ours = self._database.statement(delete_held)
        self._database.refuse_elsewhere(self._session, ours)
        if self._database.dialect != "sqlite":
            return
        try:
            self._database.begin_in(self._session, ours)
        except OperationalError as error:
            if is_busy(error):
                raise Snooze(BUSY_PAUSE) from error
            raise

    def outlived(self, error: BaseException) -> bool:
        """Tell whether the work is committed, so that what comes after does not count."""
        if self.committed:
            log.warning("job %s: %s after its commit", self._run.job.id, type(error).__name__, exc_info=error, extra=self._run.fields)
        return self.committed

    def rolled_back(self) -> None:
        """Undo what the handle believes of an ack that was rolled back."""
        self._run.job.settled = False

    def let_go(self) -> None:
        """Forget the connection, which goes back to its pool now: nobody may cancel what it does next."""
        with self._lock:
            self._driver = None

    def _before_commit(self, session: Session) -> None:
        if session.in_nested_transaction():  # a savepoint's release is the handler's own affair
            return
        if not (self.by_worker or self._run.handler.own_commit):
            raise InvalidOption(
                "the worker commits this session when the handler returns, with the job's ack in it: leave commit() out,"
                " use session.begin_nested() for a part that may fail, or declare the task with own_commit=True"
            )
        if self.committed:
            raise InvalidOption("this session's one commit, which carried the job's ack, is over: do everything before it")
        self._refuse_late()
        session.flush()
        self._run.job.ack_tx(session)
        self._run.commit_sent = True

    def _refuse_late(self, *_: object) -> None:
        """Break the handler off where no statement ran that could be cancelled: somebody else may be at its job."""
        if self.committed:
            return
        if self._run.overran and self._run.handler.timeout is not None:
            raise Overrun(self._run.handler.timeout)
        if self._run.job.lost.is_set():
            raise ClaimLost(f"job {self._run.job.id} is no longer held: what was done for it is rolled back")

    def _after_commit(self, session: Session) -> None:
        if self._run.commit_sent and not session.in_nested_transaction():
            self.committed = True

    def _after_begin(self, _session: Session, _transaction: object, connection: Connection) -> None:
        with self._lock:
            self._driver = connection.connection.driver_connection

    def _cancel_statement(self) -> None:
        with self._lock:
            for way, arguments in (("cancel_safe", {"timeout": CANCEL_SECONDS}), ("interrupt", {})):
                cancel = getattr(self._driver, way, None)
                if cancel is not None and not inspect.iscoroutinefunction(cancel):
                    cancel(**arguments)
                    return


async def _in_time(run: Run, work: Awaitable[object]) -> None:
    """Await what a handler does; raises `Overrun`, after the rollback, once the handler's timeout is over."""
    if run.handler.timeout is None:
        await work
        return
    limit = asyncio.timeout(run.handler.timeout)
    try:
        async with limit:
            await work
    except TimeoutError as error:
        if limit.expired():
            raise Overrun(run.handler.timeout) from error
        raise


def refuse_awaitable(returned: object) -> None:
    """Raise `TypeError` for what a plain function returned and nobody awaits."""
    if returned is not None and inspect.isawaitable(returned):
        getattr(returned, "close", getattr(returned, "cancel", lambda: None))()
        raise TypeError("the handler returned an awaitable, which nobody awaits: make it an `async def`")


def _engine_of(factory: Callable[[], Session]) -> Engine | None:
    """Give the engine that a sessionmaker is bound to; what any other callable uses shows only in its sessions."""
    bind = factory.kw.get("bind") if isinstance(factory, sessionmaker) else None
    return bind if isinstance(bind, Engine) else None


def _most(engine: Engine, slots: int) -> int:
    pool = engine.pool
    if not isinstance(pool, QueuePool):
        return slots
    overflow = pool._max_overflow  # noqa: SLF001 - the pool does not tell it otherwise
    most = slots if overflow < 0 else max(1, pool.size() + overflow)
    return min(most, slots)
