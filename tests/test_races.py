"""Processes and threads at once: no job held twice, none lost, none stuck, and a crash at the worst moment."""

import os
import queue as queues
import random
import signal
import threading
import time

import processes
import pytest
from conftest import EVERY_DATABASE
from eventually import eventually
from sqlalchemy.orm import Session

from alkstore_sa import JobState, Store

BOTH = pytest.mark.databases("sqlite", "postgresql-18")


def test_c06_a_claim_that_was_taken_over_is_powerless(database, store):
    queue = store.queue("q", visibility_timeout=2)
    job_id = queue.enqueue(1)
    steps, answers = processes.spawn.Queue(), processes.spawn.Queue()
    first = processes.running(processes.settle_late, database.url, steps, answers)
    assert answers.get(timeout=30) == job_id
    time.sleep(3)
    second = queue.claim_one("press-1")
    assert second.id == job_id
    second.heartbeat(300)
    end = store.get_job(job_id).claim_expires_at
    told = []
    for verb in ("heartbeat", "ack", "retry"):
        steps.put(verb)
        told.append(answers.get(timeout=30))
    steps.put(None)
    first.join(30)

    assert told == [False, False, False]
    assert (store.get_job(job_id).claim_expires_at, store.get_job(job_id).attempts) == (end, 2)
    assert second.ack()
    assert store.get_job(job_id) is None


def test_c06_with_no_second_claimer_the_first_stays_good(store):
    queue = store.queue("q", visibility_timeout=2)
    queue.enqueue(1)
    job = queue.claim_one("press-1")
    time.sleep(3)
    assert job.heartbeat()
    assert job.ack()
    assert store.queue("q").claim_one("press-1") is None


@pytest.mark.databases(*EVERY_DATABASE)
def test_c06_a_release_makes_the_handle_powerless_even_against_its_own_name(database, store):
    queue = store.queue("q")
    job_id = queue.enqueue(1)
    first = queue.claim_one("press-1")
    assert [first.release(), first.release()] == [True, False]
    assert store.get_job(job_id).attempts == 0
    assert not first.heartbeat()
    assert database.sql("SELECT worker_id, claim_expires_at, state FROM alkstore_job") == [(None, None, "ready")]
    second = queue.claim_one("press-1")
    assert [first.ack(), first.retry("x"), first.fail("x"), first.heartbeat(), first.release()] == [False] * 5
    assert second.retry("x", delay=0)
    assert not second.heartbeat()
    assert database.sql("SELECT worker_id, claim_expires_at, state FROM alkstore_job") == [(None, None, "ready")]
    third = queue.claim_one("press-1")
    assert third.fail("x")
    assert queue.replay(job_id)
    fourth = queue.claim_one("press-1")
    for stale in (first, second, third):
        assert [stale.ack(), stale.retry("x"), stale.fail("x"), stale.heartbeat(), stale.release()] == [False] * 5
    assert fourth.ack()


@pytest.mark.parametrize("max_attempts", [3, 1])
def test_c07_a_job_that_kills_its_worker_ends(database, store, max_attempts):
    queue = store.queue("q", visibility_timeout=2)
    job_id = queue.enqueue("poison", max_attempts=max_attempts)
    for _ in range(max_attempts):
        claimed = processes.spawn.Queue()  # a new one each time: the killed process may hold the lock of the old one
        worker = processes.running(processes.claim_and_hang, database.url, "q", claimed)
        assert claimed.get(timeout=30) == job_id
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(30)
        eventually(lambda: store.get_job(job_id).state == JobState.READY, within=10)

    assert queue.claim_one("fourth") is None
    job = store.get_job(job_id)
    assert (job.state, job.attempts) == (JobState.DEAD, max_attempts)
    assert job.last_error
    time.sleep(0.5)
    assert queue.claim_one("fourth") is None


def test_c08_no_claim_returns_two_rows_while_others_update(database, store):
    queue = store.queue("q")
    ids = queue.enqueue_many(range(400))
    barrier = threading.Barrier(10)
    seen, sizes, errors, done = [], [], [], threading.Event()

    def claim():
        with Store(store.engine) as own:
            barrier.wait(30)
            while len(seen) < 400:
                jobs = own.queue("q").claim("w", 1)
                sizes.append(len(jobs))
                seen.extend(job.id for job in jobs)

    def update():
        barrier.wait(30)
        while not done.is_set():
            try:
                database.sql(f"UPDATE alkstore_job SET headers = '{{}}' WHERE id = {random.choice(ids)}")
            except Exception as error:
                if "locked" not in str(error):
                    errors.append(error)

    claimers = [threading.Thread(target=claim) for _ in range(8)]
    updaters = [threading.Thread(target=update) for _ in range(2)]
    for thread in claimers + updaters:
        thread.start()
    for thread in claimers:
        thread.join(120)
    done.set()
    for thread in updaters:
        thread.join(30)

    assert not errors
    assert max(sizes) == 1
    assert sorted(seen) == ids


