"""Checks of SQLite: how the file and the application's engine are set up, and the plan of a claim."""

from collections.abc import Iterator
from typing import Final

from alkstore_sa.doctor.plans import INDEX, explained
from alkstore_sa.doctor.verdicts import Level, Verdict
from alkstore_sa.sqlite import is_prepared
from alkstore_sa.store import Store

PREPARE: Final = "Call `prepare_sqlite(engine)` once, before the engine connects"


def pragmas(store: Store, *, whole_application: bool) -> Iterator[Verdict]:
    """Look at the file's journal, and at the application's own engine where that is at hand."""
    with store.begin(single=True) as bind:
        mode = str(bind.exec_driver_sql("PRAGMA journal_mode").scalar_one()).lower()
    if mode == "wal":
        yield Verdict("journal", Level.OK, "the file is in WAL mode")
    else:
        yield Verdict("journal", Level.WARNING, f"the file is in journal mode {mode}", f"{PREPARE}: without WAL readers stop writers.")
    if not whole_application:
        yield Verdict("engine", Level.OK, "the application's engine is not at hand; --app shows how it is set up")
        return
    if not is_prepared(store.engine):
        yield Verdict("engine", Level.PROBLEM, "the application's engine is not prepared", f"{PREPARE}: without, savepoints commit.")
        return
    with store.engine.connect() as connection:
        busy = int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one())
    if busy < 1000:
        said = f"the application's engine waits only {busy} ms for other writers"
        yield Verdict("engine", Level.WARNING, said, "Give prepare_sqlite a busy_timeout of some seconds, and set no PRAGMA after it.")
    else:
        yield Verdict("engine", Level.OK, f"the application's engine is prepared, and waits {busy} ms for other writers")


def claim_plan(store: Store) -> Iterator[Verdict]:
    """Look whether a claim is one walk along its index."""
    with store.begin(single=True) as bind:
        steps = " / ".join(str(row[-1]) for row in explained(store, bind, "EXPLAIN QUERY PLAN"))
    if INDEX in steps and "TEMP B-TREE" not in steps:
        yield Verdict("claim plan", Level.OK, f"a claim walks the index {INDEX}")
    else:
        yield Verdict("claim plan", Level.WARNING, f"a claim does not walk its index: {steps}", "Run `ANALYZE`, then `alkstore check`.")
