"""The Flask extension in the applications that people have: factories, binds, migrations, workers, forks."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from conftest import server_urls
from databases import TestDatabase
from eventually import eventually
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Integer, delete, event, select, text
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker
from test_examples import free_port

import alkstore_sa
from alkstore_sa import InvalidOption, JobHandle, JobState, NotBound, StopToken, Tasks, Worker
from alkstore_sa.flask import Alkstore, store_of_current_app, tasks_of_current_app

MADE = []


@pytest.fixture(autouse=True)
def _disposed():
    yield
    while MADE:
        app, db = MADE.pop()
        installed = app.extensions["alkstore"]
        if installed._store is not None:
            installed._store.close()
        with app.app_context():
            for engine in db.engines.values():
                engine.dispose()


def made(database, alkstore, *, db=None, **config):
    """An application as a factory makes it."""
    app = Flask("host")
    db = SQLAlchemy(model_class=type("Model", (DeclarativeBase,), {})) if db is None else db
    app.config.update(SQLALCHEMY_DATABASE_URI=database.url, **config)
    db.init_app(app)
    alkstore.init_app(app)
    MADE.append((app, db))
    return app, db


def work(app, jobs=1, **options):
    with app.app_context():
        tasks = tasks_of_current_app()
        return Worker(store_of_current_app(), tasks, max_jobs=jobs, **options).run(StopToken())


@pytest.fixture
def alkstore():
    return Alkstore()


def test_registering_starts_and_opens_nothing(database, alkstore):
    threads = set(threading.enumerate())
    app, db = made(database, alkstore)
    with app.app_context():
        assert db.engine.pool.checkedout() == 0
        assert db.engine.pool.checkedin() == 0
    assert set(threading.enumerate()) <= threads  # those of other tests may end


def test_a_job_commits_or_vanishes_with_the_session_of_the_request(database, alkstore):
    app, db = made(database, alkstore)
    database.sql("CREATE TABLE host (n INTEGER)")

    @app.post("/<outcome>")
    def order(outcome):
        db.session.execute(text("INSERT INTO host VALUES (1)"))
        alkstore.store.enqueue_tx(db.session, "q", outcome)
        if outcome == "fail":
            raise RuntimeError
        db.session.commit()
        return "done"

    client = app.test_client()
    assert client.post("/good").status_code == 200
    assert client.post("/fail").status_code == 500
    with app.app_context():
        assert [job.payload for job in alkstore.store.jobs()] == ["good"]
        assert alkstore.store is store_of_current_app()
    assert database.count("host") == 1


def test_each_application_has_a_store_of_its_own_and_shared_tasks_follow_the_context(database, tmp_path):
    tasks = Tasks()

    @tasks.task(name="greet", queue="greetings")
    def greet(name: str) -> None:
        """Greet."""

    other_database = TestDatabase.sqlite(tmp_path / "other.db")
    app, _ = made(database, Alkstore(tasks=tasks))
    other, _ = made(other_database, Alkstore(tasks=tasks))
    for one, name in ((app, "ann"), (other, "bob"), (app, "cid")):
        with one.app_context():
            greet.enqueue(name)
    for one, names in ((app, ["ann", "cid"]), (other, ["bob"])):
        with one.app_context():
            assert [job.payload["name"] for job in store_of_current_app().jobs()] == names
    work(other)
    with app.app_context():
        greet.enqueue("dan")  # a worker of the other application has not bound the tasks to its store
        assert len(store_of_current_app().jobs()) == 3
    other_database.drop()


def test_a_handler_runs_in_a_context_of_its_own_whose_session_is_the_injected_one(database):
    tasks, seen = Tasks(), []
    app, db = made(database, Alkstore(tasks=tasks))
    database.sql("CREATE TABLE host (n INTEGER)")

    @tasks.task(name="write", queue="q")
    def write(job: JobHandle, session: Session, number: int) -> None:
        from flask import current_app, g

        seen.append((current_app._get_current_object() is app, db.session() is session, hasattr(g, "seen")))
        g.seen = True
        db.session.execute(text("INSERT INTO host VALUES (:n)"), {"n": number})
        if number == 2 and job.attempts == 1:
            raise ValueError("not yet")

    @tasks.task(name="plain", queue="q")
    def plain() -> None:
        db.session.execute(text("INSERT INTO host VALUES (3)"))
        db.session.commit()

    with app.app_context():
        write.enqueue(1)
        write.enqueue(2)
        plain.enqueue()
    work(app, jobs=3, concurrency=1)
    assert seen == [(True, True, False)] * 2
    assert sorted(n for (n,) in database.sql("SELECT n FROM host")) == [1, 3]
    with app.app_context():
        [left] = store_of_current_app().jobs()
        assert (left.payload, left.state, left.last_error.splitlines()[0]) == ({"number": 2}, JobState.DELAYED, "ValueError: not yet")


def test_the_hosts_own_around_is_entered_within_the_context(database):
    from contextlib import contextmanager

    from flask import current_app

    entered = []

    @contextmanager
    def around(job):
        entered.append(current_app.name)
        yield

    tasks = Tasks(around=around)
    app, _ = made(database, Alkstore(tasks=tasks))

    @tasks.task(name="nothing", queue="q")
    def nothing() -> None:
        """Do nothing."""

    with app.app_context():
        nothing.enqueue()
    work(app)
    assert entered == ["host"]


def test_async_handlers_that_run_at_once_have_a_context_each(database):
    from flask import current_app, g

    tasks, seen, both = Tasks(), [], asyncio.Barrier(2)
    app, db = made(database, Alkstore(tasks=tasks))
    database.sql("CREATE TABLE host (n INTEGER)")

    @tasks.task(name="look", queue="q", timeout=60)
    async def look(number: int) -> None:
        assert not hasattr(g, "number")
        g.number = number
        session = db.session()
        await both.wait()
        seen.append((current_app.name, g.number == number, db.session() is session))
        await both.wait()
        db.session.execute(text("INSERT INTO host VALUES (:n)"), {"n": number})
        db.session.commit()

    with app.app_context():
        look.enqueue(1)
        look.enqueue(2)
    assert work(app, jobs=2).done == 2
    assert seen == [("host", True, True)] * 2
    assert sorted(n for (n,) in database.sql("SELECT n FROM host")) == [1, 2]
    with app.app_context():
        assert db.engine.pool.checkedout() == 0  # the sessions ended with their contexts


@pytest.mark.databases("sqlite")
def test_sqlite_is_prepared_unless_told_otherwise(database):
    for wanted in (True, False):
        app, db = made(database, Alkstore(), ALKSTORE_PREPARE_SQLITE=wanted)
        with app.app_context():
            begun = []
            event.listen(db.engine, "before_cursor_execute", lambda _c, _r, statement, *_: begun.append(statement))
            with db.session.begin_nested():
                db.session.execute(text("SELECT 1"))
            assert ("BEGIN IMMEDIATE" in begun) is wanted


def bound(database, tmp_path, alkstore):
    """An application of two databases, the store's and the default one, with rows of its own in both."""
    app = Flask("host")
    app.config.update(SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'main.db'}", SQLALCHEMY_BINDS={"jobs": database.url})
    db = SQLAlchemy(app, model_class=type("Model", (DeclarativeBase,), {}))
    alkstore.init_app(app)
    MADE.append((app, db))
    model = {"__tablename__": "host", "id": mapped_column(Integer, primary_key=True)}
    Here = type("Here", (db.Model,), model)
    There = type("There", (db.Model,), {**model, "id": mapped_column(Integer, primary_key=True), "__bind_key__": "jobs"})
    return app, db, Here, There


