"""The worker: how it runs handlers, settles their jobs, keeps claims alive, and leaves."""

import asyncio
import contextlib
import contextvars
import logging
import os
import shutil
import socket
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
from conftest import server_urls
from databases import TEMPLATE, admin, sqlite_template
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from alkstore_sa import AsyncStore, Fail, InvalidOption, JobHandle, Retry, Snooze, StopToken, Tasks, Worker, coordinator, prepare_sqlite
from alkstore_sa.rounds import Rounds
from alkstore_sa.runs import Outcome, Run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tasks(store):
    return Tasks(store)


@contextlib.contextmanager
def working(store, tasks, **options):
    """A worker in a thread of its own, stopped at the end; gives the list that its report goes into."""
    stop, reports = StopToken(), []
    worker = Worker(store, tasks, **{"concurrency": 4, "grace": 10, **options})
    thread = threading.Thread(target=lambda: reports.append(worker.run(stop)), daemon=True)
    thread.start()
    try:
        yield reports
    finally:
        stop.cancel()
        thread.join(40)
        assert not thread.is_alive()


def drained(store, tasks, jobs, **options):
    """Let a worker do so many runs, and give its report."""
    return Worker(store, tasks, **{"concurrency": 4, "max_jobs": jobs, **options}).run(StopToken())


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
    return value


# -- running ----------------------------------------------------------------------------------------------------------


def test_sync_and_async_handlers_run_with_their_arguments_and_their_jobs_are_gone(store, tasks):
    seen = []

    @tasks.task(name="sync")
    def sync(n: int, *, text: str) -> None:
        seen.append((n, text))

    @tasks.task(name="async")
    async def run(job: JobHandle, n: int) -> None:
        await asyncio.sleep(0)
        seen.append((job.task, n))

    sync.enqueue(1, text="a")
    run.enqueue(2)

    report = drained(store, tasks, 2)

    assert sorted(seen, key=str) == [("async", 2), (1, "a")]
    assert not store.jobs()
    assert report.outcomes == {Outcome.DONE: 2}


@pytest.mark.databases("sqlite")
def test_an_async_task_whose_job_lies_in_another_queue_runs_there(store, tasks):
    ran = threading.Event()

    @tasks.task(name="moved", queue="new")
    async def moved() -> None:
        ran.set()

    store.stamped_queue("old", moved.definition.stamps, task="moved").enqueue({})
    drained(store, tasks, 1, queues=["old"])

    assert ran.is_set()


def test_raw_jobs_and_deliveries_run_too(store, tasks):
    seen = []

    @tasks.raw(queue="legacy")
    def raw(job: JobHandle) -> None:
        seen.append(job.payload)

    @tasks.delivery("webhooks")
    async def deliver(job: JobHandle) -> None:
        seen.append(job.payload)

    store.queue("legacy").enqueue([1])
    store.outbox("webhooks").enqueue({"to": "x"})

    drained(store, tasks, 2, queues=["legacy"], outboxes=["webhooks"])

    assert seen.count([1]) == seen.count({"to": "x"}) == 1
    assert not store.jobs()


def test_an_exception_is_recorded_by_type_text_and_traceback_and_the_job_comes_again(store, tasks):
    runs = []

    @tasks.task(name="t", base_backoff=0.05)
    def flaky(job: JobHandle) -> None:
        runs.append((job.attempts, job.last_error))
        if job.attempts == 1:
            raise LookupError("no such thing")

    flaky.enqueue()
    report = drained(store, tasks, 2)

    assert report.outcomes == {Outcome.RETRIED: 1, Outcome.DONE: 1}
    assert runs[1][1].startswith("LookupError: no such thing\n") and "Traceback" in runs[1][1]


def test_a_handler_says_what_becomes_of_its_job(store, tasks):
    @tasks.task(name="retry", max_attempts=5)
    def retry() -> None:
        raise Retry("later", delay=3600)

    @tasks.task(name="from")
    async def retry_from() -> None:
        raise Retry(delay=3600) from ValueError("the reason")

    @tasks.task(name="snooze")
    async def snooze() -> None:
        raise Snooze(timedelta(hours=1))

    @tasks.task(name="fail")
    def fail() -> None:
        raise Fail("hopeless")

    @tasks.task(name="itself")
    def itself(job: JobHandle) -> None:
        job.release(delay=3600)

    ids = [task.enqueue() for task in (retry, retry_from, snooze, fail, itself)]
    report = drained(store, tasks, 5)
    retried, from_cause, snoozed, failed, settled = map(store.get_job, ids)

    assert (retried.state, retried.attempts, retried.last_error) == ("delayed", 1, "later")
    assert from_cause.last_error.startswith("ValueError: the reason")
    assert (snoozed.state, snoozed.attempts, snoozed.last_error) == ("delayed", 0, None)
    assert (failed.state, failed.last_error) == ("dead", "hopeless")
    assert (settled.state, settled.attempts) == ("delayed", 0)
    assert report.outcomes == {Outcome.RETRIED: 2, Outcome.SNOOZED: 1, Outcome.DEAD: 1, Outcome.SETTLED: 1}


