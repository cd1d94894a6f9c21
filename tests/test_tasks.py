"""Tasks: declaration, names, storing, the round trip of arguments."""

import enum
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import pydantic
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from alkstore_sa import InvalidName, InvalidOption, InvalidPayload, InvalidSpec, JobHandle, NotBound, Task, Tasks


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Address:
    street: str
    since: date


class Order(pydantic.BaseModel):
    id: uuid.UUID
    total: Decimal


def plain(n: int, text: str = "x", *, flag: bool | None = None) -> int:
    return n


@pytest.fixture
def tasks(store):
    return Tasks(store)


def test_a_task_is_stored_with_its_name_its_stamps_and_its_arguments_by_name(store, tasks):
    task = tasks.task(queue="mail", max_attempts=7, base_backoff=2, visibility_timeout=90, priority=3)(plain)

    job = store.get_job(task.enqueue(1, flag=True))

    assert job.task == task.name == f"{__name__}:plain"
    assert (job.queue, job.payload, job.priority, job.max_attempts) == ("mail", {"n": 1, "flag": True}, 3, 7)
    assert (job.base_backoff, job.visibility_timeout) == (timedelta(seconds=2), timedelta(seconds=90))


def test_a_task_stays_callable(tasks):
    task = tasks.task()(plain)

    assert task(4) == 4
    assert task.fn(5) == 5
    assert isinstance(task, Task)


def test_enqueue_tx_lives_and_dies_with_the_callers_transaction(store, tasks):
    task = tasks.task()(plain)

    with Session(store.engine) as session:
        task.enqueue_tx(session, 1)
        session.rollback()
        kept = task.enqueue_tx(session, n=2)
        session.commit()

    assert [(job.id, job.payload) for job in store.jobs()] == [(kept, {"n": 2})]


def test_a_parameter_called_tx_or_self_is_an_argument_like_another(store, tasks):
    def fn(tx: int, self: int) -> None: ...

    task = tasks.task(name="odd")(fn)

    with Session(store.engine) as session:
        job_id = task.enqueue_tx(session, tx=1, self=2)
        session.commit()
    assert store.get_job(job_id).payload == {"tx": 1, "self": 2}


def test_many_calls_get_ids_in_their_order(store, tasks):
    task = tasks.task()(plain)

    ids = task.enqueue_many(task.call(n) for n in range(3))
    with Session(store.engine) as session:
        ids += task.options(priority=9).enqueue_many_tx(session, [task.call(3, text="y")])
        session.commit()

    assert [store.get_job(job_id).payload["n"] for job_id in ids] == [0, 1, 2, 3]
    assert store.get_job(ids[3]).priority == 9
    assert task.enqueue_many([]) == []


def test_a_call_of_another_task_is_refused(tasks):
    one, other = tasks.task(name="one")(plain), tasks.task(name="other")(plain)

    with pytest.raises(InvalidOption, match="'one'"):
        other.enqueue_many([one.call(1)])
    with pytest.raises(TypeError, match="task.call"):
        other.enqueue_many([{"n": 1}])


def test_options_are_checked_at_once_and_leave_the_task_as_it_was(store, tasks):
    task = tasks.task()(plain)

    with pytest.raises(InvalidOption):
        task.options(priority=99_999)
    job = store.get_job(task.options(delay=60, headers={"a": "b"}).options(priority=2).enqueue(1))

    assert (job.state, job.priority, dict(job.headers)) == ("delayed", 2, {"a": "b"})
    assert store.get_job(task.enqueue(1)).state == "ready"


def test_an_unbound_task_says_which_line_to_write():
    task = Tasks().task(name="t")(plain)

    with pytest.raises(NotBound, match=r"tasks\.bind\(store\)"):
        task.enqueue(1)
    assert task.call(1).payload == {"n": 1}


def test_a_registry_is_bound_once(store, database):
    tasks = Tasks()
    tasks.bind(store).bind(store)

    with database.store() as other:
        with pytest.raises(InvalidOption, match="another store"):
            tasks.bind(other)
        job_id = tasks.task(name="t")(plain).on(other).enqueue(1)
    assert store.get_job(job_id).task == "t"


def test_local_functions_and_those_of_main_need_a_name():
    def local() -> None: ...

    def of_main() -> None: ...

    of_main.__module__, of_main.__qualname__ = "__main__", "of_main"

    for function in (local, of_main):
        with pytest.raises(InvalidName, match="name="):
            Tasks().task()(function)


