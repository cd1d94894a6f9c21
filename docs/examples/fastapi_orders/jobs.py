"""What runs in the worker's process: `alkstore run --app jobs:tasks`."""

import os
from datetime import datetime

from models import Mail, Order, Report
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from alkstore_sa import JobHandle, Store, Tasks

tasks = Tasks(Store(os.environ["DATABASE_URL"]))
EVERY = os.environ.get("REPORT_EVERY", "1d")


@tasks.delivery("mail")
def send(message: JobHandle, session: Session) -> None:
    session.add(Mail(message_id=message.id, order_id=message.payload["order"]))


@tasks.task(name="report", queue="reports")
def report(job: JobHandle, session: Session) -> None:
    boundary: datetime = job.scheduled_for or job.enqueued_at
    session.add(Report(boundary=boundary.isoformat(), orders=session.scalar(select(func.count(Order.id))) or 0))