def test_dead_jobs_are_told_of_with_their_error(store, tasks, caplog):
    dead = []

    @tasks.task(name="t", max_attempts=1)
    async def broken() -> None:
        raise SystemExit("out")

    job_id = broken.enqueue()
    drained(store, tasks, 1, on_dead=dead.append)

    assert [(job.id, job.state) for job in dead] == [(job_id, "dead")]
    assert dead[0].last_error.startswith("SystemExit: out")
    assert any(record.levelno == logging.WARNING and record.job_id == job_id for record in caplog.records if hasattr(record, "job_id"))


def test_a_job_whose_workers_died_with_its_attempts_used_up_is_told_of(store, database, tasks):
    dead = []

    @tasks.task(name="t", max_attempts=1)
    def poison() -> None: ...

    job_id = poison.enqueue()
    store.queue("default").claim_one("gone")
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")

    with working(store, tasks, on_dead=dead.append):
        until(lambda: dead)
    assert (dead[0].id, dead[0].last_error) == (job_id, "max attempts exceeded")


def test_arguments_that_do_not_fit_go_the_curve_and_say_so(store, tasks):
    @tasks.task(name="t", base_backoff=60)
    def strict(n: int) -> None: ...

    queue = store.stamped_queue("default", strict.definition.stamps, task="t")
    ids = [queue.enqueue(payload) for payload in ({"n": "x"}, {"m": 1}, {}, [1])]
    drained(store, tasks, 4)

    for job in map(store.get_job, ids):
        assert (job.state, job.attempts) == ("delayed", 1)
        assert job.last_error.startswith("InvalidPayload: ")


def test_an_undecodable_payload_does_not_hold_up_the_others(store, database, tasks):
    seen = []

    @tasks.task(name="t")
    def fn(n: int) -> None:
        seen.append(n)

    bad, _good = fn.enqueue(1), fn.enqueue(2)
    database.sql("UPDATE alkstore_job SET payload = 'not json' WHERE id = :id", id=bad)
    drained(store, tasks, 2)

    assert seen == [2]
    assert "InvalidPayload" in store.get_job(bad).last_error


def test_an_unknown_task_is_given_back_uncounted_for_a_day_then_goes_the_curve(store, database, tasks, caplog):
    @tasks.task(name="known", base_backoff=60)
    def known() -> None: ...

    stamps = known.definition.stamps
    young = store.stamped_queue("default", stamps, task="not yet").enqueue({})
    old = store.stamped_queue("default", stamps, task="not yet").enqueue({})
    fired = store.stamped_queue("default", stamps, task="not yet").enqueue({})
    database.sql(f"UPDATE alkstore_job SET enqueued_at = {database.now(-90_000)} WHERE id != :id", id=young)
    database.sql(f"UPDATE alkstore_job SET scheduled_for = {database.now(-60)} WHERE id = :id", id=fired)
    drained(store, tasks, 3)

    given_back, retried, after = store.get_job(young), store.get_job(old), store.get_job(known.enqueue()).enqueued_at
    assert (store.get_job(fired).state, store.get_job(fired).attempts) == ("delayed", 0)  # the later of the two counts
    assert (given_back.state, given_back.attempts) == ("delayed", 0)
    assert "no handler for task 'not yet'" in given_back.last_error
    assert given_back.run_at - after < timedelta(seconds=30) < given_back.run_at - given_back.enqueued_at
    assert (retried.state, retried.attempts) == ("delayed", 1)
    assert sum("no handler" in record.message for record in caplog.records) == 1


def test_an_alias_runs_jobs_stored_under_the_old_name(store):
    old, seen = Tasks(store), []

    @old.task(name="old")
    def before(n: int) -> None: ...

    before.enqueue(1)
    new = Tasks(store)

    @new.task(name="new", aliases=["old"])
    def after(n: int) -> None:
        seen.append(n)

    drained(store, new, 1)
    assert seen == [1]


var = contextvars.ContextVar("var", default=None)


def test_around_is_entered_around_each_run_in_its_own_context(store, tasks):
    seen = []

    @contextlib.contextmanager
    def around(job):
        var.set(job.id)
        try:
            yield
        finally:
            seen.append(("left", var.get()))

    @tasks.task(name="sync")
    def sync() -> None:
        seen.append(("ran", var.get()))

    @tasks.task(name="async")
    async def run() -> None:
        await asyncio.sleep(0.01)
        seen.append(("ran", var.get()))

    ids = sync.enqueue_many([sync.call()] * 3) + run.enqueue_many([run.call()] * 3)
    drained(store, tasks, 6, around=around)

    assert sorted(seen) == sorted([(what, job_id) for job_id in ids for what in ("left", "ran")])
    assert var.get() is None


