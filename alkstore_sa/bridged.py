"""Databases behind an AsyncEngine: the same transactions, run across the bridge; and one that has none of its own.

What belongs here: what an asynchronous driver does otherwise than a blocking one. What does not: verbs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from alkstore_sa.bridge import Beside, BesideOnLoop
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption
from alkstore_sa.twins import prepared_twin, twin_pool

SUPPORTED_ASYNC: Final = "postgresql+psycopg://, postgresql+asyncpg:// or sqlite+aiosqlite:///"


def async_engine_for(url: URL | str) -> AsyncEngine:
    """Make an engine for a database URL, of which no error repeats more than the name of the driver.

    Raises:
        InvalidOption: it is no URL, or its database or driver is not supported, not asynchronous or not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidOption(f"this is no database URL; use {SUPPORTED_ASYNC}") from None  # the cause may quote the URL, password included
    if parsed.get_backend_name() not in ("postgresql", "sqlite"):
        raise InvalidOption(f"{parsed.get_backend_name()} is not supported; use {SUPPORTED_ASYNC}")
    try:
        return create_async_engine(parsed)
    except (InvalidRequestError, NoSuchModuleError):
        raise InvalidOption(f"{parsed.drivername} is no asynchronous driver; use {SUPPORTED_ASYNC}") from None
    except ArgumentError:
        raise InvalidOption(f"this is no database URL of {parsed.drivername}; use {SUPPORTED_ASYNC}") from None
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"the driver of {parsed.drivername} is not installed ({error.name}): pip install 'alkstore-sa[asyncio]'"
        ) from error


class BridgedDatabase(Database):
    """A database whose connections are an AsyncEngine's; only to be used across the bridge."""

    def __init__(self, engine: AsyncEngine, *, schema: str | None, owned: bool) -> None:
        self._is_ours: Final = owned
        super().__init__(engine.sync_engine, schema=schema)

    def beside(self, function: Callable[[], object], name: str) -> Beside:
        """Start what runs beside its caller, on the caller's loop."""
        return BesideOnLoop(function, name)

    def _connect(self) -> Connection:
        with _told():
            return super()._connect()

    def _engine(self, bind: Engine | URL | str) -> tuple[Engine, bool]:
        if not isinstance(bind, Engine):
            raise TypeError(f"{type(bind).__name__} is no Engine")
        return bind, self._is_ours

    def _made_twin(self) -> Engine:
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "hide_parameters": True, "echo": self.engine.echo}
        twin = create_async_engine(self.engine.url, pool=twin_pool(self.engine), **options)
        return prepared_twin(twin.sync_engine)


class JoiningDatabase(BridgedDatabase):
    """What a database is to code that `run_sync` runs: the caller's transaction is the only one there."""

    @contextmanager
    def begin(self, *, single: bool = False, limit: float | None = None) -> Iterator[Connection]:  # noqa: ARG002
        """Refuse: a transaction of the store's own is the async surface's to begin.

        Raises:
            InvalidOption: always.
        """
        raise InvalidOption(
            "within run_sync only the verbs with _tx are to be had, which join the caller's transaction: await the AsyncStore's own verb"
        )
        yield  # pragma: no cover - what makes it a generator

    def _connect(self) -> Connection:
        with self.begin() as connection:
            return connection


@contextmanager
def _told() -> Iterator[None]:
    """Let a database that cannot be reached be told as SQLAlchemy tells it of other drivers: asyncpg's own errors come through it bare."""
    try:
        yield
    except SQLAlchemyError:
        raise
    except Exception as error:
        if isinstance(error, (OSError, TimeoutError)) or type(error).__module__.startswith("asyncpg"):
            raise OperationalError(None, None, error, connection_invalidated=True) from error
        raise
