"""Commands that change something: replay, cancel, purge, enqueue, pause, resume; and the ping for supervisors."""

import json
import socket
from datetime import timedelta
from typing import Any

import click
from click.shell_completion import get_completion_class

from alkstore_sa.cli.frame import (
    DURATION,
    Target,
    as_json,
    confirm,
    handle,
    of_queue,
    on_store,
    queue_argument,
    required,
    say,
    shown_queue,
    yes,
)
from alkstore_sa.cli.root import main
from alkstore_sa.errors import InvalidPayload
from alkstore_sa.handles import MOST_ROWS
from alkstore_sa.records import JobState


@main.command(epilog="Keys of --json: replayed.")
@on_store
@click.argument("job_id", type=int, metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Bring back the dead jobs of --queue or --outbox, in id order.")
@of_queue
@click.option("--limit", type=click.IntRange(1, MOST_ROWS), help="With --all: at most so many.")
@yes
@as_json
def replay(target: Target, job_id: int | None, *, everything: bool, queue: str | None, limit: int | None, yes: bool, as_json: bool) -> None:
    """Bring dead jobs back: ready at once, no attempt used, no expiry; --all asks first."""
    if (job_id is None) is not everything:
        raise click.UsageError("say which: an ID, or --all with --queue or --outbox")
    if job_id is not None and (queue is not None or limit is not None):
        raise click.UsageError("--queue, --outbox and --limit go with --all; an ID is enough by itself")
    if job_id is None:
        name = required(queue)
        confirm(f"This brings the dead jobs of {shown_queue(name)} back.", sure=yes)
        replayed = handle(target.store, name).replay_all(limit=limit)
    else:
        job = target.store.get_job(job_id)
        if job is None or job.state is not JobState.DEAD or not handle(target.store, job.queue).replay(job_id):
            raise click.ClickException(f"job {job_id} is not among the dead")
        replayed = 1
    say(f"{replayed} jobs are back" if everything else f"job {job_id} is back", {"replayed": replayed}, as_json=as_json)


@main.command(epilog="Keys of --json: cancelled.")
@on_store
@click.argument("job_id", type=int, metavar="ID")
@yes
@as_json
def cancel(target: Target, job_id: int, *, yes: bool, as_json: bool) -> None:
    """Remove a live job, whoever holds it; what a handler does meanwhile is not undone, only its job is not its any more."""
    confirm(f"This removes job {job_id} for good.", sure=yes)
    if not target.store.cancel(job_id):
        raise click.ClickException(f"there is no live job {job_id}")
    say(f"job {job_id} is removed", {"cancelled": job_id}, as_json=as_json)


@main.command(epilog="Keys of --json: purged.")
@on_store
@of_queue
@click.option("--older-than", type=DURATION, required=True, help="Only what died at least so long ago: 90s, 15m, 12h, 7d.")
@yes
@as_json
def purge(target: Target, *, queue: str | None, older_than: timedelta, yes: bool, as_json: bool) -> None:
    """Delete old dead jobs of a queue."""
    name = required(queue)
    confirm(f"This deletes the dead jobs of {shown_queue(name)} that are at least that old, for good.", sure=yes)
    purged = handle(target.store, name).purge_dead(older_than=older_than)
    say(f"{purged} dead jobs are deleted", {"purged": purged}, as_json=as_json)


@main.command(epilog="Keys of --json: id.")
@on_store
@click.argument("name", metavar="TASK-OR-QUEUE")
@click.argument("text", metavar="JSON")
@click.option("--delay", type=DURATION, help="Run it so much later: 90s, 15m, 12h, 7d.")
@click.option("--priority", type=int, help="Higher ones come first.")
@click.option("--new-queue", is_flag=True, help="The queue may be one that has no jobs and no worker.")
@as_json
def enqueue(target: Target, name: str, text: str, *, delay: timedelta | None, priority: int | None, new_queue: bool, as_json: bool) -> None:
    """Store a job: a call of a task of --app with a JSON object of its arguments, or any JSON as the payload of a raw job of a queue."""
    payload = _parsed(text)
    options: dict[str, Any] = {"delay": delay} | ({} if priority is None else {"priority": priority})
    if target.tasks is not None and name in target.tasks:
        if not isinstance(payload, dict):
            raise click.ClickException(f"{name!r} is a task: give its arguments as a JSON object")
        try:
            job_id = target.tasks[name].on(target.store).options(**options).enqueue(**payload)
        except TypeError as error:
            raise click.ClickException(f"task {name!r} cannot be called like this: {error}") from error
    else:
        if not (new_queue or _is_known(target, name)):
            raise click.ClickException(
                f"{name!r} is no task that is known here, and no queue with jobs or workers; a new queue: --new-queue"
            )
        job_id = target.store.enqueue(name, payload, **options)
    say(f"job {job_id} is enqueued", {"id": job_id}, as_json=as_json)


def _parsed(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise InvalidPayload(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise click.ClickException(f"this is no JSON: {error.msg} at character {error.pos + 1}") from error
    except InvalidPayload:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits, a nesting too deep
        raise click.ClickException(f"this JSON cannot be read: {error}") from error


def _is_known(target: Target, queue: str) -> bool:
    of_tasks = [] if target.tasks is None else target.tasks.queues
    served = (name for worker in target.store.workers() for name in worker.queues)
    return queue in {*of_tasks, *served, *(stats.name for stats in target.store.queues())}


@main.command(epilog="Keys of --json: queue, paused, changed.")
@on_store
@queue_argument
@as_json
def pause(target: Target, *, queue: str, as_json: bool) -> None:
    """Let workers claim nothing more from a queue, within 5 s; what runs goes on.

    Loops that claim by hand (`Queue.claim`, `Outbox.run`) do not look.
    """
    changed = target.store.parts.database.run_single(target.store.parts.workers.pause, queue)
    say(
        f"queue {shown_queue(queue)} {'is paused now' if changed else 'was paused already'}",
        {"queue": queue, "paused": True, "changed": changed},
        as_json=as_json,
    )


@main.command(epilog="Keys of --json: queue, paused, changed.")
@on_store
@queue_argument
@as_json
def resume(target: Target, *, queue: str, as_json: bool) -> None:
    """Let workers claim from a paused queue again, within 5 s."""
    changed = target.store.parts.database.run_single(target.store.parts.workers.resume, queue)
    say(
        f"queue {shown_queue(queue)} {'is resumed now' if changed else 'was not paused'}",
        {"queue": queue, "paused": False, "changed": changed},
        as_json=as_json,
    )


@main.command(epilog="Keys of --json: alive, workers (a list of ids).")
@on_store
@click.option("--worker", "worker_id", help="A worker by its id.")
@click.option("--host", is_flag=False, flag_value="", help="Any worker of this host, or of the one that is named.")
@as_json
def ping(target: Target, *, worker_id: str | None, host: str | None, as_json: bool) -> None:
    """Exit 0 if a worker was seen within three of its beats (12 s), 1 if not: for Kubernetes and systemd."""
    if (worker_id is None) is (host is None):
        raise click.UsageError("say which: --worker ID, or --host")
    name = host or socket.gethostname()[:255]
    alive = [one.id for one in target.store.workers() if one.alive and (one.id == worker_id if host is None else one.host == name)]
    what = f"worker {worker_id}" if host is None else f"a worker on {name}"
    say(f"{what} is alive" if alive else f"{what} was not seen within 12 s", {"alive": bool(alive), "workers": alive}, as_json=as_json)
    click.get_current_context().exit(0 if alive else 1)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and options: `eval "$(alkstore completion bash)"`."""
    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"there is no completion for {shell}")
    click.echo(found(main, {}, "alkstore", "_ALKSTORE_COMPLETE").source())