def test_priority_orders_within_a_queue_and_queues_take_turns(store, tasks):
    seen = []

    @tasks.task(name="a", queue="a")
    def one(n: int) -> None:
        seen.append(("a", n))

    @tasks.task(name="b", queue="b")
    def other(n: int) -> None:
        seen.append(("b", n))

    for n in range(4):
        one.options(priority=n).enqueue(n)
        other.enqueue(n)
    drained(store, tasks, 8, concurrency=1)

    assert [n for queue, n in seen if queue == "a"] == [3, 2, 1, 0]
    assert {queue for queue, _ in seen[:3]} == {"a", "b"}


def test_concurrency_is_bounded_in_all_and_by_queue(store, tasks):
    running, most, lock, together = Counter(), Counter(), threading.Lock(), threading.Event()

    def work(queue):
        with lock:
            running[queue] += 1
            running["all"] += 1
            most[queue] = max(most[queue], running[queue])
            most["all"] = max(most["all"], running["all"])
            if running["a"] >= 3:
                together.set()
        together.wait(2)  # however long the threads take to come
        time.sleep(0.02)
        with lock:
            running[queue] -= 1
            running["all"] -= 1

    @tasks.task(name="a", queue="a")
    def one() -> None:
        work("a")

    @tasks.task(name="b", queue="b")
    async def other() -> None:
        await asyncio.to_thread(work, "b")

    one.enqueue_many([one.call()] * 20)
    other.enqueue_many([other.call()] * 20)
    drained(store, tasks, 40, concurrency=5, queue_concurrency={"b": 2})

    assert most["all"] <= 5
    assert most["b"] <= 2
    assert most["a"] >= 3


# -- claims ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_c18_a_blocked_handler_keeps_its_claim_and_holds_no_transaction(database, store, tasks, kind):
    starts, attempts, watched, done = [], [], threading.Event(), threading.Event()
    seconds = 7.0

    def block(job):
        starts.append(job.id)
        time.sleep(seconds)  # on the loop too: a handler that blocks it must not lose its claim
        watched.wait(20)
        attempts.append(job.attempts)
        done.set()

    if kind == "sync":

        @tasks.task(name="t", visibility_timeout=2)
        def blocked(job: JobHandle) -> None:
            block(job)

    else:

        @tasks.task(name="t", visibility_timeout=2)
        async def blocked(job: JobHandle) -> None:
            block(job)

    with working(store, tasks), database.store() as second_store, working(second_store, other_registry(tasks, block)):
        blocked.enqueue()
        until(lambda: starts)
        throughout = open_transactions(database)
        for _ in range(6):
            done.wait(1)
            throughout &= open_transactions(database)
        watched.set()
        until(done.is_set)
        until(lambda: not store.jobs())

    assert len(starts) == 1
    assert attempts == [1]
    assert not throughout  # those of claims and heartbeats come and go


def other_registry(tasks, block):
    other = Tasks()

    @other.task(name="t", visibility_timeout=2)
    def blocked(job: JobHandle) -> None:
        block(job)

    return other


def open_transactions(database):
    if database.kind == "sqlite":
        return set()
    return {
        (pid, began)
        for pid, began in database.sql(
            "SELECT pid, xact_start FROM pg_stat_activity"
            " WHERE datname = current_database() AND xact_start IS NOT NULL AND pid != pg_backend_pid()"
        )
    }


def test_a_cancelled_job_is_told_so_and_an_async_one_is_cancelled(store, tasks):
    told = []

    @tasks.task(name="sync", visibility_timeout=6)
    def sync(job: JobHandle) -> None:
        told.append(("sync", job.lost.wait(20)))

    @tasks.task(name="async", visibility_timeout=6)
    async def run(job: JobHandle) -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            told.append(("async", job.lost.is_set()))
            raise

    with working(store, tasks) as reports:
        ids = [sync.enqueue(), run.enqueue()]
        until(lambda: all(store.get_job(job_id).state == "claimed" for job_id in ids))
        for job_id in ids:
            assert store.cancel(job_id)
        until(lambda: len(told) == 2)
    assert sorted(told) == [("async", True), ("sync", True)]
    assert reports[0].outcomes[Outcome.LOST] == 2


@pytest.mark.databases("postgresql-18")
def test_a_job_locked_by_somebody_is_neither_lost_nor_in_the_way_of_the_others(database, store, tasks):
    release = threading.Event()

    @tasks.task(name="locked", visibility_timeout=60)
    def locked(job: JobHandle) -> None:
        release.wait(40)

    @tasks.task(name="others", visibility_timeout=6)  # the shortest one sets the pace of all
    def others(job: JobHandle) -> None:
        release.wait(40)

    with working(store, tasks) as reports, database.engine().connect() as locker:
        ids = [locked.enqueue(), *others.enqueue_many([others.call()] * 2)]
        until(lambda: all(store.get_job(job_id).state == "claimed" for job_id in ids))
        locker.execute(text("SELECT 1 FROM alkstore_job WHERE id = :id FOR UPDATE"), {"id": ids[0]})
        before = store.get_job(ids[1]).claim_expires_at
        until(lambda: store.get_job(ids[1]).claim_expires_at > before + timedelta(seconds=0.5))
        release.set()
        until(lambda: [job.id for job in store.jobs()] == [ids[0]])
        locker.rollback()
        until(lambda: not store.jobs())
    assert reports[0].outcomes == {Outcome.DONE: 3}


