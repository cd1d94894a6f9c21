"""The command line: reads arguments, calls one function, prints. Errors are one sentence on stderr and exit code 1."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import click
from alembic.util import CommandError
from rich.console import Console
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from alkstore_sa import migrate
from alkstore_sa.engines import engine_for, refuse_unsupported
from alkstore_sa.errors import AlkstoreError, SchemaMissing
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store

FILTER: Final = """\
Another Alembic history lives in this database ({others}). Its autogenerate would drop our tables; keep them out of it, in its env.py:

    from alkstore_sa.migrate import include_name
    context.configure(..., include_name=include_name())  # or include_name(your_own_hook)

See docs/how-to/alembic.md."""
DEMO_MESSAGES: Final = 200
SCHEMA_MISSING: Final = 3  # the exit code of a worker whose tables are not there


class _Failing(click.Group):
    """A group whose commands report every error in one sentence; `--debug` shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, EOFError, BrokenPipeError):
            raise  # click's own business
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            said = _one_sentence(error)
            if not isinstance(error, (AlkstoreError, SQLAlchemyError, CommandError)):
                said = f"{type(error).__name__}: {said} (--debug shows where)"
            raise click.ClickException(said) from error


def _one_sentence(error: Exception) -> str:
    """Give the first line of an error, of a database error what the database said: what follows quotes statements and values."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


@click.group(cls=_Failing, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="alkstore-sa")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:
    """Durable queues and outboxes in the database that your application has already."""
    del debug


class Told(click.Option):
    """An option that whoever calls the command may have told in the context's `obj`; then its environment variable counts for nothing."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Give what was told, else what the environment says."""
        told = ctx.find_object(dict) or {}
        return told[self.name] if self.name in told else super().value_from_envvar(ctx)


def url_option(**attributes: Any) -> Callable[[Any], Any]:
    """Make the option that names the database."""
    said = "The database: postgresql+psycopg://… or sqlite:///FILE."
    return click.option("--url", cls=Told, envvar="ALKSTORE_URL", show_envvar=True, help=said, **attributes)


def app_option(more: str = "", **attributes: Any) -> Callable[[Any], Any]:
    """Make the option that names the application's tasks."""
    said = f"A bound Tasks, as module:attribute{more}."
    return click.option("--app", cls=Told, envvar="ALKSTORE_APP", show_envvar=True, help=said, **attributes)


schema_option: Final = click.option(
    "--schema", cls=Told, envvar="ALKSTORE_SCHEMA", show_envvar=True, help="Schema of the tables (PostgreSQL)."
)


def _database_options(command: Any) -> Any:
    return url_option(required=True)(schema_option(command))


def store_options(command: Any) -> Any:
    """Give a command the options `url`, `schema` and `app`, of which it needs a database, or tasks that have one."""
    return url_option()(schema_option(app_option("; its store, without --url")(command)))


@contextmanager
def opened(url: str, schema: str | None = None, *, existing: bool = False) -> Iterator[Engine]:
    """Make an engine for `url`, and dispose of it at the end; `existing`: a SQLite file must be there already.

    Raises:
        InvalidOption: the database is not one that this library supports.
        ClickException: there is no such file.
    """
    engine = engine_for(url)
    refuse_unsupported(engine, schema)
    path = engine.url.database or ""
    if existing and engine.dialect.name == "sqlite" and not (path.startswith("file:") or Path(path).exists()):
        raise click.ClickException(f"there is no file {path}; `alkstore upgrade` makes it")
    try:
        yield engine
    finally:
        engine.dispose()


def _standing(engine: Engine, schema: str | None) -> str:
    """Say in words which revision the tables are at."""
    revision = migrate.current(engine, schema=schema)
    if revision is None and migrate.made_elsewhere(engine, schema=schema):
        return f"a revision that {migrate.VERSION_TABLE} does not know: another Alembic history made them"
    return revision or "base"


@main.command()
@_database_options
@click.option("--revision", default="head", show_default=True, help="Revision to stop at.")
def upgrade(url: str, schema: str | None, revision: str) -> None:
    """Make or upgrade the tables; safe from several processes at once.

    Makes the SQLite file or the schema too where it is missing. Where another Alembic history lives in the database, says how to keep
    our tables out of its autogenerate.
    """
    with opened(url, schema) as engine:
        migrate.upgrade(engine, schema=schema, revision=revision)
        click.echo(f"the tables are at {_standing(engine, schema)}")
        if others := migrate.other_version_tables(engine, schema=schema):
            click.echo(FILTER.format(others=", ".join(others)), err=True)


