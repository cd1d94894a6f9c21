"""One run of the demo, from the migration to the books."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import Engine

from alkstore_sa import migrate
from alkstore_sa._payload import Payload
from alkstore_sa.deliveries import Outbox
from alkstore_sa.demo.books import Books
from alkstore_sa.demo.orders import Orders, Transaction, Written, planned
from alkstore_sa.demo.processes import DeliveryProcesses
from alkstore_sa.demo.receiver import Receiver
from alkstore_sa.handles import MOST_ROWS
from alkstore_sa.outbox import backing_queue
from alkstore_sa.records import JobState
from alkstore_sa.sqlite import prepare_sqlite
from alkstore_sa.store import Store

_PROCESSES: Final = 2
_LOOK_SECONDS: Final = 0.1
_STALLED_SECONDS: Final = 90.0  # without any arrival; longer than an outbox's claims


@dataclass(frozen=True, slots=True)
class Outcome:
    """The books of a run, the processes that were killed in it, and those that failed by themselves."""

    books: Books
    killed: Sequence[str]
    failures: Sequence[str]

    def findings(self) -> list[str]:
        """Say what went wrong, nothing where the run is in order."""
        return [*self.failures, *self.books.imbalances()]


def run(engine: Engine, payloads: Sequence[Payload], *, seed: int, keep: bool, console: Console) -> Outcome:
    """Write the payloads as orders with messages, deliver them through a crash, and return the books.

    The tables of the library are made where they are missing. With `keep` the rows of this run stay, else they are removed.

    Raises:
        InvalidOption: the database is not one that is supported.
    """
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine, busy_timeout=30)
    with Store(engine) as store:
        migrate.upgrade(engine)
        return _Trial(store, planned(payloads, seed), seed).run(console, keep=keep)


class _Trial:
    def __init__(self, store: Store, plan: Sequence[Transaction], seed: int) -> None:
        name = uuid4().hex[:12]
        self._store: Final = store
        self._plan: Final = plan
        self._total: Final = sum(len(transaction.orders) for transaction in plan)
        self._committing: Final = sum(transaction.kept(order) for transaction in plan for order in transaction.orders)
        self._orders: Final = Orders(store.engine, name)
        self._outbox: Final[Outbox] = store.outbox(f"demo-{name}")
        self._queue: Final = backing_queue(self._outbox.name)
        self._processes: Final = DeliveryProcesses(store.engine.url.render_as_string(hide_password=False), self._outbox.name)
        self._receiver: Final = Receiver(seed, self._committing // 2, self._replace)
        self._written: Final[list[Written]] = []
        self._dead_up_to: int | None = None

    def run(self, console: Console, *, keep: bool) -> Outcome:
        with ExitStack() as stack:
            stack.enter_context(self._receiver)
            self._orders.create()
            if not keep:
                stack.callback(self._clean_up)
            stack.callback(self._processes.stop)
            for _ in range(_PROCESSES):
                self._processes.start(self._receiver.port)
            with _progress(console) as progress:
                written = progress.add_task("written", total=self._total)
                delivered = progress.add_task("delivered", total=self._committing)
                for count in chain(self._write(), self._wait()):
                    progress.advance(written, count)
                    progress.update(delivered, completed=self._receiver.delivered)
            early = self._processes.failures()
            self._processes.stop()
            return Outcome(self._books(), self._processes.killed, early or self._processes.failures())

    def _replace(self, worker_id: str) -> None:
        self._processes.kill(worker_id)
        self._processes.start(self._receiver.port)

    def _write(self) -> Iterator[int]:
        """Write every order; yield how many each transaction wrote."""
        for written in self._orders.write(self._plan, self._outbox):
            self._written.extend(written)
            yield len(written)

    def _wait(self) -> Iterator[int]:
        """Wait until the outbox has run empty, or never will; yield 0 at each look."""
        seen, seen_at = -1, time.monotonic()
        while not (self._is_empty() or self._processes.failures()) and time.monotonic() - seen_at < _STALLED_SECONDS:
            if self._receiver.arrivals != seen:
                seen, seen_at = self._receiver.arrivals, time.monotonic()
            yield 0
            time.sleep(_LOOK_SECONDS)  # nothing tells when an outbox has run empty
        yield 0

    def _is_empty(self) -> bool:
        """Look for a live message, past those at the front that are known to be dead."""
        while following := self._store.jobs(queue=self._queue, limit=1, after=self._dead_up_to):
            if following[0].state != JobState.DEAD:
                return False
            self._dead_up_to = following[0].id
        return True

    def _left(self) -> list[int]:
        return [job.id for job in self._store.jobs(queue=self._queue, limit=MOST_ROWS) if job.state != JobState.DEAD]

    def _books(self) -> Books:
        return Books(
            committed=[written.entry for written in self._written if written.kept],
            rolled_back=[written.entry for written in self._written if not written.kept],
            accepted=self._receiver.accepted,
            refused=self._receiver.refused,
            rows=self._orders.rows(),
            dead=len(self._outbox.dead(limit=MOST_ROWS)),
            left=len(self._left()),
        )

    def _clean_up(self) -> None:
        for message_id in self._left():
            self._store.cancel(message_id)
        self._outbox.purge_dead(older_than=0)
        self._orders.drop()


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
