"""A store that lives inside a test's own transaction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session, scoped_session

from alkstore_sa.errors import InvalidOption
from alkstore_sa.seam import Tx, connection_of
from alkstore_sa.seam import joined as seam_joined
from alkstore_sa.store import Store
from alkstore_sa.tables import jobs

_CLAUSE: Final = select(jobs.c.id)  # says to a Session which of its binds is meant; it is not run


@contextmanager
def joined(store: Store, session_or_connection: Tx) -> Iterator[Store]:
    """Let every verb of `store` run inside the given transaction, each in a savepoint of its own, until the block ends.

    What a verb commits, later verbs of this block see, and nobody else; when the test's transaction is rolled back, everything is
    gone. It holds for this context alone (this thread, this asyncio task): a worker in another thread goes on using connections of its
    own. A Session's connection is asked for anew at each verb. What a verb did since the application's own savepoint or Session began
    goes with that one's rollback, other than in production, where it would stay.

    Raises:
        TypeError: it is no Session, scoped_session or Connection.
        InvalidOption: it is on another database, in autocommit, or on a SQLite engine that `prepare_sqlite` did not prepare.
    """
    database = store.parts.database
    connection = _connection(session_or_connection)
    if connection.engine.url != store.engine.url:
        raise InvalidOption("this transaction is on another database than the store's: make both on one engine")
    seam_joined(connection, database.dialect, _CLAUSE)
    if database.dialect == "sqlite":
        connection.exec_driver_sql("SELECT 1")  # with the engine prepared, the driver is in a transaction from here on
        with connection.begin_nested() as probe:
            seam_joined(connection, database.dialect, _CLAUSE)
            probe.rollback()
    with database.joining(lambda: _connection(session_or_connection)):
        yield store


def _connection(tx: Tx) -> Connection:
    """Give the connection; a Session that is bound to one is not made to begin."""
    bind = tx.get_bind(clause=_CLAUSE) if isinstance(tx, (Session, scoped_session)) else None
    return bind if isinstance(bind, Connection) else connection_of(tx, _CLAUSE)
