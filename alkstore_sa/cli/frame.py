"""What the commands on a store share: how they are told which store, which queue, and that they may destroy."""

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

import click

from alkstore_sa._names import checked_name
from alkstore_sa._options import PLAIN
from alkstore_sa._payload import Codec
from alkstore_sa.cli.root import opened, store_options
from alkstore_sa.cli.shape import Column, show_json, show_table
from alkstore_sa.errors import AlkstoreError
from alkstore_sa.handles import Queue
from alkstore_sa.outbox import OUTBOX_PREFIX, backing_queue
from alkstore_sa.store import Store
from alkstore_sa.tasks import Tasks

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Target:
    """Where a command works: a store, and the application's tasks where `--app` named them."""

    def __init__(self, store: Store, tasks: Tasks | None) -> None:
        self.store: Final = store
        self.tasks: Final = tasks

    def now(self) -> datetime:
        """Give the database's now."""
        return self.store.parts.database.run_single(self.store.parts.jobs.now)


def on_store(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say where it works, and call it with the target first."""

    @functools.wraps(function)
    def invoke(*args: Any, **kwargs: Any) -> Any:
        with _opened(*(kwargs.pop(name) for name in ("url", "schema", "app"))) as target:
            return function(target, *args, **kwargs)

    options: Callable[..., Any] = store_options(invoke)
    return options


@contextmanager
def _opened(url: str | None, schema: str | None, app: str | None) -> Iterator[Target]:
    tasks = _loaded(app) if app is not None else None
    if url is not None:
        with opened(url, schema, existing=True) as engine, Store(engine, schema=schema, wake=True, codec=_codec(tasks)) as store:
            yield Target(store, tasks)
    elif tasks is not None and tasks.store is not None:
        if schema is not None and schema != tasks.store.parts.database.schema:
            raise click.UsageError("the store of --app is in another schema: leave --schema out, or give --url too")
        try:
            yield Target(tasks.store, tasks)
        finally:
            tasks.store.parts.database.drop_connections()
            tasks.store.engine.dispose()
    elif tasks is not None:
        raise click.UsageError(
            f"--app {app!r} is bound to an AsyncStore alone, and the command line needs a Store: say --url too, or bind one"
        )
    else:
        raise click.UsageError("say which database: --url (ALKSTORE_URL), or --app (ALKSTORE_APP) with a bound Tasks")


def _codec(tasks: Tasks | None) -> Codec | None:
    """Give the codec of the application's store; None where there is no application."""
    if tasks is None:
        return None
    store = tasks.async_store.beneath if tasks.store is None and tasks.async_store is not None else tasks.store
    return None if store is None else store.parts.jobs.codec


def _loaded(app: str) -> Tasks:
    from alkstore_sa.service import find_app  # noqa: PLC0415 - brings the worker in, which only an application needs

    try:
        return find_app(app)
    except AlkstoreError:
        raise
    except Exception as error:
        if click.get_current_context().find_root().params.get("debug"):
            raise
        raise click.ClickException(f"--app {app}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error


as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
yes: Final = click.option("--yes", is_flag=True, help="Do not ask.")


def of_queue(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the two ways to name a queue: `--queue` or `--outbox`; it gets `queue`, a name or None."""

    @click.option("--queue", help="Name of the queue.")
    @click.option("--outbox", help="Name of an outbox, instead of --queue.")
    @functools.wraps(function)
    def invoke(*args: Any, queue: str | None, outbox: str | None, **kwargs: Any) -> Any:
        return function(*args, queue=named_queue(queue, outbox), **kwargs)

    return invoke


def queue_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a queue as its argument, or an outbox of that name with `--outbox`; it gets `queue`."""

    @click.argument("name", metavar="QUEUE")
    @click.option("--outbox", is_flag=True, help="QUEUE is the name of an outbox.")
    @functools.wraps(function)
    def invoke(*args: Any, name: str, outbox: bool, **kwargs: Any) -> Any:
        return function(*args, queue=named_queue(None if outbox else name, name if outbox else None), **kwargs)

    return invoke


def named_queue(queue: str | None, outbox: str | None) -> str | None:
    """Return the stored name of a queue or of the one behind an outbox.

    Raises:
        UsageError: both are given.
        InvalidName, ReservedName: it is no name.
    """
    if queue is not None and outbox is not None:
        raise click.UsageError("--queue and --outbox name the same thing: give one of them")
    if outbox is not None:
        return backing_queue(outbox)
    return None if queue is None else checked_name("queue", queue)


def required(queue: str | None) -> str:
    """Return the queue; raises `UsageError` where none was named."""
    if queue is None:
        raise click.UsageError("say which queue: --queue NAME, or --outbox NAME")
    return queue


def handle(store: Store, queue: str) -> Queue:
    """Give a handle on any queue, those behind outboxes included."""
    return store.stamped_queue(queue, PLAIN)


def shown_queue(queue: str) -> str:
    """Give a queue's name as people know it."""
    return f"{queue.removeprefix(OUTBOX_PREFIX)} (outbox)" if queue.startswith(OUTBOX_PREFIX) else queue


def show_found(target: Target, found: Sequence[Any], columns: Sequence[Column], *, empty: str, as_json: bool) -> None:
    """Print what a command found, as JSON with every field or as a table."""
    if as_json:
        show_json(found)
    else:
        show_table(columns, found, target.now(), empty=empty)


def confirm(question: str, *, sure: bool) -> None:
    """Ask before something is destroyed; without a terminal, `--yes` has to be said."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise click.ClickException(f"{question} Say --yes.")
    click.confirm(question, abort=True)


def say(sentence: str, fields: dict[str, Any], *, as_json: bool) -> None:
    """Say what was done, in a sentence or by its fields."""
    if as_json:
        show_json(fields)
    else:
        click.echo(sentence)


class DurationType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.4 on
    """A length of time: a number of seconds, or one with a unit of s, m, h, d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Read `90`, `90s`, `15m`, `12h` or `7d`."""
        if isinstance(value, timedelta):
            return value
        match = re.fullmatch(r"(\d{1,10}(?:\.\d{1,6})?)([smhd]?)", str(value), re.ASCII)
        if match is None or (seconds := float(match[1]) * _SECONDS[match[2] or "s"]) > 36_500 * 86_400:
            self.fail(f"{value!r} is no length of time like 90, 90s, 15m, 12h or 7d", param, ctx)
        return timedelta(seconds=seconds)


DURATION: Final = DurationType()
