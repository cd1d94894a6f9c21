"""Handlers with a Session: how many run at once, and when their time begins."""

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from alkstore_sa import StopToken, Tasks, Worker, prepare_sqlite
from alkstore_sa.runs import Outcome

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


def test_an_async_handlers_time_begins_when_it_has_its_place(database, store, tasks):
    """SQLite's gate lets one through at a time, and so does a pool of one connection."""
    ran = []

    @tasks.task(name="t", timeout=0.6, max_attempts=1)
    async def fn(session: AsyncSession, n: int) -> None:
        await asyncio.sleep(0.2)
        ran.append(n)

    fn.enqueue_many([fn.call(n) for n in range(6)])
    options = {} if database.kind == "sqlite" else {"poolclass": None, "pool_size": 1, "max_overflow": 0}
    report = drained(store, tasks, 6, async_engine=async_engine(database, **options))

    assert report.outcomes == {Outcome.DONE: 6}
    assert sorted(ran) == list(range(6))


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
