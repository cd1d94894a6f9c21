"""Waking idle waiters: at a commit, at a deadline, at the poll floor; and the listener's hard life."""

import multiprocessing
import os
import threading
import time

import pytest
import servers
from conftest import server_urls
from databases import TestDatabase, make_template
from eventually import eventually, stopwatch
from psycopg import sql
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from alkstore_sa import InvalidOption, StopToken, Store, migrate
from alkstore_sa.wake import poll_wait


def waiting(queue, timeout=30):
    """Wait in a thread; give the answer and the seconds it took when asked."""

    class Wait(threading.Thread):
        def run(self):
            began = time.monotonic()
            self.answer = queue.wait(timeout)
            self.took = time.monotonic() - began

    thread = Wait()
    thread.start()
    return thread


def is_listening(store):
    return store._bell.tried and any(store._bell._ears.values())


def test_a_wait_ends_with_false_when_its_time_is_over(database):
    with database.store(poll=60) as store:
        queue = store.queue("q")
        began = time.monotonic()
        assert not queue.wait(0.3)
        assert 0.25 < time.monotonic() - began < 20
        assert not queue.wait(0)


def test_a_wait_with_work_there_is_over_at_once(queue):
    queue.enqueue(1)
    assert queue.wait(30)
    assert queue.wait(0)


def test_whoever_fell_idle_at_once_does_not_look_at_once():
    waits = {poll_wait(10) for _ in range(100)}
    assert min(waits) >= 8
    assert max(waits) <= 10
    assert max(waits) - min(waits) > 1


@pytest.mark.databases("postgresql-18")
def test_a_driver_that_we_cannot_listen_with_polls_and_says_so_once(database, caplog):
    engine = create_engine(make_url(database.url).set(drivername="postgresql+pg8000"))
    database.engines.append(engine)
    with Store(engine, poll=0.2) as store, Store(database.engine()) as other:
        claims, stop = [], StopToken()
        loop = threading.Thread(target=lambda: claims.extend(store.queue("q").jobs("w", stop)))
        loop.start()
        for n in range(2):
            eventually(lambda: "polling" in caplog.text)
            other.queue("q").enqueue(n)
            eventually(lambda: database.sql("SELECT count(*) FROM alkstore_job WHERE state = 'claimed'")[0][0] == n + 1)  # noqa: B023
        stop.cancel()
        loop.join()
        assert [job.payload for job in claims] == [0, 1]
    assert [record.getMessage() for record in caplog.records if "polling" in record.getMessage()] == [
        "no wakes with the driver pg8000: waiting by polling"
    ]


def test_a_wait_out_of_range_is_refused(queue):
    for timeout in (-1, float("nan"), True, None):
        with pytest.raises(InvalidOption):
            queue.wait(timeout)


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "enqueue_tx", "retry", "release", "replay", "replay_all", "outbox"])
def test_every_commit_that_makes_work_claimable_wakes_a_waiter_elsewhere(database, how):
    with database.store(poll=60) as here, Store(database.engine(), poll=60) as there:
        waiter = here.outbox("q")._queue if how == "outbox" else here.queue("q")
        queue = there.queue("q")
        if how in ("retry", "release", "replay", "replay_all"):
            queue.enqueue(1)
            job = queue.claim_one("w")
            if how.startswith("replay"):
                job.fail("x")
        wait = waiting(waiter)
        eventually(lambda: is_listening(here))
        time.sleep(0.2)  # the waiter is asleep, which nothing shows
        with Session(database.engine()) as session:
            {
                "enqueue": lambda: queue.enqueue(1),
                "enqueue_many": lambda: queue.enqueue_many([1, 2]),
                "enqueue_tx": lambda: (queue.enqueue_tx(session, 1), session.commit()),
                "retry": lambda: job.retry("x", delay=0),
                "release": lambda: job.release(),
                "replay": lambda: queue.replay(job.id),
                "replay_all": lambda: queue.replay_all(),
                "outbox": lambda: there.outbox("q").enqueue(1),
            }[how]()
        wait.join(40)
        assert wait.answer
        assert wait.took < 25


