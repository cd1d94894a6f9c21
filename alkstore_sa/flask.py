"""Flask: one store per application on the engine that Flask-SQLAlchemy has, `flask alkstore …`, and a context around each job.

What belongs here: reading the configuration and binding what is there already. What does not: verbs, engines, migrations.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, cast

import click
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from alkstore_sa._payload import Codec
from alkstore_sa.cli import main
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption, NotBound
from alkstore_sa.handles import JobHandle
from alkstore_sa.migrate import include_name, render_item
from alkstore_sa.sqlite import is_in_memory, prepare_sqlite
from alkstore_sa.store import Store
from alkstore_sa.tables import PREFIX
from alkstore_sa.tasks import Tasks

try:
    from flask import Flask, appcontext_pushed, current_app, has_app_context
    from flask.cli import with_appcontext
except ImportError as error:
    raise ImportError("alkstore_sa.flask needs Flask: pip install 'alkstore-sa[flask]'") from error

EXTENSION: Final = "alkstore"
TASKS: Final = "alkstore_sa.flask:tasks_of_current_app"


class Alkstore:
    """The extension; `init_app` only registers it, and everything else happens at first use, per application.

    With Flask-SQLAlchemy the store is on its engine (`bind_key` names another than the default one) and joins `db.session`; without,
    `ALKSTORE_URL` says where. Configuration: `ALKSTORE_URL`, `ALKSTORE_SCHEMA`, `ALKSTORE_WAKE` (True), `ALKSTORE_POLL` (5),
    `ALKSTORE_PREPARE_SQLITE` (True). `tasks` are stored in the store of the application whose context is the current one.
    """

    def __init__(
        self, app: Flask | None = None, tasks: Tasks | None = None, *, bind_key: str | None = None, codec: Codec | None = None
    ) -> None:
        self.tasks: Final = Tasks() if tasks is None else tasks
        self.bind_key: Final = bind_key
        self.codec: Final = codec
        self.tasks.find_store_by(store_of_current_app)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Register with an application: no thread, no connection, no signal handler.

        Raises:
            InvalidOption: another Alkstore is registered with it already.
        """
        if EXTENSION in app.extensions:
            raise InvalidOption("this application has an Alkstore already")
        app.extensions[EXTENSION] = installed = _Installed(self, app)
        app.cli.add_command(_command, EXTENSION)
        appcontext_pushed.connect(installed.settle, app)

    @property
    def store(self) -> Store:
        """The current application's store, made at first use.

        Raises:
            NotBound: there is no application context, or this extension is not registered with its application.
            InvalidOption: neither Flask-SQLAlchemy nor `ALKSTORE_URL` says where the store is, or both do.
        """
        return store_of_current_app()


