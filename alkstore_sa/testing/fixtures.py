"""Fixtures for pytest: `pytest_plugins = ["alkstore_sa.testing.fixtures"]` in the top `conftest.py` loads them.

`alkstore_engine` is the one to override with the application's own engine; the others follow it.
"""

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from alkstore_sa import migrate
from alkstore_sa.engines import engine_for
from alkstore_sa.errors import SchemaMissing
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.store import Store
from alkstore_sa.testing.joining import joined


@pytest.fixture(scope="session")
def alkstore_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine on the database of `ALKSTORE_TEST_URL`, or on a new SQLite file of this test run (one per worker of pytest-xdist).

    Override it with a fixture of the same name that gives the application's own engine.
    """
    engine = engine_for(os.environ.get("ALKSTORE_TEST_URL") or f"sqlite:///{tmp_path_factory.mktemp('alkstore') / 'test.db'}")
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def alkstore_tables(alkstore_engine: Engine) -> None:
    """The tables: those that are there, be it by `metadata.create_all`, or else our own revisions, run once."""
    with Store(alkstore_engine) as store:
        try:
            store.verify()
        except SchemaMissing:
            migrate.upgrade(alkstore_engine)


@pytest.fixture
def alkstore_connection(alkstore_engine: Engine, alkstore_tables: None) -> Iterator[Connection]:
    """A connection in a transaction that is rolled back after the test."""
    del alkstore_tables
    with alkstore_engine.connect() as connection:
        transaction = connection.begin()
        yield connection
        if transaction.is_active:
            transaction.rollback()


@pytest.fixture
def alkstore_session(alkstore_connection: Connection) -> Iterator[Session]:
    """A Session in that transaction; its commits are savepoints."""
    with Session(alkstore_connection, join_transaction_mode="create_savepoint") as session:
        yield session


@pytest.fixture
def alkstore_store(alkstore_engine: Engine, alkstore_connection: Connection) -> Iterator[Store]:
    """A store whose every verb, in the test's own thread, runs in that transaction."""
    with Store(alkstore_engine) as store, joined(store, alkstore_connection):
        yield store
