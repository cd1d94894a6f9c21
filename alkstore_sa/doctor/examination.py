"""The order of the checks, and what stops them: without a connection or the tables there is nothing more to look at."""

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alkstore_sa.doctor import general, horizon, postgresql, sqlite
from alkstore_sa.doctor.verdicts import Level, Limits, Verdict
from alkstore_sa.errors import SchemaMissing
from alkstore_sa.store import Store

Check: TypeAlias = partial[Iterator[Verdict]]


def examine(store: Store, limits: Limits, *, whole_application: bool) -> list[Verdict]:
    """Look at everything; `whole_application`: the store's engine is the application's own, so that its set-up counts."""
    try:
        verdicts = [general.connection(store)]
    except (DBAPIError, PoolTimeout) as error:
        return [Verdict("connection", Level.PROBLEM, _first_line(error), "Is the database up, and is this its URL?")]
    try:
        store.verify()
    except SchemaMissing as error:
        return [*verdicts, Verdict("schema", Level.PROBLEM, str(error).split(": run", 1)[0], _advice(error))]
    verdicts.append(Verdict("schema", Level.OK, "every table, column and index that this version needs is there"))
    for check in _checks(store, limits, whole_application=whole_application):
        verdicts += _guarded(check)
    return verdicts


def _advice(error: SchemaMissing) -> str:
    _, _, command = str(error).partition(": run ")
    return f"Run {command}." if command else "Run `alkstore upgrade`."


def _checks(store: Store, limits: Limits, *, whole_application: bool) -> list[Check]:
    own: list[Check]
    if store.engine.dialect.name == "postgresql":
        own = [
            partial(postgresql.wakes, store),
            partial(horizon.pins, store, limits),
            partial(postgresql.vacuum, store),
            partial(postgresql.claim_plan, store),
        ]
    else:
        own = [partial(sqlite.pragmas, store, whole_application=whole_application), partial(sqlite.claim_plan, store)]
    shared: list[Check] = [partial(general.waiting, store, limits), partial(general.schedules, store), partial(general.workers, store)]
    return [partial(general.clock, store), *own, *shared]


def _guarded(check: Check) -> list[Verdict]:
    """Make one check, and keep what it found before it failed."""
    found: list[Verdict] = []
    name = check.func.__name__.replace("_", " ")
    try:
        found.extend(check())
    except (DBAPIError, PoolTimeout) as error:
        said = f"the check of {name} could not be made: {_first_line(error)}"
        found.append(Verdict("check", Level.WARNING, said, "Grant this role the right to look, or use another."))
    except Exception as error:  # noqa: BLE001 - rows that were changed by hand fail in any way, and the other checks still count
        said = f"the check of {name} failed: {type(error).__name__}: {_first_line(error)}"
        found.append(Verdict("check", Level.PROBLEM, said, "Mend the row that it stumbles over; if none is damaged, report it."))
    return found


def _first_line(error: Exception) -> str:
    return (str(getattr(error, "orig", None) or error).strip() or type(error).__name__).splitlines()[0]
