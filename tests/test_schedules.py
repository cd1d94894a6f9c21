"""Schedules and the tick: what is registered, what fires, what is skipped, and what is never done twice."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from conftest import EVERY_DATABASE
from scheduling import SECOND, age, assert_once, jobs_of, make_due, next_fire_at
from sqlalchemy import event, text
from test_cadence import REFUSED

from alkstore_sa import (
    InvalidName,
    InvalidOption,
    InvalidPayload,
    InvalidSpec,
    JobState,
    ReservedName,
    Store,
    StoreClosed,
    Tick,
    ticks,
)
from alkstore_sa.statements import fires

everywhere = pytest.mark.databases(*EVERY_DATABASE)
TEN = 10 * SECOND


def only(report):
    assert len(report.schedules) == 1
    return next(iter(report.schedules.values()))


# -- registration -------------------------------------------------------------------------------------------------------


@everywhere
def test_a_schedule_is_registered_and_read_back(database, store):
    made = store.schedule("s", "@every 90m", "q", {"n": 1}, priority=5, max_attempts=7, expires=60, headers={"trace": "t"})
    assert store.schedules() == [made]
    assert (made.name, made.spec, made.queue, made.payload, made.payload_error) == ("s", "@every 90m", "q", {"n": 1}, None)
    assert (made.priority, made.max_attempts, made.expires, made.task) == (5, 7, timedelta(seconds=60), None)
    assert (dict(made.headers), made.paused, made.last_error) == ({"trace": "t"}, False, None)
    now = database.sql(f"SELECT {database.now()}")[0][0]
    assert database.kind == "sqlite" or abs(made.next_fire_at - now - timedelta(minutes=90)) < timedelta(seconds=30)


@pytest.mark.parametrize("spec", REFUSED, ids=ascii)
def test_c02_a_bad_spec_is_refused_and_nothing_is_stored(store, spec):
    with pytest.raises(ValueError) as raised:
        store.schedule("s", spec, "q")
    assert isinstance(raised.value, InvalidSpec)
    assert store.schedules() == []


@pytest.mark.parametrize(("spec", "seconds"), [("@every 1s", 1), ("@every 90m", 5_400), ("@every 36h", 129_600), ("@every 7d", 604_800)])
def test_c02_a_spec_is_stored_with_its_interval(database, store, spec, seconds):
    store.schedule("s", spec, "q")
    assert database.sql("SELECT spec, interval FROM alkstore_schedule") == [(spec, seconds * 1_000_000)]


@pytest.mark.databases("postgresql-18", "sqlite")
def test_c02_a_day_is_86400_seconds_whatever_the_zones(database, store, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        store.schedule("s", "@every 1d", "q")
        due = 1_804_939_200  # 2027-03-13T12:00Z, the day before New York's clocks change
        instant = f"{due} * 1000000" if database.kind == "sqlite" else f"to_timestamp({due})"
        database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {instant}")
        plan = ticks.boundaries_due(due * 10**6, 86_400 * 10**6, due * 10**6)
        assert next_fire_at(database, "s").isoformat() == "2027-03-13T12:00:00+00:00"
        assert plan.next_boundary == (due + 86_400) * 10**6
        database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {instant.replace(str(due), str(due - 3650 * 86_400))}")
        store.tick()
        assert next_fire_at(database, "s").strftime("%H:%M:%S.%f") == "12:00:00.000000"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("bad", ["", "  ", "a\x00", "\ud800", "x" * 256, None, 3])
def test_the_schedules_name_and_its_queues_are_checked_alike(store, bad):
    for arguments in ((bad, "@every 1s", "q"), ("s", "@every 1s", bad)):
        with pytest.raises(InvalidName):
            store.schedule(*arguments)
    for verb in (store.unschedule, store.pause_schedule, store.resume_schedule, store.schedule_history):
        with pytest.raises(InvalidName):
            verb(bad)
    assert store.schedules() == []


def test_a_schedule_cannot_take_or_reach_the_engines_own_names(store):
    for arguments in (("__alkstore_x", "@every 1s", "q"), ("s", "@every 1s", "__alkstore_outbox:mail")):
        with pytest.raises(ReservedName):
            store.schedule(*arguments)
    assert store.schedules() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 40_000}, InvalidOption),
        ({"priority": True}, InvalidOption),
        ({"max_attempts": 0}, InvalidOption),
        ({"expires": -1}, InvalidOption),
        ({"expires": float("nan")}, InvalidOption),
        ({"headers": {"a": 1}}, InvalidOption),
        ({"payload": {1: 2}}, InvalidPayload),
        ({"payload": float("inf")}, InvalidPayload),
    ],
    ids=repr,
)
def test_bad_options_and_payloads_are_refused_before_anything_is_stored(store, options, error):
    with pytest.raises(error):
        store.schedule("s", "@every 1s", "q", **options)
    assert store.schedules() == []


def test_c14_registering_again_keeps_the_boundary_and_takes_the_payload(database, store):
    store.schedule("s", "@every 1h", "q", 1)
    age(database, 59 * 60)
    before = next_fire_at(database, "s")
    again = store.schedule("s", "@every 60m", "other", 2, priority=3)
    assert (again.next_fire_at, again.payload, again.queue, again.priority) == (before, 2, "other", 3)


@everywhere
def test_c14_a_changed_interval_starts_a_new_grid_from_now(database, store):
    store.schedule("s", "@every 1h", "q")
    age(database, 30 * 60)
    before = next_fire_at(database, "s")
    after = store.schedule("s", "@every 10m", "q").next_fire_at
    assert abs((before - after) - timedelta(minutes=20)) < timedelta(seconds=10)


def test_c14_a_schedule_registered_anew_every_thirty_minutes_fires_on_its_grid(database, store):
    """Twelve hours, a tick every minute: twelve jobs, not none and not twenty-four."""
    store.schedule("s", "@every 1h", "q")
    for minute in range(1, 12 * 60 + 1):
        age(database, 60)
        if minute % 30 == 0:
            store.schedule("s", "@every 1h", "q")
        store.tick()
    assert database.count() == 12
    assert len(store.schedule_history("s")) == 12


REGISTRAR = """
import sys
from alkstore_sa import Store
with Store(sys.argv[1]) as store:
    store.schedules()
    print("ready", flush=True)
    for line in sys.stdin:
        store.schedule(line.strip(), "@every 1h", "q", {"who": sys.argv[2]})
        print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("database", "processes", "rounds"), [("sqlite", 2, 100), ("postgresql-18", 2, 100), ("postgresql-18", 10, 5)], indirect=["database"]
)
def test_c14_processes_that_register_one_new_name_at_once_make_one_row(database, store, processes, rounds):
    racers = [
        subprocess.Popen([sys.executable, "-c", REGISTRAR, database.url, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(processes)
    ]
    try:
        assert [racer.stdout.readline().strip() for racer in racers] == ["ready"] * processes
        for number in range(rounds):
            for racer in racers:
                racer.stdin.write(f"s{number}\n")
                racer.stdin.flush()
            assert [racer.stdout.readline().strip() for racer in racers] == ["done"] * processes
    finally:
        for racer in racers:
            racer.communicate(timeout=20)
    assert [schedule.name for schedule in store.schedules()] == sorted(f"s{number}" for number in range(rounds))


def test_a_boundary_too_far_ahead_is_put_to_one_interval_from_now_and_reported(database, store, caplog):
    store.schedule("s", "@every 1m", "q")
    make_due(database, "s", -7_200)
    before = store.schedule("s", "@every 1m", "q").next_fire_at
    assert before - make_due(database, "s", 0) < timedelta(seconds=61)
    assert "further ahead than one interval" in caplog.text


def test_a_changed_interval_records_what_nobody_ticked_as_skipped(database, store):
    store.schedule("s", "@every 10s", "q")
    first = make_due(database, "s", 31)
    store.schedule("s", "@every 1h", "q")
    (skip,) = store.schedule_history("s")
    assert (skip.boundary, skip.through, skip.skipped, skip.job_id) == (first, first + 3 * TEN, 4, None)
    assert store.tick().schedules == {}


def test_a_changed_interval_of_a_paused_schedule_records_what_passed_as_skipped(database, store):
    store.schedule("s", "@every 10s", "q")
    first = make_due(database, "s", 31)
    store.pause_schedule("s")
    assert store.schedule("s", "@every 1h", "q").paused
    store.resume_schedule("s")
    (skip,) = store.schedule_history("s")
    assert (skip.boundary, skip.through, skip.skipped, skip.job_id) == (first, first + 3 * TEN, 4, None)
    assert store.tick().schedules == {}


@pytest.mark.databases("postgresql-18")
def test_a_changed_interval_records_what_passed_while_it_waited_for_the_row(database, store):
    first = store.schedule("s", "@every 1s", "q").next_fire_at
    changed = []
    with database.engine().connect() as other:
        other.exec_driver_sql("SELECT 1 FROM alkstore_schedule FOR UPDATE")
        changing = threading.Thread(target=lambda: changed.append(store.schedule("s", "@every 1h", "q")))
        changing.start()
        time.sleep(3)
        other.rollback()
    changing.join(30)
    passed = changed[0].next_fire_at - timedelta(hours=1) - first  # the new grid starts there
    (skip,) = store.schedule_history("s")
    assert (skip.boundary, skip.skipped) == (first, passed // timedelta(seconds=1) + 1)
    assert skip.skipped >= 2


def test_unschedule_forgets_the_schedule_and_keeps_its_jobs_and_history(database, store):
    store.schedule("s", "@every 10s", "q")
    make_due(database, "s", 5)
    store.tick()
    assert (store.unschedule("s"), store.unschedule("s")) == (True, False)
    assert store.schedules() == []
    assert len(jobs_of(store, "s")) == len(store.schedule_history("s")) == 1


def test_a_paused_schedule_does_not_fire_and_resumes_on_its_grid(database, store):
    store.schedule("s", "@every 10s", "q")
    assert (store.pause_schedule("s"), store.pause_schedule("none"), store.resume_schedule("none")) == (True, False, False)
    first = make_due(database, "s", 31)
    assert store.tick().schedules == {}
    assert store.tick().next_fire_at is None
    assert store.schedule("s", "@every 10s", "q").paused
    assert store.resume_schedule("s")
    assert next_fire_at(database, "s") == first + 4 * TEN
    (skip,) = store.schedule_history("s")
    assert (skip.boundary, skip.through, skip.skipped, skip.job_id, skip.caught_up) == (first, first + 3 * TEN, 4, None, False)
    assert store.resume_schedule("s")
    assert next_fire_at(database, "s") == first + 4 * TEN
    age(database, 10)
    assert only(store.tick()) == Tick(1, 0, 0)
    assert_once(store, "s", TEN)


def test_a_schedule_resumed_before_its_boundary_keeps_it(database, store):
    before = store.schedule("s", "@every 1h", "q").next_fire_at
    store.pause_schedule("s")
    store.resume_schedule("s")
    assert next_fire_at(database, "s") == before
    assert store.schedule_history("s") == []


# -- the tick -----------------------------------------------------------------------------------------------------------


@everywhere
def test_c03_catching_up_stops_at_64_and_skips_forward(database, store):
    store.schedule("s", "@every 10s", "q")
    t0 = make_due(database, "s", 1_000)
    report = store.tick()
    assert only(report) == Tick(64, 37, 0)
    assert [job.scheduled_for for job in jobs_of(store, "s")] == [t0 + n * TEN for n in range(64)]
    assert next_fire_at(database, "s") == report.next_fire_at == t0 + 1_010 * SECOND
    assert store.tick().schedules == {}
    assert database.count() == 64
    make_due(database, "s", 0)
    assert only(store.tick()) == Tick(1, 0, 0)
    assert database.count() == 65


@pytest.mark.parametrize(
    ("late", "tick", "following"),
    [(635, Tick(64, 0, 0), 640), (645, Tick(64, 1, 0), 650), (5, Tick(1, 0, 0), 10), (1_003, Tick(64, 37, 0), 1_010)],
)
def test_c04_the_edges_of_the_cap(database, store, late, tick, following):
    store.schedule("s", "@every 10s", "q")
    t0 = make_due(database, "s", late)
    assert only(store.tick()) == tick
    assert next_fire_at(database, "s") == t0 + following * SECOND
    assert_once(store, "s", TEN)


def test_c04_what_is_not_due_is_left_alone(database, store):
    store.schedule("s", "@every 10s", "q")
    t0 = make_due(database, "s", -5)
    assert store.tick().schedules == {}
    assert (next_fire_at(database, "s"), database.count()) == (t0, 0)


def test_the_catch_up_from_a_horizon_of_200_boundaries_refires_nothing(database, store):
    store.schedule("s", "@every 1h", "q")
    make_due(database, "s", 199 * 3_600 + 5)
    assert only(store.tick()) == Tick(64, 136, 0)
    for _ in range(3):
        age(database, 3_600)
        assert only(store.tick()) == Tick(1, 0, 0)
    assert assert_once(store, "s", timedelta(hours=1)) == 64 + 1 + 3
    assert sum(fire.skipped for fire in store.schedule_history("s", limit=1_000)) == 136


@everywhere
def test_a_fired_job_carries_the_resolved_stamps_and_its_boundary(database, store):
    store.schedule("plain", "@every 1h", "q", {"n": 1})
    store.schedule("own", "@every 1h", "q", [2], priority=9, max_attempts=1, expires=30, headers={"trace": "t"})
    boundary = make_due(database, "plain", 5)
    make_due(database, "own", 100)
    store.tick()
    (plain,), (own,) = jobs_of(store, "plain"), jobs_of(store, "own")
    assert (plain.payload, plain.queue, plain.state, plain.scheduled_for) == ({"n": 1}, "q", JobState.READY, boundary)
    assert (plain.visibility_timeout, plain.max_attempts, plain.base_backoff) == (timedelta(seconds=300), 3, timedelta(seconds=5))
    assert (plain.priority, plain.expires_at, plain.attempts, plain.fence) == (0, None, 0, 0)
    assert (own.payload, own.priority, own.max_attempts, dict(own.headers)) == ([2], 9, 1, {"trace": "t"})
    assert own.expires_at - own.enqueued_at == timedelta(seconds=30), "its time to live counts from the fire, not from the boundary"
    assert own.enqueued_at - own.scheduled_for >= timedelta(seconds=99)
    claimed = store.queue("q").claim("w", 2)
    assert [(job.schedule, job.scheduled_for) for job in claimed] == [("own", own.scheduled_for), ("plain", boundary)]


def test_the_history_tells_a_fire_from_a_catch_up_and_a_skip(database, store):
    store.schedule("s", "@every 10s", "q")
    t0 = make_due(database, "s", 641)
    store.tick()
    skip, newest, *older = store.schedule_history("s", limit=1_000)
    assert (skip.boundary, skip.through, skip.skipped, skip.job_id) == (t0 + 64 * TEN, t0 + 64 * TEN, 1, None)
    assert newest.job_id == jobs_of(store, "s")[-1].id
    assert all(fire.caught_up for fire in [newest, *older])
    age(database, 10)
    store.tick()
    assert not store.schedule_history("s", limit=1)[0].caught_up


def test_the_history_is_the_second_belt_against_a_boundary_that_was_moved_back(database, store):
    store.schedule("s", "@every 10s", "q")
    make_due(database, "s", 1_003)
    store.tick()
    database.sql("UPDATE alkstore_schedule SET next_fire_at = (SELECT min(boundary) FROM alkstore_fire)")
    assert only(store.tick()) == Tick(0, 0, 101)
    assert database.count() == 64
    assert_once(store, "s", TEN)


def test_a_boundary_moved_back_past_the_history_fires_only_what_it_does_not_have(database, store):
    store.schedule("s", "@every 10s", "q")
    first = make_due(database, "s", 1_003)
    store.tick()
    database.sql("DELETE FROM alkstore_fire WHERE boundary IN (SELECT boundary FROM alkstore_fire ORDER BY boundary LIMIT 5)")
    shifted = "next_fire_at - 1110000000" if database.kind == "sqlite" else "next_fire_at - INTERVAL '1110 seconds'"
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {shifted}")
    assert next_fire_at(database, "s") == first - 10 * TEN
    assert only(store.tick()) == Tick(15, 0, 96)


def test_a_moved_boundary_skips_around_what_is_recorded(database, store):
    store.schedule("s", "@every 10s", "q")
    make_due(database, "s", 21)
    store.tick()
    shifted = "next_fire_at - 1030000000" if database.kind == "sqlite" else "next_fire_at - INTERVAL '1030 seconds'"
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {shifted}")
    assert only(store.tick()) == Tick(64, 36, 3)
    assert assert_once(store, "s", TEN) == 64 + 1 + 3


def test_the_report_has_only_what_was_due_and_the_soonest_boundary(database, store):
    store.schedule("late", "@every 1h", "q")
    soon = store.schedule("soon", "@every 1m", "q").next_fire_at
    make_due(database, "late", 1)
    report = store.tick()
    assert list(report.schedules) == ["late"]
    assert report.next_fire_at == soon


def test_a_tick_of_nothing_reports_nothing(store):
    report = store.tick()
    assert (report.schedules, report.next_fire_at) == ({}, None)


def test_schedules_fire_the_longest_due_first(database, store):
    for name, late in (("a", 5), ("b", 50), ("c", 20)):
        store.schedule(name, "@every 1h", "q")
        make_due(database, name, late)
    store.tick()
    assert [job.schedule for job in store.jobs()] == ["b", "c", "a"]


def test_many_schedules_fire_in_bounded_batches(database, store, monkeypatch):
    batches = []
    fire = ticks.Ticks.fire_batch

    def counted(*arguments):
        batches.append(fire(*arguments))
        return batches[-1]

    monkeypatch.setattr(ticks.Ticks, "fire_batch", counted)
    store.schedule("s0", "@every 10s", "q")
    names = [f"s{n}" for n in range(1, 2_300)]
    for start in range(0, len(names), 100):
        values = " UNION ALL ".join(f"SELECT '{name}' AS name" for name in names[start : start + 100])
        database.sql(
            "INSERT INTO alkstore_schedule SELECT many.name, spec, interval, queue, task, headers, payload, priority, max_attempts,"
            " visibility_timeout, base_backoff, expires, next_fire_at, paused, failures, retry_at, last_error"
            f" FROM alkstore_schedule AS one, ({values}) AS many WHERE one.name = 's0'"
        )
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-1)}")
    assert sum(tick.fired for tick in store.tick().schedules.values()) == 2_300
    assert [len(batch.ticks) for batch in batches] == [1_000, 1_000, 300]
    batches.clear()
    database.sql("DELETE FROM alkstore_schedule WHERE name LIKE 's1%' OR name LIKE 's2%'")
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-900)}")
    database.sql("DELETE FROM alkstore_fire")
    database.sql("DELETE FROM alkstore_job")
    left = database.count("alkstore_schedule")
    report = store.tick()
    assert set(report.schedules.values()) == {Tick(64, 27, 0)}
    assert len(report.schedules) == left == 778
    assert max(sum(tick.fired for tick in batch.ticks.values()) for batch in batches) < 5_064
    assert database.count() == left * 64


