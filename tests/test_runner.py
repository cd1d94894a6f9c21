"""The loops that run the scheduler, in threads and in real processes that are killed, stopped and told wrong times."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import servers
from conftest import EVERY_DATABASE, server_urls
from databases import TestDatabase, make_template
from eventually import stopwatch
from scheduling import SECOND, RunnerProcess, age, assert_once, jobs_of, leader_of, make_due, next_fire_at, wait_until
from sqlalchemy.exc import OperationalError

from alkstore_sa import LeadershipLost, StopToken, runner
from alkstore_sa.leases import Leases

LEADERSHIP = "__alkstore_scheduler"
everywhere = pytest.mark.databases(*EVERY_DATABASE)


class Loop:
    """A loop of a store in a thread of its own."""

    def __init__(self, loop):
        self.stop = StopToken()
        self.ended = None
        self.thread = threading.Thread(target=self._run, args=(loop,))

    def _run(self, loop):
        try:
            self.ended = (loop(self.stop), None)
        except BaseException as error:
            self.ended = (None, error)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.stop.cancel()
        self.thread.join(20)

    def error(self, seconds=20):
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.ended[1]


def leads(store):
    return [info for info in store.locks() if info.name == LEADERSHIP]


@everywhere
def test_a_runner_fires_leads_under_an_owner_of_its_own_and_releases_when_stopped(database, store):
    store.schedule("s", "@every 1s", "q")
    with Loop(store.run_schedules) as loop:
        wait_until(lambda: database.count() >= 2)
        (lease,) = leads(store)
        assert lease.owner.startswith(f"{os.getpid()}-")
        with stopwatch() as seconds:
            loop.stop.cancel()
            assert loop.error() is None
            assert seconds() < 2
    assert leads(store) == []
    assert_once(store, "s", SECOND)


@everywhere
def test_a_second_runner_is_refused_at_the_start_and_fires_nothing(database, store):
    store.schedule("s", "@every 1h", "q")
    database.sql(f"INSERT INTO alkstore_lock VALUES ('{LEADERSHIP}', 'another', 7, {database.now(60)})")
    make_due(database, "s", 5)
    with pytest.raises(LeadershipLost):
        store.run_schedules(StopToken())
    assert database.count() == database.count("alkstore_fire") == 0
    assert [(lease.owner, lease.token) for lease in leads(store)] == [("another", 7)]


def test_a_runner_whose_taking_worked_though_its_answer_was_lost_leads(database, store, monkeypatch):
    take = Leases.take
    lost = []

    def answered_once_lost(leases, bind, *arguments):
        taken = take(leases, bind, *arguments)
        if not lost:
            lost.append(taken[0])
            bind.commit()
            raise OperationalError("COMMIT", {}, ConnectionResetError("the connection is gone"))
        return taken

    monkeypatch.setattr(Leases, "take", answered_once_lost)
    store.schedule("s", "@every 1s", "q")
    with Loop(store.run_schedules) as loop:
        wait_until(lambda: database.count() >= 2 or loop.ended)
        assert loop.ended is None
        assert [(lease.owner, lease.token) for lease in leads(store)] == [(lost[0].owner, lost[0].token)]
    assert leads(store) == []


def test_a_runner_that_is_stopped_before_it_starts_returns_and_leaves_no_trace(store):
    stop = StopToken()
    stop.cancel()
    store.run_schedules(stop)
    store.serve_schedules(stop)
    assert store.locks() == []


def test_of_two_runners_one_fires_each_boundary_and_the_other_is_refused(database, store):
    store.schedule("s", "@every 1s", "q")
    with database.store() as other, Loop(store.run_schedules) as first:
        wait_until(lambda: leads(store))
        with Loop(other.run_schedules) as second:
            assert isinstance(second.error(), LeadershipLost)
        wait_until(lambda: database.count() >= 3)
        assert first.ended is None
    assert_once(store, "s", SECOND)


@pytest.fixture
def both(tmp_path):
    """A database of each kind at once, for a test that waits for long."""
    made = [TestDatabase.sqlite(tmp_path / "both.db"), *(TestDatabase.postgresql(url) for url in list(server_urls().values())[:1])]
    yield made
    for database in made:
        database.drop()


@pytest.mark.timeout(300)
def test_renewals_in_the_sleep_hold_the_lease_to_a_boundary_forty_seconds_ahead(both):
    """The time to live is 10 s: without them the leader's own sleep would lose the lease. Another one stands by all the while."""
    with contextlib.ExitStack() as opened:
        watched = []
        for database in both:
            store, other = (opened.enter_context(database.store()) for _ in range(2))
            store.schedule("s", "@every 40s", "q")
            loop = opened.enter_context(Loop(store.run_schedules))
            (lease,) = wait_until(lambda store=store: leads(store))
            opened.enter_context(Loop(other.serve_schedules))
            watched.append((database, store, loop, lease.token))
        end = time.monotonic() + 38
        while time.monotonic() < end:
            assert all([now.token for now in leads(store)] == [token] for _, store, _, token in watched)
            time.sleep(1)
        for database, store, loop, token in watched:
            wait_until(lambda database=database: database.count() == 1, 15)
            assert [now.token for now in leads(store)] == [token]
            assert loop.ended is None
            (fire,) = store.schedule_history("s")
            assert fire.fired_at - fire.boundary < timedelta(seconds=6)  # the longest sleep would end twenty late


