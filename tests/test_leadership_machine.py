"""Two runners and an adversary: leadership and tick as a state machine whose steps are the real ones.

The adversary says which runner takes its next step, performs a step twice or long after it was decided, lets time pass, lets the other
runner act just before any transaction begins, and crashes a runner before it commits. Whatever it does, every boundary is fired exactly
once or skipped exactly once, nothing is written under a lease that does not stand, and nobody renews what is another's.
"""

import contextlib
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scheduling import age
from sqlalchemy import select, update

from alkstore_sa import LeadershipLost, StopToken, runner, ticks
from alkstore_sa._agenda import Fire, Sleep, leading
from alkstore_sa.constructs import clock_now, later, microseconds_between
from alkstore_sa.leases import SCHEDULER
from alkstore_sa.locks import unique_owner
from alkstore_sa.statements import leases as lease_statements
from alkstore_sa.stop import Latch
from alkstore_sa.tables import fires, locks

INTERVAL = timedelta(seconds=10)


class Crash(BaseException):
    """The runner's process is gone."""


class Actor:
    """One runner: the real agenda and the real steps, in whose transactions the adversary has its say."""

    def __init__(self, store, machine):
        self.store = store
        self.machine = machine
        self.leadership = None
        self.interruption = None  # what happens before which of a step's transactions begins
        self.crash_at = None  # before which of a step's transactions commits the process dies
        self._real_begin = store._database.begin
        store._database.begin = self.begin

    @contextlib.contextmanager
    def begin(self, **options):
        if self.interruption is not None:
            transaction, meanwhile = self.interruption
            self.interruption = None if transaction == 0 else (transaction - 1, meanwhile)
            if transaction == 0:
                meanwhile()
        with self._real_begin(**options) as connection:
            if options.get("single"):
                yield connection
                return
            lease = self._lease(connection)
            fired = self._fired(connection)
            yield connection
            self._judge(connection, lease, fired)
            if self.crash_at is not None:
                if self.crash_at == 0:
                    raise Crash
                self.crash_at -= 1

    def _judge(self, connection, before, fired):
        after = self._lease(connection)
        held = self.leadership.held if self.leadership else None
        if held is not None and self._fired(connection) != fired:
            assert before is not None
            assert (before.owner, before.token) == (held.owner, held.token), "fired under a lease that is another's"
            assert before.stands, "fired under a lease that had lapsed"
        if held is not None and before is not None and after.owner is not None and after.expires_at != before.expires_at:
            assert (after.owner, after.token) == (held.owner, held.token), "prolonged a lease that is another's"

    def _lease(self, connection):
        return connection.execute(
            select(locks.c.owner, locks.c.token, locks.c.expires_at, (locks.c.expires_at > clock_now()).label("stands")).where(
                locks.c.name == SCHEDULER
            )
        ).first()

    def _fired(self, connection):
        return len(connection.execute(select(fires.c.boundary)).all())

    # -- the real steps -------------------------------------------------------------------------------------------------

    def stand(self):
        if self.leadership is not None:
            return
        taken = self.store._runner._stood(unique_owner())
        if taken is not None:
            self.leadership = taken
            self.leader = runner.Leader(self.store._database, self.store._leases, self.store._ticks, taken, StopToken(), self.machine.latch)
            self.agenda = leading(self.machine.now)
            self.decided = next(self.agenda)
            self.older = self.decided

    def step(self, *, twice=False):
        if self.leadership is None:
            return
        self.older = self.decided
        facts = self.perform(self.decided)
        if twice and not isinstance(self.decided, Sleep):
            facts = self.perform(self.decided)
        try:
            self.decided = self.agenda.send(facts)
        except StopIteration:
            self.leadership = None

    def perform(self, step):
        sent = self.machine.now
        if isinstance(step, Sleep):
            self.machine.pass_time(round(min(step.seconds, 2.0), 3))
            return runner.Facts(self.machine.now, sent, woken=self.machine.now % 2 > 1)
        return replace(self.leader.perform(step), at=self.machine.now, sent=sent)

    def perform_again(self):
        """A step that was decided earlier arrives only now."""
        if self.leadership is not None and not isinstance(self.older, Sleep):
            with contextlib.suppress(LeadershipLost):
                self.leader.perform(self.older)

    def step_to_a_fire(self):
        for _ in range(8):
            if self.leadership is None or isinstance(self.decided, Fire):
                return
            self.step()

    def crash(self, transaction):
        """The process dies before one of its step's transactions commits, or after them; its lease stays until it lapses."""
        if self.leadership is None:
            return
        self.crash_at = transaction
        with contextlib.suppress(Crash):
            self.step()
        self.crash_at = None
        self.leadership = None


