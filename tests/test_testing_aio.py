"""The helpers for an application's tests, on a running event loop."""

import asyncio
import contextlib
import threading
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from test_aio import async_url, opened

from alkstore_sa import AsyncStore, InvalidOption, JobHandle, JobState, NotBound, Snooze, Store, Tasks, prepare_sqlite
from alkstore_sa.testing import run_due as run_due_blocking
from alkstore_sa.testing.aio import advance, assert_enqueued, joined, run_due

pytestmark = pytest.mark.timeout(60)


@contextlib.asynccontextmanager
async def rolled_back(store):
    """A test's own connection, in a transaction."""
    async with store.engine.connect() as connection:
        transaction = await connection.begin()
        yield connection
        await transaction.rollback()


@contextlib.asynccontextmanager
async def perhaps_joined(how, store):
    if how == "apart":
        yield
        return
    async with rolled_back(store) as connection, joined(store, connection):
        yield


async def count(connection, table="alkstore_job"):
    return (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar()


# -- joined -----------------------------------------------------------------------------------------------------------


def test_every_verb_of_a_joined_store_is_in_the_tests_transaction_and_rolled_back_with_it(database, async_driver):
    async def main():
        async with opened(database, async_driver) as store:
            async with rolled_back(store) as connection, joined(store, connection) as same:
                assert same is store
                queue = store.queue("q", max_attempts=1)
                await queue.enqueue_many([1, 2, 3])
                first, second = await queue.claim("w", limit=2)
                assert await first.ack()
                assert await second.fail("no")
                await store.schedule("s", "@every 1m", "q")
                await store.tick()
                async with store.lock("l"), store.begin() as own:
                    assert await count(own, "alkstore_lock") == 1
                assert await store.try_lock("l") is not None
                assert database.kind == "sqlite" or database.count() == 0  # nobody else sees it
                assert await count(connection) == 1
                with pytest.raises(InvalidOption, match="run_at"):
                    await store.enqueue("q", 1, run_at=(await store.jobs())[0].enqueued_at + timedelta(hours=2), expires=60)
                with pytest.raises(RuntimeError, match="mine"):
                    async with store.begin() as own:
                        await own.execute(text("DELETE FROM alkstore_job"))
                        raise RuntimeError("mine")
                assert await count(connection) == 1
            for table in ("job", "dead", "schedule", "lock"):
                assert database.count(f"alkstore_{table}") == 0
            await store.enqueue("q", 2)
            assert database.count() == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ["bound to a connection", "on the engine", "scoped"])
def test_a_joined_session_and_the_store_see_each_other(database, async_driver, how):
    async def main():
        async with opened(database, async_driver) as store, contextlib.AsyncExitStack() as stack:
            bind = store.engine
            if how == "bound to a connection":
                bind = await stack.enter_async_context(rolled_back(store))
            made = async_sessionmaker(bind, join_transaction_mode="create_savepoint")
            session = async_scoped_session(made, asyncio.current_task) if how == "scoped" else made()
            stack.push_async_callback(session.remove if how == "scoped" else session.close)
            async with joined(store, session):
                first = await store.enqueue_tx(session, "q", 1)
                assert await store.get_job(first) is not None
                second = await store.enqueue("q", 2)
                assert [job.id for job in await store.jobs()] == [first, second]
                assert (await assert_none_elsewhere(database)) is None
                if how == "bound to a connection":
                    await session.commit()
                    await session.rollback()
                    assert len(await store.jobs()) == 2
        assert database.count() == 0

    async def assert_none_elsewhere(database):
        assert database.kind == "sqlite" or database.count() == 0

    asyncio.run(main())


def test_only_this_task_and_what_it_starts_are_joined(database, async_driver):
    async def main():
        async with opened(database, async_driver) as store:
            entered, looked = asyncio.Event(), asyncio.Event()

            async def beside():
                await entered.wait()
                jobs = await store.jobs()
                looked.set()
                return jobs

            task = asyncio.create_task(beside())
            async with rolled_back(store) as connection, joined(store, connection):
                await store.enqueue("q", 1)
                assert len(await asyncio.create_task(store.jobs())) == 1
                entered.set()
                await looked.wait()
            assert not await task

    asyncio.run(main())


