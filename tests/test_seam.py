"""Joining the caller's transaction: the job lives and dies with the caller's rows, and the caller's session is left alone."""

import asyncio
import sqlite3
import sys
import threading

import pytest
from sqlalchemy import Integer, StaticPool, create_engine, event, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from alkstore_sa import ClaimLost, InvalidOption, SchemaMissing, Store, prepare_sqlite
from alkstore_sa.tables import JobRow

needs_autocommit_attribute = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3's autocommit attribute came with Python 3.12")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "app_order"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)


@pytest.fixture
def orders(database):
    Base.metadata.create_all(database.engine())
    return lambda: sorted(row[0] for row in database.sql("SELECT id FROM app_order"))


def payloads(database):
    return [row[0] for row in database.sql("SELECT payload FROM alkstore_job ORDER BY id")]


# -- with every kind of transaction ----------------------------------------------------------------------------------


def test_a_commit_keeps_the_job_with_the_callers_rows(database, caller, store, orders):
    caller.sql("INSERT INTO app_order VALUES (1)")
    job_id = caller.call(store.queue("q").enqueue_tx, {"order": 1}, priority=3)
    assert store.get_job(job_id) is None
    assert database.count() == 0
    caller.commit()
    assert store.get_job(job_id).payload == {"order": 1}
    assert orders() == [1]


def test_a_rollback_removes_both(database, caller, store, orders):
    caller.sql("INSERT INTO app_order VALUES (1)")
    caller.call(store.enqueue_tx, "q", 1)
    caller.call(store.queue("q").enqueue_many_tx, [2, 3])
    caller.call(store.outbox_enqueue_tx, "o", 4)
    caller.call(store.outbox("o").enqueue_tx, 5)
    caller.call(store.outbox("o").enqueue_many_tx, [6])
    caller.rollback()
    assert (database.count(), orders()) == (0, [])


def test_every_way_in_commits_with_the_caller(database, caller, store):
    caller.call(store.enqueue_tx, "q", 1)
    ids = caller.call(store.queue("q").enqueue_many_tx, [2, 3])
    caller.call(store.outbox_enqueue_tx, "o", 4)
    caller.call(store.outbox("o").enqueue_tx, 5)
    caller.call(store.outbox("o").enqueue_many_tx, [6, 7])
    assert caller.call(store.queue("q").enqueue_many_tx, []) == []
    caller.commit()
    assert ids == sorted(ids)
    assert payloads(database) == list("1234567")


def test_c09_a_rolled_back_savepoint_enqueues_nothing(database, caller, store, orders):
    caller.sql("INSERT INTO app_order VALUES (1)")
    caller.call(store.outbox_enqueue_tx, "o", {"order": 1})
    with pytest.raises(RuntimeError), caller.savepoint():
        caller.sql("INSERT INTO app_order VALUES (2)")
        caller.call(store.outbox_enqueue_tx, "o", {"order": 2})
        raise RuntimeError
    caller.commit()

    delivered = []
    while store.outbox("o").run_once("w", lambda job: delivered.append(job.payload)):
        pass
    assert (orders(), delivered) == ([1], [{"order": 1}])


