"""The commands on a store: what each shows and does on both databases, as a process, on terminals, and as JSON."""

import json
import os
import re
import sys
from datetime import timedelta

import click
import pexpect
import pytest
from test_cli import alkstore, said

from alkstore_sa import Tasks
from alkstore_sa.cli import main
from alkstore_sa.testing import advance

pytestmark = pytest.mark.timeout(120)

SAID = {"host": "h", "pid": 7, "queues": [], "tasks": [], "raw_queues": [], "running": 0, "done": 3, "failed": 1, "handler_ms": 400}


def register(store, worker_id="w1", **said):
    """A worker's beat, as it writes it itself."""
    with store.begin() as bind:
        store.parts.workers.beat(bind, worker_id, {**SAID, **said})


@pytest.fixture
def scene(store):
    """Queue emails: 1 ready, 2 delayed, 3 claimed, 4 dead, 5 dead; an outbox with 6; a schedule, a lock, a worker, a pause."""
    emails = store.queue("emails", max_attempts=1)
    emails.enqueue_many([{"order": n} for n in range(1, 6)])
    claimed = {job.id: job for job in emails.claim("w1", limit=5)}
    claimed[1].release()
    claimed[2].release(delay=3600)
    for number in (4, 5):
        claimed[number].fail("ValueError: no such address\nTraceback: long and of no use here")
    store.outbox("webhooks").enqueue({"event": "paid"})
    store.schedule("nightly", "@every 1d", "emails")
    store.try_lock("report", 600, owner="me")
    register(store, queues=["emails"], tasks=["mail"], raw_queues=["emails"], running=1)
    store.pause_queue("slow")
    return store


APP = """
import os
from alkstore_sa import Store, Tasks

tasks = Tasks(Store(os.environ["APP_URL"]))


@tasks.task(name="mail", queue="emails")
def mail(to: str, n: int = 1) -> None: ...


unbound = Tasks()
"""


# -- every command as a process ---------------------------------------------------------------------------------------

COMMANDS = {
    "queues": ["queues"],
    "jobs": ["jobs"],
    "job": ["job", "1"],
    "dead": ["dead"],
    "replay": ["replay", "4"],
    "replay --all": ["replay", "--all", "--queue", "emails", "--yes"],
    "cancel": ["cancel", "1", "--yes"],
    "purge": ["purge", "--queue", "emails", "--older-than", "0", "--yes"],
    "enqueue": ["enqueue", "emails", '{"order": 9}'],
    "pause": ["pause", "emails"],
    "resume": ["resume", "slow"],
    "workers": ["workers"],
    "ping": ["ping", "--worker", "w1"],
    "doctor": ["doctor"],
    "schedules": ["schedules"],
    "schedules history": ["schedules", "history", "nightly"],
    "schedules pause": ["schedules", "pause", "nightly"],
    "schedules resume": ["schedules", "resume", "nightly"],
    "locks": ["locks"],
}


def keys_of(command):
    """The keys that a command's help documents."""
    found = main
    for name in command:
        if not isinstance(found, click.Group) or name not in found.commands:
            break
        found = found.commands[name]
    first = re.search(r"Keys of --json: (.*?)\.", found.epilog)[1]
    return {re.sub(r" \(.*", "", key) for key in re.sub(r"\([^)]*\)", "", first).split(", ")} - {""}


@pytest.mark.timeout(400)
def test_every_command_says_as_a_process_what_its_json_says_and_documents_its_keys(database, scene):
    """Steps on, one after another, as an operator would."""
    store = scene
    store.tick()
    for name, command in COMMANDS.items():
        register(store, queues=["emails"])
        database.sql(f"UPDATE alkstore_worker SET seen_at = {database.now(60)}")  # it is alive, however long a process takes to start
        ran = alkstore(*command, "--json", ALKSTORE_URL=database.url)
        assert ran.returncode == 0, (name, ran.stderr)
        assert ran.stderr == ""
        told = json.loads(ran.stdout)
        for one in told if isinstance(told, list) else [told]:
            assert {key.strip() for key in keys_of(command)} | ({"reasons"} if name == "job" else set()) == set(one), name
    assert [job.id for job in store.jobs()] == [2, 3, 4, 5, 6, 7]
    assert dict(store.paused_queues()).keys() == {"emails"}


