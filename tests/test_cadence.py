"""The grammar of specs, and the boundary maths against a reference that walks boundary by boundary."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore_sa import InvalidSpec
from alkstore_sa._cadence import Due, Skip, boundaries_due, checked_interval, crosses, parsed_interval, shift_of

SECOND = 1_000_000
LONGEST = 36_500 * 86_400 * SECOND


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ("@every 1s", 1),
        ("@every 90m", 5_400),
        ("@every 36h", 129_600),
        ("@every 7d", 604_800),
        ("@every   5s", 5),
        ("@every 007s", 7),
        ("@every 36500d", 36_500 * 86_400),
        ("@every 3153600000s", 36_500 * 86_400),
    ],
)
def test_c02_a_spec_of_the_grammar_has_its_interval(spec, seconds):
    assert parsed_interval(spec) == seconds * SECOND


REFUSED = [
    "",
    "every 5s",
    "@every",
    "@every s",
    "@every 10",
    "@every 0s",
    "@every 000m",
    "@every -5m",
    "@every +5m",
    "@every 1.5h",
    "@every 1_000s",
    "@every 1h30m",
    "@every 5w",
    "@every 5s\n",
    "\n@every 5s",
    "@every 5s ",
    " @every 5s",
    "@every\t5s",
    "@every5s",
    "@every 5S",
    "@EVERY 5s",
    "@every 5 s",
    "@every 5ms",
    "@every \uff15s",
    "@every \u0665s",
    "@every 3650000d",
    "@every 36501d",
    "@every 3153600001s",
    "@every 99999999999999999999s",
    "*/5 * * * *",
    "0 0 * * *",
    "@daily",
    "@every 5s; DROP TABLE alkstore_job",
    None,
    5,
    True,
    b"@every 5s",
    ["@every 5s"],
]


@pytest.mark.parametrize("spec", REFUSED, ids=repr)
def test_c02_everything_else_is_refused_with_what_was_expected(spec):
    with pytest.raises(ValueError, match=r"@every <n><unit>|out of range") as raised:
        parsed_interval(spec)
    assert isinstance(raised.value, InvalidSpec)


def test_a_stored_interval_that_does_not_go_with_its_spec_is_refused():
    assert checked_interval("@every 1m", 60 * SECOND) == 60 * SECOND
    with pytest.raises(InvalidSpec, match="register it again"):
        checked_interval("@every 1m", 61 * SECOND)


@pytest.mark.parametrize(
    ("late", "fired", "skipped", "following"),
    [(1_000, 64, 37, 1_010), (635, 64, 0, 640), (645, 64, 1, 650), (-5, 0, 0, 0), (0, 1, 0, 10), (5, 1, 0, 10), (1_003, 64, 37, 1_010)],
)
def test_c03_c04_the_cap_and_its_edges(late, fired, skipped, following):
    due = boundaries_due(0, 10 * SECOND, late * SECOND)
    assert (len(due.fires), due.skipped, due.already, due.next_boundary) == (fired, skipped, 0, following * SECOND)
    assert list(due.fires) == [n * 10 * SECOND for n in range(fired)]


def slow(first, interval, now, recorded, most):
    """The reference: one boundary after the other."""
    fires, skips, already, boundary = [], [], 0, first
    open_range = False
    while boundary <= now:
        if any(start <= boundary <= through for start, through in recorded):
            already += 1
            open_range = False
        elif len(fires) < most:
            fires.append(boundary)
        elif open_range:
            skips[-1] = Skip(skips[-1].first, boundary, skips[-1].count + 1)
        else:
            skips.append(Skip(boundary, boundary, 1))
            open_range = True
        boundary += interval
    return Due(tuple(fires), tuple(skips), already, boundary)


intervals = st.one_of(
    st.sampled_from([1, 2, 60, 3_600, 86_400, 36_500 * 86_400]).map(lambda seconds: seconds * SECOND),
    st.integers(1, 36_500 * 86_400).map(lambda seconds: seconds * SECOND),
)


@st.composite
def situations(draw, longest=400):
    interval = draw(intervals)
    first = draw(st.integers(-(10**15), 4 * 10**15))
    now = first + draw(st.integers(-3, longest)) * interval + draw(st.integers(0, interval - 1))
    ranges = st.tuples(st.integers(-5 * interval, (longest + 5) * interval), st.integers(0, 50 * interval))
    recorded = [(first + start, first + start + length) for start, length in draw(st.lists(ranges, max_size=6))]
    on_grid = st.tuples(st.integers(-5, longest), st.integers(0, 50))
    recorded += [(first + k * interval, first + (k + n) * interval) for k, n in draw(st.lists(on_grid, max_size=6))]
    return first, interval, now, recorded


@given(situations(), st.sampled_from([0, 1, 3, 64]))
def test_the_boundaries_are_those_of_the_slow_walk(situation, most):
    first, interval, now, recorded = situation
    assert boundaries_due(first, interval, now, recorded, most) == slow(first, interval, now, recorded, most)


@given(intervals, st.integers(0, LONGEST * 100), st.integers(-(10**15), 4 * 10**15))
def test_a_gap_of_any_length_is_accounted_for_and_leaves_the_grid_alone(interval, gap, first):
    now = first + gap
    due = boundaries_due(first, interval, now)
    count = gap // interval + 1
    assert len(due.fires) + due.skipped == count
    assert len(due.fires) == min(count, 64)
    assert now < due.next_boundary <= now + interval
    assert (due.next_boundary - first) % interval == 0


@given(situations())
def test_what_was_recorded_is_never_fired_or_skipped_again(situation):
    first, interval, now, recorded = situation
    due = boundaries_due(first, interval, now, recorded)
    written = recorded + [(fire, fire) for fire in due.fires] + [(skip.first, skip.through) for skip in due.skips]
    again = boundaries_due(first, interval, now, written)
    assert (again.fires, again.skips, again.next_boundary) == ((), (), due.next_boundary)
    assert again.already == len(due.fires) + due.skipped + due.already


def test_a_second_that_slept_for_a_century_costs_no_walk():
    due = boundaries_due(0, SECOND, LONGEST)
    assert (len(due.fires), due.skips) == (64, (Skip(64 * SECOND, LONGEST, LONGEST // SECOND - 63),))


@given(intervals, st.integers(0, 10**16), st.integers(1, 200))
def test_every_fiftieth_boundary_crosses_and_seldom_ones_cross_daily_or_always(interval, first, boundaries):
    number = first // interval
    often = max(1, min(50, 86_400 * SECOND // interval))
    expected = any(k % often == 0 for k in range(number + 1, number + boundaries + 1))
    assert crosses(first, first + boundaries * interval, interval, 50) == expected


@pytest.mark.parametrize("interval", [SECOND, 10 * SECOND, 1_800 * SECOND])
def test_schedules_that_stand_on_one_grid_cross_once_in_fifty_and_seldom_together(interval):
    names = [f"tenant-{n}" for n in range(1_000)]
    often = min(50, 86_400 * SECOND // interval)
    first = 1_800_000_000 * SECOND
    crossings = [
        (name, n)
        for name in names
        for n in range(often)
        if crosses(first + n * interval, first + (n + 1) * interval, interval, 50, shift_of(name))
    ]
    assert sorted(name for name, _ in crossings) == sorted(names)
    assert max(Counter(n for _, n in crossings).values()) < 50