def test_a_bind_key_puts_the_store_on_that_engine_and_sessions_join_it_there(database, tmp_path):
    alkstore = Alkstore(bind_key="jobs")
    app, db, Here, There = bound(database, tmp_path, alkstore)
    with app.app_context():
        db.create_all()
        for commit in (True, False):
            db.session.add_all([Here(), There()])
            db.session.flush()
            alkstore.store.enqueue_tx(db.session, "q", commit)  # on the very connection: SQLite has one writer
            alkstore.store.queue("q").enqueue_many_tx(db.session, [commit] * 2)
            (db.session.commit if commit else db.session.rollback)()
        for Model in (Here, There):
            assert len(db.session.scalars(select(Model)).all()) == 1
        db.session.rollback()
        job, *others = alkstore.store.queue("q").claim("w", 9)
        assert [one.payload for one in (job, *others)] == [True] * 3
        db.session.add(There())
        job.ack_tx(db.session)
        db.session.rollback()
        assert alkstore.store.get_job(job.id) is not None
        job.ack_tx(db.session)
        db.session.commit()
        assert [one.id for one in alkstore.store.jobs()] == [one.id for one in others]
    assert database.count() == 2
    assert database.count("host") == 1


def test_a_copy_of_our_tables_under_the_bind_key_is_routed_like_the_hosts_own(database, tmp_path):
    alkstore = Alkstore(bind_key="jobs")
    app, db, *_ = bound(database, tmp_path, alkstore)
    for table in alkstore_sa.metadata.tables.values():
        table.to_metadata(db.metadatas["jobs"])
    JobRow = type("JobRow", (db.Model,), {"__table__": db.metadatas["jobs"].tables["alkstore_job"]})
    with app.app_context():
        alkstore.store.enqueue_tx(db.session, "q", 1)
        [row] = db.session.scalars(select(JobRow)).all()
        assert (row.queue, row.payload) == ("q", "1")
        db.session.execute(delete(JobRow.__table__))
        db.session.commit()
        assert alkstore.store.jobs() == []


