"""One run of a job by a worker, and what becomes of the job when it ends."""

import asyncio
import logging
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.exc import DataError, SQLAlchemyError

from alkstore_sa.errors import SchemaMissing, error_text
from alkstore_sa.handlers import Handler
from alkstore_sa.handles import JobHandle
from alkstore_sa.outcomes import Fail, Retry, Snooze
from alkstore_sa.stop import Latch

log: Final = logging.getLogger("alkstore_sa.worker")

SETTLING_TRIES: Final = 6  # after that the job is left to its visibility timeout


class Overrun(Exception):
    """A run took longer than its task's timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"timeout: longer than {seconds:g} s")


class Outcome(StrEnum):
    """What became of a run."""

    DONE = "done"
    SETTLED = "settled by its handler"
    RETRIED = "put back for another attempt"
    SNOOZED = "snoozed"
    DEAD = "dead"
    RELEASED = "given back"
    LOST = "lost"
    UNSETTLED = "left to its visibility timeout"


class Run:
    """A claim in a worker's hands, from the claim until it is settled."""

    __slots__ = (
        "_interrupts",
        "abandoned",
        "awaits_ack",
        "began_at",
        "claimed_at",
        "commit_sent",
        "deferred",
        "ended_at",
        "error",
        "handler",
        "job",
        "key",
        "outcome",
        "overran",
        "task",
    )

    def __init__(self, job: JobHandle, handler: Handler, claimed_at: float) -> None:
        self.job: Final = job
        self.key: Final = (job.id, job.fence)  # the claim
        self.handler: Final = handler
        self.claimed_at: Final = claimed_at
        self.began_at = 0.0  # 0: not yet
        self.ended_at = 0.0
        self.error: BaseException | None = None
        self.outcome: Outcome | None = None
        self.awaits_ack = False
        self.commit_sent = False  # a commit with its ack in it was under way
        self.overran = False  # its time was over: settled by the worker, though its thread may go on
        self.deferred = False  # it overran, but only its own thread can settle it: it holds SQLite's one write lock
        self.abandoned = False  # the worker leaves without it
        self.task: asyncio.Task[None] | None = None  # of an async handler
        self._interrupts: tuple[Callable[[], object], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its log records."""
        job = self.job
        return {
            "job_id": job.id,
            "queue": job.queue,
            "task": job.task,
            "attempt": job.attempts,
            "outcome": self.outcome,
            "seconds": self.seconds,
        }

    @property
    def seconds(self) -> float:
        """How long the handler ran."""
        return self.ended_at - self.began_at if self.began_at and self.ended_at else 0.0

    def start(self) -> None:
        """Note that the handler starts now: its time runs from here."""
        self.began_at = time.monotonic()

    def on_interrupt(self, interrupt: Callable[[], object]) -> None:
        """Say how what the run is doing can be broken off."""
        self._interrupts += (interrupt,)

    def interrupt(self) -> None:
        """Break off what the run is doing, as far as that is possible; never raises."""
        task = self.task
        if task is not None:
            task.get_loop().call_soon_threadsafe(lambda: None if self.ended_at else task.cancel())
        for act in self._interrupts:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - whatever the driver says, there is nothing more to be done
                log.debug("interrupting job %s: %s", self.job.id, error)


class Tally:
    """What became of a worker's runs since its start."""

    __slots__ = ("done", "failed", "seconds")

    def __init__(self) -> None:
        self.done = 0
        self.failed = 0
        self.seconds = 0.0

    def count(self, outcome: Outcome, seconds: float) -> None:
        """Count one run."""
        self.seconds += seconds
        if outcome in (Outcome.DONE, Outcome.SETTLED):
            self.done += 1
        elif outcome in (Outcome.RETRIED, Outcome.DEAD, Outcome.LOST, Outcome.UNSETTLED):
            self.failed += 1


class Bench:
    """Every claim that a worker holds. Crews end runs on it; only the coordinator takes them off."""

    def __init__(self, enough: int) -> None:
        self.held: Final[dict[tuple[int, int], Run]] = {}
        self.latch: Final = Latch()
        self.tally: Final = Tally()
        self.paused: frozenset[str] = frozenset()  # as the last beat heard it
        self._ended: Final[deque[Run]] = deque()
        self._enough = enough
        self._told = False

    def end(self, run: Run) -> None:
        """Hand an ended run to the coordinator; called once per run, in any thread."""
        self._ended.append(run)
        if not self._told:
            self._told = True
            self.latch.set()
        elif len(self._ended) == self._enough:
            self.latch.set()

    def take_ended(self) -> list[Run]:
        """Take the runs that ended since the last call."""
        self._told = False
        self.latch.clear()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close_acked(self, runs: Sequence[Run]) -> None:
        """Take off the runs whose acks were committed. Of all outcomes only this one comes by the thousand."""
        logged = log.isEnabledFor(logging.INFO)
        self.tally.done += len(runs)
        for run in runs:
            run.job.settled = True
            run.outcome = Outcome.DONE
            self.tally.seconds += run.ended_at - run.began_at
            self.held.pop(run.key, None)
            if logged:
                report(run)


def conclude(run: Run, tries: int = SETTLING_TRIES) -> None:
    """Settle a run that ended by an exception, by the verb that this one asks for; never raises.

    A database that is away is tried again for a while, and an exception whose text cannot be recorded is told by its type. A handler
    that settled its job itself is believed, but an `ack_tx` may have been rolled back with the exception: then the job still stands.
    """
    job, error = run.job, run.error
    by_handler = job.settled
    if by_handler and (error is None or not job.is_doubtful):
        note_settled(run)
        return
    for told in (error, _plain(error)):
        try:
            run.outcome = _settle(run, told, tries)
            break
        except Exception as problem:
            log.warning("job %s: its end cannot be recorded (%s)", job.id, type(problem).__name__, extra=run.fields, exc_info=problem)
            run.outcome = Outcome.UNSETTLED
    if by_handler and run.outcome is Outcome.LOST:
        note_settled(run)
    elif job.buried:
        run.outcome = Outcome.DEAD


def conclude_aside(run: Run, seconds: float, told_dead: Callable[[Sequence[int]], None]) -> bool:
    """Settle a run by one try in a thread of its own, since somebody may have its row locked; False where that takes longer.

    A job that goes dead after that is passed to `told_dead`.
    """
    concluded: Future[None] = Future()

    def settle() -> None:
        conclude(run, tries=1)
        concluded.set_result(None)

    try:
        threading.Thread(target=settle, name="alkstore-aside", daemon=True).start()
    except RuntimeError:  # no more threads can be had
        settle()
    wait((concluded,), seconds)
    if concluded.done():
        return True
    concluded.add_done_callback(lambda _: told_dead([run.job.id]) if run.job.buried else None)
    return False


def _settle(run: Run, error: BaseException | None, tries: int) -> Outcome:
    job = run.job
    if isinstance(error, Snooze):
        return settled(run, lambda: job.release(error.delay), Outcome.SNOOZED, tries)
    if isinstance(error, Fail):
        return settled(run, lambda: job.fail(_said(error)), Outcome.DEAD, tries)
    if isinstance(error, Retry):
        return settled(run, lambda: job.retry(_said(error), error.delay), Outcome.RETRIED, tries)
    text = str(error) if error is None or isinstance(error, Overrun) else described(error)
    return settled(run, lambda: job.retry(text), Outcome.RETRIED, tries)


def _plain(error: BaseException | None) -> Fail | Retry:
    name = ascii(type(error).__name__)[1:-1]
    return Fail(name) if isinstance(error, Fail) else Retry(name)


def settled(run: Run, verb: Callable[[], bool], outcome: Outcome, tries: int) -> Outcome:
    """Call a verb of the handle until the database answers; give the outcome that this means."""
    for attempt in range(tries):
        try:
            stood = verb()
        except DataError:
            raise  # it is the text that will not do, however often
        except (SQLAlchemyError, SchemaMissing, OSError) as error:
            pause = 0.2 * 2**attempt * random.uniform(0.5, 1)
            log.warning("job %s cannot be settled (%s): again in %.1f s", run.job.id, type(error).__name__, pause, extra=run.fields)
            if attempt + 1 < tries:
                time.sleep(pause)
        else:
            if stood:
                return outcome
            return Outcome.DONE if run.commit_sent else Outcome.LOST  # the claim stood in that commit, so that it went through
    return Outcome.UNSETTLED


def note_settled(run: Run) -> None:
    """Note what a handler made of its job by a verb of the handle."""
    run.outcome = Outcome.DEAD if run.job.buried else Outcome.SETTLED


def described(error: BaseException) -> str:
    """Give an exception as it is stored: its type and text first, then its traceback."""
    head = f"{type(error).__qualname__}: {error_text(error)}"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - an exception that cannot be shown is recorded by its type
        return head
    return f"{head}\n\n{trace}"


def _said(error: Retry | Fail) -> str:
    return described(error.__cause__) if isinstance(error, Retry) and error.__cause__ is not None else error.reason


def report(run: Run) -> None:
    """Write the one line of a run that is settled."""
    outcome = run.outcome
    if outcome in (Outcome.DEAD, Outcome.LOST, Outcome.UNSETTLED):
        log.warning("job %s: %s", run.job.id, outcome, extra=run.fields, exc_info=run.error)
    elif log.isEnabledFor(logging.INFO):
        cause = "" if run.error is None else f" ({type(run.error).__name__})"
        log.info("job %s: %s after %.3f s%s", run.job.id, outcome, run.seconds, cause, extra=run.fields)


class Limiter:
    """Lets a message through once a minute per subject."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._last: dict[object, float] = {}
        self._lock = threading.Lock()

    def lets_through(self, subject: object) -> bool:
        """Tell whether a message on `subject` may be written now."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(subject, float("-inf")) < self._seconds:
                return False
            self._last[subject] = now
            return True
