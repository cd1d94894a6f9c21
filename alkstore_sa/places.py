"""Which place a database is in: two URLs may name one place, and one name may mean two.

What belongs here: telling places apart, and naming them. What does not: what follows where they differ.
"""

import os
from collections.abc import Sequence
from typing import Any

from sqlalchemy import URL, Connection, func, select


def file_of(url: URL) -> str:
    """Give the path of the SQLite file that `url` leads to, the same one however it is written."""
    return os.path.realpath((url.database or "").removeprefix("file:").partition("?")[0])


def server_of(connection: Connection) -> Sequence[Any]:
    """Ask PostgreSQL which server and database this is; one statement that anybody may send.

    No two servers start in the same microsecond, and a copy of a server, which has its names and identifiers, is another one.
    """
    return tuple(connection.execute(select(func.pg_postmaster_start_time(), func.current_database())).one())


def described(url: URL) -> str:
    """Name a place for people, without whoever may enter it."""
    where = f"{url.host}:{url.port}" if url.host and url.port else url.host
    return f"{url.database!r} at {where}" if where else repr(url.database)