def test_without_flask_sqlalchemy_the_store_has_a_url_of_its_own(database, alkstore):
    app = Flask("host")
    app.config["ALKSTORE_URL"] = database.url
    alkstore.init_app(app)
    with app.app_context():
        alkstore.store.enqueue("q", 1)
        alkstore.store.close()
    assert database.count() == 1


def test_the_command_line_is_told_the_database_by_nothing_that_a_child_process_inherits(database, alkstore, monkeypatch):
    monkeypatch.setenv("ALKSTORE_URL", "sqlite:///elsewhere.db")
    monkeypatch.setenv("ALKSTORE_SCHEMA", "elsewhere")
    app, _ = made(database, alkstore)
    before = dict(os.environ)
    with app.app_context():
        alkstore.store.queue("q").enqueue(1)
        alkstore.store.schedule("s", "@every 1d", "q")
    for command, said in (("queues", '"q"'), ("schedules", '"s"'), ("schedules history s", "[]"), ("jobs", '"payload": 1')):
        done = app.test_cli_runner().invoke(args=["alkstore", *command.split(), "--json"])
        assert done.exit_code == 0, done.output
        assert said in done.output
    done = app.test_cli_runner().invoke(args=["alkstore", "check"])
    assert "the tables are as this version makes them" in done.output
    done = app.test_cli_runner().invoke(args=["alkstore", "queues", "--url", "sqlite:///nowhere.db"])
    assert "there is no file" in done.output
    assert dict(os.environ) == before