# -- timeouts ----------------------------------------------------------------------------------------------------------


def test_an_async_handler_over_its_time_is_cancelled_and_its_job_retried(store, tasks):
    cancelled = threading.Event()

    @tasks.task(name="t", timeout=0.2, base_backoff=60)
    async def slow() -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    job_id = slow.enqueue()
    drained(store, tasks, 1)
    job = store.get_job(job_id)

    assert cancelled.is_set()
    assert (job.state, job.attempts) == ("delayed", 1)
    assert job.last_error.startswith("timeout")


def test_a_sync_handler_over_its_time_keeps_its_slot_and_its_job_is_retried(store, tasks):
    let_go, lost = threading.Event(), []

    @tasks.task(name="t", timeout=0.2, base_backoff=60)
    def slow(job: JobHandle) -> None:
        lost.append(job.lost.wait(20))
        let_go.wait(20)

    with working(store, tasks, concurrency=3) as reports:
        job_id = slow.enqueue()
        until(lambda: (job := store.get_job(job_id)).state == "delayed" and job.last_error.startswith("timeout"))
        until(lambda: lost)
        let_go.set()
    assert lost == [True]
    assert reports[0].outcomes == {Outcome.RETRIED: 1}
    assert not reports[0].worn_out


def test_a_worker_that_lost_half_of_its_slots_leaves(store, tasks):
    let_go = threading.Event()

    @tasks.task(name="t", timeout=0.2)
    def stuck() -> None:
        let_go.wait(30)

    stuck.enqueue()
    report = Worker(store, tasks, concurrency=2).run(StopToken())
    let_go.set()

    assert report.worn_out
    assert store.jobs()[0].last_error.startswith("timeout")


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def counter(database):
    database.sql("CREATE TABLE counter (name TEXT PRIMARY KEY, n INTEGER NOT NULL)")
    database.sql("INSERT INTO counter VALUES ('runs', 0)")
    return lambda: database.sql("SELECT n FROM counter")[0][0]


INCREMENT = text("UPDATE counter SET n = n + 1")


def test_the_commit_of_an_injected_session_is_the_ack(store, tasks, counter):
    @tasks.task(name="t")
    def count(session: Session) -> None:
        session.execute(INCREMENT)

    count.enqueue_many([count.call()] * 20)
    report = drained(store, tasks, 20)

    assert counter() == 20
    assert report.outcomes == {Outcome.DONE: 20}
    assert not store.jobs()


def test_an_exception_rolls_the_session_back_before_the_verb(store, tasks, counter):
    @tasks.task(name="t", max_attempts=1)
    def count(job: JobHandle, session: Session, how: str) -> None:
        session.execute(INCREMENT)
        raise {"snooze": Snooze(3600), "fail": Fail("no"), "retry": Retry(delay=3600), "raise": ValueError("x")}[how]

    ids = {how: count.enqueue(how) for how in ("snooze", "fail", "retry", "raise")}
    drained(store, tasks, 4)

    assert counter() == 0
    assert {how: str(store.get_job(job_id).state) for how, job_id in ids.items()} == {
        "snooze": "delayed",
        "fail": "dead",
        "retry": "dead",
        "raise": "dead",
    }


def test_a_commit_by_the_handler_is_refused_before_anything_is_sent(store, tasks, counter):
    @tasks.task(name="t", max_attempts=1)
    def count(session: Session) -> None:
        session.execute(INCREMENT)
        session.commit()

    job_id = count.enqueue()
    drained(store, tasks, 1)

    assert counter() == 0
    assert "own_commit=True" in store.get_job(job_id).last_error


def test_a_savepoint_inside_a_handler_is_its_own_affair(store, tasks, counter):
    @tasks.task(name="t")
    def count(session: Session) -> None:
        with session.begin_nested():
            session.execute(INCREMENT)
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            session.execute(INCREMENT)
            raise ZeroDivisionError

    count.enqueue()
    report = drained(store, tasks, 1)

    assert counter() == 1
    assert report.done == 1


def test_own_commit_carries_the_ack_and_what_comes_after_does_not_count(store, tasks, counter, caplog):
    @tasks.task(name="t", own_commit=True)
    def count(session: Session, after: str) -> None:
        session.execute(INCREMENT)
        session.commit()
        if after == "raise":
            raise ValueError
        if after == "second":
            session.execute(INCREMENT)
            session.commit()

    for after in ("return", "raise", "second"):
        count.enqueue(after)
    report = drained(store, tasks, 3)

    assert counter() == 3
    assert report.outcomes == {Outcome.DONE: 3}
    assert not store.jobs()
    assert sum("after its commit" in record.message for record in caplog.records) == 2


