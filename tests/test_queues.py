"""The contract of queues, the same on every database."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from conftest import EVERY_DATABASE
from eventually import eventually
from hypothesis import given, settings
from sqlalchemy import text
from test_pure import BAD_NAMES, BAD_OPTIONS, BAD_PAYLOADS, JSON_VALUES, same

from alkstore_sa import InvalidName, InvalidOption, InvalidPayload, JobState, ReservedName, Store, StoreClosed

pytestmark = pytest.mark.databases(*EVERY_DATABASE)


def set_job(database, job_id, **offsets):
    """Put instants of a job to the database's now plus so many seconds."""
    for column, seconds in offsets.items():
        database.sql(f"UPDATE alkstore_job SET {column} = {database.now(seconds)} WHERE id = {job_id}")


# -- enqueue ---------------------------------------------------------------------------------------------------------


def test_a_job_is_stamped_with_the_defaults(store, queue):
    job = store.get_job(queue.enqueue({"n": 1}))

    assert (job.queue, job.payload, job.state, job.priority, job.attempts, job.fence) == ("q", {"n": 1}, JobState.READY, 0, 0, 0)
    assert (job.visibility_timeout, job.max_attempts, job.base_backoff) == (timedelta(seconds=300), 3, timedelta(seconds=5))
    assert (job.task, dict(job.headers), job.schedule, job.scheduled_for, job.last_error, job.died_at) == (None, {}, None, None, None, None)
    assert (job.worker_id, job.claim_expires_at, job.expires_at, job.payload_error) == (None, None, None, None)
    assert job.enqueued_at == job.run_at
    assert job.enqueued_at.tzinfo is UTC


def test_a_handle_stamps_what_it_was_given_and_the_call_comes_before_it(store):
    queue = store.queue("q", visibility_timeout=7.5, max_attempts=9, base_backoff=timedelta(minutes=1))

    first, second = store.get_job(queue.enqueue(1)), store.get_job(queue.enqueue(1, max_attempts=2))

    assert (first.visibility_timeout, first.max_attempts, first.base_backoff) == (timedelta(seconds=7.5), 9, timedelta(minutes=1))
    assert second.max_attempts == 2


def test_headers_and_priority_are_kept(store, queue):
    job_id = queue.enqueue(None, headers={"trace": "é%"}, priority=-32_768)

    assert store.get_job(job_id).headers == {"trace": "é%"}
    assert store.get_job(job_id).priority == -32_768
    assert queue.claim_one("w").headers == {"trace": "é%"}


def test_a_delayed_job_waits_and_a_past_run_at_does_not(store, queue):
    late = queue.enqueue("late", delay=3600)
    early = queue.enqueue("early", run_at=datetime(2020, 1, 1, tzinfo=UTC))

    assert store.get_job(late).state == JobState.DELAYED
    assert store.get_job(late).run_at - store.get_job(late).enqueued_at == timedelta(hours=1)
    assert store.get_job(early).run_at == datetime(2020, 1, 1, tzinfo=UTC)
    assert [job.id for job in queue.claim("w", 10)] == [early]


def test_a_due_delayed_job_shows_as_ready_before_anybody_promotes_it(database, store, queue):
    job_id = queue.enqueue(1, delay=3600)
    set_job(database, job_id, run_at=-1)

    assert store.get_job(job_id).state == JobState.READY
    assert [job.id for job in store.jobs(state=JobState.READY)] == [job_id]
    assert not store.jobs(state=JobState.DELAYED)
    assert store.queues()[0].ready == 1
    assert queue.claim_one("w").id == job_id


def test_a_run_at_past_the_expiry_is_refused_and_nothing_is_stored(database, queue):
    with pytest.raises(InvalidOption):
        queue.enqueue(1, run_at=datetime.now(UTC) + timedelta(hours=2), expires=3600)
    with pytest.raises(InvalidOption):
        queue.enqueue_many([1, 2], run_at=datetime.now(UTC) + timedelta(hours=2), expires=3600)
    assert database.count() == 0
    assert queue.enqueue(1, run_at=datetime.now(UTC) + timedelta(hours=1), expires=7200)
    assert queue.enqueue_many([1], run_at=datetime.now(UTC) + timedelta(hours=1), expires=7200)


