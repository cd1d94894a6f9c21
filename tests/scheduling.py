"""What the tests of the scheduler share: shifting time, reading what happened, and processes that run the real loops."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import timedelta

from sqlalchemy import make_url, text

SECOND = timedelta(seconds=1)
AFAR = 10**15  # microseconds
INSTANTS = {
    "alkstore_schedule": ("next_fire_at", "retry_at"),
    "alkstore_fire": ("boundary", "through", "fired_at"),
    "alkstore_job": ("scheduled_for", "run_at", "enqueued_at", "expires_at"),
    "alkstore_lock": ("expires_at",),
}


def wait_until(condition, seconds=40.0):
    end = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.03)
    return met


def make_due(database, name, late):
    """Put the schedule's next boundary `late` seconds into the past of the database's now, and return it."""
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-late)} WHERE name = :name", name=name)
    return next_fire_at(database, name)


def next_fire_at(database, name):
    with database.store() as store:
        return next(schedule.next_fire_at for schedule in store.schedules() if schedule.name == name)


def age(database, seconds, tables=INSTANTS):
    """Let so many seconds pass, by shifting every stored instant into the past."""
    passed = round(seconds * 1_000_000)
    unit = "" if database.kind == "sqlite" else " * INTERVAL '1 microsecond'"
    with database.observer.connect() as connection:
        connection.exec_driver_sql("BEGIN")  # one commit: a disk may take half a second for each
        for table in tables:
            for column in INSTANTS[table]:
                for shift in (passed + AFAR, -AFAR) if column == "boundary" else (passed,):  # a key must not meet another row's on its way
                    connection.execute(text(f"UPDATE {table} SET {column} = {column} - ({shift}){unit} WHERE {column} IS NOT NULL"))
        connection.exec_driver_sql("COMMIT")


def jobs_of(store, name):
    return sorted((job for job in store.jobs(limit=100_000) if job.schedule == name), key=lambda job: job.scheduled_for)


def assert_once(store, name, interval):
    """Every boundary from the first to before the next was fired exactly once or is in exactly one skipped range; return how many."""
    rows = sorted(store.schedule_history(name, limit=100_000), key=lambda fire: fire.boundary)
    jobs = jobs_of(store, name)
    assert [job.scheduled_for for job in jobs] == [row.boundary for row in rows if row.job_id is not None], "jobs and history differ"
    assert [job.id for job in jobs] == [row.job_id for row in rows if row.job_id is not None]
    assert len({job.scheduled_for for job in jobs}) == len(jobs), "a boundary fired twice"
    for before, after in zip(rows, rows[1:], strict=False):
        assert after.boundary - before.through == interval, f"between {before} and {after} a boundary was lost or is there twice"
    following = [schedule.next_fire_at for schedule in store.schedules() if schedule.name == name]
    if rows and following:
        assert following[0] - rows[-1].through == interval
    return len(rows)


RUNNER = """
import logging, signal, sys
from sqlalchemy import create_engine
from alkstore_sa import LeadershipLost, StopToken, Store
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
stop = StopToken().on_signals(signal.SIGTERM)
with Store(sys.argv[1]) as store:
    print("ready", flush=True)
    try:
        getattr(store, sys.argv[2])(stop)
    except LeadershipLost as error:
        print("lost", error, flush=True)
        sys.exit(3)
print("stopped", flush=True)
"""


class RunnerProcess:
    """A process of its own in which a real loop runs."""

    def __init__(self, database, loop="serve_schedules", *, prefix=(), environment=None):
        command = [*prefix, sys.executable, "-c", RUNNER, database.url, loop]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **(environment or {})}
        )
        assert self.process.stdout.readline().strip() == "ready"

    @property
    def pid(self):
        return self.process.pid

    def leads(self, store):
        return any(info.owner.startswith(f"{self.pid}-") for info in store.locks() if info.name == "__alkstore_scheduler")

    def signal(self, number):
        self.process.send_signal(number)

    def freeze(self, database):
        """Stop it where it stands; on SQLite not in the middle of a write, where it would hold the file for as long as it is stopped."""
        for _ in range(200):
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a call that was under way may have taken the lock
            if database.kind != "sqlite" or is_writable(database):
                return
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        raise AssertionError("it writes all the time")

    def stop(self, seconds=60):
        """Stop it as an operator would; returns what it said last and how it exited."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=seconds)[0]
        return said.strip(), self.process.returncode

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def leader_of(store, runners):
    return next((runner for runner in runners if runner.process.poll() is None and runner.leads(store)), None)


def is_writable(database):
    connection = sqlite3.connect(make_url(database.url).database, timeout=0.2, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True
