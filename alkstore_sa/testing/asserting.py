"""Assertions on what was enqueued, with a difference that can be read."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from alkstore_sa.records import Job
from alkstore_sa.seam import Tx
from alkstore_sa.store import Store
from alkstore_sa.task import Task

PAGE: Final = 1_000
SHOWN: Final = 5


def assert_enqueued(session_or_store: Store | Tx, task: Task[..., Any], /, **kwargs: Any) -> Job:
    """Assert that a job of `task` is stored whose arguments are the given ones, and return the first such job.

    Arguments that are not named may be anything. Through a Session or a Connection, what is still pending in its transaction counts
    too. A job that ran to its end is gone, and does not count.

    Raises:
        AssertionError: there is none; the message shows the task's jobs, and in which arguments they differ.
        TypeError: the task has no such parameter.
        InvalidPayload: an argument does not fit its annotation.
    """
    arguments = task.definition.handler.signature.arguments
    if unknown := kwargs.keys() - arguments.keys():
        raise TypeError(f"task {task.name!r} has no parameter {', '.join(sorted(unknown))}")
    expected = {name: arguments[name].stored(name, value) for name, value in kwargs.items()}
    found: list[Job] = []
    for job in _jobs(session_or_store, task):
        if not _differences(job, expected):
            return job
        found.append(job)
    raise AssertionError(_report(task, expected, found))


def _jobs(session_or_store: Store | Tx, task: Task[..., Any]) -> Iterator[Job]:
    after = None
    while page := _page(session_or_store, task, after):
        yield from page
        after = page[-1].id


def _page(session_or_store: Store | Tx, task: Task[..., Any], after: int | None) -> Sequence[Job]:
    if isinstance(session_or_store, Store):
        return session_or_store.jobs(task=task.name, limit=PAGE, after=after)
    return task.store.parts.jobs.page(session_or_store, None, None, task.name, PAGE, after)


def _differences(job: Job, expected: dict[str, Any]) -> list[str]:
    if not isinstance(job.payload, dict):
        return [f"its payload is {job.payload!r}"]
    absent = object()
    told = []
    for name, value in expected.items():
        stored = job.payload.get(name, absent)
        if stored is absent:
            told.append(f"{name} was left to its default (expected {value!r})")
        elif type(stored) is not type(value) or stored != value:
            told.append(f"{name}={stored!r} (expected {value!r})")
    return told


def _report(task: Task[..., Any], expected: dict[str, Any], found: Sequence[Job]) -> str:
    asked = ", ".join(f"{name}={value!r}" for name, value in expected.items()) or "any arguments"
    lines = [f"no job of task {task.name!r} with {asked}"]
    if not found:
        lines.append("  there is no job of this task at all (jobs that ran to their end are gone)")
    nearest = sorted(found, key=lambda one: len(_differences(one, expected)))[:SHOWN]
    lines += [f"  job {job.id} ({job.state}): {'; '.join(_differences(job, expected))}" for job in nearest]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    return "\n".join(lines)