# -- two at once, and crashes -------------------------------------------------------------------------------------------

TICKER = """
import sys
from alkstore_sa import Store
with Store(sys.argv[1]) as store:
    store.tick()
    print("ready", flush=True)
    for line in sys.stdin:
        store.tick()
        print("done", flush=True)
"""


def test_c05_two_ticks_at_once_make_one_job(database, store):
    store.schedule("s", "@every 1h", "q")
    command = [sys.executable, "-c", TICKER, database.url]
    tickers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [ticker.stdout.readline().strip() for ticker in tickers] == ["ready"] * 2
        make_due(database, "s", 5)
        for _ in range(100):
            for ticker in tickers:
                ticker.stdin.write("tick\n")
                ticker.stdin.flush()
            assert [ticker.stdout.readline().strip() for ticker in tickers] == ["done"] * 2
            age(database, 3_600, ("alkstore_schedule", "alkstore_fire"))
    finally:
        for ticker in tickers:
            ticker.communicate(timeout=20)
    assert [ticker.returncode for ticker in tickers] == [0, 0]
    assert database.count() == database.count("alkstore_fire") == 100


DYING = """
import os, signal, sys
from alkstore_sa import Store
store = Store(sys.argv[1])
with store.begin() as connection:
    store._ticks.fire_batch(connection, None, None)
    print("inserted", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@everywhere
def test_c05_a_process_killed_between_its_insert_and_its_commit_leaves_the_schedule_due(database, store):
    store.schedule("s", "@every 1h", "q")
    due = make_due(database, "s", 5)
    died = subprocess.run([sys.executable, "-c", DYING, database.url], capture_output=True, text=True, timeout=60, check=False)
    assert (died.stdout.strip(), died.returncode) == ("inserted", -9)
    assert (database.count(), database.count("alkstore_fire"), next_fire_at(database, "s")) == (0, 0, due)
    assert only(store.tick()) == Tick(1, 0, 0)
    assert database.count() == 1


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_a_rogue_ticker_waits_for_the_rows_and_then_finds_them_advanced(database, store):
    store.schedule("s", "@every 1h", "q")
    make_due(database, "s", 5)
    reports = []
    with store.begin() as connection:
        store._ticks.fire_batch(connection, None, None)
        rogue = threading.Thread(target=lambda: reports.append(store.tick()))
        rogue.start()
        time.sleep(1)
        assert rogue.is_alive()
    rogue.join(10)
    assert reports[0].schedules == {}
    assert database.count() == 1


# -- damage and failure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["spec = 'each tuesday'", "spec = ''", "spec = '@every 5s'", "interval = -1", "interval = 0"])
def test_a_damaged_spec_shows_its_error_and_stops_nobody_else(database, store, damage):
    store.schedule("bad", "@every 1h", "q")
    store.schedule("good", "@every 1h", "q")
    make_due(database, "bad", 50)
    make_due(database, "good", 5)
    database.sql(f"UPDATE alkstore_schedule SET {damage} WHERE name = 'bad'")
    report = store.tick()
    assert list(report.schedules) == ["good"]
    bad, good = store.schedules()
    assert "spec" in bad.last_error
    assert good.last_error is None
    assert report.next_fire_at < good.next_fire_at, "the next try is what comes next"
    store.schedule("bad", "@every 1h", "q")
    assert store.schedules()[0].last_error is None


def test_a_damaged_payload_shows_its_error_and_still_fires(database, store):
    store.schedule("s", "@every 1h", "q", {"n": 1})
    database.sql("UPDATE alkstore_schedule SET payload = '{broken'")
    make_due(database, "s", 5)
    assert only(store.tick()) == Tick(1, 0, 0)
    (schedule,) = store.schedules()
    assert (schedule.payload, schedule.last_error) == (None, None)
    assert "not JSON" in schedule.payload_error
    (job,) = jobs_of(store, "s")
    assert "not JSON" in job.payload_error
    assert database.sql("SELECT payload FROM alkstore_job") == [("{broken",)]


def refuse_jobs_of(database, name):
    """A trigger that makes the database refuse one schedule's jobs."""
    if database.kind == "sqlite":
        database.sql(
            f"CREATE TRIGGER refuse BEFORE INSERT ON alkstore_job WHEN NEW.schedule = '{name}'"
            " BEGIN SELECT RAISE(ABORT, 'no such jobs here'); END"
        )
        return
    database.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN IF NEW.schedule = '{name}' THEN RAISE EXCEPTION 'no such jobs here'; END IF; RETURN NEW; END $$"
    )
    database.sql("CREATE TRIGGER refuse BEFORE INSERT ON alkstore_job FOR EACH ROW EXECUTE FUNCTION refuse()")


