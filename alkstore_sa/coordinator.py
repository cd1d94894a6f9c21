"""The coordinator of one worker: it does what the shift decides, and it alone keeps account of what is in hand."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from alkstore_sa._shift import Ask, Leave, Load, Rest, Round, Shift
from alkstore_sa.errors import SchemaMissing
from alkstore_sa.handlers import Handler
from alkstore_sa.handles import JobHandle, shortest_visibility
from alkstore_sa.heartbeats import Heart
from alkstore_sa.loop import LoopCrew
from alkstore_sa.patience import Patience
from alkstore_sa.rounds import Claimed, Rounds
from alkstore_sa.runs import Bench, Limiter, Outcome, Overrun, Run, conclude_aside, log, report
from alkstore_sa.sessions import Sessions
from alkstore_sa.stop import Latch, StopToken, wait_for
from alkstore_sa.store import Parts
from alkstore_sa.threads import ThreadCrew
from alkstore_sa.wake import poll_wait

UNKNOWN_PAUSE: Final = timedelta(seconds=30)
UNKNOWN_FOR: Final = timedelta(hours=24)
LONGEST_REST: Final = 3600.0
TIMEOUT_LOOK: Final = 0.1
GATE_WAIT: Final = 0.1
OVERRUN_SECONDS: Final = 2.0
UNWINDING_SECONDS: Final = 2.0
LAST_TRIES: Final = 2


@dataclass(slots=True)
class WorkerReport:
    """What a worker did, told when it leaves."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    abandoned: int = 0  # handlers that went on when the worker left
    worn_out: bool = False  # it left because half of its slots were lost to handlers that overran their timeouts

    @property
    def done(self) -> int:
        """How many jobs were done."""
        return self.outcomes[Outcome.DONE] + self.outcomes[Outcome.SETTLED]


@dataclass(frozen=True, slots=True)
class Team:
    """Whom the coordinator works with."""

    shift: Shift
    bench: Bench
    rounds: Rounds
    threads: ThreadCrew
    loop: LoopCrew | None
    heart: Heart
    sessions: Sessions