def test_c10_a_released_savepoint_is_not_a_commit(database, caller, store):
    heard = []
    seen = []
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            seen.append(database.count())
            stop.wait(0.05)

    def listen():
        import psycopg

        with psycopg.connect(database.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("LISTEN alkstore")
            ready.set()
            while not stop.is_set():
                heard.extend(connection.notifies(timeout=0.1))

    ready = threading.Event()
    threads = [threading.Thread(target=watch)]
    if database.kind == "postgresql":
        threads.append(threading.Thread(target=listen))
    else:
        ready.set()
    for thread in threads:
        thread.start()
    assert ready.wait(10)

    with caller.savepoint():
        caller.call(store.outbox_enqueue_tx, "o", 1)
    stop.wait(1)
    caller.rollback()
    stop.wait(0.2)
    stop.set()
    for thread in threads:
        thread.join()

    assert seen
    assert set(seen) == {0}
    assert heard == []
    assert database.count() == 0


def test_c11_a_refused_payload_leaves_the_callers_transaction_usable(database, caller, store, orders):
    caller.sql("INSERT INTO app_order VALUES (1)")
    cycle = []
    cycle.append(cycle)
    from datetime import datetime

    for payload in (
        {"a": "x\x00"},
        {"\x00": 1},
        {"a": "\ud800"},
        [[[float("nan")]]],
        float("inf"),
        b"",
        set(),
        datetime(2030, 1, 1),
        cycle,
    ):
        with pytest.raises((TypeError, ValueError)):
            caller.call(store.outbox_enqueue_tx, "o", payload)
    caller.commit()
    assert (orders(), database.count()) == ([1], 0)


def test_an_ack_joins_the_callers_transaction(database, caller, store, orders):
    job_id = store.enqueue("q", 1)
    job = store.queue("q").claim_one("w")
    caller.sql("INSERT INTO app_order VALUES (1)")
    caller.call(job.ack_tx)
    assert store.get_job(job_id) is not None
    caller.rollback()
    assert (store.get_job(job_id).state, orders()) == ("claimed", [])
    caller.sql("INSERT INTO app_order VALUES (1)")
    caller.call(job.ack_tx)
    caller.commit()
    assert (store.get_job(job_id), orders()) == (None, [1])


def test_an_ack_of_a_lost_claim_raises_so_that_the_writes_roll_back(database, caller, store, orders):
    job_id = store.enqueue("q", 1)
    job = store.queue("q").claim_one("w")
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)}")
    other = store.queue("q").claim_one("other")
    caller.sql("INSERT INTO app_order VALUES (1)")
    with pytest.raises(ClaimLost):
        caller.call(job.ack_tx)
    caller.rollback()
    assert job.lost.is_set()
    assert orders() == []
    assert other.ack()
    assert store.get_job(job_id) is None


# -- Sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"autoflush": False}, {"expire_on_commit": True}, {"expire_on_commit": False}, {}], ids=str)
def test_a_session_of_any_make_carries_the_job_and_its_objects_are_left_alone(database, store, orders, options):
    with Session(database.engine(), **options) as session:
        order = Order(id=1)
        session.add(order)
        session.commit()
        loaded = session.get(Order, 1)
        store.enqueue_tx(session, "q", 1)
        assert "id" in loaded.__dict__
        assert session.in_transaction()
        session.commit()
    assert database.count() == 1


def test_a_scoped_session_carries_the_job(database, store):
    registry = scoped_session(sessionmaker(database.engine()))
    store.enqueue_tx(registry, "q", 1)
    registry.rollback()
    store.enqueue_tx(registry, "q", 2)
    registry.commit()
    registry.remove()
    assert payloads(database) == ["2"]


def test_session_begin_and_a_failing_block(database, store):
    sessions = sessionmaker(database.engine())
    with pytest.raises(RuntimeError), sessions.begin() as session:
        store.enqueue_tx(session, "q", 1)
        raise RuntimeError
    with sessions.begin() as session:
        store.enqueue_tx(session, "q", 2)
    assert payloads(database) == ["2"]


def test_the_callers_own_integrity_error_passes_through(database, store, orders):
    with Session(database.engine()) as session:
        session.add(Order(id=1))
        session.commit()
        session.expunge_all()
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            store.enqueue_tx(session, "q", 1)  # where SQLAlchemy flushes first
            session.flush()  # where it does not
        session.rollback()
    assert database.count() == 0


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_sessions_of_every_isolation_enqueue(database, store, orders, level):
    with Session(database.engine(isolation_level=level)) as session:
        session.execute(text("SELECT count(*) FROM app_order"))
        store.enqueue_tx(session, "q", 1)
        session.commit()
    assert database.count() == 1


