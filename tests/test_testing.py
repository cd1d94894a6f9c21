"""The helpers for an application's tests: one transaction for all, jobs on the calling thread, readable assertions, time moved on."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from alkstore_sa import Fail, InvalidOption, JobHandle, JobState, NotBound, Snooze, Tasks
from alkstore_sa.testing import advance, assert_enqueued, joined, run_due

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tasks(store):
    return Tasks(store)


@pytest.fixture
def connection(database, store):
    with store.engine.connect() as made, made.begin() as transaction:
        yield made
        if transaction.is_active:
            transaction.rollback()


def rows(connection, table="alkstore_job"):
    return connection.execute(text(f"SELECT count(*) FROM {table}")).scalar()


# -- joined -----------------------------------------------------------------------------------------------------------


def test_every_verb_of_a_joined_store_is_in_the_tests_transaction_and_rolled_back_with_it(store, database, connection):
    with joined(store, connection):
        queue = store.queue("q", max_attempts=1)
        queue.enqueue_many([1, 2, 3])
        first, second = queue.claim("w", limit=2)
        assert first.ack()
        assert second.fail("no")
        assert store.schedule("s", "@every 1m", "q").name == "s"
        store.tick()
        assert store.try_lock("l") is not None
        assert [stats.ready for stats in store.queues()] == [1]
        assert database.kind == "sqlite" or database.count() == 0  # nobody else sees it
        assert rows(connection) == 1
        assert rows(connection, "alkstore_dead") == 1
    connection.rollback()
    for table in ("job", "dead", "schedule", "lock"):
        assert database.count(f"alkstore_{table}") == 0


def test_a_refused_verb_leaves_the_tests_transaction_usable(store, connection):
    with joined(store, connection):
        job_id = store.enqueue("q", 1)
        with pytest.raises(InvalidOption, match="run_at"):
            store.enqueue("q", 1, run_at=store.get_job(job_id).enqueued_at + timedelta(hours=2), expires=60)
        with pytest.raises(RuntimeError, match="mine"), store.begin() as bind:
            bind.execute(text("DELETE FROM alkstore_job"))
            raise RuntimeError("mine")
        assert store.get_job(job_id) is not None


def test_a_joined_session_and_the_store_see_each_other(store, connection):
    with Session(connection, join_transaction_mode="create_savepoint") as session, joined(store, session):
        first = store.enqueue_tx(session, "q", 1)
        assert store.get_job(first) is not None
        session.commit()
        second = store.enqueue("q", 2)
        session.rollback()
        assert store.get_job(first) is not None
        assert store.get_job(second) is not None
        assert [job.id for job in store.jobs()] == [first, second]


def test_only_this_context_is_joined(store, database, connection):
    seen = []
    if database.kind == "postgresql":
        with joined(store, connection):
            store.enqueue("q", 1)
            thread = threading.Thread(target=lambda: seen.append(store.jobs()))
            thread.start()
            thread.join()
        assert [list(jobs) for jobs in seen] == [[]]
    with joined(store, connection):
        store.enqueue("q", 1)
    connection.rollback()
    store.enqueue("q", 2)
    assert database.count() == 1


def test_two_stores_are_joined_apart(database, tmp_path):
    other = type(database).sqlite(tmp_path / "other.db")
    with database.store() as one, other.store() as two, one.engine.connect() as first, two.engine.connect() as second:
        with joined(one, first), joined(two, second):
            one.enqueue("q", 1)
            assert not two.jobs()
            two.enqueue("q", 2)
            assert len(one.jobs()) == len(two.jobs()) == 1
        first.rollback()
        second.rollback()
    other.drop()


def test_what_cannot_be_joined_is_refused(store, database, tmp_path):
    with store.engine.connect() as connection:
        if database.kind == "postgresql":
            with (
                pytest.raises(InvalidOption, match="autocommit"),
                joined(store, connection.execution_options(isolation_level="AUTOCOMMIT")),
            ):
                pass
    unprepared = create_engine(database.url)
    if database.kind == "sqlite":
        with unprepared.connect() as connection, pytest.raises(InvalidOption, match="prepare_sqlite"), joined(store, connection):
            pass
    unprepared.dispose()
    elsewhere = create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    with elsewhere.connect() as connection, pytest.raises(InvalidOption, match="another database"), joined(store, connection):
        pass
    elsewhere.dispose()
    with pytest.raises(TypeError, match="int"), joined(store, 1):
        pass


# -- run_due ----------------------------------------------------------------------------------------------------------


@contextmanager
def perhaps_joined(how, store):
    if how == "apart":
        yield
        return
    with store.engine.connect() as connection, connection.begin() as transaction:
        with joined(store, connection):
            yield
        transaction.rollback()


@pytest.mark.parametrize("how", ["joined", "apart"])
def test_due_jobs_run_here_with_what_they_enqueue(store, database, tasks, how):
    database.sql("CREATE TABLE paid (id INTEGER)")
    seen = []

    @tasks.task(name="pay")
    def pay(session: Session, order: int) -> None:
        session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": order})
        mail.enqueue_tx(session, to="ada")

    @tasks.task(name="mail", queue="mails")
    async def mail(job: JobHandle, to: str) -> None:
        seen.append((to, job.attempts, threading.current_thread() is threading.main_thread()))

    @tasks.raw(queue="legacy")
    def raw(job: JobHandle) -> None:
        seen.append(job.payload)

    @tasks.delivery("webhooks")
    def deliver(job: JobHandle) -> None:
        seen.append(job.payload)

    with perhaps_joined(how, store):
        pay.enqueue(order=7)
        pay.options(delay=60).enqueue(order=8)
        store.enqueue("legacy", [1])
        store.outbox("webhooks").enqueue("hook")
        ran = run_due(tasks)
        assert all(one in seen for one in (("ada", 1, True), [1], "hook"))
        assert {(one.task, one.outcome) for one in ran} == {("pay", "done"), ("mail", "done"), (None, "done")}
        assert len(ran) == 4
        assert [job.payload for job in store.jobs()] == [{"order": 8}]
        advance(store, 60)
        assert [(one.task, one.payload) for one in run_due(tasks)] == [("pay", {"order": 8}), ("mail", {"to": "ada"})]
    assert database.count("paid") == (0 if how == "joined" else 2)


@pytest.mark.parametrize("how", ["joined", "apart"])
def test_a_handlers_failure_is_raised_once_its_job_is_settled_or_recorded(store, database, tasks, how):
    database.sql("CREATE TABLE paid (id INTEGER)")
    dead = []
    tasks = Tasks(store, on_dead=lambda job: dead.append(job.last_error.splitlines()[0]))

    @tasks.task(name="pay", max_attempts=2, base_backoff=20)
    def pay(session: Session) -> None:
        session.execute(text("INSERT INTO paid VALUES (1)"))
        session.flush()
        raise LookupError("no such order")

    with perhaps_joined(how, store):
        job_id = pay.enqueue()
        with pytest.raises(LookupError, match="no such order"):
            run_due(tasks)
        job = store.get_job(job_id)
        assert (job.state, job.attempts) == (JobState.DELAYED, 1)
        assert job.last_error.startswith("LookupError: no such order")
        assert run_due(tasks) == []
        advance(store, timedelta(seconds=30))
        [one] = run_due(tasks, errors="record")
        assert (one.outcome, type(one.error), dead) == ("dead", LookupError, ["LookupError: no such order"])
        assert store.get_job(job_id).state is JobState.DEAD
        with store.begin() as bind:
            assert rows(bind, "paid") == 0


def test_a_handlers_own_decision_is_no_failure(store, tasks):
    @tasks.task(name="later")
    def later() -> None:
        raise Snooze(60)

    @tasks.task(name="never")
    def never() -> None:
        raise Fail("no")

    later.enqueue()
    never.enqueue()
    assert [one.outcome for one in run_due(tasks)] == ["snoozed", "dead"]


def test_a_timeout_ends_an_async_handler(store, tasks):
    @tasks.task(name="hang", timeout=0.01)
    async def hang() -> None:
        await asyncio.Event().wait()

    hang.enqueue()
    [one] = run_due(tasks, errors="record")
    assert (one.outcome, str(one.error)) == ("put back for another attempt", "timeout: longer than 0.01 s")
    assert [job.last_error for job in store.jobs()] == ["timeout: longer than 0.01 s"]


def test_the_limit_ends_a_chain_that_never_ends(store, tasks):
    @tasks.task(name="again")
    def again() -> None:
        again.enqueue()

    again.enqueue()
    assert len(run_due(tasks, limit=5)) == 5
    assert len(store.jobs()) == 1


def test_a_job_that_nobody_handles_is_named(store, tasks):
    @tasks.task(name="known")
    def known() -> None: ...

    store.enqueue("default", {})
    with pytest.raises(InvalidOption, match="no handler is registered for jobs of queue 'default'"):
        run_due(tasks)
    assert store.jobs()[0].attempts == 0


def test_an_application_s_own_session_class_and_its_owned_commit_join_too(store, database, tasks):
    database.sql("CREATE TABLE paid (id INTEGER)")

    class Special(Session):
        pass

    tasks = Tasks(store, session_factory=sessionmaker(store.engine, class_=Special))
    seen = []

    @tasks.task(name="own", own_commit=True)
    def own(session: Session) -> None:
        seen.append(type(session).__name__)
        session.execute(text("INSERT INTO paid VALUES (1)"))
        session.commit()

    with perhaps_joined("joined", store):
        own.enqueue()
        assert [one.outcome for one in run_due(tasks)] == ["done"]
        assert not store.jobs()
    assert seen == ["Special"]
    assert database.count("paid") == 0


def test_async_sessions_run_apart_and_say_so_when_joined(store, database):
    url = database.url.replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url)
    if database.kind == "sqlite":
        from alkstore_sa import prepare_sqlite

        prepare_sqlite(engine.sync_engine)
    tasks = Tasks(store, async_engine=engine)

    @tasks.task(name="a", max_attempts=1)
    async def run(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    run.enqueue()
    assert [one.outcome for one in run_due(tasks)] == ["done"]
    with perhaps_joined("joined", store):
        run.enqueue()
        with pytest.raises(InvalidOption, match="cannot join"):
            run_due(tasks)


def test_the_arguments_of_run_due_are_checked(store, tasks):
    with pytest.raises(NotBound):
        run_due(Tasks())
    with pytest.raises(InvalidOption, match="errors"):
        run_due(tasks, errors="ignore")
    with pytest.raises(InvalidOption, match="limit"):
        run_due(tasks, limit=0)


# -- assert_enqueued --------------------------------------------------------------------------------------------------


def test_what_was_enqueued_is_found_stored_or_pending(store, database, tasks):
    @tasks.task(name="mail")
    def mail(order: int, to: str = "nobody") -> None: ...

    with Session(store.engine) as session:
        pending = mail.enqueue_tx(session, 1, to="ada")
        assert assert_enqueued(session, mail, order=1).id == pending
        assert assert_enqueued(session.connection(), mail).id == pending
        with pytest.raises(AssertionError, match="no job of this task at all"):
            assert_enqueued(store, mail)
        session.commit()
    assert assert_enqueued(store, mail, to="ada", order=1).id == pending
    mail.enqueue(2)
    with pytest.raises(AssertionError) as raised:
        assert_enqueued(store, mail, order=1, to="bob")
    assert str(raised.value).splitlines() == [
        "no job of task 'mail' with order=1, to='bob'",
        f"  job {pending} (ready): to='ada' (expected 'bob')",
        f"  job {pending + 1} (ready): order=2 (expected 1); to was left to its default (expected 'bob')",
    ]
    with pytest.raises(TypeError, match="no parameter oder"):
        assert_enqueued(store, mail, oder=1)


def test_what_was_enqueued_is_found_behind_thousands_of_its_task(store, tasks):
    @tasks.task(name="mail")
    def mail(order: int) -> None: ...

    mail.enqueue_many([mail.call(n) for n in range(2_001)])
    with Session(store.engine) as session:
        pending = mail.enqueue_tx(session, 2_001)
        assert assert_enqueued(session, mail, order=2_001).id == pending
        session.commit()
    assert assert_enqueued(store, mail, order=2_001).id == pending
    with pytest.raises(AssertionError, match="and 1997 more$"):
        assert_enqueued(store, mail, order=-1)


# -- advance ----------------------------------------------------------------------------------------------------------


def test_time_moves_on_for_everything_that_is_stored(store, connection):
    with joined(store, connection):
        queue = store.queue("q", max_attempts=1)
        store.schedule("s", "@every 1h", "q")
        for _ in range(3):  # fires an hour apart: their keys meet on the way
            advance(store, timedelta(hours=1))
            store.tick()
        assert len(store.schedule_history("s")) == 3
        before = [fire.boundary for fire in store.schedule_history("s")]
        advance(store, timedelta(hours=1))
        assert [fire.boundary for fire in store.schedule_history("s")] == [one - timedelta(hours=1) for one in before]
        lapsing = queue.claim_one("w")
        assert store.try_lock("l", 60)
        queue.enqueue(1, delay=600)
        queue.enqueue(2, delay=900)
        advance(store, 601)
        assert not store.locks()
        assert [job.state for job in store.jobs() if job.id == lapsing.id] == [JobState.READY]
        assert [stats.delayed for stats in store.queues()] == [1]
        with pytest.raises(InvalidOption, match="delta"):
            advance(store, 0)


# -- the fixtures, in applications ------------------------------------------------------------------------------------


def run_pytest(folder, *arguments, **environment):
    import os

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ALKSTORE_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**kept, "PYTHONWARNINGS": "error", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


PLAIN = {
    "shop.py": """
        from sqlalchemy.orm import Session
        from alkstore_sa import Tasks

        tasks = Tasks()

        @tasks.task()
        def mail(session: Session, order: int) -> None:
            receipt.enqueue_tx(session, order=order)

        @tasks.task()
        def receipt(order: int) -> None: ...
    """,
    "conftest.py": """
        import pytest
        import shop

        pytest_plugins = ["alkstore_sa.testing.fixtures"]

        @pytest.fixture
        def tasks(alkstore_store, monkeypatch):
            monkeypatch.setattr(shop.tasks._binding, "store", None)
            return shop.tasks.bind(alkstore_store)
    """,
    "test_shop.py": """
        import pytest
        from shop import mail, receipt
        from alkstore_sa.testing import assert_enqueued, run_due

        @pytest.mark.parametrize("order", range(4))
        def test_a_receipt_follows(tasks, alkstore_session, alkstore_store, order):
            assert not alkstore_store.jobs()  # nothing is left of the test before
            mail.enqueue_tx(alkstore_session, order=order)
            assert_enqueued(alkstore_session, mail, order=order)
            alkstore_session.commit()
            assert [one.task for one in run_due(tasks, limit=1)] == ["shop:mail"]
            assert_enqueued(alkstore_store, receipt, order=order)
    """,
}

FLASK = {
    "conftest.py": """
        import pytest
        from site_app import db, make_app, store

        pytest_plugins = ["alkstore_sa.testing.fixtures"]

        @pytest.fixture(scope="session")
        def app(tmp_path_factory):
            app = make_app(f"sqlite:///{tmp_path_factory.mktemp('site') / 'site.db'}")
            with app.app_context():
                db.create_all()
                yield app

        @pytest.fixture(scope="session")
        def alkstore_engine(app):
            return db.engine
    """,
    "site_app.py": """
        from flask import Flask
        from flask_sqlalchemy import SQLAlchemy
        from sqlalchemy.orm import Session
        from alkstore_sa import Store, Tasks, metadata, prepare_sqlite

        db, tasks = SQLAlchemy(), Tasks()

        class Order(db.Model):
            id = db.Column(db.Integer, primary_key=True)
            paid = db.Column(db.Boolean, default=False)

        def store():
            return tasks.store

        @tasks.task(name="pay")
        def pay(session: Session, order: int) -> None:
            session.get(Order, order).paid = True

        def make_app(url):
            app = Flask(__name__)
            app.config["SQLALCHEMY_DATABASE_URI"] = url
            db.init_app(app)

            @app.post("/orders")
            def create():
                order = Order()
                db.session.add(order)
                db.session.flush()
                pay.enqueue_tx(db.session, order=order.id)
                db.session.commit()
                return {"id": order.id}

            with app.app_context():
                prepare_sqlite(db.engine)
                metadata.create_all(db.engine)
                tasks.bind(Store(db.engine))
            return app
    """,
    "test_site.py": """
        import pytest
        from site_app import Order, db, pay, store, tasks
        from alkstore_sa.testing import assert_enqueued, joined, run_due

        @pytest.fixture
        def client(app, alkstore_connection):
            with joined(store(), alkstore_connection):
                db.session.remove()
                session = db.session()
                session.get_bind = lambda *args, **kwargs: alkstore_connection
                session.join_transaction_mode = "create_savepoint"
                with app.test_client() as client:
                    yield client
                db.session.remove()

        @pytest.mark.parametrize("time", range(2))
        def test_an_order_is_paid_in_the_background(client, time):
            assert db.session.query(Order).count() == 0
            order = client.post("/orders").json["id"]
            assert_enqueued(store(), pay, order=order)
            assert [one.outcome for one in run_due(tasks)] == ["done"]
            db.session.expire_all()
            assert db.session.get(Order, order).paid
    """,
}


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(textwrap.dedent(content))
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["plain", "xdist"])
def test_a_plain_application_s_suite_uses_the_fixtures(database, tmp_path, arguments):
    ran = run_pytest(write(tmp_path, PLAIN), *arguments, ALKSTORE_TEST_URL=database.url if database.kind == "postgresql" else "")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 passed" in ran.stdout
    assert database.count() == 0


@pytest.mark.timeout(120)
def test_a_flask_application_s_suite_uses_the_helpers(tmp_path):
    pytest.importorskip("flask_sqlalchemy")
    ran = run_pytest(write(tmp_path, FLASK))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


@pytest.mark.timeout(120)
def test_the_helpers_do_not_load_themselves_into_every_pytest(tmp_path):
    (tmp_path / "test_nothing.py").write_text("import sys\n\ndef test_it():\n    assert 'alkstore_sa' not in sys.modules\n")
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout
