"""Workers as processes: killed, stopped and told to leave at any moment, with the books balanced at the end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from alkstore_sa import metadata

pytestmark = pytest.mark.timeout(170)

HERE = Path(__file__).parent


class Processes:
    """Worker processes of `killed_app`, all of them ended at the end."""

    def __init__(self, database, folder):
        self.database = database
        self.marks = folder / "marks"
        self.marks.touch()
        self.running = []

    def start(self, *arguments, command="worker", app="killed_app:tasks", **environment):
        env = {**os.environ, "ALKSTORE_URL": self.database.url, "MARKS": str(self.marks), "PYTHONPATH": str(HERE), **environment}
        program = [sys.executable, "-m", "alkstore_sa.cli", command, "--app", app, *arguments]
        process = subprocess.Popen(program, env=env, cwd=self.marks.parent, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        os.set_blocking(process.stderr.fileno(), False)
        process.said = b""
        self.running.append(process)
        return process

    def lines(self):
        return self.marks.read_text().splitlines()

    def said(self, process):
        process.said += process.stderr.read() or b""
        return process.said.decode()

    def end(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture
def processes(database, tmp_path):
    made = Processes(database, tmp_path)
    yield made
    made.end()


@pytest.fixture
def lasting(monkeypatch):
    """Let claims last, whatever stands still meanwhile: jobs are stamped where they are enqueued, by `app`, which is made after this."""
    monkeypatch.setenv("VISIBILITY", "100")


@pytest.fixture
def app(database, monkeypatch, tmp_path):
    """The application's module in this process, on the test's database."""
    monkeypatch.setenv("ALKSTORE_URL", database.url)
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("killed_app", None)
    import killed_app

    database.engines.append(killed_app.engine)
    yield killed_app
    killed_app.store.close()
    sys.modules.pop("killed_app", None)


@pytest.fixture
def counter(database):
    database.sql("CREATE TABLE counter (n INTEGER NOT NULL)")
    database.sql("INSERT INTO counter VALUES (0)")
    return lambda: database.sql("SELECT n FROM counter")[0][0]


def until(condition, seconds=60, processes=None):
    end = time.monotonic() + seconds
    while not (value := condition()):
        for process in processes.running if processes else ():
            processes.said(process)
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)
    return value


def left(process, processes, seconds=60):
    until(lambda: process.poll() is not None, seconds, processes)
    return process.returncode


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_worker_runs_jobs_and_leaves_at_a_signal(lasting, processes, app):
    app.note.enqueue_many([app.note.call(n) for n in range(50)])
    worker = processes.start("--queue", "note")
    until(lambda: not app.store.jobs(), processes=processes)
    worker.send_signal(signal.SIGTERM)

    assert left(worker, processes) == 0
    assert Counter(processes.lines()) == {f"{n} 1": 1 for n in range(50)}
    assert "INFO job 1: done" in processes.said(worker)


def test_a_worker_drains_so_many_jobs_and_leaves(lasting, processes, app):
    app.note.enqueue_many([app.note.call(n) for n in range(10)])
    assert left(processes.start("--queue", "note", "--max-jobs", "6"), processes) == 0
    assert len(app.store.jobs()) == 4


@pytest.mark.parametrize("command", ["worker", "run"])
def test_without_tables_the_command_to_run_is_named_and_the_exit_code_is_3(tmp_path, database, processes, command):
    database.sql("ALTER TABLE alkstore_job RENAME TO elsewhere")
    worker = processes.start(command=command)

    assert left(worker, processes) == 3
    assert "alkstore upgrade" in processes.said(worker)


def test_migrate_makes_the_tables_first(database, processes, tmp_path):
    for table in (*metadata.tables, "alkstore_version"):
        database.sql(f"DROP TABLE {table}")
    worker = processes.start("--migrate", "--queue", "note")
    until(lambda: "serves note" in processes.said(worker))
    worker.send_signal(signal.SIGINT)
    assert left(worker, processes) == 0


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("killed_app", "module:attribute"),
        ("nowhere:tasks", "no module"),
        ("killed_app:nothing", "not in it"),
        ("killed_app:engine", "not a Tasks"),
        ("killed_app:unbound", "tasks.bind(store)"),
    ],
)
def test_a_wrong_app_is_said_in_one_sentence(processes, wrong, said):
    worker = processes.start(app=wrong)

    assert left(worker, processes) == 1
    assert said in processes.said(worker)
    assert "Traceback" not in processes.said(worker)


def test_run_serves_queues_outboxes_and_schedules_in_one_process(processes, app):
    app.store.outbox("letters").enqueue("hello")
    app.note.enqueue(7)
    process = processes.start(command="run")
    until(lambda: {"letter hello", "7 1", "tick"} <= set(processes.lines()), processes=processes)
    process.send_signal(signal.SIGTERM)

    assert left(process, processes) == 0
    assert [schedule.task for schedule in app.store.schedules()] == ["tick"]


def test_a_worker_of_an_outbox_delivers_its_messages_and_leaves_queues_alone(processes, app):
    app.store.outbox("letters").enqueue("hello")
    job_id = app.note.enqueue(7)
    worker = processes.start("--outbox", "letters")
    until(lambda: "letter hello" in processes.lines(), processes=processes)
    worker.send_signal(signal.SIGTERM)

    assert left(worker, processes) == 0
    assert [job.id for job in app.store.jobs()] == [job_id]


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_a_second_signal_ends_at_once_and_releases_nothing(processes, app):
    job_id = app.slow.enqueue(30)
    worker = processes.start("--queue", "slow")
    until(lambda: "slow started" in processes.lines(), processes=processes)
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.poll() is None

    def ended():
        worker.send_signal(signal.SIGTERM)  # again and again, since two that come while the process stands still are one to it
        return worker.poll() is not None

    until(ended, 15, processes)
    assert worker.returncode == 128 + signal.SIGTERM
    assert app.store.get_job(job_id).state == "claimed"


def test_a_handler_that_outlasts_the_grace_is_given_back_and_the_process_ends(processes, app):
    job_id = app.slow.enqueue(60)
    worker = processes.start("--queue", "slow", "--grace", "0.3")
    until(lambda: "slow started" in processes.lines(), processes=processes)
    worker.send_signal(signal.SIGTERM)

    assert left(worker, processes, 30) == 0
    assert "given back unfinished" in processes.said(worker)
    assert (app.store.get_job(job_id).state, app.store.get_job(job_id).attempts) == ("ready", 0)


OVERRUNNING_APP = """
import time
from killed_app import store
from alkstore_sa import Tasks

tasks = Tasks(store)

@tasks.task(name="overruns", queue="overruns", timeout=0.2, base_backoff=60)
def overruns() -> None:
    time.sleep(60)
"""


@pytest.mark.databases("sqlite")
def test_a_worker_that_lost_half_of_its_slots_exits_1(lasting, processes, app, tmp_path):
    (tmp_path / "overrunning_app.py").write_text(OVERRUNNING_APP)
    job_id = app.store.stamped_queue("overruns", app.note.definition.stamps, task="overruns").enqueue({})
    worker = processes.start("--queue", "overruns", "--concurrency", "2", app="overrunning_app:tasks")

    assert left(worker, processes) == 1
    assert "1 of 2 slots are lost" in processes.said(worker)
    assert app.store.get_job(job_id).last_error.startswith("timeout")


SCHEDULERLESS_APP = """
import os, time
from pathlib import Path
from killed_app import mark, store, tasks

def serve_schedules(stop):
    while "slow started" not in Path(os.environ["MARKS"]).read_text():
        time.sleep(0.05)
    raise ValueError("no schedules today")

store.serve_schedules = serve_schedules
"""


@pytest.mark.databases("sqlite")  # which signal is the first has nothing to do with the database
def test_the_first_signal_gives_back_though_the_scheduler_has_failed_before(processes, app, tmp_path):
    (tmp_path / "schedulerless_app.py").write_text(SCHEDULERLESS_APP)
    app.slow.enqueue(60)
    process = processes.start("--queue", "slow", "--grace", "2", app="schedulerless_app:tasks", command="run")
    until(lambda: "no schedules today" in processes.said(process))
    process.send_signal(signal.SIGTERM)

    assert left(process, processes, 30) == 1
    assert [(job.state, job.attempts) for job in app.store.jobs(queue="slow")] == [("ready", 0)]


OFFLOADING_APP = """
import asyncio, atexit, os, time
from killed_app import mark, store
from alkstore_sa import Tasks

tasks = Tasks(store)
atexit.register(mark, "atexit")

@tasks.task(name="offload", queue="offload")
async def offload() -> None:
    await asyncio.to_thread(mark, "started")
    await asyncio.to_thread(time.sleep, float(os.environ["LINGER"]))
    mark("ended")