@pytest.mark.databases("postgresql-18")
def test_under_repeatable_read_a_claim_younger_than_the_snapshot_is_lost_not_acked(database, store):
    with Session(database.engine(isolation_level="REPEATABLE READ")) as session:
        session.execute(text("SELECT 1 FROM alkstore_job"))
        store.enqueue("q", 1)
        job = store.queue("q").claim_one("w")
        with pytest.raises(ClaimLost):
            job.ack_tx(session)


@pytest.mark.databases("postgresql-18")
def test_our_own_transactions_are_read_committed_whatever_the_engine_says(database):
    store = Store(database.engine(isolation_level="SERIALIZABLE"))
    with store.begin() as connection:
        assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    store.close()


def test_a_failing_block_in_our_own_transaction_rolls_back(database, store):
    store.enqueue("q", 1)
    with pytest.raises(RuntimeError), store.begin() as connection:
        connection.execute(text("DELETE FROM alkstore_job"))
        raise RuntimeError
    assert database.count() == 1


def test_binds_per_table_are_followed(database, store, tmp_path):
    elsewhere = create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    Base.metadata.create_all(elsewhere)
    prepare_sqlite(elsewhere)
    with Session(binds={JobRow: database.engine(), Order: elsewhere}) as session:
        session.add(Order(id=1))
        store.enqueue_tx(session, "q", 1)
        session.commit()
    elsewhere.dispose()
    assert database.count() == 1


@pytest.mark.databases("postgresql-18")
def test_a_session_of_another_dialect_is_refused_both_ways(database, store, tmp_path):
    other = prepare_sqlite(create_engine(f"sqlite:///{tmp_path / 'o.db'}"))
    with Session(other) as session, pytest.raises(InvalidOption, match="sqlite"):
        store.enqueue_tx(session, "q", 1)
    with Store(other) as on_sqlite, Session(database.engine()) as session, pytest.raises(InvalidOption, match="postgresql"):
        on_sqlite.enqueue_tx(session, "q", 1)
    other.dispose()


@pytest.mark.databases("postgresql-18")
def test_a_tenants_translate_map_on_the_callers_engine_does_not_move_our_rows(database, store):
    database.sql("CREATE SCHEMA tenant")
    with Session(database.engine(execution_options={"schema_translate_map": {None: "tenant"}})) as session:
        store.enqueue_tx(session, "q", 1)
        session.commit()
    assert database.count() == 1


@pytest.mark.databases("postgresql-18")
def test_tables_in_a_schema_of_their_own(database):
    from alkstore_sa import migrate

    migrate.upgrade(database.engine(), schema="Jobs of us")
    with database.store(schema="Jobs of us") as store, Session(database.engine()) as session:
        store.enqueue_tx(session, "q", 1)
        session.commit()
        store.enqueue("q", 2)
        store.queue("q").enqueue_many([3])
        assert database.count() == 0
        assert database.count('"Jobs of us".alkstore_job') == 3
        jobs = store.queue("q").claim("w", 3)
        assert jobs[0].fail("x")
        assert store.queue("q").ack_many(jobs) == 2
        assert [job.id for job in store.jobs()] == [jobs[0].id]
        assert store.queues()[0].dead == 1
        store.verify()


@pytest.mark.databases("postgresql-18")
def test_a_two_phase_session_carries_the_job_without_a_wake(database):
    with database.store(wake=False) as store, Session(database.engine(), twophase=True) as session:
        store.enqueue_tx(session, "q", 1)
        session.commit()
    assert database.count() == 1


def test_pytests_savepoint_recipe_is_accepted_on_a_sound_engine(database, store):
    with database.engine().connect() as connection:
        outer = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            store.enqueue_tx(session, "q", 1)
            session.commit()
            store.enqueue_tx(session, "q", 2)
            session.rollback()
        assert connection.execute(text("SELECT payload FROM alkstore_job")).all() == [("1",)]
        outer.rollback()
    assert database.count() == 0


def test_a_bare_connection_may_enqueue_first(database, store):
    with database.engine().connect() as connection:
        store.enqueue_tx(connection, "q", 1)
        connection.rollback()
        store.enqueue_tx(connection, "q", 2)
        connection.commit()
    with database.engine().begin() as connection:
        store.enqueue_tx(connection, "q", 3)
    assert payloads(database) == ["2", "3"]


