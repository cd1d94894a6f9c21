"""Commands that only look: queues, jobs, the dead, workers, schedules, locks."""

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import click

from alkstore_sa.cli.frame import Target, as_json, of_queue, on_store, show_found, shown_queue
from alkstore_sa.cli.reasons import ABSENT, Reason, Surroundings, reasons
from alkstore_sa.cli.root import main
from alkstore_sa.cli.shape import Column, ago, cell, number, plain, show_fields, show_json, show_lines
from alkstore_sa.handles import MOST_ROWS
from alkstore_sa.records import Job, JobState

LOOKED_AHEAD: Final = 100_000

JOB_KEYS: Final = (
    "Keys of --json: id, queue, payload, payload_error, state, priority, attempts, max_attempts, fence, visibility_timeout, base_backoff,"
    " enqueued_at, run_at, expires_at, worker_id, claim_expires_at, task, headers, schedule, scheduled_for, last_error, died_at."
)
limited: Final = click.option("--limit", type=click.IntRange(1, MOST_ROWS), default=100, show_default=True, help="At most so many rows.")


@dataclasses.dataclass(frozen=True)
class _Standing:
    name: str
    ready: int = 0
    delayed: int = 0
    claimed: int = 0
    dead: int = 0
    dead_capped: bool = False
    oldest_due_age: timedelta | None = None
    paused_at: datetime | None = None
    workers: int = 0


@main.command(epilog="Keys of --json: name, ready, delayed, claimed, dead, dead_capped, oldest_due_age, paused_at, workers.")
@on_store
@as_json
def queues(target: Target, *, as_json: bool) -> None:
    """Count the jobs of every queue by state.

    Ready jobs are due; "oldest" is how long the oldest of them has waited; "workers" counts the live ones that serve the queue. Queues
    without jobs are listed while they are paused or served.
    """
    store = target.store
    paused, alive = store.paused_queues(), [worker for worker in store.workers() if worker.alive]
    counted = {one.name: dataclasses.asdict(one) for one in store.queues()}
    found = [
        _Standing(
            **counted.get(name, {"name": name}),
            paused_at=paused.get(name),
            workers=sum(name in worker.queues for worker in alive),
        )
        for name in sorted({*counted, *paused, *(queue for worker in alive for queue in worker.queues)})
    ]
    columns = [
        Column("queue", lambda one, _: shown_queue(one.name)),
        *(number(title) for title in ("ready", "delayed", "claimed")),
        number("dead", lambda one, _: f"{one.dead}{'+' if one.dead_capped else ''}"),
        number("oldest", lambda one, _: one.oldest_due_age),
        number("workers"),
        Column("", lambda one, _: "paused" if one.paused_at else "", keep=True),
    ]
    show_found(target, found, columns, empty="there are no jobs, and no queue is paused or served", as_json=as_json)


@main.command(epilog=JOB_KEYS)
@on_store
@of_queue
@click.option("--state", type=click.Choice([str(state) for state in JobState]), help="Only jobs in this state.")
@click.option("--task", help="Only jobs of this task.")
@limited
@click.option("--after", type=int, help="Start after this id, for the next page.")
@as_json
def jobs(target: Target, *, queue: str | None, state: str | None, task: str | None, limit: int, after: int | None, as_json: bool) -> None:
    """List jobs, live and dead, by ascending id."""
    chosen = None if state is None else JobState(state)
    found = target.store.jobs(queue=queue, state=chosen, task=task, limit=limit, after=after)
    _show_jobs(target, found, as_json=as_json)
    if len(found) == limit and not as_json:
        click.echo(f"there may be more: --after {found[-1].id}", err=True)


