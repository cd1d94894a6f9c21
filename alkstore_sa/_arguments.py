"""Arguments of tasks as JSON, by their annotations. Pure.

What JSON gives back as it was (None, bool, int, float, str, lists and dicts of them, unions, literals, Any) is checked here and stored as
it is. Everything else (dataclasses, datetimes, UUID, Decimal, enumerations, models) goes through pydantic, and only through it.
"""

import types
from collections.abc import Callable, Hashable
from typing import Any, Final, Literal, Protocol, TypeAlias, Union, get_args, get_origin

from alkstore_sa.errors import InvalidPayload

INSTALL: Final = "pip install 'alkstore-sa[pydantic]'"

Fits: TypeAlias = Callable[[Any], bool]


class Argument(Protocol):
    """One parameter's way into JSON and back."""

    def stored(self, name: str, value: Any) -> Any:
        """Return what JSON can hold for `value`, or raise `InvalidPayload` naming the parameter."""
        ...

    def passed(self, name: str, value: Any) -> Any:
        """Return what the stored `value` stands for, or raise `InvalidPayload` naming the parameter."""
        ...


def argument_for(annotation: Any) -> Argument:
    """Choose the way for an annotation.

    Raises:
        TypeError: it needs pydantic, which is not installed, or which cannot make anything of it.
    """
    fits = _plain(annotation)
    return _Rich(annotation) if fits is None else _Plain(annotation, fits)


class _Plain:
    """A value that JSON gives back as it was."""

    __slots__ = ("_annotation", "_fits")

    def __init__(self, annotation: Any, fits: Fits) -> None:
        self._annotation = annotation
        self._fits = fits

    def stored(self, name: str, value: Any) -> Any:
        if not self._fits(value):
            raise InvalidPayload(f"argument {name!r} is of type {type(value).__name__}, not {_shown(self._annotation)}")
        return value

    passed = stored


class _Rich:
    """A value that pydantic turns into JSON and back."""

    __slots__ = ("_adapter", "_annotation")

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        try:
            from pydantic import TypeAdapter  # noqa: PLC0415 - an extra, which plain types do without
            from pydantic.errors import PydanticUserError  # noqa: PLC0415
        except ImportError as error:
            raise TypeError(f"arguments annotated {_shown(annotation)} need pydantic: {INSTALL}") from error
        try:
            self._adapter = TypeAdapter(annotation)
        except (PydanticUserError, TypeError, NameError) as error:
            raise TypeError(f"{_shown(annotation)} is no annotation that pydantic can store: {error}") from error

    def stored(self, name: str, value: Any) -> Any:
        try:
            stored = self._adapter.dump_python(value, mode="json", warnings="error")
            back = self._adapter.validate_python(stored)
        except ValueError as error:
            raise InvalidPayload(
                f"argument {name!r} of type {type(value).__name__} is no {_shown(self._annotation)}: {_said(error)}"
            ) from None
        if _comparable(value) and back != value:
            raise InvalidPayload(
                f"argument {name!r} of type {type(value).__name__} would not come back equal as {_shown(self._annotation)}"
            )
        return stored

    def passed(self, name: str, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except ValueError as error:
            raise InvalidPayload(f"argument {name!r} does not fit {_shown(self._annotation)}: {_said(error)}") from None


def _comparable(value: Any) -> bool:
    compare: object = type(value).__eq__
    return compare is not object.__eq__


def _said(error: ValueError) -> str:
    """Give what is wrong without the values, which belong in no log."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return type(error).__name__
    said = errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(str(step) for step in one['loc'])} {one['msg']}".strip() for one in said[:3])


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _plain(annotation: Any) -> Fits | None:
    """Give the check of an annotation that JSON serves by itself, or None."""
    if isinstance(annotation, Hashable) and annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, parameters = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _plain_literal(parameters)
    if origin in (Union, types.UnionType):
        return _plain_union(parameters)
    if origin is list:
        return _plain_list(_plain(parameters[0]))
    if origin is dict and parameters[0] is str:
        return _plain_dict(_plain(parameters[1]))
    return None


def _plain_literal(allowed: tuple[Any, ...]) -> Fits | None:
    if not all(type(one) in (str, int, bool, type(None)) for one in allowed):
        return None
    pairs = {(type(one), one) for one in allowed}
    return lambda value: type(value).__hash__ is not None and (type(value), value) in pairs


def _plain_union(members: tuple[Any, ...]) -> Fits | None:
    checks = [_plain(member) for member in members]
    known = [check for check in checks if check is not None]
    return (lambda value: any(check(value) for check in known)) if len(known) == len(checks) else None


def _plain_list(item: Fits | None) -> Fits | None:
    return None if item is None else lambda value: isinstance(value, list) and all(map(item, value))


def _plain_dict(item: Fits | None) -> Fits | None:
    return None if item is None else lambda value: isinstance(value, dict) and all(map(item, value.values()))


_PLAIN: Final[dict[Any, Fits]] = {
    Any: lambda _value: True,
    object: lambda _value: True,
    None: lambda value: value is None,
    type(None): lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int),
    float: lambda value: isinstance(value, (float, int)),
    str: lambda value: isinstance(value, str),
    list: lambda value: isinstance(value, list),
    dict: lambda value: isinstance(value, dict),
}
