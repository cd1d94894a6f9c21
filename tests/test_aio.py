"""The async surface: the same verbs over the same core, on an event loop that never stands still."""

import asyncio
import contextlib
import faulthandler
import inspect
import logging
import os
import random
import socket
import threading
import time
import typing
from pathlib import Path

import pytest
from databases import admin
from eventually import stopwatch
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

import alkstore_sa
from alkstore_sa import (
    AsyncStore,
    ClaimLost,
    InvalidOption,
    InvalidPayload,
    JobState,
    LeadershipLost,
    LeaseLost,
    LockHeld,
    NotBound,
    SchemaMissing,
    StopToken,
    Store,
    StoreClosed,
    Tasks,
    prepare_sqlite,
)


def async_url(database, async_driver):
    return database.url.replace("sqlite:", "sqlite+aiosqlite:").replace("+psycopg:", f"+{async_driver}:")


@contextlib.asynccontextmanager
async def opened(database, async_driver, **options):
    engine = create_async_engine(async_url(database, async_driver))
    if database.kind == "sqlite":
        prepare_sqlite(engine.sync_engine)
    try:
        async with AsyncStore(engine, **options) as store:
            yield store
    finally:
        await engine.dispose()


def busy_seconds():
    """For how long this thread has computed, or waited for a processor: what a busy machine draws out, and no call that blocks is."""
    try:
        computed, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except FileNotFoundError:
        return time.thread_time()
    return (int(computed) + int(queued)) / 1e9


@contextlib.asynccontextmanager
async def ticking(bound=0.4):
    """A task that ticks beside the body, and fails the test if a call ever blocked the loop for longer than the bound.

    A thread ticks, too: what holds both up is a busy machine, not a call that blocks.
    """
    ended = threading.Event()
    gaps, others = [], []

    def tick_in_thread():
        last = time.monotonic()
        while not ended.wait(0.01):
            others.append(time.monotonic() - last)
            last = time.monotonic()

    async def tick():
        last = time.monotonic() - busy_seconds()
        while True:
            faulthandler.dump_traceback_later(bound)  # says where the loop stands still
            await asyncio.sleep(0.01)
            now = time.monotonic() - busy_seconds()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick_in_thread)
    thread.start()
    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        ended.set()
        faulthandler.cancel_dump_traceback_later()
        thread.join()
    assert max(gaps) < bound + max(others, default=0), f"the loop stood still for {max(gaps):.2f} s"


async def soon(condition, within=30.0):
    end = time.monotonic() + within
    while not (answer := await condition()):
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.02)
    return answer


def table_exists(database):
    database.sql("CREATE TABLE host (n INTEGER)")


# -- the surface ----------------------------------------------------------------------------------------------------

PAIRS = [
    ("Store", "AsyncStore"),
    ("Queue", "AsyncQueue"),
    ("JobHandle", "AsyncJobHandle"),
    ("Lease", "AsyncLease"),
    ("Outbox", "AsyncOutbox"),
]
PLAIN = {"queue", "outbox", "stamped_queue", "parts"}  # plain calls on both sides
MANAGERS = {"lock", "begin"}
BENEATH = {"parts", "keep", "told", "is_of", "is_pending", "is_doubtful"}  # what the rooms above and below use


def shape(function):
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)

    def told(hint):
        if hint in (alkstore_sa.Tx, alkstore_sa.AsyncTx):
            return "TX"
        said = inspect.formatannotation(hint).replace("sqlalchemy.orm.session.", "").replace("sqlalchemy.ext.asyncio.session.", "")
        said = said.replace("sqlalchemy.engine.base.", "").replace("sqlalchemy.ext.asyncio.engine.", "").replace("collections.abc.", "")
        for name in ("JobHandle", "Lease", "Queue", "Outbox"):
            said = said.replace(f"alkstore_sa.aio_handles.Async{name}", name)
        said = said.replace("alkstore_sa.handles.", "").replace("alkstore_sa.locks.", "").replace("alkstore_sa.deliveries.", "")
        said = said.replace("Awaitable[None]", "None").replace("AsyncIterator", "Iterator")
        return said.replace("contextlib.AbstractAsyncContextManager", "contextlib.AbstractContextManager")

    parameters = [(p.name, p.kind, p.default, told(hints.get(p.name, None))) for p in signature.parameters.values()]
    return parameters, told(hints["return"])


