"""Checks of every database: connection, clocks, and what the store's own tables say."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import func, select

from alkstore_sa._cadence import parsed_interval
from alkstore_sa.doctor.verdicts import Level, Limits, Verdict
from alkstore_sa.errors import InvalidSpec
from alkstore_sa.outbox import OUTBOX_PREFIX
from alkstore_sa.records import QueueStats
from alkstore_sa.store import Store

SKEW: Final = timedelta(seconds=2)
OVERDUE: Final = timedelta(minutes=1)
UNSERVED_FACTOR: Final = 5  # jobs that no live worker serves are worth a warning so much earlier: after a minute, instead of five
LEFT_PAUSED: Final = timedelta(days=1)
OLDEST_SERVER: Final = 15  # the oldest that the library is tested on


def connection(store: Store) -> Verdict:
    """Connect, and name the database and the driver."""
    dialect = store.engine.dialect
    with store.begin(single=True) as bind:
        if dialect.name == "sqlite":
            return Verdict("connection", Level.OK, f"SQLite {bind.execute(select(func.sqlite_version())).scalar_one()}")
        number = int(bind.execute(select(func.current_setting("server_version_num"))).scalar_one())
        version = bind.execute(select(func.current_setting("server_version"))).scalar_one().split()[0]
    said = f"PostgreSQL {version} through {dialect.driver}"
    if dialect.driver != "psycopg":
        return Verdict("connection", Level.WARNING, said, "Wakes need postgresql+psycopg://; with this driver everything waits by polling.")
    if number < OLDEST_SERVER * 10_000:
        return Verdict("connection", Level.WARNING, said, f"This is older than what the library is tested on, {OLDEST_SERVER}: upgrade it.")
    return Verdict("connection", Level.OK, said)


def clock(store: Store) -> Iterator[Verdict]:
    """Compare this host's clock with the database's, which decides."""
    parts = store.parts
    sent = time.time()
    now = parts.database.run_single(parts.jobs.now)
    answered = time.time()
    skew = timedelta(seconds=now.timestamp() - (sent + answered) / 2)
    uncertainty = timedelta(seconds=(answered - sent) / 2)
    said = f"the database's clock is {abs(skew.total_seconds()):.1f} s {'ahead of' if skew > timedelta(0) else 'behind'} this host's"
    if abs(skew) - uncertainty > SKEW:
        advice = "Let NTP set both clocks: the database's decides what is due, but `run_at` and logs go by the hosts'."
        yield Verdict("clock", Level.WARNING, said, advice)
    else:
        yield Verdict("clock", Level.OK, said)


def waiting(store: Store, limits: Limits) -> Iterator[Verdict]:
    """Look how long the oldest due job of each queue has waited, whether anybody serves it, and what was left paused."""
    paused = store.paused_queues()
    alive = [worker for worker in store.workers() if worker.alive]
    found = False
    for stats in store.queues():
        served = any(stats.name in worker.queues for worker in alive)
        verdict = _of_queue(stats, limits, paused=stats.name in paused, served=served)
        if verdict is not None:
            found = True
            yield verdict
    for verdict in _left_paused(store, paused):
        found = True
        yield verdict
    if not found:
        yield Verdict("queues", Level.OK, f"no due job has waited for {round(limits.waiting.total_seconds())} s")


def _of_queue(stats: QueueStats, limits: Limits, *, paused: bool, served: bool) -> Verdict | None:
    if stats.oldest_due_age is None:
        return None
    level = limits.level(stats.oldest_due_age, limits.waiting)
    if level is Level.OK and not (paused or served) and stats.oldest_due_age * UNSERVED_FACTOR >= limits.waiting:
        level = Level.WARNING
    if level is Level.OK:
        return None
    name = _shown(stats.name)
    if paused:
        advice = f"It is paused: `alkstore resume {name}` lets workers claim again."
    elif not served:
        advice = "No live worker is registered for it: start one, or see whether the loop that claims by hand runs."
    else:
        advice = "Its workers do not keep up: look at `alkstore workers` and `alkstore job ID`, and add slots or processes."
    seconds = round(stats.oldest_due_age.total_seconds())
    return Verdict("queues", level, f"the oldest of {stats.ready} due jobs of queue {name!r} has waited {seconds} s", advice)


def _left_paused(store: Store, paused: Mapping[str, datetime]) -> Iterator[Verdict]:
    now = store.parts.database.run_single(store.parts.jobs.now)
    for queue, since in sorted(paused.items()):
        if now - since >= LEFT_PAUSED:
            name = _shown(queue)
            said = f"queue {name!r} is paused since {since:%Y-%m-%d %H:%M:%S}Z"
            yield Verdict("queues", Level.WARNING, said, f"If it was forgotten: `alkstore resume {name}` lets workers claim again.")


def schedules(store: Store) -> Iterator[Verdict]:
    """Look for schedules that fail, that nobody fires, or that lie ahead of the clock."""
    parts = store.parts
    now = parts.database.run_single(parts.jobs.now)
    active = [one for one in store.schedules() if not one.paused]
    found = False
    for one in active:
        verdict = _of_schedule(one, now)
        if verdict is not None:
            found = True
            yield verdict
    if not found:
        yield Verdict("schedules", Level.OK, f"{len(active)} active schedules, none of them failing, overdue or ahead of the clock")


def _of_schedule(one: Any, now: Any) -> Verdict | None:
    if one.last_error is not None:
        said = f"schedule {one.name!r} cannot be fired: {(one.last_error.splitlines() or ['no error recorded'])[0]}"
        return Verdict("schedules", Level.PROBLEM, said, "It is tried again by itself; mend what the error names.")
    if now - one.next_fire_at > OVERDUE:
        said = f"schedule {one.name!r} is {round((now - one.next_fire_at).total_seconds())} s overdue"
        return Verdict("schedules", Level.PROBLEM, said, "Nobody ticks: run `alkstore scheduler` (or `alkstore run`), best on two hosts.")
    try:
        interval = timedelta(microseconds=parsed_interval(one.spec))
    except InvalidSpec as error:
        return Verdict("schedules", Level.PROBLEM, f"schedule {one.name!r} is damaged: {error}", "Register it again, or unschedule it.")
    if one.next_fire_at - now > interval + OVERDUE:
        said = f"schedule {one.name!r} fires in {round((one.next_fire_at - now).total_seconds())} s, more than its interval"
        advice = "A clock was stepped; the scheduler puts it right when it takes the lead and once an hour, registering again does at once."
        return Verdict("schedules", Level.WARNING, said, advice)
    return None


def workers(store: Store) -> Iterator[Verdict]:
    """Look for workers that went silent without leaving."""
    found = store.workers()
    silent = [worker for worker in found if not worker.alive]
    for worker in silent:
        said = f"worker {worker.id} is silent since {worker.seen_at:%Y-%m-%d %H:%M:%S}Z"
        yield Verdict(
            "workers", Level.WARNING, said, "It was killed, hangs, or lost the database; its jobs come again when their claims lapse."
        )
    if not silent:
        yield Verdict("workers", Level.OK, f"{len(found)} workers, all of them alive" if found else "no worker has shown itself")


def _shown(queue: str) -> str:
    return f"{queue.removeprefix(OUTBOX_PREFIX)} --outbox" if queue.startswith(OUTBOX_PREFIX) else queue