def test_own_commit_without_a_commit_is_committed_by_the_worker(store, tasks, counter):
    @tasks.task(name="t", own_commit=True)
    def count(session: Session) -> None:
        session.execute(INCREMENT)

    count.enqueue()
    drained(store, tasks, 1)
    assert counter() == 1
    assert not store.jobs()


def test_a_claim_lost_while_the_handler_ran_rolls_its_session_back(database, store, tasks, counter):
    @tasks.task(name="t", visibility_timeout=600)
    def count(job: JobHandle, session: Session) -> None:
        session.execute(INCREMENT)
        session.flush()
        job._jobs = job._jobs
        object.__setattr__(job, "fence", job.fence + 1)  # as if somebody had claimed it since

    count.enqueue()
    report = drained(store, tasks, 1)

    assert counter() == 0
    assert report.outcomes == {Outcome.LOST: 1}


def another_place(database, tmp_path):
    """A URL that leads elsewhere, though it looks the same."""
    if database.kind == "sqlite":
        (tmp_path / "other").mkdir()
        shutil.copy(sqlite_template(), tmp_path / "other" / "test.db")
        return f"sqlite:///{tmp_path / 'other' / 'test.db'}"
    elsewhere = next(url for version, url in server_urls().items() if version != "18")
    admin(elsewhere, f"CREATE DATABASE {database.name} TEMPLATE {TEMPLATE}")
    return str(make_url(elsewhere).set(database=database.name))


def same_place(database, tmp_path):
    """A URL that leads to the same database, though it looks otherwise."""
    if database.kind == "sqlite":
        (tmp_path / "link").symlink_to(tmp_path)
        return f"sqlite:///{tmp_path / 'link' / 'test.db'}"
    return database.url.replace("@127.0.0.1", "@localhost") + "?application_name=host"


def test_a_handlers_session_on_another_server_or_file_of_the_same_name_is_refused(database, store, tasks, counter, tmp_path):
    if database.kind == "postgresql" and len(server_urls()) == 1:
        pytest.skip("requires two servers")

    @tasks.task(name="t", max_attempts=1)
    def count(session: Session) -> None:
        session.execute(INCREMENT)

    elsewhere = create_engine(another_place(database, tmp_path))
    refused = count.enqueue()
    drained(store, tasks, 1, session_factory=sessionmaker(elsewhere))
    said = store.get_job(refused).last_error
    assert "this handler's session keeps our tables in" in said
    assert "give the worker a session_factory= on its own database" in said
    elsewhere.dispose()
    if database.kind == "postgresql":
        admin(elsewhere.url.set(database="postgres"), f"DROP DATABASE {database.name} WITH (FORCE)")
    engine = create_engine(same_place(database, tmp_path))
    count.enqueue()
    count.enqueue()
    assert drained(store, tasks, 2, session_factory=sessionmaker(engine)).done == counter() == 2
    engine.dispose()


def test_a_session_factory_of_the_application_is_used(store, tasks, counter):
    made = []

    class Mine(Session):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    @tasks.task(name="t")
    def count(session: Session) -> None:
        assert session is made[-1]
        session.execute(INCREMENT)

    count.enqueue()
    report = drained(store, tasks, 1, session_factory=sessionmaker(store.engine, class_=Mine))
    assert report.done == counter() == 1


def async_engine(database):
    if database.kind == "sqlite":
        engine = create_async_engine(database.url.replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)
        prepare_sqlite(engine.sync_engine)
        return engine
    return create_async_engine(database.url, poolclass=NullPool)


def test_an_async_session_commits_with_the_ack_too(database, store, tasks, counter):
    @tasks.task(name="t", max_attempts=1)
    async def count(job: JobHandle, session: AsyncSession, how: str) -> None:
        await session.execute(INCREMENT)
        if how == "raise":
            raise ValueError
        if how == "commit":
            await session.commit()

    @tasks.task(name="own", own_commit=True)
    async def own(session: AsyncSession) -> None:
        await session.execute(INCREMENT)
        await session.commit()

    good, *bad = [count.enqueue(how) for how in ("good", "raise", "commit")]
    own.enqueue()
    report = drained(store, tasks, 4, async_engine=async_engine(database))

    assert counter() == 2
    assert report.outcomes == {Outcome.DONE: 2, Outcome.DEAD: 2}
    assert store.get_job(good) is None
    assert "own_commit" in store.get_job(bad[1]).last_error


def test_an_async_session_without_an_async_engine_is_an_error_at_the_start(store, tasks):
    @tasks.task(name="t")
    async def fn(session: AsyncSession) -> None: ...

    with pytest.raises(InvalidOption, match="async_engine"):
        Worker(store, tasks).run(StopToken())


