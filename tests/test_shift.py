"""What a worker decides to do next, told the facts: no clock, no database, no thread."""

from dataclasses import replace

import pytest

from alkstore_sa._shift import Ask, Leave, Load, Rest, Round, Shift

NOTHING = Load({}, 0, None, None)


def idle(shift, now=100.0, until=5.0):
    """A shift whose queues came up empty at `now`, with nothing to come before `until` seconds have passed."""
    step = shift.next_step(now, NOTHING)
    for ask in step.asks:
        if ask.promote:
            shift.promoted(ask.queue, now, 0.001)
        shift.claimed(ask.queue, ask.limit, 0)
        assert shift.wants_look(ask.queue, now)
        shift.looked(ask.queue, now, 0.001, until, ready=False)
    return shift


def test_a_new_worker_promotes_and_claims_for_all_its_slots():
    assert Shift(["q"], 4).next_step(0.0, NOTHING) == Round((Ask("q", 4, promote=True),), 4)


def test_an_empty_queue_is_left_alone_until_its_next_deadline():
    shift = idle(Shift(["q"], 4))

    assert shift.next_step(100.1, NOTHING) == Rest(105.0)
    assert shift.next_step(105.0, NOTHING) == Round((Ask("q", 4, promote=True),), 4)


def test_a_wake_is_followed_by_a_claim_without_a_promotion():
    shift = idle(Shift(["q"], 4))
    shift.rang("q")

    assert shift.next_step(100.1, NOTHING) == Round((Ask("q", 4, promote=False),), 4)


def test_a_ready_row_that_somebody_has_locked_is_looked_at_again_soon():
    shift = idle(Shift(["q"], 4))
    shift.looked("q", 101.0, 0.001, 5.0, ready=True)

    assert shift.next_step(101.0, NOTHING) == Rest(pytest.approx(101.1))


def test_a_draining_worker_promotes_every_quarter_of_a_second_or_on_a_duty():
    shift = Shift(["q"], 4)
    for cost, pause in ((0.001, 0.25), (0.02, 0.4), (0.5, 1.0)):
        shift.promoted("q", 10.0, cost)
        assert not shift.next_step(10.0 + pause - 0.01, NOTHING).asks[0].promote
        assert shift.next_step(10.0 + pause + 0.01, NOTHING).asks[0].promote


def test_a_dear_look_for_the_next_deadline_is_put_off():
    shift = idle(Shift(["q"], 4))
    shift.looked("q", 100.0, 0.02, 5.0, ready=False)
    shift.claimed("q", 4, 1)

    assert not shift.wants_look("q", 100.1)
    assert shift.next_step(100.1, NOTHING) == Rest(pytest.approx(100.4))
    assert shift.wants_look("q", 100.4)


def test_free_slots_wait_a_moment_for_others_so_that_one_claim_fills_them():
    shift = Shift(["q"], 10)
    load = Load({"q": 9}, 1, 50.0, 50.0)

    assert shift.next_step(50.0, load) == Rest(pytest.approx(50.002))
    assert shift.next_step(50.003, load) == Round((Ask("q", 1, promote=True),), 1)
    assert isinstance(shift.next_step(50.0, replace(load, busy={"q": 5}, finished=5)), Round)
    assert isinstance(shift.next_step(50.0, replace(load, busy={}, finished=10)), Round)


def test_acks_alone_wait_for_company_at_most_20_ms_and_never_across_a_pause():
    shift = idle(Shift(["q"], 10), until=50.0)
    load = Load({"q": 5}, 3, 101.0, 101.0)

    assert shift.next_step(101.0, load) == Rest(pytest.approx(101.02))
    assert shift.next_step(101.021, load) == Round((), 5)
    assert shift.next_step(101.0, replace(load, finished=100)) == Round((), 5)
    assert shift.next_step(101.0, replace(load, busy={})) == Round((), 10)


def test_queues_take_turns_and_share_the_slots():
    shift = Shift(["a", "b", "c"], 4, {"b": 2})
    firsts = []
    for _ in range(4):
        step = shift.next_step(0.0, Load({"b": 1}, 0, None, None))
        firsts.append(step.asks[0].queue)
        assert step.free == 3
        assert {ask.queue: ask.limit for ask in step.asks} == {"a": 3, "b": 1, "c": 3}
    assert firsts == ["a", "b", "c", "a"]


def test_a_claim_that_could_ask_for_nothing_says_nothing_about_its_queue():
    shift = idle(Shift(["a", "b"], 4))
    shift.rang("b")
    shift.claimed("b", 0, 0)

    assert [ask.queue for ask in shift.next_step(100.1, NOTHING).asks] == ["b"]


def test_without_a_free_slot_nothing_is_claimed_and_deadlines_wake_nobody():
    shift = idle(Shift(["q"], 2))
    full = Load({"q": 2}, 0, None, None)

    assert shift.next_step(106.0, full) == Rest(float("inf"))


def test_a_closed_shift_settles_what_it_has_and_leaves():
    shift = Shift(["q"], 4)
    shift.close()

    assert shift.next_step(0.0, Load({"q": 1}, 0, None, None)) == Rest(float("inf"))
    assert shift.next_step(0.0, Load({}, 1, 0.0, 0.0)) == Round((), 4)
    assert shift.next_step(0.0, NOTHING) == Leave()


def test_a_worker_for_so_many_jobs_claims_no_more_and_leaves():
    shift = Shift(["a", "b"], 10, {}, 5)
    step = shift.next_step(0.0, NOTHING)
    assert (step.free, [ask.limit for ask in step.asks]) == (5, [5, 5])
    shift.claimed("a", 5, 3)
    shift.claimed("b", 2, 2)

    assert shift.next_step(0.0, Load({"a": 1}, 0, None, None)) == Rest(float("inf"))
    assert shift.next_step(0.0, NOTHING) == Leave()