class _Installed:
    """What the extension is to one application."""

    def __init__(self, extension: Alkstore, app: Flask) -> None:
        self.extension: Final = extension
        self._app: Final = app
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._is_prepared = False
        self._filtered: object = None

    @property
    def store(self) -> Store:
        """The store; it outlives a fork, whose child opens connections of its own."""
        if self._pid != os.getpid():  # another thread of the parent may have held the lock
            self._pid, self._lock = os.getpid(), threading.Lock()
        if self._store is None:
            with self._lock:
                self._store = self._store or self._made()
        return self._store

    @property
    def tasks(self) -> Tasks:
        """The tasks as a worker of this application sees them."""
        tasks = self.extension.tasks
        return tasks.under(self.store, around=self._around, session_factory=self._session if self._db is not None else None)

    def settle(self, _app: Flask, **_: object) -> None:
        """Find, as a context is pushed, what other extensions have registered meanwhile, whichever came first."""
        if self._db is not None and not self._is_prepared:
            self._is_prepared = True
            self._prepare(self._db.engines.get(self.extension.bind_key))
        migrate = self._app.extensions.get("migrate")
        if migrate is not None and self._filtered is not migrate:
            self._filtered = migrate
            self._filter(migrate.configure_args)

    @property
    def _db(self) -> Any:
        return self._app.extensions.get("sqlalchemy")

    def _engine(self) -> Engine:
        key = self.extension.bind_key
        engines = self._db.engines
        if key not in engines:
            raise InvalidOption(f"Flask-SQLAlchemy has no engine for bind_key {key!r}: it is none of SQLALCHEMY_BINDS")
        return cast(Engine, engines[key])

    def _prepare(self, engine: Engine | None) -> None:
        if engine is None:  # said by whoever asks for the store
            return
        if engine.dialect.name == "sqlite" and self._app.config.get("ALKSTORE_PREPARE_SQLITE", True) and not is_in_memory(engine.url):
            prepare_sqlite(engine)
            engine.dispose()  # what it may have connected before is not set up

    def _filter(self, configured: dict[str, Any]) -> None:
        """Keep our tables out of the host's autogenerate, unless the host put them into its own metadata."""
        metadatas = [] if self._db is None else self._db.metadatas.values()
        if any(table.name.startswith(PREFIX) for metadata in metadatas for table in metadata.tables.values()):
            host = configured.get("render_item")
            configured["render_item"] = lambda *args: render_item(*args) or (host(*args) if host else False)
        else:
            configured["include_name"] = include_name(configured.get("include_name"))

    def _made(self) -> Store:
        config = self._app.config
        url: str | URL | None = config.get("ALKSTORE_URL")
        if self._db is not None and url is not None:
            raise InvalidOption("ALKSTORE_URL is set, but the store is on Flask-SQLAlchemy's engine: leave one of the two out")
        if self._db is None and url is None:
            raise InvalidOption("there is no database: initialise Flask-SQLAlchemy for this application, or set ALKSTORE_URL")
        bind = url if url is not None else self._engine()
        kind = Store if self.extension.bind_key is None else _Pinned
        return kind(
            bind,
            schema=config.get("ALKSTORE_SCHEMA"),
            codec=self.extension.codec,
            wake=config.get("ALKSTORE_WAKE", True),
            poll=config.get("ALKSTORE_POLL", 5),
        )

    def _session(self) -> Session:
        return cast(Session, self._db.session())

    @contextmanager
    def _around(self, job: JobHandle) -> Iterator[None]:
        around = self.extension.tasks.around
        with self._app.app_context(), nullcontext() if around is None else around(job):
            yield


class _Pinned(Store):
    """A store on an engine that is not the default one: sessions join it there, wherever they would send our tables."""

    def _opened(self, bind: Engine | URL | str, schema: str | None) -> Database:
        return Database(bind, schema=schema, pinned=True)


def _installed() -> _Installed:
    if not has_app_context():
        raise NotBound("there is no Flask application here: do this in a request, or within `with app.app_context():`")
    installed = current_app.extensions.get(EXTENSION)
    if installed is None:
        raise NotBound("this Flask application has no Alkstore: call `Alkstore(app)`, or `init_app(app)` in its factory")
    return cast(_Installed, installed)


def store_of_current_app() -> Store:
    """Give the store of the application whose context is the current one; raises as `Alkstore.store` does."""
    return _installed().store


def tasks_of_current_app() -> Tasks:
    """Give the tasks of that application, as its workers see them: an application context around each job, and its `db.session()`."""
    return _installed().tasks


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Durable queues and outboxes: upgrade, run, …",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_appcontext
def _command(arguments: tuple[str, ...]) -> None:
    """Be the command line of alkstore_sa on the application's database and tasks."""
    store = store_of_current_app()
    told = {
        "url": store.engine.url.render_as_string(hide_password=False),
        "schema": store.parts.database.schema,
        "app": TASKS,
    }
    main.main(list(arguments), prog_name="flask alkstore", obj=told)  # not by the environment, which child processes would inherit