@pytest.mark.parametrize("way", ["engine", "connection", "session"])
def test_autocommit_is_refused(database, store, way):
    if way == "engine":
        connection = database.engine(isolation_level="AUTOCOMMIT").connect()
        tx = connection
    elif way == "connection":
        connection = database.engine().connect()
        tx = connection.execution_options(isolation_level="AUTOCOMMIT")
    else:
        connection = tx = Session(database.engine().execution_options(isolation_level="AUTOCOMMIT"))
    with connection, pytest.raises(InvalidOption, match="autocommit"):
        store.enqueue_tx(tx, "q", 1)
    assert database.count() == 0


@pytest.mark.parametrize("tx", [None, "session", 5, object], ids=repr)
def test_what_is_no_transaction_is_a_type_error(store, tx):
    with pytest.raises(TypeError):
        store.enqueue_tx(tx, "q", 1)


def test_an_engine_and_an_async_session_are_type_errors_that_say_what_to_use(database, store):
    with pytest.raises(TypeError, match="Session"):
        store.enqueue_tx(database.engine(), "q", 1)
    with pytest.raises(TypeError, match="run_sync"):
        store.enqueue_tx(AsyncSession(create_async_engine(database.url.replace("sqlite:", "sqlite+aiosqlite:"))), "q", 1)


def test_no_statement_but_our_insert_runs_in_the_callers_transaction(database, store):
    engine = database.engine()
    sent = []
    event.listen(engine, "before_cursor_execute", lambda c, cur, statement, *rest: sent.append(statement))
    with Session(engine) as session:
        store.enqueue_tx(session, "q", 1)
        store.queue("q").enqueue_many_tx(session, [1, 2])
        session.commit()
    assert [statement.split()[0] for statement in sent if not statement.startswith("BEGIN")] == ["INSERT", "INSERT"]


def test_nothing_is_left_checked_out(database, store):
    engine = database.engine()
    with Session(engine) as session:
        store.enqueue_tx(session, "q", 1)
        session.commit()
    assert engine.pool.checkedout() == 0


# -- SQLite's own ways -----------------------------------------------------------------------------------------------


@pytest.mark.databases("sqlite")
def test_an_unprepared_engine_is_refused_in_a_savepoint_and_accepted_outside(database, store):
    with Session(database.engine(prepared=False)) as session:
        session.begin_nested()
        with pytest.raises(InvalidOption, match="prepare_sqlite"):
            store.outbox_enqueue_tx(session, "o", 1)
        session.rollback()
        store.outbox_enqueue_tx(session, "o", 2)
        session.rollback()
        store.outbox_enqueue_tx(session, "o", 3)
        session.commit()
    assert payloads(database) == ["3"]


@pytest.mark.databases("sqlite")
def test_an_unprepared_engine_is_refused_under_pytests_recipe(database, store):
    with database.engine(prepared=False).connect() as connection:
        connection.begin()
        with (
            Session(bind=connection, join_transaction_mode="create_savepoint") as session,
            pytest.raises(InvalidOption, match="prepare_sqlite"),
        ):
            store.enqueue_tx(session, "q", 1)


@pytest.mark.databases("sqlite")
def test_sqlalchemys_own_recipe_is_accepted_in_savepoints(database, store):
    engine = database.engine(prepared=False)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with Session(engine) as session:
        with session.begin_nested():
            store.enqueue_tx(session, "q", 1)
        session.rollback()
        assert database.count() == 0
        with session.begin_nested():
            store.enqueue_tx(session, "q", 2)
        session.commit()
    assert payloads(database) == ["2"]


@pytest.mark.databases("sqlite")
@needs_autocommit_attribute
def test_the_drivers_own_transactions_are_accepted_in_savepoints(database, store):
    engine = database.engine(prepared=False, connect_args={"autocommit": False})
    with Session(engine) as session:
        with session.begin_nested():
            store.enqueue_tx(session, "q", 1)
        session.rollback()
        with session.begin_nested():
            store.enqueue_tx(session, "q", 2)
        session.commit()
    assert payloads(database) == ["2"]
    with Store(engine) as own:
        own.enqueue("q", 3)
    assert payloads(database) == ["2", "3"]