def machine_over(database, stores):
    class Leadership(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            for table in ("alkstore_fire", "alkstore_job", "alkstore_schedule", "alkstore_lock"):
                database.sql(f"DELETE FROM {table}")
            self.now = 0.0
            self.latch = Latch()
            self.shifted = timedelta(0)
            self.actors = [Actor(store, self) for store in stores[:2]]
            self.rogue = stores[2]
            self.first = self.rogue.schedule("s", "@every 10s", "q").next_fire_at

        def pass_time(self, seconds):
            self.now += seconds
            self.shifted += timedelta(seconds=seconds)
            age(database, seconds)

        def teardown(self):
            for actor in self.actors:
                del actor.store._database.begin

        @rule(who=st.integers(0, 1))
        def stand(self, who):
            self.actors[who].stand()

        @rule(who=st.integers(0, 1), steps=st.integers(1, 6))
        def run(self, who, steps):
            for _ in range(steps):
                self.actors[who].step()

        @rule(
            who=st.integers(0, 1),
            firing=st.booleans(),
            transaction=st.integers(0, 1),
            seconds=st.sampled_from([0, 3, 11, 25]),
            steps=st.integers(0, 6),
        )
        def interrupted(self, who, firing, transaction, seconds, steps):
            """Just before a transaction begins, time passes and the other runner acts."""
            actor, other = self.actors[who], self.actors[1 - who]

            def meanwhile():
                if seconds:
                    self.pass_time(seconds)
                other.stand()
                for _ in range(steps):
                    other.step()
                self.every_boundary_is_there_once()

            if firing:
                actor.step_to_a_fire()
            actor.interruption = (transaction, meanwhile)
            actor.step()
            actor.interruption = None

        @rule(who=st.integers(0, 1))
        def duplicated(self, who):
            self.actors[who].step(twice=True)

        @rule(who=st.integers(0, 1))
        def delayed(self, who):
            self.actors[who].perform_again()

        @rule(who=st.integers(0, 1), firing=st.booleans(), transaction=st.integers(0, 1))
        def crashed(self, who, firing, transaction):
            if firing:
                self.actors[who].step_to_a_fire()
            self.actors[who].crash(transaction)

        @rule(seconds=st.sampled_from([1, 5, 9, 11, 30]))
        def time_passes(self, seconds):
            self.pass_time(seconds)

        @precondition(lambda self: self.shifted < timedelta(seconds=700))
        @rule()
        def much_time_passes(self):
            self.pass_time(700)

        @rule()
        def somebody_ticks_without_leadership(self):
            self.rogue.tick()

        @rule(pause=st.booleans())
        def registered_again(self, pause):
            self.rogue.schedule("s", "@every 10s", "q")
            if pause:
                self.rogue.pause_schedule("s")
                self.rogue.resume_schedule("s")

        @invariant()
        def every_boundary_is_there_once(self):
            history = sorted(self.rogue.schedule_history("s", limit=100_000), key=lambda fire: fire.boundary)
            jobs = sorted((job.scheduled_for, job.id) for job in self.rogue.jobs(limit=100_000))
            assert jobs == [(fire.boundary, fire.job_id) for fire in history if fire.job_id is not None], "jobs and history differ"
            following = self.first - self.shifted
            for fire in history:
                assert fire.boundary == following, "a boundary was lost, or is there twice"
                following = fire.through + INTERVAL
            (schedule,) = self.rogue.schedules()
            assert schedule.next_fire_at == following, "the schedule does not stand where its history ends"

    return Leadership


def searched(database, examples, steps, *, phases=tuple(Phase)):
    with contextlib.ExitStack() as opened:
        stores = [opened.enter_context(database.store(wake=False)) for _ in range(3)]
        run_state_machine_as_test(
            machine_over(database, stores),
            settings=settings(
                max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck), phases=phases
            ),
        )


@pytest.mark.databases("sqlite", "postgresql-18")
def test_whatever_an_adversary_does_every_boundary_fires_once_under_a_lease_that_stands(database):
    searched(database, 25 if database.kind == "sqlite" else 8, 25)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.databases("sqlite", "postgresql-18")
def test_soak_whatever_an_adversary_does(database):
    searched(database, 1_000, 50)


# -- the machine finds what is planted ----------------------------------------------------------------------------------


def advance_outside_the_transaction(monkeypatch):
    advance, run = ticks.Ticks._advance, runner.Pass._run
    waiting = []
    monkeypatch.setattr(ticks.Ticks, "_advance", lambda self, bind, plans: waiting.append((self, plans)))

    def run_then_advance(self, verb, *arguments):
        answer = run(self, verb, *arguments)
        while waiting:
            owner, plans = waiting.pop()
            self._database.run(lambda bind: advance(owner, bind, plans))
        return answer

    monkeypatch.setattr(runner.Pass, "_run", run_then_advance)


def renew_without_the_owner(monkeypatch):
    def renew():
        return (
            update(locks)
            .where(locks.c.name == lease_statements._NAME, lease_statements._STANDS)
            .values(expires_at=later(clock_now(), lease_statements._TTL))
            .returning(locks.c.expires_at, microseconds_between(clock_now(), locks.c.expires_at).label("remaining"))
        )

    monkeypatch.setattr(lease_statements, "renew_lease", renew)


def prove_the_lease_before_the_tick(monkeypatch):
    run = runner.Pass._run

    def prove_then_run(self, verb, *arguments):
        if verb.__name__ in ("fire_batch", "fire_alone"):
            self._database.run(self._ticks._proved, self._held)
            arguments = (None, *arguments[1:])
        return run(self, verb, *arguments)

    monkeypatch.setattr(runner.Pass, "_run", prove_then_run)


PLANTED = {
    advance_outside_the_transaction: "the schedule does not stand where its history ends",
    renew_without_the_owner: "prolonged a lease that is another's",
    prove_the_lease_before_the_tick: "fired under a lease that",
}


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("plant", PLANTED)
def test_the_machine_finds_a_planted_bug(database, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)) as found:
        searched(database, 300, 30, phases=(Phase.generate,))
    assert PLANTED[plant] in "".join(messages(found.value))


def messages(error, seen=frozenset()):
    if error is not None and error not in seen:
        yield str(error)
        for part in (*getattr(error, "exceptions", ()), error.__context__):
            yield from messages(part, seen | {error})
