"""The ground: curves, names, options, payloads, error texts. No database."""

import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore_sa import InvalidName, InvalidOption, InvalidPayload, ReservedName
from alkstore_sa._backoff import backoff
from alkstore_sa._names import checked_name, storable_name
from alkstore_sa._options import OUTBOX, PLAIN, header_text, not_negative, placement, positive
from alkstore_sa._payload import JsonCodec, decoded, encoded
from alkstore_sa.errors import ERROR_TEXT_LIMIT, error_text


def test_c01_the_curve_never_overflows():
    base = timedelta(seconds=1)
    early = [backoff(base, n).total_seconds() for n in (1, 2, 12, 13, 16, 17)]
    late = [backoff(base, n).total_seconds() for n in (18, 38, 47, 64, 1_024, 100_000)]

    assert early == [1, 2, 2_048, 4_096, 32_768, 65_536]
    assert late == [86_400] * 6


@given(st.timedeltas(timedelta(microseconds=1), timedelta(days=36_500)), st.integers(1, 40))
def test_the_curve_is_the_plain_formula_capped(base, attempts):
    microsecond = timedelta(microseconds=1)
    assert backoff(base, attempts) // microsecond == min((base // microsecond) * 2 ** (attempts - 1), 86_400_000_000)


BAD_NAMES = [None, 5, b"bytes", "", " ", "\t\n", "a" * 256, "nul\x00", "lone\ud800"]
GOOD_NAMES = ["a", "A" * 255, "with space", 'quo"te', "per%cent", "semi;--", "\U0001f600", "Été", "__alkstore", "_"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_bad_name_is_refused(name):
    with pytest.raises(InvalidName) as caught:
        checked_name("queue", name)
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, ReservedName)


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_any_other_text_is_a_name(name):
    assert checked_name("queue", name) == name


def test_the_engines_prefix_is_reserved_but_storable():
    with pytest.raises(ReservedName):
        checked_name("queue", "__alkstore_x")
    assert storable_name("queue", "__alkstore_x") == "__alkstore_x"


@given(st.text(max_size=300))
def test_a_name_is_accepted_exactly_when_the_rules_say_so(name):
    legal = (
        1 <= len(name) <= 255
        and not name.isspace()
        and "\x00" not in name
        and not any("\ud800" <= c <= "\udfff" for c in name)
        and not name.startswith("__alkstore_")
    )
    try:
        checked_name("queue", name)
    except InvalidName:
        assert not legal
    else:
        assert legal


@pytest.mark.parametrize(
    "value",
    [True, "5", None, math.nan, math.inf, -math.inf, -1, -0.1, timedelta(-1), timedelta(days=36_501), 1e300, 10**400, 36_500 * 86_400 + 1],
    ids=repr,
)
def test_a_duration_out_of_its_range_is_refused(value):
    with pytest.raises(InvalidOption):
        not_negative("delay", value)


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0), 1e-9])
def test_a_length_of_nothing_is_refused_where_it_must_be_positive(value):
    assert not not_negative("delay", value)
    with pytest.raises(InvalidOption):
        positive("ttl", value)


def test_seconds_and_timedeltas_are_the_same_duration():
    assert not_negative("delay", 1.5) == not_negative("delay", timedelta(milliseconds=1500)) == timedelta(seconds=1.5)
    assert not_negative("delay", timedelta(days=36_500)) == timedelta(days=36_500)


BAD_OPTIONS = [
    {"priority": 2**15},
    {"priority": -(2**15) - 1},
    {"priority": True},
    {"priority": 1.0},
    {"max_attempts": 0},
    {"max_attempts": 32_768},
    {"max_attempts": True},
    {"delay": -1},
    {"delay": math.nan},
    {"delay": True},
    {"expires": -1},
    {"expires": math.inf},
    {"delay": 10, "expires": 5},
    {"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)},
    {"run_at": datetime(2030, 1, 1)},
    {"run_at": "2030-01-01"},
    {"headers": {"a": 1}},
    {"headers": {1: "a"}},
    {"headers": [("a", "b")]},
    {"headers": {"a": "x\x00"}},
    {"headers": {"a": "\ud800"}},
    {"headers": {"a": "x" * 8192}},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=repr)
def test_a_bad_option_is_refused(options):
    with pytest.raises(InvalidOption):
        placement(PLAIN, **options)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError):
        placement(PLAIN, colour="red")


