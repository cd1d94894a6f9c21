"""Alembic owns the schema: the revisions, their way up and down, beside a host's own history, and what is said where they did not run."""

import ast
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import server_urls
from hosts import GIVEN_UP, MODELS, Host, Interpreter, empty_postgresql, empty_sqlite, login, operations, shape
from sqlalchemy import create_engine, inspect, make_url
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import alkstore_sa
from alkstore_sa import InvalidOption, SchemaMissing, SchemaOutdated, Store, metadata, metadata_for, migrate

ROOT = Path(__file__).resolve().parent.parent
REVISIONS = sorted((ROOT / "alembic" / "versions").glob("*.py"))
MIXED = "Mixed Case"


def server_url(version="18"):
    if version not in server_urls():
        pytest.skip(f"requires_postgresql: version {version} is not to be had here")
    return server_urls()[version]


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request, tmp_path):
    """A database with nothing in it; of SQLite not even the file is there."""
    made = empty_sqlite(tmp_path / "empty.db") if request.param == "sqlite" else empty_postgresql(server_url())
    yield made
    made.drop()


@pytest.fixture
def empty_pg():
    made = empty_postgresql(server_url())
    yield made
    made.drop()


# -- up, down, at once ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter() as made:
        yield made


def test_c16_the_library_and_its_host_live_in_one_database(empty, tmp_path, interpreter):
    host = Host(tmp_path / "shop", empty.url, interpreter)
    host.configure(models=MODELS + GIVEN_UP)
    host.revision("first")
    host.alembic("upgrade|head")
    empty.sql("CREATE TABLE foreign_table (id INTEGER)")
    version = empty.sql("SELECT version_num FROM alembic_version")

    for code, out, err in host.alkstore("upgrade", times=3):
        assert (code, out) == (0, "the tables are at alkstore_0003\n")
        assert "alembic_version" in err and "include_name=include_name()" in err
    assert shape(empty) == made_by_create_all(empty, tmp_path)

    unfiltered = host.revision("unfiltered")  # what the warning is about: without the line our tables would go
    assert {("drop_table", "alkstore_job"), ("drop_table", "alkstore_dead"), ("drop_table", "alkstore_version")} <= set(
        operations(unfiltered)
    )
    next((tmp_path / "shop").glob("migrations/versions/*_unfiltered.py")).unlink()

    host.filter()  # the host's models have given a table up
    assert operations(host.revision("second")) == [("drop_table", "given_up")]
    assert empty.sql("SELECT version_num FROM alembic_version") == version

    engine = empty.engine(prepared=False)
    assert migrate.check(engine) == []
    migrate.downgrade(engine)
    assert migrate.current(engine) is None
    assert not inspect(engine).has_table("alkstore_job")
    migrate.upgrade(engine)
    assert migrate.check(engine) == []
    assert empty.sql("SELECT version_num FROM alembic_version") == version
    assert sorted(inspect(engine).get_table_names()) == sorted(
        [
            "alembic_version",
            "alkstore_dead",
            "alkstore_fire",
            "alkstore_job",
            "alkstore_lock",
            "alkstore_pause",
            "alkstore_schedule",
            "alkstore_worker",
            "alkstore_version",
            "foreign_table",
            "given_up",
            "invoice",
        ]
    )


def made_by_create_all(database, folder, schema=None):
    """The shape of our tables as `create_all` makes them in a database of the same kind."""
    other = empty_sqlite(folder / "created.db") if database.kind == "sqlite" else empty_postgresql(database.server_url)
    try:
        if schema is not None:
            other.sql(f'CREATE SCHEMA "{schema}"')
        metadata_for(schema=schema).create_all(other.engine())
        return shape(other, schema)
    finally:
        other.drop()


def test_three_processes_upgrade_a_database_that_is_not_there_yet(empty, interpreter):
    if empty.kind == "sqlite":
        assert not Path(make_url(empty.url).database).exists()
    told = interpreter.run("alkstore", ["upgrade"], times=3, ALKSTORE_URL=empty.url)
    assert told == [(0, "the tables are at alkstore_0003\n", "")] * 3
    assert migrate.current(empty.engine()) == "alkstore_0003"