def test_the_ticking_task_tells_a_call_that_blocks_from_one_that_computes():
    async def watched(call):
        async with ticking():
            await asyncio.sleep(0.05)
            call()
            await asyncio.sleep(0.05)

    def compute():
        end = time.thread_time() + 0.6
        while time.thread_time() < end:
            pass

    asyncio.run(watched(compute))
    with pytest.raises(AssertionError, match="stood still"):
        asyncio.run(watched(lambda: time.sleep(3)))  # longer than a busy machine holds the ticking thread up


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_both_surfaces_have_the_same_verbs_with_the_same_signatures(blocking, asynchronous):
    one, other = getattr(alkstore_sa, blocking), getattr(alkstore_sa, asynchronous)
    names = {name for name in dir(one) if not name.startswith("_")} - BENEATH
    assert names - {name for name in dir(other)} <= {"engine", "name", "owner", "token", "expires_at"}
    assert {name for name in dir(other) if not name.startswith("_")} - names <= {
        "beneath",
        "handle",
        "sync",
        "expires_at",
        "name",
        "owner",
        "token",
        "lost",
    }
    for name in sorted(names):
        function = getattr(one, name)
        if not callable(function) or not inspect.isfunction(function):
            continue
        twin = getattr(other, name)
        parameters, answer = shape(function)
        others, twin_answer = shape(inspect.unwrap(twin))
        assert parameters == others, name
        if name not in MANAGERS:
            assert answer == twin_answer, name
        assert inspect.iscoroutinefunction(twin) is (name not in PLAIN | MANAGERS | {"jobs"} or (blocking, name) == ("Store", "jobs")), name


# -- jobs -----------------------------------------------------------------------------------------------------------


def test_a_job_lives_as_on_the_blocking_surface(database, async_driver):
    async def live():
        async with opened(database, async_driver) as store:
            queue = store.queue("q", max_attempts=2)
            await store.verify()
            first = await queue.enqueue({"n": 1}, headers={"k": "v"}, priority=3)
            others = await queue.enqueue_many(range(20_000), expires=3600)
            assert others == sorted(others)
            job = await queue.claim_one("w")
            assert (job.id, job.payload, job.headers, job.attempts, job.fence) == (first, {"n": 1}, {"k": "v"}, 1, 1)
            assert await job.heartbeat(120)
            assert await job.retry(ValueError("no"), 3600)
            assert not await job.ack()
            assert job.lost.is_set()
            assert (await store.get_job(first)).state is JobState.DELAYED
            claimed = await queue.claim("w", 100)
            assert [one.payload for one in claimed] == list(range(100))
            assert await queue.ack_many(claimed[:98]) == 98
            assert await claimed[98].release(60)
            assert await claimed[99].fail("broken")
            [dead] = await queue.dead()
            assert (dead.id, dead.last_error) == (claimed[99].id, "broken")
            assert await queue.replay(dead.id)
            assert await queue.replay_all() == 0
            assert await queue.purge_dead(older_than=0) == 0
            [stats] = await store.queues()
            assert (stats.ready, stats.delayed, stats.claimed, stats.dead) == (19_901, 2, 0, 0)
            assert len(await store.jobs(queue="q", state=JobState.READY, limit=7)) == 7
            assert await store.cancel(first)

    asyncio.run(live())


def test_a_job_commits_or_vanishes_with_the_rows_of_the_async_transaction(database, async_driver):
    table_exists(database)

    async def write():
        async with opened(database, async_driver) as store:
            queue, outbox = store.queue("q"), store.outbox("o")
            sessions = async_sessionmaker(store.engine)
            for commit in (True, False):
                async with sessions() as session:
                    await session.execute(text("INSERT INTO host VALUES (1)"))
                    await queue.enqueue_tx(session, "s")
                    await store.outbox_enqueue_tx(session, "o", "s")
                    await session.run_sync(store.sync.queue("q").enqueue_tx, "run_sync")
                    await (session.commit() if commit else session.rollback())
                scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)
                await outbox.enqueue_many_tx(scoped, ["a", "b"])
                await (scoped.commit() if commit else scoped.rollback())
                await scoped.remove()
                async with store.engine.connect() as connection:
                    await store.enqueue_tx(connection, "q", "c")
                    async with await connection.begin_nested() as savepoint:
                        await store.enqueue_tx(connection, "q", "lost")
                        await savepoint.rollback()
                    await (connection.commit() if commit else connection.rollback())
            async with store.begin() as own:
                await queue.enqueue_many_tx(own, ["d", "e"])
            return [job.payload for job in await store.jobs()]

    assert asyncio.run(write()) == ["s", "s", "run_sync", "a", "b", "c", "d", "e"]
    assert database.count("host") == 1


