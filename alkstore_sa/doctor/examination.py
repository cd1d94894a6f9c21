"""The order of the checks, and what stops them: without a connection or the tables there is nothing more to look at."""

from collections.abc import Callable, Iterable

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alkstore_sa.doctor import general, horizon, postgresql, sqlite
from alkstore_sa.doctor.verdicts import Level, Limits, Verdict
from alkstore_sa.errors import SchemaMissing
from alkstore_sa.store import Store


def examine(store: Store, limits: Limits, *, whole_application: bool) -> list[Verdict]:
    """Look at everything; `whole_application`: the store's engine is the application's own, so that its set-up counts."""
    try:
        verdicts = [general.connection(store)]
    except (DBAPIError, PoolTimeout) as error:
        said = (str(getattr(error, "orig", None) or error).strip() or type(error).__name__).splitlines()[0]
        return [Verdict("connection", Level.PROBLEM, said, "Is the database up, and is this its URL?")]
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


def _checks(store: Store, limits: Limits, *, whole_application: bool) -> list[Callable[[], Iterable[Verdict]]]:
    own: list[Callable[[], Iterable[Verdict]]]
    if store.engine.dialect.name == "postgresql":
        own = [
            lambda: postgresql.wakes(store),
            lambda: horizon.pins(store, limits),
            lambda: postgresql.vacuum(store),
            lambda: postgresql.claim_plan(store),
        ]
    else:
        own = [lambda: sqlite.pragmas(store, whole_application=whole_application), lambda: sqlite.claim_plan(store)]
    shared: list[Callable[[], Iterable[Verdict]]] = [
        lambda: general.waiting(store, limits),
        lambda: general.schedules(store),
        lambda: general.workers(store),
    ]
    return [lambda: general.clock(store), *own, *shared]


def _guarded(check: Callable[[], Iterable[Verdict]]) -> list[Verdict]:
    try:
        return list(check())
    except (DBAPIError, PoolTimeout) as error:
        said = (str(getattr(error, "orig", None) or error).strip() or type(error).__name__).splitlines()[0]
        return [Verdict("check", Level.WARNING, f"a check could not be made: {said}", "Grant this role the right to look, or use another.")]