def test_three_processes_upgrade_one_schema_under_an_empty_search_path(empty_pg, tmp_path, interpreter):
    _, url = login(empty_pg.server_url, empty_pg, search_path="''", default_transaction_isolation="serializable")
    empty_pg.sql(f'GRANT CREATE ON DATABASE {make_url(empty_pg.url).database} TO "{make_url(url).username}"')
    told = interpreter.run("alkstore", ["upgrade", "--schema", MIXED], times=3, ALKSTORE_URL=url)
    assert told == [(0, "the tables are at alkstore_0003\n", "")] * 3
    assert shape(empty_pg, MIXED) == made_by_create_all(empty_pg, tmp_path, MIXED)
    assert empty_pg.sql(
        "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE relname ~ '^alkstore'  GROUP BY 1"
    ) == [(MIXED,)]
    engine = create_engine(url, poolclass=NullPool)
    assert migrate.check(engine, schema=MIXED) == []
    with Store(engine, schema=MIXED) as store:
        store.verify()
        job = store.queue("q").enqueue(1)
        assert store.queue("q").claim_one("w").id == job
    migrate.downgrade(engine, schema=MIXED)
    migrate.upgrade(engine, schema=MIXED)
    assert migrate.check(engine, schema=MIXED) == []


def test_an_upgrade_waits_for_a_writer_of_the_file(tmp_path):
    database = empty_sqlite(tmp_path / "busy.db")
    database.sql("CREATE TABLE invoice (id INTEGER)")
    with ThreadPoolExecutor() as threads:
        with database.engine().connect() as connection, connection.begin():
            upgrading = threads.submit(migrate.upgrade, database.engine())
            with pytest.raises(TimeoutError):
                upgrading.result(timeout=0.7)
        upgrading.result(timeout=60)
    assert migrate.current(database.engine()) == "alkstore_0003"
    database.drop()


def test_the_way_down_and_up_again_with_rows_in_the_tables(database):
    with database.store() as store:
        queue = store.queue("q")
        queue.enqueue_many(range(5))
        queue.enqueue(1, delay=60)
        assert queue.claim_one("w").fail("no")
    engine = database.engine()
    migrate.downgrade(engine)
    assert [name for name in inspect(engine).get_table_names() if name != "alkstore_version"] == []
    migrate.upgrade(engine)
    assert migrate.check(engine) == []
    with database.store() as store:
        store.verify()
        assert store.jobs() == []
        assert store.queue("q").enqueue("again")


def test_an_engine_is_left_as_it_was_by_an_upgrade(empty):
    engine = create_engine(empty.url, isolation_level="AUTOCOMMIT")
    migrate.upgrade(engine)
    with engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        if empty.kind == "sqlite":
            assert driver.isolation_level is None
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 0  # not prepared
        else:
            assert driver.autocommit is True
    engine.dispose()
    assert migrate.current(empty.engine()) == "alkstore_0003"


def test_an_upgrade_that_fails_leaves_nothing_behind(empty):
    empty.sql("CREATE TABLE alkstore_dead_died (id INTEGER)")  # the name of an index that the revision makes last
    engine = empty.engine()
    with pytest.raises(Exception, match="alkstore_dead_died"):
        migrate.upgrade(engine)
    assert inspect(engine).get_table_names() == ["alkstore_dead_died"]
    empty.sql("DROP TABLE alkstore_dead_died")
    migrate.upgrade(engine)
    assert migrate.check(engine) == []


def test_tables_that_another_history_made_are_left_to_it(empty):
    engine = empty.engine()
    metadata.create_all(engine)
    for act in (migrate.upgrade, migrate.downgrade):
        with pytest.raises(InvalidOption, match="another Alembic history, or create_all"):
            act(engine)
    assert migrate.check(engine) == []
    assert migrate.current(engine) is None
    assert migrate.made_elsewhere(engine)


def test_a_schema_needs_no_right_to_create_one_where_it_is_there(empty_pg):
    role, url = login(empty_pg.server_url, empty_pg)
    empty_pg.sql(f"CREATE SCHEMA jobs AUTHORIZATION {role}")
    engine = create_engine(url, poolclass=NullPool)
    migrate.upgrade(engine, schema="jobs")
    assert migrate.check(engine, schema="jobs") == []


def test_the_default_schema_may_be_named(empty_pg):
    engine = empty_pg.engine()
    migrate.upgrade(engine, schema="public")
    assert migrate.check(engine, schema="public") == migrate.check(engine) == []
    assert migrate.current(engine) == "alkstore_0003"


