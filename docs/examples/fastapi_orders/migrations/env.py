"""The application's own history; the tables of alkstore_sa have one of theirs, and are kept out of this one."""

import os

from alembic import context
from models import Base
from sqlalchemy import create_engine

from alkstore_sa.migrate import include_name

engine = create_engine(os.environ["DATABASE_URL"])
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, include_name=include_name())
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
