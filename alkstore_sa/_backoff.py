"""The retry curve. Pure: attempt in, delay out."""

from datetime import timedelta
from typing import Final

LONGEST_BACKOFF: Final = timedelta(hours=24)


def backoff(base: timedelta, attempts: int) -> timedelta:
    """Give the delay after the `attempts`-th attempt failed: `base * 2 ** (attempts - 1)`, at most 24 hours.

    No jitter, and no overflow for any number: the exponent is capped before the power is taken.
    """
    if base >= LONGEST_BACKOFF:
        return LONGEST_BACKOFF
    most_doublings = (LONGEST_BACKOFF // base).bit_length()
    doublings = min(max(attempts - 1, 0), most_doublings)
    return min(base * (1 << doublings), LONGEST_BACKOFF)