def test_an_ack_commits_with_the_writes_of_the_async_session_or_refuses(database, async_driver):
    table_exists(database)

    async def handle():
        async with opened(database, async_driver) as store:
            queue = store.queue("q")
            await queue.enqueue(1)
            job = await queue.claim_one("w")
            async with AsyncSession(store.engine) as session:
                await session.execute(text("INSERT INTO host VALUES (1)"))
                await job.ack_tx(session)
                await session.commit()
            async with AsyncSession(store.engine) as session:
                await session.execute(text("INSERT INTO host VALUES (2)"))
                with pytest.raises(ClaimLost):
                    await job.ack_tx(session)

    asyncio.run(handle())
    assert database.count("host") == 1
    assert database.count() == 0


def test_a_loop_over_jobs_is_woken_by_another_connections_commit(database, async_driver):
    async def consume():
        async with opened(database, async_driver, poll=60) as store, ticking():
            queue, stop, came = store.queue("q"), StopToken(), []

            async def work():
                async for job in queue.jobs("w", stop):
                    came.append(job.payload)
                    await job.ack()

            task = asyncio.create_task(work())
            await asyncio.sleep(1)
            began = time.monotonic()
            with Store(database.engine()) as other:
                await asyncio.to_thread(other.enqueue, "q", "hello")
            await soon(lambda: asyncio.sleep(0, came))
            assert time.monotonic() - began < 15  # woken: the poll is a minute
            stop.cancel()
            await asyncio.wait_for(task, 20)
            assert came == ["hello"]

    asyncio.run(consume())


def test_a_claim_that_its_caller_did_not_see_is_given_back(database, async_driver):
    rng = random.Random(7)

    async def claim():
        async with opened(database, async_driver) as store:
            queue, kept = store.queue("q"), []
            await queue.enqueue_many(range(30))
            for _ in range(30):
                try:
                    kept += await asyncio.wait_for(queue.claim("w"), rng.uniform(0, 0.006))
                except TimeoutError:
                    continue
            jobs = [job for job in await store.jobs(state=JobState.CLAIMED, limit=100)]
            assert [job.id for job in jobs] == sorted(job.id for job in kept)
            assert all(job.attempts == 0 for job in await store.jobs(state=JobState.READY, limit=100))

    asyncio.run(claim())


def test_closing_the_loop_over_jobs_ends_it_at_once_and_keeps_nothing(database, async_driver):
    async def close():
        async with opened(database, async_driver, poll=60) as store:
            queue = store.queue("q")
            jobs = queue.jobs("w", StopToken())
            waiting = asyncio.create_task(anext(jobs, None))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            await jobs.aclose()
            assert await waiting is None
            assert time.monotonic() - began < 10  # the poll is a minute
            await queue.enqueue_many(range(20))
            for pause in range(20):
                jobs = queue.jobs("w", StopToken())
                waiting = asyncio.create_task(anext(jobs, None))
                await asyncio.sleep(pause / 4000)
                await jobs.aclose()
                if (job := await waiting) is not None:
                    await job.release()
            assert (await store.queues())[0].claimed == 0

    asyncio.run(close())


# -- locks and the scheduler ----------------------------------------------------------------------------------------


