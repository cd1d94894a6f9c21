"""FastAPI and Starlette: the store as a dependency, the lifespan's start and end, and the worker beside it."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from typing import Annotated

import httpx
import pytest
from eventually import stopwatch
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from test_aio import async_url, soon, ticking

from alkstore_sa import AsyncStore, NotBound, Store, StoreClosed, Tasks, Worker, prepare_sqlite
from alkstore_sa.fastapi import lifespan, running, store_of


def engine_on(database, async_driver):
    engine = create_async_engine(async_url(database, async_driver))
    if database.kind == "sqlite":
        prepare_sqlite(engine.sync_engine)
    return engine


def made(engine, **options):
    store = AsyncStore(engine)
    app = FastAPI(lifespan=lifespan(store, **options))

    async def session_of_request():
        async with AsyncSession(engine) as session, session.begin():
            yield session

    @app.post("/{outcome}")
    async def order(
        outcome: str,
        session: Annotated[AsyncSession, Depends(session_of_request, scope="function")],
        used: Annotated[AsyncStore, Depends(store_of)],
    ) -> int:
        job_id = await used.enqueue_tx(session, "q", outcome)
        if outcome == "fail":
            raise HTTPException(500)
        return job_id

    return app, store


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def test_the_requests_commit_carries_the_job(database, async_driver):
    async def serve():
        engine = engine_on(database, async_driver)
        app, store = made(engine)
        async with app.router.lifespan_context(app), client(app) as http:
            answers = [(await http.post(f"/{outcome}")).status_code for outcome in ("good", "fail", "fine")]
            assert answers == [200, 500, 200]
            assert [job.payload for job in await store.jobs()] == ["good", "fine"]
        with pytest.raises(StoreClosed):
            await store.jobs()
        await engine.dispose()

    asyncio.run(serve())


def test_the_lifespan_serves_schedules_and_works_and_ends_both(database, async_driver):
    tasks, ran = Tasks(), threading.Event()

    @tasks.task(name="note", queue="q")
    def note() -> None:
        ran.set()

    async def serve():
        engine = engine_on(database, async_driver)
        with Store(database.engine()) as blocking:
            app, store = made(engine, serve_schedules=True, worker=Worker(blocking, tasks))
            tasks.bind(store)
            async with ticking():
                with contextlib.ExitStack() as stack:
                    async with app.router.lifespan_context(app):
                        await note.aschedule("often", "@every 1s")
                        await soon(lambda: asyncio.sleep(0, ran.is_set()))
                        assert await store.locks()
                        seconds = stack.enter_context(stopwatch())
                    assert seconds() < 5.5
            assert blocking.locks() == []
        await engine.dispose()

    asyncio.run(serve())
    assert not any(thread.name == "alkstore-worker" for thread in threading.enumerate())


def test_an_application_that_is_started_before_it_is_migrated_serves_and_works_afterwards(database, async_driver, caplog):
    tasks, ran = Tasks(), threading.Event()

    @tasks.task(name="note", queue="q")
    def note() -> None:
        ran.set()

    async def serve():
        engine = engine_on(database, async_driver)
        with Store(database.engine()) as blocking:
            tasks.bind(blocking)
            blocking.schedule("often", "@every 1s", "emails")
            note.enqueue()
            app, store = made(engine, serve_schedules=True, worker=Worker(blocking, tasks))
            for table in ("alkstore_lock", "alkstore_worker"):
                database.sql(f"ALTER TABLE {table} RENAME TO {table}_away")
            async with app.router.lifespan_context(app):
                await soon(lambda: asyncio.sleep(0, caplog.text.count("run `alkstore upgrade`") >= 2))  # the scheduler and the worker
                for table in ("alkstore_lock", "alkstore_worker"):
                    await asyncio.to_thread(database.sql, f"ALTER TABLE {table}_away RENAME TO {table}")
                await soon(lambda: asyncio.sleep(0, ran.is_set()))
                await soon(lambda: store.jobs(queue="emails"))
        await engine.dispose()

    asyncio.run(serve())


@pytest.mark.databases("sqlite")  # the five seconds are the worker's thread's; the driver has no part in them
def test_jobs_that_will_not_end_are_given_back_and_do_not_hold_the_server_up(database, async_driver):
    tasks, free, began = Tasks(), threading.Event(), threading.Event()

    @tasks.task(name="hang", queue="q")
    def hang() -> None:
        began.set()
        free.wait(30)

    @tasks.task(name="sleep", queue="q")
    async def sleep() -> None:
        await asyncio.sleep(30)

    async def serve():
        engine = engine_on(database, async_driver)
        with Store(database.engine()) as blocking:
            app, _ = made(engine, worker=Worker(blocking, tasks))
            sleep.enqueue()
            hang.enqueue()
            with contextlib.ExitStack() as stack:
                async with app.router.lifespan_context(app):
                    await soon(lambda: asyncio.sleep(0, began.is_set()))
                    seconds = stack.enter_context(stopwatch())
                assert seconds() < 5.5
            given_back = [("ready", 0)] * 2  # soon: at a stall of the machine the server does not wait for it any longer
            await soon(lambda: asyncio.sleep(0, [(job.state, job.attempts) for job in blocking.jobs()] == given_back), within=5)
            free.set()
            await soon(lambda: asyncio.sleep(0, not any(thread.name == "alkstore-worker" for thread in threading.enumerate())))
        await engine.dispose()

    asyncio.run(serve())


def test_a_lifespan_of_the_applications_own_may_run_ours(database, async_driver):
    async def serve():
        engine = engine_on(database, async_driver)
        app, store = FastAPI(), AsyncStore(engine)
        async with running(app, store):
            assert app.state.alkstore is store
        await engine.dispose()

    asyncio.run(serve())


def test_without_a_lifespan_the_dependency_says_what_to_write():
    app = FastAPI()

    @app.get("/")
    async def look(store: Annotated[AsyncStore, Depends(store_of)]) -> None:
        """Never reached."""

    async def ask():
        async with client(app) as http:
            with pytest.raises(NotBound, match=r"lifespan=alkstore_sa\.fastapi\.lifespan\(store\)"):
                await http.get("/")

    asyncio.run(ask())


def test_without_starlette_the_extra_is_named():
    code = "import sys; sys.modules['starlette'] = None\nimport alkstore_sa.fastapi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'alkstore-sa[fastapi]'" in done.stderr
