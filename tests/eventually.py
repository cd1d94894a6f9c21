"""Waiting for a condition instead of sleeping, and measuring on a machine that may stand still."""

import contextlib
import threading
import time


def eventually(condition, within=20.0, every=0.01):
    """Return the first true answer of `condition`, asked again and again; fail after `within` seconds."""
    end = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < end, "the condition never held"
        time.sleep(every)


@contextlib.contextmanager
def stopwatch():
    """Give a function for the seconds until now, without those for which this whole process stood still: a thread that ticks tells of them."""
    began = last = time.monotonic()
    stalled = 0.0
    reading, over = threading.Lock(), threading.Event()

    def read():
        nonlocal last, stalled
        with reading:
            now = time.monotonic()
            stalled += max(0.0, now - last - 0.1)
            last = now
            return now - began - stalled

    def tick():
        while not over.wait(0.01):
            read()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield read
    finally:
        over.set()
        thread.join()
