"""The shape of the data in Python: frozen pictures of rows. Pure; nothing here is attached to a session."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from alkstore_sa._payload import Codec, Payload, decoded
from alkstore_sa.errors import InvalidPayload

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class JobState(StrEnum):
    """Where a job stands. A due delayed job and one whose claim lapsed count as ready."""

    READY = "ready"
    DELAYED = "delayed"
    CLAIMED = "claimed"
    DEAD = "dead"


@dataclass(frozen=True)
class Job:
    """A read-only picture of a job, live or dead.

    `payload` is None and `payload_error` says why where the stored text cannot be decoded. Instants are aware UTC.
    """

    id: int
    queue: str
    payload: Payload
    payload_error: str | None
    state: JobState
    priority: int
    attempts: int
    max_attempts: int
    fence: int
    visibility_timeout: timedelta
    base_backoff: timedelta
    enqueued_at: datetime
    run_at: datetime
    expires_at: datetime | None
    worker_id: str | None
    claim_expires_at: datetime | None
    task: str | None
    headers: Mapping[str, str]
    schedule: str | None
    scheduled_for: datetime | None
    last_error: str | None
    died_at: datetime | None


@dataclass(frozen=True)
class QueueStats:
    """How many jobs a queue holds per state, and how long its oldest due job has waited."""

    name: str
    ready: int  # due, lapsed claims included
    delayed: int
    claimed: int
    dead: int
    dead_capped: bool  # there are more than `dead` says
    oldest_due_age: timedelta | None


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as it showed itself last; `alive` where that was within three beats, which are 4 s apart.

    `tasks` are the names of tasks that it can run, `raw_queues` the queues whose jobs of no task it handles, those of outboxes included.
    """

    id: str
    host: str
    pid: int
    queues: Sequence[str]
    tasks: Sequence[str]
    raw_queues: Sequence[str]
    running: int
    done: int
    failed: int  # runs that were retried, dead, lost or left unsettled
    handler_ms: int  # time in handlers, all runs together
    started_at: datetime
    seen_at: datetime
    alive: bool


@dataclass(frozen=True)
class LockInfo:
    """A lock that somebody holds."""

    name: str
    owner: str
    token: int
    expires_at: datetime


@dataclass(frozen=True)
class Schedule:
    """A read-only picture of a schedule. `last_error` is set while it cannot be fired; it is tried again by itself."""

    name: str
    spec: str
    queue: str
    payload: Payload
    payload_error: str | None
    priority: int
    max_attempts: int
    expires: timedelta | None
    task: str | None
    headers: Mapping[str, str]
    next_fire_at: datetime
    paused: bool
    last_error: str | None


@dataclass(frozen=True)
class Fire:
    """One boundary of a schedule as it was handled: fired as a job, or the first of a skipped range."""

    schedule: str
    boundary: datetime
    through: datetime  # the last boundary of a skipped range; equal to `boundary` for a fire
    fired_at: datetime
    job_id: int | None  # None: skipped
    skipped: int  # boundaries skipped from this one on; 0 for a fire
    caught_up: bool  # fired after its successor was due


@dataclass(frozen=True)
class Tick:
    """What one tick did about one schedule; the three add up to the boundaries that were due."""

    fired: int
    skipped: int
    already_fired: int  # passed over, since the history has them

    def __add__(self, later: "Tick") -> "Tick":
        """Put together what two batches of one pass did about the schedule."""
        return Tick(self.fired + later.fired, self.skipped + later.skipped, self.already_fired + later.already_fired)


@dataclass(frozen=True)
class TickReport:
    """What one tick did, by schedule, and when the next boundary is."""

    schedules: Mapping[str, Tick]
    next_fire_at: datetime | None


def schedule_from_row(row: Mapping[Any, Any], codec: Codec) -> Schedule:
    """Make the picture of a schedule from a row that has its columns by name."""
    payload, payload_error = decoded_or_error(codec, row["payload"])
    fields = {name: row[name] for name in Schedule.__dataclass_fields__ if name != "payload_error"}
    return Schedule(**{**fields, "payload": payload, "payload_error": payload_error, "headers": headers_from_text(row["headers"])})


def job_from_row(row: Mapping[Any, Any], codec: Codec) -> Job:
    """Make the picture of a job from a row that has its columns by name."""
    payload, payload_error = decoded_or_error(codec, row["payload"])
    fields = {**row, "payload": payload, "payload_error": payload_error}
    fields["state"] = JobState(row["state"])
    fields["headers"] = headers_from_text(row["headers"])
    return Job(**fields)


def decoded_or_error(codec: Codec, text: str) -> tuple[Payload, str | None]:
    """Decode a stored payload for a picture: the payload and None, or None and what is wrong with the text."""
    try:
        return decoded(codec, text), None
    except InvalidPayload as error:
        return None, str(error)


def headers_from_text(text: str | None) -> Mapping[str, str]:
    """Give the headers that were stored as a JSON object; none where the text was damaged by hand."""
    if text is None:
        return NO_HEADERS
    try:
        headers = json.loads(text)
    except ValueError:
        return NO_HEADERS
    return MappingProxyType(headers) if isinstance(headers, dict) else NO_HEADERS