def test_tables_are_plain_lines_where_there_is_no_terminal(database, scene):
    code, out, err = said("jobs", "--url", database.url)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["id", "queue", "task", "state", "tries", "when", "priority", "worker", "enqueued", "last", "error"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert "webhooks (outbox)" in lines[6]
    assert all(line == line.rstrip() for line in lines)
    assert "Traceback" not in out


# -- tables on terminals ----------------------------------------------------------------------------------------------

ONE_AFTER_ANOTHER = """
import json, sys
from alkstore_sa.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command, prog_name="alkstore")
    except SystemExit as ended:
        print(f"<{ended.code}>", flush=True)
"""
LOOKS = [
    ["queues"],
    ["jobs"],
    ["dead"],
    ["workers"],
    ["schedules"],
    ["schedules", "history", "nightly"],
    ["locks"],
    ["doctor"],
    ["job", "4"],
]


def on_terminal(database, columns, commands):
    """Run commands one after another in one process on a terminal; the exit code and the lines of each."""
    environment = {**os.environ, "ALKSTORE_URL": database.url, "TERM": "xterm", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
    for name in ("COLUMNS", "LINES", "CI"):
        environment.pop(name, None)
    arguments = ["-c", ONE_AFTER_ANOTHER, json.dumps(commands)]
    child = pexpect.spawn(sys.executable, arguments, env=environment, dimensions=(40, columns), encoding="utf-8", timeout=60)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", child.read()).replace("\r", "")
    child.close()
    assert child.exitstatus == 0, out
    *shown, rest = re.split(r"^<(\d)>\n", out, flags=re.MULTILINE)
    assert rest == "", out
    names = [" ".join(command) for command in commands]
    return dict(zip(names, map(int, shown[1::2]), strict=True)), dict(zip(names, map(str.splitlines, shown[::2]), strict=True))


LONG = "web-7f9c-xxxxxxxxxxxxxxxxxxxx:31337:deadbeef"
TITLES = {  # at 80 columns, and what comes with 200
    "queues": ("queue ready delayed claimed dead oldest workers", ""),
    "jobs": ("id queue task state tries when last error", "priority worker enqueued"),
    "dead": ("id queue task state tries when last error", "priority worker enqueued"),
    "workers": ("worker queues running done failed seen", "ms/job host pid up"),
    "schedules": ("name spec queue next last error", "task"),
    "schedules history nightly": ("boundary fired job what", ""),
    "locks": ("name owner token ends", ""),
}


@pytest.fixture
def crowded(database, store, scene):
    """The scene with names and errors as long as they come, a worker that went silent, and a fire that was late."""
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-1)}")
    store.tick()
    register(store, "old", queues=["emails"])
    advance(store, 15)
    register(store, LONG, queues=["emails", "invoices", "reports"], done=1_234_567, host="web-7f9c" + "x" * 20, handler_ms=9_876_543)
    store.schedule("a-schedule-with-a-name-that-is-long", "@every 30d", "invoices")
    database.sql("UPDATE alkstore_schedule SET last_error = 'LookupError: there is no such zone' WHERE queue = 'invoices'")
    queue = store.queue("a-queue.with-a-name/that-is-too-long-for-a-column", max_attempts=1)
    queue.enqueue_many([1] * 7)
    queue.claim_one(LONG).fail("ConnectionError: the peer at address mx.example.org has closed the connection")
    store.try_lock("a-lock-with-a-name-that-is-rather-long", 600, owner=LONG)
    return store