def test_two_schemas_live_side_by_side(empty_pg):
    engine = empty_pg.engine()
    for schema in ("one", "two", None):
        migrate.upgrade(engine, schema=schema)
    assert [migrate.check(engine, schema=schema) for schema in ("one", "two", None)] == [[], [], []]
    migrate.downgrade(engine, schema="one")
    assert [migrate.current(engine, schema=schema) for schema in ("one", "two", None)] == [None, "alkstore_0003", "alkstore_0003"]


# -- the alembic command in a checkout ------------------------------------------------------------------------------


@pytest.fixture
def in_the_checkout(interpreter):
    def run(*arguments, code=0):
        [told] = interpreter.run("alembic", arguments, folder=ROOT)
        assert told[0] == code, told
        return told[1] + told[2]

    return run


def test_the_alembic_command_of_a_checkout_upgrades_checks_and_downgrades(empty, in_the_checkout):
    placed = ["-x", f"schema={MIXED}"] if empty.kind == "postgresql" else []
    schema = MIXED if placed else None
    here = ["-x", f"url={empty.url}", *placed]
    assert "alkstore_0003" not in in_the_checkout(*here, "current")
    if placed:
        assert not inspect(empty.engine()).has_schema(MIXED)  # a look makes nothing
    in_the_checkout(*here, "upgrade", "head")
    assert "No new upgrade operations detected" in in_the_checkout(*here, "check")
    assert migrate.current(empty.engine(), schema=schema) == "alkstore_0003"
    in_the_checkout(*here, "downgrade", "base")
    assert migrate.current(empty.engine(), schema=schema) is None


def test_the_alembic_command_says_what_it_needs(in_the_checkout):
    assert "FAILED: say which database" in in_the_checkout("upgrade", "head", code=255)
    said = in_the_checkout("-x", "url=mysql://u:secret@h/x", "upgrade", "head", code=255)
    assert "FAILED: mysql is not supported" in said
    assert "secret" not in said


def test_the_sql_of_the_revisions_can_be_written_and_run_by_hand(empty_pg, tmp_path, in_the_checkout):
    script = in_the_checkout("-x", f"url={empty_pg.url}", "-x", f"schema={MIXED}", "upgrade", "head", "--sql")
    engine = empty_pg.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in script.split(";\n"):
            if statement.strip() and "INFO" not in statement:
                connection.exec_driver_sql(statement)
    assert shape(empty_pg, MIXED) == made_by_create_all(empty_pg, tmp_path, MIXED)
    assert migrate.current(empty_pg.engine(), schema=MIXED) == "alkstore_0003"


# -- what is there and what is not ----------------------------------------------------------------------------------


def verbs(store, database):
    """Every way to enqueue, each of which must tell that the tables are not as they should be."""
    queue = store.queue("q")
    yield lambda: queue.enqueue(1)
    yield lambda: queue.enqueue_many([1, 2])
    yield lambda: queue.claim("w")
    with Session(database.engine()) as session:
        yield lambda: queue.enqueue_tx(session, 1)
    with database.engine().connect() as connection:
        yield lambda: store.outbox_enqueue_tx(connection, "o", 1)


def test_a_database_without_the_tables_is_told_by_every_verb(empty):
    with Store(empty.engine(), wake=False) as store:
        for verb in verbs(store, empty):
            with pytest.raises(SchemaMissing, match="run `alkstore upgrade`$") as raised:
                verb()
            assert raised.value.__cause__.orig is not None  # the database's own error
            assert not isinstance(raised.value, SchemaOutdated)
        with pytest.raises(
            SchemaMissing,
            match="alkstore_dead, alkstore_fire, alkstore_job, alkstore_lock, alkstore_pause, alkstore_schedule, alkstore_worker.*run `alkstore upgrade`$",
        ):
            store.verify()
        with pytest.raises(SchemaMissing, match="run `alkstore upgrade`$"):
            migrate.check(store.engine)


def test_the_caller_may_go_on_after_the_tables_were_found_missing(empty):
    empty.sql("CREATE TABLE invoice (id INTEGER)")
    with Store(empty.engine(), wake=False) as store, Session(store.engine) as session:
        session.connection().exec_driver_sql("INSERT INTO invoice VALUES (1)")
        with pytest.raises(SchemaMissing), session.begin_nested():
            store.enqueue_tx(session, "q", 1)
        session.commit()
    assert empty.count("invoice") == 1


