"""What keeps a PostgreSQL server from cleaning up after finished jobs: sessions, prepared transactions, standbys, forgotten slots.

A session keeps rows by the oldest snapshot or the id of its transaction; an open transaction that has neither keeps nothing.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection, and_, column, extract, func, or_, select, table

from alkstore_sa.doctor.verdicts import Level, Limits, Verdict
from alkstore_sa.store import Store

_ACTIVITY_COLUMNS: Final = (
    "pid",
    "leader_pid",
    "usesysid",
    "datname",
    "application_name",
    "backend_type",
    "xact_start",
    "query_start",
    "backend_xmin",
    "backend_xid",
)
_ACTIVITY: Final = table("pg_stat_activity", *map(column, _ACTIVITY_COLUMNS))
_VACUUMS: Final = table("pg_stat_progress_vacuum", column("pid"))
_STANDBYS: Final = table("pg_stat_replication", column("pid"))
_PREPARED: Final = table("pg_prepared_xacts", *map(column, ("gid", "prepared", "database")))
_SLOTS: Final = table("pg_replication_slots", *map(column, ("slot_name", "xmin", "catalog_xmin", "active")))


def pins(store: Store, limits: Limits) -> Iterator[Verdict]:
    """Find what keeps finished jobs from being cleaned up, and say where this role cannot see it."""
    with store.begin(single=True) as bind:
        masked = list(_masked(bind))
        oldest = bind.execute(_oldest_pin()).mappings().first()
        others = [*_prepared(bind, limits), *_standbys(bind, limits), *_slots(bind)]
    session = _of_session(oldest, limits)
    if session.level is not Level.OK or not masked:  # of what is masked nobody knows that it is well
        yield session
    yield from masked
    yield from others


def _of_session(oldest: Any, limits: Limits) -> Verdict:
    if oldest is None:
        return Verdict("horizon", Level.OK, "no session keeps dead rows from being cleaned up")
    age = timedelta(seconds=float(oldest["age"]))
    level = limits.level(age, limits.transaction)
    said = (
        f"the oldest transaction that keeps dead rows is open for {age.total_seconds():.0f} s: pid {oldest['pid']} of"
        f" {oldest['application_name'] or 'an unnamed application'}, whose last query began {float(oldest['idle']):.0f} s ago"
    )
    advice = f"While it is open no finished job is cleaned up: end it, by SELECT pg_terminate_backend({oldest['pid']}) at the worst."
    return Verdict("horizon", level, said, "" if level is Level.OK else advice)


def _oldest_pin() -> Any:
    """Order by how much is held back. Who only looks shows the id of the oldest writer as well, so that this one comes first."""
    now = func.clock_timestamp()
    by_snapshot, by_id = func.age(_ACTIVITY.c.backend_xmin), func.age(_ACTIVITY.c.backend_xid)
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
            _ACTIVITY.c.leader_pid.is_(None),
            _ACTIVITY.c.backend_type != "autovacuum worker",
            _ACTIVITY.c.pid.not_in(select(_VACUUMS.c.pid)),  # the server passes over the snapshot of a VACUUM
            _ACTIVITY.c.xact_start.is_not(None),
            or_(_ACTIVITY.c.backend_xmin.is_not(None), _ACTIVITY.c.backend_xid.is_not(None)),
        )
        .order_by(func.greatest(by_snapshot, by_id).desc(), by_id.desc().nulls_last(), _ACTIVITY.c.xact_start)
        .limit(1)
    )


def _masked(bind: Connection) -> Iterator[Verdict]:
    standbys = select(_STANDBYS.c.pid)
    of_others = and_(_ACTIVITY.c.usesysid.is_not(None), _ACTIVITY.c.backend_type.is_(None))
    here = or_(_ACTIVITY.c.datname == func.current_database(), _ACTIVITY.c.pid.in_(standbys))
    count = select(func.count(), func.quote_ident(func.current_user())).select_from(_ACTIVITY).where(of_others, here)
    number, role = bind.execute(count).one()
    if number:
        said = f"{number} sessions of other roles do not show this one what they keep from being cleaned up"
        yield Verdict("horizon", Level.WARNING, said, f"GRANT pg_read_all_stats TO {role} (or pg_monitor), or look as a role that has it.")


def _prepared(bind: Connection, limits: Limits) -> Iterator[Verdict]:
    age = extract("epoch", func.clock_timestamp() - _PREPARED.c.prepared).label("age")
    waiting = select(_PREPARED.c.gid, age).where(_PREPARED.c.database == func.current_database()).order_by(_PREPARED.c.prepared).limit(1)
    for gid, seconds in bind.execute(waiting):
        level = limits.level(timedelta(seconds=float(seconds)), limits.transaction)
        if level is not Level.OK:
            said = f"prepared transaction {gid!r} waits for {float(seconds):.0f} s"
            yield Verdict("horizon", level, said, "COMMIT PREPARED or ROLLBACK PREPARED it.")


def _standbys(bind: Connection, limits: Limits) -> Iterator[Verdict]:
    """Look at what follows by hot_standby_feedback, with and without a slot: no clock tells for how long, only a count of transactions."""
    without = select(_ACTIVITY.c.application_name, func.age(_ACTIVITY.c.backend_xmin)).where(
        _ACTIVITY.c.backend_type == "walsender", _ACTIVITY.c.xact_start.is_(None), func.age(_ACTIVITY.c.backend_xmin) >= limits.held_back
    )
    by_slot = select(_SLOTS.c.slot_name, func.age(_SLOTS.c.xmin)).where(_SLOTS.c.active, func.age(_SLOTS.c.xmin) >= limits.held_back)
    for what, query in (("standby", without), ("the standby at replication slot", by_slot)):
        for name, number in bind.execute(query.order_by(query.selected_columns[0])):
            said = f"{what} {name!r} keeps the dead rows of the last {number} transactions"
            yield Verdict("horizon", Level.WARNING, said, "End the long query there, or switch its hot_standby_feedback off.")


def _slots(bind: Connection) -> Iterator[Verdict]:
    forgotten = (
        select(_SLOTS.c.slot_name, _SLOTS.c.xmin.is_not(None))
        .where(~_SLOTS.c.active, or_(_SLOTS.c.xmin.is_not(None), _SLOTS.c.catalog_xmin.is_not(None)))
        .order_by(_SLOTS.c.slot_name)
    )
    for name, is_of_rows in bind.execute(forgotten):  # a logical slot holds the catalogs' horizon alone
        kept = "keeps dead rows from being cleaned up" if is_of_rows else "keeps WAL and the catalogs' dead rows"
        said = f"replication slot {name!r} is not in use, and {kept}"
        yield Verdict("horizon", Level.WARNING, said, f"Connect its consumer, or SELECT pg_drop_replication_slot({name!r}).")