def python(code, *arguments, folder, **environment):
    done = subprocess.run(
        [sys.executable, *code, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


FLASK = ["-m", "flask", "--app", "host:create_app"]
ONE_BY_ONE = """
import sys, host
for line in sys.argv[1:]:
    if line.startswith(">"):
        with host.create_app().app_context():
            exec(line[1:])
    else:
        done = host.create_app().test_cli_runner().invoke(args=line.split())
        print(done.output)
        if done.exit_code:
            raise SystemExit(f"flask {line}: {done.exit_code}") from done.exception
"""


def one_by_one(*lines, folder, **environment):
    """Run commands of `flask`, and lines of Python (`>`) in a context of the application, in one process: starting one is what takes time."""
    return python(["-c", ONE_BY_ONE], *lines, folder=folder, **environment)


def written(folder):
    return "".join(path.read_text() for path in (folder / "migrations/versions").glob("*.py"))


HOST = """
import os
import alkstore_sa
from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from alkstore_sa import Tasks
from alkstore_sa.flask import Alkstore

class Base(DeclarativeBase): pass
db = SQLAlchemy(model_class=Base)
tasks = Tasks()
alkstore = Alkstore(tasks=tasks, bind_key={bind_key!r})

class Order(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    {column}

@tasks.task(name="note", queue="q")
def note(name: str) -> None:
    assert not {{"ALKSTORE_URL", "ALKSTORE_SCHEMA", "ALKSTORE_APP"}} & set(os.environ)
    db.session.add(Order())
    db.session.commit()

def create_app():
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["HOST_URL"]
    app.config["SQLALCHEMY_BINDS"] = {{"jobs": os.environ.get("JOBS_URL", "sqlite:///unused.db")}} if {bind_key!r} else {{}}
    parts = [lambda: Migrate(app, db, **{hooks}), lambda: db.init_app(app), lambda: alkstore.init_app(app)]
    for place in {order}:
        parts[place]()
    return app
"""


def host(folder, *, column="", order=(1, 0, 2), hooks="{}", bind_key=None):
    (folder / "host.py").write_text(HOST.format(column=column, order=order, hooks=hooks, bind_key=bind_key))


@pytest.mark.parametrize(("order", "kind"), [((1, 0, 2), "postgresql"), ((2, 1, 0), "sqlite")])
def test_a_host_with_a_history_of_its_own_adopts_the_library_by_one_command(order, kind, tmp_path):
    if kind == "postgresql":
        database = TestDatabase.postgresql(server_urls()["18"], template="template1")
    else:
        database = TestDatabase(f"sqlite:///{tmp_path / 'host.db'}", "sqlite")
    place = {"folder": tmp_path, "HOST_URL": database.url}
    hooks = "dict(include_name=lambda name, kind, parents: name != 'ignored')"
    host(tmp_path, order=order, hooks=hooks)
    one_by_one("db init", "db migrate -m first", "db upgrade", **place)
    assert "the tables are at" in python(FLASK, "alkstore", "upgrade", **place)
    host(tmp_path, order=order, column="name: Mapped[str | None]", hooks=hooks)
    one_by_one(
        "alkstore check",
        ">host.db.session.execute(host.alkstore_sa.metadata.tables['alkstore_job'].select())",
        ">host.db.session.execute(__import__('sqlalchemy').text('CREATE TABLE ignored (n INTEGER)')); host.db.session.commit()",
        "db migrate -m second",
        "db upgrade",
        ">host.note.enqueue('x')",
        **place,
    )
    assert "alkstore" not in written(tmp_path)
    assert "ignored" not in written(tmp_path)
    python(FLASK, "alkstore", "run", "--max-jobs", "1", **place)
    assert (database.count('"order"'), database.count()) == (1, 0)
    database.drop()


def test_a_host_of_two_databases_names_our_tables_in_neither_history(tmp_path):
    host(tmp_path, bind_key="jobs")
    one_by_one(
        "alkstore upgrade",
        "db init --multidb",
        "db migrate -m first",
        "db upgrade",
        "db migrate -m second",
        "alkstore check",
        ">host.db.drop_all()",  # knows of none of ours
        ">host.note.enqueue('x'); assert len(host.alkstore.store.jobs()) == 1",
        folder=tmp_path,
        HOST_URL=f"sqlite:///{tmp_path / 'host.db'}",
        JOBS_URL=f"sqlite:///{tmp_path / 'jobs.db'}",
    )
    assert "order" in written(tmp_path)
    assert "alkstore" not in written(tmp_path)


def test_two_lines_put_our_tables_into_the_hosts_own_history(tmp_path):
    lines = "for table in alkstore_sa.metadata.tables.values():\n    table.to_metadata(db.metadata)\n\n"
    host(tmp_path)
    (tmp_path / "host.py").write_text((tmp_path / "host.py").read_text().replace("class Order", lines + "class Order"))
    url = f"sqlite:///{tmp_path / 'host.db'}"
    one_by_one("db init", "db migrate", "db upgrade", "db check", "alkstore check", folder=tmp_path, HOST_URL=url)
    assert "alkstore_job" in written(tmp_path)
    assert "alkstore_sa" not in written(tmp_path)


RELOADED = """
import os
from flask import Flask
from alkstore_sa.flask import Alkstore

VERSION = {version}
app = Flask(__name__)
app.config["ALKSTORE_URL"] = os.environ["HOST_URL"]
alkstore = Alkstore(app)

@app.post("/")
def place():
    queue = alkstore.store.queue("q")
    queue.enqueue(VERSION)
    return {{"version": VERSION, "pid": os.getpid(), "woken": queue.wait(20)}}
"""


@pytest.mark.databases("postgresql-18")
def test_the_reloader_serves_and_enqueues_again_and_its_parent_has_nothing_of_ours(database, tmp_path):
    module = tmp_path / "reloaded.py"
    module.write_text(RELOADED.format(version=1))
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "flask", "--app", "reloaded", "run", "--reload", "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "HOST_URL": database.url, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def placed(version):
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"http://127.0.0.1:{port}/", timeout=30).json()
            return answer if answer["version"] == version else None

    try:
        first = eventually(lambda: placed(1), within=60)
        (tmp_path / "touched").write_text(RELOADED.format(version=2) + "# touched")
        (tmp_path / "touched").rename(module)  # whole, whenever the reloader looks
        second = eventually(lambda: placed(2), within=60, every=0.2)
        threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)
    assert len({server.pid, first["pid"], second["pid"]}) == 3
    assert first["woken"] and second["woken"]
    assert threads == 1
    payloads = [payload for (payload,) in database.sql("SELECT payload FROM alkstore_job ORDER BY id")]
    assert (payloads[0], payloads[-1]) == ("1", "2")


