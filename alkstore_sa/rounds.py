"""Rounds: one transaction that acks what is finished and claims anew, since the commit is the unit of cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from alkstore_sa._shift import Ask
from alkstore_sa.engines import Database
from alkstore_sa.queues import Jobs
from alkstore_sa.runs import Run

ROUND_LIMIT: Final = 30.0  # seconds for a statement; nothing in a round waits for a row
PROMOTION_LIMIT: Final = 30.0
LONE_ACK_LIMIT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a round asked for and brought, by queue, and those of its acks that were answered, as (id, fence)."""

    asked: Mapping[str, int]
    rows: Mapping[str, Sequence[Row[Any]]]
    acked: frozenset[tuple[int, int]]


class Rounds:
    """The statements of one worker, each in a transaction of its own with a time limit."""

    def __init__(self, jobs: Jobs, worker_id: str) -> None:
        self._jobs = jobs
        self._database: Database = jobs.database
        self._worker_id = worker_id

    def round(self, asks: Sequence[Ask], free: int, finished: Sequence[Run]) -> Claimed:
        """Ack the finished runs whose rows nobody has locked, and claim for each ask out of `free` shared slots."""
        with self._database.begin(limit=ROUND_LIMIT) as connection:
            acked = self._ack(connection, finished)
            rows: dict[str, Sequence[Row[Any]]] = {}
            asked: dict[str, int] = {}
            for ask in asks:
                asked[ask.queue] = limit = min(ask.limit, free)
                rows[ask.queue] = self._jobs.claim(connection, ask.queue, self._worker_id, limit) if limit > 0 else []
                free -= len(rows[ask.queue])
            return Claimed(asked, rows, acked)

    def flush(self, finished: Sequence[Run]) -> frozenset[tuple[int, int]]:
        """Ack the finished runs whose rows nobody has locked, by one statement; return their claims."""
        with self._database.begin(limit=ROUND_LIMIT) as connection:
            return self._ack(connection, finished)

    def ack_alone(self, runs: Sequence[Run]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Ack what a round left out, one by one, waiting a little for whoever has its row locked.

        Return the claims that were acked, and those that are still locked; the others are gone.
        """
        with self._database.begin(single=True) as connection:
            standing = self._jobs.standing(connection, [run.key for run in runs])
        acked: set[tuple[int, int]] = set()
        locked: set[tuple[int, int]] = set()
        for run in runs:
            if run.job.id not in standing:
                continue
            try:
                with self._database.begin(limit=LONE_ACK_LIMIT) as connection:
                    if self._jobs.ack(connection, *run.key):
                        acked.add(run.key)
            except DBAPIError:
                locked.add(run.key)
        return acked, locked

    def promote(self, queue: str) -> list[int]:
        """Make a queue's due and lapsed jobs ready; return the ids of those that went dead instead."""
        with self._database.begin(limit=PROMOTION_LIMIT) as connection:
            return self._jobs.promote(connection, queue)

    def look(self, queue: str) -> tuple[bool, timedelta | None]:
        """Look for a ready row and the next deadline of a queue."""
        with self._database.begin(limit=ROUND_LIMIT) as connection:
            return self._jobs.next_deadline(connection, queue)

    def give_back(self, runs: Sequence[Run], delay: timedelta, reason: Callable[[Run], str | None]) -> set[int]:
        """Give claims back uncounted, all in one transaction; return the ids of those that still stood."""
        with self._database.begin(limit=ROUND_LIMIT) as connection:
            return {
                run.job.id for run in sorted(runs, key=lambda run: run.key) if self._jobs.release(connection, *run.key, delay, reason(run))
            }

    def _ack(self, connection: Connection, finished: Sequence[Run]) -> frozenset[tuple[int, int]]:
        if not finished:
            return frozenset()
        return frozenset(self._jobs.ack_many(connection, [run.key for run in finished], skip_locked=True))