@main.command(epilog=JOB_KEYS)
@on_store
@of_queue
@limited
@as_json
def dead(target: Target, *, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead jobs with their last errors; `alkstore replay` brings them back, `alkstore purge` deletes old ones."""
    _show_jobs(target, target.store.jobs(queue=queue, state=JobState.DEAD, limit=limit), as_json=as_json)


def _show_jobs(target: Target, found: Sequence[Job], *, as_json: bool) -> None:
    columns = [
        number("id"),
        Column("queue", lambda job, _: shown_queue(job.queue)),
        Column("task"),
        Column("state", keep=True),
        number("tries", lambda job, _: f"{job.attempts}/{job.max_attempts}"),
        Column("when", lambda job, now: ago(_moment(job), now), keep=True),
        number("priority", wide=True),
        Column("worker", lambda job, _: job.worker_id, wide=True),
        Column("enqueued", lambda job, _: job.enqueued_at, wide=True, keep=True),
        Column("last error", lambda job, _: (job.last_error or "").split("\n", 1)[0]),
    ]
    show_found(target, found, columns, empty="no such jobs", as_json=as_json)


def _moment(job: Job) -> datetime:
    return job.died_at or (job.claim_expires_at if job.state is JobState.CLAIMED and job.claim_expires_at else job.run_at)


@main.command(
    epilog=f"{JOB_KEYS} And reasons: a list of objects with code and sentence; for a job that is not there only id, state, reasons."
)
@on_store
@click.argument("job_id", type=int, metavar="ID")
@as_json
def job(target: Target, job_id: int, *, as_json: bool) -> None:
    """Show everything about a job, and why it is not running.

    Codes of reasons: dead, claimed, expired, exhausted, lapsed, delayed, paused, no_worker, unknown_task, waiting, absent. Exit code 1
    where there is no such job.
    """
    store = target.store
    found = store.get_job(job_id)
    if found is None:
        sentence = f"job {job_id} is not here: {ABSENT}"
        if not as_json:
            raise click.ClickException(sentence)
        show_json({"id": job_id, "state": None, "reasons": [Reason("absent", sentence)]})
        sys.exit(1)
    ahead = store.parts.database.run_single(store.parts.jobs.ahead, found, LOOKED_AHEAD)
    around = Surroundings(target.now(), store.paused_queues(), store.workers(), ahead)
    told = reasons(found, around)
    fields: dict[str, Any] = plain(found)
    if as_json:
        show_json({**fields, "reasons": told})
        return
    fields = {name: getattr(found, name) for name in fields}
    headers = ", ".join(f"{name}: {value}" for name, value in found.headers.items())
    show_fields({**fields, "queue": shown_queue(found.queue), "headers": headers, "payload": repr(found.payload)})
    click.echo("\nWhy it is not running:" if found.state is not JobState.CLAIMED else "\nWho has it:")
    show_lines((("-", cell(reason.sentence)) for reason in told), gap=1)


@main.command(
    epilog="Keys of --json: id, host, pid, queues, tasks, raw_queues, running, done, failed, handler_ms, started_at, seen_at, alive."
)
@on_store
@as_json
def workers(target: Target, *, as_json: bool) -> None:
    """List the workers as they showed themselves last.

    They do so every 4 s; one that was silent for three times as long is not alive, and one that was for an hour is forgotten.
    """
    columns = [
        Column("worker", lambda one, _: one.id),
        Column("queues", lambda one, _: ", ".join(map(shown_queue, one.queues))),
        *(number(title) for title in ("running", "done", "failed")),
        number("ms/job", lambda one, _: round(one.handler_ms / max(1, one.done + one.failed)), wide=True),
        Column("host", wide=True),
        number("pid", wide=True),
        number("up", lambda one, now: now - one.started_at, wide=True),
        Column("seen", lambda one, now: f"{'' if one.alive else 'silent: '}{ago(one.seen_at, now)}", keep=True),
    ]
    show_found(target, target.store.workers(), columns, empty="no worker has shown itself", as_json=as_json)


@main.command(epilog="Keys of --json: name, owner, token, expires_at.")
@on_store
@as_json
def locks(target: Target, *, as_json: bool) -> None:
    """List the locks that somebody holds, the scheduler's own included."""
    columns = [Column("name"), Column("owner"), number("token"), Column("ends", lambda one, now: ago(one.expires_at, now), keep=True)]
    show_found(target, target.store.locks(), columns, empty="no lock is held", as_json=as_json)