@pytest.mark.databases("sqlite")
def test_a_driver_without_any_begin_is_refused_as_autocommit(database, store):
    engine = database.engine(prepared=False)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    for nested in (False, True):
        with Session(engine) as session:
            if nested:
                session.begin_nested()
            with pytest.raises(InvalidOption, match="autocommit"):
                store.enqueue_tx(session, "q", 1)
    assert database.count() == 0


@pytest.mark.databases("sqlite")
def test_a_session_that_has_read_enqueues_after_another_process_committed(database, store, orders):
    with Session(database.engine()) as session:
        session.execute(select(Order)).all()
        done = threading.Event()

        def write():
            with sqlite3.connect(database.url.removeprefix("sqlite:///"), timeout=20) as other:
                other.execute("INSERT INTO app_order VALUES (9)")
            other.close()
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        store.enqueue_tx(session, "q", 1)
        session.commit()
        thread.join()
    assert done.is_set()
    assert (database.count(), orders()) == (1, [9])


@pytest.mark.databases("sqlite")
def test_a_read_only_transaction_opts_out_of_the_write_lock(database, store, orders):
    engine = database.engine()
    with engine.connect().execution_options(alkstore_begin="DEFERRED") as reading:
        reading.execute(select(Order)).all()
        assert store.enqueue("q", 1)


@pytest.mark.databases("sqlite")
def test_a_prepared_engine_has_wal_foreign_keys_and_a_busy_timeout(database):
    with database.engine().connect() as connection:
        answers = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        }
    assert answers == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 5000, "synchronous": 1}
    full = prepare_sqlite(create_engine(database.url), synchronous="FULL", busy_timeout=2)
    with full.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    prepare_sqlite(full)
    full.dispose()
    for options in ({"begin": "NOW"}, {"synchronous": "OFF"}, {"busy_timeout": 0}):
        with pytest.raises(InvalidOption):
            prepare_sqlite(database.engine(prepared=False), **options)


@pytest.mark.databases("sqlite")
def test_a_store_works_on_an_unprepared_engine_and_leaves_it_so(database):
    engine = database.engine(prepared=False)
    with Store(engine) as store:
        store.enqueue("q", 1)
        assert store.queue("q").claim_one("w").fail("x")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        assert connection.connection.dbapi_connection.isolation_level == ""


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&cache=shared&uri=true"])
def test_c15_in_memory_sqlite_is_refused_with_the_reason(url):
    with pytest.raises(InvalidOption, match="file"):
        Store(url)
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    with pytest.raises(InvalidOption, match="file"):
        Store(engine)


def test_a_schema_on_sqlite_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match="schema"):
        Store(f"sqlite:///{tmp_path / 'x.db'}", schema="s")


@pytest.mark.databases("sqlite")
def test_a_database_without_the_tables_names_the_command(tmp_path, database):
    store = Store(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(SchemaMissing, match="alkstore upgrade") as caught:
        store.enqueue("q", 1)
    assert isinstance(caught.value.__cause__, OperationalError)
    with Session(store.engine) as session, pytest.raises(SchemaMissing):
        store.enqueue_tx(session, "q", 1)
    store.close()


@pytest.mark.parametrize("driver", ["aiosqlite"])
@pytest.mark.databases("sqlite")
def test_an_unprepared_async_engine_is_refused_in_a_savepoint(database, store, driver):
    async def attempt():
        engine = create_async_engine(database.url.replace("sqlite:", f"sqlite+{driver}:"))
        async with AsyncSession(engine) as session:
            await session.begin_nested()
            with pytest.raises(InvalidOption, match="prepare_sqlite"):
                await session.run_sync(store.queue("q").enqueue_tx, 1)
        await engine.dispose()

    asyncio.run(attempt())
