"""Leases, schedules, and the history of fires.

Safe to run before the code that needs it rolls out; it only creates. The downgrade drops every schedule with its history, and the
locks with their tokens.

Revision ID: alkstore_0002
Revises: alkstore_0001
"""

import sqlalchemy as sa
from alembic import op

revision = "alkstore_0002"
down_revision = "alkstore_0001"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")  # there: microseconds since the epoch


def create_partial_index(name: str, table: str, columns: list[str], where: str, sqlite_where: str | None = None) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(sqlite_where or where))


def upgrade() -> None:
    op.create_table(
        "alkstore_lock",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("name", name="alkstore_lock_pk"),
    )
    op.create_table(
        "alkstore_schedule",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("interval", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("headers", sa.Text(), nullable=True),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("visibility_timeout", sa.BigInteger(), nullable=False),
        sa.Column("base_backoff", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.BigInteger(), nullable=True),
        sa.Column("next_fire_at", INSTANT, nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry_at", INSTANT, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="alkstore_schedule_pk"),
    )
    create_partial_index("alkstore_schedule_due", "alkstore_schedule", ["next_fire_at", "name"], "NOT paused", "paused = 0")
    create_partial_index("alkstore_schedule_retry", "alkstore_schedule", ["retry_at"], "retry_at IS NOT NULL")
    op.create_table(
        "alkstore_fire",
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("boundary", INSTANT, nullable=False),
        sa.Column("through", INSTANT, nullable=False),
        sa.Column("fired_at", INSTANT, nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=True),
        sa.Column("skipped", sa.BigInteger(), nullable=False),
        sa.Column("caught_up", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("schedule", "boundary", name="alkstore_fire_pk"),
    )
    op.create_index("alkstore_fire_age", "alkstore_fire", ["fired_at"])


def downgrade() -> None:
    op.drop_table("alkstore_fire")
    op.drop_table("alkstore_schedule")
    op.drop_table("alkstore_lock")
