"""Never run: right and wrong calls, checked by mypy and pyright. A wrong call carries the error that must be reported."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import assert_type

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from alkstore_sa import (
    AlkstoreError,
    AsyncStore,
    Call,
    Fail,
    Job,
    JobHandle,
    JobState,
    NotBound,
    Outbox,
    Queue,
    QueueStats,
    Retry,
    Schedule,
    Snooze,
    StopToken,
    Store,
    Tasks,
    Worker,
    WorkerReport,
)

engine: Engine = create_engine("sqlite:///x.db")
store = Store(engine, schema=None, wake=True, poll=timedelta(seconds=5))
queue = store.queue("q", visibility_timeout=30, max_attempts=3, base_backoff=timedelta(seconds=1))
outbox = store.outbox("o")
assert_type(queue, Queue)
assert_type(outbox, Outbox)


def right(session: Session, connection: Connection, scoped: scoped_session[Session]) -> None:
    assert_type(queue.enqueue({"n": 1}), int)
    assert_type(queue.enqueue(None, delay=5, priority=1, expires=timedelta(1), max_attempts=2, headers={"a": "b"}), int)
    assert_type(queue.enqueue(None, run_at=datetime.now(UTC)), int)
    assert_type(queue.enqueue_tx(session, 1), int)
    assert_type(queue.enqueue_tx(connection, 1, delay=1.5), int)
    assert_type(queue.enqueue_tx(scoped, 1), int)
    assert_type(queue.enqueue_many([1, 2]), list[int])
    assert_type(queue.enqueue_many_tx(session, (n for n in range(3))), list[int])
    assert_type(queue.claim("w", 5), list[JobHandle])
    assert_type(queue.claim_one("w"), JobHandle | None)
    assert_type(queue.wait(5), bool)
    assert_type(store.get_job(1), Job | None)
    assert_type(store.jobs(state=JobState.READY, limit=5), Sequence[Job])
    assert_type(store.queues(), Sequence[QueueStats])
    assert_type(store.outbox_enqueue_tx(session, "o", 1), int)
    for job in queue.jobs("w", StopToken()):
        assert_type(job.ack(), bool)
        assert_type(job.headers, Mapping[str, str])
        assert_type(job.retry(ValueError(), delay=5), bool)
        job.ack_tx(session)
    assert_type(outbox.run_once("w", deliver), bool)
    with sessionmaker(engine).begin() as made:
        store.enqueue_tx(made, "q", 1)


def deliver(job: JobHandle) -> None:
    print(job.payload)


async def right_through_run_sync(session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await session.run_sync(queue.enqueue_tx, {"n": 1}, delay=1), int)
    assert_type(await connection.run_sync(queue.enqueue_many_tx, [1, 2]), list[int])
    await session.run_sync(store.outbox_enqueue_tx, "o", 1)


async def wrong(session: Session, asynchronous: AsyncSession) -> None:
    queue.enqueue(1, colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    queue.enqueue(1, delay="5m")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.enqueue(1, priority=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.enqueue(1, headers={"a": 1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    queue.enqueue_tx(engine, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.enqueue_tx(asynchronous, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    queue.enqueue_tx(1)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    queue.claim("w", "5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    store.jobs(state="ready")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    store.enqueue("q")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    outbox.run_once("w", lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]
    await asynchronous.run_sync(queue.enqueue_tx, 1, colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    session.run_sync(queue.enqueue_tx, 1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    Store(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# -- tasks -------------------------------------------------------------------------------------------------------------

tasks = Tasks(store)


@tasks.task(queue="mail", name="send", max_attempts=5, base_backoff=1, visibility_timeout=60, timeout=30, priority=2, aliases=("old",))
def send(order: int, *, to: str = "") -> str:
    return to


@tasks.task()
async def fetch(job: JobHandle, url: str) -> bytes:
    return url.encode()


@tasks.task(own_commit=True)
def pack(job: JobHandle, session: Session, order: int) -> None: ...


@tasks.task()
async def index(session: AsyncSession, order: int) -> None: ...


@tasks.every("@every 1d", name="nightly")
@tasks.task()
def nightly(session: Session) -> None: ...


@tasks.raw(queue="legacy")
def raw(job: JobHandle) -> None: ...


@tasks.delivery("webhooks")
async def webhook(job: JobHandle) -> None: ...


def right_tasks(session: Session, connection: Connection) -> None:
    assert_type(send(1, to="x"), str)
    assert_type(send.enqueue(1, to="x"), int)
    assert_type(send.enqueue_tx(session, 1), int)
    assert_type(send.enqueue_tx(connection, order=1), int)
    assert_type(send.call(1), Call)
    assert_type(send.enqueue_many([send.call(1), send.call(2, to="x")]), list[int])
    assert_type(send.enqueue_many_tx(session, (send.call(n) for n in range(3))), list[int])
    assert_type(send.options(delay=5, priority=1, headers={"a": "b"}).enqueue(1), int)
    assert_type(send.on(store).enqueue(1), int)
    assert_type(send.schedule("s", "@every 1h", 1, to="x"), Schedule)
    assert_type(fetch.enqueue("https://example.org"), int)
    assert_type(pack.enqueue_tx(session, 1), int)
    assert_type(index.enqueue(order=1), int)
    assert_type(nightly.enqueue(), int)
    assert_type(Worker(store, tasks, concurrency=5, queues=["mail"]).run(StopToken()), WorkerReport)
    raise Retry(delay=5) if send.name else Snooze(timedelta(hours=1)) if send.queue else Fail("no")


async def right_async_tasks(async_store: AsyncStore, async_session: AsyncSession, connection: AsyncConnection) -> None:
    try:
        assert_type(await send.aenqueue(1, to="x"), int)
    except NotBound as error:
        assert_type(error, NotBound)
        base: tuple[AlkstoreError, RuntimeError] = (error, error)
        raise base[1] from base[0]
    assert_type(await send.on(async_store).aenqueue(1), int)
    assert_type(await send.aenqueue_tx(async_session, 1, to="x"), int)
    assert_type(await index.aenqueue_tx(connection, order=1), int)
    assert_type(await send.aschedule("s", "@every 1h", 1), Schedule)


async def wrong_async_tasks(session: Session, async_session: AsyncSession) -> None:
    await send.aenqueue("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await send.aenqueue_tx(session, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await index.aenqueue_tx(async_session)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await send.aschedule("s", "@every 1h", "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    send.enqueue_tx(async_session, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_tasks(session: Session) -> None:
    send.enqueue("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    send.enqueue()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send.enqueue(1, colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send.enqueue_tx(1, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    send.enqueue_tx(session, "1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    send.call(to=1)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    send.enqueue_many([1])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    send.options(colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send.schedule("s", "@every 1h", "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pack.enqueue(session, 1)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    fetch.enqueue(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    index.enqueue_tx(session)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nightly.enqueue(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tasks.every("@every 1h")(raw)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tasks.task(colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Worker(store)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
