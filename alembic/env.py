"""The environment under which the revisions of alkstore_sa run, from a checkout and from the wheel.

Its own version table `alkstore_version` leaves a host application's history alone. `-x url=…` and `-x schema=…` say where;
`alkstore upgrade` hands its connection over instead.
"""

import os

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, func, make_url, select
from sqlalchemy.schema import CreateSchema

from alkstore_sa.engines import engine_for, refuse_unsupported
from alkstore_sa.errors import AlkstoreError
from alkstore_sa.migrate import configuration, connected, create_schema, one_at_a_time

given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    url, schema = None, context.config.attributes["schema"]
else:
    arguments = context.get_x_argument(as_dictionary=True)
    url = arguments.get("url") or os.environ.get("ALKSTORE_URL")
    schema = arguments.get("schema") or os.environ.get("ALKSTORE_SCHEMA") or None


def moves() -> bool:
    """Tell whether the command upgrades, downgrades or stamps, or only looks."""
    try:
        context.get_revision_argument()
    except KeyError:
        return False
    return True


def run_on(connection: Connection) -> None:
    """Run the revisions in one transaction, while no other process runs them on this database."""
    with one_at_a_time(connection):
        if schema is not None:
            if moves():
                create_schema(connection, schema)
            connection = connection.execution_options(schema_translate_map={None: schema})
        context.configure(connection=connection, **configuration(schema, connection.dialect.default_schema_name))
        with context.begin_transaction():
            context.run_migrations()


def run_on_url(url: str) -> None:
    """Run the revisions on a database of Alembic's own command line."""
    engine = engine_for(url)
    refuse_unsupported(engine, schema)
    with connected(engine) as connection:
        run_on(connection)
    engine.dispose()


def write_sql(url: str) -> None:
    """Write the SQL of the revisions (`--sql`); no map applies to it, so the search path says where."""
    context.configure(url=url, literal_binds=True, **configuration(schema, None))
    with context.begin_transaction():
        if schema is not None:
            quoted = make_url(url).get_dialect()().identifier_preparer.quote_schema(schema)
            context.execute(CreateSchema(schema, if_not_exists=True))
            context.execute(select(func.set_config("search_path", quoted, True)))
        context.run_migrations()


if given is not None:
    run_on(given)
elif url is None:
    raise CommandError("say which database: alembic -x url=postgresql+psycopg://… upgrade head, or set ALKSTORE_URL")
elif context.is_offline_mode():
    write_sql(url)
else:
    try:
        run_on_url(url)
    except AlkstoreError as error:
        raise CommandError(str(error)) from error