@pytest.mark.parametrize("columns", [80, 200])
def test_every_table_reads_well_on_a_terminal(database, crowded, columns):
    codes, shown = on_terminal(database, columns, LOOKS)
    assert {name for name, code in codes.items() if code} == {"doctor"}
    for name, lines in shown.items():
        assert lines and all(len(line) <= columns and line == line.rstrip() for line in lines), (name, lines)
        if name in TITLES:
            narrow, wide = TITLES[name]
            assert sorted(lines[0].split()) == sorted(f"{narrow} {wide if columns == 200 else ''}".split()), name
    jobs = {int(line.split()[0]): line for line in shown["jobs"][1:]}  # a job a line
    assert sorted(jobs) == [job.id for job in crowded.jobs()]
    assert re.search(r"^ 4  emails +dead +1/1  \d\d s ago", jobs[4])
    assert "ValueError: no such address" in jobs[4] or columns == 80
    assert "ValueErr" in jobs[4] and "a-queue.with" in jobs[8] and "Connecti" in jobs[8]
    assert len(shown["dead"]) == 4
    queues = {line.split()[0][:7]: line for line in shown["queues"][1:]}
    assert queues["webhook"].startswith("webhooks (outbox) ") and queues["slow"].endswith(" 0  paused")
    assert re.search(r"6 +0 +0 +1 +\d[\d.]* s +0$", queues["a-queue"])
    assert re.search(r"emails, invoices(…|, reports) +0  1234567 +1 ", shown["workers"][-1])
    assert shown["workers"][1].endswith(" ago") and "silent: " in shown["workers"][1]
    assert re.search(r"@every 30d  invoices .* in 29 d 23 h +LookupError", shown["schedules"][1])
    assert re.search(r"Z  \d{4}-.*Z +7  fired$", shown["schedules history nightly"][1])
    assert re.search(r"^report .* me .* 1  in 9 min( \d+ s)?$", shown["locks"][2])
    indent = {line[: 20 if line.startswith(" ") else 0].strip() for line in shown["doctor"]}
    assert indent == {""}  # what is too long goes on below itself
    assert any(line.startswith("warning  workers     worker old is silent since ") for line in shown["doctor"])
    reason = shown["job 4"].index("Why it is not running:") + 1
    assert shown["job 4"][reason].startswith("- it is dead since ")
    assert all(line.startswith("  ") for line in shown["job 4"][reason + 1 :])


# -- what the steering commands do ------------------------------------------------------------------------------------


def test_what_destroys_asks_first(database, scene):
    for command in (["cancel", "1"], ["purge", "--queue", "emails", "--older-than", "0"], ["replay", "--all", "--queue", "emails"]):
        code, out, err = said(*command, ALKSTORE_URL=database.url)
        assert (code, out) == (1, "")
        assert err.endswith("Say --yes.\n")
    assert len(scene.jobs()) == 6
    child = pexpect.spawn(
        sys.executable,
        ["-m", "alkstore_sa.cli", "cancel", "1"],
        env={**os.environ, "ALKSTORE_URL": database.url},
        encoding="utf-8",
        timeout=60,
    )
    child.expect("for good")
    child.sendline("n")
    child.read()
    child.close()
    assert child.exitstatus == 1
    assert scene.get_job(1) is not None


def test_steering_says_what_it_did(database, scene):
    def run(*command):
        code, out, err = said(*command, ALKSTORE_URL=database.url)
        assert code == 0, err
        return out

    assert run("replay", "4") == "job 4 is back\n"
    assert scene.get_job(4).state == "ready"
    assert run("replay", "--all", "--queue", "emails", "--yes") == "1 jobs are back\n"
    assert run("cancel", "2", "--yes") == "job 2 is removed\n"
    assert run("pause", "webhooks", "--outbox") == "queue webhooks (outbox) is paused now\n"
    assert run("pause", "webhooks", "--outbox") == "queue webhooks (outbox) was paused already\n"
    assert run("resume", "webhooks", "--outbox") == "queue webhooks (outbox) is resumed now\n"
    assert run("schedules", "pause", "nightly") == "schedule 'nightly' is paused\n"
    assert scene.schedules()[0].paused
    assert run("schedules", "resume", "nightly") == "schedule 'nightly' fires again\n"
    assert run("purge", "--queue", "emails", "--older-than", "1h", "--yes") == "0 dead jobs are deleted\n"


