"""Options, resolved: call over handle over default, checked before anything is sent. Pure.

What belongs here: ranges, precedence, and what a row is stamped with. What does not: any instant, which only the
database knows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypedDict

from alkstore_sa._names import is_storable_text
from alkstore_sa.errors import InvalidOption

Duration: TypeAlias = timedelta | int | float  # a number is of seconds

LONGEST_DURATION: Final = timedelta(days=36_500)
_EARLIEST: Final = datetime(1, 1, 4, tzinfo=UTC)
_LATEST: Final = datetime(9999, 12, 28, tzinfo=UTC)
MOST_ATTEMPTS: Final = 32_767
PRIORITIES: Final = range(-32_768, 32_768)
MOST_HEADER_BYTES: Final = 8 * 1024


class EnqueueOptions(TypedDict, total=False):
    """What every enqueue takes beside the payload."""

    headers: Mapping[str, str] | None
    delay: Duration | None
    run_at: datetime | None
    priority: int
    expires: Duration | None
    max_attempts: int | None


@dataclass(frozen=True, slots=True)
class Stamps:
    """What a row carries for its later life, so that a consumer needs no configuration."""

    visibility_timeout: timedelta
    max_attempts: int
    base_backoff: timedelta

    def overridden(
        self, *, visibility_timeout: Duration | None = None, max_attempts: int | None = None, base_backoff: Duration | None = None
    ) -> "Stamps":
        """Return these stamps with what is not None put in its place, checked."""
        return Stamps(
            self.visibility_timeout if visibility_timeout is None else positive("visibility_timeout", visibility_timeout),
            self.max_attempts if max_attempts is None else whole("max_attempts", max_attempts, 1, MOST_ATTEMPTS),
            self.base_backoff if base_backoff is None else positive("base_backoff", base_backoff),
        )


PLAIN: Final = Stamps(timedelta(seconds=300), 3, timedelta(seconds=5))
OUTBOX: Final = Stamps(timedelta(seconds=60), 5, timedelta(seconds=5))

Timing: TypeAlias = Literal["now", "delay", "run_at"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One enqueue, resolved: the shape of its statement and the values that it binds."""

    timing: Timing
    expiring: bool
    values: dict[str, Any]


def placement(
    stamps: Stamps,
    *,
    headers: Mapping[str, str] | None = None,
    delay: Duration | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
    expires: Duration | None = None,
    max_attempts: int | None = None,
    task: str | None = None,
) -> Placement:
    """Resolve the options of one enqueue over the stamps of its handle.

    Raises:
        InvalidOption: a value out of its range, `delay` and `run_at` together, a naive `run_at`, a delay past `expires`.
    """
    if delay is not None and run_at is not None:
        raise InvalidOption("delay and run_at say the same thing twice: give one of them")
    stamped = stamps.overridden(max_attempts=max_attempts)
    values: dict[str, Any] = {
        "job_task": task,
        "job_headers": header_text(headers),
        "job_priority": whole("priority", priority, PRIORITIES.start, PRIORITIES.stop - 1),
        "job_max_attempts": stamped.max_attempts,
        "job_visibility_timeout": stamped.visibility_timeout,
        "job_base_backoff": stamped.base_backoff,
    }
    timing: Timing = "now"
    lifetime = None if expires is None else not_negative("expires", expires)
    if lifetime is not None:
        values["job_expires"] = lifetime
    if run_at is not None:
        timing = "run_at"
        values["job_run_at"] = utc_instant("run_at", run_at)
    elif delay is not None and (wait := not_negative("delay", delay)):
        timing = "delay"
        values["job_delay"] = wait
        if lifetime is not None and wait > lifetime:
            raise InvalidOption(f"a delay of {wait} ends after the job expires, in {lifetime}")
    return Placement(timing, lifetime is not None, values)


def not_negative(option: str, value: Duration) -> timedelta:
    """Return the duration `value`, from 0 to 36,500 days; raises `InvalidOption`."""
    if isinstance(value, timedelta):
        length = value
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidOption(f"{option} {value!r} is no duration: give a timedelta or a number of seconds")
    elif not abs(value) <= LONGEST_DURATION.total_seconds():  # NaN is not, either
        raise InvalidOption(f"{option} {value!r} is not within {LONGEST_DURATION.days} days")
    else:
        length = timedelta(seconds=value)
    if not timedelta(0) <= length <= LONGEST_DURATION:
        raise InvalidOption(f"{option} {value!r} is negative or longer than {LONGEST_DURATION.days} days")
    return length


def positive(option: str, value: Duration) -> timedelta:
    """Return the duration `value`, above 0 and up to 36,500 days; raises `InvalidOption`."""
    length = not_negative(option, value)
    if not length:
        raise InvalidOption(f"{option} {value!r} must be longer than nothing (at least a microsecond)")
    return length


def whole(option: str, value: int, least: int, most: int) -> int:
    """Return the integer `value` if it lies within `least` to `most`; raises `InvalidOption`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{option} {value!r} is no int")
    if not least <= value <= most:
        raise InvalidOption(f"{option} {value!r} is not within {least} to {most}")
    return value


def utc_instant(option: str, value: datetime) -> datetime:
    """Return the aware instant `value` in UTC; raises `InvalidOption` where it is naive or out of range."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidOption(f"{option} {value!r} is no aware datetime: say which time zone it is in")
    if not _EARLIEST <= value <= _LATEST:
        raise InvalidOption(f"{option} {value!r} is out of range: no time zone may carry it past year 1 or 9999")
    return value.astimezone(UTC)


def header_text(headers: Mapping[str, str] | None) -> str | None:
    """Return the JSON object that `headers` are stored as, None where there are none.

    Raises:
        InvalidOption: no mapping of `str` to `str`, a NUL or a lone surrogate, or more than 8 KiB of JSON.
    """
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidOption(f"headers {headers!r} are no mapping of str to str")
    for key, value in headers.items():
        if not (isinstance(key, str) and isinstance(value, str) and is_storable_text(key) and is_storable_text(value)):
            raise InvalidOption(f"header {key!r}: {value!r} is no pair of str without NUL and lone surrogates")
    text = json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MOST_HEADER_BYTES:
        raise InvalidOption(f"headers of {len(text.encode())} bytes are over {MOST_HEADER_BYTES} bytes")
    return text if headers else None
