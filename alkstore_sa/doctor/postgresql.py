"""Checks of PostgreSQL: wakes and poolers, what pins the horizon, vacuum, and the plan of a claim."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import Connection, String, and_, column, extract, func, or_, select, table

from alkstore_sa.doctor.plans import INDEX, explained
from alkstore_sa.doctor.verdicts import Level, Limits, Verdict
from alkstore_sa.store import Store
from alkstore_sa.tables import metadata

LISTEN_SECONDS: Final = 3.0
DEAD_SHARE: Final = 0.5
DEAD_ROWS: Final = 10_000
LARGE: Final = 10_000  # rows; below, a plan without an index may be the right one


def _relation(name: str, *columns: str) -> Any:
    return table(name, *(column(one) for one in columns))


_ACTIVITY: Final = _relation(
    "pg_stat_activity", "pid", "datname", "application_name", "backend_type", "xact_start", "query_start", "backend_xmin", "backend_xid"
)
_PREPARED: Final = _relation("pg_prepared_xacts", "gid", "prepared", "database")
_SLOTS: Final = _relation("pg_replication_slots", "slot_name", "xmin", "catalog_xmin", "active")
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


def _is_heard(driver: "psycopg.Connection[Any]", sender: Connection) -> bool:
    channel = f"alkstore_doctor_{uuid4().hex}"
    driver.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    sender.execute(select(func.pg_notify(channel, "")))
    return any(notification.channel == channel for notification in driver.notifies(timeout=LISTEN_SECONDS, stop_after=1))


def horizon(store: Store, limits: Limits) -> Iterator[Verdict]:
    """Find what keeps the server from cleaning up after finished jobs: open and prepared transactions, forgotten slots."""
    with store.begin(single=True) as bind:
        oldest = bind.execute(_oldest_transaction()).mappings().first()
        prepared = bind.execute(_oldest_prepared()).mappings().first()
        slots = bind.execute(
            select(_SLOTS.c.slot_name, _SLOTS.c.xmin.is_not(None))
            .where(~_SLOTS.c.active, or_(_SLOTS.c.xmin.is_not(None), _SLOTS.c.catalog_xmin.is_not(None)))
            .order_by(_SLOTS.c.slot_name)
        ).all()
    level, said = Level.OK, "no transaction is open for long"
    if oldest is not None:
        age = timedelta(seconds=float(oldest["age"]))
        level = limits.level(age, limits.transaction)
        said = (
            f"the oldest transaction is open for {age.total_seconds():.0f} s: pid {oldest['pid']} of"
            f" {oldest['application_name'] or 'an unnamed application'}, whose last query began {float(oldest['idle']):.0f} s ago"
        )
    advice = (
        ""
        if level is Level.OK or oldest is None
        else f"While it is open no finished job is cleaned up: end it, by SELECT pg_terminate_backend({oldest['pid']}) at the worst."
    )
    yield Verdict("horizon", level, said, advice)
    if prepared is not None and (age := timedelta(seconds=float(prepared["age"]))) >= limits.transaction:
        said = f"prepared transaction {prepared['gid']!r} waits for {age.total_seconds():.0f} s"
        yield Verdict("horizon", limits.level(age, limits.transaction), said, "COMMIT PREPARED or ROLLBACK PREPARED it.")
    for name, is_of_rows in slots:  # a logical slot holds the catalogs' horizon alone
        kept = "keeps dead rows from being cleaned up" if is_of_rows else "keeps WAL and the catalogs' dead rows"
        said = f"replication slot {name!r} is not in use, and {kept}"
        yield Verdict("horizon", Level.WARNING, said, f"Connect its consumer, or SELECT pg_drop_replication_slot({name!r}).")


def _oldest_transaction() -> Any:
    now = func.clock_timestamp()
    return (
        select(
            _ACTIVITY.c.pid,
            _ACTIVITY.c.application_name,
            extract("epoch", now - _ACTIVITY.c.xact_start).label("age"),
            extract("epoch", now - _ACTIVITY.c.query_start).label("idle"),
        )
        .where(
            _ACTIVITY.c.pid != func.pg_backend_pid(),
            _ACTIVITY.c.datname == func.current_database(),
            _ACTIVITY.c.backend_type.in_(["client backend", "walsender"]),
            _ACTIVITY.c.xact_start.is_not(None),
        )
        .order_by(_ACTIVITY.c.xact_start)
        .limit(1)
    )


def _oldest_prepared() -> Any:
    age = extract("epoch", func.clock_timestamp() - _PREPARED.c.prepared).label("age")
    return select(_PREPARED.c.gid, age).where(_PREPARED.c.database == func.current_database()).order_by(_PREPARED.c.prepared).limit(1)


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