def test_jobs_are_listed_by_the_state_that_is_shown(database, store):
    store.enqueue("q", 1)
    store.enqueue("q", 2, delay=60)
    for state, job_id in (("ready", 1), ("delayed", 2)):
        ran = alkstore("jobs", "--state", state, "--json", ALKSTORE_URL=database.url)
        assert [job["id"] for job in json.loads(ran.stdout)] == [job_id], ran.stderr


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("text", ["9" * 5_000, "[" * 60_000], ids=["digits", "nesting"])
def test_json_that_python_cannot_read_is_one_sentence(database, text):
    ran = alkstore("enqueue", "q", text, ALKSTORE_URL=database.url)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert "cannot be read" in ran.stderr


@pytest.mark.databases("sqlite")
def test_the_codec_of_the_app_holds_for_a_url_too_and_its_schema_is_its_own(database, store, tmp_path, monkeypatch):
    (tmp_path / "coded_app.py").write_text(
        "import os, alkstore_sa, json\n"
        "class Coded:\n"
        "    def encode(self, payload): return 'X' + json.dumps(payload)\n"
        "    def decode(self, text): return json.loads(text[1:])\n"
        "tasks = alkstore_sa.Tasks(alkstore_sa.Store(os.environ['APP_URL'], codec=Coded()))\n"
    )
    monkeypatch.chdir(tmp_path)
    app = {"ALKSTORE_APP": "coded_app:tasks", "APP_URL": database.url, "PYTHONPATH": str(tmp_path)}
    assert alkstore("enqueue", "q", "1", "--new-queue", ALKSTORE_URL=database.url, **app).returncode == 0
    assert database.sql("SELECT payload FROM alkstore_job") == [("X1",)]

    ran = alkstore("jobs", "--schema", "nowhere", **app)
    assert ran.returncode == 2
    assert "another schema" in ran.stderr


ASYNC_APP = """
import json, os
from alkstore_sa import AsyncStore, Tasks

class Coded:
    def encode(self, payload): return "X" + json.dumps(payload)
    def decode(self, text): return json.loads(text[1:])

tasks = Tasks(AsyncStore(os.environ["APP_URL"], codec=Coded()))

@tasks.task(name="mail", queue="emails")
def mail(to: str) -> None: ...
"""


def test_an_app_with_an_async_store_alone_needs_a_url_and_is_told_so(database, store, tmp_path):
    (tmp_path / "async_app.py").write_text(ASYNC_APP)
    async_url = database.url.replace("sqlite:", "sqlite+aiosqlite:")
    app = {"ALKSTORE_APP": "async_app:tasks", "APP_URL": async_url, "PYTHONPATH": str(tmp_path)}
    alone = "Error: --app 'async_app:tasks' is bound to an AsyncStore alone, and "
    for command, code, need in (
        ("queues", 2, "the command line needs a Store: say --url too"),
        ("worker", 1, "a worker needs a Store: bind one"),
    ):
        ran = alkstore(command, **app)
        assert (ran.returncode, ran.stdout) == (code, "")
        assert ran.stderr.splitlines()[-1].startswith(alone + need)
    ran = alkstore("enqueue", "mail", '{"to": "ada"}', "--url", database.url, **app)
    assert (ran.returncode, ran.stdout) == (0, "job 1 is enqueued\n"), ran.stderr
    assert database.sql("SELECT payload FROM alkstore_job") == [('X{"to": "ada"}',)]


