"""What a worker does next: claim, flush its acks, rest or leave. Pure: it is told the facts and the time, and waits for nothing.

Instants are seconds of a clock that never goes back; the caller reads it. What belongs here: when and how much. What does not: how.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

LONGEST_ACK_WAIT: Final = 0.020  # seconds for which a finished job may wait for company
MOST_UNACKED: Final = 100
REFILL_WAIT: Final = 0.002  # seconds for which a free slot may wait for others, so that one claim fills them all
PROMOTION_GAP: Final = 0.25
LONGEST_GAP: Final = 1.0
DUTY: Final = 20  # what costs c seconds is done at most every 20 * c seconds
CONTENDED: Final = 0.1  # until the next look at rows that are there but that somebody else has locked


@dataclass(frozen=True, slots=True)
class Ask:
    """One queue's part of a round: claim up to `limit`, after a promotion where `promote`."""

    queue: str
    limit: int
    promote: bool


@dataclass(frozen=True, slots=True)
class Round:
    """Ack what is finished and claim, in one transaction; without asks, ack alone."""

    asks: tuple[Ask, ...]
    free: int  # slots that all asks share


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do before `until`, unless a wake or an ended job comes."""

    until: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Everything is done."""


Step: TypeAlias = Round | Rest | Leave


@dataclass(frozen=True, slots=True)
class Load:
    """What the worker has in hand. A finished job has its slot back: its ack goes with the next claim."""

    busy: Mapping[str, int]  # by queue: claimed and not yet ended
    finished: int
    finished_at: float | None  # since when the oldest of them waits for its ack
    freed_at: float | None  # since when the oldest free slot was not asked for


class Promotion:
    """When a draining loop promotes: every quarter of a second, or less often where it is dear, but at least once a second."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether to promote at `now`, in seconds of the monotonic clock."""
        return now >= self._due_at

    def done(self, now: float, cost: float) -> None:
        """Remember a promotion that ended at `now` and took `cost` seconds."""
        self._due_at = now + max(PROMOTION_GAP, min(LONGEST_GAP, DUTY * cost))


@dataclass(slots=True)
class _QueueState:
    hungry: bool = True  # the last claim was full, or something came since
    promotion: Promotion = field(default_factory=Promotion)
    look_at: float = 0.0  # the next claim though nothing came: a deadline or the poll floor
    may_look_at: float = 0.0  # a look for the next deadline costs, so it has a duty


@dataclass(slots=True)
class Shift:
    """The decisions of one worker over its queues."""

    queues: Sequence[str]
    slots: int
    queue_slots: Mapping[str, int] = field(default_factory=dict)
    jobs_left: int | None = None
    closed: bool = False
    _first: int = 0
    _paused: frozenset[str] = frozenset()
    _states: dict[str, _QueueState] = field(init=False)

    def __post_init__(self) -> None:
        self._states = {queue: _QueueState() for queue in self.queues}

    # -- told -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Claim nothing more."""
        self.closed = True

    def rang(self, queue: str) -> None:
        """A wake: something may have come."""
        self._states[queue].hungry = True

    def pause(self, queues: frozenset[str]) -> None:
        """Claim nothing from these queues until they are no longer among them."""
        if queues != self._paused:
            for queue in self._paused - queues:
                self._states[queue].hungry = True
            self._paused = queues & self._states.keys()

    def promoted(self, queue: str, now: float, cost: float) -> None:
        """A promotion is over, and took `cost` seconds."""
        self._states[queue].promotion.done(now, cost)

    def claimed(self, queue: str, asked: int, got: int) -> None:
        """A claim is over. A short one means that the queue was empty for us; one that could ask for nothing says nothing."""
        self._states[queue].hungry = got >= asked
        if self.jobs_left is not None:
            self.jobs_left -= got

    def wants_look(self, queue: str, now: float) -> bool:
        """Tell whether to look for the queue's next deadline now; where not, the next claim comes when a look is allowed again."""
        state = self._states[queue]
        if state.hungry:
            return False
        if now < state.may_look_at:
            state.look_at = min(state.look_at, state.may_look_at) if state.look_at > now else state.may_look_at
            return False
        return True

    def looked(self, queue: str, now: float, cost: float, until: float, *, ready: bool) -> None:
        """A look is over: the next deadline (or the poll floor) is `until` seconds away, and perhaps a ready row was there."""
        state = self._states[queue]
        state.may_look_at = now + min(LONGEST_GAP, DUTY * cost)
        state.look_at = now + (min(CONTENDED, until) if ready else max(0.0, until))

    # -- asked ------------------------------------------------------------------------------------------------------

    def enough(self) -> int:
        """Give how many ended jobs are worth a round at once."""
        return min(MOST_UNACKED, (self.slots + 1) // 2)

    def next_step(self, now: float, load: Load) -> Step:
        """Decide."""
        busy = sum(load.busy.values())
        free = self.slots - busy
        asks = self._asks(now, free, load)
        if asks and self._worth_claiming(now, busy, free, load):
            self._first = (self._first + 1) % len(self.queues)
            return Round(asks, free if self.jobs_left is None else min(free, self.jobs_left))
        if load.finished and self._worth_acking(now, busy, load):
            return Round((), free)
        if not busy and not load.finished and (self.closed or self.jobs_left == 0):
            return Leave()
        return Rest(self._until(free, load, waiting=bool(asks)))

    def _asks(self, now: float, free: int, load: Load) -> tuple[Ask, ...]:
        if self.closed or free <= 0:
            return ()
        asks = []
        for queue in self._in_turn():
            state = self._states[queue]
            limit = self._limit(queue, free, load)
            if limit > 0 and (state.hungry or now >= state.look_at):
                asks.append(Ask(queue, limit, promote=state.promotion.is_due(now)))
        return tuple(asks)

    def _in_turn(self) -> Sequence[str]:
        return [*self.queues[self._first :], *self.queues[: self._first]]

    def _limit(self, queue: str, free: int, load: Load) -> int:
        if queue in self._paused:
            return 0
        limit = min(free, self.queue_slots.get(queue, self.slots) - load.busy.get(queue, 0))
        return limit if self.jobs_left is None else min(limit, self.jobs_left)

    def _worth_claiming(self, now: float, busy: int, free: int, load: Load) -> bool:
        if load.freed_at is None or not busy:
            return True
        return free >= self.enough() or load.finished >= MOST_UNACKED or now >= load.freed_at + REFILL_WAIT

    @staticmethod
    def _worth_acking(now: float, busy: int, load: Load) -> bool:
        return not busy or load.finished >= MOST_UNACKED or load.finished_at is None or now >= load.finished_at + LONGEST_ACK_WAIT

    def _until(self, free: int, load: Load, *, waiting: bool) -> float:
        moments = [float("inf")]
        if load.finished_at is not None:
            moments.append(load.finished_at + LONGEST_ACK_WAIT)
        if waiting and load.freed_at is not None:
            moments.append(load.freed_at + REFILL_WAIT)
        if not self.closed and free > 0 and not waiting:
            moments += [self._states[queue].look_at for queue in self.queues if self._limit(queue, free, load) > 0]
        return min(moments)