@pytest.mark.databases("sqlite")
def test_an_auto_commit_verb_inside_a_session_handler_on_sqlite_is_refused_at_once(store, tasks, counter):
    errors = []

    @tasks.task(name="t")
    def fn(session: Session) -> None:
        session.execute(INCREMENT)
        try:
            store.enqueue("other", 1)
        except InvalidOption as error:
            errors.append(str(error))
        store.enqueue_tx(session, "other", 2)

    fn.enqueue()
    drained(store, tasks, 1)

    assert "_tx" in errors[0]
    assert [job.payload for job in store.jobs(queue="other")] == [2]


@pytest.mark.databases("sqlite")
def test_an_awaited_verb_inside_an_async_session_handler_on_sqlite_is_refused_at_once(database, store, tasks, counter):
    engine, errors, left = async_engine(database), [], []
    aio = AsyncStore(engine)

    @tasks.task(name="t")
    async def fn(session: AsyncSession) -> None:
        over = asyncio.Event()

        async def outlive():
            await over.wait()
            await aio.enqueue("other", 3)

        left.extend((over, asyncio.create_task(outlive())))
        for verb in (lambda: aio.enqueue("other", 1), lambda: aio.queue("other").claim("w"), lambda: aio.try_lock("l")):
            try:
                await verb()
            except InvalidOption as error:
                errors.append(str(error))
        await aio.enqueue_tx(session, "other", 2)

    @tasks.task(name="later")
    async def later() -> None:
        over, outliving = left
        over.set()
        await outliving  # a task that the handler began, and whose context remembers the handler's

    fn.enqueue()
    later.enqueue()
    drained(store, tasks, 2, async_engine=engine, concurrency=1)

    assert ["handler's own transaction" in error for error in errors] == [True] * 3
    assert [job.payload for job in store.jobs(queue="other")] == [2, 3]


@pytest.mark.databases("sqlite")
def test_a_file_busy_at_the_begin_gives_the_job_back_uncounted(database, store, tasks, counter):
    busy = database.engine(prepared=False, isolation_level="AUTOCOMMIT", connect_args={"timeout": 0})
    attempts = []

    @tasks.task(name="t")
    def fn(job: JobHandle, session: Session) -> None:
        attempts.append(job.attempts)
        session.execute(INCREMENT)

    impatient = database.engine(connect_args={"timeout": 0})
    with impatient.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 10")
    factory = sessionmaker(impatient)
    claimed = threading.Event()

    def slow_factory():
        if not claimed.is_set():
            blocker.exec_driver_sql("BEGIN IMMEDIATE")
            claimed.set()
            threading.Timer(6, lambda: blocker.exec_driver_sql("COMMIT")).start()
        return factory()

    with busy.connect() as blocker:
        fn.enqueue()
        with working(store, tasks, session_factory=slow_factory):
            until(lambda: counter() == 1, seconds=40)
        until(lambda: not store.jobs())
    assert attempts == [1]


@pytest.mark.databases("postgresql-18")
def test_a_session_handler_over_its_time_is_cancelled_in_its_statement_and_rolled_back(store, tasks, counter):
    @tasks.task(name="t", timeout=3)  # time enough to be in the statement
    def slow(session: Session) -> None:
        session.execute(INCREMENT)
        session.execute(text("SELECT pg_sleep(30)"))

    job_id = slow.enqueue()
    began = time.monotonic()
    report = drained(store, tasks, 1)

    assert time.monotonic() - began < 20
    assert counter() == 0
    assert report.outcomes == {Outcome.RETRIED: 1}
    assert store.get_job(job_id).last_error.startswith("timeout")


TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest.mark.databases("postgresql-18")
def test_a_worker_outlives_its_connections(database, store, tasks, counter):
    jobs = 300

    @tasks.task(name="plain", max_attempts=100, base_backoff=0.01, visibility_timeout=1)
    def plain(n: int) -> None:
        time.sleep(0.001)

    @tasks.task(name="session", max_attempts=100, base_backoff=0.01, visibility_timeout=1)
    def session(session: Session) -> None:
        session.execute(INCREMENT)

    plain.enqueue_many([plain.call(n) for n in range(jobs)])
    session.enqueue_many([session.call()] * jobs)
    with working(store, tasks, concurrency=8):
        for left in (500, 300, 100):
            until(lambda left=left: database.count() <= left)
            database.sql(TERMINATE)
        until(lambda: not database.count(), 40)

    assert counter() == jobs
    assert database.count("alkstore_dead") == 0


@pytest.mark.databases("postgresql-18")
def test_our_connections_give_up_on_a_peer_that_has_gone_silently(store):
    with store.begin() as connection:
        with socket.socket(fileno=os.dup(connection.connection.dbapi_connection.fileno())) as peer:
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_a_stop_gives_back_what_has_not_started_and_waits_for_what_runs(store, tasks):
    started, let_go = threading.Event(), threading.Event()

    @tasks.task(name="t")
    def slow() -> None:
        started.set()
        let_go.wait(20)

    stop = StopToken()
    worker = Worker(store, tasks, concurrency=1)
    slow.enqueue_many([slow.call()] * 3)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(worker.run(stop)), daemon=True)
    thread.start()
    assert started.wait(20)
    stop.cancel()
    time.sleep(0.1)
    assert thread.is_alive()
    let_go.set()
    thread.join(40)

    assert reports[0].done == 1
    assert reports[0].abandoned == 0
    assert [(job.state, job.attempts) for job in store.jobs()] == [("ready", 0)] * 2


