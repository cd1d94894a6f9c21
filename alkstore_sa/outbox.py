"""What an outbox is: a queue of the engine's own, named after it, with stamps of its own."""

from typing import Final

from alkstore_sa._names import RESERVED_PREFIX, checked_name

OUTBOX_PREFIX: Final = f"{RESERVED_PREFIX}outbox:"


def backing_queue(name: str) -> str:
    """Give the name of the queue behind the outbox `name`, which no other public call can reach.

    Raises:
        InvalidName, ReservedName: as for every name.
    """
    return OUTBOX_PREFIX + checked_name("outbox", name)
