"""The words that PostgreSQL and SQLite spell differently, each with its two spellings side by side.

What belongs here: column types and SQL constructs. What does not: tables and statements, which only use them.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, DateTime, Dialect, Select, Text, TypeDecorator, type_coerce
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import literal_column
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal
from sqlalchemy.types import NULLTYPE, TypeEngine

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SQLITE_NOW: Final = "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)"


class UtcInstant(TypeDecorator[datetime]):
    """An instant: `timestamptz` on PostgreSQL, microseconds since the epoch on SQLite, aware UTC in Python."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Give the column's type on this dialect."""
        return dialect.type_descriptor(BigInteger() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Give what the driver is handed for an aware instant."""
        if value is None or dialect.name != "sqlite":
            return value
        return microseconds(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Give the aware UTC instant for what the driver returned."""
        if value is None:
            return None
        return instant(value) if dialect.name == "sqlite" else value.astimezone(UTC)


class Span(TypeDecorator[timedelta]):
    """A length of time, in whole microseconds on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: timedelta | None, dialect: Dialect) -> int | None:
        """Give the microseconds of `value`."""
        return None if value is None else value // _MICROSECOND

    def process_result_value(self, value: int | None, dialect: Dialect) -> timedelta | None:
        """Give the length of `value` microseconds."""
        return None if value is None else timedelta(microseconds=value)


def raw(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Read an instant or a span as its microseconds: a claim brings many, of which few are ever looked at; `instant` makes them good."""
    if isinstance(column.type, UtcInstant):
        return microseconds_of(column)
    return type_coerce(column, BigInteger()) if isinstance(column.type, Span) else column


def instant(number: int) -> datetime:
    """Give the instant that lies so many microseconds after the epoch."""
    return _EPOCH + timedelta(microseconds=number)


def microseconds(moment: datetime) -> int:
    """Give the whole microseconds from the epoch to an aware instant."""
    return (moment - _EPOCH) // _MICROSECOND


class Column(TypeDecorator[Sequence[Any]]):
    """Many values as one parameter of `parallel`: a JSON array on both databases, which no driver dumps item by item."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> str:
        """Give the array's text."""
        return json.dumps(value or (), ensure_ascii=False, check_circular=False)


class TextColumn(Column):
    """Many texts as one parameter."""

    cache_ok = True


class NumberColumn(Column):
    """Many integers as one parameter."""

    cache_ok = True


class statement_now(FunctionElement[datetime]):
    """The database's clock at the start of the statement: for predicates that an index serves."""

    type = UtcInstant()
    inherit_cache = True


class clock_now(FunctionElement[datetime]):
    """The database's clock as it stands: for deadlines that are stored, perhaps after a wait for a row."""

    type = UtcInstant()
    inherit_cache = True


class later(FunctionElement[datetime]):
    """`later(instant, span)`: the instant that lies a `Span` after an instant."""

    type = UtcInstant()
    inherit_cache = True


class microseconds_between(FunctionElement[timedelta]):
    """`microseconds_between(earlier, later)`: the length of time between two instants."""

    type = Span()
    inherit_cache = True


class wake(FunctionElement[Any]):
    """`wake(channel, queue)`: sends the wake with the commit on PostgreSQL; SQLite's waiters see the commit itself."""

    type = NULLTYPE
    inherit_cache = True


class json_texts(FunctionElement[Any]):
    """The members of a JSON array of texts as rows of (key, value), keys ascending."""

    inherit_cache = True


class parallel(FunctionElement[Any]):
    """`parallel(columns, …)`: `Column` parameters of one length as rows of (c0, c1, …, ord), `ord` ascending."""

    inherit_cache = True


class instant_of(FunctionElement[datetime]):
    """`instant_of(integer)`: the instant that lies so many microseconds after the epoch."""

    type = UtcInstant()
    inherit_cache = True


class microseconds_of(FunctionElement[int]):
    """`microseconds_of(instant)`: the whole microseconds from the epoch to an instant, as an integer."""

    type = BigInteger()
    inherit_cache = True


class row_address(FunctionElement[Any]):
    """`row_address(column)`: where the row of that column's table lies; names a row within one statement, and is found without a search."""

    type = NULLTYPE
    inherit_cache = True


class in_picked(ColumnElement[Any]):
    """`in_picked(column, select)`: the column is among the rows of a select that is run exactly once.

    `IN` lets PostgreSQL's planner run a locking subselect again and lock more than its LIMIT; an array does not.
    The type is null: a Boolean would be compared with 1 on SQLite, which loses the index.
    """

    type = NULLTYPE
    inherit_cache = True
    _traverse_internals = [  # noqa: RUF012 - typed by SQLAlchemy
        ("column", InternalTraversal.dp_clauseelement),
        ("picked", InternalTraversal.dp_clauseelement),
    ]

    def __init__(self, column: ColumnElement[Any], picked: Select[Any]) -> None:
        self.column = column
        self.picked = picked.correlate(None).scalar_subquery()


def constant(value: str | int) -> ColumnElement[Any]:
    """Write a constant of ours into the statement's text, so that a partial index's predicate is met by a cached plan."""
    return literal_column(f"'{value}'" if isinstance(value, str) else str(value))


@compiles(statement_now, "postgresql")
def _(element: statement_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "statement_timestamp()"


@compiles(clock_now, "postgresql")
def _(element: clock_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(statement_now, "sqlite")
@compiles(clock_now, "sqlite")
def _(element: FunctionElement[datetime], compiler: SQLCompiler, **kw: Any) -> str:
    return _SQLITE_NOW


@compiles(later, "postgresql")
def _(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    instant, span = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({instant} + {span} * INTERVAL '1 microsecond')"


@compiles(later, "sqlite")
def _(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    instant, span = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({instant} + {span})"


@compiles(microseconds_between, "postgresql")
def _(element: microseconds_between, compiler: SQLCompiler, **kw: Any) -> str:
    earlier, late = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM ({late} - {earlier})) * 1000000 AS BIGINT)"


@compiles(microseconds_between, "sqlite")
def _(element: microseconds_between, compiler: SQLCompiler, **kw: Any) -> str:
    earlier, late = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({late} - {earlier})"


@compiles(wake, "postgresql")
def _(element: wake, compiler: SQLCompiler, **kw: Any) -> str:
    return f"pg_notify({compiler.process(element.clauses, **kw)})"


@compiles(wake, "sqlite")
def _(element: wake, compiler: SQLCompiler, **kw: Any) -> str:
    return "NULL"


@compiles(json_texts, "postgresql")
def _(element: json_texts, compiler: SQLCompiler, **kw: Any) -> str:
    array = compiler.process(element.clauses, **kw)
    return f"(SELECT item.key, item.value FROM json_array_elements_text(CAST({array} AS JSON)) WITH ORDINALITY AS item(value, key))"


@compiles(json_texts, "sqlite")
def _(element: json_texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **kw)})"


@compiles(parallel, "postgresql")
def _(element: parallel, compiler: SQLCompiler, **kw: Any) -> str:
    arrays = [f"json_array_elements_text(CAST({compiler.process(clause, **kw)} AS JSON))" for clause in element.clauses]
    names = ", ".join([f"c{place}" for place in range(len(arrays))] + ["ord"])
    read = [
        f"CAST(c{place} AS BIGINT) AS c{place}" if isinstance(clause.type, NumberColumn) else f"c{place}"
        for place, clause in enumerate(element.clauses)
    ]
    return f"(SELECT {', '.join(read)}, ord FROM ROWS FROM ({', '.join(arrays)}) WITH ORDINALITY AS item({names}))"


@compiles(parallel, "sqlite")
def _(element: parallel, compiler: SQLCompiler, **kw: Any) -> str:
    first, *others = (compiler.process(clause, **kw) for clause in element.clauses)
    columns = [f"json_extract({other}, '$[' || key || ']') AS c{place}" for place, other in enumerate(others, 1)]
    return f"(SELECT {', '.join([*columns, 'value AS c0', 'key AS ord'])} FROM json_each({first}))"


@compiles(instant_of, "postgresql")
def _(element: instant_of, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(TIMESTAMPTZ 'epoch' + {compiler.process(element.clauses, **kw)} * INTERVAL '1 microsecond')"


@compiles(instant_of, "sqlite")
def _(element: instant_of, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(element.clauses, **kw)})"


@compiles(microseconds_of, "postgresql")
def _(element: microseconds_of, compiler: SQLCompiler, **kw: Any) -> str:
    return f"CAST(EXTRACT(EPOCH FROM {compiler.process(element.clauses, **kw)}) * 1000000 AS BIGINT)"


@compiles(microseconds_of, "sqlite")
def _(element: microseconds_of, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw)


@compiles(row_address, "postgresql")
def _(element: row_address, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw).rpartition(".")[0] + ".ctid"


@compiles(row_address, "sqlite")
def _(element: row_address, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw).rpartition(".")[0] + ".rowid"


@compiles(in_picked, "postgresql")
def _(element: in_picked, compiler: SQLCompiler, **kw: Any) -> str:
    return f"{compiler.process(element.column, **kw)} = ANY(ARRAY{compiler.process(element.picked, **kw)})"


@compiles(in_picked, "sqlite")
def _(element: in_picked, compiler: SQLCompiler, **kw: Any) -> str:
    return f"{compiler.process(element.column, **kw)} IN {compiler.process(element.picked, **kw)}"
