"""Time that a test moves on: every stored instant goes into the past."""

from datetime import timedelta
from typing import Final

from sqlalchemy import Table, Update, bindparam, update

from alkstore_sa._options import Duration, positive
from alkstore_sa.constructs import Span, UtcInstant, later
from alkstore_sa.seam import Bind
from alkstore_sa.store import Store
from alkstore_sa.tables import metadata

_ASIDE: Final = timedelta(days=365_000)


def advance(store: Store, delta: Duration) -> None:
    """Let `delta` pass for everything that is stored: every instant of every table lies that much further back afterwards.

    What was delayed by less is due, claims and locks of a shorter rest lapsed, and boundaries of schedules came and went. Clocks of
    this process do not move: a `lease.held`, a sleeping loop or a timeout notices nothing. One transaction.
    """
    length = positive("delta", delta)
    with store.begin() as connection:
        for table in metadata.sorted_tables:
            if any(isinstance(column.type, UtcInstant) for column in table.primary_key):
                # in two steps, far away and back: one step of a whole interval would meet the key of a row that is yet to move
                _shift(store, connection, table, -length - _ASIDE)
                _shift(store, connection, table, _ASIDE)
            else:
                _shift(store, connection, table, -length)


def _shift(store: Store, bind: Bind, table: Table, span: timedelta) -> None:
    bind.execute(store.parts.database.statement(_shifted, table), {"shift_span": span})


def _shifted(table: Table) -> Update:
    span = bindparam("shift_span", type_=Span)
    return update(table).values({column: later(column, span) for column in table.c if isinstance(column.type, UtcInstant)})
