"""The application of the demo: its business table, and the transactions that write rows and messages together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.orm import Session

from alkstore_sa._payload import Payload
from alkstore_sa.deliveries import Outbox
from alkstore_sa.demo.books import Entry
from alkstore_sa.demo.payloads import fingerprint

NUMBER_HEADER: Final = "demo-order"


@dataclass(frozen=True, slots=True)
class Order:
    """An order to be written, perhaps inside a savepoint that is then released or rolled back."""

    number: int
    payload: Payload
    savepoint: Literal["none", "released", "rolled back"] = "none"


@dataclass(frozen=True, slots=True)
class Transaction:
    """Orders that are written in one transaction, and how that ends."""

    orders: Sequence[Order]
    commits: bool

    def kept(self, order: Order) -> bool:
        """Tell whether an order of this transaction outlives it."""
        return self.commits and order.savepoint != "rolled back"


@dataclass(frozen=True, slots=True)
class Written:
    """An order that was written, and whether it was then committed or rolled back."""

    entry: Entry
    kept: bool


def planned(payloads: Sequence[Payload], seed: int) -> list[Transaction]:
    """Spread the payloads over transactions, the same for the same seed; the first transaction always commits its first order."""
    chance = Random(f"orders/{seed}")
    plan: list[Transaction] = []
    start = 0
    while start < len(payloads):
        end = min(start + chance.randint(1, 4), len(payloads))
        orders = [_order(number, payloads[number], chance) for number in range(start, end)]
        plan.append(Transaction(orders, commits=not start or chance.random() < 0.85))
        start = end
    return plan


def _order(number: int, payload: Payload, chance: Random) -> Order:
    drawn = chance.random()
    if not number or drawn < 0.7:
        return Order(number, payload)
    return Order(number, payload, "released" if drawn < 0.85 else "rolled back")


class Orders:
    """The business table of one run, in a MetaData of its own; its name is its own too, so that no other table is ever touched."""

    def __init__(self, engine: Engine, run: str) -> None:
        self._engine: Final = engine
        self.table: Final = Table(
            f"demo_order_{run}",
            MetaData(),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("message_id", BigInteger, nullable=False),
            Column("fingerprint", Text, nullable=False),
        )

    def create(self) -> None:
        """Create the table; an error where there is one of its name."""
        self.table.create(self._engine, checkfirst=False)

    def drop(self) -> None:
        """Drop the table."""
        self.table.drop(self._engine)

    def rows(self) -> list[Entry]:
        """Read the table."""
        with Session(self._engine) as session:
            return [Entry(*row) for row in session.execute(select(self.table).order_by(self.table.c.number))]

    def write(self, transactions: Sequence[Transaction], outbox: Outbox) -> Iterator[list[Written]]:
        """Write orders and their messages, transaction by transaction; yield what was written after the end of each."""
        for transaction in transactions:
            with Session(self._engine) as session:
                entries = [self._in_savepoint(session, outbox, order) for order in transaction.orders]
                (session.commit if transaction.commits else session.rollback)()
            yield [Written(entry, transaction.kept(order)) for entry, order in zip(entries, transaction.orders, strict=True)]

    def _in_savepoint(self, session: Session, outbox: Outbox, order: Order) -> Entry:
        if order.savepoint == "none":
            return self._add(session, outbox, order)
        savepoint = session.begin_nested()
        entry = self._add(session, outbox, order)
        end: Callable[[], None] = savepoint.commit if order.savepoint == "released" else savepoint.rollback
        end()
        return entry

    def _add(self, session: Session, outbox: Outbox, order: Order) -> Entry:
        message_id = outbox.enqueue_tx(session, order.payload, headers={NUMBER_HEADER: str(order.number)})
        entry = Entry(order.number, message_id, fingerprint(order.payload))
        session.execute(insert(self.table).values(number=entry.number, message_id=message_id, fingerprint=entry.fingerprint))
        return entry
