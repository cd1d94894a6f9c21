"""A state machine drives one queue with several workers, and a model beside it says what must be seen."""

import os
from dataclasses import dataclass, field, replace

import pytest
from conftest import server_urls
from databases import TestDatabase
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule, run_state_machine_as_test

from alkstore_sa import JobState, Store

EXAMPLES = int(os.environ.get("ALKSTORE_MACHINE_EXAMPLES", "60"))
PHASES = tuple(Phase) if os.environ.get("ALKSTORE_MACHINE_SHRINK") else (Phase.explicit, Phase.generate)  # shrinking takes minutes
WORKERS = st.sampled_from(["w1", "w2"])


@dataclass
class Model:
    """What one job must look like."""

    id: int
    priority: int
    max_attempts: int
    state: str = "ready"  # ready, delayed, claimed, dead, gone
    attempts: int = 0
    fence: int = 0
    rank: int = 0  # place among due times: the order in which rows became due
    lapsed: bool = False  # claimed, and its time is over
    due: bool = False  # delayed, and its time has come
    expiring: bool = False
    expired: bool = False
    error: str | None = None
    worker: str | None = None

    def shown(self):
        overdue = (self.state == "claimed" and self.lapsed) or (self.state == "delayed" and self.due)
        return "ready" if overdue else self.state


