"""The verbs of schedules: register, pause, resume, list. Bind first; nothing here commits, waits or reads Python's clock."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Row

from alkstore_sa._options import Placement
from alkstore_sa._payload import Codec
from alkstore_sa.constructs import microseconds
from alkstore_sa.engines import Database
from alkstore_sa.leases import SCHEDULER
from alkstore_sa.records import Fire, Schedule, schedule_from_row
from alkstore_sa.seam import Bind
from alkstore_sa.statements import fires as fire_statements
from alkstore_sa.statements import schedules as statements
from alkstore_sa.ticks import Ticks

log: Final = logging.getLogger(__name__)


class Schedules:
    """The verbs on schedules of one database, under one codec."""

    def __init__(self, database: Database, codec: Codec, ticks: Ticks, *, waking: bool) -> None:
        self._database: Final = database
        self._codec: Final = codec
        self._ticks: Final = ticks
        self._waking: Final = waking
        self._wake: Final = {"wake_channel": database.channel, "wake_queue": SCHEDULER} if waking else {}

    def register(self, bind: Bind, name: str, spec: str, interval: timedelta, queue: str, placement: Placement, text: str) -> Schedule:
        """Register or change a schedule. Its upsert is one statement, which decides what becomes of the next boundary.

        Where the interval changes, boundaries of the old grid that nobody ticked are recorded as skipped, of a paused schedule too.
        """
        before = bind.execute(self._database.statement(statements.lock_schedule), {"schedule_name": name}).first()
        length = interval // timedelta(microseconds=1)
        values: dict[str, Any] = {"job_expires": None, **placement.values, "job_queue": queue, "job_payload": text}
        values |= {"schedule_name": name, "schedule_spec": spec, "schedule_interval": interval, **self._wake}
        row = bind.execute(self._database.statement(statements.upsert_schedule, self._waking), values).mappings().one()
        if before is not None:
            self._let_go(bind, name, before, microseconds(row["next_fire_at"]), length)
        return schedule_from_row(row, self._codec)

    def _let_go(self, bind: Bind, name: str, before: Row[Any], boundary: int, length: int) -> None:
        """Account for what a registration gave up: boundaries of the old grid up to where the new one starts, or one too far ahead."""
        if before.interval == length:
            if boundary != before.next_fire_at:
                warn_pulled_back([name])
        elif before.next_fire_at <= (start := boundary - length):
            self._ticks.pass_over(bind, name, before.next_fire_at, before.interval, start)

    def unregister(self, bind: Bind, name: str) -> bool:
        """Forget a schedule; its jobs and its history stay."""
        values = {"schedule_name": name, **self._wake}
        return bind.execute(self._database.statement(statements.delete_schedule, self._waking), values).first() is not None

    def pause(self, bind: Bind, name: str) -> bool:
        """Stop a schedule from firing; False where there is none."""
        return bind.execute(self._database.statement(statements.pause_schedule), {"schedule_name": name}).first() is not None

    def resume(self, bind: Bind, name: str) -> bool:
        """Let a paused schedule fire again, from the first boundary after now; the passed ones are recorded as skipped."""
        row = bind.execute(self._database.statement(statements.lock_schedule), {"schedule_name": name}).first()
        if row is None or not row.paused:
            return row is not None
        boundary = self._ticks.pass_over(bind, name, row.next_fire_at, row.interval, row.now)
        values = {"schedule_name": name, "schedule_boundary": boundary, **self._wake}
        return bind.execute(self._database.statement(statements.resume_schedule, self._waking), values).first() is not None

    def every(self, bind: Bind) -> Sequence[Schedule]:
        """List the schedules by name."""
        return [
            schedule_from_row(row, self._codec) for row in bind.execute(self._database.statement(statements.select_schedules)).mappings()
        ]

    def history(self, bind: Bind, name: str, limit: int) -> Sequence[Fire]:
        """List what became of a schedule's boundaries, newest first."""
        values = {"fire_schedule": name, "fire_limit": limit}
        return [Fire(**row) for row in bind.execute(self._database.statement(fire_statements.select_history), values).mappings()]


def warn_pulled_back(names: Sequence[str]) -> None:
    """Report schedules whose next boundary lay further ahead than one interval."""
    log.warning(
        "%d schedules had their next boundary further ahead than one interval (a stepped clock?); it is one interval from now: %s",
        len(names),
        ", ".join(map(repr, names[:10])) + (", …" if len(names) > 10 else ""),
        extra={"schedules": list(names)},
    )