def accept_jobs(database):
    database.sql("DROP TRIGGER refuse" + ("" if database.kind == "sqlite" else " ON alkstore_job"))


@everywhere
def test_a_failed_batch_is_replayed_schedule_by_schedule(database, store):
    for name in ("a", "b", "c"):
        store.schedule(name, "@every 1h", "q")
        make_due(database, name, 5)
    due = next_fire_at(database, "b")
    refuse_jobs_of(database, "b")
    report = store.tick()
    assert sorted(report.schedules) == ["a", "c"]
    errors = {schedule.name: schedule.last_error for schedule in store.schedules()}
    assert (errors["a"], errors["c"]) == (None, None)
    assert "no such jobs here" in errors["b"]
    assert next_fire_at(database, "b") == due
    assert store.tick().schedules == {}, "it is not tried again at once"
    accept_jobs(database)
    age(database, 400, ("alkstore_schedule",))
    assert store.tick().schedules["b"] == Tick(1, 0, 0)
    assert {schedule.last_error for schedule in store.schedules()} == {None}


def test_the_pauses_between_tries_double_up_to_five_minutes(database, store):
    store.schedule("s", "@every 1h", "q")
    database.sql("UPDATE alkstore_schedule SET spec = 'broken'")
    pauses = []
    for _ in range(10):
        age(database, 400, ("alkstore_schedule",))
        make_due(database, "s", 500)
        sent = database.sql(f"SELECT {database.now()}")[0][0]
        report = store.tick()
        assert report.schedules == {}
        now = database.sql(f"SELECT {database.now()}")[0][0]
        left = database.sql("SELECT retry_at FROM alkstore_schedule")[0][0]
        pauses.append([(left - at) / 1_000_000 if database.kind == "sqlite" else (left - at).total_seconds() for at in (now, sent)])
    for (shortest, longest), expected in zip(pauses, [2, 4, 8, 16, 32, 64, 128, 256, 300, 300], strict=True):
        assert shortest - 0.01 <= expected <= longest + 0.01