def test_a_rollback_wakes_nobody(database):
    with database.store(poll=60) as store:
        wait = waiting(store.queue("q"), 4)
        eventually(lambda: is_listening(store))
        with Session(database.engine()) as session:
            store.enqueue_tx(session, "q", 1)
            session.rollback()
        wait.join(20)
        assert not wait.answer


@pytest.mark.databases("postgresql-18")
def test_the_wake_is_sent_by_the_commit_and_not_before(database):
    import psycopg

    with database.store() as store, psycopg.connect(database.url.replace("+psycopg", ""), autocommit=True) as listener:
        listener.execute("LISTEN alkstore")
        with Session(database.engine()) as session:
            store.enqueue_tx(session, "q", 1)
            assert list(listener.notifies(timeout=0.5)) == []
            session.commit()
        assert [(note.channel, note.payload) for note in listener.notifies(timeout=20, stop_after=1)] == [("alkstore", "q")]
        store.queue("q").enqueue_many(range(1000))
        assert [note.payload for note in listener.notifies(timeout=20, stop_after=1)] == ["q"]
        assert list(listener.notifies(timeout=1)) == []
    with database.store(wake=False) as silent, psycopg.connect(database.url.replace("+psycopg", ""), autocommit=True) as listener:
        listener.execute("LISTEN alkstore")
        silent.enqueue("q", 1)
        assert list(listener.notifies(timeout=0.5)) == []


def test_a_waiter_wakes_at_the_next_run_at(database):
    with database.store(poll=60) as store:
        queue = store.queue("q")
        began = time.monotonic()
        queue.enqueue(1, delay=2)
        assert queue.claim_one("w") is None
        assert queue.wait(30)
        assert 1.5 < time.monotonic() - began < 20
        assert eventually(lambda: queue.claim_one("w"))


def test_a_waiter_wakes_when_a_claim_lapses(database):
    with database.store(poll=60) as store:
        queue = store.queue("q", visibility_timeout=0.7)
        queue.enqueue(1)
        queue.claim_one("dies")
        began = time.monotonic()
        assert queue.wait(30)
        assert time.monotonic() - began < 20
        assert eventually(lambda: queue.claim_one("w"))


def test_a_waiter_wakes_at_the_poll_floor(database):
    with database.store(poll=0.5, wake=False) as store:
        began = time.monotonic()
        assert store.queue("q").wait(30)
        assert 0.3 < time.monotonic() - began < 20


def test_work_that_somebody_else_has_locked_makes_no_hot_loop(database):
    with database.store(poll=60) as store:
        queue = store.queue("q")
        queue.enqueue(1)
        if database.kind == "sqlite":
            database.sql("UPDATE alkstore_job SET attempts = max_attempts")  # there, but not to be claimed
            assert queue.claim_one("w") is None
            seconds = _seconds_of(queue, 10)
        else:
            with database.engine().connect() as other:
                other.exec_driver_sql("SELECT * FROM alkstore_job FOR UPDATE")
                assert queue.claim_one("w") is None
                seconds = _seconds_of(queue, 10)
    assert 0.8 < seconds < 30


def _seconds_of(queue, rounds):
    began = time.monotonic()
    for _ in range(rounds):
        assert queue.wait(30)
        assert queue.claim_one("w") is None
    return time.monotonic() - began


@pytest.mark.databases("postgresql-18")
def test_c17_odd_names_and_big_payloads_wake_workers(database):
    name = 'Été "Q"; --' + "x" * 80
    other = name[:-1] + "y"
    with database.store(poll=60) as store, Store(database.engine()) as producer:
        stop = StopToken()
        ran = []

        def work():
            for job in store.queue(name).jobs("w", stop):
                ran.append(job.payload)
                job.ack()

        worker = threading.Thread(target=work)
        worker.start()
        eventually(lambda: is_listening(store))
        time.sleep(0.3)
        producer.enqueue(other, 1)
        with stopwatch() as seconds:
            producer.enqueue(name, "\U0001f600" * 20_000)
            eventually(lambda: ran)
            assert seconds() < 2
        assert ran == ["\U0001f600" * 20_000]
        stop.cancel()
        worker.join(20)
        assert len(ran) == 1