@dataclass
class Handles:
    """Every handle ever given out, with the fence it was given under."""

    given: list = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    database: TestDatabase
    store: Store

    handles = Bundle("handles")
    jobs = Bundle("jobs")

    @initialize()
    def start(self):
        self.database.sql("DELETE FROM alkstore_job")
        self.database.sql("DELETE FROM alkstore_dead")
        self.model = {}
        self.clock = 0
        self.queue = self.store.queue("q", base_backoff=600)  # no delay is over before a rule says so

    # -- the world ---------------------------------------------------------------------------------------------------

    def set_instant(self, job, column, seconds):
        self.database.sql(f"UPDATE alkstore_job SET {column} = {self.database.now(seconds)} WHERE id = {job.id}")

    def next_rank(self):
        self.clock += 1
        return self.clock

    @rule(target=jobs, priority=st.integers(-1, 1), max_attempts=st.integers(1, 3), expiring=st.booleans(), delayed=st.booleans())
    def enqueue(self, priority, max_attempts, expiring, delayed):
        options = {"expires": 3600} if expiring else {}
        if delayed:
            options["delay"] = 1800
        job_id = self.queue.enqueue({"n": len(self.model)}, priority=priority, max_attempts=max_attempts, **options)
        self.model[job_id] = Model(
            job_id, priority, max_attempts, "delayed" if delayed else "ready", rank=self.next_rank(), expiring=expiring
        )
        self.place(self.model[job_id])
        return job_id

    def place(self, job):
        """Give the row a due time of its own place, so that the order does not hang on the clock's ticks."""
        if job.state == "ready":
            self.database.sql(f"UPDATE alkstore_job SET run_at = {self.database.now(-100_000 + job.rank)} WHERE id = {job.id}")

    @rule(job_id=jobs)
    def let_a_delay_pass(self, job_id):
        job = self.model[job_id]
        if job.state == "delayed" and not job.due:
            job.due, job.rank = True, self.next_rank()
            self.database.sql(f"UPDATE alkstore_job SET run_at = {self.database.now(-100_000 + job.rank)} WHERE id = {job.id}")

    @rule(job_id=jobs)
    def let_a_claim_lapse(self, job_id):
        job = self.model[job_id]
        if job.state == "claimed" and not job.lapsed:
            job.lapsed = True
            self.set_instant(job, "claim_expires_at", -5)

    @rule(job_id=jobs)
    def let_a_job_expire(self, job_id):
        job = self.model[job_id]
        if job.expiring and not job.expired and job.state in ("ready", "claimed"):
            job.expired = True
            self.set_instant(job, "expires_at", -5)

    # -- workers -----------------------------------------------------------------------------------------------------

    def promote_in_the_model(self):
        for job in self.model.values():
            if job.state == "claimed" and job.lapsed and job.attempts >= job.max_attempts:
                job.state, job.error, job.lapsed = "dead", "max attempts exceeded", False
            elif job.expired and (job.state == "ready" or (job.state == "claimed" and job.lapsed)):
                job.state, job.error, job.lapsed = "dead", "expired", False
        for job in self.model.values():
            if job.state in ("claimed", "delayed") and job.shown() == "ready":
                job.state, job.lapsed, job.due, job.worker = "ready", False, False, None

    @rule(target=handles, worker=WORKERS, limit=st.integers(1, 3))
    def claim(self, worker, limit):
        claimed = self.store.queue("q").claim(worker, limit)
        self.promote_in_the_model()
        claimable = [job for job in self.model.values() if job.state == "ready" and not job.expired]
        expected = sorted(claimable, key=lambda job: (-job.priority, job.rank, job.id))[:limit]
        assert [job.id for job in claimed] == [job.id for job in expected]
        for handle, job in zip(claimed, expected, strict=True):
            job.state, job.worker, job.attempts, job.fence = "claimed", worker, job.attempts + 1, job.fence + 1
            assert (handle.attempts, handle.fence, handle.worker_id, handle.last_error) == (job.attempts, job.fence, worker, job.error)
        return multiple(*claimed)

    def stands(self, handle):
        job = self.model[handle.id]
        return job.state == "claimed" and job.fence == handle.fence

    @rule(handle=handles)
    def heartbeat(self, handle):
        stands = self.stands(handle)
        assert handle.heartbeat() == stands
        if stands:
            self.model[handle.id].lapsed = False

    @rule(handle=handles)
    def ack(self, handle):
        stands = self.stands(handle)
        assert handle.ack() == stands
        if stands:
            self.model[handle.id].state = "gone"

    @rule(handle=handles, other=handles)
    def ack_two(self, handle, other):
        standing = {h.id for h in (handle, other) if self.stands(h)}
        assert self.queue.ack_many([handle, other]) == len(standing)
        for job_id in standing:
            self.model[job_id].state = "gone"

    @rule(handle=handles, how=st.sampled_from(["curve", "now", "later", "past the expiry"]))
    def retry(self, handle, how):
        stands, job = self.stands(handle), self.model[handle.id]
        delay = {"curve": None, "now": 0, "later": 600, "past the expiry": 7200}[how]
        assert handle.retry(f"retried {how}", delay=delay) == stands
        if not stands:
            return
        job.error, job.lapsed = f"retried {how}", False
        if job.attempts >= job.max_attempts or job.expired or (job.expiring and how == "past the expiry"):
            job.state = "dead"
        else:
            self.put_back(job, delayed=how != "now", moved=True)

    @rule(handle=handles)
    def fail(self, handle):
        stands, job = self.stands(handle), self.model[handle.id]
        assert handle.fail("failed") == stands
        if stands:
            job.state, job.error, job.lapsed = "dead", "failed", False

    @rule(handle=handles, delayed=st.booleans(), error=st.none() | st.just("released"))
    def release(self, handle, delayed, error):
        stands, job = self.stands(handle), self.model[handle.id]
        assert handle.release(delay=600 if delayed else None, error=error) == stands
        if stands:
            job.attempts -= 1
            job.error = error or job.error
            self.put_back(job, delayed=delayed, moved=delayed)

    def put_back(self, job, *, delayed, moved):
        job.state, job.worker, job.lapsed, job.due = "delayed" if delayed else "ready", None, False, False
        if moved and not delayed:
            job.rank = self.next_rank()
            self.place(job)

    @rule(
        handle=handles,
        first=st.sampled_from(["ack", "fail", "release"]),
        second=st.sampled_from(["ack", "fail", "release", "retry", "heartbeat"]),
    )
    def settle_twice(self, handle, first, second):
        {"ack": self.ack, "fail": self.fail, "release": lambda handle: self.release(handle, delayed=False, error=None)}[first](handle)
        assert not getattr(handle, second)(*(("x",) if second in ("fail", "retry") else ()))

    # -- operators ---------------------------------------------------------------------------------------------------

    @rule(job_id=jobs)
    def cancel(self, job_id):
        job = self.model[job_id]
        assert self.store.cancel(job_id) == (job.state in ("ready", "delayed", "claimed"))
        if job.state != "dead":
            job.state = "gone"

    @rule(job_id=jobs)
    def replay(self, job_id):
        job = self.model[job_id]
        assert self.queue.replay(job_id) == (job.state == "dead")
        if job.state == "dead":
            self.model[job_id] = replace(
                job, state="ready", attempts=0, expiring=False, expired=False, lapsed=False, due=False, worker=None, rank=self.next_rank()
            )
            self.place(self.model[job_id])

    @rule(job_id=consumes(jobs))
    def forget(self, job_id):
        """Leave a job alone from here on."""

    @invariant()
    def the_database_looks_like_the_model(self):
        seen = {job.id: (str(job.state), job.attempts, job.fence, job.last_error) for job in self.store.jobs(limit=1_000)}
        assert seen == {job.id: (job.shown(), job.attempts, job.fence, job.error) for job in self.model.values() if job.state != "gone"}

    @invariant()
    def only_a_claimed_row_carries_a_claim(self):
        for state, worker, end in self.database.sql("SELECT state, worker_id, claim_expires_at FROM alkstore_job"):
            assert (state == "claimed") == (worker is not None) == (end is not None)

    @invariant()
    def the_counts_add_up(self):
        stats = self.store.queues()
        counted = (stats[0].ready, stats[0].delayed, stats[0].claimed, stats[0].dead) if stats else (0, 0, 0, 0)
        shown = [job.shown() for job in self.model.values()]
        assert counted == tuple(shown.count(state) for state in (JobState.READY, JobState.DELAYED, JobState.CLAIMED, JobState.DEAD))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.timeout(900)
def test_a_queue_behaves_as_its_model_says(kind, tmp_path):
    if kind == "postgresql" and not server_urls():
        pytest.skip("requires_postgresql: none is to be had here")
    database = (
        TestDatabase.sqlite(tmp_path / "machine.db") if kind == "sqlite" else TestDatabase.postgresql(next(iter(server_urls().values())))
    )
    with database.store(wake=False) as store:
        machine = type("Machine", (QueueMachine,), {"database": database, "store": store})
        run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, phases=PHASES))
    database.drop()
