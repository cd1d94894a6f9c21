"""The verbs of a tick: due schedules become jobs. Bind first; nothing here commits, waits or reads Python's clock.

A batch is one transaction: the lease proved and its row locked, the due schedules locked, what the history has of their boundaries
read, jobs and history inserted, the schedules advanced. All of it commits, or nothing does.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Final

from sqlalchemy import Row

from alkstore_sa._cadence import Due, Recorded, Skip, boundaries_due, checked_interval, crosses, shift_of
from alkstore_sa.constructs import microseconds
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidSpec, LeadershipLost, error_text
from alkstore_sa.leases import Held, Leases
from alkstore_sa.records import Tick
from alkstore_sa.seam import Bind
from alkstore_sa.statements import fires as fire_statements
from alkstore_sa.statements import schedules as schedule_statements
from alkstore_sa.statements.jobs import insert_fired

SCHEDULES_AT_ONCE: Final = 1_000
FIRES_AT_ONCE: Final = 5_000  # what a batch stops at, whatever its schedules have missed
PRUNED_AT_ONCE: Final = 1_000
LONGEST_HISTORY: Final = timedelta(days=7)
MOST_HISTORY: Final = 1_000  # rows of one schedule
_PRUNED_EVERY: Final = 50  # fires of one schedule
_KEPT: Final = MOST_HISTORY - _PRUNED_EVERY


@dataclass(frozen=True, slots=True)
class Soonest:
    """When the scheduler has something to do next, and how long it is until then."""

    at: datetime | None
    until: timedelta | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch did. By the instant `horizon`, in microseconds since the epoch, it and the rest of its pass measure what is due."""

    ticks: Mapping[str, Tick]
    horizon: int | None
    more: bool
    soonest: Soonest


@dataclass(frozen=True, slots=True)
class _Plan:
    """A schedule's row and what becomes of its boundaries."""

    name: str
    first: int
    interval: int
    due: Due

    @property
    def is_to_prune(self) -> bool:
        """Whether it is this schedule's turn, so that of many that fire at one instant a fiftieth prune, which the bound suffices for."""
        return crosses(self.first, self.due.next_boundary, self.interval, _PRUNED_EVERY, shift_of(self.name))


