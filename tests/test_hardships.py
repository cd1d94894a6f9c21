"""What an adversary found: lost connections, odd pools and engines, interrupts, extreme values. Each was a defect once."""

import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from conftest import EVERY_DATABASE
from databases import TestDatabase, admin
from eventually import eventually
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, NullPool, StaticPool

from alkstore_sa import InvalidName, InvalidOption, JobState, StopToken, Store, prepare_sqlite
from alkstore_sa.errors import error_text
from alkstore_sa.patience import Patience

# -- sweeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.databases(*EVERY_DATABASE)
def test_more_exhausted_jobs_than_one_sweep_takes_all_go_dead(database, store):
    queue = store.queue("q", max_attempts=1)
    queue.enqueue_many(range(1_500))
    assert len(queue.claim("w", 1_500)) == 1_500
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")

    for _ in range(3):
        assert not queue.claim("w", 10)
    assert database.count() == 0
    assert database.count("alkstore_dead") == 1_500


# -- lost connections and interrupts -----------------------------------------------------------------------------------


@pytest.mark.databases("postgresql-18")
def test_a_connection_lost_inside_our_transaction_is_reported_as_itself(database, store):
    with pytest.raises(OperationalError), store.begin() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        database.sql(f"SELECT pg_terminate_backend({pid})")
        connection.exec_driver_sql("SELECT 1")
    assert store.enqueue("q", 1)


@pytest.mark.databases("postgresql-18")
def test_an_interrupt_inside_our_transaction_arrives_as_itself(database, store):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
    main = threading.get_ident()
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"

    def interrupt():
        eventually(lambda: database.sql(asleep)[0][0])
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt), store.begin() as connection:
        connection.exec_driver_sql("SELECT pg_sleep(60)")
    interrupter.join()
    signal.signal(signal.SIGINT, before)
    assert store.enqueue("q", 1)


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("ending", ["drop_connections", "close"])
def test_a_connection_in_use_while_its_pool_is_disposed_of_is_ended_when_it_comes_back(database, store, ending):
    with store.begin() as connection:
        store.enqueue_tx(connection, "q", 1)
        driver = connection.connection.driver_connection
        getattr(store._database, ending)()
    assert driver.closed
    assert database.count() == 1


