"""What must not cost a worker a slot, a claim or its end: failures that cannot be recorded, locks that others hold, threads that do not come."""

import asyncio
import logging
import threading
import time
from functools import partial

import pytest
from databases import admin
from eventually import eventually
from sqlalchemy import text
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from test_worker import working as working_with

from alkstore_sa import Fail, JobHandle, Retry, StopToken, Store, Tasks, Worker, coordinator, migrate, rounds
from alkstore_sa.heartbeats import Heart
from alkstore_sa.presence import Presence
from alkstore_sa.runs import Bench, Outcome

pytestmark = pytest.mark.timeout(120)

working = partial(working_with, concurrency=1, grace=5)


@pytest.fixture
def tasks(store):
    return Tasks(store)


def registered(tasks, kind, function):
    """Register a handler `t` that calls `function`, as a plain function or as a coroutine's."""

    @tasks.task(name="t", max_attempts=2, base_backoff=60)
    def plain(job: JobHandle) -> None:
        function(job)

    async def awaited(job: JobHandle) -> None:
        await asyncio.to_thread(function, job)

    return plain if kind == "sync" else tasks.task(name="a", max_attempts=2, base_backoff=60)(awaited)


class Dumb(Fail):
    def __init__(self):
        pass


class DumbRetry(Retry):
    def __init__(self):
        pass


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("error", "state"), [(Dumb, "dead"), (DumbRetry, "delayed")])
def test_an_exception_that_says_nothing_of_itself_is_told_by_its_type(store, tasks, kind, error, state):
    def fail(job):
        raise error

    job_id = registered(tasks, kind, fail).enqueue()
    with working(store, tasks) as reports:
        eventually(lambda: store.get_job(job_id).state == state)
    assert store.get_job(job_id).last_error.startswith(error.__name__)
    assert reports[0].abandoned == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_that_fails_while_the_table_is_away_is_settled_once_it_is_back(database, store, tasks, kind):
    began, go_on = threading.Event(), threading.Event()

    def fail(job):
        began.set()
        go_on.wait(30)
        raise ValueError("no luck")

    job_id = registered(tasks, kind, fail).enqueue()
    with working(store, tasks):
        assert began.wait(30)
        database.sql("ALTER TABLE alkstore_job RENAME TO alkstore_away")
        go_on.set()
        time.sleep(1)
        database.sql("ALTER TABLE alkstore_away RENAME TO alkstore_job")
        eventually(lambda: store.get_job(job_id).state == "delayed")
    assert "no luck" in store.get_job(job_id).last_error


