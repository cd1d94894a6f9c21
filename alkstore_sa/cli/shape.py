"""How results are shown: tables that fit the terminal, and JSON with every field."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROW: Final = 120  # below this, a table leaves the columns out that are not needed at a glance
PIPED_WIDTH: Final = 1_000
GAP: Final = 2  # blanks between two columns
_FILL: Final = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")  # blanks, and the codes that begin and end a style


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: `wide` ones are left out on a narrow terminal; `keep` ones are never shortened.

    `of` gives what it shows of a record, from that and the database's now; by default it is the field that the title names.
    """

    title: str
    of: Callable[[Any, datetime], Any] | None = None
    justify: Literal["left", "right"] = "left"
    wide: bool = False
    keep: bool = False

    def shown(self, record: Any, now: datetime) -> str:
        """Give the text of its cell in a record's line."""
        return cell(getattr(record, self.title) if self.of is None else self.of(record, now))


def number(title: str, of: Callable[[Any, datetime], Any] | None = None, *, wide: bool = False) -> Column:
    """Give a column of numbers or lengths of time."""
    return Column(title, of, "right", wide=wide, keep=True)


def console() -> Console:
    """Give the console of standard output; what is no terminal gets lines as long as they need to be."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def show_table(columns: Sequence[Column], records: Sequence[Any], now: datetime, *, empty: str) -> None:
    """Print records under the columns, a line each, or say in `empty` that there are none."""
    out = console()
    if not records:
        out.print(empty)
        return
    chosen = [column for column in columns if out.width >= NARROW or not column.wide]
    lines = [[column.shown(record, now) for column in chosen] for record in records]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, width in zip(chosen, _widths(chosen, lines, out.width), strict=True):
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis", width=width)
    for line in lines:
        table.add_row(*map(Text, line))
    print_trimmed(out, table)


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[str]], room: int) -> list[int]:
    """Give the columns that are kept what they need, and let the others share the rest: who needs less than the others gets all of it."""
    widths = [max(map(cell_len, texts)) for texts in zip([column.title for column in columns], *lines, strict=True)]
    shared = sorted((place for place, column in enumerate(columns) if not column.keep), key=widths.__getitem__)
    rest = room - GAP * (len(columns) - 1) - sum(widths[place] for place, column in enumerate(columns) if column.keep)
    for taken, place in enumerate(shared):
        widths[place] = min(widths[place], max(rest // (len(shared) - taken), cell_len(columns[place].title), 1))
        rest -= widths[place]
    return widths


def show_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values, one a line; a long value goes on below itself."""
    show_lines([Text(name, style="bold"), cell(value, lines=True)] for name, value in fields.items() if value is not None and value != "")


def show_lines(lines: Iterable[Sequence[str | Text]], *, gap: int = GAP) -> None:
    """Print lines of parts, of which the last goes on below itself where it is long."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, gap, 0, 0))
    for line in lines:
        table.add_row(*(part if isinstance(part, Text) else Text(part) for part in line))
    for column in table.columns:
        column.overflow = "fold"
    for head in table.columns[:-1]:
        head.no_wrap = True
    print_trimmed(console(), table)


def print_trimmed(out: Console, table: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        click.echo(_FILL.sub(lambda fill: fill[0].replace(" ", ""), line))


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
