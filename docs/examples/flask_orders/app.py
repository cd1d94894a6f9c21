"""Orders: each one commits with the e-mail that tells of it, and a report counts them at every boundary of a schedule."""

import os
from datetime import datetime

from flask import Flask, request
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from alkstore_sa import JobHandle, Tasks
from alkstore_sa.flask import Alkstore


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
tasks = Tasks()
alkstore = Alkstore(tasks=tasks)

EVERY = os.environ.get("REPORT_EVERY", "1d")


class Order(db.Model):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


class Mail(db.Model):
    """What was sent: the message's id makes a second delivery of it harmless."""

    __tablename__ = "mails"
    message_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    order_id: Mapped[int]


class Report(db.Model):
    __tablename__ = "reports"
    boundary: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]


@tasks.delivery("mail")
def send(message: JobHandle, session: Session) -> None:
    session.add(Mail(message_id=message.id, order_id=message.payload["order"]))


@tasks.task(name="report", queue="reports")
def report(job: JobHandle, session: Session) -> None:
    boundary: datetime = job.scheduled_for or job.enqueued_at
    session.add(Report(boundary=boundary.isoformat(), orders=session.scalar(select(func.count(Order.id))) or 0))


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    db.init_app(app)
    migrate.init_app(app, db)
    alkstore.init_app(app)

    @app.post("/orders")
    def place() -> tuple[dict[str, int], int]:
        order = Order(item=request.json["item"])
        db.session.add(order)
        db.session.flush()
        alkstore.store.outbox_enqueue_tx(db.session, "mail", {"order": order.id})
        if request.json.get("fail"):
            raise RuntimeError("the card was refused")
        db.session.commit()
        return {"order": order.id, "pid": os.getpid()}, 201

    @app.get("/")
    def counts() -> dict[str, int]:
        return {"orders": db.session.scalar(select(func.count(Order.id))) or 0, "pid": os.getpid()}

    return app


def register_schedules() -> None:
    """Every process may do this at its start: the boundaries stay where they are."""
    report.schedule("nightly", f"@every {EVERY}")
