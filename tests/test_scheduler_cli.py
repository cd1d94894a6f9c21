"""The scheduler's commands, as an operator types them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from databases import TestDatabase
from scheduling import SECOND, assert_once, make_due, wait_until
from sqlalchemy import inspect

from alkstore_sa import migrate

ALKSTORE = Path(sys.executable).parent / "alkstore"


def said(*arguments, **environment):
    ran = subprocess.run(
        [ALKSTORE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("ALKSTORE_")}, **environment},
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_schedules_history_and_locks_are_listed(database, store):
    url = database.url
    assert said("schedules", "--url", url, "--json") == (0, "[]\n", "")
    store.schedule("s [x]", "@every 10s", "q", {"n": 1}, headers={"a": "b"}, expires=5)
    make_due(database, "s [x]", 21)
    store.tick()
    store.try_lock("import", 3600, owner="me")

    code, out, _ = said("schedules", ALKSTORE_URL=url)
    assert code == 0
    assert out.splitlines()[0].split() == ["name", "spec", "queue", "task", "next", "last", "error"]
    assert out.splitlines()[1].startswith("s [x]")
    (shown,) = json.loads(said("schedules", "--json", "--url", url)[1])
    assert (shown["name"], shown["spec"], shown["payload"], shown["headers"], shown["expires"]) == (
        "s [x]",
        "@every 10s",
        {"n": 1},
        {"a": "b"},
        5,
    )

    assert len(said("schedules", "history", "s [x]", "--url", url)[1].splitlines()) == 4
    assert (
        len(said("schedules", "--url", url, "history", "s [x]", "--limit", "1", ALKSTORE_URL="sqlite:///elsewhere.db")[1].splitlines()) == 2
    )
    fires = json.loads(said("schedules", "history", "s [x]", "--json", ALKSTORE_URL=url)[1])
    assert [fire["caught_up"] for fire in fires] == [False, True, True]
    assert fires[0]["job_id"] == 3

    assert said("locks", "--url", url)[1].splitlines()[1].split()[:3] == ["import", "me", "1"]
    assert json.loads(said("locks", "--url", url, "--json")[1])[0]["token"] == 1


@pytest.mark.parametrize("command", [["schedules"], ["schedules", "history", "s"], ["locks"], ["scheduler"]])
def test_a_command_without_a_database_or_its_tables_says_so_in_one_sentence(command, tmp_path):
    code, _, err = said(*command)
    assert code == 2
    assert "--url" in err
    code, _, err = said(*command, ALKSTORE_URL=f"sqlite:///{tmp_path / 'none.db'}")
    assert (code, err.count("\n")) == (1, 1)
    assert not (tmp_path / "none.db").exists()


@pytest.mark.timeout(300)
def test_three_schedulers_fire_each_boundary_once_while_the_leader_is_killed(database, store):
    store.schedule("s", "@every 1s", "q")
    started = [
        subprocess.Popen([ALKSTORE, "scheduler", "--url", database.url], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    try:
        assert [each.stderr.readline() for each in started] == ["the scheduler stands by\n"] * 3  # all hear signals
        leader = wait_until(lambda: leading(store, started), 60)
        wait_until(lambda: database.count() >= 2)
        leader.kill()
        wait_until(lambda: leading(store, started) not in (None, leader), 60)
        count = database.count()
        wait_until(lambda: database.count() > count)
        for each, number in zip(started, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), strict=True):
            each.send_signal(number)
        codes = sorted(each.wait(30) for each in started)
    finally:
        for each in started:
            each.kill()
            each.communicate()
    assert codes == [-9, 0, 0]
    assert store.locks() == []
    store.tick()
    assert_once(store, "s", SECOND)


def leading(store, started):
    owners = [info.owner for info in store.locks()]
    return next((each for each in started if any(owner.startswith(f"{each.pid}-") for owner in owners)), None)


@pytest.fixture
def at_the_first_revision(request, tmp_path):
    from conftest import server_urls

    if request.param == "sqlite":
        database = TestDatabase(f"sqlite:///{tmp_path / 'first.db'}", "sqlite")
    else:
        database = TestDatabase.postgresql(server_urls()["18"], template="template0")
    migrate.upgrade(database.engine(), revision="alkstore_0001")
    yield database
    database.drop()


@pytest.mark.parametrize("at_the_first_revision", ["sqlite", "postgresql-18"], indirect=True)
def test_the_second_revision_goes_up_and_down_with_rows_in_the_tables(at_the_first_revision):
    database = at_the_first_revision
    with database.store() as store:
        job_id = store.enqueue("q", {"n": 1})
    migrate.upgrade(database.engine())
    assert migrate.check(database.engine()) == []
    with database.store() as store:
        assert store.get_job(job_id).payload == {"n": 1}
        store.schedule("s", "@every 10s", "q")
        make_due(database, "s", 1_000)
        store.tick()
        store.try_lock("n")
    migrate.downgrade(database.engine(), revision="alkstore_0001")
    assert sorted(name for name in inspect(database.engine()).get_table_names() if name != "alkstore_version") == [
        "alkstore_dead",
        "alkstore_job",
    ]
    assert database.count() == 65
    migrate.upgrade(database.engine())
    assert migrate.check(database.engine()) == []
