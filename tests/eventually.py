"""Waiting for a condition instead of sleeping."""

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
