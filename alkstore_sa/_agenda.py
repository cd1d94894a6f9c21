"""What the leader of the scheduler does next. Pure: it is told facts and answers with a step; somebody else acts and waits.

Seconds are those of a monotonic clock that only the shell reads. That a fire happens once does not rest on anything here: every step
that writes proves the lease inside its own transaction.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

LEASE_SECONDS: Final = 10.0
RENEWAL_SECONDS: Final = 2.0
LONGEST_SLEEP_SECONDS: Final = 60.0
UPKEEP_SECONDS: Final = 3_600.0
SET_ASIDE_SECONDS: Final = 30.0  # for a schedule whose failure could not even be recorded


@dataclass(frozen=True, slots=True)
class Renew:
    """Prolong the lease. Fact: `held`."""


@dataclass(frozen=True, slots=True)
class PullBack:
    """Put right what lies too far ahead. Fact: `held`."""


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete a batch of old history. Fact: `more`."""


@dataclass(frozen=True, slots=True)
class Fire:
    """Fire a batch of due schedules, but for some. Facts: `held`, `more` of them, `apart` where the batch failed, `until`."""

    besides: tuple[str, ...] = ()
    first: bool = False  # of its pass: what is due is measured anew


@dataclass(frozen=True, slots=True)
class FireAlone:
    """Fire one schedule of a batch that failed. Facts: `held`, `broken` where it fails by itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Record:
    """Record the failure of a schedule that fails by itself. Fact: `stuck` where not even this can be done."""

    name: str


@dataclass(frozen=True, slots=True)
class Look:
    """Ask when the next boundary is, of all schedules but some. Fact: `until`."""

    besides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait so many seconds, or less at a wake. Fact: `woken`."""

    seconds: float


Step: TypeAlias = Renew | PullBack | Prune | Fire | FireAlone | Record | Look | Sleep


@dataclass(frozen=True, slots=True)
class Facts:
    """What came of a step. `at` is when it was over, `sent` when it began."""

    at: float
    sent: float
    failed: bool = False  # the database did not answer
    held: bool = True
    more: bool = False
    apart: tuple[str, ...] = ()
    broken: bool = False
    stuck: bool = False
    until: float | None = None  # seconds to the next boundary or retry; None where there is none
    woken: bool = False


Agenda: TypeAlias = Generator[Step, Facts, None]


def passing(besides: tuple[str, ...] = ()) -> Generator[Step, Facts, Facts]:
    """Fire everything that was due when the pass began: batch by batch, and one by one where a batch failed."""
    step = Fire(besides, first=True)
    while True:
        facts = yield step
        if facts.failed or not facts.held:
            return facts
        for name in facts.apart:
            alone = yield FireAlone(name)
            if alone.broken:
                alone = yield Record(name)
            if alone.failed or not alone.held:
                return alone
            if alone.stuck:
                besides = (*besides, name)
        if not facts.more:
            return (yield Look(besides)) if facts.apart else facts
        step = Fire(besides)


@dataclass(slots=True)
class _Lead:
    """What a leader remembers."""

    renewed: float
    tidied: float | None = None
    aside: dict[str, float] = field(default_factory=dict)

    def besides(self, now: float) -> tuple[str, ...]:
        self.aside = {name: until for name, until in self.aside.items() if until > now}
        return tuple(self.aside)

    def deadline(self, facts: Facts) -> float:
        known = [facts.at + LONGEST_SLEEP_SECONDS, *self.aside.values()]
        return min(known if facts.until is None else [*known, facts.at + facts.until])


def leading(acquired: float) -> Agenda:
    """Lead from the instant at which the taking of the lease was sent; the generator ends when the leadership is lost.

    Every iteration renews, fires what is due, and sleeps to the next boundary, renewing across the sleep. A step that failed sends it to
    the top, where the renewal decides.
    """
    lead = _Lead(acquired)
    while True:
        facts = yield Renew()
        if not facts.held:
            return
        if facts.failed:
            continue
        lead.renewed = facts.sent
        if lead.tidied is None or facts.at - lead.tidied >= UPKEEP_SECONDS:
            lead.tidied = facts.at
            facts = yield from _renewing(lead, _tidying(), facts)
        if not facts.failed and facts.held:
            facts = yield from _renewing(lead, passing(lead.besides(facts.at)), facts)
        if not facts.held:
            return
        if not facts.failed:
            yield from _sleeping(lead, facts)


def _tidying() -> Generator[Step, Facts, Facts]:
    facts = yield PullBack()
    while facts.held and not facts.failed:
        facts = yield Prune()
        if not facts.more:
            break
    return facts


def _renewing(lead: _Lead, work: Generator[Step, Facts, Facts], facts: Facts) -> Generator[Step, Facts, Facts]:
    """Do the steps of `work` with renewals between them, so that no work outlives the lease."""
    try:
        step = next(work)
        while True:
            if facts.at - lead.renewed >= RENEWAL_SECONDS:
                facts = yield Renew()
                if facts.failed or not facts.held:
                    return facts
                lead.renewed = facts.sent
            facts = yield step
            if facts.stuck and isinstance(step, Record):
                lead.aside[step.name] = facts.at + SET_ASIDE_SECONDS
            step = work.send(facts)
    except StopIteration as over:
        result: Facts = over.value
        return result


def _sleeping(lead: _Lead, facts: Facts) -> Agenda:
    """Sleep to the deadline with a renewal every two seconds; one that fails ends the sleep, and the top of the loop decides."""
    deadline = lead.deadline(facts)
    while facts.at < deadline:
        renewal = lead.renewed + RENEWAL_SECONDS
        if facts.at >= renewal:
            facts = yield Renew()
            if facts.failed or not facts.held:
                return
            lead.renewed = facts.sent
            continue
        facts = yield Sleep(min(deadline, renewal) - facts.at)
        if facts.woken:
            facts = yield Look(lead.besides(facts.at))
            if facts.failed:
                return
            deadline = lead.deadline(facts)