def test_what_cannot_be_joined_is_refused(database, async_driver, tmp_path):
    async def refused(store, tx, error, match):
        with pytest.raises(error, match=match):
            async with joined(store, tx):
                pass

    async def main():
        async with opened(database, async_driver) as store:
            await refused(store, 1, TypeError, "int is no AsyncSession")
            with Session() as blocking:
                await refused(store, blocking, TypeError, "Session is no AsyncSession")
            elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
            async with elsewhere.connect() as connection:
                await refused(store, connection, InvalidOption, "another database")
            await elsewhere.dispose()
            if database.kind == "postgresql":
                async with store.engine.connect() as connection:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    await refused(store, connection, InvalidOption, "autocommit")
            else:
                unprepared = create_async_engine(async_url(database, async_driver))
                async with unprepared.connect() as connection:
                    await refused(store, connection, InvalidOption, "prepare_sqlite")
                await unprepared.dispose()

    asyncio.run(main())


# -- run_due ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["joined", "apart"])
def test_due_jobs_run_here_with_what_they_enqueue(database, async_driver, how):
    database.sql("CREATE TABLE paid (id INTEGER)")
    seen = []

    async def main():
        async with opened(database, async_driver) as store:
            tasks, loop = Tasks(store), asyncio.get_running_loop()

            @tasks.task(name="order")
            async def order(session: AsyncSession, order: int) -> None:
                await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": order})
                await pay.aenqueue_tx(session, order)

            @tasks.task(name="pay")
            def pay(session: Session, order: int) -> None:
                session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": order})
                mail.enqueue_tx(session, to="ada")

            @tasks.task(name="mail", queue="mails")
            async def mail(job: JobHandle, to: str) -> None:
                assert asyncio.get_running_loop() is loop
                await asyncio.sleep(0)
                seen.append((to, job.attempts, threading.current_thread() is threading.main_thread()))
                await log.aenqueue()

            @tasks.task(name="log")
            def log() -> None:
                seen.append("logged")

            @tasks.delivery("webhooks")
            async def deliver(job: JobHandle) -> None:
                seen.append(job.payload)

            async with perhaps_joined(how, store):
                await order.aenqueue(order=7)
                await order.options(delay=60).aenqueue(order=8)
                await store.outbox("webhooks").enqueue("hook")
                ran = await run_due(tasks)
                assert all(one in seen for one in (("ada", 1, True), "logged", "hook"))
                assert sorted((one.task or "", one.outcome) for one in ran) == [
                    (name, "done") for name in ("", "log", "mail", "order", "pay")
                ]
                assert [job.payload for job in await store.jobs()] == [{"order": 8}]
                await advance(store, 60)
                assert [one.task for one in await run_due(tasks, limit=2)] == ["order", "pay"]
                await assert_enqueued(store, mail, to="ada")
        assert database.count("paid") == (0 if how == "joined" else 4)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["joined", "apart"])
def test_a_failure_is_raised_once_its_job_is_settled_or_recorded(database, async_driver, how):
    database.sql("CREATE TABLE paid (id INTEGER)")
    dead = []

    async def main():
        async with opened(database, async_driver) as store:
            tasks = Tasks(store, async_engine=store.engine, on_dead=lambda job: dead.append(job.last_error.splitlines()[0]))

            @tasks.task(name="pay", max_attempts=2)
            async def pay(session: AsyncSession) -> None:
                await session.execute(text("INSERT INTO paid VALUES (1)"))
                raise LookupError("no such order")

            @tasks.task(name="later")
            async def later() -> None:
                raise Snooze(3600)

            async with perhaps_joined(how, store):
                job_id = await pay.aenqueue()
                with pytest.raises(LookupError, match="no such order"):
                    await run_due(tasks)
                job = await store.get_job(job_id)
                assert (job.state, job.attempts) == (JobState.DELAYED, 1)
                assert job.last_error.startswith("LookupError: no such order")
                await advance(store, 30)
                await later.aenqueue()
                ran = await run_due(tasks, errors="record")
                assert sorted(one.outcome for one in ran) == ["dead", "snoozed"]
                assert dead == ["LookupError: no such order"]
                async with store.begin() as bind:
                    assert await count(bind, "paid") == 0

    asyncio.run(main())


