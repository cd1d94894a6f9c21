"""The twin of an application's engine: the same recipe of connections, in autocommit, and a small pool of its own.

What belongs here: how its connections are made. What does not: what is done on them.
"""

import os
import socket
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Engine, Pool, event
from sqlalchemy.pool import AssertionPool, ConnectionPoolEntry, QueuePool, StaticPool

from alkstore_sa.errors import InvalidOption
from alkstore_sa.sqlite import take_over_transactions

STRICTER: Final = "alkstore_stricter"  # the server's default isolation is not READ COMMITTED, so that autocommit is no option
_KEPT: Final = 5  # connections that stay open when nobody uses them


def twin_pool(engine: Engine) -> Pool:
    """Make a pool by the recipe of the application's, for connections of our own.

    Raises:
        InvalidOption: the application's pool has one connection for all threads.
    """
    pool = engine.pool.recreate()
    if isinstance(pool, (StaticPool, AssertionPool)):
        raise InvalidOption(f"{type(pool).__name__} gives all threads one connection, but a store needs one for each of its transactions")
    if isinstance(pool, QueuePool):
        pool = _small(pool)
    # what a listener of the application's left open on its new connection is ended before autocommit is asked for
    event.listen(pool, "connect", lambda connection, _entry: connection.commit())
    return pool


def _small(pool: QueuePool) -> QueuePool:
    """Make a pool that lends as many connections as the application's, but keeps few of them when they come back."""
    kept = min(_KEPT, pool.size()) or _KEPT
    most = pool.size() + pool._max_overflow if pool.size() and pool._max_overflow >= 0 else -1  # noqa: SLF001 - a recipe has no public names
    return type(pool)(
        pool._creator,  # noqa: SLF001
        pool_size=kept,
        max_overflow=most - kept if most >= 0 else -1,
        timeout=pool._timeout,  # noqa: SLF001
        recycle=pool._recycle,  # noqa: SLF001
        pre_ping=pool._pre_ping,  # noqa: SLF001
        use_lifo=True,
        dialect=pool._dialect,  # noqa: SLF001
        _dispatch=pool.dispatch,
    )


def prepared_twin(twin: Engine) -> Engine:
    """Set up an autocommit engine on which transactions of our own are begun by statement; return it."""
    event.listen(twin, "connect", _take_over_sqlite if twin.dialect.name == "sqlite" else _take_note)
    return twin


def _take_over_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:
    take_over_transactions(connection)
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 1000")  # short, so that a signal is heard; the engine goes on from there
    cursor.close()


def _take_note(connection: Any, entry: ConnectionPoolEntry) -> None:
    driver = getattr(connection, "driver_connection", connection)  # an asynchronous driver's is adapted
    _fail_fast_when_unreachable(driver)
    cursor = connection.cursor()
    cursor.execute("SHOW default_transaction_isolation")
    entry.info[STRICTER] = cursor.fetchone()[0] != "read committed"
    cursor.close()


def _fail_fast_when_unreachable(driver: Any) -> None:
    """Let the kernel report a peer that has gone silently within half a minute, where it can be told to."""
    with suppress(OSError, AttributeError), socket.socket(fileno=os.dup(_socket_of(driver).fileno())) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def _socket_of(driver: Any) -> Any:
    return driver if hasattr(driver, "fileno") else driver._transport.get_extra_info("socket")  # noqa: SLF001 - asyncpg names it nowhere