def test_a_leader_and_a_standby_outlive_a_table_that_is_away_for_a_moment(database, store):
    store.schedule("s", "@every 1s", "q")
    with database.store() as other, Loop(store.serve_schedules) as leader:
        wait_until(lambda: leads(store))
        with Loop(other.serve_schedules) as standby:
            time.sleep(1)
            database.sql("ALTER TABLE alkstore_lock RENAME TO alkstore_away")
            time.sleep(5)  # both look at it in the meantime
            database.sql("ALTER TABLE alkstore_away RENAME TO alkstore_lock")
            before = database.count()
            wait_until(lambda: database.count() > before)
            assert leader.ended is standby.ended is None
    assert_once(store, "s", SECOND)


@everywhere
def test_a_lease_taken_over_ends_the_runner_before_any_further_fire(database, store):
    store.schedule("s", "@every 1h", "q")
    with Loop(store.run_schedules) as loop:
        wait_until(lambda: leads(store))
        database.sql(f"UPDATE alkstore_lock SET owner = 'usurper', token = token + 1, expires_at = {database.now(60)}")
        make_due(database, "s", 5)
        store.schedule("wake", "@every 1h", "q")
        assert isinstance(loop.error(), LeadershipLost)
    assert database.count() == 0
    assert [lease.owner for lease in leads(store)] == ["usurper"], "what is another's is not released"


def test_a_lease_that_lapsed_ends_the_runner_though_nobody_took_it(database, store):
    with Loop(store.run_schedules) as loop:
        wait_until(lambda: leads(store))
        database.sql(f"UPDATE alkstore_lock SET expires_at = {database.now(-0.001)}")
        assert isinstance(loop.error(), LeadershipLost)


def test_c14_a_sleeping_runner_wakes_for_a_new_interval(database, store):
    store.schedule("s", "@every 1h", "q")
    with Loop(store.run_schedules):
        wait_until(lambda: leads(store))
        time.sleep(1)
        store.schedule("s", "@every 1s", "q")
        store.schedule("new", "@every 2s", "q")
        began = time.monotonic()
        wait_until(lambda: jobs_of(store, "s") and jobs_of(store, "new"))
        assert time.monotonic() - began < 30  # unwoken, it would look again after a minute
        store.pause_schedule("new")
        store.unschedule("s")
        store.schedule("t", "@every 1s", "q")
        wait_until(lambda: jobs_of(store, "t"))


def test_a_runner_without_wakes_fires_on_time(database):
    with database.store(wake=False) as store:
        store.schedule("s", "@every 1s", "q")
        with Loop(store.run_schedules):
            wait_until(lambda: database.count() >= 3)
        assert_once(store, "s", SECOND)


def test_a_leader_puts_right_what_lies_too_far_ahead_when_it_gains_the_leadership(database, store, caplog):
    for name in ("far", "near"):
        store.schedule(name, "@every 1m", "q")
    near = next_fire_at(database, "near")
    make_due(database, "far", -7_200)
    with Loop(store.run_schedules):
        wait_until(lambda: next_fire_at(database, "far") < near + timedelta(minutes=5))
    assert next_fire_at(database, "near") == near
    assert "further ahead than one interval" in caplog.text
    assert "'far'" in caplog.text
    assert "'near'" not in caplog.text


