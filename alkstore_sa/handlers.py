"""What the worker calls for a job: a function, what it is given first, and the time that it may take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from alkstore_sa.handles import JobHandle
from alkstore_sa.signatures import SessionKind, Signature


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """A registered function. `takes_arguments` tells a task's function, which gets its stored arguments, from a raw one or a delivery."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    takes_arguments: bool = True
    timeout: float | None = None  # seconds
    own_commit: bool = False
    is_async: bool = field(init=False)
    session: SessionKind | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", self.signature.is_async)
        object.__setattr__(self, "session", self.signature.session)

    def arguments(self, job: JobHandle) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function is called with for `job`, the session apart.

        Raises:
            InvalidPayload: the stored arguments cannot be decoded, or do not fit the function.
        """
        front, named = self.signature.passed(job.payload) if self.takes_arguments else ([], {})
        if self.signature.takes_job:
            front.insert(0, job)
        return front, named

    def with_session(self, front: list[Any], session: object) -> list[Any]:
        """Return the positional arguments with `session` in its place: after the handle, before the stored arguments."""
        at = 1 if self.signature.takes_job else 0
        return [*front[:at], session, *front[at:]]


def refuse_arguments(what: str, signature: Signature) -> None:
    """Refuse a raw handler or a delivery with parameters that nobody would fill; raises `TypeError`."""
    if signature.arguments:
        raise TypeError(f"{what} takes a JobHandle and perhaps a Session, not {', '.join(signature.arguments)}")
    if not signature.takes_job:
        raise TypeError(f"{what} takes a JobHandle first: its payload is what there is to work on")


def identity(function: Callable[..., Any]) -> str:
    """Give where a function was defined, as `module:qualname`."""
    return f"{function.__module__}:{function.__qualname__}"
