"""Alembic owns the schema: the revisions run from here, and what a host's own Alembic needs to live beside them.

Nothing in the library calls this by itself; an operator does, through `alkstore upgrade` or Alembic's own command.
"""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, func, inspect, select
from sqlalchemy.schema import CreateSchema

from alkstore_sa.constructs import Span, UtcInstant
from alkstore_sa.engines import refuse_unsupported
from alkstore_sa.errors import InvalidOption
from alkstore_sa.sqlite import LONGEST_BUSY, prepare_sqlite
from alkstore_sa.tables import PREFIX, metadata, metadata_for
from alkstore_sa.verify import verify_schema

VERSION_TABLE: Final = "alkstore_version"
_UPGRADE_LOCK: Final = 0x616C6B_73746F72  # "alkstor": one upgrade of a database at a time
_in_this_process: Final = threading.Lock()  # Alembic keeps the environment that it runs in globals of its own

IncludeName: TypeAlias = Callable[[str | None, str, MutableMapping[str, str | None]], bool]


# -- the commands ---------------------------------------------------------------------------------------------------


def upgrade(engine: Engine, *, schema: str | None = None, revision: str = "head") -> None:
    """Bring the tables to `revision`, creating `schema` where it is missing; safe from several processes at once.

    One transaction. Tables that a newer version of this library has upgraded already are left as they are.

    Raises:
        InvalidOption: a database that is not supported, or tables that another history made.
        SchemaMissing, SchemaOutdated: a revision unknown to this version, and not all that it needs.
    """

    def act(connection: Connection, config: Config) -> None:
        if revision == "head" and not _is_known(_revision(connection, schema)):
            verify_schema(connection, schema)
        else:
            command.upgrade(config, revision)

    _run(engine, schema, act)


def downgrade(engine: Engine, *, schema: str | None = None, revision: str = "base") -> None:
    """Take the tables back to `revision` in one transaction; "base" drops them with all their rows.

    Raises:
        InvalidOption: a database that is not supported, or tables that another history made.
    """
    _run(engine, schema, lambda _connection, config: command.downgrade(config, revision))


def current(engine: Engine, *, schema: str | None = None) -> str | None:
    """Return the revision that the tables are at, or None where these revisions made none."""
    refuse_unsupported(engine, schema)
    with engine.connect() as connection:
        return _revision(connection, schema)


def check(engine: Engine, *, schema: str | None = None) -> list[str]:
    """Return in what the database differs from what this library makes, an empty list where it is the same.

    Raises:
        SchemaMissing, SchemaOutdated: it has less than this library needs.
    """
    refuse_unsupported(engine, schema)
    with engine.connect() as connection:
        verify_schema(connection, schema)
        options = configuration(schema, connection.dialect.default_schema_name)
        context = MigrationContext.configure(connection, opts=options)
        return [_described(difference) for difference in compare_metadata(context, options["target_metadata"])]


def made_elsewhere(engine: Engine, *, schema: str | None = None) -> bool:
    """Tell whether the tables are there, but not by these revisions: by a host's own history, or by `create_all`."""
    refuse_unsupported(engine, schema)
    with engine.connect() as connection:
        return _are_made_elsewhere(connection, schema)


def other_version_tables(engine: Engine, *, schema: str | None = None) -> list[str]:
    """Return the version tables of other Alembic histories, in the default schema and in `schema`."""
    with engine.connect() as connection:
        inspector = inspect(connection)
        return sorted(
            {
                name
                for place in (None, schema)
                for name in inspector.get_table_names(schema=place)
                if name.endswith("version") and name != VERSION_TABLE  # looked at by name first: a host may have thousands of tables
                if [column["name"] for column in inspector.get_columns(name, schema=place)] == ["version_num"]
            }
        )


# -- for a host's env.py --------------------------------------------------------------------------------------------


def include_name(host: IncludeName | None = None) -> IncludeName:
    """Make the `include_name` hook that keeps our tables out of a host's autogenerate, chained with the host's own hook."""

    def include(name: str | None, kind: str, parents: MutableMapping[str, str | None]) -> bool:
        if kind == "table" and name is not None and name.startswith(PREFIX):
            return False
        return host is None or host(name, kind, parents)

    return include