def test_a_missing_table_of_somebody_else_is_not_ours(empty_pg):
    migrate.upgrade(empty_pg.engine())
    empty_pg.sql(
        "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO audit_log VALUES (NEW.id); RETURN NEW; END $$"
    )
    empty_pg.sql("CREATE TRIGGER audit AFTER INSERT ON alkstore_job FOR EACH ROW EXECUTE FUNCTION audit()")
    with empty_pg.store() as store, pytest.raises(Exception, match="audit_log") as raised:
        store.enqueue("q", 1)
    assert not isinstance(raised.value, SchemaMissing)


def test_the_hint_names_the_schema_in_which_the_tables_should_be(empty_pg):
    with Store(empty_pg.engine(), schema=MIXED) as store:
        for verb in verbs(store, empty_pg):
            with pytest.raises(SchemaMissing, match="run `alkstore upgrade --schema 'Mixed Case'`$"):
                verb()
        with pytest.raises(SchemaMissing, match="schema 'Mixed Case'.*run `alkstore upgrade --schema 'Mixed Case'`$"):
            store.verify()


def test_a_dropped_column_is_told_by_verify_and_by_the_verbs_that_write_it(database):
    database.sql("ALTER TABLE alkstore_job DROP COLUMN headers")
    with database.store() as store:
        with pytest.raises(SchemaOutdated, match="alkstore_job .*column headers: run `alkstore upgrade`$"):
            store.verify()
        for verb in verbs(store, database):
            with pytest.raises(SchemaOutdated, match="run `alkstore upgrade`$") as raised:
                verb()
            assert raised.value.__cause__.orig is not None


def test_a_dropped_index_is_told_by_verify(database):
    database.sql("DROP INDEX alkstore_job_expiring")
    with database.store() as store, pytest.raises(SchemaOutdated, match="index alkstore_job_expiring"):
        store.verify()


def test_what_is_newer_is_accepted(database):
    """A database that a later version has upgraded already still serves this one, and this one's `upgrade` leaves it alone."""
    database.sql("ALTER TABLE alkstore_job ADD COLUMN newer TEXT")
    database.sql("CREATE TABLE alkstore_newer (id INTEGER)")
    database.sql("CREATE INDEX alkstore_job_newer ON alkstore_job (newer)")
    database.sql("UPDATE alkstore_version SET version_num = 'alkstore_0999'")
    engine = database.engine()
    migrate.upgrade(engine)
    assert migrate.current(engine) == "alkstore_0999"
    assert sorted(migrate.check(engine)) == [
        "extra column alkstore_job.newer",
        "extra index alkstore_job.alkstore_job_newer",
        "extra table alkstore_newer",
    ]
    with database.store() as store:
        store.verify()
        assert store.enqueue("q", 1)
        assert store.queue("q").claim_one("w").ack()


def test_an_unknown_revision_is_not_accepted_where_something_is_missing(database):
    database.sql("UPDATE alkstore_version SET version_num = 'alkstore_0999'")
    database.sql("ALTER TABLE alkstore_job DROP COLUMN headers")
    with pytest.raises(SchemaOutdated):
        migrate.upgrade(database.engine())


def test_a_role_needs_two_grants_to_enqueue(empty_pg):
    for schema in (None, "jobs"):
        migrate.upgrade(empty_pg.engine(), schema=schema)
        role, url = login(empty_pg.server_url, empty_pg)
        table = "alkstore_job" if schema is None else "jobs.alkstore_job"
        if schema is not None:
            empty_pg.sql(f"GRANT USAGE ON SCHEMA jobs TO {role}")
        empty_pg.sql(f"GRANT INSERT, SELECT (id) ON {table} TO {role}")
        engine = create_engine(url, poolclass=NullPool)
        with Store(engine, schema=schema) as store:
            queue = store.queue("q")
            ids = [queue.enqueue(1, headers={"a": "b"}, priority=2), queue.enqueue(2, delay=5, expires=60), *queue.enqueue_many([3, 4])]
            with Session(engine) as session, session.begin():
                ids += [queue.enqueue_tx(session, 5), *queue.enqueue_many_tx(session, [6, 7]), store.outbox_enqueue_tx(session, "o", 8)]
            assert ids == list(range(1, 9))
            with pytest.raises(Exception, match="permission denied"):
                queue.claim("w")
        assert empty_pg.count(table) == 8


