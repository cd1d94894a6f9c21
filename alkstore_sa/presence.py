"""A worker's sign of life: what it says of itself at each beat, and what it hears of paused queues in return.

It goes on the heartbeat's thread and connection. A beat that cannot be written costs nothing but that others see the worker as silent.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from alkstore_sa.engines import Database
from alkstore_sa.errors import SchemaMissing
from alkstore_sa.runs import Bench, Limiter
from alkstore_sa.workers import BEAT_SECONDS, Workers

log: Final = logging.getLogger("alkstore_sa.worker")

PRUNED_EVERY: Final = 60  # beats
TIME_LIMIT: Final = 5.0
GATE_WAIT: Final = 0.1


class Presence:
    """One worker as others see it."""

    def __init__(
        self, database: Database, worker_id: str, bench: Bench, queues: Sequence[str], tasks: Sequence[str], raw_queues: Sequence[str]
    ) -> None:
        self._database = database
        self._verbs = Workers(database)
        self._worker_id = worker_id
        self._bench = bench
        self._queues = frozenset(queues)
        self._lasting: dict[str, Any] = {
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "queues": list(queues),
            "tasks": list(tasks),
            "raw_queues": list(raw_queues),
        }
        self._beats = 0
        self._warnings = Limiter()
        self.next_at = time.monotonic()

    def beat(self, connection: Connection, gate: "threading.Lock | None", limit: float) -> None:
        """Say what there is to say, unless a handler holds SQLite's write lock, and look at the pauses; never raises for the database.

        Each is held up for `limit` seconds at most: heartbeats wait for it.
        """
        self.next_at = time.monotonic() + BEAT_SECONDS
        try:
            if gate is None or gate.acquire(timeout=GATE_WAIT):
                try:
                    self._write(connection, limit)
                finally:
                    if gate is not None:
                        gate.release()
            self._hear(connection, limit)
        except (SQLAlchemyError, SchemaMissing) as error:
            if self._warnings.lets_through(type(error)):
                log.warning("this worker could not show itself (%s): again in %g s", type(error).__name__, BEAT_SECONDS)

    def leave(self, connection: Connection) -> None:
        """Say that the worker is gone."""
        with self._database.transaction_on(connection, limit=TIME_LIMIT):
            self._verbs.leave(connection, self._worker_id)

    def _write(self, connection: Connection, limit: float) -> None:
        with self._database.transaction_on(connection, limit=limit):
            self._verbs.beat(connection, self._worker_id, self._said())
            if self._beats % PRUNED_EVERY == 0:
                self._verbs.prune(connection)
        self._beats += 1

    def _said(self) -> dict[str, Any]:
        tally = self._bench.tally
        running = sum(1 for run in list(self._bench.held.values()) if run.began_at and not run.ended_at)
        return {**self._lasting, "running": running, "done": tally.done, "failed": tally.failed, "handler_ms": round(tally.seconds * 1000)}

    def _hear(self, connection: Connection, limit: float) -> None:
        bounded = self._database.dialect == "postgresql"  # SQLite's readers wait for nobody
        with self._database.transaction_on(connection, limit=limit) if bounded else nullcontext():
            paused = frozenset(self._verbs.paused(connection)) & self._queues
        if paused != self._bench.paused:
            log.info("paused queues: %s", ", ".join(sorted(paused)) or "none")
            self._bench.paused = paused
            self._bench.latch.set()