def test_registering_again_replaces_and_a_taken_name_is_an_error():
    tasks = Tasks()
    first = tasks.task(name="t", aliases=["old"])(plain)
    again = tasks.task(name="t", aliases=["old"], priority=1)(plain)

    assert tasks["t"] is again is tasks["old"]
    assert first is not again

    def other() -> None: ...

    for taken in ("t", "old"):
        with pytest.raises(InvalidName, match="already"):
            tasks.task(name=taken)(other)
    with pytest.raises(InvalidName, match="already"):
        tasks.task(name="new", aliases=["t"])(other)


def test_the_enqueue_hook_adds_headers(store):
    tasks = Tasks(store, on_enqueue=lambda task, headers: headers.update(trace=task.name))
    task = tasks.task(name="t")(plain)

    job = store.get_job(task.options(headers={"a": "b"}).enqueue(1))

    assert dict(job.headers) == {"a": "b", "trace": "t"}


VALUES = [
    pytest.param(Any, {"a": [1, None, 2.5]}, id="any"),
    pytest.param(int, 2**70, id="big int"),
    pytest.param(float, 1.5, id="float"),
    pytest.param(str | None, None, id="optional"),
    pytest.param(list[dict[str, int]], [{"a": 1}], id="nested"),
    pytest.param(Literal["a", 1], "a", id="literal"),
    pytest.param(datetime, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), id="aware datetime"),
    pytest.param(date, date(2026, 1, 2), id="date"),
    pytest.param(timedelta, timedelta(seconds=1.5), id="timedelta"),
    pytest.param(uuid.UUID, uuid.UUID(int=7), id="uuid"),
    pytest.param(Decimal, Decimal("1.10"), id="decimal"),
    pytest.param(Colour, Colour.RED, id="enum"),
    pytest.param(Address, Address("Elm", date(2026, 1, 2)), id="dataclass"),
    pytest.param(list[Address], [Address("Elm", date(2026, 1, 2))], id="list of dataclasses"),
    pytest.param(Order, Order(id=uuid.UUID(int=1), total=Decimal("9.90")), id="pydantic model"),
    pytest.param(tuple[int, str], (1, "a"), id="tuple"),
    pytest.param(set[int], {1, 2}, id="set"),
    pytest.param(dict[int, str], {1: "a"}, id="dict of int"),
    pytest.param(datetime | None, None, id="optional datetime"),
]


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(("annotation", "value"), VALUES)
def test_arguments_come_back_equal_by_their_annotation(store, annotation, value):
    def fn(value) -> None: ...

    fn.__annotations__["value"] = annotation
    task = Tasks(store).task(name="t")(fn)
    task.enqueue(value)
    job = store.queue("default").claim_one("w")

    front, named = task.definition.handler.arguments(job)

    assert (front, named) == ([], {"value": value})
    assert type(named["value"]) is type(value)


WRONG = [
    pytest.param(int, "1", id="str for int"),
    pytest.param(str, None, id="None for str"),
    pytest.param(list[int], [1, "2"], id="list item"),
    pytest.param(dict[str, int], {"a": "b"}, id="dict value"),
    pytest.param(Literal["a"], "b", id="literal"),
    pytest.param(uuid.UUID, "00000000-0000-0000-0000-000000000007", id="str for UUID"),
    pytest.param(Address, {"street": "Elm"}, id="dict for dataclass"),
    pytest.param(Any, (1, 2), id="tuple for Any"),
    pytest.param(float, float("nan"), id="nan"),
    pytest.param(Decimal, Decimal("nan"), id="decimal nan"),
]


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(("annotation", "value"), WRONG)
def test_an_argument_that_does_not_fit_is_refused_before_anything_is_stored(store, annotation, value):
    def fn(value) -> None: ...

    fn.__annotations__["value"] = annotation
    task = Tasks(store).task(name="t")(fn)

    with pytest.raises(InvalidPayload, match="value|payload"):
        task.enqueue(value)
    assert not store.jobs()


def test_a_wrong_call_is_a_type_error(tasks):
    task = tasks.task()(plain)

    for args, kwargs in [((), {}), ((1, 2, 3, 4), {}), ((1,), {"nope": 1})]:
        with pytest.raises(TypeError):
            task.enqueue(*args, **kwargs)


def leading(job: JobHandle, session: Session, n: int) -> None: ...
async def leading_async(job: JobHandle, session: AsyncSession, n: int) -> None: ...
def only_session(session: Session, n: int = 1) -> None: ...


def test_leading_handle_and_session_are_put_in_and_not_stored(store, tasks):
    for function in (leading, leading_async):
        task = tasks.task()(function)
        assert store.get_job(task.enqueue(5)).payload == {"n": 5}
        assert tasks[task.name].definition.handler.with_session(["job", 5], "session") == ["job", "session", 5]
        with pytest.raises(TypeError, match=r"task\.fn"):
            task(5)
    assert store.get_job(tasks.task()(only_session).enqueue()).payload == {}


