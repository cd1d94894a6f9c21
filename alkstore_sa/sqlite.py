"""SQLite as a transactional database: the set-up under which a Session may read, then write, and only ever waits.

The driver's default sends no BEGIN before a SAVEPOINT, so that a released savepoint commits and survives the caller's rollback; and its
deferred BEGIN makes a transaction that has read, then writes after somebody else's commit, fail at once.
"""

import sqlite3
import time
from typing import Any, Final, Literal

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from alkstore_sa._options import Duration, positive
from alkstore_sa.bridge import pause
from alkstore_sa.errors import InvalidOption

LONGEST_BUSY: Final = 30.0  # seconds for which a write of ours waits for the other writers of the file
_PREPARED: Final = "alkstore_prepared"


def prepare_sqlite(
    engine: Engine,
    *,
    begin: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE",
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    busy_timeout: Duration = 5,
) -> Engine:
    """Set `engine` up for WAL, foreign keys, a busy timeout, and an explicit BEGIN at the start of every transaction; return it.

    With `begin="IMMEDIATE"` a transaction takes the write lock at its start, so that it may read, then write, and only ever waits.
    Read-only work opts out by `execution_options(alkstore_begin="DEFERRED")`. `synchronous="NORMAL"` can lose the last commits at a
    power cut, never the file's soundness; "FULL" loses none. Call it before the engine connects; again, it does nothing.

    Raises:
        InvalidOption: the engine is not for SQLite, or an option is none of those named.
    """
    if isinstance(engine, OptionEngine):
        raise InvalidOption("this engine came from execution_options(): prepare the engine that it was made from")
    if engine.dialect.name != "sqlite":
        raise InvalidOption(f"prepare_sqlite takes an engine for sqlite, not for {engine.dialect.name}")
    for option, value, allowed in (("begin", begin, ("IMMEDIATE", "DEFERRED")), ("synchronous", synchronous, ("NORMAL", "FULL"))):
        if value not in allowed:
            raise InvalidOption(f"{option} {value!r} is none of {', '.join(allowed)}")
    busy = int(positive("busy_timeout", busy_timeout).total_seconds() * 1000)
    if is_prepared(engine):
        return engine

    def set_up(connection: Any, _entry: ConnectionPoolEntry) -> None:
        take_over_transactions(connection)
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {busy}")
        _use_wal(cursor)
        cursor.execute(f"PRAGMA synchronous = {synchronous}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    def send_begin(connection: Connection) -> None:
        take_over_transactions(connection.connection.dbapi_connection)  # an AUTOCOMMIT option before may have left the driver's own way
        options = connection.get_execution_options()
        of_engine = getattr(connection.dialect, "_on_connect_isolation_level", None)
        if options.get("isolation_level", of_engine) != "AUTOCOMMIT":
            connection.exec_driver_sql(f"BEGIN {options.get('alkstore_begin', begin)}")

    event.listen(engine, "connect", set_up)
    event.listen(engine, "begin", send_begin)
    engine.update_execution_options(**{_PREPARED: True})
    return engine


def is_prepared(engine: Engine) -> bool:
    """Tell whether `prepare_sqlite` was applied to the engine."""
    return bool(engine.get_execution_options().get(_PREPARED))


def take_over_transactions(connection: Any) -> None:
    """Stop the driver from beginning and ending transactions by itself; statements do it."""
    if getattr(connection, "autocommit", None) is False:
        connection.autocommit = True
    connection.isolation_level = None


def _use_wal(cursor: Any) -> None:
    """Switch the file to WAL; while others open it too, SQLite answers "locked" at once, whatever the busy timeout."""
    end = time.monotonic() + LONGEST_BUSY
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > end:
                raise
            pause(0.02)
        else:
            return


def is_busy(error: OperationalError) -> bool:
    """Tell whether the database was busy with another writer, so that the statement did nothing and may be sent again."""
    return isinstance(error.orig, sqlite3.OperationalError) and getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def is_in_memory(url: URL) -> bool:
    """Tell whether each connection to `url` may be a database of its own."""
    return not url.database or ":memory:" in url.database or "mode=memory" in url.database or url.query.get("mode") == "memory"