@pytest.mark.parametrize("count", [1, 3, 12_001])
def test_many_jobs_get_ascending_ids_in_the_order_of_their_payloads(store, queue, count):
    ids = queue.enqueue_many(range(count), priority=3)

    assert ids == sorted(set(ids))
    assert len(ids) == count
    for position in {0, count // 2, count - 1}:
        assert store.get_job(ids[position]).payload == position
    assert store.queues()[0].ready == count


def test_many_large_payloads_are_stored_whole(store, queue):
    ids = queue.enqueue_many(["x" * 400_000 + str(n) for n in range(7)])

    assert [store.get_job(job_id).payload[-1] for job_id in ids] == list("0123456")


def test_no_payloads_make_no_round_trip(database):
    store = Store(database.engine())
    store.close()
    assert store.queue("q").enqueue_many([]) == []


def test_one_bad_payload_stores_none_of_many(database, queue):
    with pytest.raises(InvalidPayload):
        queue.enqueue_many([1, 2, {3}])
    assert database.count() == 0


def test_bad_input_is_refused_before_any_round_trip(database):
    store = Store(database.engine())
    queue = store.queue("q")
    store.close()  # so that a round trip would raise StoreClosed

    for name in BAD_NAMES:
        for call in (store.queue, store.outbox, lambda name: store.enqueue(name, 1), lambda name: queue.claim(name)):
            with pytest.raises(InvalidName):
                call(name)
    for call in (store.queue, store.outbox, lambda name: store.enqueue(name, 1), lambda name: queue.claim(name)):
        with pytest.raises(ReservedName):
            call("__alkstore_outbox:x")
    for options in BAD_OPTIONS:
        for call in (queue.enqueue, store.outbox("x").enqueue):
            with pytest.raises(InvalidOption):
                call(1, **options)
        with pytest.raises(InvalidOption):
            queue.enqueue_many([1], **options)
    for payload in BAD_PAYLOADS:
        with pytest.raises(InvalidPayload):
            queue.enqueue(payload)
    for limit in (0, -1, True, 1.5, "1"):
        with pytest.raises(InvalidOption):
            queue.claim("w", limit)
    for options in ({"visibility_timeout": 0}, {"base_backoff": 0}, {"max_attempts": 0}, {"visibility_timeout": float("nan")}):
        with pytest.raises(InvalidOption):
            store.queue("q", **options)
    for call in (
        lambda: store.get_job("1"),
        lambda: store.get_job(2**63),
        lambda: store.jobs(state="asleep"),
        lambda: queue.purge_dead(older_than=-1),
    ):
        with pytest.raises(InvalidOption):
            call()


def test_a_closed_store_refuses_every_call(store, queue):
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")
    store.close()
    calls = [
        lambda: queue.enqueue(1),
        lambda: queue.enqueue_many([1]),
        lambda: queue.claim("w"),
        lambda: queue.wait(0),
        lambda: queue.dead(),
        lambda: store.queues(),
        lambda: store.jobs(),
        lambda: store.get_job(job_id),
        lambda: store.verify(),
        job.ack,
        job.heartbeat,
        lambda: job.retry("x"),
        lambda: store.outbox("o").run_once("w", lambda job: None),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()
    store.close()


def test_two_stores_in_one_process_do_not_see_each_other(database, tmp_path):
    from databases import TestDatabase

    other = TestDatabase.sqlite(tmp_path / "other.db")
    with database.store() as one, other.store() as two:
        one.enqueue("q", 1)
        assert two.queues() == []
        assert two.queue("q").claim_one("w") is None
    other.drop()


@given(payload=JSON_VALUES)
@settings(max_examples=30)
def test_a_stored_payload_comes_back_equal_in_value_and_type(queue, payload):
    queue.enqueue(payload)
    job = queue.claim_one("w")
    assert same(job.payload, payload)
    assert job.ack()


def test_c11_payloads_come_back_equal(queue):
    payloads = [2**70, 1.0, -0.5, -0.0, 1e16, True, None, [], "", {"b": 1, "a": 2}, "é", "\U0001f600" * 1_000_000]
    for payload in payloads:
        queue.enqueue(payload)
        job = queue.claim_one("w")
        assert same(job.payload, payload)
        job.ack()


def test_another_codec_is_used_for_everything_and_its_text_is_stored_as_it_is(database):
    class Reversed:
        def encode(self, payload):
            return payload[::-1]

        def decode(self, text):
            return text[::-1]

    with database.store(codec=Reversed()) as store:
        job_id = store.enqueue("q", "abc")
        assert database.sql("SELECT payload FROM alkstore_job") == [("cba",)]
        assert store.get_job(job_id).payload == "abc"
        assert store.queue("q").claim_one("w").payload == "abc"


# -- claim -----------------------------------------------------------------------------------------------------------


def test_claiming_stamps_the_claim(database, store):
    queue = store.queue("q", visibility_timeout=60)
    job_id = queue.enqueue({"n": 1}, headers={"h": "1"})

    job = queue.claim_one("w1")

    assert (job.id, job.queue, job.worker_id, job.attempts, job.max_attempts, job.fence) == (job_id, "q", "w1", 1, 3, 1)
    assert (job.payload, job.headers, job.priority, job.task, job.schedule, job.last_error) == ({"n": 1}, {"h": "1"}, 0, None, None, None)
    seen = store.get_job(job_id)
    assert (seen.state, seen.worker_id, seen.attempts, seen.fence) == (JobState.CLAIMED, "w1", 1, 1)
    assert seen.claim_expires_at == job.claim_expires_at
    assert timedelta(seconds=58) < job.claim_expires_at - job.enqueued_at < timedelta(seconds=75)
    assert queue.claim_one("w2") is None


def test_a_claim_takes_only_its_own_queue(store):
    store.enqueue("a", 1)
    assert store.queue("b").claim_one("w") is None
    assert store.queue("A").claim_one("w") is None
    assert store.queue("a").claim_one("w") is not None


def test_c08_a_batch_comes_in_order_and_size(database, queue):
    ids = [queue.enqueue(n, priority=priority) for n, priority in enumerate([5, -1, 9, 5, 0, 9], 1)]
    database.sql(f"UPDATE alkstore_job SET attempts = 1, last_error = 'x' WHERE id = {ids[5]}")

    first = queue.claim("w", 4)
    second = queue.claim("w", 10)

    assert [job.payload for job in first] == [3, 6, 1, 4]
    assert [job.payload for job in second] == [5, 2]
    set_job(database, first[0].id, claim_expires_at=-1)
    set_job(database, first[3].id, claim_expires_at=-2)
    assert [job.payload for job in queue.claim("w", 10)] == [3, 4]


def test_due_time_comes_before_id_and_priority_before_both(database, queue):
    now = datetime.now(UTC)
    c = queue.enqueue("c", run_at=now - timedelta(hours=1))
    a = queue.enqueue("a", run_at=now - timedelta(hours=3))
    b = queue.enqueue("b", run_at=now - timedelta(hours=2))
    first = queue.enqueue("first", priority=1)

    assert [job.id for job in queue.claim("w", 10)] == [first, a, b, c]


def test_a_retried_delayed_job_takes_its_place_by_its_new_due_time(database, queue):
    queue.enqueue("old")
    job = queue.claim_one("w")
    newer = queue.enqueue("newer")
    job.retry("x", delay=1)
    set_job(database, job.id, run_at=-0.001)

    assert [claimed.id for claimed in queue.claim("w", 2)] == [newer, job.id]


def test_a_lapsed_claim_is_claimed_again_with_a_higher_fence(database, store, queue):
    job_id = queue.enqueue(1)
    queue.claim_one("w1")
    set_job(database, job_id, claim_expires_at=-1)

    assert store.get_job(job_id).state == JobState.READY
    again = queue.claim_one("w2")

    assert (again.id, again.attempts, again.fence, again.worker_id) == (job_id, 2, 2, "w2")


def test_a_lapsed_job_with_no_attempt_left_goes_dead(database, store, queue):
    job_id = queue.enqueue(1, max_attempts=1)
    job = queue.claim_one("w")
    set_job(database, job_id, claim_expires_at=-1)

    assert queue.claim_one("w") is None
    dead = store.get_job(job_id)
    assert (dead.state, dead.last_error, dead.attempts) == (JobState.DEAD, "max attempts exceeded", 1)
    assert dead.died_at is not None
    assert not job.ack()


def test_an_expired_ready_job_goes_dead_without_an_attempt(database, store, queue):
    job_id = queue.enqueue(1, expires=3600)
    assert store.get_job(job_id).expires_at - store.get_job(job_id).enqueued_at == timedelta(hours=1)
    set_job(database, job_id, expires_at=-1)

    assert queue.claim_one("w") is None
    assert (store.get_job(job_id).state, store.get_job(job_id).last_error, store.get_job(job_id).attempts) == (JobState.DEAD, "expired", 0)


def test_a_lapsed_and_expired_job_goes_dead_and_exhaustion_is_named_first(database, store, queue):
    expired, both = queue.enqueue(1, expires=3600), queue.enqueue(2, expires=3600, max_attempts=1)
    assert len(queue.claim("w", 2)) == 2
    for job_id in (expired, both):
        set_job(database, job_id, expires_at=-1, claim_expires_at=-1)

    assert queue.claim_one("w") is None
    assert [job.last_error for job in queue.dead()] == ["expired", "max attempts exceeded"]


def test_expiry_never_touches_a_live_claim(database, queue):
    job_id = queue.enqueue(1, expires=3600)
    job = queue.claim_one("w")
    set_job(database, job_id, expires_at=-1)

    assert queue.claim_one("other") is None
    assert job.heartbeat()
    assert job.ack()


def test_expired_jobs_take_no_place_in_a_batch(database, queue):
    ids = queue.enqueue_many(range(2_500), priority=5, expires=3600)
    database.sql(f"UPDATE alkstore_job SET expires_at = {database.now(-1)}")
    wanted = queue.enqueue("wanted")

    assert [job.id for job in queue.claim("w", 3)] == [wanted]
    assert len(ids) == 2_500


def test_far_future_rows_of_high_priority_are_not_in_the_way(queue):
    queue.enqueue_many(range(1_000), delay=86_400, priority=100)
    job_id = queue.enqueue("now")
    assert [job.id for job in queue.claim("w", 5)] == [job_id]


# -- settle ----------------------------------------------------------------------------------------------------------


def test_an_acked_job_is_gone(database, store, queue):
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")

    assert job.ack()
    assert store.get_job(job_id) is None
    assert database.count() == database.count("alkstore_dead") == 0
    assert not job.ack()
    assert job.lost.is_set()


SETTLE = {
    "ack": lambda job: job.ack(),
    "retry": lambda job: job.retry("x", delay=0),
    "fail": lambda job: job.fail("x"),
    "release": lambda job: job.release(),
}
LATER = {**SETTLE, "heartbeat": lambda job: job.heartbeat()}


@pytest.mark.databases("sqlite", "postgresql-18")
@pytest.mark.parametrize("first", SETTLE)
def test_a_settled_handle_answers_false_and_changes_nothing(database, queue, first):
    for then in LATER:
        job_id = queue.enqueue(1)
        job = queue.claim_one("w")
        assert SETTLE[first](job)
        before = database.sql("SELECT * FROM alkstore_job ORDER BY id"), database.sql("SELECT * FROM alkstore_dead ORDER BY id")
        assert not LATER[then](job), then
        assert before == (database.sql("SELECT * FROM alkstore_job ORDER BY id"), database.sql("SELECT * FROM alkstore_dead ORDER BY id"))
        queue_id = database.sql(f"SELECT 1 FROM alkstore_job WHERE id = {job_id}")
        if queue_id:
            database.sql("DELETE FROM alkstore_job")


@pytest.mark.databases("sqlite", "postgresql-18")
@pytest.mark.parametrize("verb", LATER)
def test_a_handle_whose_job_was_taken_over_answers_false(database, queue, verb):
    job_id = queue.enqueue(1)
    first = queue.claim_one("w")
    set_job(database, job_id, claim_expires_at=-1)
    second = queue.claim_one("w")
    before = database.sql("SELECT * FROM alkstore_job")

    assert not LATER[verb](first)
    assert first.lost.is_set()
    assert database.sql("SELECT * FROM alkstore_job") == before
    assert second.ack()


@pytest.mark.databases("sqlite", "postgresql-18")
@pytest.mark.parametrize("verb", LATER)
def test_a_handle_is_good_after_its_time_while_nobody_took_the_job(database, queue, verb):
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")
    set_job(database, job_id, claim_expires_at=-3600)

    assert LATER[verb](job)


def test_a_promoted_lapsed_job_was_put_back(database, queue):
    first, second = queue.enqueue(1, priority=1), queue.enqueue(2, priority=2)
    one = queue.claim("w", 2)[1]
    assert one.id == first
    set_job(database, first, claim_expires_at=-1)
    set_job(database, second, claim_expires_at=-1)

    assert queue.claim_one("other").id == second  # promotes both, takes one
    assert not one.ack()


def test_a_retry_runs_again_after_the_curve(store):
    queue = store.queue("q", base_backoff=60)
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")
    assert job.retry(ValueError("no luck"))

    seen = store.get_job(job_id)
    assert (seen.state, seen.last_error, seen.attempts, seen.worker_id, seen.claim_expires_at) == (
        JobState.DELAYED,
        "no luck",
        1,
        None,
        None,
    )
    assert timedelta(seconds=59.9) < seen.run_at - seen.enqueued_at < timedelta(seconds=85)
    assert queue.claim_one("w") is None


def test_a_retry_without_delay_is_ready_at_once_and_shows_its_last_error(queue):
    queue.enqueue(1)
    queue.claim_one("w").retry("first", delay=0)
    job = queue.claim_one("w")
    assert (job.attempts, job.fence, job.last_error) == (2, 2, "first")


def test_a_retry_with_its_attempts_used_up_is_dead_with_the_error(store, queue):
    job_id = queue.enqueue(1, max_attempts=1)
    assert queue.claim_one("w").retry("the last straw")
    assert (store.get_job(job_id).state, store.get_job(job_id).last_error) == (JobState.DEAD, "the last straw")


def test_a_retry_past_the_expiry_is_dead_with_the_error(store, queue):
    job_id = queue.enqueue(1, expires=60)
    job = queue.claim_one("w")
    assert job.retry("too late", delay=61)
    assert (store.get_job(job_id).state, store.get_job(job_id).last_error) == (JobState.DEAD, "too late")


def test_c01_a_late_attempt_waits_for_a_day(database, store, queue):
    job_id = queue.enqueue(1, max_attempts=100)
    database.sql("UPDATE alkstore_job SET attempts = 37")
    job = queue.claim_one("w")
    assert job.attempts == 38
    before = database.sql(f"SELECT {database.now()}")[0][0]
    job.retry("x")
    run_at, after = database.sql(f"SELECT run_at, {database.now()} FROM alkstore_job")[0]
    day = 86_400_000_000 if database.kind == "sqlite" else timedelta(days=1)
    millisecond = day / 86_400_000  # to which SQLite's clock is rounded
    assert run_at - after - millisecond <= day <= run_at - before + millisecond
    assert store.get_job(job_id).state == JobState.DELAYED


def test_a_failed_job_is_dead_at_once(store, queue):
    job_id = queue.enqueue({"n": 1}, headers={"h": "1"}, priority=4)
    assert queue.claim_one("w").fail(RuntimeError("a\x00b\ud800"))
    dead = store.get_job(job_id)
    assert (dead.state, dead.last_error, dead.payload, dead.headers, dead.priority, dead.attempts, dead.fence, dead.worker_id) == (
        JobState.DEAD,
        "a\ufffdb\ufffd",
        {"n": 1},
        {"h": "1"},
        4,
        1,
        1,
        "w",
    )


def test_a_release_counts_no_attempt_and_keeps_the_fence_and_the_place(store, queue):
    first = queue.enqueue(1)
    queue.enqueue(2)
    for fence in (1, 2, 3):
        job = queue.claim_one("w")
        assert (job.id, job.attempts, job.fence) == (first, 1, fence)
        assert job.release()
    assert (store.get_job(first).attempts, store.get_job(first).fence, store.get_job(first).last_error) == (0, 3, None)


def test_a_release_with_a_delay_and_an_error_keeps_both(store, queue):
    job_id = queue.enqueue(1)
    queue.claim_one("w").retry("earlier", delay=0)
    job = queue.claim_one("w")
    assert job.release(delay=60, error="not yet")
    seen = store.get_job(job_id)
    assert (seen.state, seen.attempts, seen.last_error) == (JobState.DELAYED, 1, "not yet")
    assert seen.run_at - seen.enqueued_at > timedelta(seconds=59)


def test_a_heartbeat_moves_the_end_of_the_claim(store):
    queue = store.queue("q", visibility_timeout=60)
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")
    end = job.claim_expires_at

    assert job.heartbeat(3600)
    assert job.claim_expires_at == store.get_job(job_id).claim_expires_at
    assert timedelta(minutes=58) < job.claim_expires_at - end < timedelta(minutes=60)
    assert job.heartbeat()
    assert job.claim_expires_at - end < timedelta(seconds=30)
    for ttl in (0, -1, float("nan"), True):
        with pytest.raises(InvalidOption):
            job.heartbeat(ttl)


def test_many_acks_count_those_that_stand(database, queue):
    ids = queue.enqueue_many(range(300))
    jobs = queue.claim("w", 300)
    jobs[7].ack()
    set_job(database, ids[9], claim_expires_at=-1)
    queue.claim_one("other")

    assert queue.ack_many(reversed(jobs)) == 298
    assert [job.id for job in jobs if job.lost.is_set()] == [ids[7], ids[9]]
    assert database.count() == 1
    assert queue.ack_many([]) == 0


def test_a_cancelled_job_is_gone_and_its_holder_learns_it(database, store, queue):
    waiting, held = queue.enqueue(1), queue.enqueue(2, priority=1)
    job = queue.claim_one("w")

    assert store.cancel(waiting)
    assert store.cancel(held)
    assert not store.cancel(held)
    assert not job.heartbeat()
    assert job.lost.is_set()
    assert database.count() == 0


def test_the_same_id_is_never_given_out_again(queue):
    first = queue.enqueue(1)
    queue.claim_one("w").ack()
    assert queue.enqueue(2) > first


# -- the dead --------------------------------------------------------------------------------------------------------


def kill(queue, payload, **options):
    job_id = queue.enqueue(payload, **options)
    queue.claim_one("w").fail("x")
    return job_id


def test_a_replayed_job_is_fresh_but_for_its_fence(store, queue):
    job_id = kill(queue, {"n": 1}, expires=3600, headers={"h": "1"}, max_attempts=2)

    assert queue.replay(job_id)
    job = store.get_job(job_id)
    assert (job.state, job.attempts, job.expires_at, job.fence, job.max_attempts, job.headers) == (
        JobState.READY,
        0,
        None,
        1,
        2,
        {"h": "1"},
    )
    assert not queue.replay(job_id)
    assert queue.claim_one("w").fence == 2
    assert not queue.dead()


def test_a_handle_from_before_death_and_replay_is_powerless(queue):
    queue.enqueue(1)
    first = queue.claim_one("w")
    first.fail("x")
    queue.replay(first.id)
    second = queue.claim_one("w")
    assert not any(verb(first) for verb in LATER.values())
    assert second.ack()


def test_the_dead_are_listed_by_id_in_pages_and_only_of_their_queue(store, queue):
    ids = [kill(queue, n) for n in range(5)]
    kill(store.queue("other"), 1)

    assert [job.id for job in queue.dead()] == ids
    assert [job.id for job in queue.dead(limit=2, after=ids[1])] == ids[2:4]
    assert not queue.replay(store.queue("other").dead()[0].id)


def test_all_dead_are_replayed_or_a_number_of_them(queue):
    ids = [kill(queue, n) for n in range(5)]
    assert queue.replay_all(limit=2) == 2
    assert [job.id for job in queue.dead()] == ids[2:]
    assert queue.replay_all() == 3
    assert [job.id for job in queue.claim("w", 10)] == ids


def test_only_what_died_long_enough_ago_is_purged(database, queue):
    old, new = kill(queue, 1), kill(queue, 2)
    database.sql(f"UPDATE alkstore_dead SET died_at = {database.now(-3600)} WHERE id = {old}")

    assert queue.purge_dead(older_than=timedelta(minutes=30)) == 1
    assert [job.id for job in queue.dead()] == [new]
    assert queue.purge_dead(older_than=0) == 1


@pytest.mark.databases("sqlite", "postgresql-18")
def test_thousands_of_dead_are_replayed_and_purged_in_batches(queue):
    queue.enqueue_many(range(2_500), expires=0)
    eventually(lambda: not queue.claim("w", 1) and len(queue.dead(limit=3_000)) == 2_500)
    assert queue.replay_all() == 2_500
    jobs = queue.claim("w", 2_500)
    assert len(jobs) == 2_500


# -- look ------------------------------------------------------------------------------------------------------------


def test_a_damaged_payload_is_shown_and_its_claim_can_be_settled(database, store, queue):
    bad, good = queue.enqueue(1), queue.enqueue(2)
    database.sql(f"UPDATE alkstore_job SET payload = '{{' WHERE id = {bad}")

    jobs = queue.claim("w", 2)
    with pytest.raises(InvalidPayload):
        _ = jobs[0].payload
    assert jobs[1].payload == 2
    assert store.get_job(bad).payload is None
    assert "JSON" in store.get_job(bad).payload_error
    assert jobs[0].fail("undecodable")
    assert {job.id: job.payload_error is None for job in store.jobs()} == {bad: False, good: True}


def test_jobs_are_listed_by_id_live_and_dead(store, queue):
    dead = kill(queue, "dead")
    ready, delayed = queue.enqueue("ready"), queue.enqueue("delayed", delay=60)
    other = store.enqueue("other", "x")
    claimed = queue.enqueue("claimed", priority=9)
    assert queue.claim_one("w").id == claimed

    assert [(job.id, job.state) for job in store.jobs()] == [
        (dead, "dead"),
        (ready, "ready"),
        (delayed, "delayed"),
        (other, "ready"),
        (claimed, "claimed"),
    ]
    assert [job.id for job in store.jobs(queue="q", limit=2)] == [dead, ready]
    assert [job.id for job in store.jobs(queue="q", after=ready)] == [delayed, claimed]
    for state, job_id in ((JobState.DEAD, dead), (JobState.DELAYED, delayed), (JobState.CLAIMED, claimed)):
        assert [job.id for job in store.jobs(state=state)] == [job_id]
    assert [job.id for job in store.jobs(state=JobState.READY, queue="q")] == [ready]
    assert not store.jobs(task="none")
    assert store.get_job(10**12) is None


def test_queues_are_counted_by_state(database, store, queue):
    assert store.queues() == []
    kill(queue, 1)
    ids = queue.enqueue_many([1, 2, 3])
    queue.enqueue(4, delay=60)
    store.enqueue("B", 1)
    claimed = queue.claim("w", 2)
    set_job(database, claimed[0].id, claim_expires_at=-1)
    set_job(database, ids[2], run_at=-90)
    kill(store.queue("only dead"), 1)

    stats = {stat.name: stat for stat in store.queues()}

    assert set(stats) == {"q", "B", "only dead"}
    assert (stats["q"].ready, stats["q"].delayed, stats["q"].claimed, stats["q"].dead, stats["q"].dead_capped) == (2, 1, 1, 1, False)
    assert timedelta(seconds=89) < stats["q"].oldest_due_age < timedelta(seconds=120)
    assert (stats["only dead"].ready, stats["only dead"].dead, stats["only dead"].oldest_due_age) == (0, 1, None)


@pytest.mark.databases("postgresql-18")
def test_dead_jobs_are_counted_up_to_a_bound(database, store, queue):
    kill(queue, 1)
    columns = [
        name
        for (name,) in database.sql(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'alkstore_dead' AND column_name <> 'id'"
        )
    ]
    database.sql(
        f"INSERT INTO alkstore_dead (id, {', '.join(columns)}) SELECT 1000 + n, {', '.join(columns)} FROM alkstore_dead, generate_series(1, 100001) AS n"
    )
    stats = store.queues()[0]
    assert (stats.dead, stats.dead_capped) == (100_000, True)


def test_records_are_frozen(store, queue):
    job = store.get_job(queue.enqueue(1))
    with pytest.raises(AttributeError):
        job.state = "dead"
    with pytest.raises(TypeError):
        job.headers["a"] = "b"


def test_ids_may_be_of_more_than_32_bits(database, store, queue):
    if database.kind == "sqlite":
        database.sql(f"UPDATE alkstore_job SET id = {2**40} WHERE id = :id", id=queue.enqueue(0))
    else:
        database.sql(f"SELECT setval(pg_get_serial_sequence('alkstore_job', 'id'), {2**40})")
    one, two, three, *more = queue.enqueue_many([1, 2, 3, 4, 5])
    assert one > 2**40
    jobs = {job.id: job for job in queue.claim("w", limit=10)}
    assert jobs.keys() >= {one, two, three, *more}
    assert (jobs[one].heartbeat(600), jobs[two].fail("x"), jobs[three].retry("x", delay=0)) == (True, True, True)
    assert (queue.replay(two), store.get_job(three).id, store.cancel(three)) == (True, three, True)
    assert queue.ack_many([jobs[job_id] for job_id in (one, *more)]) == 1 + len(more)


def test_c13_instants_are_not_wall_clocks(store, queue, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    import time

    time.tzset()
    try:
        india = datetime.fromisoformat("2027-03-01T05:30:00+05:30")
        job = store.get_job(queue.enqueue(1, run_at=india))
        assert job.run_at == datetime(2027, 3, 1, tzinfo=UTC)
        assert job.run_at.utcoffset() == timedelta(0)
        with pytest.raises(ValueError):
            queue.enqueue(1, run_at=datetime(2027, 3, 1))

        def claimed_in_time(worker_id, began):
            """Claim at once, which may only succeed where the machine stood still until the instant, and else after half a second."""
            early = queue.claim_one(worker_id)
            assert early is None or time.monotonic() - began > 0.39
            time.sleep(0.5)
            return early or queue.claim_one(worker_id)

        began = time.monotonic()
        soon = queue.enqueue("soon", delay=0.4)
        job = claimed_in_time("w", began)
        assert job.id == soon

        began = time.monotonic()
        assert job.heartbeat(0.4)
        assert claimed_in_time("other", began).id == soon
    finally:
        monkeypatch.undo()
        time.tzset()


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgresql-18")
def test_a_claims_new_end_counts_from_after_the_wait_for_its_row(database, store, queue):
    """The end is measured when it is written, not when the statement was sent. (A claim waits for no row.)"""
    queue.enqueue(1)
    [job] = queue.claim("w", 1)
    with database.engine().connect() as blocker:
        blocker.execute(text("SELECT 1 FROM alkstore_job FOR UPDATE"))
        caller = threading.Thread(target=job.heartbeat)
        caller.start()
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        eventually(lambda: database.sql(blocked)[0][0] == 1)
        waited_until = blocker.execute(text("SELECT clock_timestamp()")).scalar_one()
        blocker.rollback()
        caller.join()
    assert job.claim_expires_at - waited_until >= job.visibility_timeout
