"""The worker: claims jobs, runs their handlers, keeps their claims alive, and settles them."""

import importlib
import logging
import os
import queue as queues_of_threads
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from alkstore_sa._names import checked_name
from alkstore_sa._options import Duration, not_negative, whole
from alkstore_sa._shift import Shift
from alkstore_sa.coordinator import Coordinator, Team, WorkerReport
from alkstore_sa.errors import InvalidOption
from alkstore_sa.handlers import Handler
from alkstore_sa.heartbeats import Heart
from alkstore_sa.loop import LoopCrew
from alkstore_sa.outbox import backing_queue
from alkstore_sa.patience import Patience, is_away
from alkstore_sa.presence import Presence
from alkstore_sa.rounds import Rounds
from alkstore_sa.runs import Bench
from alkstore_sa.sessions import Sessions
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store
from alkstore_sa.tasks import Around, OnDead, SessionFactory, Tasks
from alkstore_sa.threads import ThreadCrew

log: Final = logging.getLogger("alkstore_sa.worker")

MOST_SLOTS: Final = 10_000
MOST_JOBS: Final = 2**31
HERALD_SECONDS: Final = 5.0


class Worker:
    """Runs the jobs of some queues, and delivers the messages of some outboxes, until it is told to stop.

    Without `queues` and `outboxes` it serves the queues of the registered tasks and raw handlers. `concurrency` jobs run at once at most,
    sync handlers in threads and async ones on one event loop in a thread of its own; `queue_concurrency` bounds single queues. No
    transaction is open while a handler without a Session runs. `session_factory`, `async_engine`, `around` and `on_dead` default to
    those of the registry. After a stop the handlers have `grace` seconds to end. `max_jobs`: leave after so many.

    Raises:
        InvalidName, ReservedName, InvalidOption: an argument is out of its range, or the tasks are bound to another store.
    """

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        *,
        queues: Iterable[str] | None = None,
        outboxes: Iterable[str] = (),
        concurrency: int = 10,
        queue_concurrency: Mapping[str, int] | None = None,
        async_engine: AsyncEngine | None = None,
        session_factory: SessionFactory | None = None,
        around: Around | None = None,
        on_dead: OnDead | None = None,
        grace: Duration = 30,
        max_jobs: int | None = None,
        worker_id: str | None = None,
    ) -> None:
        self._store: Final = store
        self._tasks: Final = tasks.bind(store)
        self._queues = None if queues is None else [checked_name("queue", name) for name in queues]
        self._outboxes: Final = [backing_queue(name) for name in outboxes]
        self._slots: Final = whole("concurrency", concurrency, 1, MOST_SLOTS)
        self._queue_slots: Final = {
            checked_name("queue", name): whole("queue_concurrency", most, 1, MOST_SLOTS) for name, most in (queue_concurrency or {}).items()
        }
        self._async_engine: Final = async_engine or tasks.async_engine
        self._session_factory: Final = session_factory or tasks.session_factory or sessionmaker(store.engine)
        self._around: Final = around or tasks.around
        self._on_dead: Final = on_dead or tasks.on_dead
        self._grace = not_negative("grace", grace).total_seconds()
        self._max_jobs: Final = None if max_jobs is None else whole("max_jobs", max_jobs, 1, MOST_JOBS)
        self.worker_id: Final = (
            f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(4)}" if worker_id is None else checked_name("worker", worker_id)
        )

    def run(self, stop: StopToken) -> WorkerReport:
        """Work until `stop` is cancelled, then wait for what runs, at most for the grace; report. Blocks.

        A database that is away is waited for, at the start too.

        Raises:
            SchemaMissing, SchemaOutdated: the tables are not there.
            InvalidOption: there is nothing to serve, or a handler takes an AsyncSession and there is no `async_engine`.
        """
        for module in self._tasks.imports:
            importlib.import_module(module)
        queues = self._served()
        handlers = self._tasks.handlers_of(queues)
        if self._async_engine is None and any(handler.session == "async" for handler in handlers):
            raise InvalidOption("a task takes an AsyncSession: give the worker async_engine=, or Tasks(async_engine=…)")
        if not verified(self._store, stop):
            return WorkerReport()
        if self._tasks.declares_schedules:
            self._tasks.sync_schedules()
        log.info("worker %s serves %s with %s slots", self.worker_id, ", ".join(queues), self._slots)
        with ExitStack() as stack:
            herald = _Herald(self._store, self._on_dead)
            stack.callback(herald.close)
            team = self._team(stack, queues, handlers)
            done = Coordinator(self._store.parts, team, self._tasks.handler, herald.tell, self._grace).run(stop)
        log.info("worker %s left: %s done, %s abandoned", self.worker_id, done.done, done.abandoned)
        return done

    def _served(self) -> Sequence[str]:
        queues = self._queues
        if queues is None:
            queues = [] if self._outboxes else list(self._tasks.queues)
        served = list(dict.fromkeys([*queues, *self._outboxes]))
        if not served:
            raise InvalidOption("there is nothing to serve: no task is registered (is the module that declares them imported?)")
        return served

    def _team(self, stack: ExitStack, queues: Sequence[str], handlers: Sequence[Handler]) -> Team:
        parts = self._store.parts
        shift = Shift(queues, self._slots, self._queue_slots, self._max_jobs)
        bench = Bench(shift.enough())
        engine = self._async_engine
        sessions = Sessions(
            parts.database,
            self._slots,
            self._session_factory,
            None if engine is None else async_sessionmaker(engine),
            None if engine is None else engine.sync_engine,
            in_use={handler.session for handler in handlers},
        )
        known, raw_queues = self._tasks.known(queues)
        presence = Presence(parts.database, self.worker_id, bench, queues, known, raw_queues)
        with suppress(DBAPIError):  # else the first beat hears it
            bench.paused = frozenset(self._store.paused_queues())
        heart = Heart(parts.jobs, bench, sessions.gate, presence)
        stack.callback(heart.close)
        threads = ThreadCrew(self._slots, bench, sessions, self._around)
        stack.callback(threads.close)
        loop = LoopCrew(bench, sessions, self._around, engine) if self._tasks.runs_async(queues) else None
        if loop is not None:
            stack.callback(loop.close)
        return Team(shift, bench, Rounds(parts.jobs, self.worker_id), threads, loop, heart, sessions)


