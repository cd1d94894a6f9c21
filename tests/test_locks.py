"""Locks: leases that end by themselves, fenced by a token that only rises."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from conftest import EVERY_DATABASE
from scheduling import age, wait_until
from sqlalchemy import text

from alkstore_sa import InvalidName, InvalidOption, LeaseLost, LockHeld, ReservedName, StopToken, Store, StoreClosed

everywhere = pytest.mark.databases(*EVERY_DATABASE)


def run_out(database, name):
    database.sql(f"UPDATE alkstore_lock SET expires_at = {database.now(-0.001)} WHERE name = :name", name=name)


def test_c12_leases_belong_to_a_token(database, store):
    a = store.try_lock("nightly", 2)
    time.sleep(3)
    b = store.try_lock("nightly", 60)
    assert (a.renew(), a.release(), store.try_lock("nightly", 60)) == (False, False, None)
    assert b.held
    assert b.token > a.token
    age(database, 30, ["alkstore_lock"])
    assert b.renew()
    age(database, 30, ["alkstore_lock"])
    assert b.renew()
    age(database, 30, ["alkstore_lock"])
    assert store.try_lock("nightly", 60) is None
    assert [info.token for info in store.locks()] == [b.token]
    assert b.release()
    assert store.try_lock("nightly", 60).token > b.token


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), True, "2", None])
def test_c12_a_time_to_live_that_is_none_is_refused(store, ttl):
    with pytest.raises(InvalidOption) as raised:
        store.try_lock("nightly", ttl)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(InvalidOption):
        store.lock("nightly", ttl)
    assert store.locks() == []


def test_c12_names_that_look_alike_are_different_locks(store):
    long = "x" * 190
    names = ["Nightly", "nightly", long + "a" * 10, long + "b" * 10]
    assert all(store.try_lock(name) for name in names)
    assert sorted(info.name for info in store.locks()) == sorted(names)


RACER = """
import sys, time
from alkstore_sa import Store
with Store(sys.argv[1]) as store:
    store.try_lock("warm-up", 0.001)
    print("ready", flush=True)
    for line in sys.stdin:
        name, instant = line.split()
        time.sleep(max(0, float(instant) - time.time()))
        print(int(store.try_lock(name, 60) is not None), flush=True)
