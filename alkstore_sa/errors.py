"""The error tree and how an error becomes stored text.

What belongs here: exceptions that this library raises, each saying whose fault it is and what to do now.
What does not: database errors, which pass through as SQLAlchemy raises them.

    AlkstoreError
    ├── InvalidName (ValueError)        a name breaks the rules: fix the call
    │   └── ReservedName                the name is the engine's own
    ├── InvalidOption (ValueError)      a value or a target is out of its range: fix the call
    ├── InvalidSpec (ValueError)        a schedule's spec is not of the grammar: fix the call
    ├── InvalidPayload (ValueError)     the payload cannot be stored, or the stored text cannot be read
    ├── ClaimLost (RuntimeError)        somebody else has the job now: stop working on it
    ├── NotBound (RuntimeError)         a task was used before its registry had a store: bind it first
    ├── LockHeld (TimeoutError)         somebody else has the lock: come back later
    ├── LeaseLost (RuntimeError)        the lock was lost while its body ran: what it guarded may be somebody else's
    ├── LeadershipLost (RuntimeError)   another process runs the scheduler now, or may: stand again
    ├── StoreClosed (RuntimeError)      the store was closed: make a new one
    └── SchemaMissing (RuntimeError)    the tables are not there: run the command that the message names
        └── SchemaOutdated              they are there, but a column or an index is missing: likewise
"""

from typing import Final

ERROR_TEXT_LIMIT: Final = 10_000


class AlkstoreError(Exception):
    """The root of every error that this library raises."""


class InvalidName(AlkstoreError, ValueError):
    """A name is not a non-blank `str` of 1 to 255 characters without NUL and lone surrogates."""


class ReservedName(InvalidName):
    """A name begins with the prefix that the engine keeps for itself."""


class InvalidOption(AlkstoreError, ValueError):
    """An option, a database URL or a transaction is not one that the call can take."""


class InvalidSpec(AlkstoreError, ValueError):
    """A schedule's spec is not `@every <n><unit>`, or its interval is out of range."""


class InvalidPayload(AlkstoreError, ValueError):
    """A payload cannot be encoded by the store's codec, or its stored text cannot be decoded."""


class ClaimLost(AlkstoreError, RuntimeError):
    """The claim that a transaction was to settle is no longer this handle's."""


class NotBound(AlkstoreError, RuntimeError):
    """A task was to be stored before `tasks.bind(store)` was called."""


class LockHeld(AlkstoreError, TimeoutError):
    """A lock was not to be had within the time that the caller would wait."""


class LeaseLost(AlkstoreError, RuntimeError):
    """A lock was lost before its body ended, so that somebody else may have had it meanwhile."""


class LeadershipLost(AlkstoreError, RuntimeError):
    """This process does not, or no longer, lead the scheduler."""


class StoreClosed(AlkstoreError, RuntimeError):
    """The store was closed before the call."""


class SchemaMissing(AlkstoreError, RuntimeError):
    """A table of the library is not in the database; the message names the command that makes it."""


class SchemaOutdated(SchemaMissing):
    """A column or an index of the library is not in the database; the message names the command."""


def error_text(error: str | BaseException) -> str:
    """Give the text under which `error` is stored: cleaned, at most 10,000 characters, and never raising.

    A `str` is taken as it is, an exception by its text, or by its type where it has none or its `str()` raises.
    NUL and lone surrogates become U+FFFD. What is too long keeps its first line and its tail.
    """
    try:
        text = str.__str__(error if isinstance(error, str) else str(error))  # a plain str, whatever a subclass makes of its methods
    except Exception:  # noqa: BLE001 - the failure being recorded must not fail the recording
        text = ""
    if not isinstance(error, str):
        text = text or type(error).__name__
    return _shortened(text.replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _shortened(text: str) -> str:
    if len(text) <= ERROR_TEXT_LIMIT:
        return text
    mark = "\n[...]\n"
    head = text.split("\n", 1)[0][: ERROR_TEXT_LIMIT // 2]
    return head + mark + text[len(head) + len(mark) - ERROR_TEXT_LIMIT :]
