"""Fires per second of a tick over 10,000 due schedules, as a ratio to the bare database in the same run.

Run by hand: `pytest tests/benchmarks/bench_tick.py -m benchmark -s`. "Bare" is one INSERT of the same jobs and one of the same history
through the driver, from arrays, one commit per 1,000: what no tick can be faster than.
"""

import statistics
import time

import pytest

from alkstore_sa import StopToken

SCHEDULES = 10_000
ROUNDS = 5

BARE = """
INSERT INTO alkstore_job (queue, task, headers, payload, state, priority, attempts, max_attempts, fence, visibility_timeout, base_backoff,
                          enqueued_at, run_at, schedule, scheduled_for)
SELECT 'q', NULL, NULL, '{}', 'ready', 0, 0, 3, 0, 300000000, 5000000, now(), now(), name, now() FROM unnest(%s::text[]) AS names(name)
RETURNING id
"""
BARE_HISTORY = """
INSERT INTO alkstore_fire (schedule, boundary, through, fired_at, job_id, skipped, caught_up)
SELECT name, now(), now(), now(), id, 0, false FROM unnest(%s::text[], %s::bigint[]) AS fired(name, id)
"""


def register_many(database, interval):
    with database.store() as store:
        store.schedule("s0", f"@every {interval}s", "q", {"n": 1})
    database.sql(f"""
        INSERT INTO alkstore_schedule
        SELECT 's' || n, spec, interval, queue, task, headers, payload, priority, max_attempts, visibility_timeout, base_backoff, expires,
               next_fire_at, paused, failures, retry_at, last_error
        FROM alkstore_schedule, ({series(database)}) AS many WHERE name = 's0'""")


def series(database):
    if database.kind == "postgresql":
        return f"SELECT n FROM generate_series(1, {SCHEDULES - 1}) AS n"
    return f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {SCHEDULES - 1}) SELECT n FROM c"


def make_due(database, seconds):
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-seconds)}")
    database.sql("DELETE FROM alkstore_fire")
    database.sql("DELETE FROM alkstore_job")
    if database.kind == "postgresql":
        database.sql("VACUUM ANALYZE")


def bare_rate(database):
    names = [f"s{n}" for n in range(SCHEDULES)]
    rates = []
    for _ in range(ROUNDS):
        make_due(database, 1)
        with database.engine().connect() as connection:
            driver = connection.connection.dbapi_connection
            began = time.perf_counter()
            for start in range(0, SCHEDULES, 1_000):
                batch = names[start : start + 1_000]
                ids = [row[0] for row in driver.execute(BARE, [batch]).fetchall()]
                driver.execute(BARE_HISTORY, [batch, ids])
                driver.commit()
            rates.append(SCHEDULES / (time.perf_counter() - began))
    return statistics.median(rates)


def tick_rate(database, boundaries):
    rates = []
    with database.store() as store:
        store.tick()
        for _ in range(ROUNDS):
            make_due(database, 3_600 * (boundaries - 1) + 1)
            began = time.perf_counter()
            report = store.tick()
            took = time.perf_counter() - began
            assert sum(tick.fired for tick in report.schedules.values()) == SCHEDULES * boundaries == database.count()
            assert database.count("alkstore_fire") == SCHEDULES * boundaries
            rates.append(SCHEDULES * boundaries / took)
    return statistics.median(rates)


@pytest.mark.benchmark
@pytest.mark.timeout(600)
@pytest.mark.databases("postgresql-18", "postgresql-16", "postgresql-15")
def test_fires_per_second(database):
    register_many(database, 3_600)
    bare, one, five = bare_rate(database), tick_rate(database, 1), tick_rate(database, 5)
    version = database.sql("SHOW server_version")[0][0]
    print(
        f"\nPostgreSQL {version}: bare {bare:,.0f} rows/s; tick, 1 boundary each {one:,.0f} fires/s ({one / bare:.2f}), 5 each {five:,.0f}"
    )
    assert one >= 15_000


@pytest.mark.benchmark
@pytest.mark.timeout(600)
@pytest.mark.databases("sqlite")
def test_fires_per_second_on_sqlite(database):
    register_many(database, 3_600)
    print(f"\nSQLite: tick, 1 boundary each {tick_rate(database, 1):,.0f} fires/s, 5 each {tick_rate(database, 5):,.0f}")


@pytest.mark.benchmark
@pytest.mark.databases("postgresql-18")
def test_an_idle_runner_costs_one_small_statement_per_renewal(database):
    """What an idle leader does to the server in 20 s, as the server counts it."""
    import threading

    with database.store() as store:
        store.schedule("later", "@every 1h", "q")
        stop = StopToken()
        runner = threading.Thread(target=store.run_schedules, args=(stop,))
        runner.start()
        time.sleep(4)
        counted = "SELECT seq_scan, idx_scan, n_tup_upd FROM pg_stat_user_tables WHERE relname = :table"
        before = {table: database.sql(counted, table=table)[0] for table in ("alkstore_schedule", "alkstore_lock", "alkstore_fire")}
        time.sleep(20)
        after = {table: database.sql(counted, table=table)[0] for table in before}
        stop.cancel()
        runner.join()
    print({table: [now - then for now, then in zip(after[table], before[table], strict=True)] for table in before})
    assert after["alkstore_schedule"][0] == before["alkstore_schedule"][0]