def test_a_failing_schedule_does_not_hold_the_others_of_a_runner(database, store):
    from test_schedules import refuse_jobs_of

    for name in ("bad", "good"):
        store.schedule(name, "@every 1s", "q")
    refuse_jobs_of(database, "bad")
    with Loop(store.run_schedules) as loop:
        wait_until(lambda: len(jobs_of(store, "good")) >= 3)
        assert loop.ended is None
    assert jobs_of(store, "bad") == []
    assert_once(store, "good", SECOND)


@pytest.mark.databases("postgresql-18")
@pytest.mark.timeout(300)
def test_a_schedule_whose_row_somebody_keeps_locked_does_not_hold_the_others_for_ever(database, store, caplog):
    """The batch runs into its time limit, and so does the schedule alone; it is set aside, and the leader keeps its lease."""
    from sqlalchemy import text

    for name in ("locked", "free"):
        store.schedule(name, "@every 1s", "q")
    with Loop(store.run_schedules) as loop, database.engine().connect() as blocker:
        (lease,) = wait_until(lambda: leads(store))
        blocker.execute(text("SELECT 1 FROM alkstore_schedule WHERE name = 'locked' FOR UPDATE"))
        wait_until(lambda: jobs_of(store, "locked") or jobs_of(store, "free"))
        wait_until(lambda: "it is set aside" in caplog.text)
        before = len(jobs_of(store, "free"))
        wait_until(lambda: len(jobs_of(store, "free")) >= before + 3, 10)  # tried again at once, it would hold them for fifteen
        assert [now.token for now in leads(store)] == [lease.token]
        assert loop.ended is None
        blocker.rollback()
    store.tick()
    for name in ("locked", "free"):
        assert_once(store, name, SECOND)


# -- processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runners():
    started = []
    yield started
    for each in started:
        each.kill()


def disturb(database, store, runners, rounds, *, kill_first=True):
    """Kill and stop the leader in turn; each time another fires on, within the time to live."""
    for number in range(rounds):
        leader = wait_until(lambda: leader_of(store, runners))
        newest = store.schedule_history("s", limit=1)
        if (number % 2 == 0) == kill_first:
            leader.signal(signal.SIGKILL)
            leader.process.wait(20)
            runners.remove(leader)
            leader.kill()
            runners.append(RunnerProcess(database))
        else:
            leader.freeze(database)
        wait_until(lambda: leader_of(store, runners) not in (None, leader), 60)
        leader.signal(signal.SIGCONT) if leader in runners else None
        wait_until(lambda: store.schedule_history("s", limit=1) != newest, 60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("database", "count"), [("sqlite", 2), ("postgresql-18", 5)], indirect=["database"])
def test_every_boundary_fires_once_while_leaders_are_killed_and_stopped(database, store, runners, count):
    """The other pairs of a database and a number of runners have their turn in the long form."""
    store.schedule("s", "@every 1s", "q")
    runners += [RunnerProcess(database) for _ in range(count)]
    disturb(database, store, runners, 2, kill_first=count == 2)
    assert [each.stop() for each in runners] == [("stopped", 0)] * count
    assert leads(store) == []
    store.tick()
    assert assert_once(store, "s", SECOND) >= 15
    assert not any(fire.skipped for fire in store.schedule_history("s", limit=1_000))


@pytest.mark.timeout(300)
def test_a_leader_that_slept_past_its_lease_fires_nothing_and_reports_the_loss(database, store, runners):
    store.schedule("s", "@every 1h", "q")
    sleeper = RunnerProcess(database, "run_schedules")
    runners.append(sleeper)
    wait_until(lambda: sleeper.leads(store))
    sleeper.freeze(database)
    database.sql(f"UPDATE alkstore_lock SET expires_at = {database.now(-0.001)}")
    make_due(database, "s", 5)
    sleeper.signal(signal.SIGCONT)
    said, code = sleeper.process.communicate(timeout=60)[0].strip(), sleeper.process.returncode
    assert (said.split()[0], code) == ("lost", 3)
    assert database.count() == database.count("alkstore_fire") == 0


@pytest.mark.timeout(300)
def test_a_clean_stop_hands_over_at_once(database, store, runners):
    store.schedule("s", "@every 1s", "q")
    runners += [RunnerProcess(database), RunnerProcess(database)]
    leader = wait_until(lambda: leader_of(store, runners))
    wait_until(lambda: database.count() >= 1)
    assert leader.stop() == ("stopped", 0)
    assert not leader.leads(store)  # what it left would stand for eight seconds more
    wait_until(lambda: leader_of(store, runners) not in (None, leader), 8)
    assert runners[1 - runners.index(leader)].stop() == ("stopped", 0)
    assert_once(store, "s", SECOND)


LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 7200;
    return answer;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine; clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec; now->tv_usec = fine.tv_nsec / 1000; return 0;
}
time_t time(time_t *result) {
    struct timespec fine; clock_gettime(CLOCK_REALTIME, &fine);
    if (result) *result = fine.tv_sec; return fine.tv_sec;
}
"""


@pytest.fixture
def wrong_clock(tmp_path):
    """An environment whose processes see a clock two hours ahead; checked, so that it cannot pass by doing nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("requires_c_compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True)
    environment = {"LD_PRELOAD": str(library)}
    told = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 7_000 < float(told.stdout) - time.time() < 7_400
    return environment


@pytest.mark.databases("postgresql-18")
@pytest.mark.timeout(300)
def test_a_client_clock_two_hours_wrong_changes_nothing(database, store, runners, wrong_clock):
    store.schedule("s", "@every 1s", "q")
    wrong, right = RunnerProcess(database, environment=wrong_clock), None
    runners.append(wrong)
    wait_until(lambda: wrong.leads(store) and database.count() >= 3)
    right = RunnerProcess(database)
    runners.append(right)
    wrong.signal(signal.SIGKILL)
    wait_until(lambda: right.leads(store))
    again = RunnerProcess(database, environment=wrong_clock)
    runners.append(again)
    time.sleep(2)
    assert right.leads(store)
    assert right.stop() == ("stopped", 0)
    wait_until(lambda: again.leads(store))
    wait_until(lambda: store.schedule_history("s", limit=1)[0].fired_at and len(jobs_of(store, "s")) >= 12)
    assert again.stop() == ("stopped", 0)
    assert_once(store, "s", SECOND)
    assert not any(fire.skipped for fire in store.schedule_history("s", limit=1_000))
    assert all(timedelta(0) <= fire.fired_at - fire.boundary < timedelta(seconds=60) for fire in store.schedule_history("s", limit=1_000))


@pytest.fixture
def server():
    """A server of the test's own, since it is to be restarted."""
    installed = servers.installations()
    if not installed:
        pytest.skip("requires_postgresql")
    version = next(iter(installed))
    started = servers.Server(version, installed[version])
    make_template(started.url())
    yield started
    started.stop()


@pytest.mark.timeout(300)
def test_a_restart_of_the_database_is_outlived(server, runners):
    database = TestDatabase.postgresql(server.url())
    with database.store() as store:
        store.schedule("s", "@every 1s", "q")
        runners += [RunnerProcess(database), RunnerProcess(database)]
        wait_until(lambda: database.count() >= 2)
        server.restart("immediate")
        store.engine.dispose()
        fired = database.count()
        wait_until(lambda: database.count() >= fired + 4, 60)
    with database.store() as store:
        assert [each.stop() for each in runners] == [("stopped", 0)] * 2
        store.tick()
        assert_once(store, "s", SECOND)
    database.drop()


def test_the_renewal_is_far_inside_the_time_to_live():
    assert runner.RENEWAL_SECONDS * 3 <= runner.LEASE_SECONDS
    assert runner.STATEMENT_SECONDS < runner.LEASE_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("count", [2, 5])
def test_soak_every_boundary_fires_once_through_many_disturbances(database, store, runners, count):
    rounds = int(os.environ.get("ALKSTORE_SOAK_ROUNDS", "30"))
    store.schedule("s", "@every 1s", "q")
    runners += [RunnerProcess(database) for _ in range(count)]
    for _ in range(rounds):
        disturb(database, store, runners, 1, kill_first=random.random() < 0.5)
    assert [each.stop() for each in runners] == [("stopped", 0)] * count
    store.tick()
    assert_once(store, "s", SECOND)


def test_a_tick_beside_a_leader_takes_nothing_twice(database, store):
    store.schedule("s", "@every 1s", "q")
    with Loop(store.run_schedules):
        end = time.monotonic() + 4
        while time.monotonic() < end or database.count() < 3:
            store.tick()
    assert assert_once(store, "s", SECOND) >= 3
    age(database, 1)
    assert store.tick().schedules["s"].fired >= 1
