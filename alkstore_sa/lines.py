"""How each PostgreSQL driver is spoken to for LISTEN: one small class a driver, on a connection that is nobody else's.

What belongs here: subscribing, and fetching what came. What does not: when to connect, probe or ring.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import Connection
from sqlalchemy.util.concurrency import await_only

from alkstore_sa.stop import Latch

ANSWER_SECONDS: Final = 5.0


class Line(Protocol):
    """A connection that notifications come through."""

    def fileno(self) -> int:
        """Give a descriptor that is readable once something came."""
        ...

    def listen(self, channel: str) -> None:
        """Subscribe to a channel."""
        ...

    def notify(self, channel: str) -> None:
        """Send an empty notification."""
        ...

    def heard(self) -> Iterable[tuple[str, str]]:
        """Give the channels and payloads of what came, without waiting; raises where the connection is gone."""
        ...


def line_on(connection: Connection) -> Line | None:
    """Give the line on an autocommit connection, None where its driver is none of those that are known here."""
    adapted: Any = connection.connection.dbapi_connection
    driver = getattr(adapted, "driver_connection", adapted)
    if isinstance(driver, psycopg.Connection):
        return PsycopgLine(driver)
    if isinstance(driver, psycopg.AsyncConnection):
        return AsyncPsycopgLine(driver)
    if type(driver).__module__.partition(".")[0] == "asyncpg":
        return AsyncpgLine(driver)
    return None


class PsycopgLine:
    """psycopg 3 in a thread."""

    def __init__(self, driver: "psycopg.Connection[Any]") -> None:
        self._driver = driver

    def fileno(self) -> int:
        """Give the connection's own descriptor."""
        return self._driver.fileno()

    def listen(self, channel: str) -> None:
        """Subscribe to a channel."""
        self._driver.execute(_listen(channel))

    def notify(self, channel: str) -> None:
        """Send an empty notification."""
        self._driver.execute("SELECT pg_notify(%s, '')", [channel])

    def heard(self) -> Iterable[tuple[str, str]]:
        """Give what came."""
        return [(one.channel, one.payload) for one in self._driver.notifies(timeout=0)]


class AsyncPsycopgLine:
    """psycopg 3 on an event loop."""

    def __init__(self, driver: "psycopg.AsyncConnection[Any]") -> None:
        self._driver = driver

    def fileno(self) -> int:
        """Give the connection's own descriptor."""
        return self._driver.fileno()

    def listen(self, channel: str) -> None:
        """Subscribe to a channel."""
        await_only(self._driver.execute(_listen(channel)))

    def notify(self, channel: str) -> None:
        """Send an empty notification."""
        await_only(self._driver.execute("SELECT pg_notify(%s, '')", [channel]))

    def heard(self) -> Iterable[tuple[str, str]]:
        """Give what came."""
        return await_only(self._fetched())

    async def _fetched(self) -> list[tuple[str, str]]:
        return [(one.channel, one.payload) async for one in self._driver.notifies(timeout=0)]


class AsyncpgLine:
    """asyncpg, which reads by itself and calls back."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._latch = Latch()
        self._came: deque[tuple[str, str]] = deque()
        self._ended = False
        driver.add_termination_listener(self._end)

    def fileno(self) -> int:
        """Give the descriptor of a latch that the callbacks set."""
        return self._latch.fileno()

    def listen(self, channel: str) -> None:
        """Subscribe to a channel."""
        await_only(self._driver.add_listener(channel, self._hear))

    def notify(self, channel: str) -> None:
        """Send an empty notification."""
        await_only(self._driver.execute("SELECT pg_notify($1, '')", channel, timeout=ANSWER_SECONDS))

    def heard(self) -> Iterable[tuple[str, str]]:
        """Give what came."""
        self._latch.clear()
        if self._ended:
            raise OSError("the connection ended")
        came = list(self._came)
        self._came.clear()
        return came

    def _hear(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        self._came.append((channel, str(payload)))
        self._latch.set()

    def _end(self, _connection: object) -> None:
        self._ended = True
        self._latch.set()


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))
