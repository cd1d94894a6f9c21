"""Alembic owns the schema: the revisions run from here, and what a host's own Alembic needs to live beside them.

Nothing in the library calls this by itself; an operator does, through `alkstore upgrade` or Alembic's own command.
"""

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, func, inspect, select

from alkstore_sa.constructs import Span, UtcInstant
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.tables import PREFIX, metadata_for
from alkstore_sa.verify import verify_schema

VERSION_TABLE: Final = "alkstore_version"
_UPGRADE_LOCK: Final = 0x616C6B_73746F72  # "alkstor": one upgrade of a database at a time

IncludeName: TypeAlias = Callable[[str | None, str, MutableMapping[str, str | None]], bool]


def upgrade(engine: Engine, *, schema: str | None = None, revision: str = "head") -> None:
    """Bring the tables to `revision`, creating `schema` where it is missing; safe from several processes at once."""
    _run(engine, schema, lambda config: command.upgrade(config, revision))


def downgrade(engine: Engine, *, schema: str | None = None, revision: str = "base") -> None:
    """Take the tables back to `revision`; "base" drops them with all their rows."""
    _run(engine, schema, lambda config: command.downgrade(config, revision))


def current(engine: Engine, *, schema: str | None = None) -> str | None:
    """Return the revision that the tables are at, or None where they were never made by these revisions."""
    with engine.connect() as connection:
        return MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "version_table_schema": schema}
        ).get_current_revision()


def check(engine: Engine, *, schema: str | None = None) -> list[str]:
    """Return what the database has more than this library knows, an empty list where it is the same.

    Raises:
        SchemaMissing, SchemaOutdated: it has less.
    """
    with engine.connect() as connection:
        verify_schema(connection, schema)
        options = {"include_schemas": schema is not None, "include_name": include_only_ours(schema), "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        return [str(difference) for difference in compare_metadata(context, metadata_for(schema=schema))]


def other_version_tables(engine: Engine) -> list[str]:
    """Return the version tables of other Alembic histories in the database's default schema."""
    return [name for name in inspect(engine).get_table_names() if name == "alembic_version"]


def include_name(host: IncludeName | None = None) -> IncludeName:
    """Make the `include_name` hook that keeps our tables out of a host's autogenerate, chained with the host's own hook."""

    def include(name: str | None, kind: str, parents: MutableMapping[str, str | None]) -> bool:
        if kind == "table" and name is not None and name.startswith(PREFIX):
            return False
        return host is None or host(name, kind, parents)

    return include


def include_only_ours(schema: str | None) -> IncludeName:
    """Make the `include_name` hook under which autogenerate sees our tables in `schema` and nothing else."""

    def include(name: str | None, kind: str, _parents: MutableMapping[str, str | None]) -> bool:
        if kind == "schema":
            return name == schema
        return kind != "table" or (name is not None and name.startswith(PREFIX) and name != VERSION_TABLE)

    return include


def render_item(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Render our column types in a host's revision as the plain types beneath them: a migration never imports our code."""
    if kind == "type" and isinstance(item, UtcInstant):
        return 'sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")'
    if kind == "type" and isinstance(item, Span):
        return "sa.BigInteger()"
    return False


@contextlib.contextmanager
def one_at_a_time(connection: Connection) -> Iterator[None]:
    """Hold the database for one upgrade: an advisory lock on PostgreSQL, the write lock on SQLite; commit at the end."""
    with connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
        yield


def _run(engine: Engine, schema: str | None, act: Callable[[Config], None]) -> None:
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine)
    config = Config()
    config.set_main_option("script_location", str(script_location()))
    with engine.connect() as connection:
        config.attributes.update(connection=connection, schema=schema)
        act(config)


def script_location() -> Path:
    """Return the folder of the environment and the revisions: inside the wheel, or beside a checkout."""
    here = Path(__file__).resolve().parent
    shipped = here / "_alembic"
    return shipped if shipped.is_dir() else here.parent / "alembic"