class Ticks:
    """The verbs by which due schedules become jobs in one database."""

    def __init__(self, database: Database, leases: Leases, *, waking: bool) -> None:
        self._database: Final = database
        self._leases: Final = leases
        self._waking: Final = waking
        self._wake: Final = {"wake_channel": database.channel} if waking else {}

    def fire_batch(self, bind: Bind, held: Held | None, horizon: int | None, besides: Sequence[str] = ()) -> Batch:
        """Fire a batch of what is due by `horizon` (None: by now), the longest due first; under a lease where one is given.

        Raises:
            LeadershipLost: the lease does not stand; nothing was written.
        """
        return self._fire(bind, held, horizon, {"schedules_besides": besides} if besides else {}, SCHEDULES_AT_ONCE)

    def fire_alone(self, bind: Bind, held: Held | None, horizon: int | None, name: str) -> Batch:
        """Fire one schedule, as `fire_batch` does many."""
        return self._fire(bind, held, horizon, {"schedule_name": name}, 1)

    def _fire(self, bind: Bind, held: Held | None, horizon: int | None, chosen: Mapping[str, Any], limit: int) -> Batch:
        end = self._proved(bind, held)
        values = {"schedule_limit": limit, **chosen} | ({} if horizon is None else {"horizon": horizon})
        shape = (horizon is not None, "schedules_besides" in chosen, "schedule_name" in chosen)
        rows = bind.execute(self._database.statement(schedule_statements.select_due, *shape), values).all()
        ticks: dict[str, Tick] = {}
        done = len(rows)
        if rows:
            if end is not None and microseconds(end) <= rows[0].now:
                raise LeadershipLost("the lease lapsed while its row was waited for")
            horizon = int(rows[0].now) if horizon is None else horizon
            sound = self._set_failing_apart(bind, rows)
            plans = self._planned(bind, sound, horizon)
            done -= len(sound) - len(plans)
            self._enqueue(bind, plans, horizon)
            self._skip(bind, ((plan.name, skip) for plan in plans for skip in plan.due.skips))
            self._advance(bind, plans)
            ticks = {plan.name: Tick(len(plan.due.fires), plan.due.skipped, plan.due.already) for plan in plans}
        return Batch(ticks, horizon, done == limit or done < len(rows), self.soonest(bind, chosen.get("schedules_besides", ())))

    def _proved(self, bind: Bind, held: Held | None) -> datetime | None:
        if held is None:
            return None
        end = self._leases.lock(bind, held)
        if end is None:
            raise LeadershipLost("the lease of the scheduler lapsed or was taken over")
        return end

    def _set_failing_apart(self, bind: Bind, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        """Give the rows whose spec can be read; the others get an error, and another try later."""
        sound = []
        for row in rows:
            try:
                checked_interval(row.spec, row.interval)
            except InvalidSpec as error:
                self.record_failure(bind, row.name, error)
            else:
                sound.append(row)
        return sound

    def _planned(self, bind: Bind, rows: Sequence[Row[Any]], horizon: int) -> list[_Plan]:
        """Say what becomes of each schedule; the later ones are left for another batch once there are fires enough."""
        recorded = self._recorded(bind, [row.name for row in rows], [row.next_fire_at for row in rows], [horizon] * len(rows))
        plans = [
            _Plan(
                row.name,
                row.next_fire_at,
                row.interval,
                boundaries_due(row.next_fire_at, row.interval, horizon, recorded.get(row.name, ())),
            )
            for row in rows
        ]
        fired = accumulate((len(plan.due.fires) for plan in plans), initial=0)
        return [plan for plan, before in zip(plans, fired, strict=False) if before < FIRES_AT_ONCE]

    def _recorded(self, bind: Bind, names: list[str], firsts: list[int], lasts: list[int]) -> Mapping[str, Sequence[Recorded]]:
        recorded: dict[str, list[Recorded]] = defaultdict(list)
        if names:
            values = {"fire_schedules": names, "fire_boundaries": firsts, "fire_throughs": lasts}
            for row in bind.execute(self._database.statement(fire_statements.select_recorded), values).all():
                recorded[row.schedule].append((row.boundary, row.through))
        return recorded

    def _enqueue(self, bind: Bind, plans: Sequence[_Plan], horizon: int) -> None:
        names = [plan.name for plan in plans for _ in plan.due.fires]
        if not names:
            return
        boundaries = [boundary for plan in plans for boundary in plan.due.fires]
        values = {"fire_schedules": names, "fire_boundaries": boundaries, **self._wake}
        ids = [row[0] for row in bind.execute(self._database.statement(insert_fired, self._waking), values).all()]
        bind.execute(self._database.statement(fire_statements.insert_fires), {"job_ids": ids, "horizon": horizon})

    def _skip(self, bind: Bind, skips: Iterable[tuple[str, Skip]]) -> None:
        ranges = [(name, skip.first, skip.through, skip.count) for name, skip in skips]
        if ranges:
            names, firsts, throughs, counts = map(list, zip(*ranges, strict=True))
            values = {"fire_schedules": names, "fire_boundaries": firsts, "fire_throughs": throughs, "fire_counts": counts}
            bind.execute(self._database.statement(fire_statements.insert_skips), values)

    def _advance(self, bind: Bind, plans: Sequence[_Plan]) -> None:
        if not plans:
            return
        values = {"schedule_names": [plan.name for plan in plans], "schedule_boundaries": [plan.due.next_boundary for plan in plans]}
        bind.execute(self._database.statement(schedule_statements.advance_schedules), values)
        long = [plan.name for plan in plans if plan.is_to_prune]
        if long:
            kept = {"fire_schedules": long, "fire_kept": _KEPT, "minus_age": -LONGEST_HISTORY, "fire_limit": 5 * PRUNED_AT_ONCE}
            bind.execute(self._database.statement(fire_statements.prune_schedules), kept)

    def pass_over(self, bind: Bind, name: str, first: int, interval: int, now: int) -> int:
        """Record the boundaries of one schedule up to `now` as skipped; return the first one after. Its row is locked by the caller."""
        if interval < 1:  # changed by hand, so that there is no grid
            return first
        recorded = self._recorded(bind, [name], [first], [now])
        due = boundaries_due(first, interval, now, recorded.get(name, ()), most=0)
        self._skip(bind, ((name, skip) for skip in due.skips))
        return due.next_boundary

    def record_failure(self, bind: Bind, name: str, error: BaseException) -> None:
        """Record why a schedule could not be fired; it is tried again after 2, 4, 8, … and at most 300 s."""
        values = {"schedule_name": name, "schedule_error": error_text(error)}
        bind.execute(self._database.statement(schedule_statements.fail_schedule), values)

    def due_names(self, bind: Bind, horizon: int | None, besides: Sequence[str]) -> list[str]:
        """Name the batch that `fire_batch` would fire."""
        values = {"schedule_limit": SCHEDULES_AT_ONCE} | ({} if horizon is None else {"horizon": horizon})
        statement = self._database.statement(schedule_statements.select_due_names, horizon is not None, bool(besides))
        return [row[0] for row in bind.execute(statement, values | ({"schedules_besides": besides} if besides else {}))]

    def soonest(self, bind: Bind, besides: Sequence[str] = ()) -> Soonest:
        """Say when the scheduler has something to do next."""
        values = {"schedules_besides": besides} if besides else {}
        row = bind.execute(self._database.statement(schedule_statements.select_soonest, bool(besides)), values).one()
        return Soonest(row.at, row.until)

    def pull_back(self, bind: Bind, held: Held) -> list[str]:
        """Put boundaries that lie further ahead than one interval to one interval from now; name their schedules."""
        self._proved(bind, held)
        return [row[0] for row in bind.execute(self._database.statement(schedule_statements.pull_back_schedules))]

    def prune(self, bind: Bind) -> bool:
        """Delete a batch of old history; tell whether there may be more."""
        values = {"minus_age": -LONGEST_HISTORY, "fire_limit": PRUNED_AT_ONCE}
        return len(bind.execute(self._database.statement(fire_statements.prune_old), values).all()) == PRUNED_AT_ONCE