def test_a_raw_job_or_a_task_is_enqueued(database, store, tmp_path, monkeypatch):
    module = f"app_on_{database.kind}"  # it is imported here, too
    (tmp_path / f"{module}.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    app = {"ALKSTORE_APP": f"{module}:tasks", "APP_URL": database.url}
    ran = alkstore("enqueue", "mail", '{"to": "ada"}', "--delay", "5m", "--priority", "7", **app)
    assert (ran.returncode, ran.stdout) == (0, "job 1 is enqueued\n"), ran.stderr
    [job] = store.jobs()
    assert (job.task, job.queue, job.payload, job.priority) == ("mail", "emails", {"to": "ada"}, 7)
    assert job.run_at - job.enqueued_at == timedelta(minutes=5)
    wrong = {
        ("mail", "[1]"): "'mail' is a task: give its arguments as a JSON object",
        ("mail", "{}"): "task 'mail' cannot be called like this: missing a required argument: 'to'",
        ("mail", '{"to": 1}'): "argument 'to' is of type int, not str",
        ("mial", "{}"): "'mial' is no task that is known here, and no queue with jobs or workers; a new queue: --new-queue",
        ("emails", "{"): "this is no JSON: Expecting property name enclosed in double quotes at character 2",
        ("emails", "NaN"): "NaN is no JSON",
    }
    for arguments, sentence in wrong.items():
        assert said("enqueue", *arguments, **app) == (1, "", f"Error: {sentence}\n")
    assert said("enqueue", "emails", "[1, null]", "--url", database.url)[0] == 0
    assert said("enqueue", "fresh", "1", "--new-queue", "--url", database.url)[0] == 0
    assert [(one.queue, one.payload) for one in store.jobs()][1:] == [("emails", [1, None]), ("fresh", 1)]


def test_ping_tells_whether_a_worker_lives(database, store):
    import socket

    register(store, "here", host=socket.gethostname())
    register(store, "there", host="there")

    def ping(*arguments):
        return said("ping", *arguments, ALKSTORE_URL=database.url)[0]

    assert ping("--worker", "here") == ping("--host") == ping("--host", "there") == 0
    assert ping("--worker", "nobody") == ping("--host", "elsewhere") == 1
    assert ping() == ping("--worker", "here", "--host") == 2
    advance(store, 13)
    assert ping("--worker", "here") == ping("--host") == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_one_sentence_and_a_code(database, scene, tmp_path, monkeypatch):
    (tmp_path / "app_of_errors.py").write_text(APP.replace("unbound = Tasks()", "unbound = Tasks()\nnothing = 1"))
    (tmp_path / "app_that_fails.py").write_text("raise LookupError('no such setting\\nmore')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APP_URL", database.url)
    expected = {
        ("job", "99"): "job 99 is not here: finished, cancelled or rolled back",
        ("replay", "1"): "job 1 is not among the dead",
        ("cancel", "4", "--yes"): "there is no live job 4",
        ("schedules", "pause", "x"): "there is no schedule 'x'",
        ("pause", ""): "queue name",
        ("queues", "--app", "app_that_fails:tasks"): "--app app_that_fails:tasks: LookupError: no such setting",
        ("queues", "--app", "app_of_errors:nothing"): "--app 'app_of_errors:nothing' is a int",
        ("queues", "--app", "app_of_errors:unbound"): "--app 'app_of_errors:unbound' has no store",
        ("queues", "--app", "nonsense"): "--app 'nonsense' is not of the form module:attribute",
    }
    for command, sentence in expected.items():
        code, out, err = said(*command, ALKSTORE_URL=database.url)
        assert (code, out) == (1, ""), (command, err)
        assert err.startswith(f"Error: {sentence}"), err
        assert err.count("\n") == 1
    for command in (
        ["queues"],
        ["replay", "--url", database.url],
        ["replay", "4", "--queue", "emails", "--url", database.url],
        ["schedules", "--json", "history", "nightly", "--url", database.url],
        ["purge", "--older-than", "1", "--url", database.url],
        ["purge", "--queue", "q", "--older-than", "soon"],
    ):
        code, out, err = said(*command, "--yes") if command[0] in ("replay", "purge") else said(*command)
        assert (code, out) == (2, "")
        assert "Usage:" in err


def test_an_error_that_nobody_thought_of_is_one_sentence_and_debug_shows_its_traceback(database, store, tmp_path):
    (tmp_path / "failing_app.py").write_text("raise LookupError('no such setting\\nmore')")
    register(store, "w")
    database.sql("UPDATE alkstore_worker SET queues = '{'")
    failing = {"PYTHONPATH": str(tmp_path)}
    for command, sentence in {
        ("workers", "--url", database.url): "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ("worker", "--app", "failing_app:tasks"): "LookupError: no such setting",
    }.items():
        short, long = alkstore(*command, **failing), alkstore("--debug", *command, **failing)
        assert (short.returncode, short.stdout, short.stderr) == (1, "", f"Error: {sentence} (--debug shows where)\n")
        assert long.returncode == 1 and "Traceback" in long.stderr


def test_names_and_errors_cannot_steer_the_terminal(database, store):
    store.queue("evil\x1b[2J[red]").enqueue(1)
    store.queue("evil\x1b[2J[red]").claim_one("w").fail("\x1b]0;owned\x07")
    for command in (["jobs"], ["queues"], ["dead"], ["job", "1"]):
        code, out, _ = said(*command, ALKSTORE_URL=database.url)
        assert code == 0
        assert "\x1b" not in out and "\x07" not in out
        assert "evil\\x1b[2J[red]" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell):
    code, out, _ = said("completion", shell)
    assert code == 0
    assert "_ALKSTORE_COMPLETE" in out and "alkstore" in out


