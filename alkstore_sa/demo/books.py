"""The books: what was written, what arrived, and whether the two agree. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_NUMBERS_NAMED: Final = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """An order and its message as they belong together: its number, the message's id, the payload's fingerprint."""

    number: int
    message_id: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Books:
    """Everything that one run of the demo wrote and saw.

    An order is known by its number, not by its message's id: SQLite gives the id of a rolled-back row to the next one.
    """

    committed: Sequence[Entry]
    rolled_back: Sequence[Entry]
    accepted: Sequence[Entry]  # an entry for each arrival that was answered with success, or whose sender died before the answer
    refused: Sequence[Entry]
    rows: Sequence[Entry]  # the business table at the end
    dead: int
    left: int  # messages that are still in the outbox

    def totals(self) -> Mapping[str, int]:
        """Count what the final table shows."""
        accepted = Counter(entry.number for entry in self.accepted)
        return {
            "committed": len(self.committed),
            "rolled back": len(self.rolled_back),
            "delivered": len(accepted),
            "delivered more than once": sum(times > 1 for times in accepted.values()),
            "retried": len({entry.number for entry in self.refused}),
            "dead": self.dead,
        }

    def imbalances(self) -> list[str]:
        """Say in a sentence each what does not agree; nothing where the books balance."""
        committed = {entry.number: entry for entry in self.committed}
        accepted = {entry.number for entry in self.accepted}
        arrived = (*self.accepted, *self.refused)
        known = [entry for entry in arrived if entry.number in committed]
        findings = {
            "committed, but never arrived": committed.keys() - accepted,
            "not committed, but arrived": {entry.number for entry in arrived} - committed.keys(),
            "arrived with another payload": _differing(known, committed, "fingerprint"),
            "arrived under another message id": _differing(known, committed, "message_id"),
            "committed, but without its row": committed.keys() - {row.number for row in self.rows},
            "not committed, but with a row": {row.number for row in self.rows} - committed.keys(),
            "with another row than was written": {row.number for row in self.rows if committed.get(row.number, row) != row},
        }
        sentences = [f"{_orders(numbers)} {finding}" for finding, numbers in findings.items() if numbers]
        if self.left:
            sentences.append(f"{self.left} messages are still in the outbox")
        return sentences


def _differing(arrived: Iterable[Entry], committed: Mapping[int, Entry], what: str) -> set[int]:
    return {entry.number for entry in arrived if getattr(entry, what) != getattr(committed[entry.number], what)}


def _orders(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    named = ", ".join(map(str, ordered[:_NUMBERS_NAMED]))
    return f"{len(ordered)} orders ({named}{', …' if len(ordered) > _NUMBERS_NAMED else ''})"