@pytest.mark.databases("postgresql-18")
def test_an_instant_that_python_cannot_read_stops_nobody_else(database, store):
    for name in ("bad", "good"):
        store.schedule(name, "@every 1h", "q")
    make_due(database, "good", 5)
    database.sql("UPDATE alkstore_schedule SET next_fire_at = '-infinity' WHERE name = 'bad'")
    assert store.tick().schedules == {"good": Tick(1, 0, 0)}
    assert "infinity" in database.sql("SELECT last_error FROM alkstore_schedule WHERE name = 'bad'")[0][0]


# -- the history's end --------------------------------------------------------------------------------------------------


def test_the_history_holds_at_most_a_thousand_rows_of_a_schedule(database, store):
    store.schedule("s", "@every 1s", "q")
    most = 0
    for _ in range(24):
        make_due(database, "s", 59.5)
        database.sql("DELETE FROM alkstore_job")
        store.tick()
        most = max(most, database.count("alkstore_fire"))
        age(database, 60)
    assert 900 <= most <= 1_000
    newest = store.schedule_history("s", limit=1)[0]
    assert next_fire_at(database, "s") - newest.boundary == 61 * SECOND - timedelta(seconds=0) or newest.job_id is not None


def test_pruning_keeps_up_with_many_schedules_that_stand_on_one_grid(database, store, monkeypatch):
    """A hundred of them, with the sizes made smaller: each may have 60 rows, and a batch prunes at most 500."""
    monkeypatch.setattr(ticks, "_KEPT", 10)
    monkeypatch.setattr(ticks, "PRUNED_AT_ONCE", 100)
    for n in range(100):
        store.schedule(f"s{n}", "@every 10s", "q")
    boundary = 1_800_000_000
    instant = f"{boundary} * 1000000" if database.kind == "sqlite" else f"to_timestamp({boundary})"
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {instant}")
    for n in range(130):
        with store.begin() as connection:
            assert len(store._ticks.fire_batch(connection, None, (boundary + 10 * n) * 1_000_000).ticks) == 100
    rows = database.sql("SELECT count(*) FROM alkstore_fire GROUP BY schedule")
    assert max(row[0] for row in rows) <= 60


