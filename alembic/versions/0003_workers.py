"""Workers as they show themselves, and the queues that are paused.

Safe to run before the code that needs it rolls out; it only creates. The downgrade resumes every queue and forgets who was there;
no job is touched.

Revision ID: alkstore_0003
Revises: alkstore_0002
"""

import sqlalchemy as sa
from alembic import op

revision = "alkstore_0003"
down_revision = "alkstore_0002"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")  # there: microseconds since the epoch


def upgrade() -> None:
    op.create_table(
        "alkstore_worker",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("queues", sa.Text(), nullable=False),
        sa.Column("tasks", sa.Text(), nullable=False),
        sa.Column("raw_queues", sa.Text(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("handler_ms", sa.BigInteger(), nullable=False),
        sa.Column("started_at", INSTANT, nullable=False),
        sa.Column("seen_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="alkstore_worker_pk"),
    )
    op.create_table(
        "alkstore_pause",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("paused_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("queue", name="alkstore_pause_pk"),
    )


def downgrade() -> None:
    op.drop_table("alkstore_pause")
    op.drop_table("alkstore_worker")