def test_a_timeout_ends_an_async_handler(database, async_driver):
    async def main():
        async with opened(database, async_driver) as store:
            tasks = Tasks(store)

            @tasks.task(name="hang", timeout=0.01)
            async def hang() -> None:
                await asyncio.Event().wait()

            async with perhaps_joined("joined", store):
                await hang.aenqueue()
                [one] = await run_due(tasks, errors="record")
                assert one.outcome == "put back for another attempt"
                assert [job.last_error for job in await store.jobs()] == ["timeout: longer than 0.01 s"]

    asyncio.run(main())


def test_a_store_beside_it_and_a_session_factory_of_its_own_engine_join_too(database, async_driver):
    """As in an application whose web half is asynchronous, and whose handlers are not."""
    database.sql("CREATE TABLE paid (id INTEGER)")
    engine = create_engine(database.url)
    if database.kind == "sqlite":
        prepare_sqlite(engine)

    async def main():
        async with opened(database, async_driver) as store, rolled_back(store) as connection:
            with Store(engine) as beside:
                tasks = Tasks(beside, session_factory=sessionmaker(engine)).bind(store)

                @tasks.task(name="pay")
                def pay(session: Session) -> None:
                    session.execute(text("INSERT INTO paid VALUES (1)"))

                @tasks.task(name="start")
                def start() -> None:
                    pay.enqueue()

                async with joined(store, connection), joined(beside, connection):
                    await start.aenqueue()
                    assert [one.task for one in await run_due(tasks)] == ["start", "pay"]
                    assert await count(connection, "paid") == 1
        assert database.count("paid") == database.count() == 0

    asyncio.run(main())
    engine.dispose()


def test_the_way_to_a_running_loop_is_said_where_it_is_missed(database, async_driver):
    async def main():
        async with opened(database, async_driver) as store:
            tasks = Tasks(store)

            @tasks.task(name="a", max_attempts=1)
            async def run() -> None: ...

            with database.store() as blocking:
                run.on(blocking).enqueue()
                with pytest.raises(InvalidOption, match=r"await alkstore_sa\.testing\.aio\.run_due"):
                    run_due_blocking(tasks.bind(blocking))
                with pytest.raises(NotBound, match="no AsyncStore"):
                    await run_due(Tasks(blocking))
            with pytest.raises(InvalidOption, match="errors"):
                await run_due(tasks, errors="ignore")

    asyncio.run(main())


# -- assert_enqueued --------------------------------------------------------------------------------------------------


def test_what_was_enqueued_is_found_stored_or_pending(database, async_driver):
    async def main():
        async with opened(database, async_driver) as store:
            tasks = Tasks(store)

            @tasks.task(name="mail")
            def mail(order: int, fn: str = "nobody") -> None: ...

            async with AsyncSession(store.engine) as session:
                pending = await mail.aenqueue_tx(session, 1, fn="ada")
                assert (await assert_enqueued(session, mail, order=1, fn="ada")).id == pending
                assert (await assert_enqueued(await session.connection(), mail)).id == pending
                with pytest.raises(AssertionError, match="no job of this task at all"):
                    await assert_enqueued(store, mail)
                await session.commit()
            assert (await assert_enqueued(store, mail, order=1)).id == pending
            with pytest.raises(AssertionError, match=r"fn='ada' \(expected 'bob'\)"):
                await assert_enqueued(store, mail, fn="bob")
            with pytest.raises(TypeError, match="no parameter oder"):
                await assert_enqueued(store, mail, oder=1)

    asyncio.run(main())


def test_the_twins_have_the_parameters_of_the_blocking_helpers():
    import inspect

    from alkstore_sa import testing
    from alkstore_sa.testing import aio

    assert testing.__all__ == aio.__all__
    for name in ("advance", "assert_enqueued", "joined", "run_due"):
        one, other = (inspect.signature(getattr(module, name)).parameters.values() for module in (testing, aio))
        assert [(p.name, p.kind, p.default) for p in one] == [(p.name, p.kind, p.default) for p in other]
    assert AsyncStore.beneath.__doc__
