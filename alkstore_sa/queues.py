"""The verbs of queues: bind first, statements run, rows or answers returned. Nothing here commits, waits or spawns."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Row, Table
from sqlalchemy.sql.expression import Executable

from alkstore_sa._options import Placement
from alkstore_sa._payload import Codec
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption
from alkstore_sa.records import Job, JobState, QueueStats, job_from_row
from alkstore_sa.seam import Bind
from alkstore_sa.statements import dead as dead_statements
from alkstore_sa.statements import inspection
from alkstore_sa.statements import jobs as job_statements
from alkstore_sa.tables import dead, jobs

PROMOTED_AT_ONCE: Final = 1_000  # rows of each kind per promotion
MOVED_AT_ONCE: Final = 1_000
_CHUNK_ROWS: Final = 5_000
_CHUNK_CHARACTERS: Final = 1_000_000


class Jobs:
    """The verbs on jobs of one database, under one codec."""

    def __init__(self, database: Database, codec: Codec, *, waking: bool) -> None:
        self.database: Final = database
        self.codec: Final = codec
        self.waking: Final = waking
        self._wake: Final = {"wake_channel": database.channel} if waking else {}

    # -- in ---------------------------------------------------------------------------------------------------------

    def insert_statement(self, placement: Placement) -> Executable:
        """Give the statement that enqueues one job so placed."""
        return self.database.statement(job_statements.insert_job, placement.timing, placement.expiring, self.waking)

    def insert(self, bind: Bind, queue: str, placement: Placement, text: str) -> int:
        """Enqueue one job in one statement and return its id."""
        values = {"job_queue": queue, "job_payload": text, **self._wake, **placement.values}
        row = bind.execute(self.insert_statement(placement), values).first()
        if row is None:
            raise InvalidOption("run_at lies after the job expires")
        return int(row[0])

    def insert_many(self, bind: Bind, queue: str, placement: Placement, chunks: Iterable[Sequence[str]]) -> list[int]:
        """Enqueue a job for each text, a statement a chunk; the i-th id is the i-th text's, and ids ascend."""
        ids: list[int] = []
        for texts in chunks:
            checked = not ids
            statement = self.database.statement(job_statements.insert_jobs, placement.timing, placement.expiring, self.waking, checked)
            array = json.dumps(texts, ensure_ascii=False, check_circular=False)
            values = {"job_queue": queue, "job_payloads": array, **self._wake, **placement.values}
            made = sorted(row[0] for row in bind.execute(statement, values).all())
            if not made:
                raise InvalidOption("run_at lies after the jobs expire")
            ids += made
        return ids

    # -- claim ------------------------------------------------------------------------------------------------------

    def promote(self, bind: Bind, queue: str) -> list[int]:
        """Bury a batch of what nobody may run any more, make a batch of what is due or lapsed ready; return the ids of the buried."""
        buried = self._move(bind, self.database.statement(dead_statements.bury_overdue), jobs, job_queue=queue, job_limit=MOVED_AT_ONCE)
        bind.execute(self.database.statement(job_statements.promote_jobs), {"job_queue": queue, "job_limit": PROMOTED_AT_ONCE}).all()
        return buried

    def claim(self, bind: Bind, queue: str, worker_id: str, limit: int) -> list[Row[Any]]:
        """Claim up to `limit` ready jobs in one statement; the rows come in the order of their claim."""
        values = {"job_queue": queue, "job_worker": worker_id, "job_limit": limit}
        rows = bind.execute(self.database.statement(job_statements.claim_jobs), values).all()
        return sorted(rows, key=_claim_order) if len(rows) > 1 else list(rows)

    def claim_fresh(self, bind: Bind, queue: str, worker_id: str, limit: int) -> list[Row[Any]]:
        """Promote, then claim: what a caller sees that knows nothing of earlier claims."""
        self.promote(bind, queue)
        return self.claim(bind, queue, worker_id, limit)

    # -- settle -----------------------------------------------------------------------------------------------------

    def ack(self, bind: Bind, job_id: int, fence: int) -> bool:
        """Delete the job if this claim still stands."""
        return _answered(bind, self.database.statement(job_statements.delete_held), job_id=job_id, job_fence=fence)

    def ack_many(self, bind: Bind, claims: Sequence[tuple[int, int]], *, skip_locked: bool = False) -> list[tuple[int, int]]:
        """Delete the jobs of those (id, fence) pairs that still stand; return their pairs. `skip_locked`: wait for nobody's row lock."""
        statement = self.database.statement(job_statements.delete_held_many, skip_locked)
        return list(map(tuple, bind.execute(statement, _pairs(claims)).all()))

    def heartbeat(self, bind: Bind, job_id: int, fence: int, ttl: timedelta | None) -> datetime | None:
        """Move the claim's end to `ttl` from now (default: the row's own visibility timeout) and return it; None: the claim is gone."""
        values = {"job_id": job_id, "job_fence": fence} | ({} if ttl is None else {"job_ttl": ttl})
        row = bind.execute(self.database.statement(job_statements.extend_held, ttl is not None), values).first()
        return None if row is None else row[0]

    def heartbeat_many(self, bind: Bind, claims: Sequence[tuple[int, int]]) -> dict[int, datetime]:
        """Move the ends of those claims that still stand to their rows' visibility timeouts from now; return the ends by id.

        A row that somebody else has locked is left out, so that one open transaction cannot hold up every other claim.
        """
        rows = bind.execute(self.database.statement(job_statements.extend_held_many), _pairs(claims))
        return {row.id: row.claim_expires_at for row in rows}

    def standing(self, bind: Bind, claims: Sequence[tuple[int, int]]) -> set[int]:
        """Tell which of those claims still stand, by id, without a lock."""
        return {row[0] for row in bind.execute(self.database.statement(job_statements.select_held_many), _pairs(claims)).all()}

    def retry(self, bind: Bind, job_id: int, fence: int, delay: timedelta, error: str) -> JobState | None:
        """Put the job back to run again after `delay`, or bury it where its attempts are used up or it expires before.

        Return the state that it is in now; None where the claim is gone.
        """
        values = {"job_id": job_id, "job_fence": fence, "job_error": error}
        statement = self.database.statement(job_statements.retry_held, bool(delay), self.waking)
        if _answered(bind, statement, **values, job_delay=delay, **self._wake):
            return JobState.DELAYED if delay else JobState.READY
        return JobState.DEAD if self.fail(bind, job_id, fence, error) else None

    def fail(self, bind: Bind, job_id: int, fence: int, error: str) -> bool:
        """Bury the job if this claim still stands."""
        statement = self.database.statement(dead_statements.bury_held)
        return bool(self._move(bind, statement, jobs, job_id=job_id, job_fence=fence, job_error=error))

    def release(self, bind: Bind, job_id: int, fence: int, delay: timedelta, error: str | None) -> bool:
        """Give the job back with its attempt uncounted."""
        statement = self.database.statement(job_statements.release_held, bool(delay), error is not None, self.waking)
        values: dict[str, Any] = {"job_id": job_id, "job_fence": fence, **self._wake}
        if delay:
            values["job_delay"] = delay
        if error is not None:
            values["job_error"] = error
        return _answered(bind, statement, **values)

    def cancel(self, bind: Bind, job_id: int) -> bool:
        """Delete a live job, whoever holds it."""
        return _answered(bind, self.database.statement(job_statements.delete_live), job_id=job_id)

    # -- the dead ---------------------------------------------------------------------------------------------------

    def replay(self, bind: Bind, queue: str, job_id: int) -> bool:
        """Bring one dead job of the queue back to life under its id."""
        statement = self.database.statement(dead_statements.revive_dead, True, self.waking)
        return bool(self._move(bind, statement, dead, job_queue=queue, job_id=job_id, **self._wake))

    def replay_batch(self, bind: Bind, queue: str, limit: int) -> int:
        """Bring up to `limit` dead jobs of the queue back to life, in id order; return how many."""
        statement = self.database.statement(dead_statements.revive_dead, False, self.waking)
        return len(self._move(bind, statement, dead, job_queue=queue, job_limit=limit, **self._wake))

    def purge_batch(self, bind: Bind, queue: str, age: timedelta, limit: int) -> int:
        """Delete up to `limit` jobs of the queue that died at least `age` ago; return how many."""
        values = {"job_queue": queue, "minus_age": -age, "job_limit": limit}
        return len(bind.execute(self.database.statement(dead_statements.purge_dead), values).all())

    def _move(self, bind: Bind, copy: Executable, origin: Table, **values: Any) -> list[int]:
        ids = [row[0] for row in bind.execute(copy, values)]
        if ids:
            bind.execute(self.database.statement(dead_statements.delete_moved, origin), {"moved_ids": ids})
        return ids

    # -- look -------------------------------------------------------------------------------------------------------

    def get(self, bind: Bind, job_id: int) -> Job | None:
        """Look a job up, live or dead, in one statement."""
        row = bind.execute(self.database.statement(inspection.select_job), {"job_id": job_id}).mappings().first()
        return None if row is None else job_from_row(row, self.codec)

    def page(self, bind: Bind, queue: str | None, state: JobState | None, task: str | None, limit: int, after: int | None) -> Sequence[Job]:
        """List jobs by ascending id."""
        chosen = {"job_queue": queue, "job_task": task, "job_after": after}
        statement = self.database.statement(inspection.select_jobs, state, *(value is not None for value in chosen.values()))
        values = {name: value for name, value in chosen.items() if value is not None}
        rows = bind.execute(statement, {"job_limit": limit, **values}).mappings()
        return [job_from_row(row, self.codec) for row in rows]

    def list_dead(self, bind: Bind, queue: str, limit: int, after: int) -> Sequence[Job]:
        """List the dead jobs of a queue by ascending id."""
        values = {"job_queue": queue, "job_limit": limit, "job_after": after}
        rows = bind.execute(self.database.statement(inspection.select_dead), values).mappings()
        return [job_from_row(row, self.codec) for row in rows]

    def now(self, bind: Bind) -> datetime:
        """Read the database's clock."""
        read: datetime = bind.execute(self.database.statement(inspection.select_now)).scalar_one()
        return read

    def ahead(self, bind: Bind, job: Job, most: int) -> int:
        """Count the ready jobs that are claimed before this one, up to `most`."""
        values = {"job_queue": job.queue, "job_priority": job.priority, "job_run_at": job.run_at, "job_id": job.id, "job_limit": most}
        return int(bind.execute(self.database.statement(inspection.count_ahead), values).scalar_one())

    def count(self, bind: Bind) -> Sequence[QueueStats]:
        """Count the jobs of every queue by state."""
        return [
            QueueStats(
                row.queue,
                row.ready,
                row.delayed,
                row.claimed,
                min(row.dead, inspection.DEAD_COUNTED),
                row.dead > inspection.DEAD_COUNTED,
                row.oldest_due_age,
            )
            for row in bind.execute(self.database.statement(inspection.count_queues))
        ]

    def next_deadline(self, bind: Bind, queue: str) -> tuple[bool, timedelta | None]:
        """Tell whether the queue has a ready row, and how long it is until a delayed one is due or a claim lapses."""
        row = bind.execute(self.database.statement(inspection.select_next_deadline), {"job_queue": queue}).one()
        known = [span for span in (row.until_due, row.until_lapse) if span is not None]
        return row.ready is not None, min(known, default=None)


def chunked(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut texts into runs of at most 5,000 and about 1 MB, in order."""
    start, characters = 0, 0
    for position, text in enumerate(texts):
        if position > start and (position - start >= _CHUNK_ROWS or characters + len(text) > _CHUNK_CHARACTERS):
            yield texts[start:position]
            start, characters = position, 0
        characters += len(text)
    if start < len(texts):
        yield texts[start:]


def _claim_order(row: Sequence[Any]) -> tuple[int, int, int]:
    return (-row[5], row[6], row[0])  # priority, run_at, id: by name it costs more than the sorting


def _pairs(claims: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    ordered = sorted(claims)
    return {"job_ids": [job_id for job_id, _ in ordered], "job_fences": [fence for _, fence in ordered]}


def _answered(bind: Bind, statement: Executable, **values: Any) -> bool:
    return bind.execute(statement, values).first() is not None