def test_a_lock_is_held_kept_alive_and_given_back_also_by_a_cancelled_body(database, async_driver):
    async def hold():
        async with opened(database, async_driver) as store, ticking():
            async with store.lock("l", 5, keep_alive=True) as lease:
                await asyncio.sleep(5.5)
                assert lease.held
                assert (await store.locks())[0].token == lease.token
                assert await store.try_lock("l") is None
                began = time.monotonic()
                with pytest.raises(LockHeld):
                    async with store.lock("l", wait=0.5):
                        pass
                assert 0.4 < time.monotonic() - began < 20
            assert await store.locks() == []

            async def body():
                async with store.lock("l", 60, keep_alive=True):
                    await asyncio.sleep(60)

            async def wait_for_it():
                async with store.lock("l", 60, wait=60):
                    pass

            task = asyncio.create_task(body())
            await soon(store.locks)
            waiting = asyncio.create_task(wait_for_it())
            await asyncio.sleep(0.2)
            for cancelled in (waiting, task):
                began = time.monotonic()
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                assert time.monotonic() - began < 5
            assert await store.locks() == []
            with pytest.raises(LeaseLost):
                async with store.lock("l", 60):
                    await asyncio.to_thread(database.sql, "UPDATE alkstore_lock SET owner = 'thief'")
            lease = await store.try_lock("m", 30)
            assert await lease.renew(60)
            assert await lease.release()
            assert lease.released

    asyncio.run(hold())


def test_the_scheduler_fires_and_a_cancelled_leader_gives_the_leadership_back(database, async_driver):
    async def lead():
        async with opened(database, async_driver) as store, ticking():
            await store.schedule("s", "@every 1s", "q", {"report": 1})
            leader = asyncio.create_task(store.run_schedules(StopToken()))
            await soon(store.locks)
            with pytest.raises(LeadershipLost):
                await store.run_schedules(StopToken())
            await soon(lambda: store.jobs(queue="q"))
            standby = asyncio.create_task(store.serve_schedules(StopToken()))
            began = time.monotonic()
            leader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leader
            assert time.monotonic() - began < 5
            await soon(store.locks)
            standby.cancel()
            with pytest.raises(asyncio.CancelledError):
                await standby
            assert await store.locks() == []
            assert await store.pause_schedule("s")
            assert await store.resume_schedule("s")
            assert (await store.tick()).next_fire_at is not None
            [schedule] = await store.schedules()
            assert schedule.payload == {"report": 1}
            assert await store.schedule_history("s")
            assert await store.unschedule("s")

    asyncio.run(lead())


# -- the outbox -----------------------------------------------------------------------------------------------------


def test_an_outbox_delivers_by_awaiting(database, async_driver):
    async def deliver():
        async with opened(database, async_driver) as store:
            outbox, seen = store.outbox("mail"), []

            async def delivery(job):
                await asyncio.sleep(0)
                seen.append(job.payload)
                if job.payload == "bad":
                    raise ValueError("refused")

            await outbox.enqueue_many(["a", "bad"])
            assert await outbox.run_once("w", delivery)
            assert await outbox.run_once("w", delivery)
            assert not await outbox.run_once("w", delivery)
            [left] = await store.jobs()
            assert (seen, left.last_error, left.attempts) == (["a", "bad"], "refused", 1)
            assert await store.cancel(left.id)
            await outbox.enqueue("c")
            with pytest.raises(TypeError, match="without yield"):
                await outbox.run_once("w", lambda_generator)
            assert await outbox.run_once("w", lambda job: None)
            assert "no awaitable" in (await store.jobs())[0].last_error

    async def lambda_generator(job):
        yield job

    asyncio.run(deliver())


def test_a_cancelled_delivery_is_cancelled_and_its_message_given_back_uncounted(database, async_driver):
    async def deliver():
        async with opened(database, async_driver) as store:
            outbox, seen = store.outbox("mail"), []

            async def delivery(job):
                seen.append("began")
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    seen.append("cancelled")
                    raise

            job_id = await outbox.enqueue("a")
            for run in (lambda: outbox.run("w", delivery, StopToken()), lambda: outbox.run_once("w", delivery)):
                task = asyncio.create_task(run())
                await soon(lambda: asyncio.sleep(0, "began" in seen))
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()  # a second one must not cut the giving back short
                began = time.monotonic()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert time.monotonic() - began < 5
                assert seen == ["began", "cancelled"]
                seen.clear()
                job = await store.get_job(job_id)
                assert (job.state, job.attempts, job.last_error) == (JobState.READY, 0, None)

    asyncio.run(deliver())


