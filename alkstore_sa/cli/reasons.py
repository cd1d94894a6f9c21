"""Why a job is not running right now. Pure: it is told what is known of the job and of who could run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from alkstore_sa.cli.frame import shown_queue
from alkstore_sa.cli.shape import ago, instant
from alkstore_sa.records import Job, JobState, WorkerInfo

ABSENT = "finished, cancelled or rolled back"


@dataclass(frozen=True)
class Reason:
    """One reason: a word that stays, and a sentence for people."""

    code: str
    sentence: str


@dataclass(frozen=True)
class Surroundings:
    """What a job's running depends on: the database's clock, pauses, workers, and how many jobs come before it."""

    now: datetime
    paused: Mapping[str, datetime]
    workers: Sequence[WorkerInfo]
    ahead: int


def reasons(job: Job, around: Surroundings) -> list[Reason]:
    """Give the reasons why `job` does not run, the most telling first."""
    if job.state is JobState.DEAD:
        return [_dead(job, around)]
    if job.state is JobState.CLAIMED:
        return [_claimed(job, around)]
    found = [*_of_its_row(job, around), *_of_its_queue(job, around)]
    if not found:
        before = f"{around.ahead} jobs of its queue come before it" if around.ahead else "it is the next of its queue"
        serving = sum(job.queue in worker.queues for worker in around.workers if worker.alive)
        found = [Reason("waiting", f"it is due since {_when(job.run_at, around)}, {before}, and {serving} live workers serve the queue")]
    return found


def _dead(job: Job, around: Surroundings) -> Reason:
    died = "" if job.died_at is None else f" since {_when(job.died_at, around)}"
    return Reason(
        "dead",
        f"it is dead{died}, after {job.attempts} of {job.max_attempts} attempts: {_first_line(job.last_error)};"
        f" `alkstore replay {job.id}` brings it back",
    )


def _claimed(job: Job, around: Surroundings) -> Reason:
    until = "" if job.claim_expires_at is None else _when(job.claim_expires_at, around)
    holder = next((worker for worker in around.workers if worker.id == job.worker_id), None)
    if holder is not None and holder.alive:
        return Reason("claimed", f"worker {job.worker_id} has it until {until}, and moves that on while it runs it")
    known = "which is silent since " + _when(holder.seen_at, around) if holder is not None else "which is no live worker that is known here"
    return Reason("claimed", f"it is claimed by {job.worker_id}, {known}: others may take it from {until} on")


def _of_its_row(job: Job, around: Surroundings) -> list[Reason]:
    found = []
    if job.expires_at is not None and job.expires_at <= around.now:
        found.append(Reason("expired", f"it expired {_when(job.expires_at, around)}: the next claim of its queue sends it to the dead"))
    elif job.attempts >= job.max_attempts:
        found.append(Reason("exhausted", f"all {job.max_attempts} attempts are used up: the next claim of its queue sends it to the dead"))
    elif job.state is JobState.READY and job.claim_expires_at is not None:
        lapsed = _when(job.claim_expires_at, around)
        found.append(Reason("lapsed", f"the claim of worker {job.worker_id} lapsed {lapsed}: the next claim of its queue takes it"))
    if job.state is JobState.DELAYED:
        after = f", after attempt {job.attempts} of {job.max_attempts} failed: {_first_line(job.last_error)}" if job.attempts else ""
        found.append(Reason("delayed", f"it is delayed until {_when(job.run_at, around)}{after}"))
    return found


def _of_its_queue(job: Job, around: Surroundings) -> list[Reason]:
    found = []
    queue = shown_queue(job.queue)
    if (since := around.paused.get(job.queue)) is not None:
        found.append(Reason("paused", f"queue {queue} is paused since {_when(since, around)}: `alkstore resume` lets workers claim again"))
    serving = [worker for worker in around.workers if worker.alive and job.queue in worker.queues]
    if not serving:
        found.append(
            Reason("no_worker", f"no live worker is registered for queue {queue} (loops that claim by hand do not register themselves)")
        )
    elif not any(job.task in worker.tasks if job.task is not None else job.queue in worker.raw_queues for worker in serving):
        what = f"task {job.task!r} is" if job.task is not None else "jobs of no task are"
        found.append(Reason("unknown_task", f"{what} unknown to all {len(serving)} live workers of the queue: they give it back"))
    return found


def _when(moment: datetime, around: Surroundings) -> str:
    return f"{instant(moment)} ({ago(moment, around.now)})"


def _first_line(error: str | None) -> str:
    return (error or "no error recorded").splitlines()[0] if error else "no error recorded"
