"""The verbs of leases: bind first, statements run, answers returned. Nothing here commits, waits or spawns.

A lease is a lock that ends by itself. Names are taken as they come: what may be named by whom is checked by those who call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alkstore_sa._names import RESERVED_PREFIX
from alkstore_sa.engines import Database
from alkstore_sa.records import LockInfo
from alkstore_sa.seam import Bind
from alkstore_sa.statements import leases as statements

SCHEDULER: Final = f"{RESERVED_PREFIX}scheduler"  # the name under which runners lead, and the queue by which they are woken


@dataclass(frozen=True, slots=True)
class Held:
    """What proves a lease."""

    name: str
    owner: str
    token: int

    @property
    def values(self) -> dict[str, str | int]:
        """What the statements bind."""
        return {"lease_name": self.name, "lease_owner": self.owner, "lease_token": self.token}


@dataclass(frozen=True, slots=True)
class Term:
    """Until when a lease stands: as an instant, and as a length of time from when the database answered."""

    expires_at: datetime
    remaining: timedelta


class Leases:
    """The verbs on leases of one database."""

    def __init__(self, database: Database, *, waking: bool) -> None:
        self._database: Final = database
        self._waking: Final = waking

    def take(self, bind: Bind, name: str, owner: str, ttl: timedelta) -> tuple[Held, Term] | None:
        """Take a free or lapsed name for `ttl`, or find it held by `owner` already and leave it as it is; None: another has it."""
        values = {"lease_name": name, "lease_owner": owner, "lease_ttl": ttl}
        row = bind.execute(self._database.statement(statements.take_lease), values).first()
        return None if row is None else (Held(name, owner, row.token), Term(row.expires_at, row.remaining))

    def renew(self, bind: Bind, held: Held, ttl: timedelta) -> Term | None:
        """Put this lease's end to `ttl` from now; None: it lapsed or was taken over."""
        row = bind.execute(self._database.statement(statements.renew_lease), {**held.values, "lease_ttl": ttl}).first()
        return None if row is None else Term(row.expires_at, row.remaining)

    def release(self, bind: Bind, held: Held) -> bool:
        """Free the name, unless this lease lapsed or was taken over; the next runner of the scheduler is woken."""
        waking = self._waking and held.name == SCHEDULER
        values = {**held.values, **({"wake_channel": self._database.channel} if waking else {})}
        return bind.execute(self._database.statement(statements.release_lease, waking), values).first() is not None

    def lock(self, bind: Bind, held: Held) -> datetime | None:
        """Lock this lease's row until the transaction ends, and return the lease's end; None: it does not stand."""
        row = bind.execute(self._database.statement(statements.lock_lease), held.values).first()
        return None if row is None else row.expires_at

    def remaining(self, bind: Bind, name: str) -> timedelta | None:
        """Say how much longer somebody has the name; None: nobody does."""
        row = bind.execute(self._database.statement(statements.select_remaining), {"lease_name": name}).first()
        return None if row is None else row.remaining

    def held(self, bind: Bind) -> Sequence[LockInfo]:
        """List the locks that somebody holds, by name."""
        return [
            LockInfo(row.name, row.owner, row.token, row.expires_at)
            for row in bind.execute(self._database.statement(statements.select_held))
        ]
