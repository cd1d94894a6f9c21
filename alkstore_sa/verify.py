"""Is the schema in the database at least what this library needs? Looks only; newer columns and revisions are accepted."""

from sqlalchemy import Connection, inspect

from alkstore_sa.engines import upgrade_hint
from alkstore_sa.errors import SchemaMissing, SchemaOutdated
from alkstore_sa.tables import metadata


def verify_schema(connection: Connection, schema: str | None) -> None:
    """Compare the tables of `schema` with what this library needs, by name.

    Raises:
        SchemaMissing: a table is missing.
        SchemaOutdated: a column or an index is missing.
    """
    inspector = inspect(connection)
    present = set(inspector.get_table_names(schema=schema))
    place = "this database" if schema is None else f"schema {schema!r}"
    absent = [table.name for table in metadata.sorted_tables if table.name not in present]
    if absent:
        raise SchemaMissing(f"{place} has no table {', '.join(absent)}: {upgrade_hint(schema)}")
    for table in metadata.sorted_tables:
        columns = {column["name"] for column in inspector.get_columns(table.name, schema=schema)}
        indexes = {index["name"] for index in inspector.get_indexes(table.name, schema=schema)}
        missing = [f"column {column.name}" for column in table.columns if column.name not in columns]
        missing += sorted(f"index {index.name}" for index in table.indexes if index.name not in indexes)
        if missing:
            raise SchemaOutdated(f"table {table.name} in {place} lacks {', '.join(missing)}: {upgrade_hint(schema)}")
