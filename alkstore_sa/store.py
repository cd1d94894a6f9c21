"""The store: one database, one schema, one codec, and everything that is reached through it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, Self, Unpack

from sqlalchemy import URL, Connection, Engine

from alkstore_sa._names import checked_name
from alkstore_sa._options import OUTBOX, PLAIN, Duration, EnqueueOptions, Stamps, positive, whole
from alkstore_sa._payload import Codec, JsonCodec, Payload
from alkstore_sa.deliveries import Outbox
from alkstore_sa.engines import Database
from alkstore_sa.errors import InvalidOption
from alkstore_sa.handles import MOST_ROWS, Queue, checked_id
from alkstore_sa.outbox import backing_queue
from alkstore_sa.queues import Jobs
from alkstore_sa.records import Job, JobState, QueueStats
from alkstore_sa.seam import Tx
from alkstore_sa.verify import verify_schema
from alkstore_sa.wake import Bell


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
        self._database: Final = Database(bind, schema=schema)
        self._jobs: Final = Jobs(self._database, JsonCodec() if codec is None else codec, waking=wake)
        self._bell: Final = Bell(self._database, waking=wake)
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
        return self._database.run_single(self._jobs.page, queue, shown, task, whole("limit", limit, 1, MOST_ROWS), start)

    def cancel(self, job_id: int) -> bool:
        """Remove a live job, whoever holds it (its next call reports the loss); False where there is none."""
        return self._database.run_single(self._jobs.cancel, checked_id("job_id", job_id))

    def queues(self) -> Sequence[QueueStats]:
        """Count the jobs of every queue that has any, by state; dead ones up to 100,000."""
        return self._database.run_single(self._jobs.count)

    # -- outbox -----------------------------------------------------------------------------------------------------

    def outbox(self, name: str) -> Outbox:
        """Give a handle on the outbox `name`, without a round trip."""
        return Outbox(name, self._queue(backing_queue(name), OUTBOX))

    def outbox_enqueue_tx(self, tx: Tx, outbox: str, payload: Payload, **options: Unpack[EnqueueOptions]) -> int:
        """Store a message through the caller's transaction and return its id, as `Outbox.enqueue_tx` does."""
        return self.outbox(outbox).enqueue_tx(tx, payload, **options)

    def _queue(self, name: str, stamps: Stamps) -> Queue:
        return Queue(self._jobs, self._bell, name, stamps, self._poll)