@pytest.mark.databases("postgresql-18", "sqlite")
def test_c17_without_wakes_the_poll_finds_it(database):
    with database.store(poll=1, wake=False) as store, Store(database.engine()) as producer:
        stop = StopToken()
        ran = []
        worker = threading.Thread(target=lambda: ran.extend(job.ack() for job in store.queue("q").jobs("w", stop)))
        worker.start()
        time.sleep(0.2)
        producer.enqueue("q", 1)
        with stopwatch() as seconds:
            eventually(lambda: ran)
            assert seconds() < 3
        stop.cancel()
        worker.join(20)


LISTENERS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND (query LIKE 'LISTEN%' OR query LIKE 'SELECT pg_notify%')"
)


@pytest.mark.databases("postgresql-18")
def test_the_listener_survives_the_end_of_its_connection(database, caplog):
    with database.store(poll=60) as store:
        store.enqueue("q", 0, delay=3600)
        for _ in range(2):
            wait = waiting(store.queue("q"))
            eventually(lambda: is_listening(store) and store._bell._hearing)  # it warns of its first failure since it heard
            listeners = eventually(lambda: database.sql(LISTENERS))
            database.sql(f"UPDATE alkstore_job SET run_at = {database.now()}, state = 'ready'")  # a commit of which no wake tells
            for (pid,) in listeners:
                database.sql(f"SELECT pg_terminate_backend({pid})")
            wait.join(40)
            assert wait.answer  # back, it listens first, and then everybody looks
            eventually(lambda: "until the listener is back" in caplog.text)  # a look of its own may have answered before
            database.sql(f"UPDATE alkstore_job SET run_at = {database.now(3600)}, state = 'delayed'")
            caplog.clear()
        wait = waiting(store.queue("q"))
        eventually(lambda: is_listening(store))
        time.sleep(0.2)
        store.enqueue("q", 1)
        wait.join(40)
        assert wait.answer
        assert wait.took < 25


@pytest.fixture
def own_server():
    installed = servers.installations()
    if not server_urls():
        pytest.skip("requires_postgresql: none is to be had here")
    server = servers.Server(*next(iter(installed.items())))
    make_template(server.url())
    yield server
    server.stop()


def test_a_loop_and_its_listener_survive_a_restart_of_the_database(own_server, caplog):
    database = TestDatabase.postgresql(own_server.url())
    with database.store(poll=60) as store, Store(database.engine()) as producer:
        stop = StopToken()
        ran = []
        worker = threading.Thread(target=lambda: ran.extend((job.payload, job.ack()) for job in store.queue("q").jobs("w", stop)))
        worker.start()
        producer.enqueue("q", 1)
        eventually(lambda: len(ran) == 1)
        own_server.restart("immediate")
        eventually(lambda: _enqueued(producer, 2))
        eventually(lambda: len(ran) == 2, within=40)
        eventually(lambda: store._bell._hearing, within=40)  # a listener's pauses grow while the server is away
        began = time.monotonic()
        producer.enqueue("q", 3)
        eventually(lambda: len(ran) == 3, within=40)
        assert time.monotonic() - began < 20
        stop.cancel()
        worker.join(20)
        assert not worker.is_alive()
    database.drop()


def _enqueued(store, payload):
    from sqlalchemy.exc import DBAPIError

    try:
        return store.enqueue("q", payload)
    except DBAPIError:
        return None


@pytest.mark.databases("postgresql-18")
def test_a_store_that_never_waits_opens_no_listener(database):
    threads = set(threading.enumerate())
    with database.store() as store:
        store.enqueue("q", 1)
        store.queue("q").claim_one("w").ack()
        assert not set(threading.enumerate()) - threads


def test_closing_the_store_ends_a_wait_and_the_thread(database):
    before = set(threading.enumerate())
    with database.store(poll=60) as store:
        stop = StopToken()
        errors = []

        def work():
            try:
                list(store.queue("q").jobs("w", stop))
            except Exception as error:
                errors.append(type(error).__name__)

        worker = threading.Thread(target=work)
        worker.start()
        eventually(lambda: is_listening(store))
        store.close()
        worker.join(20)
        assert errors == ["StoreClosed"]
        eventually(lambda: not set(threading.enumerate()) - before)


