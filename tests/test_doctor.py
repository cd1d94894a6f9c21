"""The doctor: each verdict, with its fault provoked for real."""

import contextlib
import json
import re
import shutil
import struct
import subprocess
import sys
import time
from datetime import timedelta

import psycopg
import pytest
import servers
from databases import TestDatabase, make_template
from eventually import eventually
from sqlalchemy import create_engine, make_url
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from test_cli import alkstore, said
from test_commands import register

from alkstore_sa import Store, migrate
from alkstore_sa.doctor import Limits, examine, postgresql, raise_ids
from alkstore_sa.testing import advance

pytestmark = pytest.mark.timeout(120)


def verdicts(store, *, whole=False, **limits):
    told = examine(store, Limits(**limits), whole_application=whole)
    assert all(bool(one.advice) is (one.level != "ok") for one in told), told
    return told


def found(store, check, **options):
    return [(str(one.level), one.finding, one.advice) for one in verdicts(store, **options) if one.check == check]


def test_a_sound_database_is_told_so_and_the_exit_code_is_0(database, store):
    ran = alkstore("doctor", "--json", ALKSTORE_URL=database.url)
    told = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr, told["level"]) == (0, "", "ok")
    own = ["journal", "engine"] if database.kind == "sqlite" else ["pooler", "wakes", "horizon", "vacuum"]
    assert [one["check"] for one in told["verdicts"]] == [
        "connection",
        "schema",
        "clock",
        *own,
        "claim plan",
        "queues",
        "schedules",
        "workers",
    ]
    assert all(set(one) == {"check", "level", "finding", "advice"} for one in told["verdicts"])


def test_a_problem_is_exit_code_1(database):
    migrate.downgrade(database.engine(), revision="alkstore_0002")
    code, out, _ = said("doctor", ALKSTORE_URL=database.url)
    assert code == 1
    assert out.splitlines()[1].startswith("problem")
    assert "Run `alkstore upgrade`." in out
    with database.store() as store:
        assert found(store, "schema") == [
            ("problem", "this database has no table alkstore_pause, alkstore_worker", "Run `alkstore upgrade`.")
        ]


def test_tables_of_an_older_version_are_told(database, store):
    database.sql("DROP INDEX alkstore_job_ready")
    assert found(store, "schema") == [
        ("problem", "table alkstore_job in this database lacks index alkstore_job_ready", "Run `alkstore upgrade`.")
    ]


def test_a_database_that_is_away_is_one_verdict():
    with Store("postgresql+psycopg://u:s3cret@127.0.0.1:1/x") as store:
        [one] = verdicts(store)
    assert (one.check, one.level) == ("connection", "problem")
    assert "s3cret" not in one.finding


@pytest.mark.databases("postgresql-18")
def test_a_queue_of_notifications_that_fills_up_is_told(database, store, monkeypatch):
    monkeypatch.setattr(postgresql, "QUEUE_SHARE", 0)  # a tenth of it is 800 MB
    with database.engine().connect() as stuck, database.engine().connect() as sender:
        stuck.exec_driver_sql("LISTEN anything")
        stuck.commit()
        stuck.exec_driver_sql("SELECT 1")
        for _ in range(5):
            sender.exec_driver_sql("SELECT pg_notify('anything', repeat('x', 7000) || n) FROM generate_series(1, 100) AS n")
            sender.commit()
        assert [(level, "queue of notifications" in said) for level, said, _ in found(store, "wakes")] == [("ok", False), ("warning", True)]


