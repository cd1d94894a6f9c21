"""How a loop outlives a database that is away: it warns, pauses for longer each time, and goes on."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from alkstore_sa.engines import is_read_only
from alkstore_sa.errors import AlkstoreError
from alkstore_sa.stop import StopToken

log: Final = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 15.0

_AWAY: Final = ("08", "53", "57", "58")  # connection, resources, operator, system
_CANCELED: Final = "57014"  # a statement that ran into its time limit


class Patience:
    """Counts a loop's failures in a row and sizes its pauses by them."""

    def __init__(self, stop: StopToken) -> None:
        self._stop = stop
        self._failures = 0

    @contextmanager
    def with_the_database(self) -> Iterator[None]:
        """Do one round of the loop; an error of the connection or the server ends the round with a pause, any other one passes."""
        try:
            yield
        except (DBAPIError, PoolTimeout) as error:
            if not isinstance(error, (OperationalError, InterfaceError, PoolTimeout)) and not is_read_only(error):
                raise
            self.outlast(error)
        else:
            self.recover()

    def outlast(self, error: Exception) -> None:
        """Warn of one more failure in a row, and pause."""
        self._stop.wait(self.failed(error))

    def failed(self, error: Exception) -> float:
        """Warn of one more failure in a row; give the seconds to pause for."""
        pause: float = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1)
        self._failures += 1
        what = str(error) if isinstance(error, AlkstoreError) else type(error).__name__  # ours name no secrets, and say what to do
        log.warning("the database did not answer (%s): going on in %.1f s", what, pause, extra={"failures": self._failures})
        return pause

    def recover(self) -> None:
        """Begin to count anew: a round of the loop went well."""
        self._failures = 0


def is_away(error: DBAPIError) -> bool:
    """Tell whether the connection, the server or the file is to blame rather than the statement or what it met."""
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    if is_read_only(error):
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is None:  # SQLite, or no connection at all
        return isinstance(error, OperationalError)
    return state[:2] in _AWAY and state != _CANCELED
