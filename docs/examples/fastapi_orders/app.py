"""Orders: the request's commit carries the e-mail that tells of it. The lifespan of each process serves the schedule."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from jobs import EVERY, report, tasks
from models import Order
from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from alkstore_sa import AsyncStore, prepare_sqlite
from alkstore_sa.fastapi import running, store_of

engine = create_async_engine(os.environ["DATABASE_URL"].replace("sqlite:", "sqlite+aiosqlite:"))
if engine.dialect.name == "sqlite":
    prepare_sqlite(engine.sync_engine)

store = AsyncStore(engine)
tasks.bind(store)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await report.aschedule("nightly", f"@every {EVERY}")  # every process may: the boundaries stay where they are
    async with running(app, store, serve_schedules=True):
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def session_of_request() -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session, session.begin():
        yield session  # the commit comes after the handler, and an exception rolls back


StoreOf = Annotated[AsyncStore, Depends(store_of)]
SessionOf = Annotated[AsyncSession, Depends(session_of_request, scope="function")]  # committed before the answer is sent


class NewOrder(BaseModel):
    item: str
    fail: bool = False


@app.post("/orders", status_code=201)
async def place(new: NewOrder, session: SessionOf, store: StoreOf) -> dict[str, int]:
    order = Order(item=new.item)
    session.add(order)
    await session.flush()
    await store.outbox_enqueue_tx(session, "mail", {"order": order.id})
    if new.fail:
        raise HTTPException(500, "the card was refused")
    return {"order": order.id, "pid": os.getpid()}


@app.get("/")
async def counts(session: SessionOf) -> dict[str, int]:
    return {"orders": await session.scalar(select(func.count(Order.id))) or 0, "pid": os.getpid()}
