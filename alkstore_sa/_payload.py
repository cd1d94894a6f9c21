"""Payloads as text: the codec's protocol, the JSON codec, and the rules that hold for every codec. Pure.

The column holds exactly what `encode` returned, on both databases, so that what was accepted comes back equal.
"""

import json
import math
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from alkstore_sa._names import is_storable_text
from alkstore_sa.errors import InvalidPayload, error_text

Payload: TypeAlias = Any  # whatever the store's codec can encode

DEEPEST_NESTING: Final = 200
LONGEST_TEXT: Final = 64 * 1024 * 1024  # bytes of UTF-8


class Codec(Protocol):
    """Turns payloads into text and back; the text is stored as it is."""

    def encode(self, payload: Payload, /) -> str:
        """Return the text of `payload`, or raise `InvalidPayload`."""
        ...

    def decode(self, text: str, /) -> Payload:
        """Return the payload that `encode` gave `text` for, or raise."""
        ...


class JsonCodec:
    """JSON for exactly those values that come back equal in value and type.

    Accepted are None, bool, int, finite float, str, list, and dict with str keys, of these very types.
    """

    def encode(self, payload: Payload, /) -> str:
        """Return the JSON text of `payload`.

        Raises:
            InvalidPayload: naming the place, for a NaN or an infinity, NUL or a lone surrogate in a text, any other
                type (subclasses of str, int and float too), a cycle or a nesting deeper than 200.
        """
        _refuse_unfaithful(payload, (), 0)
        try:
            return _ENCODER.encode(payload)
        except ValueError as error:  # an int of more digits than Python prints
            raise InvalidPayload(f"payload cannot be written as JSON: {error}") from error

    def decode(self, text: str, /) -> Payload:
        """Return the payload that `text` stands for; raises `InvalidPayload` where it is not JSON."""
        bare = text.strip(_BLANKS)  # the decoder's own search for them costs more than all else of a small payload
        try:
            payload, end = _DECODER.raw_decode(bare)
        except (ValueError, RecursionError) as error:
            raise InvalidPayload(f"stored payload is not JSON: {error}") from error
        if end != len(bare):
            raise InvalidPayload(f"stored payload is not JSON: it goes on behind character {end}")
        return payload


def encoded(codec: Codec, payload: Payload) -> str:
    """Return the codec's text of `payload`, checked against what every column of payloads can hold.

    Raises:
        InvalidPayload: from the codec, or because its text holds NUL or a lone surrogate, or is over 64 MiB.
    """
    text = codec.encode(payload)
    if type(text) is not str:
        raise InvalidPayload(f"the codec returned {type(text).__name__}, not str")
    if not is_storable_text(text):
        raise InvalidPayload("the codec returned a text with a NUL or a lone surrogate")
    if len(text) * 4 > LONGEST_TEXT and len(text.encode()) > LONGEST_TEXT:
        raise InvalidPayload(f"payload of {len(text.encode())} bytes is over {LONGEST_TEXT} bytes")
    return text


def decoded(codec: Codec, text: str) -> Payload:
    """Return the payload of the stored `text`.

    Raises:
        InvalidPayload: whatever the codec raised, by its text.
    """
    try:
        return codec.decode(text)
    except InvalidPayload:
        raise
    except Exception as error:
        raise InvalidPayload(f"stored payload cannot be decoded: {type(error).__name__}: {error_text(error)}") from error


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
_BLANKS: Final = " \t\n\r"
_ATOMS: Final = frozenset({bool, int, type(None)})

Place: TypeAlias = tuple[Any, ...]


def _refuse_unfaithful(value: Any, place: Place, depth: int) -> None:
    kind = type(value)
    if kind in _ATOMS:
        return
    if kind is str:
        if not is_storable_text(value):
            _refuse(place, "a text with a NUL or a lone surrogate")
    elif kind is float:
        if not math.isfinite(value):
            _refuse(place, f"the float {value}")
    elif kind is list or kind is dict:
        _refuse_unfaithful_within(value, place, depth)
    else:
        _refuse(place, f"a value of type {kind.__name__}, which JSON would not give back")


def _refuse_unfaithful_within(value: list[Any] | dict[Any, Any], place: Place, depth: int) -> None:
    if depth >= DEEPEST_NESTING:
        _refuse(place[:8], f"a nesting deeper than {DEEPEST_NESTING}, or a cycle")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unfaithful(item, (*place, index), depth + 1)
        return
    for key, item in value.items():
        if type(key) is not str:
            _refuse(place, f"a key of type {type(key).__name__}, not str")
        if not is_storable_text(key):
            _refuse(place, "a key with a NUL or a lone surrogate")
        _refuse_unfaithful(item, (*place, key), depth + 1)


def _refuse(place: Place, what: str) -> NoReturn:
    where = "payload" + "".join(f"[{step!r}]" for step in place)
    raise InvalidPayload(f"{where} is or holds {what}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)  # made once: `json.loads` with options makes one a call