def test_after_the_grace_async_handlers_are_cancelled_and_everything_is_given_back(store, tasks, caplog):
    let_go, started = threading.Event(), []

    @tasks.task(name="sync")
    def sync() -> None:
        started.append("sync")
        let_go.wait(20)

    @tasks.task(name="async")
    async def run() -> None:
        started.append("async")
        await asyncio.sleep(20)

    sync.enqueue()
    run.enqueue()
    with working(store, tasks, grace=0.2) as reports:
        until(lambda: len(started) == 2)
    let_go.set()

    assert [(job.state, job.attempts) for job in store.jobs()] == [("ready", 0)] * 2
    assert reports[0].abandoned == 1
    assert sum("given back unfinished" in record.message for record in caplog.records) == 2


@pytest.fixture
def unhurried(monkeypatch):
    """Leave the handlers of a worker that unwinds as much time as a machine that stands still may take from them."""
    monkeypatch.setattr(coordinator, "UNWINDING_SECONDS", 20.0)


def test_a_handler_that_ends_well_while_the_worker_unwinds_is_acked(store, tasks, unhurried):
    started, let_go = threading.Event(), threading.Event()

    @tasks.task(name="t")
    def slow() -> None:
        started.set()
        let_go.wait(20)

    slow.enqueue()
    with working(store, tasks, grace=0) as reports:
        assert started.wait(20)
        threading.Timer(0.3, let_go.set).start()

    assert (reports[0].done, reports[0].abandoned) == (1, 0)
    assert not store.jobs()


def test_a_timeout_while_the_worker_leaves_neither_prolongs_its_grace_nor_wears_it_out(store, tasks):
    started, let_go = [], threading.Event()

    @tasks.task(name="t", timeout=4, base_backoff=60)
    def slow() -> None:
        started.append(1)
        let_go.wait(20)

    slow.enqueue_many([slow.call()] * 2)
    with working(store, tasks, concurrency=2, grace=15) as reports:
        until(lambda: len(started) == 2)
    let_go.set()

    assert not reports[0].worn_out
    assert reports[0].outcomes == {Outcome.RETRIED: 2}


@pytest.mark.databases("sqlite")
def test_a_session_handler_that_overran_and_ends_after_the_grace_is_retried(store, tasks, unhurried):
    overran, let_go = threading.Event(), threading.Event()

    @tasks.task(name="t", timeout=0.3, base_backoff=60)
    def slow(job: JobHandle, session: Session) -> None:
        assert job.lost.wait(20)
        overran.set()
        let_go.wait(20)

    job_id = slow.enqueue()
    with working(store, tasks, grace=0) as reports:
        assert overran.wait(20)
        threading.Timer(0.3, let_go.set).start()

    assert reports[0].outcomes == {Outcome.RETRIED: 1}
    assert store.get_job(job_id).last_error.startswith("timeout")


@pytest.mark.databases("postgresql-18")
def test_what_cannot_be_given_back_at_first_is_given_back_by_another_try(database, store, tasks):
    started, let_go = threading.Event(), threading.Event()

    @tasks.task(name="t")
    def slow() -> None:
        started.set()
        let_go.wait(20)

    slow.enqueue()
    failing_once(database, "OLD.state = 'claimed' AND NEW.state = 'ready'")
    with working(store, tasks, grace=0.1):
        assert started.wait(20)
    let_go.set()

    assert [(job.state, job.attempts) for job in store.jobs()] == [("ready", 0)]


@pytest.mark.databases("postgresql-18")
def test_acks_go_by_themselves_after_a_round_that_failed(database, store, tasks):
    started, let_go = threading.Event(), threading.Event()

    @tasks.task(name="good", queue="good")
    def good() -> None:
        started.set()
        let_go.wait(20)

    @tasks.task(name="bad", queue="bad")
    def bad() -> None: ...

    failing(database, "NEW.queue = 'bad' AND NEW.state = 'claimed'")
    good.enqueue()
    with working(store, tasks):
        assert started.wait(20)
        bad.enqueue()
        let_go.set()
        until(lambda: [job.queue for job in store.jobs()] == ["bad"])
        database.sql("DROP TRIGGER refusing ON alkstore_job")
        until(lambda: not store.jobs())


