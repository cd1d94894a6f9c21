"""The token that stops a loop: for threads, event loops and signal handlers, once and for good."""

import asyncio
import gc
import os
import signal
import threading
import warnings

from alkstore_sa import StopToken


def test_a_cancelled_token_ends_every_wait_now_and_later():
    stop = StopToken()
    assert not stop.wait(0.01)
    waiters = [threading.Thread(target=stop.wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    stop.cancel()
    stop.cancel()
    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()
    assert stop.cancelled
    assert stop.wait()


def test_many_tasks_of_one_loop_wait_for_one_token():
    async def wait():
        stop = StopToken()
        assert not await stop.wait_async(0.01)
        waits = [asyncio.create_task(stop.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Thread(target=stop.cancel).start()
        assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [True, True, True]
        assert await stop.wait_async()

    asyncio.run(wait())


def test_a_signal_cancels_a_token_on_which_its_own_thread_waits():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        stop = StopToken().on_signals(signal.SIGUSR1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert stop.wait(30)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_token_that_is_dropped_in_a_cycle_leaves_no_socket_open():
    class Owner:
        pass

    gc.collect()
    token = StopToken()
    held = token._latch._pair[0]  # so that the collector's list has the socket before its latch
    owner = Owner()
    owner.token, owner.itself = token, owner
    del token
    gc.collect()
    del held, owner
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gc.collect()

    assert not [str(warning.message) for warning in told]