def test_max_attempts_of_the_call_comes_before_the_handles():
    handle = PLAIN.overridden(max_attempts=7)
    assert placement(handle).values["job_max_attempts"] == 7
    assert placement(handle, max_attempts=2).values["job_max_attempts"] == 2
    assert (OUTBOX.visibility_timeout.seconds, OUTBOX.max_attempts, OUTBOX.base_backoff.seconds) == (60, 5, 5)
    assert (PLAIN.visibility_timeout.seconds, PLAIN.max_attempts, PLAIN.base_backoff.seconds) == (300, 3, 5)


def test_empty_headers_are_none_and_full_ones_are_json():
    assert header_text({}) is None
    assert json.loads(header_text({"ä": "%"})) == {"ä": "%"}


class Sub(str):
    __slots__ = ()


CYCLE = []
CYCLE.append(CYCLE)
DEEP = None
for _ in range(201):
    DEEP = [DEEP]

BAD_PAYLOADS = [
    {"a": "x\x00"},
    {"\x00": 1},
    {"a": "\ud800"},
    {"\udfff": 1},
    [[[math.nan]]],
    math.inf,
    -math.inf,
    b"bytes",
    {1},
    datetime(2030, 1, 1, tzinfo=UTC),
    CYCLE,
    DEEP,
    (1, 2),
    {1: 2},
    {None: 2},
    Sub("x"),
    [True, {"k": Sub("x")}],
    {Sub("k"): 1},
    10**5000,
    object(),
]


@pytest.mark.parametrize("payload", BAD_PAYLOADS, ids=[str(n) for n in range(len(BAD_PAYLOADS))])
def test_a_payload_that_would_not_come_back_is_refused(payload):
    with pytest.raises(InvalidPayload) as caught:
        encoded(JsonCodec(), payload)
    assert isinstance(caught.value, ValueError)


def test_the_refusal_names_the_place():
    with pytest.raises(InvalidPayload, match=r"payload\['a'\]\[1\]\['b'\]"):
        encoded(JsonCodec(), {"a": [1, {"b": math.nan}]})


def test_text_over_64_mib_is_refused():
    with pytest.raises(InvalidPayload, match="67108864"):
        encoded(JsonCodec(), "x" * (64 * 1024 * 1024))
    with pytest.raises(InvalidPayload):
        encoded(JsonCodec(), "\U0001f600" * (16 * 1024 * 1024))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and a == b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@given(JSON_VALUES)
def test_what_is_accepted_comes_back_equal_in_value_and_type(payload):
    assert same(decoded(JsonCodec(), encoded(JsonCodec(), payload)), payload)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "nul", "[" * 100_000])
def test_a_damaged_text_is_an_invalid_payload(text):
    with pytest.raises(InvalidPayload):
        decoded(JsonCodec(), text)


def test_any_codecs_failure_to_decode_is_an_invalid_payload_and_its_text_is_checked():
    class Broken:
        def __init__(self, text):
            self.text = text

        def encode(self, payload):
            return self.text

        def decode(self, text):
            raise KeyError("k")

    with pytest.raises(InvalidPayload, match="KeyError"):
        decoded(Broken(""), "x")
    for text in (b"x", None, "\x00", "\ud800"):
        with pytest.raises(InvalidPayload):
            encoded(Broken(text), 1)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def test_recording_an_error_cannot_fail_by_its_content():
    assert error_text(Unprintable()) == "Unprintable"
    assert error_text(ValueError()) == "ValueError"
    assert error_text("a\x00b\ud800c").isprintable() is True
    assert "\x00" not in error_text("a\x00b") and error_text("a\ud800").encode()


@given(st.text(max_size=50), st.text(min_size=0, max_size=30_000))
def test_a_long_error_keeps_its_first_line_and_its_tail(first, rest):
    text = error_text(f"{first}\n{rest}".encode("utf-8", "replace").decode())
    whole = f"{first}\n{rest}".encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    assert len(text) <= ERROR_TEXT_LIMIT
    assert text.split("\n", 1)[0] == whole.split("\n", 1)[0][: ERROR_TEXT_LIMIT // 2] or len(whole) <= ERROR_TEXT_LIMIT
    assert text.endswith(whole[-100:])