def verified(store: Store, stop: StopToken) -> bool:
    """Verify the schema, waiting for a database that is away; False where `stop` was cancelled before it came.

    Raises:
        SchemaMissing, SchemaOutdated: as `Store.verify`.
    """
    patience = Patience(stop)
    while not stop.cancelled:
        try:
            store.verify()
        except DBAPIError as error:
            if not is_away(error):
                raise
            patience.outlast(error)
        else:
            return True
    return False


class _Herald:
    """Tells the application of dead jobs, from a thread of its own: its hook may take its time."""

    def __init__(self, store: Store, on_dead: OnDead | None) -> None:
        self._store = store
        self._on_dead = on_dead
        self._ids: queues_of_threads.SimpleQueue[int | None] = queues_of_threads.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="alkstore-herald", daemon=True)
        self._thread.start()

    def tell(self, ids: Sequence[int]) -> None:
        """Pass on the ids of jobs that went dead."""
        for job_id in ids:
            log.warning("job %s went dead", job_id, extra={"job_id": job_id})
            if self._on_dead is not None:
                self._ids.put(job_id)

    def close(self) -> None:
        """End, once everything that was passed on is told, at most for 5 s."""
        self._ids.put(None)
        self._thread.join(HERALD_SECONDS)

    def _run(self) -> None:
        while (job_id := self._ids.get()) is not None:
            try:
                job = self._store.get_job(job_id)
                if job is not None and self._on_dead is not None:
                    self._on_dead(job)
            except Exception:
                log.exception("on_dead failed for job %s", job_id)
