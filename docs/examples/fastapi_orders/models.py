"""The application's own tables."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


class Mail(Base):
    """What was sent: the message's id makes a second delivery of it harmless."""

    __tablename__ = "mails"
    message_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    order_id: Mapped[int]


class Report(Base):
    __tablename__ = "reports"
    boundary: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]
