"""Commands that only look: queues, jobs, the dead, workers, schedules, locks."""

import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.text import Text

from alkstore_sa.cli.frame import Target, as_json, of_queue, on_store, shown_queue
from alkstore_sa.cli.reasons import ABSENT, Reason, Surroundings, reasons
from alkstore_sa.cli.root import main
from alkstore_sa.cli.shape import Column, ago, cell, console, plain, show_fields, show_json, show_table
from alkstore_sa.handles import MOST_ROWS
from alkstore_sa.records import Job, JobState

LOOKED_AHEAD: Final = 100_000

JOB_KEYS: Final = (
    "Keys of --json: id, queue, payload, payload_error, state, priority, attempts, max_attempts, fence, visibility_timeout, base_backoff,"
    " enqueued_at, run_at, expires_at, worker_id, claim_expires_at, task, headers, schedule, scheduled_for, last_error, died_at."
)
limited: Final = click.option("--limit", type=click.IntRange(1, MOST_ROWS), default=100, show_default=True, help="At most so many rows.")


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
    counted = {one.name: plain(one) for one in store.queues()}
    zero = {"ready": 0, "delayed": 0, "claimed": 0, "dead": 0, "dead_capped": False, "oldest_due_age": None}
    ages = {one.name: one.oldest_due_age for one in store.queues()}
    listed = []
    for name in sorted({*counted, *paused, *(queue for worker in alive for queue in worker.queues)}):
        serving = sum(name in worker.queues for worker in alive)
        listed.append({"name": name, **zero, **counted.get(name, {}), "paused_at": paused.get(name), "workers": serving})
    if as_json:
        show_json(listed)
        return
    columns = [
        Column("queue"),
        *(Column(title, "right", keep=True) for title in ("ready", "delayed", "claimed", "dead", "oldest", "workers")),
    ]
    rows = [
        [
            shown_queue(one["name"]),
            one["ready"],
            one["delayed"],
            one["claimed"],
            f"{one['dead']}{'+' if one['dead_capped'] else ''}",
            ages.get(one["name"]),
            one["workers"],
            "paused" if one["paused_at"] else "",
        ]
        for one in listed
    ]
    show_table([*columns, Column("", keep=True)], rows, empty="there are no jobs, and no queue is paused or served")


@main.command(epilog=JOB_KEYS)
@on_store
@of_queue
@click.option("--state", type=click.Choice(list(JobState)), help="Only jobs in this state.")
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
    if as_json:
        show_json(found)
        return
    parts = target.store.parts
    now = parts.database.run_single(parts.jobs.now)
    columns = [
        Column("id", "right", keep=True),
        Column("queue"),
        Column("task"),
        Column("state", keep=True),
        Column("tries", "right", keep=True),
        Column("when", keep=True),
        Column("priority", "right", wide=True, keep=True),
        Column("worker", wide=True),
        Column("enqueued", wide=True, keep=True),
        Column("last error"),
    ]
    rows = [
        [
            job.id,
            shown_queue(job.queue),
            job.task or "",
            job.state,
            f"{job.attempts}/{job.max_attempts}",
            ago(job.died_at or (job.claim_expires_at if job.state is JobState.CLAIMED and job.claim_expires_at else job.run_at), now),
            job.priority,
            job.worker_id or "",
            job.enqueued_at,
            (job.last_error or "").split("\n", 1)[0],
        ]
        for job in found
    ]
    show_table(columns, rows, empty="no such jobs")


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
    parts = store.parts
    around = Surroundings(
        parts.database.run_single(parts.jobs.now),
        store.paused_queues(),
        store.workers(),
        parts.database.run_single(parts.jobs.ahead, found, LOOKED_AHEAD),
    )
    told = reasons(found, around)
    fields: dict[str, Any] = plain(found)
    if as_json:
        show_json({**fields, "reasons": told})
        return
    fields = {name: getattr(found, name) for name in fields}
    headers = ", ".join(f"{name}: {value}" for name, value in found.headers.items())
    show_fields({**fields, "queue": shown_queue(found.queue), "headers": headers, "payload": repr(found.payload)})
    click.echo("\nWhy it is not running:" if found.state is not JobState.CLAIMED else "\nWho has it:")
    for reason in told:
        console().print(Text(cell(f"- {reason.sentence}")))


@main.command(
    epilog="Keys of --json: id, host, pid, queues, tasks, raw_queues, running, done, failed, handler_ms, started_at, seen_at, alive."
)
@on_store
@as_json
def workers(target: Target, *, as_json: bool) -> None:
    """List the workers as they showed themselves last.

    They do so every 4 s; one that was silent for three times as long is not alive, and one that was for an hour is forgotten.
    """
    found = target.store.workers()
    if as_json:
        show_json(found)
        return
    now = target.store.parts.database.run_single(target.store.parts.jobs.now)
    columns = [
        Column("worker"),
        Column("queues"),
        *(Column(title, "right", keep=True) for title in ("running", "done", "failed")),
        Column("ms/job", "right", wide=True, keep=True),
        Column("host", wide=True),
        Column("pid", "right", wide=True, keep=True),
        Column("up", "right", wide=True, keep=True),
        Column("seen", keep=True),
    ]
    rows = [
        [
            one.id,
            ", ".join(map(shown_queue, one.queues)),
            one.running,
            one.done,
            one.failed,
            round(one.handler_ms / max(1, one.done + one.failed)),
            one.host,
            one.pid,
            now - one.started_at,
            ago(one.seen_at, now) if one.alive else f"silent: {ago(one.seen_at, now)}",
        ]
        for one in found
    ]
    show_table(columns, rows, empty="no worker has shown itself")


@main.command(epilog="Keys of --json: name, owner, token, expires_at.")
@on_store
@as_json
def locks(target: Target, *, as_json: bool) -> None:
    """List the locks that somebody holds, the scheduler's own included."""
    found = target.store.locks()
    if as_json:
        show_json(found)
        return
    now = target.store.parts.database.run_single(target.store.parts.jobs.now)
    columns = [Column("name"), Column("owner"), Column("token", "right", keep=True), Column("ends", keep=True)]
    show_table(columns, [[one.name, one.owner, one.token, ago(one.expires_at, now)] for one in found], empty="no lock is held")
