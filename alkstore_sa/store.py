"""The store: one database, one schema, one codec, and everything that is reached through it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Self, Unpack

from sqlalchemy import URL, Connection, Engine

from alkstore_sa._cadence import parsed_interval
from alkstore_sa._names import checked_name, storable_name
from alkstore_sa._options import OUTBOX, PLAIN, Duration, EnqueueOptions, Stamps, not_negative, placement, positive, whole
from alkstore_sa._payload import Codec, JsonCodec, Payload, encoded
from alkstore_sa.deliveries import Outbox
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption
from alkstore_sa.handles import MOST_ROWS, Queue, checked_id
from alkstore_sa.leases import Leases
from alkstore_sa.locks import Lease, Locks, unique_owner
from alkstore_sa.outbox import backing_queue
from alkstore_sa.queues import Jobs
from alkstore_sa.records import Fire, Job, JobState, LockInfo, QueueStats, Schedule, TickReport, WorkerInfo
from alkstore_sa.runner import Runner, tick_once
from alkstore_sa.schedules import Schedules
from alkstore_sa.seam import Tx
from alkstore_sa.stop import StopToken
from alkstore_sa.ticks import Ticks
from alkstore_sa.verify import verify_schema
from alkstore_sa.wake import Bell
from alkstore_sa.workers import Workers


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of."""

    database: Database
    jobs: Jobs
    bell: Bell
    poll: timedelta
    workers: Workers