@pytest.fixture(params=["", "?client_encoding=utf8"], ids=["refused by the driver", "refused by the server"])
def latin(database, request):
    """A store on a database that cannot store every character."""
    name = database.url.rsplit("/", 1)[1] + "_latin"
    admin(database.server_url, f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    with Store(database.server_url.rsplit("/", 1)[0] + "/" + name + request.param) as store:
        migrate.upgrade(store.engine)
        yield store
    store.engine.dispose()
    admin(database.server_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("error", [ValueError, Fail])
def test_an_error_that_the_database_has_no_characters_for_is_told_by_its_type(latin, error):
    tasks = Tasks(latin)

    def fail(job):
        raise error("5 \u20ac short")

    job_id = registered(tasks, "sync", fail).enqueue()
    with working(latin, tasks):
        eventually(lambda: latin.get_job(job_id).state != "claimed" and latin.get_job(job_id).last_error)
    assert (latin.get_job(job_id).state, latin.get_job(job_id).last_error) == ("dead" if error is Fail else "delayed", error.__name__)


def test_async_handlers_that_fail_as_their_claims_are_lost_keep_no_slot(database, store, tasks):
    began = threading.Event()

    @tasks.task(name="t", visibility_timeout=0.6, max_attempts=1)
    async def fails_when_told(job: JobHandle) -> None:
        began.set()
        while not job.lost.is_set():  # noqa: ASYNC110 - so that it ends in the very moment
            await asyncio.sleep(0)
        raise ValueError("told")

    with working(store, tasks):
        for _ in range(5):
            began.clear()
            job_id = fails_when_told.enqueue()
            assert began.wait(30)
            assert store.cancel(job_id)


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("table", ["alkstore_pause", "alkstore_worker"])
def test_claims_are_kept_though_somebody_has_locked_a_table_of_the_workers_own(database, store, tasks, table):
    began, end, starts = threading.Event(), threading.Event(), []

    @tasks.task(name="t", visibility_timeout=6)
    def fn(job: JobHandle) -> None:
        starts.append(job.attempts)
        began.set()
        end.wait(60)

    job_id = fn.enqueue()
    with working(store, tasks), database.engine().connect() as locker:
        assert began.wait(30)
        locker.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        for _ in range(4):  # more than a lifetime of the claim
            before = store.get_job(job_id).claim_expires_at
            eventually(lambda: store.get_job(job_id).claim_expires_at > before)  # noqa: B023
        locker.rollback()
        end.set()
        eventually(lambda: store.get_job(job_id) is None)
    assert starts == [1]


@pytest.mark.databases("postgresql-18")
def test_a_worker_goes_on_though_its_table_was_locked_for_longer_than_a_round_may_take(database, store, tasks, monkeypatch, caplog):
    for limit in ("ROUND_LIMIT", "PROMOTION_LIMIT"):
        monkeypatch.setattr(rounds, limit, 1.0)
    ran = threading.Event()

    @tasks.task(name="t")
    def fn() -> None:
        ran.set()

    caplog.set_level(logging.INFO, "alkstore_sa.worker")
    with working(store, tasks):
        eventually(lambda: "serves" in caplog.text)
        with database.engine().connect() as locker:
            locker.execute(text("LOCK TABLE alkstore_job IN ACCESS EXCLUSIVE MODE"))
            eventually(lambda: "the database did not answer" in caplog.text)
            locker.rollback()
        fn.enqueue()
        assert ran.wait(30)


def test_what_is_claimed_during_a_beat_quickens_the_next_one(store, monkeypatch):
    bench = Bench(1)
    presence = Presence(store.parts.database, "w", bench, ["q"], [], [])
    heart = Heart(store.parts.jobs, bench, None, presence)
    heart.close()
    look = heart._current
    monkeypatch.setattr(heart, "_current", lambda: (look(), heart.quicken(3))[0])
    heart._beat()
    assert heart._interval == 1
    heart._let_go()


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("whose", ["another's", "the handler's own"])
def test_a_job_that_overran_while_its_row_is_locked_holds_up_neither_the_others_nor_the_end(database, store, tasks, whose):
    began, end, ran = threading.Event(), threading.Event(), threading.Event()

    @tasks.task(name="t", timeout=2)
    def overruns(job: JobHandle) -> None:
        with Session(database.engine()) as session:
            if whose == "the handler's own":
                job.ack_tx(session)
            began.set()
            end.wait(60)

    @tasks.task(name="other", queue="other")
    def other() -> None:
        ran.set()

    job_id = overruns.enqueue()
    with database.engine().connect() as locker, working(store, tasks, concurrency=3, grace=1):
        assert began.wait(30)
        if whose == "another's":
            locker.execute(text("SELECT 1 FROM alkstore_job WHERE id = :id FOR UPDATE"), {"id": job_id})
        time.sleep(2)
        other.enqueue()
        assert ran.wait(30)
    end.set()


def test_an_ack_that_was_rolled_back_with_the_error_leaves_the_job_to_be_retried(database, store, tasks):
    @tasks.task(name="t", base_backoff=60)
    def fn(job: JobHandle) -> None:
        with Session(database.engine()) as session, session.begin():
            job.ack_tx(session)
            raise ValueError("no luck")

    @tasks.task(name="committed")
    def committed(job: JobHandle) -> None:
        with Session(database.engine()) as session, session.begin():
            job.ack_tx(session)
        raise ValueError("too late")

    job_id = fn.enqueue()
    done = committed.enqueue()
    report = Worker(store, tasks, max_jobs=2).run(StopToken())
    assert report.outcomes == {Outcome.RETRIED: 1, Outcome.SETTLED: 1}
    assert (store.get_job(job_id).state, store.get_job(done)) == ("delayed", None)
    assert "no luck" in store.get_job(job_id).last_error


def test_session_handlers_that_wait_for_a_connection_at_a_stop_are_given_back(database, store, tasks):
    began, end, starts = threading.Event(), threading.Event(), []

    @tasks.task(name="t", visibility_timeout=60)
    def fn(session: Session) -> None:
        starts.append(1)
        began.set()
        end.wait(30)

    ids = fn.enqueue_many([fn.call()] * 4)
    stop = StopToken()
    one = sessionmaker(store.engine if database.kind == "sqlite" else database.engine(pool_size=1, max_overflow=0))
    worker = threading.Thread(target=Worker(store, tasks, concurrency=4, session_factory=one, grace=30).run, args=(stop,))
    worker.start()
    assert began.wait(30)
    eventually(lambda: all(store.get_job(job_id).state == "claimed" for job_id in ids))
    time.sleep(0.5)  # the others wait for their place, which nothing shows
    stop.cancel()
    time.sleep(0.5)
    end.set()
    worker.join(30)
    assert not worker.is_alive()
    assert len(starts) == 1
    assert [(job.state, job.attempts) for job in store.jobs()] == [("ready", 0)] * 3


def test_a_worker_that_gets_no_more_threads_goes_on_with_those_it_has(store, tasks, monkeypatch, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "alkstore-handler-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    @tasks.task(name="t")
    def fn() -> None:
        time.sleep(0.05)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fn.enqueue_many([fn.call()] * 4)
    assert Worker(store, tasks, concurrency=4, max_jobs=4).run(StopToken()).done == 4
    assert "all that there can be" in caplog.text


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "rolled back"])
def test_an_ack_in_a_session_of_a_scope_that_is_gone_is_looked_at_all_the_same(database, store, tasks, kind, committed):
    """As Flask's `db.session` outside of its application's context."""
    scope = threading.local()
    scoped = scoped_session(sessionmaker(database.engine()), scopefunc=lambda: scope.key)

    def fn(job):
        scope.key = 1
        try:
            job.ack_tx(scoped)
            (scoped.commit if committed else scoped.rollback)()
        finally:
            scoped.remove()
            del scope.key
        raise ValueError("no luck")

    registered(tasks, kind, fn).enqueue()
    with working(store, tasks):
        eventually(lambda: [job.state for job in store.jobs()] == ([] if committed else ["delayed"]))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_job_that_its_handler_failed_before_it_raised_is_told_dead(store, kind):
    dead = []
    tasks = Tasks(store, on_dead=lambda job: dead.append(job.last_error))

    def fn(job):
        job.fail("card refused")
        raise ValueError("and now?")

    registered(tasks, kind, fn).enqueue()
    assert Worker(store, tasks, max_jobs=1).run(StopToken()).outcomes == {Outcome.DEAD: 1}
    assert dead == ["card refused"]


@pytest.mark.databases("sqlite")
def test_a_job_that_overran_beside_a_session_handler_is_told_dead_once_it_is(database, store):
    """Its end has to wait until the other one gives SQLite's write lock up."""
    dead, end = [], threading.Event()
    tasks = Tasks(store, on_dead=lambda job: dead.append(job.last_error))

    @tasks.task(name="holds", priority=1)
    def holds(session: Session) -> None:
        end.wait(30)

    @tasks.task(name="overruns", timeout=1, max_attempts=1)
    def overruns(job: JobHandle) -> None:
        job.lost.wait(30)
        time.sleep(coordinator.OVERRUN_SECONDS + 1)
        end.set()

    holds.enqueue()
    overruns.enqueue()
    with working(store, tasks, concurrency=4):
        eventually(lambda: dead)
    assert dead[0].startswith("timeout")


def test_a_job_that_overruns_is_retried_though_there_are_no_more_threads(store, tasks, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "alkstore-aside":
            raise RuntimeError("can't start new thread")
        start(thread)

    @tasks.task(name="t", timeout=1, base_backoff=60)
    def fn(job: JobHandle) -> None:
        job.lost.wait(30)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fn.enqueue()
    assert Worker(store, tasks, concurrency=4, max_jobs=1).run(StopToken()).outcomes == {Outcome.RETRIED: 1}
