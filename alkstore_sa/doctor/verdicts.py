"""What a check says."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Verdict:
    """One line: what was looked at, how it is, and what to do about it (empty where nothing is to be done)."""

    check: str
    level: Level
    finding: str
    advice: str = ""


PROBLEM_FACTOR: Final = 12  # from a warning to a problem: from 5 minutes to an hour


@dataclass(frozen=True)
class Limits:
    """From where on something is worth a warning; twelve times as much is a problem."""

    transaction: timedelta = timedelta(minutes=5)
    waiting: timedelta = timedelta(minutes=5)
    held_back: int = 1_000_000  # transactions: five minutes of a server that commits 3,000 a second

    @staticmethod
    def level(found: timedelta, limit: timedelta) -> Level:
        """Weigh a length of time against its limit."""
        if found < limit:
            return Level.OK
        return Level.WARNING if found < limit * PROBLEM_FACTOR else Level.PROBLEM
