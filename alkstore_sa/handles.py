"""What an application holds: a queue by name, and a claim of one of its jobs.

Both are cheap and know how to get a transaction; what happens inside it stands in `queues`.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Unpack

from sqlalchemy import Connection, Row
from sqlalchemy.orm import Session

from alkstore_sa._backoff import backoff
from alkstore_sa._names import checked_name
from alkstore_sa._options import Duration, EnqueueOptions, Stamps, not_negative, placement, positive, whole
from alkstore_sa._payload import Payload, decoded, encoded
from alkstore_sa._shift import Promotion
from alkstore_sa.constructs import instant, microseconds
from alkstore_sa.errors import ClaimLost, InvalidOption, error_text
from alkstore_sa.patience import Patience
from alkstore_sa.queues import MOVED_AT_ONCE, Jobs, chunked
from alkstore_sa.records import Job, JobState, headers_from_text
from alkstore_sa.seam import Tx, standing_for
from alkstore_sa.statements.jobs import delete_held
from alkstore_sa.stop import StopToken
from alkstore_sa.wake import Bell, Waiter

MOST_ROWS: Final = 1_000_000
_MAKING_EVENTS: Final = threading.Lock()  # few handles are ever asked for theirs, and an event costs more than all else of a handle
_ID_RANGE: Final = (-(2**63), 2**63 - 1)


class JobHandle:
    """A claim, fenced by (id, fence): it can settle the job for as long as nobody else has had it since.

    The end of the claim's time alone takes nothing away; a claim that was put back, taken over, cancelled or settled answers False and
    changes nothing. Every verb is a transaction of its own, but for `ack_tx`. `heartbeat` updates `claim_expires_at`; nothing else
    changes. Instants are aware UTC. `settled` says whether this very handle settled the job, `buried` whether it sent it to the dead,
    `lost` is set once it learns that the claim is gone.
    """

    __slots__ = (
        "_base_backoff",
        "_claim_expires_at",
        "_enqueued_at",
        "_headers",
        "_jobs",
        "_lost",
        "_scheduled_for",
        "_text",
        "_tx",
        "_visibility",
        "attempts",
        "buried",
        "fence",
        "id",
        "last_error",
        "max_attempts",
        "priority",
        "queue",
        "schedule",
        "settled",
        "task",
        "worker_id",
    )

    id: int
    fence: int
    queue: str
    worker_id: str
    attempts: int
    max_attempts: int
    priority: int
    task: str | None
    schedule: str | None
    last_error: str | None
    settled: bool
    buried: bool
    _headers: str | None
    _text: str
    _base_backoff: int  # these in microseconds, as they were read, since few of them are ever looked at
    _visibility: int
    _enqueued_at: int
    _claim_expires_at: int
    _scheduled_for: int | None

    def __init__(self, jobs: Jobs, row: Sequence[Any]) -> None:
        self._jobs: Final = jobs
        self._lost: threading.Event | None = None
        self._tx: Session | Connection | None = None
        self.settled = False
        self.buried = False
        (  # in the order of CLAIM_COLUMNS: by name, a row costs ten times as much, and a worker makes tens of thousands a second
            self.id,
            self.queue,
            self.task,
            self._headers,
            self._text,
            self.priority,
            _,
            self.attempts,
            self.max_attempts,
            self.fence,
            self._visibility,
            self._base_backoff,
            self._enqueued_at,
            self._claim_expires_at,
            self.worker_id,
            self.schedule,
            self._scheduled_for,
            self.last_error,
        ) = row

    def __repr__(self) -> str:
        return f"<JobHandle id={self.id} fence={self.fence} queue={self.queue!r} attempts={self.attempts}/{self.max_attempts}>"

    @property
    def payload(self) -> Payload:
        """The payload, decoded anew at each access; raises `InvalidPayload` where the stored text cannot be decoded."""
        return decoded(self._jobs.codec, self._text)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; empty where there are none."""
        return headers_from_text(self._headers)

    @property
    def enqueued_at(self) -> datetime:
        """When the job was enqueued."""
        return instant(self._enqueued_at)

    @property
    def claim_expires_at(self) -> datetime:
        """Until when the job is this worker's, as far as the handle knows."""
        return instant(self._claim_expires_at)

    @claim_expires_at.setter
    def claim_expires_at(self, end: datetime) -> None:
        self._claim_expires_at = microseconds(end)

    @property
    def scheduled_for(self) -> datetime | None:
        """The boundary that its schedule fired it for."""
        return None if self._scheduled_for is None else instant(self._scheduled_for)

    @property
    def visibility_timeout(self) -> timedelta:
        """How long a claim of the job lasts without a heartbeat."""
        return timedelta(microseconds=self._visibility)

    @property
    def lost(self) -> threading.Event:
        """Set once this handle learns, or is told by its worker, that the claim is gone."""
        if self._lost is None:
            with _MAKING_EVENTS:
                self._lost = self._lost or threading.Event()
        return self._lost

    def ack(self) -> bool:
        """Delete the job, which is done; False if the claim is gone."""
        return self._settled(self._jobs.database.run_single(self._jobs.ack, self.id, self.fence))

    def ack_tx(self, tx: Tx) -> None:
        """Delete the job inside the caller's transaction, so that its writes and the ack commit together or not at all.

        The transaction must be on the store's own database and should begin after the claim: under REPEATABLE READ or SERIALIZABLE an
        older snapshot does not see the claim, or the database refuses with a serialization failure. After a rollback the claim is as it
        was, though this handle counts as settled.

        Raises:
            ClaimLost: the claim is gone, so the caller's writes must be rolled back.
            InvalidOption, TypeError: the transaction is not one that can carry the ack.
        """
        clause = self._jobs.database.statement(delete_held)
        if not self._settled(self._jobs.database.join(tx, self._jobs.ack, clause, self.id, self.fence)):
            raise ClaimLost(f"job {self.id} is no longer held under fence {self.fence}: roll back what was done for it")
        self._tx = standing_for(tx)

    def retry(self, error: str | BaseException, delay: Duration | None = None) -> bool:
        """Put the job back with `error`, to run again after `delay` (default: the curve); False if the claim is gone.

        With its attempts used up, or with the next run past its expiry, it goes to the dead instead, and that is True too.
        """
        pause = backoff(timedelta(microseconds=self._base_backoff), self.attempts) if delay is None else not_negative("delay", delay)
        state = self._jobs.database.run(self._jobs.retry, self.id, self.fence, pause, error_text(error))
        self.buried = state is JobState.DEAD
        return self._settled(state is not None)

    def fail(self, error: str | BaseException) -> bool:
        """Send the job to the dead at once, with `error`; False if the claim is gone."""
        self.buried = self._jobs.database.run(self._jobs.fail, self.id, self.fence, error_text(error))
        return self._settled(self.buried)

    def release(self, delay: Duration | None = None, error: str | BaseException | None = None) -> bool:
        """Give the job back, at once or after `delay`, its attempt uncounted; False if the claim is gone.

        `last_error` stays as it was unless `error` is given.
        """
        pause = timedelta(0) if delay is None else not_negative("delay", delay)
        text = None if error is None else error_text(error)
        return self._settled(self._jobs.database.run_single(self._jobs.release, self.id, self.fence, pause, text))

    def heartbeat(self, ttl: Duration | None = None) -> bool:
        """Move the claim's end to `ttl` from now (default: the job's visibility timeout); False if the claim is gone."""
        length = None if ttl is None else positive("ttl", ttl)
        end = self._jobs.database.run_single(self._jobs.heartbeat, self.id, self.fence, length)
        if end is not None:
            self.claim_expires_at = end
        return self._told(end is not None)

    def _told(self, stands: bool) -> bool:
        if not stands:
            self.lost.set()
        return stands

    def _settled(self, stands: bool) -> bool:
        self.settled = self.settled or stands
        return self._told(stands)

    def told(self, acked: bool) -> None:
        """Note what became of this claim where many were acked at once."""
        self._settled(acked)

    @property
    def is_pending(self) -> bool:
        """Whether an `ack_tx` of this claim stands in a transaction of the caller's that is still open."""
        return self._tx is not None and self._tx.in_transaction()

    @property
    def is_doubtful(self) -> bool:
        """Whether the transaction of an `ack_tx` of this claim is over, and may have been rolled back."""
        return self._tx is not None and not self.is_pending

    def is_of(self, jobs: Jobs) -> bool:
        """Tell whether this is a claim in the database that `jobs` speaks to."""
        return self._jobs is jobs