@pytest.mark.databases("sqlite")  # the five seconds are the delivery's; the driver has no part in them
def test_a_delivery_that_will_not_end_holds_its_cancelled_caller_for_at_most_five_seconds(database, async_driver):
    async def deliver():
        async with opened(database, async_driver) as store:
            outbox, released = store.outbox("mail"), asyncio.Event()

            async def delivery(job):
                while not released.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await released.wait()

            await outbox.enqueue("a")
            task = asyncio.create_task(outbox.run("w", delivery, StopToken()))
            await soon(lambda: store.jobs(state=JobState.CLAIMED))
            began = time.monotonic()
            with stopwatch() as seconds:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert 2 < time.monotonic() - began
                assert seconds() < 7
            released.set()
            await soon(lambda: asyncio.sleep(0.1, True))

    asyncio.run(deliver())


def test_a_stopped_loop_of_an_outbox_finishes_what_it_delivers(database, async_driver):
    async def deliver():
        async with opened(database, async_driver) as store:
            outbox, stop = store.outbox("mail"), StopToken()

            async def delivery(job):
                stop.cancel()
                await asyncio.sleep(0.2)

            await outbox.enqueue_many(["a", "b"])
            await outbox.run("w", delivery, stop)
            return [job.payload for job in await store.jobs()]

    assert asyncio.run(deliver()) == ["b"]


# -- the loop -------------------------------------------------------------------------------------------------------


def test_nothing_blocks_the_loop_while_the_database_is_slow(database, async_driver):
    async def wait():
        async with opened(database, async_driver, poll=60) as store, ticking():
            queue = store.queue("q")
            await queue.enqueue(1)
            with await asyncio.to_thread(database.observer.connect) as other:  # another process's transaction holds everything up
                await asyncio.to_thread(other.exec_driver_sql, "BEGIN IMMEDIATE" if database.kind == "sqlite" else "BEGIN")
                if database.kind == "postgresql":
                    locking = "LOCK TABLE alkstore_job, alkstore_lock, alkstore_schedule IN ACCESS EXCLUSIVE MODE"
                    await asyncio.to_thread(other.exec_driver_sql, locking)
                held_up = [
                    asyncio.create_task(call)
                    for call in (
                        queue.enqueue(2),
                        queue.claim("w"),
                        queue.enqueue_many(range(50)),
                        store.try_lock("l"),
                        store.schedule("s", "@every 1h", "q"),
                    )
                ]
                await asyncio.sleep(1.5)  # longer than a wait within SQLite, which is begun anew then
                assert not any(task.done() for task in held_up)
                await asyncio.to_thread(other.exec_driver_sql, "COMMIT")
            await asyncio.gather(*held_up)
            assert not await store.queue("empty").wait(0.7)

    asyncio.run(wait())


def test_a_cancelled_verb_costs_its_connection_and_nothing_else(database, async_driver):
    async def cancel():
        async with opened(database, async_driver) as store:
            queue = store.queue("q")
            with database.observer.connect() as other:
                other.exec_driver_sql("BEGIN IMMEDIATE" if database.kind == "sqlite" else "BEGIN")
                if database.kind == "postgresql":
                    other.exec_driver_sql("LOCK TABLE alkstore_job IN ACCESS EXCLUSIVE MODE")
                for verb in (queue.enqueue(1), queue.enqueue_many(range(3)), store.cancel(1)):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(verb, 0.3)
                other.exec_driver_sql("COMMIT")
            await queue.enqueue("after")
            return [job.payload for job in await store.jobs()]

    assert "after" in asyncio.run(cancel())  # not always last: a server may do what was cancelled once it has the table


def test_the_surface_lives_on_uvloop_too(database, async_driver):
    uvloop = pytest.importorskip("uvloop")

    async def consumed(queue, many):
        stop, came = StopToken(), []
        async for job in queue.jobs("w", stop):
            came.append(job.payload)
            await job.ack()
            if len(came) == many:
                stop.cancel()
        return came

    async def live():
        async with opened(database, async_driver, poll=60) as store, ticking():
            queue = store.queue("q")
            consumer = asyncio.create_task(consumed(queue, 3))
            await queue.enqueue(1)
            async with AsyncSession(store.engine) as session:
                await queue.enqueue_many_tx(session, [2, 3])
                await session.commit()
            assert await asyncio.wait_for(consumer, 20) == [1, 2, 3]  # woken: the poll is a minute
            waiting = asyncio.create_task(anext(queue.jobs("w", StopToken())))
            async with store.lock("l", 30, keep_alive=True) as lease:
                assert await store.try_lock("l") is None
                assert lease.held
            await store.outbox("o").enqueue("message")
            seen = []
            assert await store.outbox("o").run_once("w", lambda job: asyncio.sleep(0, seen.append(job.payload)))
            assert seen == ["message"]
            await store.schedule("s", "@every 1s", "reports")
            leader = asyncio.create_task(store.run_schedules(StopToken()))
            await soon(lambda: store.schedule_history("s"))
            for task in (leader, waiting):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await store.locks() == []

    uvloop.run(live())


