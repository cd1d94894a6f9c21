"""Handlers with a Session: how many run at once, and when their time begins."""

import asyncio

import pytest
from eventually import eventually
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import NullPool
from test_aio import async_url

from alkstore_sa import ClaimLost, JobHandle, StopToken, Tasks, Worker, loop, prepare_sqlite
from alkstore_sa.runs import Outcome, Overrun
from alkstore_sa.sessions import Sessions

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tasks(store):
    return Tasks(store)


def drained(store, tasks, jobs, **options):
    """Let a worker do so many runs, and give its report."""
    return Worker(store, tasks, **{"concurrency": jobs, "max_jobs": jobs, **options}).run(StopToken())


def async_engine(database, **options):
    """An engine of the worker's own."""
    if database.kind == "sqlite":
        engine = create_async_engine(database.url.replace("sqlite:", "sqlite+aiosqlite:"), **{"poolclass": NullPool, **options})
        prepare_sqlite(engine.sync_engine)
        return engine
    return create_async_engine(database.url, **{"poolclass": NullPool, **options})


@pytest.mark.databases("postgresql-18")  # on SQLite one runs at a time anyhow
def test_no_more_handlers_run_at_once_than_the_pool_of_their_sessionmaker_gives_connections(database, store, tasks, caplog):
    @tasks.task(name="t", max_attempts=1)
    def fn(session: Session) -> None:
        session.execute(text("SELECT pg_sleep(0.2)"))

    fn.enqueue_many([fn.call()] * 5)
    small = database.engine(pool_size=1, max_overflow=0, pool_timeout=0.3)
    report = drained(store, tasks, 5, session_factory=sessionmaker(small))

    assert report.outcomes == {Outcome.DONE: 5}
    assert "at most 1 of 5 slots run handlers with a Session at once" in caplog.text


@pytest.mark.databases("postgresql-18")
def test_a_pool_of_the_async_engine_that_is_smaller_than_the_slots_is_said(database, store, caplog):
    engine = async_engine(database, poolclass=None, pool_size=2, max_overflow=1)
    Sessions(
        store.parts.database, 4, sessionmaker(database.engine(pool_size=1, max_overflow=1)), None, engine.sync_engine, in_use={"async"}
    )

    assert len(caplog.records) == 1  # of the sync pool nothing, since no handler uses it
    assert "at most 3 of 4 slots run handlers with an AsyncSession at once" in caplog.text


@pytest.mark.databases("sqlite")
def test_an_async_handlers_time_begins_when_it_has_its_place(database, store, tasks):
    """SQLite's gate lets one through at a time."""

    @tasks.task(name="holds", priority=1)
    async def holds(session: AsyncSession) -> None:
        await asyncio.sleep(6)

    @tasks.task(name="waits", timeout=5, max_attempts=1)
    async def waits(session: AsyncSession) -> None: ...

    holds.enqueue()
    waits.enqueue()
    report = drained(store, tasks, 2, async_engine=async_engine(database))

    assert report.outcomes == {Outcome.DONE: 2}


def test_an_async_handler_that_overruns_is_rolled_back_before_its_job_is_settled(database, store, tasks):
    database.sql("CREATE TABLE written (n INTEGER NOT NULL)")

    @tasks.task(name="t", timeout=0.2, max_attempts=1)
    async def fn(session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO written VALUES (1)"))
        await asyncio.sleep(30)

    job_id = fn.enqueue()
    report = drained(store, tasks, 1, async_engine=async_engine(database))

    assert report.outcomes == {Outcome.DEAD: 1}
    assert "timeout: longer than 0.2 s" in store.get_job(job_id).last_error
    assert not database.sql("SELECT n FROM written")


def test_workers_in_turn_share_an_async_engine_and_leave_no_connection_of_their_loops_in_its_pool(
    database, async_driver, store, tasks, monkeypatch
):
    """Under asyncpg the second one would fail on a connection of a loop that is closed."""
    monkeypatch.setattr(loop, "CLOSING_SECONDS", 20.0)
    database.sql("CREATE TABLE written (n INTEGER NOT NULL)")
    engine = create_async_engine(async_url(database, async_driver))
    if database.kind == "sqlite":
        prepare_sqlite(engine.sync_engine)

    @tasks.task(name="t", max_attempts=1)
    async def fn(session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO written VALUES (1)"))

    for _ in range(2):
        fn.enqueue()
        assert drained(store, tasks, 1, async_engine=engine).outcomes == {Outcome.DONE: 1}
        assert engine.pool.checkedin() == 0
    assert database.sql("SELECT count(*) FROM written") == [(2,)]


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "written"
    n: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("how", ["execute", "flush"])
@pytest.mark.parametrize("late", ["overrun", "lost"])
def test_a_session_handler_that_is_late_between_two_statements_gets_no_further(database, store, tasks, how, late):
    """When it is interrupted, no statement runs that could be cancelled."""
    database.sql("CREATE TABLE written (n INTEGER PRIMARY KEY)")
    refused = []

    @tasks.task(name="t", timeout=1 if late == "overrun" else None, max_attempts=1)
    def fn(job: JobHandle, session: Session) -> None:
        session.add(Row(n=1))
        session.flush()
        if late == "lost":
            job.lost.set()  # as a heartbeat does that finds the claim gone
        assert job.lost.wait(30)
        session.add(Row(n=2))
        try:
            if how == "flush":
                session.flush()
            else:
                with session.no_autoflush:
                    session.execute(text("SELECT 1"))
        except Exception as error:
            refused.append(type(error))
            raise

    fn.enqueue()
    drained(store, tasks, 1, concurrency=3)
    eventually(lambda: refused)

    assert refused == [Overrun if late == "overrun" else ClaimLost]
    assert not database.sql("SELECT n FROM written")