@main.command()
@_database_options
@click.option("--revision", default="base", show_default=True, help="Revision to go back to; base drops the tables.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def downgrade(url: str, schema: str | None, revision: str, *, yes: bool) -> None:
    """Take the tables back to an earlier revision; rows that have no place there are lost."""
    if not yes and not sys.stdin.isatty():
        raise click.ClickException("this loses jobs: say --yes")
    with opened(url, schema, existing=True) as engine:
        if not yes:
            click.confirm("This loses jobs. Go on?", abort=True)
        migrate.downgrade(engine, schema=schema, revision=revision)
        click.echo(f"the tables are at {_standing(engine, schema)}")


@main.command()
@_database_options
def current(url: str, schema: str | None) -> None:
    """Show the revision that the tables are at."""
    with opened(url, schema, existing=True) as engine:
        click.echo(_standing(engine, schema))


@main.command()
@_database_options
def check(url: str, schema: str | None) -> None:
    """Compare the tables with what this version needs; fails where something is missing.

    What is there beyond that (a newer revision's columns, say) is accepted and shown.
    """
    with opened(url, schema, existing=True) as engine:
        differences = migrate.check(engine, schema=schema)
    for difference in differences:
        click.echo(f"newer than this version, or changed by hand: {difference}", err=True)
    click.echo("the tables have all that this version needs" if differences else "the tables are as this version makes them")


@main.command()
@click.option("--url", help="Database to run in; else a SQLite file in a new temporary directory, which stays.")
@click.option(
    "--input", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File of payloads, a JSON text a line (JSONL)."
)
@click.option("--jobs", type=click.IntRange(1, 1_000_000), help="Messages to write; else a message a line, or 200.")
@click.option("--seed", default=0, show_default=True, help="What is rolled back, refused and made up: the same for the same seed.")
@click.pass_context
def demo(ctx: click.Context, url: str | None, path: Path | None, jobs: int | None, seed: int) -> None:
    """Deliver messages through rollbacks, refusals and a crash, and check the books; exit code 0 if they balance.

    Orders and their outbox messages are written in the same transactions, of which some roll back. Two processes deliver the messages
    to an HTTP receiver that refuses some at first; one of them is killed in the middle of a delivery.

    Blank lines of the input are skipped, and counted where a line is named. With more --jobs than lines the lines come again. In a
    database of yours the tables of alkstore stay; what the run itself wrote is removed.
    """
    from alkstore_sa.demo import payloads, report, trial  # noqa: PLC0415 - a server and processes that no other command needs

    console = Console(highlight=False)
    given = payloads.invented(jobs or DEMO_MESSAGES, seed) if path is None else payloads.read(path)
    used = list(islice(cycle(given), jobs or len(given)))
    file = f"sqlite:///{Path(mkdtemp(prefix='alkstore-demo-')) / 'demo.db'}" if url is None else url
    with opened(file) as engine:
        console.print(f"database: {engine.url.render_as_string()}", markup=False, soft_wrap=True)
        outcome = trial.run(engine, used, seed=seed, keep=url is None, console=console)
    report.show(outcome, console)
    ctx.exit(1 if outcome.findings() else 0)


def _worker_options(command: Any) -> Any:
    for option in reversed(
        (
            app_option(required=True),
            click.option("--queue", "queues", multiple=True, help="A queue to serve; by default those of the registered tasks."),
            click.option("--outbox", "outboxes", multiple=True, help="An outbox to deliver."),
            click.option("--concurrency", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Jobs that run at once."),
            click.option("--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds for what runs at a stop."),
            click.option("--max-jobs", type=click.IntRange(1), help="Leave after so many jobs."),
            click.option("--migrate", "upgrade", is_flag=True, help="Make or upgrade the tables first."),
        )
    ):
        command = option(command)
    return command


def _serve(app: str, *, everything: bool, **options: Any) -> None:
    from alkstore_sa.service import load_app, serve  # noqa: PLC0415 - the other commands do without a worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        code = serve(load_app(app), everything=everything, **options)
    except SchemaMissing as error:
        click.echo(f"Error: {error}", err=True)
        code = SCHEMA_MISSING
    sys.exit(code)


@main.command()
@_worker_options
def worker(app: str, **options: Any) -> None:
    """Run jobs until SIGTERM or SIGINT; exits 3 where the tables are missing."""
    _serve(app, everything=False, **options)


@main.command()
@_worker_options
def run(app: str, **options: Any) -> None:
    """Run jobs, deliver outboxes and serve schedules in one process, as `worker` does."""
    _serve(app, everything=True, **options)


@contextmanager
def _store(url: str, schema: str | None) -> Iterator[Store]:
    with opened(url, schema, existing=True) as engine, Store(engine, schema=schema) as store:
        store.verify()
        yield store


@main.command()
@_database_options
@click.option("--verbose", "-v", is_flag=True, help="Log what the scheduler does.")
def scheduler(url: str, schema: str | None, *, verbose: bool) -> None:
    """Run the scheduler until SIGTERM or SIGINT; start as many as you like, one leads and the others stand by."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    stop = StopToken().on_signals()
    with _store(url, schema) as store:
        click.echo("the scheduler stands by", err=True)
        store.serve_schedules(stop)
    click.echo("the scheduler has stopped", err=True)