def late_job(n: int, job: JobHandle) -> None: ...
def session_first(session: Session, job: JobHandle) -> None: ...
def star(*args: int) -> None: ...
def stars(**kwargs: int) -> None: ...
def unresolved(x: "Nowhere") -> None: ...  # noqa: F821
def unstorable(x: Session | None) -> None: ...
def generator():
    yield 1


async def sync_session(session: Session) -> None: ...
def async_session(session: AsyncSession) -> None: ...


@pytest.mark.parametrize(
    "function", [late_job, session_first, star, stars, unresolved, unstorable, generator, sync_session, async_session, print, "text", int]
)
def test_a_function_that_cannot_be_a_task_is_a_type_error_at_decoration(function):
    with pytest.raises(TypeError):
        Tasks().task(name="t")(function)


def test_declarations_are_checked_at_once():
    tasks = Tasks()
    for wrong in (
        {"queue": ""},
        {"queue": "__alkstore_x"},
        {"priority": 1e3},
        {"timeout": 0},
        {"max_attempts": 0},
        {"aliases": ["\0"]},
        {"name": " "},
    ):
        with pytest.raises((InvalidName, InvalidOption)):
            tasks.task(**wrong)
    with pytest.raises(TypeError, match="own_commit"):
        tasks.task(name="t", own_commit=True)(plain)


def test_raw_handlers_and_deliveries_take_a_handle_and_nothing_else():
    tasks = Tasks()

    @tasks.raw(queue="legacy")
    def raw(job: JobHandle, session: Session) -> None: ...

    @tasks.delivery("webhooks")
    def deliver(job: JobHandle) -> None: ...

    assert tasks.queues == ["legacy"]
    assert tasks.outboxes == ["webhooks"]
    for declare in (tasks.raw(queue="q"), tasks.delivery("o")):
        with pytest.raises(TypeError):
            declare(plain)
        with pytest.raises(TypeError):
            declare(lambda: None)
    with pytest.raises(InvalidName, match="already"):
        tasks.raw(queue="legacy")(deliver)


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_a_task_schedules_a_call_of_itself_with_its_own_stamps(store, tasks):
    task = tasks.task(name="t", queue="mail", max_attempts=7, priority=2)(plain)

    schedule = task.options(headers={"a": "b"}).schedule("hourly", "@every 1h", 1, flag=True)

    assert (schedule.queue, schedule.task, schedule.payload, schedule.max_attempts) == ("mail", "t", {"n": 1, "flag": True}, 7)
    assert (schedule.priority, dict(schedule.headers)) == (2, {"a": "b"})
    assert store.schedules() == [schedule]
    with pytest.raises(InvalidOption, match="delay"):
        task.options(delay=1).schedule("other", "@every 1h", 1)
    with pytest.raises(TypeError):
        task.schedule("other", "@every 1h")


def test_a_fired_job_runs_as_its_task(store, database, tasks):
    task = tasks.task(name="t", visibility_timeout=90)(plain)
    task.schedule("hourly", "@every 1h", 5)
    database.sql(f"UPDATE alkstore_schedule SET next_fire_at = {database.now(-1)}")
    store.tick()

    [job] = store.jobs()
    assert (job.task, job.payload, job.schedule, job.visibility_timeout) == ("t", {"n": 5}, "hourly", timedelta(seconds=90))


def test_schedules_in_code_are_registered_and_what_is_gone_from_it_is_told_of(store, tasks):
    def nightly() -> None: ...

    tasks.every("@every 1d")(tasks.task(name="nightly")(nightly))
    tasks.task(name="gone")(plain).schedule("old", "@every 1h", 1)
    store.schedule("raw", "@every 1h", "q")
    again = Tasks(store)
    again.every("@every 1d", name="each night")(again.task(name="nightly")(nightly))

    assert [one.name for one in tasks.sync_schedules().registered] == ["nightly"]
    sync = again.sync_schedules()

    assert [one.name for one in sync.registered] == ["each night"]
    assert [one.name for one in sync.orphaned] == ["old"]
    assert len(store.schedules()) == 4
    with pytest.raises(NotBound):
        Tasks().sync_schedules()


def test_schedules_in_code_are_checked_at_once():
    tasks = Tasks()
    with pytest.raises(InvalidSpec):
        tasks.every("hourly")
    with pytest.raises(InvalidName):
        tasks.every("@every 1h", name="__alkstore_x")
    with pytest.raises(TypeError, match="needs arguments"):
        tasks.every("@every 1h")(tasks.task(name="t")(plain))
    with pytest.raises(TypeError, match="no task"):
        tasks.every("@every 1h")(plain)