class Store:
    """Durable queues and outboxes as tables in the database that an application has already.

    `bind` is the application's Engine, or a URL, for which an engine is made. `schema` places the tables (PostgreSQL); without it they
    are those of the connection's default schema as it was at the first connect. `codec` turns payloads into text. `wake=False` neither
    sends nor hears wakes; `poll` is how long a waiter sleeps at most without one. Making a store opens no connection.

    Raises:
        InvalidOption: a database that is not supported, in-memory SQLite, a schema on SQLite, a `poll` out of range.
    """

    engine: Engine

    def __init__(
        self, bind: Engine | URL | str, *, schema: str | None = None, codec: Codec | None = None, wake: bool = True, poll: Duration = 5
    ) -> None:
        self._poll: Final[timedelta] = positive("poll", poll)
        self._database: Final = self._opened(bind, schema)
        self._jobs: Final = Jobs(self._database, JsonCodec() if codec is None else codec, waking=wake)
        self._bell: Final = Bell(self._database, waking=wake)
        self._workers: Final = Workers(self._database)
        self._leases: Final = Leases(self._database, waking=wake)
        self._locks: Final = Locks(self._database, self._leases)
        self._ticks: Final = Ticks(self._database, self._leases, waking=wake)
        self._schedules: Final = Schedules(self._database, self._jobs.codec, self._ticks, waking=wake)
        self._runner: Final = Runner(self._database, self._leases, self._ticks, self._bell)
        self.engine = self._database.engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop waiting, refuse every later call with `StoreClosed`, and dispose of what the store made itself."""
        self._database.refuse_later_calls()
        self._bell.close()
        self._database.close()

    def begin(self, *, single: bool = False) -> AbstractContextManager[Connection]:
        """Give a connection in a transaction of the store's own, or in autocommit where `single`; there is no other way to one."""
        return self._database.begin(single=single)

    def verify(self) -> None:
        """Inspect the database; what is newer than this library is accepted.

        Raises:
            SchemaMissing: a table is missing.
            SchemaOutdated: a column or an index is missing.
        """
        self._database.run_single(verify_schema, self._database.schema)

    # -- queues -----------------------------------------------------------------------------------------------------

    def queue(
        self,
        name: str,
        *,
        visibility_timeout: Duration | None = None,
        max_attempts: int | None = None,
        base_backoff: Duration | None = None,
    ) -> Queue:
        """Give a handle on the queue `name`, without a round trip; what it is given here, its jobs are stamped with at enqueue.

        Defaults: `visibility_timeout` 300 s, `max_attempts` 3, `base_backoff` 5 s.
        """
        stamps = PLAIN.overridden(visibility_timeout=visibility_timeout, max_attempts=max_attempts, base_backoff=base_backoff)
        return self._queue(checked_name("queue", name), stamps)

    def enqueue(self, queue: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job and return its id, as `Queue.enqueue` does."""
        return self.queue(queue).enqueue(payload, **options)

    def enqueue_tx(self, tx: Tx, queue: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a job through the caller's transaction and return its id, as `Queue.enqueue_tx` does."""
        return self.queue(queue).enqueue_tx(tx, payload, **options)

    def get_job(self, job_id: int) -> Job | None:
        """Picture a job, live or dead; None where it is finished, cancelled or rolled back."""
        return self._database.run_single(self._jobs.get, checked_id("job_id", job_id))

    def jobs(
        self,
        *,
        queue: str | None = None,
        state: JobState | None = None,
        task: str | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> Sequence[Job]:
        """Picture jobs, live and dead, by ascending id, from the one after the id `after`."""
        try:
            shown = None if state is None else JobState(state)
        except ValueError as error:
            raise InvalidOption(f"state {state!r} is none of {', '.join(JobState)}") from error
        start = None if after is None else checked_id("after", after)
        queue = None if queue is None else storable_name("queue", queue)
        task = None if task is None else storable_name("task", task)
        return self._database.run_single(self._jobs.page, queue, shown, task, whole("limit", limit, 1, MOST_ROWS), start)

    def cancel(self, job_id: int) -> bool:
        """Remove a live job, whoever holds it (its next call reports the loss); False where there is none."""
        return self._database.run_single(self._jobs.cancel, checked_id("job_id", job_id))

    def queues(self) -> Sequence[QueueStats]:
        """Count the jobs of every queue that has any, by state; dead ones up to 100,000."""
        return self._database.run_single(self._jobs.count)

    # -- workers ----------------------------------------------------------------------------------------------------

    def workers(self) -> Sequence[WorkerInfo]:
        """List the workers as they showed themselves last; one that was silent for an hour is forgotten. Nothing depends on it."""
        return self._database.run_single(self._workers.every)

    def pause_queue(self, name: str) -> bool:
        """Let workers claim nothing more from the queue, within 5 s; False where it is paused already.

        What runs goes on, jobs may be enqueued, and `Queue.claim` by hand does not look.
        """
        return self._database.run_single(self._workers.pause, checked_name("queue", name))

    def resume_queue(self, name: str) -> bool:
        """Let workers claim from the queue again, within 5 s; False where it is not paused."""
        return self._database.run_single(self._workers.resume, checked_name("queue", name))

    def pause_outbox(self, name: str) -> bool:
        """Let workers deliver nothing more of the outbox, as `pause_queue` does; `Outbox.run` does not look."""
        return self._database.run_single(self._workers.pause, backing_queue(name))

    def resume_outbox(self, name: str) -> bool:
        """Let workers deliver the outbox again; False where it is not paused."""
        return self._database.run_single(self._workers.resume, backing_queue(name))

    def paused_queues(self) -> Mapping[str, datetime]:
        """Tell which queues are paused, those behind outboxes included, and since when."""
        return self._database.run_single(self._workers.paused)

    # -- locks ------------------------------------------------------------------------------------------------------

    def try_lock(self, name: str, ttl: Duration = 60, *, owner: str | None = None) -> Lease | None:
        """Take the lock `name` for `ttl` if it is free or lapsed; None: somebody else has it. One statement.

        Without `owner` every call is an owner of its own. An explicit `owner` is an identity: whoever holds the lock under it already gets
        the same lease back, unchanged, so that a call whose answer was lost can be repeated; two threads that share one both hold it.
        """
        length, holder = positive("ttl", ttl), unique_owner() if owner is None else checked_name("owner", owner)
        return self._locks.take(checked_name("lock", name), length, holder)

    def lock(
        self, name: str, ttl: Duration = 60, *, owner: str | None = None, wait: Duration = 0, keep_alive: bool = False
    ) -> AbstractContextManager[Lease]:
        """Hold the lock `name` for the length of a `with` body; tries for up to `wait` to get it, in no order among those who wait.

        `keep_alive` renews it from a thread every third of `ttl`; without, the body has `ttl` and its own `lease.renew`. Look at
        `lease.held` or `lease.lost` in a long body, and guard what it writes by `lease.token`.

        Raises:
            LockHeld: at the start; another owner has it.
            LeaseLost: at the end of a body that did not raise; the lease was lost before.
        """
        length, holder = positive("ttl", ttl), unique_owner() if owner is None else checked_name("owner", owner)
        longest = not_negative("wait", wait)
        return self._locks.hold(longest, checked_name("lock", name), length, holder, keep_alive=keep_alive)

    def locks(self) -> Sequence[LockInfo]:
        """List the locks that somebody holds, the engine's own included."""
        return self._database.run_single(self._leases.held)

    # -- scheduler --------------------------------------------------------------------------------------------------

    def schedule(
        self,
        name: str,
        spec: str,
        queue: str,
        payload: Payload = None,
        *,
        priority: int = 0,
        max_attempts: int | None = None,
        expires: Duration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Schedule:
        """Register the schedule `name`, or change it: a job on `queue` at every boundary of `spec`, `@every <n><unit>` (s, m, h, d).

        The first boundary is one interval from now. Registering again with the same interval keeps the next boundary, so every process
        may do it at its start; another interval starts a new grid from now. A paused schedule stays paused. `expires` counts from each
        fire. One upsert.

        Raises:
            InvalidName, ReservedName, InvalidSpec, InvalidPayload, InvalidOption: before anything is sent.
        """
        options: EnqueueOptions = {"headers": headers, "priority": priority, "expires": expires, "max_attempts": max_attempts}
        return self.stamped_schedule(name, spec, queue, payload, PLAIN, **options)

    def stamped_schedule(
        self,
        name: str,
        spec: str,
        queue: str,
        payload: Payload,
        stamps: Stamps,
        *,
        task: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> Schedule:
        """Register a schedule whose jobs are of `task` and stamped as given, as `schedule` does: for the rooms above."""
        checked_name("schedule", name)
        checked_name("queue", queue)
        interval = timedelta(microseconds=parsed_interval(spec))
        text = encoded(self._jobs.codec, payload)
        placed = placement(stamps, task=task, **options)
        return self._database.run(self._schedules.register, name, spec, interval, queue, placed, text)

    def unschedule(self, name: str) -> bool:
        """Forget the schedule; its jobs and its history stay. False where there is none."""
        return self._database.run_single(self._schedules.unregister, checked_name("schedule", name))

    def pause_schedule(self, name: str) -> bool:
        """Stop the schedule from firing until it is resumed; False where there is none."""
        return self._database.run_single(self._schedules.pause, checked_name("schedule", name))

    def resume_schedule(self, name: str) -> bool:
        """Let a paused schedule fire from the first boundary after now on; those passed are recorded as skipped. False: there is none."""
        return self._database.run(self._schedules.resume, checked_name("schedule", name))

    def schedules(self) -> Sequence[Schedule]:
        """Picture the schedules, by name."""
        return self._database.run_single(self._schedules.every)

    def schedule_history(self, name: str, *, limit: int = 100) -> Sequence[Fire]:
        """List what became of a schedule's boundaries, newest first; kept 7 days, and at most 1,000 rows of each schedule."""
        most = whole("limit", limit, 1, MOST_ROWS)
        return self._database.run_single(self._schedules.history, checked_name("schedule", name), most)

    def tick(self) -> TickReport:
        """Fire what is due now, once, without leadership; safe beside any number of runners. A transaction per batch of 1,000 schedules.

        A schedule that missed more than 64 boundaries fires the 64 oldest; the rest are recorded as skipped.
        """
        return tick_once(self._database, self._ticks)

    def run_schedules(self, stop: StopToken) -> None:
        """Lead the scheduler until `stop` is cancelled; blocks.

        Raises:
            LeadershipLost: at once where another runner leads, or later, when the lease was lost; nothing fires after that.
        """
        self._runner.run(stop)

    def serve_schedules(self, stop: StopToken) -> None:
        """Lead the scheduler whenever no other process does, until `stop` is cancelled; blocks. Any number of processes may."""
        self._runner.serve(stop)

    # -- outbox -----------------------------------------------------------------------------------------------------

    def outbox(self, name: str) -> Outbox:
        """Give a handle on the outbox `name`, without a round trip."""
        return Outbox(name, self._queue(backing_queue(name), OUTBOX))

    def outbox_enqueue_tx(self, tx: Tx, outbox: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a message through the caller's transaction and return its id, as `Outbox.enqueue_tx` does."""
        return self.outbox(outbox).enqueue_tx(tx, payload, **options)

    @property
    def parts(self) -> "Parts":
        """What the store is made of: for the rooms above."""
        return Parts(self._database, self._jobs, self._bell, self._poll, self._workers)

    def stamped_queue(self, name: str, stamps: Stamps, *, task: str | None = None) -> Queue:
        """Give a handle on a queue, the engine's own included, whose jobs are of `task` and stamped as given: for the rooms above."""
        return Queue(self._jobs, self._bell, name, stamps, self._poll, task)

    def _opened(self, bind: Engine | URL | str, schema: str | None) -> Database:
        return Database(bind, schema=schema)

    def _queue(self, name: str, stamps: Stamps) -> Queue:
        return self.stamped_queue(name, stamps)
