"""Workers as they show themselves, and queues that are paused."""

import threading
import time
from datetime import timedelta

import pytest
from eventually import eventually, stopwatch

from alkstore_sa import Fail, JobHandle, ReservedName, SchemaMissing, StopToken, Tasks, Worker, migrate, workers
from alkstore_sa._shift import Load, Rest, Round, Shift
from alkstore_sa.testing import advance

pytestmark = pytest.mark.timeout(60)


class Working:
    """A worker in a thread of its own."""

    def __init__(self, store, tasks, **options):
        self.stop = StopToken()
        self.worker = Worker(store, tasks, **{"concurrency": 2, "grace": 10, **options})
        self.thread = threading.Thread(target=self.worker.run, args=(self.stop,), daemon=True)

    def __enter__(self):
        self.thread.start()
        return self.worker

    def __exit__(self, *exc):
        self.stop.cancel()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def beats(monkeypatch):
    """Beats that come faster than in production."""
    from alkstore_sa import presence

    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.1)


def test_a_worker_shows_what_it_is_and_what_it_did_and_is_forgotten_when_it_leaves(store, beats):
    tasks = Tasks(store)
    go = threading.Event()

    @tasks.task(name="good", aliases=["old"])
    def good() -> None: ...

    @tasks.task(name="bad", queue="other")
    def bad() -> None:
        raise Fail("no")

    @tasks.task(name="long")
    def long() -> None:
        go.wait(20)

    @tasks.raw(queue="other")
    def raw(job: JobHandle) -> None: ...

    good.enqueue(), bad.enqueue(), long.enqueue()
    assert store.workers() == []
    with Working(store, tasks) as worker:
        one = eventually(lambda: next((one for one in store.workers() if (one.done, one.failed, one.running) == (1, 1, 1)), None))
        assert one.id == worker.worker_id and one.alive
        assert (one.queues, one.tasks, one.raw_queues) == (("default", "other"), ("bad", "good", "long", "old"), ("other",))
        assert one.host and one.pid
        assert one.seen_at - one.started_at < timedelta(seconds=30)
        go.set()
        eventually(lambda: store.workers()[0].done == 2)
        assert store.workers()[0].handler_ms > 0
    assert store.workers() == []


def test_a_worker_that_died_shows_as_silent_and_is_forgotten_after_an_hour(store, database):
    verbs = workers.Workers(store.parts.database)
    said = {"host": "h", "pid": 1, "queues": [], "tasks": [], "raw_queues": [], "running": 0, "done": 0, "failed": 0, "handler_ms": 0}
    with store.begin() as bind:
        verbs.beat(bind, "dead", said)
    assert [one.alive for one in store.workers()] == [True]
    advance(store, 8)  # of twelve, of which the test itself takes some
    assert [one.alive for one in store.workers()] == [True]
    advance(store, 5)
    assert [one.alive for one in store.workers()] == [False]
    advance(store, 3600)
    with Working(store, Tasks(store), queues=["q"]):
        eventually(lambda: [one.id for one in store.workers()] not in ([], ["dead"]))
        assert "dead" not in [one.id for one in store.workers()]


def test_a_worker_stops_claiming_from_a_paused_queue_within_five_seconds_and_goes_on_when_it_is_resumed(store):
    tasks = Tasks(store)
    ran = []

    @tasks.task(name="a", queue="a")
    def a(n: int) -> None:
        ran.append(("a", n))

    @tasks.task(name="b", queue="b")
    def b(n: int) -> None:
        ran.append(("b", n))

    with Working(store, tasks):
        a.enqueue(1)
        eventually(lambda: ("a", 1) in ran)
        assert store.pause_queue("a")
        assert not store.pause_queue("a")
        assert list(store.paused_queues()) == ["a"]
        with stopwatch() as seconds:
            eventually(lambda: seconds() >= 5)
        a.enqueue(2)
        b.enqueue(2)
        eventually(lambda: ("b", 2) in ran)
        time.sleep(0.5)
        assert ("a", 2) not in ran
        assert store.queue("a").claim_one("by hand").release()  # claims by hand do not look
        assert store.resume_queue("a")
        with stopwatch() as seconds:
            assert not store.resume_queue("a")
            eventually(lambda: ("a", 2) in ran)
            assert seconds() < 5.5


def test_a_worker_that_starts_on_a_paused_queue_claims_nothing_from_it(store, beats):
    tasks = Tasks(store)
    ran = []

    @tasks.delivery("hooks")
    def deliver(job: JobHandle) -> None:
        ran.append(job.payload)

    store.pause_outbox("hooks")
    store.outbox("hooks").enqueue(1)
    with Working(store, tasks, outboxes=["hooks"]):
        eventually(lambda: store.workers())
        time.sleep(0.5)
        assert ran == []
        store.resume_outbox("hooks")
        eventually(lambda: ran == [1])


def test_a_worker_works_though_nobody_can_see_it(store, database, beats):
    tasks = Tasks(store)
    ran = []

    @tasks.task(name="a", visibility_timeout=10)
    def a(n: int) -> None:
        ran.append(n)

    with Working(store, tasks):
        eventually(lambda: store.workers())
        database.sql("ALTER TABLE alkstore_worker RENAME TO elsewhere")
        try:
            time.sleep(0.5)
            for n in range(3):
                a.enqueue(n)
            eventually(lambda: sorted(ran) == [0, 1, 2])
        finally:
            database.sql("ALTER TABLE elsewhere RENAME TO alkstore_worker")
        eventually(lambda: store.workers()[0].done == 3)


def test_names_of_paused_queues_are_checked(store):
    with pytest.raises(ReservedName):
        store.pause_queue("__alkstore_outbox:x")


def test_the_shift_asks_nothing_of_a_paused_queue_and_does_not_spin():
    shift = Shift(["a", "b"], 4)
    idle = Load({}, 0, None, None)
    shift.pause(frozenset({"a", "elsewhere"}))
    step = shift.next_step(0.0, idle)
    assert isinstance(step, Round) and [ask.queue for ask in step.asks] == ["b"]
    shift.claimed("b", 4, 0)
    shift.looked("b", 0.0, 0.0, 5.0, ready=False)
    assert shift.next_step(1.0, idle) == Rest(5.0)
    shift.pause(frozenset())
    step = shift.next_step(1.0, idle)
    assert isinstance(step, Round) and [ask.queue for ask in step.asks] == ["a"]


def test_the_tables_of_workers_come_and_go_with_jobs_in_the_database(database, store):
    job_id = store.enqueue("q", 1)
    store.pause_queue("q")
    migrate.downgrade(database.engine(), revision="alkstore_0002")
    assert store.get_job(job_id).payload == 1
    with pytest.raises(SchemaMissing):
        store.workers()
    migrate.upgrade(database.engine())
    assert migrate.check(database.engine()) == []
    assert store.get_job(job_id).payload == 1
    assert (store.workers(), dict(store.paused_queues())) == ([], {})
