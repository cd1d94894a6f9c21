"""The three ways in which an application brings its transaction: a Connection, a Session, and an AsyncSession through run_sync."""

import asyncio
import contextlib

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from alkstore_sa import prepare_sqlite

PAIRS = (
    ("sqlite", "connection"),
    ("sqlite", "session"),
    ("sqlite", "run_sync"),
    ("postgresql-18", "connection"),
    ("postgresql-18", "session"),
    ("postgresql-18", "run_sync"),
    ("postgresql-16", "session"),
    ("postgresql-15", "run_sync"),
)


class Caller:
    """One open transaction of the application's; `call(verb, …)` hands it to the verb first."""

    def __init__(self, tx):
        self.tx = tx

    def call(self, verb, *args, **kwargs):
        return verb(self.tx, *args, **kwargs)

    def sql(self, statement):
        result = self.tx.execute(text(statement))
        return result.all() if result.returns_rows else []

    def commit(self):
        self.tx.commit()

    def rollback(self):
        self.tx.rollback()

    def savepoint(self):
        return self.tx.begin_nested()


class AsyncCaller:
    def __init__(self, runner, session):
        self._runner, self._session = runner, session

    def call(self, verb, *args, **kwargs):
        return self._runner.run(self._session.run_sync(verb, *args, **kwargs))

    def sql(self, statement):
        result = self._runner.run(self._session.execute(text(statement)))
        return result.all() if result.returns_rows else []

    def commit(self):
        self._runner.run(self._session.commit())

    def rollback(self):
        self._runner.run(self._session.rollback())

    @contextlib.contextmanager
    def savepoint(self):
        nested = self._runner.run(self._begin_nested())
        try:
            yield
        except BaseException:
            self._runner.run(nested.rollback())
            raise
        self._runner.run(nested.commit())

    async def _begin_nested(self):
        return await self._session.begin_nested()


@contextlib.contextmanager
def calling(database, way):
    if way == "connection":
        with database.engine().connect() as connection:
            yield Caller(connection)
    elif way == "session":
        with Session(database.engine()) as session:
            yield Caller(session)
    else:
        with asyncio.Runner() as runner:
            engine = create_async_engine(database.url.replace("sqlite:", "sqlite+aiosqlite:"))
            if database.kind == "sqlite":
                prepare_sqlite(engine.sync_engine)
            session = AsyncSession(engine)
            try:
                yield AsyncCaller(runner, session)
            finally:
                runner.run(session.close())
                runner.run(engine.dispose())
