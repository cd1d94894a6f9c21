"""Joining the caller's transaction: what a bind is, what may be handed to a `_tx` verb, and the one look at the connection behind it.

Nothing here runs a statement, and nothing commits, rolls back or expires what is the caller's.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

from sqlalchemy import Connection, Engine, Result
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.sql.expression import Executable

from alkstore_sa.errors import InvalidOption

Tx: TypeAlias = Session | scoped_session[Session] | Connection


BEGUN: Final = "alkstore_begun"
"""The execution option of a connection on which a store began a transaction by statement."""


class Bind(Protocol):
    """Anything that runs a statement in somebody's transaction."""

    def execute(self, statement: Executable, params: Mapping[str, Any] | None = None, /) -> Result[Any]:
        """Run the statement there."""
        ...


class _Untranslated:
    """A caller's transaction whose own `schema_translate_map` must not move our rows: it would override the statement's.

    With `engine` it is a Session's part on that engine, wherever the Session would send our tables.
    """

    def __init__(self, tx: Tx, engine: Engine | None = None) -> None:
        self._tx = tx
        self._engine = engine

    def execute(self, statement: Executable, params: Mapping[str, Any] | None = None, /) -> Result[Any]:
        """Run the statement under the map that it carries."""
        options = statement.get_execution_options()
        if self._engine is None or isinstance(self._tx, Connection):
            return self._tx.execute(statement, params, execution_options=options)
        return self._tx.execute(statement, params, execution_options=options, bind_arguments={"clause": statement, "bind": self._engine})


def joined(tx: Tx, dialect: str, statement: Executable, engine: Engine | None = None) -> Bind:
    """Return a bind on `tx` if a job written through it by `statement` lives and dies with the caller's transaction.

    A Session that has several engines joins on `engine`, without one on that to which it sends our tables.

    Raises:
        TypeError: it is neither a Session, a scoped_session nor a Connection.
        InvalidOption: another dialect than the store's, autocommit, or a savepoint on SQLite that would commit.
    """
    connection = connection_of(tx, statement, engine)
    if connection.dialect.name != dialect:
        raise InvalidOption(f"this transaction is on {connection.dialect.name}, but the store is on {dialect}")
    begun = None if connection.in_transaction() else connection.begin()
    try:
        (_refuse_unsound_sqlite if dialect == "sqlite" else _refuse_autocommit)(connection)
    except InvalidOption:
        if begun is not None:
            begun.rollback()
        raise
    if engine is not None:
        return _Untranslated(tx, engine)
    return _Untranslated(tx) if _has_map(connection) or (isinstance(tx, Session) and _has_map_of_its_own(tx)) else tx


def standing_for(tx: Tx) -> Session | Connection:
    """Give what `tx` is in this thread and moment: a scoped_session gives another Session elsewhere, or none at all."""
    return tx() if isinstance(tx, scoped_session) else tx


def _has_map(connection: Connection) -> bool:
    return "schema_translate_map" in connection.get_execution_options()


def _has_map_of_its_own(session: Session) -> bool:
    return "schema_translate_map" in (getattr(session, "execution_options", None) or {})  # SQLAlchemy 2.1


def connection_of(tx: Tx, statement: Executable, engine: Engine | None = None) -> Connection:
    """Return the connection on which `tx` will run `statement`; raises `TypeError` where it is none of `Tx`."""
    if isinstance(tx, Connection):
        return tx
    if isinstance(tx, (Session, scoped_session)):
        return tx.connection(bind_arguments={"clause": statement} | ({} if engine is None else {"bind": engine}))
    kind = type(tx)
    if kind.__module__.startswith("sqlalchemy.ext.asyncio"):
        raise TypeError(f"{kind.__name__} is asynchronous: use `await tx.run_sync(queue.enqueue_tx, payload)`, or an AsyncStore")
    raise TypeError(f"{kind.__name__} is no Session, scoped_session or Connection of SQLAlchemy")


def _refuse_autocommit(connection: Connection) -> None:
    options = connection.get_execution_options()
    by_driver = not options.get(BEGUN) and bool(getattr(connection.connection.dbapi_connection, "autocommit", False))
    if options.get("isolation_level") == "AUTOCOMMIT" or by_driver:
        raise InvalidOption("this connection is in autocommit: a rollback would keep the job; use the verb without _tx, or a transaction")


def _refuse_unsound_sqlite(connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    driver = getattr(driver, "_conn", driver)  # aiosqlite keeps the standard library's connection there
    autocommit = getattr(driver, "autocommit", None)
    nested = connection.in_nested_transaction()
    if autocommit is False:  # the driver itself keeps a transaction open at all times
        return
    if autocommit is not True and driver.isolation_level is not None:  # the driver's legacy mode: it begins at the INSERT
        if nested:
            raise InvalidOption(
                "this savepoint would commit when it is released: the SQLite driver has not begun a transaction;"
                " call alkstore_sa.prepare_sqlite(engine) once, before the engine connects"
            )
        return
    begun_outside = bool(connection.dispatch.begin) or not nested  # a savepoint alone would look like a transaction
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or not (driver.in_transaction and begun_outside):
        raise InvalidOption(
            "this SQLite connection is in autocommit: a rollback would keep the job;"
            " use the verb without _tx, or call alkstore_sa.prepare_sqlite(engine) once, before the engine connects"
        )
