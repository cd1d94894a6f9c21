"""Commands on schedules."""

import click

from alkstore_sa.cli.frame import Target, as_json, on_store, say, show_found
from alkstore_sa.cli.looking import limited
from alkstore_sa.cli.root import main, store_options
from alkstore_sa.cli.shape import Column, ago, number


@main.group(
    epilog="Keys of --json: name, spec, queue, payload, payload_error, priority, max_attempts, expires, task, headers, next_fire_at,"
    " paused, last_error.",
    invoke_without_command=True,
)
@store_options
@as_json
@click.pass_context
def schedules(ctx: click.Context, url: str | None, schema: str | None, app: str | None, *, as_json: bool) -> None:
    """List the schedules; with a subcommand, look at one or steer it."""
    given = {"url": url, "schema": schema, "app": app}
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"say it behind the subcommand: schedules {ctx.invoked_subcommand} … --json")
        ctx.obj = given  # for a subcommand that is not told otherwise behind its own name
        return
    _list(**given, as_json=as_json)


@on_store
def _list(target: Target, *, as_json: bool) -> None:
    columns = [
        Column("name"),
        Column("spec", keep=True),
        Column("queue"),
        Column("task", wide=True),
        Column("next", lambda one, now: "" if one.paused else ago(one.next_fire_at, now), keep=True),
        Column("", lambda one, _: "paused" if one.paused else "", keep=True),
        Column("last error", lambda one, _: one.last_error),
    ]
    show_found(target, target.store.schedules(), columns, empty="there are no schedules", as_json=as_json)


@schedules.command(epilog="Keys of --json: schedule, boundary, through, fired_at, job_id, skipped, caught_up.")
@on_store
@click.argument("name")
@limited
@as_json
def history(target: Target, name: str, *, limit: int, as_json: bool) -> None:
    """Show what became of a schedule's boundaries, the newest first."""
    columns = [
        Column("boundary", keep=True),
        Column("fired", lambda one, _: one.fired_at, keep=True),
        number("job", lambda one, _: one.job_id),
        Column("what", lambda one, _: f"skipped {one.skipped}" if one.skipped else f"fired{' late' if one.caught_up else ''}", keep=True),
    ]
    found = target.store.schedule_history(name, limit=limit)
    show_found(target, found, columns, empty=f"nothing is recorded of schedule {name!r}", as_json=as_json)


@schedules.command(epilog="Keys of --json: schedule, paused.")
@on_store
@click.argument("name")
@as_json
def pause(target: Target, name: str, *, as_json: bool) -> None:
    """Stop a schedule from firing until it is resumed."""
    if not target.store.pause_schedule(name):
        raise click.ClickException(f"there is no schedule {name!r}")
    say(f"schedule {name!r} is paused", {"schedule": name, "paused": True}, as_json=as_json)


@schedules.command(epilog="Keys of --json: schedule, paused.")
@on_store
@click.argument("name")
@as_json
def resume(target: Target, name: str, *, as_json: bool) -> None:
    """Let a paused schedule fire again, from the first boundary after now on."""
    if not target.store.resume_schedule(name):
        raise click.ClickException(f"there is no schedule {name!r}")
    say(f"schedule {name!r} fires again", {"schedule": name, "paused": False}, as_json=as_json)
