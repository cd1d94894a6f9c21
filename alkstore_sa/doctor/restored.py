"""After a backup was restored: job ids that were handed out since must not be handed out again."""

from typing import Final

from sqlalchemy import BigInteger, Connection, Executable, Text, column, func, insert, select, table, update

from alkstore_sa.store import Store
from alkstore_sa.tables import dead, jobs

GAP: Final = 1_000_000

_SEQUENCES: Final = table("sqlite_sequence", column("name", Text), column("seq", BigInteger))


def raise_ids(store: Store) -> int:
    """Let the ids of new jobs go on 1,000,000 above everything that the database knows of; return the last id that is passed over."""
    database = store.parts.database
    with store.begin() as bind:
        known = [value or 0 for value in bind.execute(database.statement(_highest)).one()]
        if database.dialect == "sqlite":
            return _raise_sqlite(bind, known)
        return _raise_postgresql(bind, known, database.schema)


def _highest() -> Executable:
    return select(select(func.max(jobs.c.id)).scalar_subquery(), select(func.max(dead.c.id)).scalar_subquery())


def _raise_sqlite(bind: Connection, known: list[int]) -> int:
    mine = _SEQUENCES.c.name == jobs.name
    before = bind.execute(select(_SEQUENCES.c.seq).where(mine)).scalar()
    last = max(*known, before or 0) + GAP
    if before is None:
        bind.execute(insert(_SEQUENCES).values(name=jobs.name, seq=last))
    else:
        bind.execute(update(_SEQUENCES).where(mine).values(seq=last))
    return last


def _raise_postgresql(bind: Connection, known: list[int], schema: str | None) -> int:
    quoted = bind.dialect.identifier_preparer
    name = quoted.quote(jobs.name) if schema is None else f"{quoted.quote_schema(schema)}.{quoted.quote(jobs.name)}"
    sequence = func.pg_get_serial_sequence(name, "id")
    last = max(*known, int(bind.execute(select(func.nextval(sequence))).scalar_one())) + GAP
    return int(bind.execute(select(func.setval(sequence, last))).scalar_one())