@pytest.mark.databases("postgresql-18")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_forgets_what_it_inherited_and_closes_nothing(database):
    with database.store(poll=60) as store:
        wait = waiting(store.queue("q"), 60)
        eventually(lambda: is_listening(store))
        time.sleep(0.2)

        def child():
            store.enqueue("other", 1)
            assert store.queue("other").wait(30)
            assert store.queue("other").claim_one("w").ack()
            assert not store.queue("other").wait(0.1)
            store.close()
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        store.enqueue("q", 1)
        wait.join(20)
        assert wait.answer
        assert store.queue("q").claim_one("w").ack()


@pytest.mark.databases("postgresql-18")
def test_a_connection_on_which_nothing_comes_through_is_noticed_and_polled_around(database, caplog, monkeypatch):
    from alkstore_sa import lines, wake

    monkeypatch.setattr(wake, "PROBE_ANSWER_SECONDS", 0.3)
    identifier = sql.Identifier
    monkeypatch.setattr(lines.sql, "Identifier", lambda name: identifier("elsewhere"))  # as a pooler in transaction mode would lose it
    with database.store(poll=0.5) as store:
        stop = StopToken()
        ran = []
        loop = threading.Thread(target=lambda: ran.extend(job.ack() for job in store.queue("q").jobs("w", stop)))
        loop.start()
        eventually(lambda: "by polling" in caplog.text)
        store.enqueue("q", 1)
        eventually(lambda: ran == [True])
        stop.cancel()
        loop.join(20)


@pytest.mark.databases("sqlite", "postgresql-18")
def test_a_draining_loop_promotes_within_a_second_and_seldom(database, monkeypatch):
    from alkstore_sa.queues import Jobs

    promotions = []
    promote = Jobs.promote
    monkeypatch.setattr(Jobs, "promote", lambda self, bind, queue: (promotions.append(time.monotonic()), promote(self, bind, queue))[1])
    with database.store(poll=60) as store:
        queue = store.queue("q")
        urgent = queue.enqueue("urgent", priority=9, delay=3600)
        queue.enqueue_many(range(3_000))
        stop = StopToken()
        seen = []
        began = time.monotonic()
        with stopwatch() as seconds:
            for job in queue.jobs("w", stop):
                seen.append(job.id)
                if len(seen) == 300:
                    database.sql(f"UPDATE alkstore_job SET run_at = {database.now(-1)} WHERE id = {urgent}")
                    due, before = seconds(), len(promotions)
                if job.id == urgent or len(seen) > 3_000:
                    stop.cancel()
            assert 300 < len(seen) <= 3_000 and seen[-1] == urgent
            assert seconds() - due < 5
        assert len(promotions) == before + 1
        assert len(promotions) <= 2 + (time.monotonic() - began) / 0.25
        assert len(seen) > 2 * len(promotions)


@pytest.mark.databases("postgresql-18")
def test_schemas_do_not_wake_each_other_and_may_have_odd_names(database):
    names = ('Mixed "Case" %s; é', "x" * 63)
    for name in names:
        migrate.upgrade(database.engine(), schema=name)
    odd, long = ({"schema": name, "poll": 60} for name in names)
    with database.store(**odd) as one, database.store(**long) as two, database.store(**odd) as producer:
        wait = waiting(one.queue("q"), 40)
        eventually(lambda: is_listening(one))
        for number in range(3):
            two.enqueue("q", number)
        time.sleep(1)
        assert wait.is_alive()
        producer.enqueue("q", 1)
        wait.join(60)
        assert wait.answer
        assert wait.took < 35


@pytest.mark.databases("postgresql-18")
def test_the_listener_takes_no_place_in_the_pool_and_leaves_no_connection_behind(database):
    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    with Store(engine, poll=60) as store:
        wait = waiting(store.queue("q"))
        eventually(lambda: is_listening(store))
        store.enqueue("q", 1)
        wait.join(40)
        assert wait.answer
    engine.dispose()
    eventually(lambda: not database.sql(LISTENERS))
