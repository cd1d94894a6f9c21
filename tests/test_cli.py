"""The command line: what it says, where it says it, and with which exit code."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hosts import empty_sqlite

from alkstore_sa import InvalidOption, Store, migrate
from alkstore_sa.cli import main

SUPPORTED = "postgresql+psycopg:// or sqlite:///"


def alkstore(*arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ALKSTORE_")}
    return subprocess.run(
        [sys.executable, "-m", "alkstore_sa.cli", *arguments],
        env={**kept, "PYTHONWARNINGS": "error", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def said(*arguments, **environment):
    """Run a command in this process; its exit code, output and errors."""
    result = CliRunner(env={"ALKSTORE_URL": None, "ALKSTORE_SCHEMA": None, **environment}).invoke(main, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_up_look_and_down(tmp_path):
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    at_head = "the tables are at alkstore_0003\n"
    assert said("upgrade", "--url", url) == (0, at_head, "")
    assert said("upgrade", ALKSTORE_URL=url) == (0, at_head, "")
    assert said("current", ALKSTORE_URL=url) == (0, "alkstore_0003\n", "")
    assert said("check", ALKSTORE_URL=url) == (0, "the tables are as this version makes them\n", "")
    assert said("downgrade", "--yes", ALKSTORE_URL=url) == (0, "the tables are at base\n", "")
    assert said("current", ALKSTORE_URL=url) == (0, "base\n", "")
    code, out, err = said("check", ALKSTORE_URL=url)
    assert (code, out) == (1, "")
    assert (
        err
        == "Error: this database has no table alkstore_dead, alkstore_fire, alkstore_job, alkstore_lock, alkstore_pause, alkstore_schedule, alkstore_worker: run `alkstore upgrade`\n"
    )


def test_check_shows_what_is_newer_and_is_content(database):
    database.sql("ALTER TABLE alkstore_job ADD COLUMN newer TEXT")
    code, out, err = said("check", "--url", database.url)
    assert (code, out) == (0, "the tables have all that this version needs\n")
    assert err == "newer than this version, or changed by hand: extra column alkstore_job.newer\n"
    database.sql("DROP INDEX alkstore_job_ready")
    code, out, err = said("check", "--url", database.url)
    assert (code, out) == (1, "")
    assert "lacks index alkstore_job_ready: run `alkstore upgrade`" in err


@pytest.mark.databases("postgresql-18")
def test_check_shows_what_was_changed_by_hand(database):
    database.sql("ALTER TABLE alkstore_job ALTER COLUMN payload DROP NOT NULL, ALTER COLUMN priority TYPE bigint")
    err = said("check", "--url", database.url)[2]
    assert sorted(line.rsplit(": ")[1] for line in err.splitlines()) == [
        "nullable of column alkstore_job.payload",
        "type of column alkstore_job.priority",
    ]


@pytest.mark.databases("postgresql-18")
def test_the_schema_is_an_option_and_named_in_the_advice(database):
    assert said("check", "--url", database.url, ALKSTORE_SCHEMA="Jobs")[2] == (
        "Error: schema 'Jobs' has no table alkstore_dead, alkstore_fire, alkstore_job, alkstore_lock, alkstore_pause, alkstore_schedule, alkstore_worker: run `alkstore upgrade --schema Jobs`\n"
    )
    assert said("current", "--schema", "Jobs", "--url", database.url)[1] == "base\n"
    assert database.sql("SELECT 1 FROM pg_namespace WHERE nspname = 'Jobs'") == []
    assert said("upgrade", "--schema", "Jobs", "--url", database.url)[0] == 0
    assert said("check", "--schema", "Jobs", "--url", database.url)[:2] == (0, "the tables are as this version makes them\n")
    assert said("downgrade", "--yes", "--schema", "Jobs", "--url", database.url)[1] == "the tables are at base\n"
    assert said("current", "--url", database.url)[1] == "alkstore_0003\n"


@pytest.mark.parametrize("table", ["alembic_version", "shop_version"])
def test_an_upgrade_beside_another_history_prints_the_line_that_saves_the_tables(database, table):
    database.sql(f"CREATE TABLE {table} (version_num VARCHAR(32) NOT NULL)")
    database.sql("CREATE TABLE app_version (id INTEGER, version_num TEXT)")  # looks like one, and is none
    code, out, err = said("upgrade", "--url", database.url)
    assert (code, out) == (0, "the tables are at alkstore_0003\n")
    assert f"({table})" in err
    assert "from alkstore_sa.migrate import include_name\n    context.configure(..., include_name=include_name())" in err


@pytest.mark.databases("postgresql-18")
def test_another_history_is_found_in_the_schema_of_the_tables_too(database):
    database.sql("CREATE SCHEMA jobs")
    assert "include_name" not in said("upgrade", "--schema", "jobs", "--url", database.url)[2]
    database.sql("CREATE TABLE jobs.alembic_version (version_num VARCHAR(32) NOT NULL)")
    assert "include_name=include_name()" in said("upgrade", "--schema", "jobs", "--url", database.url)[2]
    assert "include_name" not in said("upgrade", "--url", database.url)[2]


BAD_URLS = {
    "mysql://u:s3cret@h/x": "mysql is not supported",
    "oracle+oracledb://u:s3cret@h/x": "oracle is not supported",
    "nonsense://u:s3cret@h/x": "nonsense is not supported",
    "postgresql+nonsense://u:s3cret@h/x": "SQLAlchemy knows no driver postgresql+nonsense",
    "postgresql+psycopg2cffi://u:s3cret@h/x": "the driver of postgresql+psycopg2cffi is not installed (psycopg2cffi)",
    "postgresql+psycopg://u:p@s3cret:s3cret@h:s3cret/x": "this is no database URL",
    "sqlite://u:s3cret@h/x": "this is no database URL of sqlite",
    "s3cret": "this is no database URL",
    "": "this is no database URL",
    "sqlite+aiosqlite:///jobs.db": "sqlite+aiosqlite is an asynchronous driver",
    "sqlite://": "in-memory SQLite gives every connection a database of its own",
    "sqlite:///:memory:": "in-memory SQLite gives every connection a database of its own",
}


@pytest.mark.parametrize(("url", "sentence"), BAD_URLS.items(), ids=BAD_URLS)
def test_a_url_that_cannot_be_used_is_refused_in_one_sentence_without_its_password(url, sentence):
    for command in ("upgrade", "current", "check", "downgrade"):
        code, out, err = said(command, "--url", url, *(["--yes"] if command == "downgrade" else []))
        assert (code, out) == (1, "")
        assert err.startswith(f"Error: {sentence}")
        assert err.count("\n") == 1
        assert "s3cret" not in err
        assert ("sqlite:///" if "memory" in err else SUPPORTED) in err
    with pytest.raises(InvalidOption) as raised:
        Store(url)
    assert str(raised.value).startswith(sentence)
    error = raised.value
    while error is not None:
        assert "s3cret" not in str(error)
        error = error.__cause__


def test_a_schema_on_sqlite_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    assert said("upgrade", "--url", url, "--schema", "jobs") == (1, "", "Error: SQLite has no schemas: leave schema out\n")
    with empty_sqlite(tmp_path / "jobs.db").engine().connect() as connection, pytest.raises(InvalidOption, match="no schemas"):
        migrate.upgrade(connection.engine, schema="jobs")


def test_a_look_makes_no_file(tmp_path):
    url = f"sqlite:///{tmp_path / 'typo.db'}"
    for command in (["current"], ["check"], ["downgrade", "--yes"]):
        code, out, err = said(*command, "--url", url)
        assert (code, out) == (1, "")
        assert err == f"Error: there is no file {tmp_path / 'typo.db'}; `alkstore upgrade` makes it\n"
    assert not (tmp_path / "typo.db").exists()


def test_an_error_of_the_database_is_one_sentence_and_debug_shows_its_traceback(tmp_path):
    url = f"sqlite:///{tmp_path / 'no' / 'folder.db'}"
    short, long = alkstore("upgrade", "--url", url), alkstore("--debug", "upgrade", "--url", url)
    assert (short.returncode, short.stdout, short.stderr) == (1, "", "Error: unable to open database file\n")
    assert long.returncode == 1
    assert "Traceback" in long.stderr
    closed = said("upgrade", "--url", "postgresql+psycopg://u:s3cret@127.0.0.1:1/x")
    assert closed[:2] == (1, "")
    assert closed[2].startswith("Error: connection failed") and closed[2].count("\n") == 1 and "s3cret" not in closed[2]
    (tmp_path / "text.db").write_text("no database " * 100)
    assert said("check", "--url", f"sqlite:///{tmp_path / 'text.db'}") == (1, "", "Error: file is not a database\n")


def test_an_unknown_revision_is_one_sentence(database):
    code, out, err = said("upgrade", "--revision", "nope", "--url", database.url)
    assert (code, out, err) == (1, "", "Error: Can't locate revision identified by 'nope'\n")


def test_a_downgrade_asks_first(database):
    assert said("downgrade", "--url", database.url) == (1, "", "Error: this loses jobs: say --yes\n")
    assert migrate.current(database.engine()) == "alkstore_0003"


def test_a_url_must_be_given_and_the_message_says_how():
    code, out, err = said("upgrade")
    assert (code, out) == (2, "")
    assert "--url" in err and "ALKSTORE_URL" in err


@pytest.mark.parametrize("command", [[], ["upgrade"], ["downgrade"], ["current"], ["check"]])
def test_every_command_explains_itself(command):
    code, out, err = said(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage:" in out and ("ALKSTORE_URL" in out or not command)
    listed = said("-h")[1]
    assert all(name in listed for name in command)