"""


@pytest.mark.timeout(300)
def test_c12_of_twenty_that_acquire_a_new_name_at_once_one_wins(database):
    """Twenty processes that sleep until one instant, fifty rounds."""
    command = [sys.executable, "-c", RACER, database.url]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(20)]
    try:
        assert [racer.stdout.readline().strip() for racer in racers] == ["ready"] * 20
        for number in range(50):
            instant = time.time() + 0.03
            for racer in racers:
                racer.stdin.write(f"fresh-{number} {instant}\n")
                racer.stdin.flush()
            assert sum(int(racer.stdout.readline()) for racer in racers) == 1
    finally:
        for racer in racers:
            racer.communicate(timeout=20)


@everywhere
def test_the_token_rises_with_every_taking_for_ever(database, store):
    tokens = []
    for _ in range(3):
        lease = store.try_lock("n")
        tokens.append(lease.token)
        assert lease.release()
    for _ in range(2):
        tokens.append(store.try_lock("n").token)
        run_out(database, "n")
    assert tokens == [1, 2, 3, 4, 5]
    assert database.count("alkstore_lock") == 1


def test_an_explicit_owner_that_holds_gets_the_same_lease_unchanged(store):
    first = store.try_lock("n", 60, owner="me")
    again = store.try_lock("n", 600, owner="me")
    assert (again.token, again.expires_at) == (first.token, first.expires_at)
    assert store.try_lock("n", owner="you") is None
    assert again.release()
    assert not first.release()


def test_a_lease_that_was_found_is_held_here_no_longer_than_it_stands_there(store):
    store.try_lock("n", 3, owner="me")
    found = store.try_lock("n", 600, owner="me")
    time.sleep(3.1)
    assert not found.held


def test_an_owner_whose_lease_lapsed_gets_a_new_token(database, store):
    first = store.try_lock("n", owner="me")
    run_out(database, "n")
    assert store.try_lock("n", owner="me").token == first.token + 1
    assert not first.renew()
    assert first.lost.is_set()


def test_a_lapsed_lease_is_not_renewed_or_released_even_if_nobody_took_it(database, store):
    lease = store.try_lock("n")
    run_out(database, "n")
    assert (lease.renew(), lease.release(), lease.held) == (False, False, False)
    assert store.locks() == []


@pytest.mark.databases("postgresql-18")
@pytest.mark.parametrize("held", [False, True], ids=["free", "held until the wait ends"])
def test_a_lease_acquired_after_a_wait_for_the_row_has_its_full_time_and_a_higher_token(database, store, held):
    """The instants and the token come from after the wait for the row, not from when the statement was sent."""
    before = store.try_lock("n", 3 if held else 60)
    if not held:
        before.release()
    with database.engine().connect() as blocker:
        blocker.execute(text("SELECT 1 FROM alkstore_lock WHERE name = 'n' FOR UPDATE"))
        taken = []
        taker = threading.Thread(target=lambda: taken.append(store.try_lock("n", 2)))
        taker.start()
        time.sleep(4)
        assert not taken
        blocker.execute(text("UPDATE alkstore_lock SET token = token + 5"))
        waited_until = blocker.execute(text("SELECT clock_timestamp()")).scalar()
        blocker.commit()
        taker.join()
    assert taken[0].expires_at - waited_until >= timedelta(seconds=2)
    assert taken[0].token == before.token + 6


@pytest.mark.databases("postgresql-18")
def test_a_lease_that_lapses_while_its_renewal_waits_for_the_row_is_lost(database, store):
    lease = store.try_lock("n", 1)
    with database.engine().connect() as blocker:
        blocker.execute(text("SELECT 1 FROM alkstore_lock WHERE name = 'n' FOR UPDATE"))
        renewed = []
        renewer = threading.Thread(target=lambda: renewed.append(lease.renew()))
        renewer.start()
        time.sleep(1.5)
        blocker.rollback()
        renewer.join()
    assert renewed == [False]


def test_held_turns_false_by_the_local_clock_without_a_round_trip(store):
    lease = store.try_lock("n", 3)
    assert lease.held
    store.close()
    time.sleep(3.1)
    assert not lease.held


def test_a_lock_is_held_for_the_length_of_its_body(store):
    with store.lock("n") as lease:
        assert lease.held
        with pytest.raises(LockHeld) as raised, store.lock("n"):
            pytest.fail("two bodies at once")
        assert isinstance(raised.value, TimeoutError)
    assert not lease.held
    assert store.locks() == []


def test_a_lock_is_waited_for(store):
    lease = store.try_lock("n")
    threading.Timer(0.5, lease.release).start()
    with store.lock("n", wait=10) as mine:
        assert mine.token == lease.token + 1


def test_a_lock_that_stays_held_is_refused_after_the_wait(store):
    store.try_lock("n")
    began = time.monotonic()
    with pytest.raises(LockHeld), store.lock("n", wait=0.6):
        pytest.fail("held twice")
    assert time.monotonic() - began >= 0.6


def test_a_lock_that_is_kept_alive_outlives_its_time(store):
    with store.lock("n", 5, keep_alive=True) as lease:
        time.sleep(5.5)
        assert lease.held
        assert store.try_lock("n") is None
    assert store.try_lock("n")


def test_a_lock_that_is_not_kept_alive_is_lost_at_the_end_of_a_long_body(store):
    with pytest.raises(LeaseLost), store.lock("n", 0.3):
        time.sleep(0.5)


def test_the_loss_of_a_lease_that_is_kept_alive_is_told_and_raised_at_the_end(database, store):
    with pytest.raises(LeaseLost), store.lock("n", 1, keep_alive=True) as lease:
        database.sql(f"UPDATE alkstore_lock SET owner = 'thief', token = token + 1, expires_at = {database.now(60)}")
        assert lease.lost.wait(10)
        assert not lease.held
    assert [info.owner for info in store.locks()] == ["thief"]


def test_the_bodys_own_error_hides_the_loss(database, store):
    with pytest.raises(KeyError), store.lock("n") as lease:
        database.sql("UPDATE alkstore_lock SET owner = 'thief'")
        raise KeyError
    assert not lease.held


def test_a_body_may_release_early(store):
    with store.lock("n") as lease:
        assert lease.release()
        assert store.try_lock("n")


def test_a_body_may_release_early_though_its_lock_is_kept_alive(store):
    with store.lock("n", 3, keep_alive=True) as lease:
        assert lease.release()
        wait_until(lambda: not any(thread.name == "alkstore-lock-n" for thread in threading.enumerate()))
        assert (lease.renew(), lease.held, lease.lost.is_set()) == (False, False, False)
        with store.lock("n"):
            pass


def test_a_renewal_that_crosses_the_release_is_no_loss(store, monkeypatch):
    """The keeper finds the name freed before the answer to the release is here."""
    lease = store.try_lock("n")
    run_single = store._database.run_single

    def answered_late(verb, *arguments):
        answer = run_single(verb, *arguments)
        monkeypatch.undo()
        assert not lease.renew()
        return answer

    monkeypatch.setattr(store._database, "run_single", answered_late)
    assert lease.release()
    assert not lease.lost.is_set()


def test_keeping_alive_does_not_shorten_what_the_body_asked_for(store):
    with store.lock("n", 3, keep_alive=True) as lease:
        assert lease.renew(60)
        asked = lease.expires_at
        time.sleep(3)
        assert store.locks()[0].expires_at >= asked
        assert lease.renew(4)
        time.sleep(4.5)
        assert lease.held


def test_the_thread_that_keeps_a_lock_alive_ends_with_the_body(store):
    with store.lock("n", 60, keep_alive=True):
        assert any(thread.name == "alkstore-lock-n" for thread in threading.enumerate())
    assert not any(thread.name == "alkstore-lock-n" for thread in threading.enumerate())


def test_a_lease_whose_renewals_fail_is_told_lost_once_its_time_is_over(database, store):
    with pytest.raises(LeaseLost), store.lock("n", 1.5, keep_alive=True) as lease:
        database.sql("ALTER TABLE alkstore_lock RENAME TO hidden")
        told = lease.lost.wait(10)
        database.sql("ALTER TABLE hidden RENAME TO alkstore_lock")
        assert told


@pytest.mark.parametrize("name", ["__alkstore_scheduler", "__alkstore_x"])
def test_the_engines_own_names_are_refused(store, name):
    for call in (store.try_lock, store.lock):
        with pytest.raises(ReservedName):
            call(name)
    with pytest.raises(ReservedName):
        store.try_lock("n", owner=name)


@pytest.mark.parametrize("name", ["", " ", "\n", "a\x00b", "\ud800", "x" * 256, 5, None, b"n"])
def test_a_bad_name_is_refused_before_anything_is_sent(store, name):
    with pytest.raises(InvalidName):
        store.try_lock(name)
    if name is not None:
        with pytest.raises(InvalidName):
            store.try_lock("n", owner=name)
    assert store.locks() == []


@pytest.mark.parametrize("name", ['Été "Q"; --', "%s %(x)s :y", "🔒" * 255, "'; DROP TABLE alkstore_lock"])
def test_any_other_name_is_a_name(store, name):
    lease = store.try_lock(name, owner=name)
    assert (store.locks()[0].name, store.locks()[0].owner) == (name, name)
    assert lease.renew()
    assert lease.release()


@pytest.mark.parametrize("wait", [-1, float("nan"), True])
def test_a_bad_wait_is_refused(store, wait):
    with pytest.raises(InvalidOption):
        store.lock("n", wait=wait)


def test_the_token_guards_rows_of_ones_own(database, store):
    """What the page on locks tells an application to do."""
    database.sql("CREATE TABLE report (id INTEGER PRIMARY KEY, fence BIGINT NOT NULL, body TEXT)")
    database.sql("INSERT INTO report VALUES (1, 0, '')")
    guarded = "UPDATE report SET fence = :token, body = :body WHERE id = 1 AND fence <= :token RETURNING id"
    slow = store.try_lock("report")
    run_out(database, "report")
    quick = store.try_lock("report")
    assert database.sql(guarded, token=quick.token, body="new")
    assert not database.sql(guarded, token=slow.token, body="late")
    assert database.sql("SELECT body FROM report") == [("new",)]


def test_a_closed_store_refuses_locks(database):
    store = Store(database.engine())
    lease = store.try_lock("n")
    store.close()
    for call in (lambda: store.try_lock("n"), store.locks, lease.renew, lease.release, lambda: store.lock("n").__enter__()):
        with pytest.raises(StoreClosed):
            call()


def test_two_schemas_do_not_see_each_others_locks(database):
    if database.kind == "sqlite":
        pytest.skip("requires_schemas")
    from alkstore_sa import migrate

    for schema in ("one", "two"):
        migrate.upgrade(database.engine(), schema=schema)
    with database.store(schema="one") as one, database.store(schema="two") as two:
        assert one.try_lock("n")
        assert two.locks() == []
        assert two.try_lock("n")
        one.schedule("s", "@every 1h", "q")
        assert two.schedules() == []
        assert one.tick().next_fire_at is not None
        stop = StopToken()
        loops = [threading.Thread(target=each.run_schedules, args=(stop,)) for each in (one, two)]
        for loop in loops:
            loop.start()
        wait_until(lambda: len(one.locks()) == len(two.locks()) == 2)
        stop.cancel()
        for loop in loops:
            loop.join(20)
