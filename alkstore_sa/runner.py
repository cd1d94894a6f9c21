"""The loops that run the scheduler: they act and wait as `_agenda` says, and hold the leadership as a lease.

What is due and what becomes of it is decided and written in `ticks`, under the lease, in one transaction a batch.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alkstore_sa._agenda import (
    LEASE_SECONDS,
    RENEWAL_SECONDS,
    Facts,
    Fire,
    FireAlone,
    Look,
    Prune,
    PullBack,
    Record,
    Renew,
    Sleep,
    Step,
    leading,
    passing,
)
from alkstore_sa.engines import Database
from alkstore_sa.errors import AlkstoreError, LeadershipLost, SchemaMissing
from alkstore_sa.leases import SCHEDULER, Held, Leases
from alkstore_sa.locks import unique_owner
from alkstore_sa.patience import Patience, is_away
from alkstore_sa.records import Tick, TickReport
from alkstore_sa.schedules import warn_pulled_back
from alkstore_sa.stop import Latch, StopToken, wait_for
from alkstore_sa.ticks import SCHEDULES_AT_ONCE, Batch, Soonest, Ticks
from alkstore_sa.wake import Bell

P = ParamSpec("P")
R = TypeVar("R")

log: Final = logging.getLogger(__name__)

STATEMENT_SECONDS: Final = 5.0
_TTL: Final = timedelta(seconds=LEASE_SECONDS)
_AFTER_THE_LAPSE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Leadership:
    """The lease by which a runner leads, and when it was asked for."""

    held: Held
    sent: float


class Pass:
    """Performs the steps of one pass after another over what is due, under a lease or without."""

    def __init__(self, database: Database, ticks: Ticks, held: Held | None, limit: float | None) -> None:
        self._database: Final = database
        self._ticks: Final = ticks
        self._held: Final = held
        self._limit: Final = limit
        self._horizon: int | None = None
        self._error: BaseException = AlkstoreError()
        self.fired: dict[str, Tick] = {}
        self.soonest = Soonest(None, None)

    def fire(self, step: Fire) -> Facts:
        """Fire a batch; where it fails for another reason than an absent database, name what is to be fired one by one."""
        sent = time.monotonic()
        if step.first:
            self._horizon = None
            self.fired = {}
        besides = list(step.besides)
        try:
            batch = self._run(self._ticks.fire_batch, self._held, self._horizon, besides)
        except DBAPIError as error:
            if is_away(error):
                raise
            log.warning("a batch of due schedules failed (%s): firing them one by one", type(error.orig).__name__)
            names = self._run(self._ticks.due_names, self._horizon, besides)
            return Facts(time.monotonic(), sent, apart=tuple(names), more=len(names) == SCHEDULES_AT_ONCE)
        return self._told(batch, sent)

    def fire_alone(self, step: FireAlone) -> Facts:
        """Fire one schedule, and say whether it fails by itself."""
        sent = time.monotonic()
        try:
            batch = self._run(self._ticks.fire_alone, self._held, self._horizon, step.name)
        except DBAPIError as error:
            if is_away(error):
                raise
            log.warning("schedule %r failed: %s", step.name, type(error.orig).__name__, extra={"schedule": step.name})
            self._error = error.orig or error
            return Facts(time.monotonic(), sent, broken=True)
        return self._told(batch, sent)

    def record(self, step: Record) -> Facts:
        """Record the failure that was met last, and say whether not even that can be done, as where somebody has the row locked."""
        sent = time.monotonic()
        try:
            self._run(self._ticks.record_failure, step.name, self._error)
        except DBAPIError as error:
            if is_away(error):
                raise
            log.warning("the failure of schedule %r could not be recorded: it is set aside for a while", step.name)
            return Facts(time.monotonic(), sent, stuck=True)
        return Facts(time.monotonic(), sent)

    def look(self, step: Look) -> Facts:
        """Ask when there is something to do next."""
        sent = time.monotonic()
        self.soonest = self._run(self._ticks.soonest, list(step.besides))
        return Facts(time.monotonic(), sent, until=_seconds(self.soonest.until))

    def perform(self, step: Step) -> Facts:
        """Perform a step of a pass."""
        match step:
            case Fire():
                return self.fire(step)
            case FireAlone():
                return self.fire_alone(step)
            case Record():
                return self.record(step)
            case Look():
                return self.look(step)
        raise TypeError(f"{step!r} is no step of a pass")

    def _told(self, batch: Batch, sent: float) -> Facts:
        self._horizon = batch.horizon
        for name, tick in batch.ticks.items():
            before = self.fired.get(name)
            self.fired[name] = tick if before is None else before + tick
        self.soonest = batch.soonest
        return Facts(time.monotonic(), sent, more=batch.more, until=_seconds(batch.soonest.until))

    def _run(self, verb: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._limit is None:
            return self._database.run(verb, *args, **kwargs)
        return self._database.run_within(self._limit, verb, *args, **kwargs)


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


def tick_once(database: Database, ticks: Ticks) -> TickReport:
    """Do one pass over what is due, without leadership."""
    work = Pass(database, ticks, None, None)
    steps = passing()
    step = next(steps)
    with suppress(StopIteration):
        while True:
            step = steps.send(work.perform(step))
    return TickReport(MappingProxyType(work.fired), work.soonest.at)


class Runner:
    """Leads the scheduler, or waits to lead it."""

    def __init__(self, database: Database, leases: Leases, ticks: Ticks, bell: Bell) -> None:
        self._database: Final = database
        self._leases: Final = leases
        self._ticks: Final = ticks
        self._bell: Final = bell

    def run(self, stop: StopToken) -> None:
        """Lead until `stop` is cancelled.

        Raises:
            LeadershipLost: another runner leads, or this one lost the lease.
        """
        patience = Patience(stop)
        owner = unique_owner()  # of the whole call: a taking whose answer was lost is met again, as its own
        with self._bell.listening(SCHEDULER) as ear:
            while not stop.cancelled:
                try:
                    leadership = self._stood(owner)
                except (DBAPIError, PoolTimeout) as error:
                    patience.outlast(error)
                    continue
                if leadership is None:
                    raise LeadershipLost("another process leads the scheduler")
                self._lead(leadership, stop, ear)

    def serve(self, stop: StopToken) -> None:
        """Lead whenever nobody else does, until `stop` is cancelled."""
        patience = Patience(stop)
        away: tuple[type[Exception], ...] = (DBAPIError, PoolTimeout)
        with self._bell.listening(SCHEDULER) as ear:
            while not stop.cancelled:
                ear.clear()
                try:
                    left = self._database.run_within(STATEMENT_SECONDS, self._leases.remaining, SCHEDULER)
                    leadership = self._stood(unique_owner()) if left is None else None
                    patience.recover()
                    away = (DBAPIError, PoolTimeout, SchemaMissing)  # the tables were there, and will be again
                except away as error:
                    patience.outlast(error)
                    continue
                if leadership is None:
                    wait_for(
                        (ear, stop), RENEWAL_SECONDS if left is None else min(RENEWAL_SECONDS, left.total_seconds() + _AFTER_THE_LAPSE)
                    )
                    continue
                try:
                    self._lead(leadership, stop, ear)
                except LeadershipLost as error:
                    log.warning("%s: standing by", error)

    def _stood(self, owner: str) -> Leadership | None:
        sent = time.monotonic()
        taken = self._database.run_within(STATEMENT_SECONDS, self._leases.take, SCHEDULER, owner, _TTL)
        return None if taken is None else Leadership(taken[0], sent)

    def _lead(self, leadership: Leadership, stop: StopToken, ear: Latch) -> None:
        log.info("leading the scheduler as %s", leadership.held.owner)
        leader = Leader(self._database, self._leases, self._ticks, leadership, stop, ear)
        agenda = leading(leadership.sent)
        step = next(agenda)
        try:
            while not stop.cancelled:
                step = agenda.send(leader.perform(step))
        except StopIteration:
            raise LeadershipLost("the lease of the scheduler lapsed or was taken over") from None
        finally:
            self._release(leadership.held)

    def _release(self, held: Held) -> None:
        try:
            self._database.run_within(STATEMENT_SECONDS, self._leases.release, held)
        except (SQLAlchemyError, AlkstoreError) as error:
            log.warning("the lease of the scheduler could not be released: %s", type(error).__name__)


class Leader:
    """Performs the steps of a leader's agenda and tells what came of them."""

    def __init__(self, database: Database, leases: Leases, ticks: Ticks, leadership: Leadership, stop: StopToken, ear: Latch) -> None:
        self._database: Final = database
        self._leases: Final = leases
        self._ticks: Final = ticks
        self._held: Final = leadership.held
        self._stop: Final = stop
        self._ear: Final = ear
        self._pass: Final = Pass(database, ticks, leadership.held, STATEMENT_SECONDS)
        self._patience: Final = Patience(stop)

    def perform(self, step: Step) -> Facts:
        """Perform one step; an error of the database is waited out and told as a fact."""
        sent = time.monotonic()
        try:
            return self._performed(step, sent)
        except LeadershipLost:
            return Facts(time.monotonic(), sent, held=False)
        except (DBAPIError, PoolTimeout, SchemaMissing) as error:
            self._patience.outlast(error)
            return Facts(time.monotonic(), sent, failed=True)

    def _performed(self, step: Step, sent: float) -> Facts:
        match step:
            case Sleep():
                self._patience.recover()
                woken = wait_for((self._ear, self._stop), step.seconds)
                self._ear.clear()
                return Facts(time.monotonic(), sent, woken=woken)
            case Renew():
                term = self._database.run_within(STATEMENT_SECONDS, self._leases.renew, self._held, _TTL)
                return Facts(time.monotonic(), sent, held=term is not None)
            case PullBack():
                self._pull_back()
                return Facts(time.monotonic(), sent)
            case Prune():
                more = self._database.run_within(STATEMENT_SECONDS, self._ticks.prune)
                return Facts(time.monotonic(), sent, more=more)
            case _:
                return self._pass.perform(step)

    def _pull_back(self) -> None:
        try:
            names = self._database.run_within(STATEMENT_SECONDS, self._ticks.pull_back, self._held)
        except DBAPIError as error:
            if is_away(error):
                raise
            log.warning("boundaries that lie too far ahead could not be put right: %s", type(error.orig).__name__)
            return
        if names:
            warn_pulled_back(names)