def test_the_history_is_kept_for_seven_days_but_for_the_newest_row(database, store):
    store.schedule("s", "@every 1h", "q")
    for _ in range(3):
        make_due(database, "s", 5)
        store.tick()
        age(database, 60)
    database.sql("UPDATE alkstore_fire SET fired_at = " + database.now(-8 * 86_400))
    with store.begin() as connection:
        assert not store._ticks.prune(connection)
    assert len(store.schedule_history("s")) == 1
    store.unschedule("s")
    with store.begin() as connection:
        store._ticks.prune(connection)
    assert len(store.schedule_history("s")) == 1


def test_old_history_is_pruned_in_bounded_batches(database, store):
    database.sql(
        "INSERT INTO alkstore_fire SELECT 's', "
        + ("n, n, n" if database.kind == "sqlite" else "to_timestamp(n), to_timestamp(n), to_timestamp(n)")
        + ", n, 0, "
        + ("0" if database.kind == "sqlite" else "false")
        + " FROM "
        + (
            "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 2500) SELECT n FROM c)"
            if database.kind == "sqlite"
            else "generate_series(1, 2500) AS n"
        )
    )
    left = []
    more = True
    while more:
        with store.begin() as connection:
            more = store._ticks.prune(connection)
        left.append(database.count("alkstore_fire"))
    assert left == [1_500, 500, 1]


