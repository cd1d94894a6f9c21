"""How this library gets a transaction of its own on each database, and how a verb is lifted into one.

A store never switches the isolation of the application's pooled connections: it works through a twin engine, made from the same pool
recipe, whose connections are in autocommit and on which our own transactions are begun and ended by statement.
"""

import os
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Pool, create_engine, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.sql.expression import ClauseElement, Executable

from alkstore_sa.bridge import Beside, BesideInThread, pause
from alkstore_sa.errors import InvalidOption, SchemaMissing, SchemaOutdated, StoreClosed
from alkstore_sa.places import described, file_of, server_of
from alkstore_sa.seam import BEGUN, Bind, Tx, joined
from alkstore_sa.sqlite import LONGEST_BUSY, is_busy, is_in_memory, prepare_sqlite
from alkstore_sa.twins import STRICTER, prepared_twin, twin_pool

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Executable)

SUPPORTED: Final = "postgresql+psycopg:// or sqlite:///"

_BEGIN: Final = {"postgresql": "BEGIN ISOLATION LEVEL READ COMMITTED", "sqlite": "BEGIN IMMEDIATE"}
_LONGEST_IDENTIFIER: Final = 63  # bytes; PostgreSQL cuts off what is longer, in names and in channels
_LENT: Final[ContextVar[Collection[str]]] = ContextVar("alkstore_lent", default=())  # the files whose write lock a handler's Session has
_JOINED: Final[ContextVar[Mapping["Database", Callable[[], Connection]]]] = ContextVar("alkstore_joined", default=MappingProxyType({}))