class Coordinator:
    """Turns the shift's steps into rounds, hands claims to the crews, and takes ended runs off the bench."""

    def __init__(
        self,
        parts: Parts,
        team: Team,
        handler_for: Callable[[str, str | None], Handler | None],
        told_dead: Callable[[Sequence[int]], None],
        grace: float,
    ) -> None:
        self._parts = parts
        self._team = team
        self._handler_for = handler_for
        self._told_dead = told_dead
        self._grace = grace
        self._report = WorkerReport()
        self._finished: list[Run] = []  # done, and waiting for the ack to be committed
        self._finished_at: float | None = None
        self._acks_apart = False  # the round that they went with failed: the next one claims nothing
        self._freed_at: float | None = None
        self._busy: Counter[str] = Counter()
        self._overrun = 0
        self._timed: set[Run] = set()
        self._ears: dict[str, Latch] = {}
        self._warnings = Limiter()
        self._patience = Patience(StopToken())
        self._not_before = 0.0  # after a failure of the database
        self._leave_at: float | None = None
        self._unstarted: list[Run] = []  # withdrawn from the crew when leaving began

    def run(self, stop: StopToken) -> WorkerReport:
        """Work until the shift is over: `stop` is cancelled and what was in hand is done or given back, or every job allowed is done."""
        shift = self._team.shift
        with ExitStack() as stack:
            for queue in shift.queues:
                self._ears[queue] = stack.enter_context(self._parts.bell.listening(queue))
            while True:
                self._listen()
                self._take_ended()
                self._break_off_overrun()
                if stop.cancelled and self._leave_at is None:
                    self._begin_leaving()
                now = time.monotonic()
                if self._leave_at is not None and (now >= self._leave_at or self._only_lost_slots_left()):
                    break
                step = shift.next_step(now, self._load())
                if isinstance(step, Leave):
                    break
                if isinstance(step, Round) and now >= self._not_before:
                    with self._outlasting(), self._gate_held() as held:
                        if held:
                            self._round(step)
                else:
                    self._rest(step.until if isinstance(step, Rest) else self._not_before, stop)
        self._abandon_the_rest()
        return self._report

    # -- what came --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._team.shift.pause(self._team.bench.paused)
        for queue, ear in self._ears.items():
            if ear.clear():
                self._team.shift.rang(queue)

    def _take_ended(self) -> None:
        ended = self._team.bench.take_ended()
        if not ended:
            return
        now = time.monotonic()
        self._freed_at = self._freed_at or now
        for run in ended:
            self._busy[run.job.queue] -= 1
            self._timed.discard(run)
            if run.overran:
                self._overrun -= 1
                if run.deferred:
                    self._close_account(run, run.outcome or Outcome.UNSETTLED)
                self._team.bench.held.pop(run.key, None)
            elif run.abandoned and not run.awaits_ack and not run.job.settled:
                pass  # broken off: it is given back when the worker leaves
            elif run.awaits_ack:
                self._finished.append(run)
                self._finished_at = self._finished_at or now
            else:
                self._close_account(run, run.outcome or Outcome.DONE)

    def _close_account(self, run: Run, outcome: Outcome) -> None:
        run.outcome = outcome
        self._report.outcomes[outcome] += 1
        self._team.bench.tally.count(outcome, run.seconds)
        self._team.bench.held.pop(run.key, None)
        report(run)
        if outcome is Outcome.DEAD:
            self._told_dead([run.job.id])

    def _load(self) -> Load:
        return Load(self._busy, len(self._finished), self._finished_at, self._freed_at)

    # -- what to do -------------------------------------------------------------------------------------------------

    @contextmanager
    def _outlasting(self) -> Iterator[None]:
        """Let a failure of the database cost a pause, in which the loop goes on hearing what comes."""
        try:
            yield
        except (SQLAlchemyError, SchemaMissing) as error:
            self._not_before = time.monotonic() + self._patience.failed(error)
            self._parts.database.drop_connections()
        else:
            self._patience.recover()

    @contextmanager
    def _gate_held(self) -> Iterator[bool]:
        """Hold SQLite's gate; False where a Session handler keeps it for longer than a moment."""
        gate = self._team.sessions.gate
        held = gate is None or gate.acquire(timeout=GATE_WAIT)
        try:
            yield held
        finally:
            if held and gate is not None:
                gate.release()

    def _round(self, step: Round) -> None:
        asks = () if self._acks_apart else step.asks
        self._promote(asks)
        finished, self._finished, self._finished_at, self._freed_at = self._finished, [], None, None
        try:
            rounds = self._team.rounds
            claimed = rounds.round(asks, step.free, finished) if asks else Claimed({}, {}, rounds.flush(finished))
            self._take_on(claimed)
            self._settle_acks(finished, claimed.acked)
        except BaseException:
            if finished:  # not answered: they go again, by themselves
                self._acks_apart = True
                for run in finished:
                    run.commit_sent = True
                self._finished = [*finished, *self._finished]
                self._finished_at = time.monotonic()
            raise
        self._acks_apart = False

    def _promote(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if ask.promote:
                began = time.monotonic()
                buried = self._team.rounds.promote(ask.queue)
                now = time.monotonic()
                self._team.shift.promoted(ask.queue, now, now - began)
                if buried:
                    self._report.outcomes[Outcome.DEAD] += len(buried)
                    self._told_dead(buried)

    def _settle_acks(self, finished: Sequence[Run], acked: frozenset[tuple[int, int]]) -> None:
        left = [run for run in finished if run.key not in acked] if len(acked) < len(finished) else []
        alone, locked = self._team.rounds.ack_alone(left) if left else ((), ())
        if done := [run for run in finished if run.key in acked or run.key in alone] if left else finished:
            self._report.outcomes[Outcome.DONE] += len(done)
            self._team.bench.close_acked(done)
        for run in left:
            if run.key in locked:
                self._finished.append(run)
                self._finished_at = time.monotonic()
            elif run.key in alone:
                continue
            elif run.commit_sent:
                self._close_account(run, Outcome.DONE)  # its row went with the round whose answer was lost
            else:
                run.job.lost.set()
                self._close_account(run, Outcome.LOST)

    def _take_on(self, claimed: Claimed) -> None:
        now = time.monotonic()
        plain: list[Run] = []
        on_loop: list[Run] = []
        unknown: list[JobHandle] = []
        for queue, rows in claimed.rows.items():
            self._team.shift.claimed(queue, claimed.asked[queue], len(rows))
            handlers: dict[str | None, Handler | None] = {}
            for row in rows:
                job = JobHandle(self._parts.jobs, row)
                if job.task not in handlers:
                    handlers[job.task] = self._handler_for(queue, job.task)
                handler = handlers[job.task]
                if handler is None:
                    unknown.append(job)
                    continue
                run = Run(job, handler, now)
                self._team.bench.held[run.key] = run
                self._busy[job.queue] += 1
                (on_loop if handler.is_async else plain).append(run)
                if handler.timeout is not None and not handler.is_async:
                    self._timed.add(run)
        self._start(plain, on_loop)
        for job in unknown:
            self._give_back_unknown(job)
        for queue in claimed.rows:
            self._look(queue)

    def _start(self, plain: Sequence[Run], on_loop: Sequence[Run]) -> None:
        if plain or on_loop:
            self._team.heart.quicken(shortest_visibility(run.job for run in (*plain, *on_loop)))
        if on_loop and self._team.loop is not None:
            self._team.loop.start(on_loop)
        if plain:
            self._team.threads.start(plain)

    def _look(self, queue: str) -> None:
        began = time.monotonic()
        if not self._team.shift.wants_look(queue, began):
            return
        ready, until = self._team.rounds.look(queue)
        now = time.monotonic()
        floor = poll_wait(self._parts.poll.total_seconds())
        seconds = floor if until is None else min(floor, until.total_seconds())
        self._team.shift.looked(queue, now, now - began, seconds, ready=ready)

    def _give_back_unknown(self, job: JobHandle) -> None:
        what = f"task {job.task!r}" if job.task is not None else f"the jobs of queue {job.queue!r} that are of no task"
        reason = f"no handler for {what} in worker {job.worker_id}"
        if self._warnings.lets_through(what):
            log.warning("%s: given back for %s", reason, UNKNOWN_PAUSE, extra={"job_id": job.id, "queue": job.queue, "task": job.task})
        claimed_at = job.claim_expires_at - job.visibility_timeout  # by the database's clock
        if claimed_at - max(job.enqueued_at, job.scheduled_for or job.enqueued_at) < UNKNOWN_FOR:
            job.release(UNKNOWN_PAUSE, reason)
            self._report.outcomes[Outcome.RELEASED] += 1
            return
        job.retry(reason)
        self._report.outcomes[Outcome.DEAD if job.buried else Outcome.RETRIED] += 1
        if job.buried:
            self._told_dead([job.id])

    def _rest(self, until: float, stop: StopToken) -> None:
        moments = [until, time.monotonic() + LONGEST_REST]
        if self._leave_at is not None:
            moments.append(self._leave_at)
        for run in self._timed:
            timeout = run.handler.timeout or 0.0
            moments.append(run.began_at + timeout if run.began_at else time.monotonic() + min(timeout, TIMEOUT_LOOK))
        waitables: list[Latch | StopToken] = [self._team.bench.latch, *self._ears.values()]
        if self._leave_at is None:
            waitables.append(stop)
        wait_for(waitables, max(0.0, min(moments) - time.monotonic()))

    # -- timeouts ---------------------------------------------------------------------------------------------------

    def _break_off_overrun(self) -> None:
        now = time.monotonic()
        for run in [run for run in self._timed if run.began_at and now >= run.began_at + (run.handler.timeout or 0.0)]:
            self._timed.discard(run)
            if run.ended_at:
                continue  # it is on its way to the bench
            run.deferred = run.handler.session is not None and self._team.sessions.gate is not None
            run.overran = True
            self._overrun += 1
            run.job.lost.set()
            run.interrupt()
            if run.deferred:
                continue
            run.error = Overrun(run.handler.timeout or 0.0)
            in_time = conclude_aside(run, OVERRUN_SECONDS, self._told_dead)
            self._close_account(run, (run.outcome if in_time else None) or Outcome.UNSETTLED)
        if self._leave_at is None and self._overrun and self._overrun * 2 >= self._team.shift.slots:
            log.error("%s of %s slots are lost to handlers that overran their timeouts: leaving", self._overrun, self._team.shift.slots)
            self._report.worn_out = True
            self._begin_leaving()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _begin_leaving(self) -> None:
        """Claim nothing more, give back what has not started, and wait for the rest, at most for the grace."""
        self._team.shift.close()
        self._team.sessions.close()
        self._leave_at = time.monotonic() + self._grace
        withdrawn = self._team.threads.withdraw()
        for run in withdrawn:
            self._busy[run.job.queue] -= 1
            self._timed.discard(run)
        self._unstarted = withdrawn
        with self._outlasting(), self._gate_held() as held:
            if held:
                self._give_back(withdrawn)

    def _only_lost_slots_left(self) -> bool:
        return bool(self._overrun) and self._busy.total() == self._overrun and not self._finished

    def _give_back(self, runs: Sequence[Run]) -> None:
        if not runs:
            return
        stood = self._team.rounds.give_back(runs, timedelta(0), lambda _run: None)
        for run in runs:
            self._close_account(run, Outcome.RELEASED if run.job.id in stood else Outcome.LOST)

    def _abandon_the_rest(self) -> None:
        """Break off what still runs, flush what is done, and give back what does not end."""
        unstarted = [run for run in self._unstarted if run.key in self._team.bench.held]
        running = [
            run
            for run in self._team.bench.held.values()
            if run not in self._finished and run not in unstarted and not (run.overran and not run.deferred)
        ]
        for run in running:
            run.abandoned = True
            run.interrupt()
        self._settle_what_ends(running)
        left = [run for run in running if run.key in self._team.bench.held and run not in self._finished]
        going_on = [run for run in left if not run.ended_at]
        for run in left:
            log.warning("job %s is given back unfinished: its handler did not end in time", run.job.id, extra=run.fields)
        self._report.abandoned = len(going_on) + self._overrun
        for _ in range(LAST_TRIES):  # the second one meets a fresh connection
            with self._outlasting(), self._gate_held() as held:
                if held:
                    self._give_back([*unstarted, *left])
                    break

    def _settle_what_ends(self, running: Sequence[Run]) -> None:
        end = time.monotonic() + (UNWINDING_SECONDS if running else 0.0)
        while True:
            self._take_ended()
            if self._finished:
                with self._outlasting(), self._gate_held() as held:
                    if held:
                        self._round(Round((), 0))
            waiting = any(run.key in self._team.bench.held and (run.deferred or not run.ended_at) for run in running) or self._finished
            if not waiting or time.monotonic() >= end:
                return
            wait_for((self._team.bench.latch,), max(0.0, min(0.1, end - time.monotonic())))
