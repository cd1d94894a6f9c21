"""The environment under which the revisions of alkstore_sa run, from a checkout and from the wheel.

Its own version table `alkstore_version` leaves a host application's history alone. `-x url=…` and `-x schema=…` say where;
`alkstore upgrade` hands its connection over instead.
"""

import os

from alembic import context
from sqlalchemy import Connection, create_engine
from sqlalchemy.schema import CreateSchema

from alkstore_sa.migrate import VERSION_TABLE, include_only_ours, one_at_a_time, render_item
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.tables import metadata_for

arguments = context.get_x_argument(as_dictionary=True)
schema = context.config.attributes.get("schema") or arguments.get("schema")
url = arguments.get("url") or context.config.get_main_option("sqlalchemy.url") or os.environ.get("ALKSTORE_URL")
shared = {
    "target_metadata": metadata_for(schema=schema),
    "version_table": VERSION_TABLE,
    "version_table_schema": schema,
    "include_schemas": schema is not None,
    "include_name": include_only_ours(schema),
    "compare_type": True,
    "render_item": render_item,
}


def run_on(connection: Connection) -> None:
    """Run the revisions in one transaction, while no other process runs them on this database."""
    with one_at_a_time(connection):
        if schema is not None:
            connection.execute(CreateSchema(schema, if_not_exists=True))
        revised = connection.execution_options(schema_translate_map={None: schema}) if schema is not None else connection
        context.configure(connection=revised, **shared)
        with context.begin_transaction():
            context.run_migrations()


given = context.config.attributes.get("connection")
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **shared)
    with context.begin_transaction():
        context.run_migrations()
elif given is not None:
    run_on(given)
elif url is None:
    raise SystemExit("say which database: alembic -x url=postgresql+psycopg://… upgrade head, or set ALKSTORE_URL")
else:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine)
    with engine.connect() as opened:
        run_on(opened)
    engine.dispose()
