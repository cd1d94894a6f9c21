"""A database of a test's own, its rows seen and changed over an independent connection."""

import contextlib
import shutil
import tempfile
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from alkstore_sa import Store, migrate, prepare_sqlite

TEMPLATE = "alkstore_template"


def make_template(server_url):
    admin(server_url, f"CREATE DATABASE {TEMPLATE}")
    engine = create_engine(make_url(server_url).set(database=TEMPLATE), poolclass=NullPool)
    migrate.upgrade(engine)
    engine.dispose()


def admin(server_url, *statements):
    engine = create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@cache
def sqlite_template():
    folder = Path(tempfile.mkdtemp(prefix="alkstore-sqlite-"))
    engine = create_engine(f"sqlite:///{folder / 'template.db'}")
    migrate.upgrade(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
    engine.dispose()
    return folder / "template.db"


@dataclass
class TestDatabase:
    __test__ = False

    url: str
    kind: str
    server_url: str | None = None
    engines: list[Engine] = field(default_factory=list)
    _observer: Engine | None = None

    @classmethod
    def sqlite(cls, path):
        shutil.copy(sqlite_template(), path)
        return cls(f"sqlite:///{path}", "sqlite")

    @classmethod
    def postgresql(cls, server_url, template=TEMPLATE):
        name = f"t_{uuid.uuid4().hex}"
        admin(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
        return cls(str(make_url(server_url).set(database=name)), "postgresql", server_url)

    def engine(self, *, prepared=True, **options):
        """An engine of the application's own."""
        made = create_engine(self.url, **options)
        if self.kind == "sqlite" and prepared:
            prepare_sqlite(made)
        self.engines.append(made)
        return made

    @contextlib.contextmanager
    def store(self, **options):
        with Store(self.engine(), **options) as made:
            yield made

    @property
    def observer(self):
        if self._observer is None:
            pooled = {"poolclass": NullPool} if self.kind == "sqlite" else {"pool_pre_ping": True, "pool_size": 1}
            self._observer = self.engine(isolation_level="AUTOCOMMIT", prepared=False, **pooled)
        return self._observer

    @property
    def name(self):
        return make_url(self.url).database

    def sql(self, statement, **values):
        """Run a statement over an independent connection; the rows, if it gives any."""
        with self.observer.connect() as connection:
            result = connection.execute(text(statement), values)
            return result.all() if result.returns_rows else []

    def now(self, offset_seconds=0.0):
        """SQL for the database's now plus so many seconds."""
        if self.kind == "sqlite":
            return f"(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + {int(offset_seconds * 1_000_000)})"
        return f"(clock_timestamp() + {offset_seconds} * INTERVAL '1 second')"

    def count(self, table="alkstore_job"):
        return self.sql(f"SELECT count(*) FROM {table}")[0][0]

    def drop(self):
        for engine in self.engines:
            engine.dispose()
        if self.server_url is not None:
            admin(self.server_url, f"DROP DATABASE {make_url(self.url).database} WITH (FORCE)")
