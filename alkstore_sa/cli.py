"""The command line: reads arguments, calls one function, prints. Errors are one sentence on stderr and exit code 1."""

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import click
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from alkstore_sa import migrate
from alkstore_sa.errors import AlkstoreError
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store

FILTER_PAGE = "docs/how-to/alembic.md"


class _Failing(click.Group):
    """A group whose commands report the errors of the library and the database in one sentence; `--debug` shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (AlkstoreError, DBAPIError) as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(_one_sentence(error)) from error


def _one_sentence(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


@click.group(cls=_Failing, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="alkstore-sa")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:
    """Durable queues and outboxes in the database that your application has already."""
    del debug


def _database_options(command: Any) -> Any:
    url = click.option("--url", envvar="ALKSTORE_URL", required=True, help="Database URL of SQLAlchemy; also ALKSTORE_URL.")
    schema = click.option("--schema", envvar="ALKSTORE_SCHEMA", help="Schema of the tables (PostgreSQL).")
    return url(schema(command))


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    """Make an engine for `url`, and dispose of it at the end."""
    try:
        engine = create_engine(make_url(url))
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise click.ClickException("this is no database URL that SQLAlchemy can open; use postgresql+psycopg:// or sqlite:///") from error
    try:
        yield engine
    finally:
        engine.dispose()


@main.command()
@_database_options
@click.option("--revision", default="head", show_default=True, help="Revision to stop at.")
def upgrade(url: str, schema: str | None, revision: str) -> None:
    """Make or upgrade the tables; safe from several processes at once."""
    with opened(url) as engine:
        migrate.upgrade(engine, schema=schema, revision=revision)
        click.echo(f"the tables are at {migrate.current(engine, schema=schema)}")
        if migrate.other_version_tables(engine):
            click.echo(
                "Another Alembic history lives in this database. Keep our tables out of its autogenerate, which would drop them:"
                f" in its env.py, context.configure(…, include_name=alkstore_sa.migrate.include_name()). See {FILTER_PAGE}.",
                err=True,
            )


@main.command()
@_database_options
@click.option("--revision", default="base", show_default=True, help="Revision to go back to; base drops the tables.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def downgrade(url: str, schema: str | None, revision: str, *, yes: bool) -> None:
    """Take the tables back to an earlier revision; rows that have no place there are lost."""
    if not yes and sys.stdin.isatty():
        click.confirm("This loses jobs. Go on?", abort=True)
    elif not yes:
        raise click.ClickException("this loses jobs: say --yes")
    with opened(url) as engine:
        migrate.downgrade(engine, schema=schema, revision=revision)
        click.echo(f"the tables are at {migrate.current(engine, schema=schema) or 'base'}")


@main.command()
@_database_options
def current(url: str, schema: str | None) -> None:
    """Show the revision that the tables are at."""
    with opened(url) as engine:
        click.echo(migrate.current(engine, schema=schema) or "base")


@main.command()
@_database_options
def check(url: str, schema: str | None) -> None:
    """Compare the tables with what this version needs; what is newer is accepted and shown."""
    with opened(url) as engine:
        differences = migrate.check(engine, schema=schema)
    for difference in differences:
        click.echo(f"newer than this version, or changed by hand: {difference}", err=True)
    click.echo("the tables are all there" if differences else "the tables are as this version makes them")


@contextmanager
def _store(url: str, schema: str | None) -> Iterator[Store]:
    try:
        made = Store(url, schema=schema)
    except ModuleNotFoundError as error:
        raise click.ClickException("the driver of this database URL is not installed; use postgresql+psycopg:// or sqlite:///") from error
    with made as store:
        yield store


@main.command()
@_database_options
@click.option("--verbose", "-v", is_flag=True, help="Log what the scheduler does.")
def scheduler(url: str, schema: str | None, *, verbose: bool) -> None:
    """Run the scheduler until SIGTERM or SIGINT; start as many as you like, one leads and the others stand by."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    stop = StopToken().on_signals()
    with _store(url, schema) as store:
        store.verify()
        click.echo("the scheduler stands by", err=True)
        store.serve_schedules(stop)
    click.echo("the scheduler has stopped", err=True)


@main.group(invoke_without_command=True)
@click.option("--url", envvar="ALKSTORE_URL", help="Database URL of SQLAlchemy; also ALKSTORE_URL.")
@click.option("--schema", envvar="ALKSTORE_SCHEMA", help="Schema of the tables (PostgreSQL).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a list of objects.")
@click.pass_context
def schedules(ctx: click.Context, url: str | None, schema: str | None, *, as_json: bool) -> None:
    """List the schedules; with `history NAME`, what became of one's boundaries."""
    if ctx.invoked_subcommand is not None:
        ctx.default_map = {"history": {"url": url, "schema": schema}}
        return
    if url is None:
        raise click.UsageError("Missing option '--url'.", ctx)
    with _store(url, schema) as store:
        _show(store.schedules(), ("name", "spec", "queue", "next_fire_at", "paused", "last_error"), as_json)


@schedules.command()
@_database_options
@click.argument("name")
@click.option("--limit", default=100, show_default=True, help="How many rows, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a list of objects.")
def history(url: str, schema: str | None, name: str, limit: int, *, as_json: bool) -> None:
    """Show what became of a schedule's boundaries, the newest first."""
    with _store(url, schema) as store:
        _show(store.schedule_history(name, limit=limit), ("boundary", "through", "fired_at", "job_id", "skipped", "caught_up"), as_json)


@main.command()
@_database_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a list of objects.")
def locks(url: str, schema: str | None, *, as_json: bool) -> None:
    """List the locks that somebody holds, the scheduler's own included."""
    with _store(url, schema) as store:
        _show(store.locks(), ("name", "owner", "token", "expires_at"), as_json)


def _show(records: Sequence[Any], columns: Sequence[str], as_json: bool) -> None:
    """Print records: every field of theirs as JSON, or these columns as a table, empty where there is nothing."""
    if as_json:
        fields = [{field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)} for record in records]
        click.echo(json.dumps(fields, ensure_ascii=False, indent=2, default=str))
        return
    rows = [list(columns), *([_cell(getattr(record, column)) for column in columns] for record in records)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return " ".join(str(value).splitlines())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return dict(value) if isinstance(value, Mapping) else value


if __name__ == "__main__":
    main()