@pytest.mark.databases("sqlite")
def test_c15_four_processes_share_a_file_with_a_rude_writer(database, store):
    store.queue("q").enqueue_many(range(200))
    _drain_with_processes(database, 200, rude=True)


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_four_processes_drain_a_queue_and_nobody_runs_a_job_twice(database, store):
    store.queue("q").enqueue_many(range(1_000))
    _drain_with_processes(database, 1_000)


def _drain_with_processes(database, total, rude=False):
    barrier, acked = processes.spawn.Barrier(4 + rude), processes.spawn.Queue()
    workers = [processes.running(processes.claim_and_ack, database.url, "q", f"w{n}", barrier, acked) for n in range(4)]
    if rude:
        workers.append(processes.running(processes.hold_the_file, database.url.removeprefix("sqlite:///"), barrier, 3))
    done, ended = [], 0
    while ended < 4:
        try:
            entry = acked.get(timeout=0.5)
        except queues.Empty:
            assert all(worker.is_alive() or worker.exitcode == 0 for worker in workers), "a worker saw an error"
            continue
        if entry is None:
            ended += 1
        else:
            done.append(entry[0])
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(done) == len(set(done)) == total


def test_workers_killed_at_random_lose_nothing_and_the_books_balance(database, store):
    total = 300
    queue = store.queue("q", visibility_timeout=2, max_attempts=1_000)
    queue.enqueue_many(range(total))
    rng = random.Random(7)
    workers = []

    def start():
        workers.append(processes.running(processes.claim_and_ack, database.url, "q", f"w{len(workers)}", None, None))

    for _ in range(2):
        start()
    for _ in range(4):
        time.sleep(rng.uniform(0.4, 0.8))
        victim = workers[rng.randrange(len(workers))]
        if victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(30)
            start()
    for worker in workers:
        worker.join(60)
    assert database.count() == 0
    assert database.count("alkstore_dead") == 0


def test_a_process_that_dies_before_its_commit_leaves_nothing(database, store):
    process = processes.running(processes.insert_then_die, database.url, "q")
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    eventually(lambda: store.enqueue("q", "after"))
    assert [job.payload for job in store.jobs()] == ["after"]


def test_many_acks_in_opposite_orders_do_not_deadlock(store):
    queue = store.queue("q")
    for _ in range(5):
        queue.enqueue_many(range(500))
        jobs = queue.claim("w", 500)
        counts = []
        barrier = threading.Barrier(2)

        def ack(handles, barrier=barrier, counts=counts):
            barrier.wait(30)
            counts.append(queue.ack_many(handles))

        threads = [threading.Thread(target=ack, args=(handles,)) for handles in (jobs, jobs[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(counts) == 500


@pytest.mark.databases("postgresql-18")
def test_a_row_locked_by_an_open_ack_tx_is_neither_claimed_nor_waited_for(database, store):
    queue = store.queue("q")
    first, second = queue.enqueue_many([1, 2])
    job = queue.claim_one("w")
    assert job.id == first
    with Session(database.engine()) as session:
        job.ack_tx(session)
        database.sql("SELECT 1")
        other = store.queue("q").claim("other", 10)
        assert [claimed.id for claimed in other] == [second]
        session.rollback()
    assert job.heartbeat()


@pytest.mark.databases("postgresql-18")
def test_a_lapsed_job_under_an_open_ack_tx_is_left_to_it(database, store):
    queue = store.queue("q")
    job_id = queue.enqueue(1)
    job = queue.claim_one("w")
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")
    with Session(database.engine()) as session:
        job.ack_tx(session)
        assert queue.claim_one("other") is None
        session.commit()
    assert store.get_job(job_id) is None


@pytest.mark.databases("postgresql-18")
def test_ids_are_handed_to_the_right_payloads_while_others_enqueue(database, store):
    barrier = threading.Barrier(4)
    made = {}

    def enqueue(name):
        barrier.wait(30)
        for _ in range(10):
            payloads = [[name, n] for n in range(200)]
            made.update(zip(store.queue("q").enqueue_many(payloads), payloads, strict=True))

    threads = [threading.Thread(target=enqueue, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stored = dict(database.sql("SELECT id, payload FROM alkstore_job"))
    assert {job_id: f"[{a},{b}]" for job_id, (a, b) in made.items()} == stored
    assert len(made) == 8_000


@pytest.mark.databases("postgresql-18")
def test_a_claim_keeps_its_plan_and_its_limit_under_a_generic_plan(database):
    engine = database.engine(connect_args={"options": "-c plan_cache_mode=force_generic_plan", "prepare_threshold": 0})
    with Store(engine) as store:
        queue = store.queue("q")
        queue.enqueue_many(range(5_000))
        database.sql("ANALYZE alkstore_job")
        for _ in range(10):
            assert len(queue.claim("w", 7)) == 7
    plan = "\n".join(
        row[0]
        for row in database.sql(
            "EXPLAIN SELECT id FROM alkstore_job WHERE queue = 'q' AND state = 'ready' ORDER BY priority DESC, run_at, id LIMIT 10 FOR UPDATE SKIP LOCKED"
        )
    )
    assert "alkstore_job_ready" in plan
    assert "Sort" not in plan