@pytest.mark.databases("postgresql-18", "sqlite")
def test_a_forked_worker_forgets_what_its_parent_used(database, alkstore):
    app, _ = made(database, alkstore)
    with app.app_context():
        store = alkstore.store
        store.enqueue("q", "parent")
        assert store.queue("q").wait(5)  # the listener runs
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store_of_current_app().enqueue("q", "child")
                code = 0 if store_of_current_app().queue("q").wait(5) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert [job.payload for job in store.jobs()] == ["parent", "child"]
        waited = []
        thread = threading.Thread(target=lambda: waited.append(store.queue("empty").wait(20)))
        thread.start()
        eventually(lambda: any(store._bell._ears.values()))
        store.enqueue("empty", 1)
        thread.join(10)
        assert waited == [True]
        store.close()


def test_each_wrong_use_is_told_in_one_sentence(database, alkstore):
    with pytest.raises(NotBound, match=r"no Flask application here.*app\.app_context"):
        _ = alkstore.store
    with Flask("bare").app_context(), pytest.raises(NotBound, match="has no Alkstore"):
        _ = alkstore.store
    app, _ = made(database, alkstore)
    with pytest.raises(InvalidOption, match="has an Alkstore already"):
        alkstore.init_app(app)
    nothing = Flask("nothing")
    Alkstore(nothing)
    with nothing.app_context(), pytest.raises(InvalidOption, match="initialise Flask-SQLAlchemy for this application, or set ALKSTORE_URL"):
        store_of_current_app()
    app.config["ALKSTORE_URL"] = database.url
    with app.app_context(), pytest.raises(InvalidOption, match="leave one of the two out"):
        store_of_current_app()
    unknown, _ = made(database, Alkstore(bind_key="nowhere"))
    with pytest.raises(InvalidOption, match="bind_key 'nowhere'"), unknown.app_context():
        store_of_current_app()


def test_without_flask_the_extra_is_named():
    code = "import sys; sys.modules['flask'] = None\nimport alkstore_sa.flask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'alkstore-sa[flask]'" in done.stderr


def test_a_handlers_session_on_another_database_than_the_workers_is_told_so(database, tmp_path):
    elsewhere = TestDatabase.sqlite(tmp_path / "elsewhere.db")
    tasks = Tasks(
        session_factory=sessionmaker(binds={alkstore_sa.metadata.tables["alkstore_job"]: elsewhere.engine()}, bind=database.engine())
    )

    @tasks.task(name="write", queue="q")
    def write(session: Session) -> None:
        raise AssertionError("never called")

    with database.store() as store:
        tasks.bind(store)
        write.enqueue()
        Worker(store, tasks, max_jobs=1).run(StopToken())
        [job] = store.jobs()
        assert "this handler's session keeps our tables in" in job.last_error
    elsewhere.drop()
