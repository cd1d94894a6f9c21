"""The demo from outside, as a user runs it, and the parts of it that a balanced run would not show."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from sqlalchemy import inspect

from alkstore_sa._payload import JsonCodec, encoded
from alkstore_sa.demo.books import Books, Entry
from alkstore_sa.demo.orders import planned
from alkstore_sa.demo.payloads import fingerprint, invented
from alkstore_sa.demo.receiver import refusals

DEMO = [sys.executable, "-m", "alkstore_sa.cli", "demo"]


def demo(*arguments, **options):
    return subprocess.run([*DEMO, *map(str, arguments)], capture_output=True, text=True, timeout=150, check=False, **options)


def totals(stdout):
    return {name: int(count.replace(",", "")) for name, count in re.findall(r"│ (\S[^│]*?) +│ +([\d,]+) │", stdout)}


def jsonl(path, *payloads):
    path.write_text("".join(json.dumps(payload, ensure_ascii=False) + "\n" for payload in payloads), encoding="utf-8")
    return path


def until(condition, what):
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return value


# -- the whole ------------------------------------------------------------------------------------------------------


def test_the_books_balance_through_rollbacks_refusals_and_a_kill_and_only_what_the_run_wrote_is_removed(database, store):
    not_ours = store.outbox("orders").enqueue("not the demo's")
    database.sql("CREATE TABLE demo_order (number INTEGER)")
    ran = demo("--url", database.url, "--jobs", 80, "--seed", 1)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "The books balance" in ran.stdout
    assert "was killed (SIGKILL)" in ran.stdout

    kept = [order for transaction in planned(invented(80, 1), 1) for order in transaction.orders if transaction.kept(order)]
    counted = totals(ran.stdout)
    assert counted.pop("delivered more than once") >= 1  # the message of the killed process
    assert counted == {
        "committed": len(kept),
        "rolled back": 80 - len(kept),
        "delivered": len(kept),
        "retried": sum(refusals(1, order.number) > 0 for order in kept),
        "dead": 0,
    }

    assert [job.id for job in store.jobs()] == [not_ours]
    assert [name for name in inspect(database.observer).get_table_names() if name.startswith("demo")] == ["demo_order"]


def test_without_a_url_it_runs_in_a_file_that_stays_and_without_a_terminal_it_shows_no_progress(tmp_path):
    lines = jsonl(tmp_path / "in.jsonl", {"n": 1}, {"n": 2})
    ran = demo("--input", lines, "--jobs", 5, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (ran.returncode, ran.stderr) == (0, "")
    (file,) = tmp_path.glob("alkstore-demo-*/demo.db")
    assert ran.stdout.startswith(f"database: sqlite:///{file}\n")
    counted = totals(ran.stdout)
    assert counted["committed"] + counted["rolled back"] == 5  # the lines come again
    for said in ("\x1b", "\r", "written"):
        assert said not in ran.stdout


@pytest.mark.databases("sqlite")
def test_what_is_done_to_the_outbox_behind_its_back_unbalances_the_books(database):
    forged = (
        """UPDATE alkstore_job SET headers = '{"demo-order": "999999"}'"""
        " WHERE id = (SELECT max(id) FROM alkstore_job WHERE state = 'ready') RETURNING id"
    )
    with subprocess.Popen([*DEMO, "--url", database.url, "--jobs", "400"], stdout=subprocess.PIPE, text=True) as running:
        until(lambda: database.sql(forged), "nothing was written")
        stdout, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    assert re.search(r"^1 orders \(\d+\) committed, but never arrived$", stdout, re.MULTILINE)
    assert "1 orders (999999) not committed, but arrived" in stdout
    assert "The books do not balance" in stdout


@pytest.mark.databases("sqlite")
def test_a_demo_that_is_killed_leaves_no_process_behind(database):
    with subprocess.Popen([*DEMO, "--url", database.url, "--jobs", "2000"], stdout=subprocess.PIPE) as running:
        until(lambda: database.count() > 50, "nothing was written")
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=60)  # returns once the last process that holds the pipe has ended


# -- input ----------------------------------------------------------------------------------------------------------


def test_each_line_of_the_input_is_a_message(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", {"a": "line\u2028separator"}, None, [], 2**70, "ü")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\n"))
    ran = demo("--url", f"sqlite:///{tmp_path / 'demo.db'}", "--input", path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counted = totals(ran.stdout)
    assert counted["committed"] + counted["rolled back"] == 5


def test_bad_lines_are_named_and_nothing_is_written(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n[NaN]\n"nul \\u0000"\n\xff\n')
    ran = demo("--url", f"sqlite:///{tmp_path / 'demo.db'}", "--input", path)
    assert ran.returncode == 1
    for said in ("line 3: no JSON (Expecting value, at column 7)", "line 4: payload[0]", "line 5: payload", "line 6: no JSON"):
        assert said in ran.stderr
    assert "line 1:" not in ran.stderr
    assert "line 2:" not in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "demo.db").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n \n", "no line holds a payload"),
        ("[" * 100_000, "line 1: no JSON"),
        ("[" * 201 + "]" * 201, "line 1: payload[0]"),
        ("9" * 5_000, "line 1: no JSON"),
        ("{\n" * 50, "and 45 more lines"),
    ],
)
def test_an_input_that_cannot_be_delivered_is_refused(tmp_path, text, said):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    ran = demo("--input", path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("url", ["mysql://h/d", "sqlite://", "not a url", "postgresql+psycopg://u:hidden@127.0.0.1:1/d"])
def test_a_database_that_cannot_be_used_is_said_in_one_line(url):
    ran = demo("--url", url, "--jobs", 1)
    assert ran.returncode == 1
    assert ran.stderr.startswith("Error: ")
    assert ran.stderr.count("\n") == 1
    assert "hidden" not in ran.stdout + ran.stderr


# -- the books ------------------------------------------------------------------------------------------------------

ONE, TWO, UNDONE = Entry(1, 11, "a"), Entry(2, 12, "b"), Entry(3, 11, "c")
BALANCED = Books(committed=[ONE, TWO], rolled_back=[UNDONE], accepted=[ONE, TWO, TWO], refused=[ONE], rows=[ONE, TWO], dead=0, left=0)


def test_books_that_balance_have_nothing_to_say():
    assert BALANCED.imbalances() == []
    assert BALANCED.totals() == {
        "committed": 2,
        "rolled back": 1,
        "delivered": 2,
        "delivered more than once": 1,
        "retried": 1,
        "dead": 0,
    }


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"accepted": [ONE]}, "1 orders (2) committed, but never arrived"),
        ({"accepted": [ONE], "refused": [TWO]}, "1 orders (2) committed, but never arrived"),
        ({"accepted": [ONE, TWO, UNDONE]}, "1 orders (3) not committed, but arrived"),
        ({"refused": [UNDONE]}, "1 orders (3) not committed, but arrived"),
        ({"accepted": [ONE, TWO, Entry(9, 19, "z")]}, "1 orders (9) not committed, but arrived"),
        ({"accepted": [ONE, replace(TWO, fingerprint="z")]}, "1 orders (2) arrived with another payload"),
        ({"refused": [replace(ONE, fingerprint="z")]}, "1 orders (1) arrived with another payload"),
        ({"accepted": [ONE, TWO, replace(TWO, message_id=13)]}, "1 orders (2) arrived under another message id"),
        ({"rows": [TWO]}, "1 orders (1) committed, but without its row"),
        ({"rows": [ONE, TWO, UNDONE]}, "1 orders (3) not committed, but with a row"),
        ({"rows": [ONE, replace(TWO, message_id=13)]}, "1 orders (2) with another row than was written"),
        ({"left": 4}, "4 messages are still in the outbox"),
    ],
)
def test_a_planted_imbalance_is_found(planted, found):
    assert replace(BALANCED, **planted).imbalances() == [found]


def test_of_many_orders_the_first_ten_are_named():
    (finding,) = replace(BALANCED, accepted=[*BALANCED.accepted, *(Entry(number, 0, "") for number in range(100, 120))]).imbalances()
    assert finding == "20 orders (100, 101, 102, 103, 104, 105, 106, 107, 108, 109, …) not committed, but arrived"


def test_equal_payloads_share_a_fingerprint_and_no_others_do():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    different = [0, 0.0, -0.0, False, None, "", "0", [], [0], {}, {"": 0}, [1, 2], [2, 1], 2**70, float(2**70), "é", "e\u0301"]
    assert len({fingerprint(payload) for payload in different}) == len(different)


# -- what it delivers -----------------------------------------------------------------------------------------------


def test_made_up_payloads_are_many_kinds_and_the_same_for_the_same_seed():
    payloads = invented(200, 3)
    assert [encoded(JsonCodec(), payload) for payload in payloads] == [encoded(JsonCodec(), payload) for payload in invented(200, 3)]
    assert {type(payload) for payload in payloads} == {dict, list, str, int, float, bool, type(None)}
    assert len({fingerprint(payload) for payload in payloads}) == 200


def test_a_plan_writes_each_payload_once_and_has_every_kind_of_rollback():
    plan = planned(list(range(200)), 0)
    orders = [(order, transaction) for transaction in plan for order in transaction.orders]
    assert [order.payload for order, _ in orders] == [order.number for order, _ in orders] == list(range(200))
    assert plan[0].kept(plan[0].orders[0])
    kinds = {(order.savepoint, transaction.commits) for order, transaction in orders}
    assert kinds == {(savepoint, commits) for savepoint in ("none", "released", "rolled back") for commits in (True, False)}
    kept = {(order.savepoint, transaction.commits) for order, transaction in orders if transaction.kept(order)}
    assert kept == {("none", True), ("released", True)}
