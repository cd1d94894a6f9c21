"""What an application holds of a lock: its lease, by hand or as a context manager, kept alive by a thread where it asks for that."""

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final
from uuid import uuid4

from sqlalchemy.exc import SQLAlchemyError

from alkstore_sa._options import Duration, positive
from alkstore_sa.bridge import Beside
from alkstore_sa.engines import Database
from alkstore_sa.errors import AlkstoreError, LeaseLost, LockHeld
from alkstore_sa.leases import Held, Leases, Term
from alkstore_sa.stop import StopToken

log: Final = logging.getLogger(__name__)

FIRST_TRY_SECONDS: Final = 0.02
LONGEST_TRY_SECONDS: Final = 0.5


class Lease:
    """A lock that this process holds until it releases it or its time is over.

    `token` only ever rises per name: store it beside what the lock guards, and refuse a lower one. `expires_at` is an aware UTC instant
    of the database's clock; `renew` updates it. `lost` is set once this lease learns that it is gone. May be shared between threads.
    """

    def __init__(self, database: Database, leases: Leases, held: Held, ttl: timedelta, sent: float, term: Term) -> None:
        self._database: Final = database
        self._leases: Final = leases
        self._held: Final = held
        self._ttl: Final = ttl
        self.name: Final = held.name
        self.owner: Final = held.owner
        self.token: Final = held.token
        self.expires_at: datetime = term.expires_at
        self.lost: Final = threading.Event()
        self._asked = ttl
        self._releasing = False
        self._released = False
        self._until = _local_end(sent, ttl, term)

    def __repr__(self) -> str:
        return f"<Lease name={self.name!r} owner={self.owner!r} token={self.token} held={self.held}>"

    @property
    def held(self) -> bool:
        """Whether the lease surely stands: no more so once its time has passed here since before it was last asked for. No round trip."""
        return not self._released and not self.lost.is_set() and time.monotonic() < self._until

    def renew(self, ttl: Duration | None = None) -> bool:
        """Put the end to `ttl` from now (default: that of the taking); False: it had lapsed or was taken over. One statement.

        Where the lease is kept alive, it is kept by the `ttl` that was asked for last.
        """
        self._asked = self._ttl if ttl is None else positive("ttl", ttl)
        return self._renewed(self._asked, None)

    def release(self) -> bool:
        """Free the name; False: it had lapsed, was taken over or was released before. One statement."""
        self._releasing = True  # beforehand: a renewal in another thread may find the name freed before the answer is here
        try:
            released = self._database.run_single(self._leases.release, self._held)
            self._released = self._released or released
        finally:
            self._releasing = False
        if not self._released:
            self.lost.set()
        return released

    @property
    def released(self) -> bool:
        """Whether `release` freed it."""
        return self._released

    def _renewed(self, length: timedelta, limit: float | None) -> bool:
        sent = time.monotonic()
        if limit is None:
            term = self._database.run_single(self._leases.renew, self._held, length)
        else:
            term = self._database.run_within(limit, self._leases.renew, self._held, length)
        if term is None:
            if not self._releasing and not self._released:
                self.lost.set()
            return False
        self.expires_at = term.expires_at
        self._until = _local_end(sent, length, term)
        return True

    def keep(self, stop: StopToken) -> None:
        """Renew every third of the time to live until `stop` is cancelled or the lease is lost or released.

        It blocks, so run it in a thread. A longer time that was asked for is kept, and looked after no less often.
        """
        pause = self._ttl.total_seconds() / 3
        while not stop.wait(pause) and not self._released:
            length = self._asked
            third = min(length, self._ttl).total_seconds() / 3
            try:
                if not self._renewed(length, third):
                    return
                pause = third if self._asked == length else 0.0  # what was asked for meanwhile is not to be cut short
            except (SQLAlchemyError, AlkstoreError) as error:  # the lease stands until its time is over, whatever the reason
                log.warning("lock %r could not be renewed: %s", self.name, type(error).__name__, extra={"lock": self.name})
                pause = third / 4
            if not self.held and not self._released:
                self.lost.set()
                return


class Locks:
    """Takes leases for applications: by one try, or by waiting."""

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database: Final = database
        self._leases: Final = leases

    def take(self, name: str, ttl: timedelta, owner: str) -> Lease | None:
        """Try once."""
        sent = time.monotonic()
        taken = self._database.run_single(self._leases.take, name, owner, ttl)
        return None if taken is None else Lease(self._database, self._leases, taken[0], ttl, sent, taken[1])

    def take_within(self, wait: timedelta, name: str, ttl: timedelta, owner: str) -> Lease:
        """Try until it works or `wait` is over; at least once, and a last time at the end.

        Raises:
            LockHeld: another owner has it still.
        """
        end = time.monotonic() + wait.total_seconds()
        pause = FIRST_TRY_SECONDS
        while True:
            last = time.monotonic() >= end
            lease = self.take(name, ttl, owner)
            if lease is not None:
                return lease
            if last:
                raise LockHeld(f"lock {name!r} is held by another owner, still after {wait.total_seconds():g} s")
            self._database.pause(max(0.0, min(end - time.monotonic(), pause * random.uniform(0.5, 1))))
            pause = min(LONGEST_TRY_SECONDS, pause * 2)

    @contextmanager
    def hold(self, wait: timedelta, name: str, ttl: timedelta, owner: str, *, keep_alive: bool) -> Iterator[Lease]:
        """Hold a lease for the length of a body."""
        lease = self.take_within(wait, name, ttl, owner)
        stop = StopToken()
        keeper = self._database.beside(lambda: lease.keep(stop), f"alkstore-lock-{name}") if keep_alive else None
        try:
            yield lease
        except BaseException:
            _end(keeper, stop)
            _released_quietly(lease)
            raise
        _end(keeper, stop)
        released = lease.released or lease.release()
        if lease.lost.is_set() or not released:
            raise LeaseLost(f"lock {name!r} was lost before its body ended: somebody else may have had it meanwhile")


def unique_owner() -> str:
    """Make an owner that no other call, thread or process shares."""
    return f"{os.getpid()}-{uuid4().hex}"


def _local_end(sent: float, ttl: timedelta, term: Term) -> float:
    return sent + min(ttl, term.remaining).total_seconds()


def _end(keeper: Beside | None, stop: StopToken) -> None:
    stop.cancel()
    if keeper is not None:
        keeper.join()


def _released_quietly(lease: Lease) -> None:
    """Release at the end of a body that raised: its own error is the one to see."""
    try:
        if not lease.released:
            lease.release()
    except Exception as error:  # noqa: BLE001 - whatever it is, the lease ends by itself
        log.warning("lock %r could not be released: %s", lease.name, type(error).__name__, extra={"lock": lease.name})
