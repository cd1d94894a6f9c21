"""The outbox: point by point what it promises, on every database."""

import functools
import logging
import threading
from datetime import timedelta

import pytest
from conftest import EVERY_DATABASE
from eventually import eventually
from sqlalchemy.orm import Session

from alkstore_sa import InvalidName, InvalidOption, JobState, ReservedName, StopToken

pytestmark = pytest.mark.databases(*EVERY_DATABASE)
BACKING = "__alkstore_outbox:o"


@pytest.fixture
def outbox(store):
    return store.outbox("o")


def make_due(database):
    database.sql(f"UPDATE alkstore_job SET run_at = {database.now(-1)}")


def test_the_constructor_validates_its_name(store):
    for name in ("", " ", None, "x" * 256, "a\x00"):
        with pytest.raises(InvalidName):
            store.outbox(name)
    for name in ("__alkstore_x", "__alkstore_outbox:o"):
        with pytest.raises(ReservedName):
            store.outbox(name)
    assert store.outbox('Été "Q"; --').name == 'Été "Q"; --'


def test_the_backing_queue_cannot_be_reached_by_any_other_call(database, store):
    with Session(database.engine()) as session:
        for call in (
            lambda: store.queue(BACKING),
            lambda: store.enqueue(BACKING, 1),
            lambda: store.enqueue_tx(session, BACKING, 1),
            lambda: store.outbox_enqueue_tx(session, BACKING, 1),
        ):
            with pytest.raises(ReservedName):
                call()
    assert database.count() == 0


def test_a_message_is_stamped_60_5_5_and_its_max_attempts_may_be_given(database, store, outbox):
    with Session(database.engine()) as session:
        ids = [
            outbox.enqueue(1),
            outbox.enqueue(1, max_attempts=2),
            store.outbox_enqueue_tx(session, "o", 1),
            outbox.enqueue_tx(session, 1, max_attempts=9),
        ]
        session.commit()
    jobs = [store.get_job(job_id) for job_id in ids]

    assert {job.queue for job in jobs} == {BACKING}
    assert {(job.visibility_timeout, job.base_backoff) for job in jobs} == {(timedelta(seconds=60), timedelta(seconds=5))}
    assert [job.max_attempts for job in jobs] == [5, 2, 5, 9]


def test_a_delivery_that_returns_is_acked(database, store, outbox):
    job_id = outbox.enqueue({"to": "ann"})
    seen = []

    assert outbox.run_once("w", lambda job: seen.append((job.id, job.payload, job.attempts, job.worker_id)))
    assert seen == [(job_id, {"to": "ann"}, 1, "w")]
    assert store.get_job(job_id) is None
    assert not outbox.run_once("w", seen.append)


def test_a_delivery_that_raises_is_retried_along_the_curve_and_dies_with_its_own_text(database, store, outbox):
    job_id = outbox.enqueue(1)

    def deliver(job):
        raise ConnectionError(f"attempt {job.attempts} refused")

    for attempt, gap in ((1, 5), (2, 10), (3, 20), (4, 40)):
        before = database.sql(f"SELECT {database.now()}")[0][0]
        assert outbox.run_once("w", deliver)
        run_at, error, after = database.sql(f"SELECT run_at, last_error, {database.now()} FROM alkstore_job")[0]
        least, most = ((run_at - then) / 1e6 if database.kind == "sqlite" else (run_at - then).total_seconds() for then in (after, before))
        assert least - 0.01 <= gap <= most + 0.01
        assert error == f"attempt {attempt} refused"
        assert store.get_job(job_id).state == JobState.DELAYED
        assert not outbox.run_once("w", deliver)
        make_due(database)
    assert outbox.run_once("w", deliver)

    assert (store.get_job(job_id).state, store.get_job(job_id).last_error, store.get_job(job_id).attempts) == (
        JobState.DEAD,
        "attempt 5 refused",
        5,
    )
    assert [job.id for job in outbox.dead()] == [job_id]
    assert outbox.replay(job_id)
    assert outbox.run_once("w", lambda job: None)
    assert outbox.replay_all() == 0
    assert outbox.purge_dead(older_than=0) == 0


def test_no_heartbeat_is_sent_for_a_delivery_but_it_may_send_its_own(store, outbox):
    outbox.enqueue(1)

    def deliver(job):
        end = job.claim_expires_at
        assert store.get_job(job.id).claim_expires_at == end
        assert job.heartbeat(3600)
        assert store.get_job(job.id).claim_expires_at - end > timedelta(minutes=50)

    assert outbox.run_once("w", deliver)
    assert store.queues() == []