class Database:
    """One database and schema as a store uses it: its statements, its own transactions, its connections' lives."""

    def __init__(self, bind: Engine | URL | str, *, schema: str | None = None, pinned: bool = False) -> None:
        self._pinned: Final = pinned
        self.engine, self._owned = self._engine(bind)
        self.dialect: Final = self.engine.dialect.name
        refuse_unsupported(self.engine, schema)
        if self._owned and self.dialect == "sqlite":
            prepare_sqlite(self.engine)
        self._file: Final = file_of(self.engine.url) if self.dialect == "sqlite" else None
        self.schema: Final = schema
        self.channel: Final = _channel(schema)
        self._statements: dict[Any, Executable] = {}
        self._lock = threading.Lock()
        self._twin: Engine | None = None
        self._pid = os.getpid()
        self._closed = False
        self._known: Final[WeakSet[Pool]] = WeakSet()  # of others, that were found to lead here

    def statement(self, builder: Callable[P, S], /, *args: P.args, **shape: P.kwargs) -> S:
        """Return what `builder` builds, built once and carrying the schema that its tables lie in."""
        key = (builder, args, tuple(shape.items()))
        kept = self._statements.get(key)
        if kept is None:
            kept = builder(*args, **shape).execution_options(schema_translate_map={None: self.schema})
            self._statements[key] = kept
        return cast(S, kept)  # the key names the builder that made it

    @contextmanager
    def begin(self, *, single: bool = False, limit: float | None = None) -> Iterator[Connection]:
        """Give a connection in a READ COMMITTED (SQLite: immediate) transaction of our own, or in autocommit where `single`.

        Leaving commits, an exception rolls back. The wait for SQLite's other writers is bounded by 30 s. `limit` bounds, in seconds,
        what can hold a transaction up: each of its statements, and each pause between them, on PostgreSQL; the wait for the other
        writers on SQLite.

        Raises:
            InvalidOption: inside a handler whose Session holds SQLite's write lock, for which this would wait for ever.
        """
        if self._file in _LENT.get():
            raise InvalidOption("this would wait for the handler's own transaction: use the verb with _tx, and the handler's session")
        if (lender := self.lender) is not None:
            self.refuse_closed()
            with translated(self.schema), _savepoint(lender()) as connection:
                yield connection
            return
        with translated(self.schema), self._connected() as connection:
            if single and not connection.info.get(STRICTER):
                yield connection
                return
            connection.execution_options(**{BEGUN: True})
            with self.transaction_on(connection, limit=limit):
                yield connection

    @contextmanager
    def transaction_on(self, connection: Connection, *, limit: float | None = None) -> Iterator[None]:
        """Begin a transaction of our own on an autocommit connection of ours; leaving commits, an exception rolls back."""
        try:
            self._retrying(lambda: connection.exec_driver_sql(_BEGIN[self.dialect]), LONGEST_BUSY if limit is None else limit)
            if limit is not None and self.dialect == "postgresql":
                limits = ("statement_timeout", "idle_in_transaction_session_timeout")  # a process that is stopped must not keep its locks
                connection.execute(select(*(func.set_config(name, str(round(limit * 1000)), True) for name in limits)))
            yield
            self._retrying(lambda: connection.exec_driver_sql("COMMIT"))  # readers may hold up a commit where SQLite has no WAL
        except BaseException:
            _roll_back(connection)
            raise

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        twin = self._open_twin()
        pool = twin.pool
        with self._connect() as connection:
            try:
                yield connection
            except DBAPIError as error:
                if is_read_only(error) and not connection.invalidated:
                    connection.invalidate()  # a server that is no primary any more: the next connection may find the one that is
                raise
            finally:
                if twin.pool is not pool and not connection.invalidated:
                    connection.invalidate()  # its pool was disposed of meanwhile, and would keep it open unseen: end it

    def run(self, verb: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Lift a verb of several statements into a transaction of our own."""
        with self.begin() as connection:
            return verb(connection, *args, **kwargs)

    def run_within(self, limit: float, verb: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Lift a verb as `run` does, in a transaction whose statements are held up for at most `limit` seconds each."""
        with self.begin(limit=limit) as connection:
            return verb(connection, *args, **kwargs)

    def run_single(self, verb: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Lift a verb of one statement into autocommit; the statement is its own transaction."""

        def once() -> R:
            with self.begin(single=True) as connection:
                return verb(connection, *args, **kwargs)

        return self._retrying(once)

    def join(self, tx: Tx, verb: Callable[Concatenate[Bind, P], R], clause: Executable, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a verb in the caller's transaction, after the one look at the connection that `clause` will use."""
        self.refuse_closed()
        bind = joined(tx, self.dialect, clause, self.engine if self._pinned else None)
        with translated(self.schema):
            return verb(bind, *args, **kwargs)

    def refuse_elsewhere(self, session: Session, clause: Executable) -> None:
        """Raise `InvalidOption` where a Session would send `clause`, one of ours, to another place than this.

        Sends nothing, but on PostgreSQL: one statement to either side, once for a pool that is not the store's own.
        """
        if self._pinned:
            return
        there = session.get_bind(clause=cast(ClauseElement, clause))
        if not self._is_here(there):
            raise InvalidOption(
                f"this handler's session keeps our tables in {described(there.engine.url)}, but the worker's jobs are in"
                f" {described(self.engine.url)}: give the worker a session_factory= on its own database"
            )

    def _is_here(self, bind: Engine | Connection) -> bool:
        pool = bind.engine.pool
        if pool is self.engine.pool or pool in self._known:
            return True
        if bind.dialect.name != self.dialect:
            return False
        if self._file is not None:
            return file_of(bind.engine.url) == self._file
        with self.begin(single=True) as ours, nullcontext(bind) if isinstance(bind, Connection) else bind.connect() as theirs:
            is_here = server_of(ours) == server_of(theirs)
        if is_here:
            self._known.add(pool)
        return is_here

    def begin_in(self, session: Session, clause: Executable) -> None:
        """Let a Session begin its transaction on the connection that `clause` will use."""
        session.connection(bind_arguments={"clause": clause, **({"bind": self.engine} if self._pinned else {})})

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Say that a Session of this context holds SQLite's write lock, so that no store on the file can begin a transaction in it."""
        lent = [] if self._file is None else [self._file]
        token = _LENT.set(lent)
        try:
            yield
        finally:
            _LENT.reset(token)
            lent.clear()  # what was started in this context, and outlives it, may begin one again

    @contextmanager
    def joining(self, lender: Callable[[], Connection]) -> Iterator[None]:
        """Let every transaction of our own, in this context, be a savepoint on the connection that `lender` gives: for tests."""
        before = _JOINED.get()
        _JOINED.set(MappingProxyType({**before, self: lender}))
        try:
            yield
        finally:
            _JOINED.set(before)

    @property
    def lender(self) -> Callable[[], Connection] | None:
        """What gives the connection that this context joined, if it joined one."""
        return _JOINED.get().get(self)

    def drop_connections(self) -> None:
        """Close what is idle in the pool, so that the next transaction meets a fresh connection, perhaps to another server."""
        with suppress(DBAPIError):
            self._open_twin().dispose()

    @contextmanager
    def open_apart(self) -> Iterator[Connection]:
        """Give an autocommit connection that belongs to no pool, and end it after."""
        connection = self._connect()
        driver = connection.connection.dbapi_connection
        connection.detach()
        try:
            yield connection
        finally:
            with suppress(SQLAlchemyError):
                connection.close()
            if driver is not None:
                with suppress(Exception):  # one that was detached, then invalidated, is closed by nobody else
                    driver.close()

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        pause(seconds)

    def beside(self, function: Callable[[], object], name: str) -> Beside:
        """Start what runs beside its caller on connections of this database."""
        return BesideInThread(function, name)

    def refuse_closed(self) -> None:
        """Raise `StoreClosed` once the store was closed."""
        if self._closed:
            raise StoreClosed("this store was closed")

    def refuse_later_calls(self) -> None:
        """Make every later call raise `StoreClosed`."""
        self._closed = True

    def close(self) -> None:
        """Refuse every later call and dispose of what was made here, never of the application's own engine."""
        self.refuse_later_calls()
        with self._lock:
            twin, self._twin = self._twin, None
        if os.getpid() != self._pid:
            return
        if twin is not None:
            twin.dispose()
        if self._owned:
            self.engine.dispose()

    def _connect(self) -> Connection:
        return self._open_twin().connect()

    def _open_twin(self) -> Engine:
        self.refuse_closed()
        twin = self._twin
        if twin is not None and self._pid == os.getpid():
            return twin
        if self._pid != os.getpid():
            self._lock = threading.Lock()  # another thread of the parent may have held it when this child was forked
        with self._lock:
            if self._pid != os.getpid():  # a forked child forgets its parent's connections and never closes them
                self._pid, self._twin = os.getpid(), None
                if self._owned:
                    self.engine.dispose(close=False)
            if self._twin is None:
                self._twin = self._made_twin()
            return self._twin

    def _engine(self, bind: Engine | URL | str) -> tuple[Engine, bool]:
        if isinstance(bind, Engine):
            if bind.dialect.is_async:
                raise InvalidOption("this is the engine within an AsyncEngine: give the AsyncEngine to an AsyncStore")
            return bind, False
        if not isinstance(bind, (str, URL)):
            raise TypeError(f"{type(bind).__name__} is no Engine or database URL; for an AsyncEngine use an AsyncStore")
        return engine_for(bind), True

    def _made_twin(self) -> Engine:
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "hide_parameters": True, "echo": self.engine.echo}
        return prepared_twin(create_engine(self.engine.url, pool=twin_pool(self.engine), **options))

    def _retrying(self, attempt: Callable[[], R], longest: float = LONGEST_BUSY) -> R:
        """Repeat what a busy SQLite refused, for at most `longest` seconds; elsewhere just do it."""
        if self.dialect != "sqlite":
            return attempt()
        end = time.monotonic() + longest
        while True:
            try:
                return attempt()
            except OperationalError as error:
                if not is_busy(error) or time.monotonic() > end:
                    raise
            self.pause(0.01)


def engine_for(url: URL | str) -> Engine:
    """Make an engine for a database URL, of which no error repeats more than the name of the driver.

    Raises:
        InvalidOption: it is no URL, or its database or driver is not supported or not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidOption(f"this is no database URL; use {SUPPORTED}") from None  # the cause may quote the URL, password included
    if parsed.get_backend_name() not in _BEGIN:
        raise InvalidOption(f"{parsed.get_backend_name()} is not supported; use {SUPPORTED}")
    _refuse_in_memory(parsed)
    try:
        engine = create_engine(parsed)
    except NoSuchModuleError as error:
        raise InvalidOption(f"SQLAlchemy knows no driver {parsed.drivername}; use {SUPPORTED}") from error
    except ArgumentError:
        raise InvalidOption(f"this is no database URL of {parsed.drivername}; use {SUPPORTED}") from None
    except ModuleNotFoundError as error:
        raise InvalidOption(f"the driver of {parsed.drivername} is not installed ({error.name}); use {SUPPORTED}") from error
    if engine.dialect.is_async:
        raise InvalidOption(f"{parsed.drivername} is an asynchronous driver; use {SUPPORTED}")
    return engine


def refuse_unsupported(engine: Engine, schema: str | None) -> None:
    """Raise `InvalidOption` where the engine's database, or the schema in it, cannot hold our tables; sends nothing."""
    name = engine.dialect.name
    if name not in _BEGIN:
        raise InvalidOption(f"{name} is not supported; use {SUPPORTED}")
    if name == "sqlite" and schema is not None:
        raise InvalidOption("SQLite has no schemas: leave schema out")
    _refuse_in_memory(engine.url)
    if schema is not None and not 0 < len(schema.encode()) <= _LONGEST_IDENTIFIER:
        raise InvalidOption(f"schema {schema!r} is no name of a schema: 1 to {_LONGEST_IDENTIFIER} bytes")


def _refuse_in_memory(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and is_in_memory(url):
        raise InvalidOption("in-memory SQLite gives every connection a database of its own; use a file: sqlite:///jobs.db")


def _channel(schema: str | None) -> str:
    name = "alkstore" if schema is None else f"alkstore:{schema}"
    return name if len(name.encode()) <= _LONGEST_IDENTIFIER else f"alkstore:{blake2b(name.encode(), digest_size=16).hexdigest()}"


@contextmanager
def _savepoint(connection: Connection) -> Iterator[Connection]:
    with connection.begin_nested():
        yield connection


def _roll_back(connection: Connection) -> None:
    """Roll back, or end a connection that cannot; what went wrong before must not be hidden by what goes wrong here."""
    if connection.invalidated or connection.closed:
        return
    try:
        connection.exec_driver_sql("ROLLBACK")
    except Exception:  # noqa: BLE001 - see above
        connection.invalidate()


def upgrade_hint(schema: str | None) -> str:
    """Name the command that makes or upgrades the tables in `schema`."""
    return "run `alkstore upgrade`" if schema is None else f"run `alkstore upgrade --schema {shlex.quote(schema)}`"


def is_read_only(error: DBAPIError) -> bool:
    """Tell whether the server refused to write because it is a standby, or set so."""
    return getattr(error.orig, "sqlstate", None) == "25006"


@contextmanager
def translated(schema: str | None) -> Iterator[None]:
    """Turn a database error that says that a table or a column of ours is missing into ours; let every other one pass."""
    try:
        yield
    except DBAPIError as error:
        told = _schema_error(error, schema)
        if told is None:
            raise
        raise told from error


def _schema_error(error: DBAPIError, schema: str | None) -> SchemaMissing | None:
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    said = str(error.orig).split("\n", 1)[0]  # the lines after it quote the statement, which names our tables anyway
    if (state == "42P01" or "no such table" in said) and "alkstore_" in said:
        return SchemaMissing(f"the tables of alkstore_sa are not in this database: {upgrade_hint(schema)}")
    unknown_column = state == "42703" or "no such column" in said or "has no column named" in said
    if unknown_column and "alkstore_" in f"{said} {error.statement}":  # a column may be named by the alias of its table
        return SchemaOutdated(f"a column of alkstore_sa is not in this database: {upgrade_hint(schema)}")
    return None
