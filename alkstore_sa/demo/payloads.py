"""What the demo delivers: payloads read from a file, or made up."""

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Final

from alkstore_sa._payload import JsonCodec, Payload, encoded
from alkstore_sa.errors import InvalidOption, InvalidPayload

_LINES_NAMED: Final = 5  # of the bad lines of a file

_CODEC: Final = JsonCodec()

_CORNERS: Final[tuple[Payload, ...]] = (
    {},
    [],
    "",
    None,
    False,
    0,
    -0.0,
    1e16,
    2**70,
    5e-324,
    {"": {"": [[], {}, [{}]]}},
    {"quotes": "\"'`\\", "lines": "one\ntwo\r\n\tthree\u2028four", "sql": "'); DROP TABLE demo_order; --", "percent": "100 %s %(x)s"},
    {"grüße": "Ærøskøbing", "日本語": "東京都", "עברית": "שלום", "emoji": "👩\u200d🚀🏳️\u200d🌈", "combining": "e\u0301"},
    "x" * 20_000,
)


def invented(count: int, seed: int) -> list[Payload]:
    """Make up `count` payloads: corner cases first, then orders of all sizes; the same for the same seed."""
    chance = Random(f"payloads/{seed}")
    return [_CORNERS[number] if number < len(_CORNERS) else _order(number, chance) for number in range(count)]


def _order(number: int, chance: Random) -> Payload:
    lines = [
        {
            "sku": f"{chance.choice('ABÇД東')}-{chance.getrandbits(32):08x}",
            "quantity": chance.randint(1, 99),
            "price": chance.random() * 100,
        }
        for _ in range(chance.randint(0, 12))
    ]
    customer = {"name": chance.choice(("Łukasz", "Zoë", "O'Brien", "刘伟", "Анна")), "vip": chance.random() < 0.1, "email": None}
    return {"order": number, "customer": customer, "lines": lines, "note": "…" * chance.randint(0, 200)}


def read(path: Path) -> list[Payload]:
    r"""Read a payload from each line of a UTF-8 file; a line ends at "\n" alone, and blank lines are skipped.

    Raises:
        InvalidPayload: naming the lines (the first is 1) that hold no JSON, or a JSON that the codec refuses.
        InvalidOption: no line holds a payload.
    """
    payloads: list[Payload] = []
    wrong: list[str] = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            payloads.append(_parsed(line))
        except InvalidPayload as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - _LINES_NAMED} more lines" if len(wrong) > _LINES_NAMED else ""
        raise InvalidPayload(f"{path}: {'; '.join(wrong[:_LINES_NAMED])}{more}; nothing was written")
    if not payloads:
        raise InvalidOption(f"{path}: no line holds a payload; nothing was written")
    return payloads


def _parsed(line: bytes) -> Payload:
    try:
        payload = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise InvalidPayload(f"no JSON ({error.msg}, at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"no JSON ({error})") from error
    encoded(_CODEC, payload)
    return payload


def fingerprint(payload: Payload) -> str:
    """Give a text that two payloads share if they are equal in value and type, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()
