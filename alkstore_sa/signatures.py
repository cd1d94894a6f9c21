"""What a task's function takes: what the worker puts in first, and the arguments that are stored by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_type_hints

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from alkstore_sa._arguments import Argument, argument_for
from alkstore_sa._payload import Payload
from alkstore_sa.errors import InvalidPayload
from alkstore_sa.handles import JobHandle

SessionKind: TypeAlias = Literal["sync", "async"]

_SESSIONS: Final[Mapping[Any, SessionKind]] = {Session: "sync", AsyncSession: "async"}
_INJECTED: Final = (JobHandle, Session, AsyncSession)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters: injected ones off the front, the others by name with their way into JSON and back."""

    takes_job: bool
    session: SessionKind | None
    is_async: bool
    own: inspect.Signature
    arguments: Mapping[str, Argument]
    required: frozenset[str]
    positional_only: tuple[str, ...]

    def stored(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the payload of a call: what the caller gave, by name; defaults are the running code's.

        Raises:
            TypeError: the function cannot be called like this.
            InvalidPayload: an argument does not fit its annotation.
        """
        given = self.own.bind(*args, **kwargs).arguments
        return {name: self.arguments[name].stored(name, value) for name, value in given.items()}

    def passed(self, payload: Payload) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments for a stored payload.

        Raises:
            InvalidPayload: the payload is no object of exactly these parameters, or an argument does not fit its annotation.
        """
        if type(payload) is not dict:
            raise InvalidPayload(f"the arguments of a task are stored as an object, not as {type(payload).__name__}")
        arguments = self.arguments
        if payload.keys() != arguments.keys():
            if unknown := payload.keys() - arguments.keys():
                raise InvalidPayload(f"this function has no parameter {', '.join(sorted(unknown))}")
            if missing := self.required - payload.keys():
                raise InvalidPayload(f"no argument is stored for parameter {', '.join(sorted(missing))}")
        named = {name: arguments[name].passed(name, value) for name, value in payload.items()}
        if not self.positional_only:
            return [], named
        front = [named.pop(name) for name in self.positional_only if name in named]
        return front, named


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read a task's function.

    Raises:
        TypeError: it is no plain or coroutine function, has `*args` or `**kwargs`, an annotation that does not resolve or cannot be
            stored, or a parameter for the worker to put in anywhere but in front, a handle before a session.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"{function!r} is no function: decorate a `def` or an `async def`")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator: nothing would run when it is called")
    hints = _hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    takes_job = _leads(parameters, hints, JobHandle)
    if takes_job:
        del parameters[0]
    session: SessionKind | None = None
    for annotation, kind in _SESSIONS.items():
        if _leads(parameters, hints, annotation):
            session = kind
            del parameters[0]
    is_async = inspect.iscoroutinefunction(function)
    if session is not None and (session == "async") is not is_async:
        raise TypeError(f"{function.__qualname__}: a `def` takes a Session, an `async def` an AsyncSession")
    arguments = {one.name: _argument(function, one, hints) for one in parameters}
    return Signature(
        takes_job,
        session,
        is_async,
        inspect.Signature(parameters),
        arguments,
        frozenset(one.name for one in parameters if one.default is inspect.Parameter.empty),
        tuple(one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY),
    )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise TypeError(
            f"{function.__qualname__}: an annotation does not resolve at run time ({error}); import what it names, not only under"
            " TYPE_CHECKING"
        ) from error


def _leads(parameters: list[inspect.Parameter], hints: Mapping[str, Any], annotation: type) -> bool:
    return bool(parameters) and parameters[0].kind in _POSITIONAL and hints.get(parameters[0].name) is annotation


def _argument(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Argument:
    place = f"{function.__qualname__}: parameter {parameter.name!r}"
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(f"{place}: arguments are stored by name, so *args and **kwargs are not possible")
    annotation = hints.get(parameter.name, Any)
    if annotation in _INJECTED:
        raise TypeError(f"{place}: a JobHandle, then a Session, come first, before every argument")
    try:
        return argument_for(annotation)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