@pytest.mark.databases("postgresql-18")
def test_a_listener_that_was_cut_off_comes_back(database, async_driver, caplog):
    async def listen():
        async with opened(database, async_driver, poll=60) as store:
            queue = store.queue("q")
            assert not await queue.wait(0.2)
            killing = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR query LIKE 'SELECT pg_notify%') AND pid <> pg_backend_pid()"
            await soon(lambda: asyncio.to_thread(database.sql, killing))
            waiting = asyncio.create_task(queue.wait(20))
            await asyncio.sleep(1)
            with Store(database.engine()) as other:
                await asyncio.to_thread(other.enqueue, "q", 1)
            began = time.monotonic()
            assert await waiting
            assert time.monotonic() - began < 15

    with caplog.at_level(logging.WARNING, "alkstore_sa.wake"):
        asyncio.run(listen())


@pytest.mark.databases("postgresql-18")
def test_a_loop_outlives_a_database_that_is_away(database, async_driver):
    async def consume():
        async with opened(database, async_driver) as store:
            queue, stop, came = store.queue("q"), StopToken(), []

            async def work():
                async for job in queue.jobs("w", stop):
                    came.append(job.payload)
                    await job.ack()

            task = asyncio.create_task(work())
            await asyncio.sleep(0.5)
            name = database.url.rpartition("/")[2]
            await asyncio.to_thread(
                admin,
                database.server_url,
                f"ALTER DATABASE {name} ALLOW_CONNECTIONS false",
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
            )
            await asyncio.sleep(1.5)
            assert not task.done()
            await asyncio.to_thread(admin, database.server_url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            database.observer.dispose()
            with Store(database.engine()) as other:
                await asyncio.to_thread(other.enqueue, "q", 1)
            await soon(lambda: asyncio.sleep(0, came), within=30)
            stop.cancel()
            await asyncio.wait_for(task, 20)

    asyncio.run(consume())


# -- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_are_stored_from_a_loop(database, async_driver):
    tasks = Tasks()

    @tasks.task(name="greet", queue="greetings")
    async def greet(name: str, times: int = 1) -> None:
        """Greet."""

    async def store_them():
        with pytest.raises(NotBound):
            await greet.aenqueue("ann")
        async with opened(database, async_driver) as store:
            tasks.bind(store)
            await greet.options(priority=5).aenqueue("ann", times=2)
            async with AsyncSession(store.engine) as session:
                await greet.aenqueue_tx(session, "bob")
                await session.run_sync(greet.enqueue_tx, "cid")
                await session.commit()
                await greet.aenqueue_tx(session, "nobody")
            assert (await greet.aschedule("daily", "@every 1d", "gil")).task == "greet"
            with pytest.raises(InvalidPayload):
                await greet.aenqueue(7)
            with pytest.raises(InvalidOption, match="await"):
                greet.enqueue("dan")
            with pytest.raises(NotBound, match="AsyncStore"), Store(database.engine()) as other:
                await greet.on(other).aenqueue("eve")
            async with opened(database, async_driver) as second:
                with pytest.raises(InvalidOption, match="task.on"):
                    tasks.bind(second)
                await greet.on(second).aenqueue("fay")
            return [(job.queue, job.task, job.payload, job.priority) for job in await store.jobs()]

    stored = asyncio.run(store_them())
    assert [(queue, task, priority) for queue, task, _, priority in stored] == [("greetings", "greet", p) for p in (5, 0, 0, 0)]
    assert [payload["name"] for _, _, payload, _ in stored] == ["ann", "bob", "cid", "fay"]


# -- bad input ------------------------------------------------------------------------------------------------------


def test_each_wrong_use_is_told_in_one_sentence(database, async_driver):
    async def misuse():
        async with opened(database, async_driver) as store:
            queue = store.queue("q")
            engine = database.engine()
            with Session(engine) as session, pytest.raises(TypeError, match=r"Session is no AsyncSession.*Store's verbs"):
                await queue.enqueue_tx(session, 1)
            async with AsyncSession(store.engine) as session:
                with Store(engine) as blocking, pytest.raises(TypeError, match=r"AsyncSession is asynchronous: use `await tx.run_sync"):
                    blocking.queue("q").enqueue_tx(session, 1)
                for wrong in (
                    lambda _: store.sync.enqueue("q", 1),
                    lambda _: store.sync.queue("q").claim("w"),
                    lambda _: store.sync.tick(),
                    lambda _: store.sync.verify(),
                    lambda _: next(store.sync.queue("q").jobs("w", StopToken())),
                    lambda _: store.sync.outbox("o").run_once("w", print),
                    lambda _: store.sync.lock("l").__enter__(),
                    lambda _: store.sync.serve_schedules(StopToken()),
                    lambda _: store.sync.queue("q").wait(1),
                ):
                    with pytest.raises(InvalidOption, match="await the AsyncStore's own verb"):
                        await session.run_sync(wrong)
            with pytest.raises(TypeError, match="for an Engine use a Store"):
                AsyncStore(engine)
            with pytest.raises(TypeError, match="for an AsyncEngine use an AsyncStore"):
                Store(store.engine)
            with pytest.raises(InvalidOption, match="give the AsyncEngine to an AsyncStore"):
                Store(store.engine.sync_engine)
            with pytest.raises(InvalidPayload):
                await queue.enqueue({1, 2})
        with pytest.raises(StoreClosed):
            await queue.enqueue(1)
        with pytest.raises(StoreClosed):
            await anext(queue.jobs("w", StopToken()))
        async with create_async_engine(async_url(database, async_driver)).connect() as connection:
            with pytest.raises(StoreClosed):
                await queue.enqueue_tx(connection, 1)
        await connection.engine.dispose()

    asyncio.run(misuse())


@pytest.mark.databases("postgresql-18")
def test_a_transaction_of_another_database_is_refused(database, tmp_path):
    async def misuse():
        other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
        async with opened(database, "psycopg") as store, AsyncSession(other) as session:
            with pytest.raises(InvalidOption, match="this transaction is on sqlite, but the store is on postgresql"):
                await store.enqueue_tx(session, "q", 1)
        async with opened(database, "asyncpg") as store:
            async with store.engine.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                with pytest.raises(InvalidOption, match="autocommit"):
                    await store.enqueue_tx(connection, "q", 1)
        await other.dispose()

    asyncio.run(misuse())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "no database URL"),
        ("mysql+aiomysql://h/d", "mysql is not supported"),
        ("sqlite:///jobs.db", "pysqlite|sqlite is no asynchronous driver"),
        ("postgresql+psycopg2://h/d", "psycopg2"),
        ("sqlite+aiosqlite://", "in-memory SQLite"),
    ],
)
def test_a_url_that_cannot_serve_is_refused_by_name(url, said):
    with pytest.raises(InvalidOption, match=said):
        AsyncStore(url)


def test_without_greenlet_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"pip install 'alkstore-sa\[asyncio\]'"):
        AsyncStore(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")


def test_a_database_without_the_tables_is_named(tmp_path):
    async def look():
        async with AsyncStore(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}") as store:
            with pytest.raises(SchemaMissing, match="alkstore upgrade"):
                await store.enqueue("q", 1)

    asyncio.run(look())


def test_an_async_url_makes_an_engine_that_closing_disposes_of(database, tmp_path):
    async def live():
        async with AsyncStore(async_url(database, "psycopg")) as store:
            return await store.enqueue("q", 1)

    assert asyncio.run(live())
    assert database.count() == 1


@pytest.mark.databases("postgresql-18")
def test_our_asynchronous_connections_give_up_on_a_peer_that_has_gone_silently(database, async_driver):
    async def look():
        async with opened(database, async_driver) as store, store.begin() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            descriptor = driver.fileno() if async_driver == "psycopg" else driver._transport.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(descriptor)) as peer:
                assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000

    asyncio.run(look())