# -- job ID: why is it not running ------------------------------------------------------------------------------------


def why(database, job_id):
    code, out, err = said("job", str(job_id), "--json", ALKSTORE_URL=database.url)
    told = json.loads(out)
    assert code == (1 if told["state"] is None else 0), err
    shown = said("job", str(job_id), ALKSTORE_URL=database.url)
    for reason in told["reasons"]:
        if re.search(r"\d s|min", reason["sentence"]) is None:
            assert reason["sentence"] in (shown[1] or shown[2])
    return {reason["code"]: reason["sentence"] for reason in told["reasons"]}


def test_a_job_says_why_it_does_not_run(database, store):
    queue = store.queue("q", max_attempts=2)
    tasks = Tasks(store)

    @tasks.task(name="mail", queue="q", max_attempts=2, base_backoff=600)
    def mail() -> None: ...

    first, second = queue.enqueue(1), queue.enqueue(2)
    assert why(database, second).keys() == {"no_worker"}
    register(store, "w1", queues=["q"], raw_queues=["q"], tasks=["other"])
    assert "it is the next of its queue, and 1 live workers serve the queue" in why(database, first)["waiting"]
    assert "1 jobs of its queue come before it" in why(database, second)["waiting"]

    task = mail.enqueue()
    register(store, "w1", queues=["q"], raw_queues=["q"], tasks=["other"])  # the next beat
    assert why(database, task) == {"unknown_task": "task 'mail' is unknown to all 1 live workers of the queue: they give it back"}
    register(store, "w2", queues=["q"], tasks=["mail"])
    assert why(database, task).keys() == {"waiting"}
    store.pause_queue("q")
    assert why(database, task).keys() == {"paused"}
    store.resume_queue("q")

    claimed = {job.id: job for job in queue.claim("w1", limit=10)}
    register(store, "w1", queues=["q"], raw_queues=["q"], tasks=["other"])
    assert why(database, first)["claimed"].startswith("worker w1 has it until ")
    claimed[task].retry("ConnectionError: no route\nTraceback")
    assert "after attempt 1 of 2 failed: ConnectionError: no route" in why(database, task)["delayed"]
    claimed[second].release(delay=3600)
    assert re.search(r"it is delayed until .*Z \(in (59 min|1 h)", why(database, second)["delayed"])

    advance(store, 20)  # w1 is silent
    assert "which is silent since" in why(database, first)["claimed"]
    advance(store, 300)
    assert why(database, first).keys() == {"lapsed", "no_worker"}
    assert "the claim of worker w1 lapsed" in why(database, first)["lapsed"]
    [again] = [job for job in queue.claim("by hand", limit=10) if job.id == first]
    assert "which is no live worker that is known here" in why(database, first)["claimed"]
    again.fail("ValueError: it is broken\nTraceback")
    told = why(database, first)["dead"]
    assert "after 2 of 2 attempts: ValueError: it is broken; `alkstore replay 1` brings it back" in told

    late = queue.enqueue(3, expires=60)
    advance(store, 61)
    assert "expired" in why(database, late)
    last = store.queue("once", max_attempts=1)
    lost = last.enqueue(1)
    last.claim_one("w")
    advance(store, 301)
    assert "exhausted" in why(database, lost)
    assert why(database, 99) == {"absent": "job 99 is not here: finished, cancelled or rolled back"}


def test_the_reference_page_is_what_the_commands_say():
    import cli_reference

    assert cli_reference.PAGE.read_text(encoding="utf-8") == cli_reference.page(), "run `python tests/cli_reference.py`"
