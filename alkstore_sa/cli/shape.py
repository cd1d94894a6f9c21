"""How results are shown: tables that fit the terminal, and JSON with every field."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROW: Final = 120  # below this, a table leaves the columns out that are not needed at a glance
PIPED_WIDTH: Final = 1_000


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: `wide` ones are left out on a narrow terminal; `keep` ones are never shortened."""

    title: str
    justify: Literal["left", "right"] = "left"
    wide: bool = False
    keep: bool = False


def console() -> Console:
    """Give the console of standard output; what is no terminal gets lines as long as they need to be."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Print rows under their columns, or say in `empty` that there are none."""
    out = console()
    if not rows:
        out.print(empty)
        return
    narrow = out.width < NARROW
    chosen = [place for place, column in enumerate(columns) if not (narrow and column.wide)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place in chosen:
        column = columns[place]
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis", min_width=_least(column, rows, place))
    for row in rows:
        table.add_row(*(Text(cell(row[place])) for place in chosen))
    print_trimmed(out, table)


def _least(column: Column, rows: Sequence[Sequence[Any]], place: int) -> int:
    return max(len(column.title), *(len(cell(row[place])) for row in rows)) if column.keep else len(column.title)


def show_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values, one a line; a long value goes on below itself."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None and value != "":
            table.add_row(name, Text(cell(value, lines=True)))
    print_trimmed(console(), table)


def print_trimmed(out: Console, table: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def show_json(value: Any) -> None:
    """Print a record, a list of them, or a mapping: instants in ISO 8601 (UTC), lengths of time in seconds."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, indent=2, default=str))


def plain(value: Any) -> Any:
    """Turn records into what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else value


def cell(value: Any, *, lines: bool = False) -> str:
    """Give the text of a value, with nothing in it that would move a terminal's cursor."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, timedelta):
        return span(value)
    text = str(value)
    if not lines:
        text = " ".join(text.splitlines())
    return "".join(one if one.isprintable() or (lines and one == "\n") else one.encode("unicode_escape").decode() for one in text)


def instant(value: datetime) -> str:
    """Give an instant to the second."""
    return f"{value:%Y-%m-%d %H:%M:%S}Z"


def span(value: timedelta) -> str:
    """Give a length of time in its two largest units."""
    seconds = abs(value.total_seconds())
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = int(seconds)
    for size, unit, smaller, below in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def ago(moment: datetime, now: datetime) -> str:
    """Say how far an instant lies from now."""
    distance = now - moment
    return f"{span(distance)} ago" if distance >= timedelta(0) else f"in {span(distance)}"