def render_item(kind: str, item: Any, context: AutogenContext) -> str | Literal[False]:
    """Render our column types in a host's revision as the plain types beneath them: a migration never imports our code.

    A hook for `context.configure`; a host that has one already calls this first and its own where this returns False.
    """
    sa = context.opts["sqlalchemy_module_prefix"] or ""
    if kind == "type" and isinstance(item, UtcInstant):
        return f"{sa}DateTime(timezone=True).with_variant({sa}BigInteger(), 'sqlite')"
    if kind == "type" and isinstance(item, Span):
        return f"{sa}BigInteger()"
    return False


# -- for our own env.py ---------------------------------------------------------------------------------------------


def configuration(schema: str | None, default_schema: str | None) -> dict[str, Any]:
    """Give what our own environment configures: its version table, and an autogenerate that sees our tables and nothing else."""

    def include_only_ours(name: str | None, kind: str, _parents: MutableMapping[str, str | None]) -> bool:
        if kind == "schema":  # Alembic calls the default schema None
            return name == (None if schema == default_schema else schema)
        return kind != "table" or (name is not None and name.startswith(PREFIX) and name != VERSION_TABLE)

    return {
        "target_metadata": metadata_for(schema=schema),
        "version_table": VERSION_TABLE,
        "version_table_schema": schema,
        "include_schemas": schema is not None,
        "include_name": include_only_ours,
        "compare_type": True,
        "render_item": render_item,
    }


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Give a connection fit for revisions: waiting on SQLite for other writers, READ COMMITTED on PostgreSQL.

    An older snapshot would not show what the upgrade that was waited for has made. The engine itself is left as it is.
    """
    if engine.dialect.name == "sqlite":
        engine = create_engine(engine.url, pool=engine.pool.recreate())
        prepare_sqlite(engine, busy_timeout=LONGEST_BUSY)
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()
    else:
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            yield connection


@contextmanager
def one_at_a_time(connection: Connection) -> Iterator[None]:
    """Hold the database for one upgrade: an advisory lock on PostgreSQL, the write lock on SQLite; commit at the end."""
    with connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
        yield


def create_schema(connection: Connection, schema: str) -> None:
    """Create `schema` where it is missing; where it is there, no right to create one is needed."""
    if not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))


def script_location() -> Path:
    """Return the folder of the environment and the revisions: inside the wheel, or beside a checkout."""
    here = Path(__file__).resolve().parent
    shipped = here / "_alembic"
    return shipped if shipped.is_dir() else here.parent / "alembic"


# -- beneath the commands -------------------------------------------------------------------------------------------


def _run(engine: Engine, schema: str | None, act: Callable[[Connection, Config], None]) -> None:
    refuse_unsupported(engine, schema)
    with _in_this_process, connected(engine) as connection:
        with connection.begin():
            if _are_made_elsewhere(connection, schema):
                raise InvalidOption(
                    f"the tables are here, but {VERSION_TABLE} does not know them: another Alembic history, or create_all, made them;"
                    " upgrade and downgrade them there"
                )
        config = _config()
        config.attributes.update(connection=connection, schema=schema)
        act(connection, config)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    return config


def _revision(connection: Connection, schema: str | None) -> str | None:
    options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
    with connection.begin():
        return MigrationContext.configure(connection, opts=options).get_current_revision()


def _is_known(revision: str | None) -> bool:
    scripts = ScriptDirectory.from_config(_config())
    return revision is None or revision in {script.revision for script in scripts.walk_revisions()}


def _are_made_elsewhere(connection: Connection, schema: str | None) -> bool:
    """Look at the tables first: whoever is making them right now commits the version with them."""
    names = set(inspect(connection).get_table_names(schema=schema))
    if names.isdisjoint(table.name for table in metadata.sorted_tables):
        return False
    options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision() is None


def _described(difference: Any) -> str:
    """Say one difference of Alembic's in words; it gives a tuple, or a list of tuples for one column."""
    if isinstance(difference, list):
        return "; ".join(_described(part) for part in difference)
    kind: str = difference[0]
    if kind.startswith("modify_"):
        return f"{kind.removeprefix('modify_').replace('_', ' ')} of column {difference[2]}.{difference[3]}"
    subject = difference[-1]
    table = getattr(subject, "table", None)
    name = subject.name if table is None else f"{table.name}.{subject.name}"
    return f"{kind.replace('remove_', 'extra ').replace('add_', 'missing ').replace('_', ' ')} {name}"