def test_a_closed_store_refuses_the_scheduler(database):
    store = Store(database.engine())
    store.close()
    for call in (
        lambda: store.schedule("s", "@every 1s", "q"),
        lambda: store.unschedule("s"),
        lambda: store.pause_schedule("s"),
        lambda: store.resume_schedule("s"),
        store.schedules,
        lambda: store.schedule_history("s"),
        store.tick,
    ):
        with pytest.raises(StoreClosed):
            call()


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_a_tick_finds_its_rows_by_their_indexes(database, store):
    """With much history and many schedules, one due schedule is found, and its range of the history read, without a scan."""
    store.schedule("s0", "@every 1h", "q")
    database.sql(
        "INSERT INTO alkstore_schedule SELECT 's' || n, spec, interval, queue, task, headers, payload, priority, max_attempts,"
        " visibility_timeout, base_backoff, expires, next_fire_at, paused, failures, retry_at, last_error"
        " FROM alkstore_schedule, generate_series(1, 2000) AS n"
    )
    database.sql(
        "INSERT INTO alkstore_fire SELECT 's' || n % 100, to_timestamp(n), to_timestamp(n), now(), n, 0, false"
        " FROM generate_series(1, 50000) AS n"
    )
    database.sql("VACUUM ANALYZE alkstore_fire, alkstore_schedule")
    read = "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'alkstore_fire'"
    for _ in range(8):  # beyond the fifth, where the server may turn to a plan for any parameters
        make_due(database, "s7", 5)
        with store.begin() as connection:
            assert len(store._ticks.fire_batch(connection, None, None).ticks) == 1
            scanned, fetched = connection.execute(text(read)).one()
    assert scanned == 0
    assert fetched < 1_000  # 510 rows of this schedule, where a tick prunes
    database.sql("UPDATE alkstore_fire SET fired_at = now() - INTERVAL '8 days' WHERE schedule = 's8' AND job_id < 1000")
    statement = store._database.statement(fires.prune_schedules)
    values = {"fire_schedules": ["s8", "s9"], "fire_kept": 950, "minus_age": -ticks.LONGEST_HISTORY, "fire_limit": 5_000}
    for _ in range(8):
        with database.store() as fresh, fresh.begin() as connection:
            deleted = len(connection.execute(statement, values).all())
            scanned, fetched = connection.execute(text(read)).one()
            connection.rollback()
        assert scanned == 0
    assert deleted == 10


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_pruning_looks_up_once_per_schedule_where_its_surplus_ends(database, store):
    database.sql(
        "INSERT INTO alkstore_fire SELECT 's', to_timestamp(n), to_timestamp(n), now(), n, 0, false FROM generate_series(1, 1000) AS n"
    )
    statement = store._database.statement(fires.prune_schedules)
    values = {"fire_schedules": ["s"], "fire_kept": 950, "minus_age": -ticks.LONGEST_HISTORY, "fire_limit": 5_000}

    def loops(plan):
        return max([plan["Actual Loops"], *(loops(within) for within in plan.get("Plans", ()))])

    with store.begin() as connection:

        @event.listens_for(connection, "before_cursor_execute", retval=True)
        def explain(_connection, _cursor, sql, parameters, _context, _many):
            return (f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}" if "DELETE" in sql else sql), parameters

        plan = connection.execute(statement, values).scalar_one()[0]["Plan"]
    assert loops(plan) == 1
    assert database.count("alkstore_fire") == 950