def failing(database, condition, body="RAISE EXCEPTION 'refused'"):
    """Let updates of jobs that meet a condition fail."""
    database.sql(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NEW; END $$")
    database.sql(f"CREATE TRIGGER refusing BEFORE UPDATE ON alkstore_job FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()")


def failing_once(database, condition):
    database.sql("CREATE SEQUENCE refusals")  # it counts what is rolled back, too
    failing(database, condition, "IF nextval('refusals') = 1 THEN RAISE EXCEPTION 'refused'; END IF")


@pytest.mark.databases("sqlite")
def test_a_loop_that_a_handler_blocked_past_the_grace_closes_when_it_can(store, tasks):
    let_go, loops = threading.Event(), []

    @tasks.task(name="t")
    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        let_go.wait(20)

    run.enqueue()
    with working(store, tasks, grace=0) as reports:
        until(lambda: loops)
    assert reports[0].abandoned == 1
    assert not loops[0].is_closed()
    let_go.set()

    until(loops[0].is_closed)


@pytest.mark.databases("postgresql-18")
def test_after_the_grace_the_statement_of_a_session_handler_is_cancelled(database, store, tasks, counter, unhurried):
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"

    @tasks.task(name="t")
    def slow(session: Session) -> None:
        session.execute(INCREMENT)
        session.execute(text("SELECT pg_sleep(30)"))

    job_id = slow.enqueue()
    with working(store, tasks, grace=0.2) as reports:
        until(lambda: database.sql(asleep)[0][0])

    assert counter() == 0
    assert reports[0].abandoned == 0
    assert (store.get_job(job_id).state, store.get_job(job_id).attempts) == ("ready", 0)


def test_a_worker_leaves_after_so_many_jobs(store, tasks):
    @tasks.task(name="t")
    def fn() -> None: ...

    fn.enqueue_many([fn.call()] * 10)
    report = drained(store, tasks, 7)

    assert report.done == 7
    assert len(store.jobs()) == 3


def test_an_idle_worker_hears_of_a_new_job_and_of_one_that_comes_due(database):
    ran, tasks = {}, Tasks()

    @tasks.task(name="t")
    def fn(n: int) -> None:
        ran[n] = time.monotonic()

    with database.store(poll=60) as store, working(store, tasks):
        time.sleep(0.3)
        began = time.monotonic()
        fn.enqueue(1)
        fn.options(delay=0.7).enqueue(2)
        until(lambda: len(ran) == 2)
    assert ran[1] - began < 20  # well before the poll floor, on a busy machine too
    assert 0.6 < ran[2] - began < 20


def test_wrong_workers_are_refused(store, database, tasks):
    with pytest.raises(InvalidOption, match="nothing to serve"):
        Worker(store, tasks).run(StopToken())
    for wrong in (
        {"concurrency": 0},
        {"grace": -1},
        {"queues": [""]},
        {"max_jobs": 0},
        {"queue_concurrency": {"q": 0}},
        {"outboxes": ["__alkstore_x"]},
    ):
        with pytest.raises(ValueError):
            Worker(store, tasks, **wrong)
    with database.store() as other, pytest.raises(InvalidOption, match="another store"):
        Worker(other, tasks)


def test_payloads_and_arguments_are_not_logged(database, caplog):
    """What a job carries may be anybody's secret: no record of ours repeats it, at any level, though handlers fail."""
    caplog.set_level(logging.DEBUG)
    with database.store() as store:
        tasks = Tasks(store)

        @tasks.task(name="t", max_attempts=2, base_backoff=0.05)
        def fn(word: str) -> None:
            raise ValueError("no")

        @tasks.raw(queue="raw")
        def raw(job: JobHandle) -> None:
            raise Fail("no")

        fn.enqueue("sesame")
        with Session(store.engine) as session:
            fn.enqueue_tx(session, "sesame")
            session.commit()
        store.queue("raw").enqueue({"open": "sesame"}, headers={"open": "sesame"})
        store.stamped_queue("default", fn.definition.stamps, task="unknown").enqueue({"word": "sesame"})
        with working(store, tasks):
            until(lambda: database.count("alkstore_dead") == 3 and "unknown" in caplog.text)
    ours = [record for record in caplog.records if record.name.startswith("alkstore_sa")]
    assert len(ours) > 5
    assert not [record for record in ours if "sesame" in f"{record.getMessage()} {record.__dict__}"]


@pytest.mark.parametrize("how", ["flush", "ack_alone"])
def test_an_older_run_of_a_job_is_not_acked_by_the_newer_one(store, tasks, database, how):
    """A worker whose claim lapsed may claim the job again itself, and have both runs end before one flush."""

    @tasks.task(name="t")
    def fn() -> None: ...

    fn.enqueue()
    rounds, handler = Rounds(store.parts.jobs, "w"), fn.definition.handler
    older, newer = (Run(claim_again(store, database), handler, 0.0) for _ in range(2))

    acked = rounds.flush([older, newer]) if how == "flush" else rounds.ack_alone([older, newer])[0]

    assert acked == {newer.key}
    assert not store.jobs()


def claim_again(store, database):
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)} WHERE state = 'claimed'")
    [job] = store.queue("default").claim("w", 1)
    return job