@pytest.mark.databases("postgresql-18")
def test_a_loop_outlives_a_server_that_is_read_only_for_a_while(database, store):
    stop = StopToken()
    ran = []
    worker = threading.Thread(target=lambda: ran.extend(job.ack() for job in store.queue("q").jobs("w", stop)))
    database.sql(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    worker.start()
    time.sleep(1)
    assert worker.is_alive()
    admin(database.server_url, f"ALTER DATABASE {database.name} SET default_transaction_read_only = off")
    eventually(lambda: enqueued(store), within=40)
    eventually(lambda: ran, within=40)
    stop.cancel()
    worker.join(20)


def enqueued(store):
    try:
        return store.enqueue("q", 1)
    except DBAPIError:
        return None


@pytest.mark.databases("sqlite", "postgresql-18")
def test_an_interrupt_propagates_even_where_the_message_cannot_be_given_back(database, store):
    store.outbox("o").enqueue(1)

    def deliver(job):
        store.close()  # so that the release fails
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.outbox("o").run("w", deliver, StopToken())


@pytest.mark.databases(*EVERY_DATABASE)
def test_a_delivery_whose_ack_tx_was_rolled_back_is_retried(database, store):
    job_id = store.outbox("o").enqueue(1)

    def deliver(job):
        with Session(database.engine()) as session, session.begin():
            job.ack_tx(session)
            raise ValueError("after all not")

    assert store.outbox("o").run_once("w", deliver)
    job = store.get_job(job_id)
    assert (job.state, job.last_error) == (JobState.DELAYED, "after all not")


@pytest.mark.databases("postgresql-18")
def test_a_delivery_that_leaves_its_ack_tx_open_holds_nobody_up(database, store):
    job_id = store.outbox("o").enqueue(1)
    sessions = []

    def deliver(job):
        sessions.append(Session(database.engine()))
        job.ack_tx(sessions[0])
        raise ValueError

    assert store.outbox("o").run_once("w", deliver)
    sessions[0].commit()
    sessions[0].close()
    assert store.get_job(job_id) is None


@pytest.mark.databases("sqlite")
def test_a_delivery_that_cannot_be_called_is_refused_before_anything_is_claimed(database, store):
    store.outbox("o").enqueue(1)
    with pytest.raises(TypeError):
        store.outbox("o").run_once("w", None)
    assert database.sql("SELECT attempts FROM alkstore_job") == [(0,)]


# -- isolation -----------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgresql-18", "postgresql-15")
@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_every_verb_is_read_committed_whatever_the_database_says(database, level):
    database.sql(f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{level}'")
    with database.store() as store:
        for single in (False, True):
            with store.begin(single=single) as connection:
                assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
        store.enqueue("q", 1)
        assert store.queue("q").claim_one("w").ack()


# -- pools and engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [StaticPool, AssertionPool])
def test_a_pool_of_one_connection_for_all_threads_is_refused(database, pool):
    store = Store(database.engine(poolclass=pool))
    with pytest.raises(InvalidOption, match=pool.__name__):
        store.enqueue("q", 1)
    store.close()


@pytest.mark.parametrize(
    "options", [{"poolclass": NullPool}, {"pool_size": 1, "max_overflow": 0}, {"pool_size": 0}, {"pool_pre_ping": True}], ids=str
)
def test_many_threads_share_a_store_whatever_the_pool(database, options):
    with Store(database.engine(**options)) as store:
        store.queue("q").enqueue_many(range(60))
        acked = []

        def work():
            queue = store.queue("q")
            while job := queue.claim_one("w"):
                acked.append(job.id if job.ack() else None)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(set(acked)) == len(acked) == 60


def test_the_store_keeps_a_small_pool_of_its_own(database):
    with Store(database.engine(pool_size=30, max_overflow=7)) as store:
        store.enqueue("q", 1)
        pool = store._database._open_twin().pool
        assert (pool.size(), pool._max_overflow) == (5, 32)


@pytest.mark.databases("postgresql-18")
def test_an_applications_connect_listener_may_leave_a_transaction_open(database):
    engine = database.engine()

    @event.listens_for(engine, "connect")
    def zone(connection, _entry):
        cursor = connection.cursor()
        cursor.execute("SET TIME ZONE 'Asia/Tokyo'")
        cursor.close()

    with Store(engine) as store:
        assert store.queue("q").enqueue(1)
        with store.begin(single=True) as connection:
            assert connection.exec_driver_sql("SHOW TimeZone").scalar() == "Asia/Tokyo"


@pytest.mark.databases("postgresql-18")
def test_a_payload_is_in_no_error_of_the_stores_own_statements(database, store):
    database.sql(f"ALTER DATABASE {database.name} SET lock_timeout = '200ms'")
    with Session(database.engine()) as session:
        session.execute(text("LOCK TABLE alkstore_job"))
        with pytest.raises(OperationalError) as caught:
            store.enqueue("q", {"card": "4111-1111"})
    assert "4111" not in str(caught.value)


@pytest.mark.databases("sqlite")
def test_a_commit_waits_for_readers_where_there_is_no_wal(database):
    database.sql("PRAGMA journal_mode = DELETE")
    engine = database.engine(prepared=False)
    with Store(engine) as store:
        store.enqueue("q", 1)
        reader = database.engine(prepared=False).connect()
        rows = reader.execution_options(stream_results=True).exec_driver_sql(
            "SELECT * FROM alkstore_job UNION ALL SELECT * FROM alkstore_job"
        )
        rows.fetchone()
        threading.Timer(2, lambda: (rows.close(), reader.close())).start()
        began = time.monotonic()
        assert store.queue("q").claim_one("w")
        assert time.monotonic() - began < 20


@pytest.mark.databases("sqlite")
def test_a_prepared_engine_stays_prepared_after_an_autocommit_option(database, store):
    engine = database.engine()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT 1"))
    with Session(engine) as session:
        session.begin_nested()
        store.enqueue_tx(session, "q", 1)
        session.rollback()
    assert database.count() == 0


@pytest.mark.databases("sqlite")
def test_an_engine_made_from_another_is_refused_by_prepare_sqlite(database):
    with pytest.raises(InvalidOption, match="made from"):
        prepare_sqlite(create_engine(database.url).execution_options(x=1))


def test_a_refused_connection_is_left_as_it_was(database, store):
    with database.engine(isolation_level="AUTOCOMMIT").connect() as connection:
        with pytest.raises(InvalidOption):
            store.enqueue_tx(connection, "q", 1)
        assert not connection.in_transaction()


# -- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instant", [datetime.min, datetime.max, datetime(9999, 12, 31), datetime(1, 1, 1, 5)], ids=str)
def test_an_instant_that_a_time_zone_would_carry_out_of_range_is_refused(store, instant):
    with pytest.raises(InvalidOption):
        store.queue("q").enqueue(1, run_at=instant.replace(tzinfo=UTC))


@pytest.mark.databases("sqlite", "postgresql-18")
def test_the_earliest_and_the_latest_instants_can_be_stored_read_and_claimed(store):
    queue = store.queue("q")
    late = queue.enqueue("late", run_at=datetime(9999, 12, 27, tzinfo=UTC))
    early = queue.enqueue("early", run_at=datetime(1, 1, 5, tzinfo=UTC))
    assert [job.run_at.year for job in store.jobs()] == [9999, 1]
    assert queue.claim_one("w").id == early
    assert store.get_job(late).state == JobState.DELAYED
    assert queue.enqueue(1, expires=timedelta(days=36_500))


def test_inspection_validates_names_too(store):
    for options in ({"queue": "a\x00b"}, {"queue": ""}, {"task": "\ud800"}, {"task": 5}):
        with pytest.raises(InvalidName):
            store.jobs(**options)
    assert store.jobs(queue="__alkstore_outbox:o") == []


def test_handles_of_another_store_are_refused(database, store, tmp_path):
    other = TestDatabase.sqlite(tmp_path / "other.db")
    with other.store() as there:
        there.enqueue("q", 1)
        store.enqueue("q", 1)
        mine, foreign = store.queue("q").claim_one("w"), there.queue("q").claim_one("w")
        with pytest.raises(InvalidOption):
            store.queue("q").ack_many([mine, foreign])
        assert store.queue("q").ack_many([mine]) == 1
        assert mine.settled
        assert foreign.ack()
    other.drop()


def test_of_two_handles_of_one_job_only_the_standing_one_acks(database, store):
    queue = store.queue("q")
    queue.enqueue(1)
    old = queue.claim_one("w")
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")
    new = queue.claim_one("w")
    assert queue.ack_many([old, new]) == 1
    assert (old.lost.is_set(), new.lost.is_set()) == (True, False)


class Hostile(str):
    __slots__ = ()

    def replace(self, *args):
        raise RuntimeError

    def encode(self, *args):
        raise RuntimeError


class Awkward(Exception):
    def __str__(self):
        return Hostile("awkward")


def test_no_kind_of_error_makes_its_recording_fail(store):
    assert error_text(Hostile("text")) == "text"
    assert error_text(Awkward()) == "awkward"
    assert error_text(None) == "None"
    assert error_text(b"x") == "b'x'"


def test_a_codec_whose_error_cannot_be_printed_is_shown_by_its_type(database):
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError

    class BadCodec:
        def encode(self, payload):
            return "x"

        def decode(self, text):
            raise Bad

    with database.store(codec=BadCodec()) as store:
        assert "Bad" in store.get_job(store.enqueue("q", 1)).payload_error


def test_patience_passes_what_is_no_failure_of_the_connection():
    with pytest.raises(ValueError), Patience(StopToken()).with_the_database():
        raise ValueError


@pytest.mark.databases("postgresql-18")
def test_a_process_that_is_stopped_inside_a_limited_transaction_does_not_keep_its_locks(database, store):
    store.enqueue("q", 1)
    with pytest.raises(DBAPIError), store._database.begin(limit=3) as connection:
        connection.execute(text("SELECT * FROM alkstore_job FOR UPDATE")).all()
        began = time.monotonic()
        database.sql("UPDATE alkstore_job SET priority = 1")  # waits for the row, as long as this "stopped" transaction has it
        assert time.monotonic() - began < 20
        connection.execute(text("SELECT 1"))
    assert store.queue("q").claim_one("w").priority == 1