def test_a_worker_needs_the_rows_of_two_tables_and_nothing_else(empty_pg):
    migrate.upgrade(empty_pg.engine())
    role, url = login(empty_pg.server_url, empty_pg)
    empty_pg.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON alkstore_job, alkstore_dead TO {role}")
    with Store(url) as store:
        store.verify()
        assert migrate.check(store.engine) == []
        queue = store.queue("q")
        queue.enqueue_many(range(5))
        queue.enqueue(6, delay=0.001)
        done, failed, again, released, *_ = queue.claim("w", limit=5)
        assert done.ack() and failed.fail("no") and again.retry("later") and released.release() and released.heartbeat() is False
        assert [job.id for job in queue.dead()] == [failed.id]
        assert queue.replay(failed.id) and store.cancel(failed.id)
        assert queue.purge_dead(older_than=0) == 0
        assert store.queues()[0].name == "q"
        with pytest.raises(Exception, match="permission denied"):
            migrate.current(store.engine)


# -- the revisions themselves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda path: path.name)
def test_a_revision_imports_nothing_of_ours(revision):
    roots = set()
    for node in ast.walk(ast.parse(revision.read_text())):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert roots <= {"alembic", "sqlalchemy"}


def test_the_folder_alembic_does_not_shadow_the_library():
    assert REVISIONS
    assert not list((ROOT / "alembic").rglob("__init__.py"))
    found = subprocess.run(
        [sys.executable, "-c", "import alembic.command; print(alembic.__file__)"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not Path(found.strip()).is_relative_to(ROOT / "alembic")


def test_every_constraint_and_index_has_a_short_name_of_its_own():
    names = [index.name for table in metadata.sorted_tables for index in table.indexes]
    names += [constraint.name for table in metadata.sorted_tables for constraint in table.constraints]
    names += [table.name for table in metadata.sorted_tables]
    assert all(isinstance(name, str) and name.startswith("alkstore_") for name in names), names
    assert len(set(names)) == len(names)
    assert max(len(name.encode()) for name in names) <= 63


def test_the_names_fit_beside_the_longest_schema(empty_pg):
    longest = "é" * 31 + "x"
    assert len(longest.encode()) == 63
    engine = empty_pg.engine()
    migrate.upgrade(engine, schema=longest)
    assert migrate.check(engine, schema=longest) == []
    with Store(engine, schema=longest) as store:
        store.verify()
        assert store.enqueue("q", 1) == 1
    with pytest.raises(InvalidOption, match="1 to 63 bytes"):
        migrate.upgrade(engine, schema=longest + "x")
    with pytest.raises(InvalidOption, match="1 to 63 bytes"):
        migrate.upgrade(engine, schema="")


def test_a_new_revision_of_ours_is_written_by_autogenerate(tmp_path, interpreter):
    """The template and `render_item` make a revision that runs and that imports nothing of ours."""
    shutil.copytree(ROOT / "alembic", tmp_path / "alembic", ignore=shutil.ignore_patterns("__pycache__", "0*.py"))
    (tmp_path / "alembic.ini").write_text("[alembic]\nscript_location = %(here)s/alembic\n")
    database = empty_sqlite(tmp_path / "new.db")
    here = ["-x", f"url={database.url}"]
    commands = (["revision", "--autogenerate", "-m", "jobs", "--rev-id", "alkstore_0003"], ["upgrade", "head"], ["check"])
    [told] = interpreter.run("alembic", *([*here, *command] for command in commands), folder=tmp_path)
    assert told[0] == 0, told
    [made] = (tmp_path / "alembic" / "versions").glob("*.py")
    test_a_revision_imports_nothing_of_ours(made)
    created = empty_sqlite(tmp_path / "created.db")
    metadata.create_all(created.engine())
    assert shape(database) == shape(created)
    database.drop()
    created.drop()


def test_nothing_of_ours_issues_ddl_by_itself(empty):
    with Store(empty.engine()) as store:
        store.queue("q")
        store.outbox("o")
        with pytest.raises(SchemaMissing):
            store.verify()
    assert inspect(empty.engine()).get_table_names() == []
    assert "create_all" not in "".join(path.read_text() for path in Path(alkstore_sa.__file__).parent.rglob("*.py")).replace(
        "or create_all", ""
    ).replace("by `create_all`", "").replace("by `metadata.create_all`", "")
