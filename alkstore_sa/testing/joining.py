"""A store that lives inside a test's own transaction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import URL, Connection, select
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
    refuse_unjoinable(session_or_connection, store)
    with store.parts.database.joining(lambda: connection_for(session_or_connection)):
        yield store


def refuse_unjoinable(tx: Tx, store: Store) -> None:
    """Look whether the store can join; raises as `joined`."""
    database = store.parts.database
    connection = connection_for(tx)
    if place(connection.engine.url) != place(store.engine.url):
        raise InvalidOption("this transaction is on another database than the store's: make both on one engine")
    seam_joined(connection, database.dialect, _CLAUSE)
    if database.dialect == "sqlite":
        connection.exec_driver_sql("SELECT 1")  # with the engine prepared, the driver is in a transaction from here on
        with connection.begin_nested() as probe:
            seam_joined(connection, database.dialect, _CLAUSE)
            probe.rollback()


def place(url: URL) -> URL:
    """Give the URL without its driver: what is the same for an Engine and an AsyncEngine on one database."""
    return url.set(drivername=url.get_backend_name())


def connection_for(tx: Tx) -> Connection:
    """Give the connection; a Session that is bound to one is not made to begin."""
    bind = tx.get_bind(clause=_CLAUSE) if isinstance(tx, (Session, scoped_session)) else None
    return bind if isinstance(bind, Connection) else connection_of(tx, _CLAUSE)
