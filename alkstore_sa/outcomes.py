"""What a handler raises to say what becomes of its job. Any other exception means: again, after the curve. Pure."""

from typing import Final

from alkstore_sa._options import Duration, not_negative


class Retry(Exception):
    """Run the job again after `delay` (default: the curve); the attempt counts, and with the last one the job is dead.

    The stored error is `reason`, else the text of the exception that this one is raised `from`.
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, delay: Duration | None = None) -> None:
        super().__init__(reason)
        self.reason: Final = reason
        self.delay: Final = None if delay is None else not_negative("delay", delay)


class Snooze(Exception):
    """Run the job again after `delay`; the attempt does not count, so that a job may look for something as often as it likes."""

    def __init__(self, delay: Duration) -> None:
        super().__init__(f"snoozed for {delay}")
        self.delay: Final = not_negative("delay", delay)


class Fail(Exception):
    """Send the job to the dead at once, with `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason: Final = reason
