"""Checks of PostgreSQL: wakes and poolers, vacuum, and the plan of a claim; `horizon` has what keeps vacuum from its work."""

import json
from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import Connection, String, and_, column, func, select, table

from alkstore_sa.doctor.plans import INDEX, explained
from alkstore_sa.doctor.verdicts import Level, Verdict
from alkstore_sa.store import Store
from alkstore_sa.tables import metadata

LISTEN_SECONDS: Final = 3.0
QUEUE_SHARE: Final = 0.1
DEAD_SHARE: Final = 0.5
DEAD_ROWS: Final = 10_000
LARGE: Final = 10_000  # rows; below, a plan without an index may be the right one


def _relation(name: str, *columns: str) -> Any:
    return table(name, *(column(one) for one in columns))


_STATISTICS: Final = _relation(
    "pg_stat_user_tables", "relid", "relname", "schemaname", "n_live_tup", "n_dead_tup", "last_autovacuum", "last_vacuum"
)
_CLASSES: Final = _relation("pg_class", "oid", "reloptions", "reltuples")


def wakes(store: Store) -> Iterator[Verdict]:
    """Send a notification through the store's own connections, and see whether a pooler stands between."""
    with store.parts.database.open_apart() as listener, store.begin(single=True) as sender:
        driver: Any = listener.connection.dbapi_connection
        if not isinstance(driver, psycopg.Connection):
            return
        heard = _is_heard(driver, sender)
        full = sender.execute(select(func.pg_notification_queue_usage())).scalar_one()
        through_pooler = driver.info.backend_pid != listener.execute(select(func.pg_backend_pid())).scalar_one()
    if through_pooler and not heard:
        advice = "Give workers and schedulers a direct connection, or the pooler's session mode: until then they find work by polling."
        yield Verdict("pooler", Level.WARNING, "a pooler in transaction mode stands between", advice)
    elif through_pooler:
        yield Verdict("pooler", Level.OK, "a pooler stands between, and lets notifications through")
    else:
        yield Verdict("pooler", Level.OK, "the connection is direct")
    if heard:
        yield Verdict("wakes", Level.OK, "a notification came back at once")
    else:
        said = f"no notification came back within {LISTEN_SECONDS:g} s"
        yield Verdict("wakes", Level.WARNING, said, "Jobs are found by polling (5 s by default): a pooler, or a server that is overloaded?")
    if full > QUEUE_SHARE:
        said = f"{full:.0%} of the server's queue of notifications is in use: a session that listens has been in one transaction for long"
        yield Verdict("wakes", Level.WARNING, said, "End it: when the queue is full, every commit that wakes somebody fails.")


def _is_heard(driver: "psycopg.Connection[Any]", sender: Connection) -> bool:
    channel = f"alkstore_doctor_{uuid4().hex}"
    driver.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    sender.execute(select(func.pg_notify(channel, "")))
    return any(notification.channel == channel for notification in driver.notifies(timeout=LISTEN_SECONDS, stop_after=1))


def vacuum(store: Store) -> Iterator[Verdict]:
    """Look whether our tables are cleaned up."""
    schema = store.parts.database.schema
    place = func.current_schema() if schema is None else schema
    names = [one.name for one in metadata.sorted_tables]
    with store.begin(single=True) as bind:
        running = bind.execute(select(func.current_setting("autovacuum"))).scalar_one() == "on"
        rows = (
            bind.execute(
                select(_STATISTICS, _CLASSES.c.reloptions.cast(String).label("options"))
                .select_from(_STATISTICS.join(_CLASSES, _CLASSES.c.oid == _STATISTICS.c.relid))
                .where(and_(_STATISTICS.c.relname.in_(names), _STATISTICS.c.schemaname == place))
            )
            .mappings()
            .all()
        )
    if not running:
        yield Verdict("vacuum", Level.PROBLEM, "autovacuum is off on this server", "Set autovacuum = on, and reload.")
    found = not running
    for row in rows:
        for verdict in _of_table(row):
            found = True
            yield verdict
    if not found:
        jobs = next((row for row in rows if row["relname"] == "alkstore_job"), None)
        cleaned = None if jobs is None else jobs["last_autovacuum"]
        when = "not yet needed" if cleaned is None else f"last of alkstore_job {cleaned:%Y-%m-%d %H:%M:%S%z}"
        yield Verdict("vacuum", Level.OK, f"few dead rows in our tables; autovacuum: {when}")


def _of_table(row: Any) -> Iterator[Verdict]:
    name, options = row["relname"], row["options"] or ""
    if "autovacuum_enabled=false" in options or "autovacuum_enabled=off" in options:
        advice = f"ALTER TABLE {name} RESET (autovacuum_enabled)."
        yield Verdict("vacuum", Level.PROBLEM, f"autovacuum is switched off for {name}", advice)
    share = row["n_dead_tup"] / max(1, row["n_dead_tup"] + row["n_live_tup"])
    if row["n_dead_tup"] >= DEAD_ROWS and share >= DEAD_SHARE:
        last = "never" if row["last_autovacuum"] is None else f"{row['last_autovacuum']:%Y-%m-%d %H:%M:%S%z}"
        said = f"{share:.0%} of the rows of {name} are dead ({row['n_dead_tup']}); last autovacuum: {last}"
        advice = f"If something holds the horizon, end that first; then VACUUM {name}, and lower autovacuum_vacuum_scale_factor for it."
        yield Verdict("vacuum", Level.WARNING, said, advice)


def claim_plan(store: Store) -> Iterator[Verdict]:
    """Look whether a claim is one walk along its index."""
    schema = store.parts.database.schema
    with store.begin() as bind:
        jobs = bind.dialect.identifier_preparer.format_table(metadata.tables["alkstore_job"], use_schema=False)
        qualified = jobs if schema is None else f"{bind.dialect.identifier_preparer.quote_schema(schema)}.{jobs}"
        oid = func.to_regclass(qualified)
        rows = bind.execute(select(_CLASSES.c.reltuples).where(_CLASSES.c.oid == oid)).scalar_one()
        if rows < LARGE:  # a small table may well be read whole: ask what would be done if that were dear
            bind.execute(select(func.set_config("enable_seqscan", "off", True), func.set_config("enable_bitmapscan", "off", True)))
        plan = explained(store, bind, "EXPLAIN (FORMAT JSON)")[0][0]
    nodes = list(_nodes((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))
    if any(node.get("Index Name") == INDEX for node in nodes) and not any(node["Node Type"].endswith("Sort") for node in nodes):
        yield Verdict("claim plan", Level.OK, f"a claim walks the index {INDEX}")
        return
    said = f"a claim does not walk its index {INDEX}: {', '.join(node['Node Type'] for node in nodes)}"
    yield Verdict("claim plan", Level.WARNING, said, f"REINDEX INDEX CONCURRENTLY {INDEX} if it is invalid; then ANALYZE alkstore_job.")


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)
