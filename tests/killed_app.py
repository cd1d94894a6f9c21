"""The application that worker processes of the tests run; it is told by the environment what to do."""

import asyncio
import importlib
import os
import signal
import time
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from alkstore_sa import JobHandle, Store, Tasks, prepare_sqlite

engine = create_engine(os.environ["ALKSTORE_URL"])
if engine.dialect.name == "sqlite":
    prepare_sqlite(engine)
store = Store(engine)
tasks = Tasks(store)
unbound = Tasks()
VISIBILITY = float(os.environ.get("VISIBILITY", "2"))
LINGER = float(os.environ.get("LINGER", "0"))


def mark(what):
    with Path(os.environ["MARKS"]).open("a") as file:  # one short write with O_APPEND: whole lines, in any process
        file.write(f"{what}\n")


@tasks.task(name="count", queue="count", visibility_timeout=VISIBILITY, max_attempts=100)
def count(session: Session, n: int) -> None:
    session.execute(text("UPDATE counter SET n = n + 1"))


@tasks.task(name="note", queue="note", visibility_timeout=VISIBILITY, max_attempts=100)
def note(job: JobHandle, n: int) -> None:
    mark(f"{n} {job.attempts}")


@tasks.task(name="anote", queue="anote", visibility_timeout=VISIBILITY, max_attempts=100)
async def anote(job: JobHandle, n: int) -> None:
    mark(f"{n} {job.attempts}")


@tasks.task(name="suicide", queue="suicide", visibility_timeout=VISIBILITY, own_commit=True, max_attempts=100)
def suicide(job: JobHandle, session: Session) -> None:
    session.execute(text("UPDATE counter SET n = n + 1"))
    session.commit()
    if job.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@tasks.task(name="fatal", queue="fatal", visibility_timeout=VISIBILITY, max_attempts=100)
def fatal(job: JobHandle, n: int, die_at: int) -> None:
    mark(f"{n} {job.attempts}")
    if n == die_at and job.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@tasks.task(name="slow", queue="slow", visibility_timeout=60)
def slow(seconds: float) -> None:
    mark("slow started")
    time.sleep(seconds)
    mark("slow ended")


@tasks.task(name="linger", queue="linger", visibility_timeout=VISIBILITY, max_attempts=100)
def linger(n: int) -> None:
    mark(f"{n} started")
    time.sleep(LINGER)
    mark(f"{n} ended")


@tasks.task(name="alinger", queue="linger", visibility_timeout=VISIBILITY, max_attempts=100)
async def alinger(n: int) -> None:
    mark(f"{n} started")
    try:
        await asyncio.sleep(LINGER)
    except asyncio.CancelledError:
        if n % 2:
            raise
    mark(f"{n} ended")


@tasks.task(name="clinger", queue="linger", visibility_timeout=VISIBILITY, max_attempts=100)
def clinger(session: Session, n: int) -> None:
    session.execute(text("UPDATE counter SET n = n + 1"))
    mark(f"{n} started")
    time.sleep(LINGER)
    mark(f"{n} ended")


@tasks.every("@every 1s", name="heartbeat")
@tasks.task(name="tick", queue="tick")
def tick() -> None:
    mark("tick")


@tasks.delivery("letters")
def deliver(job: JobHandle) -> None:
    mark(f"letter {job.payload}")


def die_at(place):
    """Let this process be killed where it enters or leaves a function of the worker, given as `module:Class.function:entering`."""
    module, name, moment = place.split(":")
    owner = getattr(importlib.import_module(module), name.partition(".")[0])
    real = getattr(owner, name.partition(".")[2])

    def deadly(*arguments, **named):
        if moment == "leaving":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name.partition(".")[2], deadly)


if "DIE_AT" in os.environ:
    die_at(os.environ["DIE_AT"])

release = os.environ.get("RELEASE")
if release:
    deploys = Tasks(store)

    @deploys.task(name=f"only-in-{release}", queue="deploy")
    def of_this_release(n: int) -> None:
        mark(f"{release} {n}")