@pytest.mark.databases("postgresql-18")
def test_no_transaction_is_open_during_a_delivery(database, outbox):
    outbox.enqueue(1)
    states = []
    outbox.run_once(
        "w",
        lambda job: states.extend(
            database.sql(
                "SELECT state FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        ),
    )
    assert {state for (state,) in states} <= {"idle"}


@pytest.mark.parametrize("how", ["ack", "retry", "fail", "release", "ack_tx"])
@pytest.mark.databases("sqlite", "postgresql-18")
def test_what_a_delivery_settled_itself_is_left_as_it_did(database, store, outbox, caplog, how):
    job_id = outbox.enqueue(1)

    def deliver(job):
        if how == "ack_tx":
            with Session(database.engine()) as session:
                job.ack_tx(session)
                session.commit()
        else:
            {
                "ack": job.ack,
                "retry": lambda: job.retry("mine", delay=60),
                "fail": lambda: job.fail("mine"),
                "release": lambda: job.release(delay=60),
            }[how]()

    with caplog.at_level(logging.WARNING):
        assert outbox.run_once("w", deliver)
    job = store.get_job(job_id)
    assert (job and job.state) == {"ack": None, "retry": "delayed", "fail": "dead", "release": "delayed", "ack_tx": None}[how]
    assert not caplog.records


def test_an_error_after_the_delivery_settled_the_job_changes_nothing(store, outbox):
    job_id = outbox.enqueue(1)

    def deliver(job):
        job.fail("mine")
        raise RuntimeError("late")

    assert outbox.run_once("w", deliver)
    assert store.get_job(job_id).last_error == "mine"


class AsyncCallable:
    async def __call__(self, job):
        raise AssertionError


async def coroutine(job):
    raise AssertionError


async def async_generator(job):
    yield job


def generator(job):
    yield job


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    "delivery",
    [coroutine, AsyncCallable(), functools.partial(coroutine), async_generator, generator],
    ids=["coroutine", "callable", "partial", "async_generator", "generator"],
)
def test_what_would_not_run_when_called_is_refused_before_anything_is_claimed(database, outbox, delivery):
    outbox.enqueue(1)
    with pytest.raises(TypeError):
        outbox.run_once("w", delivery)
    with pytest.raises(TypeError):
        outbox.run("w", delivery, StopToken())
    assert database.sql("SELECT state, attempts FROM alkstore_job") == [("ready", 0)]


def test_a_returned_awaitable_is_closed_and_counts_as_a_failure(store, outbox):
    job_id = outbox.enqueue(1)
    made = []

    def deliver(job):
        made.append(coroutine(job))
        return made[0]

    assert outbox.run_once("w", deliver)
    assert made[0].cr_frame is None
    assert store.get_job(job_id).state == JobState.DELAYED
    assert "awaitable" in store.get_job(job_id).last_error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.databases("sqlite", "postgresql-18")
def test_what_is_no_exception_gives_the_message_back_and_propagates(store, outbox, error):
    job_id = outbox.enqueue(1)

    def deliver(job):
        raise error

    with pytest.raises(error):
        outbox.run_once("w", deliver)
    assert (store.get_job(job_id).state, store.get_job(job_id).attempts) == (JobState.READY, 0)


def test_a_claim_lost_while_delivering_is_logged_and_nothing_is_overwritten(database, store, outbox, caplog):
    job_id = outbox.enqueue(1)
    for outcome in (None, ValueError("mine")):

        def deliver(job, outcome=outcome):
            database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")
            others.append(store.outbox("o")._queue.claim_one("other"))
            if outcome:
                raise outcome

        others = []
        caplog.clear()
        assert outbox.run_once("w", deliver)
        assert "lost" in caplog.text
        assert (store.get_job(job_id).worker_id, store.get_job(job_id).last_error) == ("other", None)
        others[0].release()


def test_an_undecodable_message_is_the_deliverys_error(database, store, outbox):
    job_id = outbox.enqueue(1, max_attempts=1)
    good = outbox.enqueue(2)
    database.sql(f"UPDATE alkstore_job SET payload = '{{' WHERE id = {job_id}")
    seen = []

    assert outbox.run_once("w", lambda job: seen.append(job.payload))
    assert outbox.run_once("w", lambda job: seen.append(job.payload))
    assert seen == [2]
    assert store.get_job(job_id).state == JobState.DEAD
    assert "JSON" in store.get_job(job_id).last_error
    assert store.get_job(good) is None


@pytest.mark.databases("sqlite", "postgresql-18")
def test_the_loop_delivers_what_comes_and_stops_when_told(store, outbox):
    stop = StopToken()
    seen = []
    outbox.enqueue(0)
    loop = threading.Thread(target=outbox.run, args=("w", lambda job: seen.append(job.payload), stop))
    loop.start()
    eventually(lambda: seen == [0])
    store.outbox("o").enqueue_many([1, 2, 3])
    eventually(lambda: seen == [0, 1, 2, 3])
    stop.cancel()
    loop.join(20)
    assert not loop.is_alive()
    assert store.queues() == []


@pytest.mark.databases("sqlite", "postgresql-18")
def test_the_loop_picks_a_retry_up_at_its_own_deadline(database):
    stop = StopToken()
    seen = []

    def deliver(job):
        seen.append(job.attempts)
        if job.attempts == 1:
            job.retry("once more", delay=0.3)

    with database.store(poll=60) as store:
        outbox = store.outbox("o")
        outbox.enqueue(1)
        loop = threading.Thread(target=outbox.run, args=("w", deliver, stop))
        loop.start()
        eventually(lambda: seen == [1, 2])
        stop.cancel()
        loop.join(20)


def test_bad_options_are_refused(outbox):
    with pytest.raises(InvalidOption):
        outbox.enqueue(1, delay=-1)
    with pytest.raises(InvalidName):
        outbox.run_once("", lambda job: None)


def test_a_message_whose_ack_tx_was_refused_is_retried(database, store, outbox):
    job_id = outbox.enqueue(1)
    with database.engine().connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("SELECT 1")  # open, and can carry no ack
        assert outbox.run_once("w", lambda job: job.ack_tx(connection))
        assert store.get_job(job_id).state == JobState.DELAYED
    database.sql(f"UPDATE alkstore_job SET run_at = {database.now(-1)}")
    assert outbox.run_once("w", lambda job: job.ack_tx("no transaction"))
    assert "is no Session" in store.get_job(job_id).last_error
