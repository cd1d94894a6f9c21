"""Jobs: the live and the dead.

Safe to run before the code that needs it rolls out; it only creates. The downgrade drops every job.

Revision ID: alkstore_0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "alkstore_0001"
down_revision = None
branch_labels = ("alkstore",)
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")  # there: microseconds since the epoch
JOB_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def job_columns() -> list[sa.Column]:
    return [
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("headers", sa.Text(), nullable=True),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("visibility_timeout", sa.BigInteger(), nullable=False),
        sa.Column("base_backoff", sa.BigInteger(), nullable=False),
        sa.Column("enqueued_at", INSTANT, nullable=False),
        sa.Column("run_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("schedule", sa.Text(), nullable=True),
        sa.Column("scheduled_for", INSTANT, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
    ]


def create_partial_index(name: str, columns: list, where: str) -> None:
    op.create_index(name, "alkstore_job", columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))


def upgrade() -> None:
    op.create_table(
        "alkstore_job",
        sa.Column("id", JOB_ID, sa.Identity(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("claim_expires_at", INSTANT, nullable=True),
        *job_columns(),
        sa.PrimaryKeyConstraint("id", name="alkstore_job_pk"),
        sa.CheckConstraint("state IN ('ready', 'delayed', 'claimed')", name="alkstore_job_state"),
        sqlite_autoincrement=True,
    )
    create_partial_index("alkstore_job_ready", ["queue", sa.desc("priority"), "run_at", "id"], "state = 'ready'")
    create_partial_index("alkstore_job_delayed", ["queue", "run_at"], "state = 'delayed'")
    create_partial_index("alkstore_job_claimed", ["queue", "claim_expires_at"], "state = 'claimed'")
    create_partial_index("alkstore_job_expiring", ["queue", "expires_at"], "state = 'ready' AND expires_at IS NOT NULL")
    op.create_table(
        "alkstore_dead",
        sa.Column("id", JOB_ID, autoincrement=False, nullable=False),
        sa.Column("died_at", INSTANT, nullable=False),
        *job_columns(),
        sa.PrimaryKeyConstraint("id", name="alkstore_dead_pk"),
    )
    op.create_index("alkstore_dead_queue", "alkstore_dead", ["queue", "id"])
    op.create_index("alkstore_dead_died", "alkstore_dead", ["queue", "died_at"])


def downgrade() -> None:
    op.drop_table("alkstore_dead")
    op.drop_table("alkstore_job")
