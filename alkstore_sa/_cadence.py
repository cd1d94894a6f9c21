"""When a schedule fires: the grammar of its spec, and the arithmetic of its boundaries. Pure.

Instants and intervals are whole microseconds; a grid is `first + k * interval`. Nothing here walks boundary by boundary, so that a
second's schedule that slept for a century costs no more than one that slept for a minute.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from alkstore_sa._options import LONGEST_DURATION
from alkstore_sa.errors import InvalidSpec

MOST_CAUGHT_UP: Final = 64  # boundaries that one tick fires of one schedule

_SPEC: Final = re.compile(r"@every +([0-9]{1,10})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MICROSECONDS: Final = 1_000_000
_LONGEST: Final = int(LONGEST_DURATION.total_seconds()) * _MICROSECONDS

Recorded: TypeAlias = tuple[int, int]  # a row of the history: its boundary, and the last one that it speaks for


@dataclass(frozen=True, slots=True)
class Skip:
    """A range of boundaries that is passed over: the first, the last, and how many there are."""

    first: int
    through: int
    count: int


@dataclass(frozen=True, slots=True)
class Due:
    """What a tick does about one schedule: these boundaries fire, those are skipped, and that one comes next."""

    fires: tuple[int, ...]
    skips: tuple[Skip, ...]
    already: int  # boundaries that the history has already
    next_boundary: int

    @property
    def skipped(self) -> int:
        """How many boundaries are skipped."""
        return sum(skip.count for skip in self.skips)


def parsed_interval(spec: object) -> int:
    """Return the microseconds between two boundaries of `spec`.

    The grammar is `@every <n><unit>` and nothing else: `@every`, spaces, an ASCII decimal integer of at least 1 and at most ten digits,
    one unit of `s`, `m`, `h`, `d`. A day is exactly 86,400 s; the longest interval is 36,500 d.

    Raises:
        InvalidSpec: anything else.
    """
    matched = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if matched is None:
        raise InvalidSpec(
            f"spec {spec!r} is not understood: expected `@every <n><unit>`, such as `@every 90s`, with a unit of s, m, h or d"
        )
    interval = int(matched[1]) * _SECONDS[matched[2]] * _MICROSECONDS
    if not 0 < interval <= _LONGEST:
        raise InvalidSpec(f"spec {spec!r} is out of range: the interval is at least 1s and at most {LONGEST_DURATION.days}d")
    return interval


def checked_interval(spec: object, interval: int) -> int:
    """Return the interval that a stored schedule has both as a text and as a number.

    Raises:
        InvalidSpec: the text is no spec, or the two differ: somebody changed the row by hand.
    """
    told = parsed_interval(spec)
    if told != interval:
        raise InvalidSpec(f"the stored spec {spec!r} does not go with the stored interval of {interval} microseconds: register it again")
    return told


def crosses(first: int, following: int, interval: int, every: int, shift: int = 0) -> bool:
    """Tell whether a boundary after `first`, up to and with `following`, has a number on the endless grid that divides by `every`.

    `shift` is added to each number. So work that is due once in `every` fires of a schedule needs no counter. Schedules of one interval
    that stand on one grid cross at the same boundary, unless each has a shift of its own. One that fires seldom crosses once a day or at
    every fire.
    """
    often = max(1, min(every, 86_400 * _MICROSECONDS // interval))
    return (first // interval + shift) // often != (following // interval + shift) // often


def shift_of(name: str) -> int:
    """Give a number that a schedule has for ever and shares with few others."""
    return zlib.crc32(name.encode())


def boundaries_due(first: int, interval: int, now: int, recorded: Sequence[Recorded] = (), most: int = MOST_CAUGHT_UP) -> Due:
    """Say what becomes of the boundaries from `first` up to and with `now`.

    The `most` oldest that no row of `recorded` speaks for fire, the later ones are skipped, and the next boundary is the first one
    strictly after `now` on the same grid. `fires + skipped + already` are the boundaries that were due.
    """
    due = max(0, (now - first) // interval + 1)
    if due <= most and not recorded:
        return Due(tuple(range(first, first + due * interval, interval)), (), 0, first + due * interval)
    fires: list[int] = []
    skips: list[Skip] = []
    free = 0
    for start, stop in _gaps(_covered(first, interval, due, recorded), due):
        free += stop - start
        fired = min(stop, start + most - len(fires))
        fires += range(first + start * interval, first + fired * interval, interval)
        if fired < stop:
            skips.append(Skip(first + fired * interval, first + (stop - 1) * interval, stop - fired))
    return Due(tuple(fires), tuple(skips), due - free, first + due * interval)


def _covered(first: int, interval: int, due: int, recorded: Sequence[Recorded]) -> list[tuple[int, int]]:
    """Give the ranges of due boundaries, by their number on the grid, that the history speaks for; half-open, ascending."""
    ranges = []
    for boundary, through in recorded:
        start = max(0, -((first - boundary) // interval))
        stop = min(due, (through - first) // interval + 1)
        if start < stop:
            ranges.append((start, stop))
    return sorted(ranges)


def _gaps(covered: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    position = 0
    for start, stop in covered:
        if position < start:
            yield position, start
        position = max(position, stop)
    if position < end:
        yield position, end
