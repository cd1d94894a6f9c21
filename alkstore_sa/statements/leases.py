"""Builders for leases: take, renew, release, prove, look."""

from typing import Final

from sqlalchemy import BigInteger, Text, and_, bindparam, case, null, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.expression import Executable

from alkstore_sa.constructs import Span, clock_now, constant, in_picked, later, microseconds_between, statement_now, wake
from alkstore_sa.tables import locks

_NAME: Final = bindparam("lease_name", type_=Text)
_OWNER: Final = bindparam("lease_owner", type_=Text)
_TOKEN: Final = bindparam("lease_token", type_=BigInteger)
_TTL: Final = bindparam("lease_ttl", type_=Span)

_STANDS: Final = locks.c.expires_at > clock_now()
_MINE: Final = and_(locks.c.name == _NAME, locks.c.owner == _OWNER, locks.c.token == _TOKEN, _STANDS)
"""This very lease, and its time is not over."""


def take_lease() -> Executable:
    """Take a name that is free or lapsed, or find it held by this owner already; no row where another owner holds it.

    Whatever is decided is decided after the wait for the row, by the clock as it stands then.
    """
    kept = and_(locks.c.owner == _OWNER, _STANDS)
    end = later(clock_now(), _TTL)
    return (
        insert(locks)
        .values(name=_NAME, owner=_OWNER, token=constant(1), expires_at=end)
        .on_conflict_do_update(
            index_elements=[locks.c.name],
            set_={
                "owner": _OWNER,
                "token": case((kept, locks.c.token), else_=locks.c.token + constant(1)),
                "expires_at": case((kept, locks.c.expires_at), else_=end),
            },
            where=or_(locks.c.owner.is_(None), locks.c.owner == _OWNER, locks.c.expires_at <= clock_now()),
        )
        .returning(locks.c.token, locks.c.expires_at, microseconds_between(clock_now(), locks.c.expires_at).label("remaining"))
    )


def renew_lease() -> Executable:
    """Put the end of this very lease to a time from now, unless it lapsed, be it while this statement waited for the row."""
    held = locks.alias("held")
    picked = select(held.c.name).where(held.c.name == _NAME).with_for_update()
    return (
        update(locks)
        .where(in_picked(locks.c.name, picked), _MINE)
        .values(expires_at=later(clock_now(), _TTL))
        .returning(locks.c.expires_at, microseconds_between(clock_now(), locks.c.expires_at).label("remaining"))
    )


def release_lease(waking: bool) -> Executable:
    """Free the name if this very lease of it stands; the token stays as high as it is."""
    woken = [wake(bindparam("wake_channel", type_=Text), locks.c.name)] if waking else []
    return update(locks).where(_MINE).values(owner=null(), expires_at=clock_now()).returning(locks.c.token, *woken)


def lock_lease() -> Executable:
    """Lock the row of this very lease until the transaction ends, and give the lease's end; no row where it does not stand."""
    return select(locks.c.expires_at).where(_MINE).with_for_update()


def select_remaining() -> Executable:
    """Say how much longer the holder of a name has it; no row where nobody does."""
    remaining = microseconds_between(clock_now(), locks.c.expires_at).label("remaining")
    return select(remaining).where(locks.c.name == _NAME, locks.c.owner.is_not(None), _STANDS)


def select_held() -> Executable:
    """List the locks that somebody holds."""
    return (
        select(locks.c.name, locks.c.owner, locks.c.token, locks.c.expires_at)
        .where(locks.c.owner.is_not(None), locks.c.expires_at > statement_now())
        .order_by(locks.c.name)
    )