def test_a_host_whose_clock_is_wrong_is_told(database, store):
    script = f"""
import time
from alkstore_sa import Store
from alkstore_sa.doctor.general import clock
right, store = time.time, Store({database.url!r})
for skew in (60, -60, 0):
    time.time = lambda: right() + skew
    print([(str(one.level), one.finding) for one in clock(store)])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    ahead, behind, right = ran.stdout.splitlines()
    assert ahead.startswith("[('warning'") and "s behind this host's" in ahead
    assert behind.startswith("[('warning'") and "s ahead of this host's" in behind
    assert right.startswith("[('ok'")


def test_due_jobs_that_wait_are_told_with_their_likely_cause(database, store):
    store.enqueue("q", 1)
    store.outbox("hooks").enqueue(1)
    assert [level for level, *_ in found(store, "queues")] == ["ok"]
    advance(store, 301)
    told = found(store, "queues")
    assert [level for level, *_ in told] == ["warning", "warning"]
    assert "No live worker is registered" in told[1][2]
    register(store, "w", queues=["q"])
    assert "do not keep up" in found(store, "queues")[1][2]
    store.pause_queue("q")
    store.pause_outbox("hooks")
    assert [advice for *_, advice in found(store, "queues")] == [
        "It is paused: `alkstore resume hooks --outbox` lets workers claim again.",
        "It is paused: `alkstore resume q` lets workers claim again.",
    ]
    advance(store, 3600)
    assert [level for level, *_ in found(store, "queues")] == ["problem", "problem"]
    assert [level for level, *_ in found(store, "queues", waiting=timedelta(days=1))] == ["ok"]


def test_due_jobs_that_no_live_worker_serves_are_told_after_a_minute(store):
    store.enqueue("q", 1)
    register(store, "elsewhere", queues=["other"])
    advance(store, 50)
    assert [level for level, *_ in found(store, "queues")] == ["ok"]
    advance(store, 11)
    [(level, said, advice)] = found(store, "queues")
    assert level == "warning" and said.startswith("the oldest of 1 due jobs of queue 'q' has waited 6") and "No live worker" in advice
    assert [level for level, *_ in found(store, "queues", waiting=timedelta(minutes=10))] == ["ok"]
    register(store, "w", queues=["q"])
    assert [level for level, *_ in found(store, "queues")] == ["ok"]


def test_a_queue_that_was_left_paused_is_told_after_a_day(store):
    store.pause_queue("q")
    advance(store, timedelta(hours=23))
    assert [level for level, *_ in found(store, "queues")] == ["ok"]
    advance(store, timedelta(hours=1))
    [(level, said, advice)] = found(store, "queues")
    assert level == "warning" and said.startswith("queue 'q' is paused since 2") and "`alkstore resume q`" in advice


def test_schedules_that_fail_lag_or_lie_ahead_are_told(database, store):
    for name in ("ahead", "fine", "paused"):
        store.schedule(name, "@every 1h", "q")
    store.pause_schedule("paused")
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(7200)} WHERE name = 'ahead'")
    [(level, said, _)] = found(store, "schedules")
    assert level == "warning" and "'ahead' fires in" in said
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-90)}")
    assert [level for level, *_ in found(store, "schedules")] == ["problem", "problem"]
    store.tick()
    assert [level for level, *_ in found(store, "schedules")] == ["ok"]
    database.sql("UPDATE alkstore_schedule SET last_error = 'ValueError: no', failures = 1 WHERE name = 'fine'")
    [(level, said, _)] = found(store, "schedules")
    assert level == "problem" and said == "schedule 'fine' cannot be fired: ValueError: no"


def test_a_schedule_that_was_damaged_by_hand_is_told_by_its_name(database, store):
    for name in ("broken", "emptied", "fine"):
        store.schedule(name, "@every 1h", "q")
    database.sql("UPDATE alkstore_schedule SET spec = '@hourly' WHERE name = 'broken'")
    database.sql("UPDATE alkstore_schedule SET last_error = '' WHERE name = 'emptied'")
    (level, said, advice), emptied = found(store, "schedules")
    assert level == "problem" and said.startswith("schedule 'broken' is damaged: spec '@hourly'") and "Register it again" in advice
    assert emptied[:2] == ("problem", "schedule 'emptied' cannot be fired: no error recorded")


def test_a_check_that_fails_leaves_the_others_standing(database, store):
    register(store, "w")
    database.sql("UPDATE alkstore_worker SET queues = '{'")
    code, out, err = said("doctor", ALKSTORE_URL=database.url)
    assert (code, err) == (1, "")
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["problem", "check"], ["ok", "schedules"], ["problem", "check"]]
    assert "the check of workers failed: JSONDecodeError: " in out


def test_silent_workers_are_told(store):
    register(store, "w")
    assert found(store, "workers") == [("ok", "1 workers, all of them alive", "")]
    advance(store, 20)
    [(level, said, _)] = found(store, "workers")
    assert level == "warning" and said.startswith("worker w is silent since")


def test_ids_go_on_far_above_after_a_restore(database, store):
    highest = store.queue("q").enqueue_many([1, 2, 3])[-1]
    store.queue("q").claim_one("w").fail("no")
    code, out, _ = said("doctor", "--after-restore", ALKSTORE_URL=database.url)
    assert code == 0
    fresh = store.enqueue("q", 4)
    assert fresh > highest + 1_000_000 and f"from {fresh} on" in out
    assert raise_ids(store) >= fresh + 1_000_000


@pytest.mark.databases("sqlite")
def test_ids_go_on_far_above_in_a_file_that_never_had_a_job(store):
    raise_ids(store)
    assert store.enqueue("q", 1) == 1_000_001


# -- SQLite -----------------------------------------------------------------------------------------------------------


@pytest.mark.databases("sqlite")
def test_a_file_without_wal_and_an_engine_that_is_not_prepared_are_told(database):
    with database.store() as store:
        assert [level for level, *_ in (*found(store, "journal", whole=True), *found(store, "engine", whole=True))] == ["ok", "ok"]
    for engine in database.engines:
        engine.dispose()
    database.sql("PRAGMA journal_mode = DELETE")
    code, out, _ = said("doctor", ALKSTORE_URL=database.url)
    assert code == 0
    assert "warning  journal" in out and "journal mode delete" in out
    with Store(database.engine(prepared=False)) as store:
        assert found(store, "engine", whole=True)[0][:2] == ("problem", "the application's engine is not prepared")
    from sqlalchemy import event

    engine = database.engine()
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout = 0"))
    with Store(engine) as store:
        assert found(store, "engine", whole=True)[0][0] == "warning"


@pytest.mark.databases("sqlite")
def test_a_claim_that_must_sort_is_told(database, store):
    assert found(store, "claim plan") == [("ok", "a claim walks the index alkstore_job_ready", "")]
    database.sql("DROP INDEX alkstore_job_ready")
    database.sql("CREATE INDEX alkstore_job_ready ON alkstore_job (enqueued_at)")
    with database.store() as fresh:  # a connection that explains does not look whether the schema is still the one that it knows
        [(level, finding, advice)] = found(fresh, "claim plan")
    assert level == "warning" and "does not walk its index: " in finding and "ANALYZE" in advice


# -- PostgreSQL -------------------------------------------------------------------------------------------------------


PINNING = {
    "a snapshot": ("REPEATABLE READ", "SELECT count(*) FROM alkstore_job"),
    "a write": ("READ COMMITTED", "INSERT INTO alkstore_pause (queue, paused_at) VALUES ('other', now())"),
}


@pytest.mark.databases("postgresql-18", "postgresql-15")
@pytest.mark.parametrize("pinning", PINNING)
def test_a_transaction_that_keeps_dead_rows_is_told_with_its_pid_and_application(database, store, pinning):
    level, statement = PINNING[pinning]
    with database.engine(connect_args={"application_name": "report"}, isolation_level=level).connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        connection.exec_driver_sql(statement)
        time.sleep(0.3)
        assert found(store, "horizon")[0][0] == "ok"
        level, finding, advice = found(store, "horizon", transaction=timedelta(seconds=0.2))[0]
        assert level in ("warning", "problem") and f"pid {pid} of report" in finding and f"pg_terminate_backend({pid})" in advice
        assert re.search(r"whose last query began \d+ s ago$", finding)
        assert found(store, "horizon", transaction=timedelta(seconds=0.01))[0][0] == "problem"


def test_a_writer_is_told_before_those_whose_snapshots_only_show_it(apart):
    """On a server of its own, since a snapshot shows the oldest writer of any database."""
    holder = apart.engine(connect_args={"application_name": "report"})
    looker = apart.engine(isolation_level="REPEATABLE READ")
    with apart.store() as store, looker.connect() as other, holder.connect() as connection:
        other.exec_driver_sql("BEGIN")  # it is open for longer
        connection.exec_driver_sql(PINNING["a write"][1])
        other.exec_driver_sql("SELECT count(*) FROM alkstore_job")
        assert "of report" in found(store, "horizon", transaction=timedelta(0))[0][1]


@pytest.mark.databases("postgresql-18")
def test_a_transaction_that_read_and_idles_keeps_nothing(database, store):
    with database.engine().connect() as connection:
        connection.exec_driver_sql("SELECT count(*) FROM alkstore_job")
        nothing = ("ok", "no session keeps dead rows from being cleaned up", "")
        assert found(store, "horizon", transaction=timedelta(0)) == [nothing]


@pytest.mark.databases("postgresql-18")
def test_a_forgotten_prepared_transaction_is_told(database, store):
    with database.engine().connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("CREATE TABLE held (id INTEGER)")
        connection.exec_driver_sql("PREPARE TRANSACTION 'forgotten'")
        try:
            assert any("'forgotten'" in finding for _, finding, _ in found(store, "horizon", transaction=timedelta(0)))
        finally:
            connection.rollback()
            database.sql("ROLLBACK PREPARED 'forgotten'")


@contextlib.contextmanager
def plain_role(database):
    """The URL for a role that may use the tables, and no more."""
    role = f"looker_{make_url(database.url).database[-12:]}"
    database.sql(f"CREATE ROLE {role} LOGIN")
    try:
        database.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        yield make_url(database.url).set(username=role)
    finally:
        database.sql(f"DROP OWNED BY {role}")
        database.sql(f"DROP ROLE {role}")


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_a_role_that_does_not_see_the_sessions_of_others_is_told_so(database):
    with plain_role(database) as url, Store(url) as store:
        database.observer.dispose()
        eventually(lambda: [level for level, *_ in found(store, "horizon")] == ["ok"])  # all that is here is its own
        with database.engine(isolation_level="REPEATABLE READ").connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM alkstore_job")
            [(level, finding, advice)] = found(store, "horizon", transaction=timedelta(0))
            assert level == "warning" and finding.startswith("1 sessions of other roles do not show")
            assert f"GRANT pg_read_all_stats TO {url.username} (or pg_monitor)" in advice
            connection.exec_driver_sql(f"GRANT pg_read_all_stats TO {url.username}")
            connection.commit()
            connection.exec_driver_sql("SELECT count(*) FROM alkstore_job")
            [(level, finding, _)] = found(store, "horizon", transaction=timedelta(0))
            assert level == "problem" and "the oldest transaction that keeps dead rows" in finding


class OtherDriver(PGDialect_psycopg):
    """The driver that we have, by another name."""

    driver = "other"
    supports_statement_cache = True


@pytest.mark.databases("postgresql-18")
def test_another_driver_is_told_that_it_hears_no_wakes(database):
    registry.register("postgresql.other", __name__, "OtherDriver")
    engine = create_engine(make_url(database.url).set(drivername="postgresql+other"))
    with Store(engine) as store:
        [(level, finding, advice)] = found(store, "connection")
    engine.dispose()
    assert level == "warning" and finding.endswith("through other") and "postgresql+psycopg://" in advice


@pytest.mark.databases("postgresql-18")
def test_a_server_older_than_any_that_we_test_on_is_told(database):
    """It says so itself: there is none so old here."""
    database.sql(
        "CREATE FUNCTION current_setting(text) RETURNS text LANGUAGE sql AS $$"
        " SELECT CASE $1 WHEN 'server_version_num' THEN '140017' WHEN 'server_version' THEN '14.17' ELSE pg_catalog.current_setting($1) END $$"
    )
    engine = database.engine(connect_args={"options": "-c search_path=public,pg_catalog"})
    with Store(engine) as store:
        assert [(level, finding) for level, finding, _ in found(store, "connection")] == [("warning", "PostgreSQL 14.17 through psycopg")]


@pytest.fixture(scope="module")
def own_server():
    """A server for what holds for all its databases; it vacuums every second."""
    installed = servers.installations()
    if not installed:
        pytest.skip("requires_postgresql: none is to be had here")
    made = servers.Server(*next(iter(installed.items())))
    try:
        with (made.data / "postgresql.conf").open("a") as conf:
            conf.write("wal_level = logical\nautovacuum_naptime = 1\n")
        made.restart("fast")
        make_template(made.url())
        yield made
    finally:
        made.stop()


@pytest.fixture
def apart(own_server):
    made = TestDatabase.postgresql(own_server.url())
    yield made
    made.drop()


@contextlib.contextmanager
def standby(database, slot=None):
    """Stream as a standby with hot_standby_feedback, whose oldest query is of now."""
    [(at, xmin)] = database.sql("SELECT pg_current_wal_flush_lsn()::text, pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
    if slot is not None:
        [(at,)] = database.sql("SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = :slot", slot=slot)
    url = make_url(database.url)
    told = f"host={url.host} port={url.port} user={url.username} replication=true application_name=behind"
    wire = psycopg.pq.PGconn.connect(told.encode())
    try:
        started = wire.exec_(f"START_REPLICATION {f'SLOT {slot} ' if slot else ''}PHYSICAL {at}".encode())
        assert started.status == psycopg.pq.ExecStatus.COPY_BOTH
        wire.put_copy_data(b"h" + struct.pack(">qIIII", 0, xmin % 2**32, xmin >> 32, 0, 0))
        wire.flush()
        pins = "SELECT 1 FROM pg_stat_replication WHERE backend_xmin IS NOT NULL"
        of_slot = "SELECT 1 FROM pg_replication_slots WHERE slot_name = :slot AND xmin IS NOT NULL"
        eventually(lambda: database.sql(of_slot, slot=slot) if slot else database.sql(pins))
        yield
    finally:
        wire.finish()


@pytest.mark.parametrize("slot", [None, "followed"])
def test_a_standby_that_holds_many_transactions_back_is_told(apart, slot):
    if slot is not None:
        apart.sql("SELECT pg_create_physical_replication_slot(:slot, true)", slot=slot)
    try:
        with apart.store() as store, standby(apart, slot):
            for _ in range(10):
                store.enqueue("q", 1)
            assert [level for level, *_ in found(store, "horizon")] == ["ok"]
            (level, said, _) = found(store, "horizon", held_back=10)[-1]
            what = "standby 'behind'" if slot is None else "the standby at replication slot 'followed'"
            kept = re.fullmatch(rf"{what} keeps the dead rows of the last (\d+) transactions", said)
            assert level == "warning" and int(kept[1]) >= 10  # other databases of the server count, too
    finally:
        if slot is not None:
            eventually(lambda: not apart.sql("SELECT 1 FROM pg_replication_slots WHERE active"))
            apart.sql("SELECT pg_drop_replication_slot(:slot)", slot=slot)


def test_a_forgotten_replication_slot_that_holds_the_horizon_is_told(apart):
    with apart.store() as store:
        assert [level for level, *_ in found(store, "horizon")] == ["ok"]
        apart.sql("SELECT pg_create_physical_replication_slot('standby', true)")
        apart.sql("SELECT pg_create_logical_replication_slot('warehouse', 'pgoutput')")
        try:
            with standby(apart, "standby"):
                pass  # and away it went
            held = "replication slot 'standby' is not in use, and keeps dead rows from being cleaned up"
            kept = "replication slot 'warehouse' is not in use, and keeps WAL and the catalogs' dead rows"
            told = eventually(lambda: (now := found(store, "horizon")[1:]) and len(now) == 2 and now)
            assert told == [
                ("warning", held, "Connect its consumer, or SELECT pg_drop_replication_slot('standby')."),
                ("warning", kept, "Connect its consumer, or SELECT pg_drop_replication_slot('warehouse')."),
            ]
            store.queue("q").enqueue_many(range(12_000))
            apart.sql("DELETE FROM alkstore_job")
            dead = "100% of the rows of alkstore_job are dead"  # vacuumed since, and in vain
            eventually(lambda: any(one[1].startswith(dead) and "last autovacuum: 2" in one[1] for one in found(store, "vacuum")), within=50)
        finally:
            apart.sql("SELECT pg_drop_replication_slot('standby'), pg_drop_replication_slot('warehouse')")
        assert [level for level, *_ in found(store, "horizon")] == ["ok"]
        [(level, said, _)] = eventually(lambda: (now := found(store, "vacuum"))[0][0] == "ok" and now, within=50)
        assert "autovacuum: last of alkstore_job 2" in said


def test_a_server_without_autovacuum_is_told(apart):
    with apart.store() as store:
        apart.sql("ALTER SYSTEM SET autovacuum = off")
        try:
            apart.sql("SELECT pg_reload_conf()")
            told = eventually(lambda: (now := found(store, "vacuum"))[0][0] == "problem" and now)
            assert told[0] == ("problem", "autovacuum is off on this server", "Set autovacuum = on, and reload.")
        finally:
            apart.sql("ALTER SYSTEM RESET autovacuum")
            apart.sql("SELECT pg_reload_conf()")
        eventually(lambda: found(store, "vacuum")[0][0] == "ok")


@pytest.mark.databases("postgresql-18", "postgresql-15")
def test_a_stopped_vacuum_and_dead_rows_are_told(database, store):
    database.sql("ALTER TABLE alkstore_job SET (autovacuum_enabled = false)")
    assert found(store, "vacuum")[0][:2] == ("problem", "autovacuum is switched off for alkstore_job")
    store.queue("q").enqueue_many(range(12_000))
    database.sql("ANALYZE alkstore_job")
    assert found(store, "claim plan")[0][0] == "ok"  # of a table so large that no plan is ruled out
    database.sql("DELETE FROM alkstore_job")
    told = eventually(lambda: next((one for one in found(store, "vacuum") if one[0] == "warning"), None), within=50)
    assert "of the rows of alkstore_job are dead" in told[1]
    database.sql("ALTER TABLE alkstore_job RESET (autovacuum_enabled)")
    database.sql("VACUUM alkstore_job")
    eventually(lambda: found(store, "vacuum")[0][0] == "ok")


@pytest.mark.databases("postgresql-18")
def test_a_claim_without_its_index_is_told(database, store):
    assert found(store, "claim plan")[0][0] == "ok"
    database.sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'alkstore_job_ready'::regclass")
    level, finding, advice = found(store, "claim plan")[0]
    assert level == "warning" and "REINDEX" in advice and "does not walk its index" in finding


@pytest.mark.databases("postgresql-18")
def test_a_role_that_may_not_look_is_told_and_the_rest_is_looked_at(database, store):
    database.sql("REVOKE SELECT ON pg_stat_activity FROM PUBLIC")
    with plain_role(database) as url, Store(url) as restricted:
        told = verdicts(restricted)
    assert [one.level for one in told if one.check == "check"] == ["warning"]
    assert "workers" in [one.check for one in told]


@contextlib.contextmanager
def pgbouncer(database, folder, mode):
    import os
    import pwd
    import socket

    program = os.environ.get("PGBOUNCER") or shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("requires_pgbouncer: it is not installed here")
    url = make_url(database.url)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.chmod(0o755)
    (folder / "users.txt").write_text(f'"{url.username}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={url.host} port={url.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = trust\n"
        f"auth_file = {folder / 'users.txt'}\npool_mode = {mode}\nunix_socket_dir =\nignore_startup_parameters = extra_float_digits\n"
    )
    for path in [folder, *folder.iterdir()]:
        os.chown(path, pwd.getpwnam("nobody").pw_uid, -1) if os.getuid() == 0 else None
    options = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    options["env"] = {**os.environ, "LD_LIBRARY_PATH": os.environ.get("PGBOUNCER_LIBRARIES", "")}
    process = subprocess.Popen([program, folder / "pgbouncer.ini"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield url.set(port=port)
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize(("mode", "level"), [("transaction", "warning"), ("session", "ok")])
def test_a_pooler_is_told(database, tmp_path_factory, mode, level):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="bouncer-") as folder, pgbouncer(database, Path(folder), mode) as url, Store(url) as store:
        told = {one.check: (str(one.level), one.finding) for one in verdicts(store)}
    assert told["pooler"][0] == told["wakes"][0] == level
    assert "pooler" in told["pooler"][1]
