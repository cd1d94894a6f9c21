"""What a queue, a lock, a schedule, an outbox, a worker or an owner may be called. Pure."""

from typing import Final

from alkstore_sa.errors import InvalidName, ReservedName

RESERVED_PREFIX: Final = "__alkstore_"
LONGEST_NAME: Final = 255


def checked_name(kind: str, name: object) -> str:
    """Return `name` if it may name a `kind` of thing.

    Raises:
        InvalidName: it is no `str` of 1 to 255 characters, is only white space, or holds NUL or a lone surrogate.
        ReservedName: it begins with `__alkstore_`.
    """
    text = storable_name(kind, name)
    if text.startswith(RESERVED_PREFIX):
        raise ReservedName(f"{kind} name {text!r} begins with {RESERVED_PREFIX!r}, which the engine keeps for itself")
    return text


def storable_name(kind: str, name: object) -> str:
    """Return `name` if a column of names can hold it, the engine's own names included.

    Raises:
        InvalidName: as for `checked_name`.
    """
    if not isinstance(name, str):
        raise InvalidName(f"{kind} name {name!r} is no str but {type(name).__name__}")
    if not name or name.isspace():
        raise InvalidName(f"{kind} name {name!r} is empty or only white space")
    if len(name) > LONGEST_NAME:
        raise InvalidName(f"{kind} name of {len(name)} characters is longer than {LONGEST_NAME}")
    if not is_storable_text(name):
        raise InvalidName(f"{kind} name {name!r} holds a NUL or a lone surrogate")
    return name if type(name) is str else str.__str__(name)


def is_storable_text(text: str) -> bool:
    """Tell whether both databases can store `text`: no NUL and no lone surrogate."""
    if "\x00" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