"""


@pytest.mark.databases("sqlite")  # what an executor's thread does to the end of a process has nothing to do with the database
@pytest.mark.parametrize(("linger", "attempted", "marks"), [("30", ["offload"], ["started"]), ("0", [], ["started", "ended", "atexit"])])
def test_a_thread_that_an_async_handler_gave_work_does_not_keep_the_process(lasting, processes, app, tmp_path, linger, attempted, marks):
    (tmp_path / "offloading_app.py").write_text(OFFLOADING_APP)
    app.store.stamped_queue("offload", app.note.definition.stamps, task="offload").enqueue({})
    worker = processes.start("--queue", "offload", "--grace", "0.3", app="offloading_app:tasks", LINGER=linger)
    until(lambda: marks[-2:][0] in processes.lines(), processes=processes)
    until(lambda: [job.task for job in app.store.jobs()] == attempted, processes=processes)
    worker.send_signal(signal.SIGTERM)

    assert left(worker, processes, 20) == 0
    assert processes.lines() == marks
    assert [(job.task, job.state, job.attempts) for job in app.store.jobs()] == [(task, "ready", 0) for task in attempted]


def test_restarts_by_sigterm_run_every_job_exactly_once(lasting, processes, app):
    ids = app.note.enqueue_many([app.note.call(n) for n in range(300)])
    ids += app.anote.enqueue_many([app.anote.call(n) for n in range(300, 600)])
    randomly = random.Random(1)
    while app.store.jobs(limit=1):
        worker = processes.start("--queue", "note", "--queue", "anote", "--concurrency", "3")
        enough = min(len(ids), len(processes.lines()) + randomly.randint(0, 200))
        until(lambda: "serves" in processes.said(worker) and len(processes.lines()) >= enough)
        worker.send_signal(signal.SIGTERM)
        assert left(worker, processes) == 0

    assert Counter(processes.lines()) == {f"{n} 1": 1 for n in range(len(ids))}


# -- killed ------------------------------------------------------------------------------------------------------------


ENDS = ("kill", "kill", "term, then kill", "stop")


def keep_killing(processes, database, arguments, workers, pause, seconds, environment, ends=ENDS):
    """Keep so many workers running and end one after each pause, in one of these ways, until no job is left; the number of kills."""
    randomly, kills, resumed = random.Random(2), 0, []
    end = time.monotonic() + seconds
    alive = [processes.start(*arguments, **environment) for _ in range(workers)]
    while database.count():
        assert time.monotonic() < end, f"{database.count()} jobs are left"
        until(lambda: "serves" in processes.said(alive[0]) or not database.count(), processes=processes)
        done_by = time.monotonic() + pause
        while time.monotonic() < done_by and database.count():
            time.sleep(0.05)
            for process in alive:
                processes.said(process)
        victim = alive.pop(0)
        how = randomly.choice(ends)
        if how == "term, then kill":
            victim.send_signal(signal.SIGTERM)
            time.sleep(randomly.uniform(0, 0.2))
        if how == "stop":  # it wakes up after its claims are long over, and goes on
            victim.send_signal(signal.SIGSTOP)
            resumed.append((time.monotonic() + float(environment["VISIBILITY"]) + 0.5, victim))
        else:
            victim.kill()
            victim.wait()
        kills += 1
        for moment, stopped in resumed[:]:
            if time.monotonic() >= moment:
                resumed.remove((moment, stopped))
                stopped.send_signal(signal.SIGCONT)
                alive.append(stopped)
        while len(alive) < workers:
            alive.append(processes.start(*arguments, **environment))
    return kills


def counted(database, processes, app, counter, jobs, workers, seconds, ends=ENDS):
    app.count.enqueue_many([app.count.call(n) for n in range(jobs)])
    visibility = "2" if jobs < 20_000 else "5"
    pause = 1.5 if jobs < 2_000 else 1.0
    kills = keep_killing(processes, database, ["--queue", "count"], workers, pause, seconds, {"VISIBILITY": visibility}, ends)

    assert counter() == jobs
    assert database.count("alkstore_dead") == 0
    return kills


@pytest.mark.databases("postgresql-18")
def test_session_handlers_count_exactly_though_workers_are_killed(database, processes, app, counter):
    assert counted(database, processes, app, counter, 1_500, 3, 120) >= 1


@pytest.mark.databases("sqlite")
def test_session_handlers_count_exactly_on_sqlite_though_workers_are_killed(database, processes, app, counter):
    assert counted(database, processes, app, counter, 300, 2, 120) >= 1


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.databases("postgresql-18")
def test_20_000_session_handlers_count_exactly(database, processes, app, counter):
    began = time.monotonic()
    kills = counted(database, processes, app, counter, 20_000, 4, 800, ["kill"])
    assert kills >= max(20, (time.monotonic() - began) / 2)  # one a second, for as long as the machine takes


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.databases("sqlite")
def test_2_000_session_handlers_count_exactly_on_sqlite(database, processes, app, counter):
    assert counted(database, processes, app, counter, 2_000, 2, 800) >= 2


def test_plain_handlers_lose_nothing_though_workers_are_killed(database, processes, app):
    jobs, slots, visibility = 800, 5, 5  # seconds: longer than the machine may stand still, since each lapse is one more run
    stamps = replace(app.note.definition.stamps, visibility_timeout=timedelta(seconds=visibility))
    app.store.stamped_queue("note", stamps, task="note").enqueue_many([{"n": n} for n in range(jobs)])
    kills = keep_killing(
        processes, database, ["--queue", "note", "--concurrency", str(slots)], 2, 1.5, 120, {"VISIBILITY": str(visibility)}
    )

    runs = Counter(int(line.split()[0]) for line in processes.lines())
    assert set(runs) == set(range(jobs))
    assert sum(runs.values()) - jobs <= kills * 2 * slots
    assert database.count("alkstore_dead") == 0


def test_a_kill_between_a_handlers_commit_and_its_return_does_not_repeat_it(lasting, database, processes, app, counter):
    app.suicide.enqueue()
    assert left(processes.start("--queue", "suicide"), processes) == -signal.SIGKILL

    assert counter() == 1
    assert not app.store.jobs()


def test_a_kill_before_the_acks_are_flushed_repeats_at_most_a_hundred_runs(lasting, database, processes, app):
    jobs = 400
    app.fatal.enqueue_many([app.fatal.call(n, 250) for n in range(jobs)])
    arguments = ("--queue", "fatal", "--concurrency", "100")
    assert left(processes.start(*arguments), processes) == -signal.SIGKILL
    database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-1)} WHERE state = 'claimed'")
    processes.start(*arguments)
    until(lambda: not database.count(), processes=processes)

    runs = Counter(int(line.split()[0]) for line in processes.lines())
    assert set(runs) == set(range(jobs))
    assert sum(runs.values()) - jobs <= 100


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("coordinator:Coordinator._begin_leaving:entering", marks=pytest.mark.soak),
        "coordinator:Coordinator._begin_leaving:leaving",
        pytest.param("coordinator:Coordinator._abandon_the_rest:entering", marks=pytest.mark.soak),
        "runs:Run.interrupt:leaving",
        pytest.param("coordinator:Coordinator._settle_what_ends:leaving", marks=pytest.mark.soak),
        pytest.param("rounds:Rounds.flush:entering", marks=pytest.mark.soak),
        "rounds:Rounds.flush:leaving",
        "rounds:Rounds.give_back:entering",
        "rounds:Rounds.give_back:leaving",
        pytest.param("heartbeats:Heart.close:entering", marks=pytest.mark.soak),
        "presence:Presence.leave:leaving",
    ],
)
def test_a_kill_at_any_step_of_leaving_loses_nothing(processes, database, app, counter, place):
    tasks = [app.linger, app.alinger, app.alinger, app.linger]
    if database.kind == "postgresql":  # SQLite's one write lock is the Session handler's, so that nothing is given back before it ends
        tasks.append(app.clinger)
    for n, task in enumerate(tasks):
        task.enqueue(n)
    arguments = ("--queue", "linger", "--grace", "0.3")
    worker = processes.start(*arguments, VISIBILITY="1", LINGER="60", DIE_AT=f"alkstore_sa.{place}")
    until(lambda: {f"{n} started" for n in range(len(tasks))} <= set(processes.lines()), processes=processes)
    worker.send_signal(signal.SIGTERM)
    assert left(worker, processes) == -signal.SIGKILL

    processes.start(*arguments, VISIBILITY="1")
    until(lambda: not database.count(), processes=processes)
    assert counter() == tasks.count(app.clinger)
    assert {f"{n} ended" for n in range(len(tasks))} <= set(processes.lines())
    assert database.count("alkstore_dead") == 0


def test_two_releases_with_different_tasks_serve_one_queue(lasting, database, processes, app):
    stamps = app.note.definition.stamps
    for n in range(5):
        for release in ("one", "two"):
            app.store.stamped_queue("deploy", stamps, task=f"only-in-{release}").enqueue({"n": n})
    for release in ("one", "two"):
        processes.start("--queue", "deploy", app="killed_app:deploys", RELEASE=release)

    def passing():
        database.sql(f"UPDATE alkstore_job SET run_at = {database.now()} WHERE state = 'delayed'")
        time.sleep(0.3)
        return not database.count()

    until(passing, 90, processes)
    assert Counter(processes.lines()) == {f"{release} {n}": 1 for n in range(5) for release in ("one", "two")}


# -- long --------------------------------------------------------------------------------------------------------------


def resident(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(processes, app, jobs, warm_up):
    """How much a worker's memory grows over so many jobs, after as many as it takes to warm up."""
    worker = processes.start("--queue", "note", "--concurrency", "50", VISIBILITY="60")
    for amount in (warm_up, jobs):
        before = resident(worker)
        for _ in range(0, amount, 5_000):
            app.note.enqueue_many([app.note.call(0)] * 5_000)
            until(lambda: app.store.queues() == [], 120, processes)
            worker.said = b""
    return resident(worker) - before


@pytest.mark.databases("postgresql-18")
def test_memory_stays_flat(processes, app):
    assert grown(processes, app, 10_000, 10_000) < 8 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.databases("postgresql-18")
def test_memory_stays_flat_over_200_000_jobs(processes, app):
    assert grown(processes, app, 200_000, 20_000) < 8 * 2**20