def shortest_visibility(handles: Iterable[JobHandle]) -> float:
    """Give the shortest visibility timeout of some claims, in seconds; a worker asks for that of every job."""
    return min(handle._visibility for handle in handles) / 1_000_000  # noqa: SLF001 - a timedelta for each costs more than the claim


class Queue:
    """A queue by name. A handle is free: nothing is registered, and no round trip is made until a verb is called.

    Every verb without `_tx` is a transaction of its own. May be shared between threads.
    """

    def __init__(self, jobs: Jobs, bell: Bell, name: str, stamps: Stamps, poll: timedelta, task: str | None = None) -> None:
        self.name: Final = name
        self._task: Final = task  # what the jobs that are enqueued here are of
        self._jobs: Final = jobs
        self._stamps: Final = stamps
        self._waiter: Final = Waiter(bell, name, poll, lambda: jobs.database.run_single(jobs.next_deadline, name))

    def enqueue(self, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job and return its id; committed when this returns. One statement.

        `delay` (a duration) or `run_at` (an aware instant) puts its run off, `expires` (a duration from now) ends its use, a higher
        `priority` (16 bit) comes first, `max_attempts` is the number of runs in all, `headers` are str to str, at most 8 KiB.

        Raises:
            InvalidPayload, InvalidOption: before anything is sent; also for a `run_at` past `expires`, with nothing stored.
        """
        placed = placement(self._stamps, task=self._task, **options)
        return self._jobs.database.run_single(self._jobs.insert, self.name, placed, encoded(self._jobs.codec, payload))

    def enqueue_tx(self, tx: Tx, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job through the caller's transaction and return its id; it commits or vanishes with the caller's rows.

        Never commits, rolls back or opens another connection. One statement. Options as for `enqueue`.

        Raises:
            InvalidPayload: before anything is sent, the transaction untouched.
            InvalidOption: likewise, or a transaction whose rollback would keep the job.
            TypeError: `tx` is no Session, scoped_session or Connection.
        """
        placed = placement(self._stamps, task=self._task, **options)
        text = encoded(self._jobs.codec, payload)
        return self._jobs.database.join(tx, self._jobs.insert, self._jobs.insert_statement(placed), self.name, placed, text)

    def enqueue_many(self, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a job for each payload, all or none, and return their ids, ascending, in the order of the payloads."""
        placed = placement(self._stamps, task=self._task, **options)
        chunks = list(chunked([encoded(self._jobs.codec, payload) for payload in payloads]))
        if not chunks:
            return []
        run = self._jobs.database.run_single if len(chunks) == 1 else self._jobs.database.run
        return run(self._jobs.insert_many, self.name, placed, chunks)

    def enqueue_many_tx(self, tx: Tx, payloads: Iterable[Payload], **options: Unpack[EnqueueOptions]) -> list[int]:
        """Store a job for each payload through the caller's transaction, as `enqueue_tx` and `enqueue_many` do."""
        placed = placement(self._stamps, task=self._task, **options)
        chunks = list(chunked([encoded(self._jobs.codec, payload) for payload in payloads]))
        if not chunks:
            return []
        return self._jobs.database.join(tx, self._jobs.insert_many, self._jobs.insert_statement(placed), self.name, placed, chunks)

    def claim(self, worker_id: str, limit: int = 1) -> list[JobHandle]:
        """Claim up to `limit` jobs for `worker_id`, by priority (higher first), then due time, then id.

        Each is this worker's until its `claim_expires_at`; after that others may take it. The claim is committed when this returns.

        Raises:
            InvalidName: the worker's id is no name.
            InvalidOption: `limit` is not from 1 to 1,000,000.
        """
        worker = checked_name("worker", worker_id)
        most = whole("limit", limit, 1, MOST_ROWS)
        self._waiter.before_claim()
        rows = self._jobs.database.run(self._jobs.claim_fresh, self.name, worker, most)
        self._waiter.after_claim(len(rows))
        return [JobHandle(self._jobs, row) for row in rows]

    def claim_one(self, worker_id: str) -> JobHandle | None:
        """Claim one job, or None where there is none."""
        claimed = self.claim(worker_id)
        return claimed[0] if claimed else None

    def ack_many(self, jobs: Iterable[JobHandle]) -> int:
        """Delete the jobs whose claims still stand, in one statement, and return how many; the other handles are marked lost."""
        handles = list(jobs)
        if not handles:
            return 0
        if not all(handle.is_of(self._jobs) for handle in handles):
            raise InvalidOption("a handle of another store is among these: its id and fence mean nothing here")
        acked = set(self._jobs.database.run_single(self._jobs.ack_many, [(handle.id, handle.fence) for handle in handles]))
        for handle in handles:
            handle.told((handle.id, handle.fence) in acked)
        return len(acked)

    def wait(self, timeout: Duration) -> bool:
        """Block until it is worth claiming (a wake, a deadline, the poll floor): True; False once `timeout` is over."""
        return self._waiter.wait(not_negative("timeout", timeout).total_seconds())

    def jobs(self, worker_id: str, stop: StopToken) -> Iterator[JobHandle]:
        """Claim jobs one at a time, waiting between them, until `stop` is cancelled; settles and heartbeats nothing.

        A database that is away is waited for, with growing pauses and a warning in the log; any other database error is raised.
        """
        worker = checked_name("worker", worker_id)
        patience, promotion = Patience(stop), Promotion()
        while not stop.cancelled:
            rows: list[Row[Any]] = []
            with patience.with_the_database():
                rows = self._claim_on_duty(worker, promotion)
                if not rows:
                    self._waiter.wait(float("inf"), stop)
            for row in rows:
                yield JobHandle(self._jobs, row)

    def _claim_on_duty(self, worker: str, promotion: Promotion) -> list[Row[Any]]:
        """Claim one job as a loop does: the promotion stands in the path of few claims."""
        promotes = self._waiter.overdue or promotion.is_due(time.monotonic())
        self._waiter.before_claim()
        if promotes:
            began = time.monotonic()
            rows = self._jobs.database.run(self._jobs.claim_fresh, self.name, worker, 1)
            promotion.done(time.monotonic(), time.monotonic() - began)
        else:
            rows = self._jobs.database.run_single(self._jobs.claim, self.name, worker, 1)
        self._waiter.after_claim(len(rows))
        return rows

    def dead(self, *, limit: int = 100, after: int | None = None) -> Sequence[Job]:
        """List the queue's dead jobs by ascending id, from the one after the id `after`."""
        start = 0 if after is None else checked_id("after", after)
        most = whole("limit", limit, 1, MOST_ROWS)
        return self._jobs.database.run_single(self._jobs.list_dead, self.name, most, start)

    def replay(self, job_id: int) -> bool:
        """Bring a dead job back under its id: ready, no attempt used, no expiry; False if this queue has no such dead job."""
        return self._jobs.database.run(self._jobs.replay, self.name, checked_id("job_id", job_id))

    def replay_all(self, *, limit: int | None = None) -> int:
        """Bring dead jobs back, in id order, in transactions of 1,000; return how many."""
        left = MOST_ROWS if limit is None else whole("limit", limit, 1, MOST_ROWS)
        replayed = 0
        while left:
            asked = min(left, MOVED_AT_ONCE)
            moved = self._jobs.database.run(self._jobs.replay_batch, self.name, asked)
            replayed += moved
            left = left - moved if moved == asked else 0
        return replayed

    def purge_dead(self, *, older_than: Duration) -> int:
        """Delete the jobs that died at least `older_than` ago, in transactions of 1,000; return how many."""
        age = not_negative("older_than", older_than)
        purged = 0
        while moved := self._jobs.database.run_single(self._jobs.purge_batch, self.name, age, MOVED_AT_ONCE):
            purged += moved
        return purged


def checked_id(option: str, value: int) -> int:
    """Return `value` if a job's id can be compared with it; raises `InvalidOption`."""
    return whole(option, value, *_ID_RANGE)
