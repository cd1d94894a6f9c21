"""The other side: an HTTP server on loopback that takes messages, refuses some at first, and writes down what arrived."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, Final, Self, cast

from alkstore_sa.demo.books import Entry
from alkstore_sa.demo.orders import NUMBER_HEADER
from alkstore_sa.demo.payloads import fingerprint

LOOPBACK: Final = "127.0.0.1"
MESSAGE_HEADER: Final = "Alkstore-Message"
WORKER_HEADER: Final = "Alkstore-Worker"

_REFUSALS: Final = {0: 0.88, 1: 0.09, 2: 0.03}  # how often a message is refused before it is taken; 5 attempts bear the crash as well


class Receiver:
    """The server of one run, entered for as long as it is to listen.

    After `middle` different messages it calls `interrupt` once with the sender of the next one, which it has taken but not answered.
    """

    def __init__(self, seed: int, middle: int, interrupt: Callable[[str], None]) -> None:
        self._seed: Final = seed
        self._middle: int | None = middle
        self._interrupt: Final = interrupt
        self._lock: Final = threading.Lock()
        self._accepted: Final[list[Entry]] = []
        self._refused: Final[list[Entry]] = []
        self._taken: Final[set[int]] = set()
        self._refusals: Final[Counter[int]] = Counter()
        self._server: Final = _Server(self)
        self._thread: Final = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port on loopback."""
        return int(self._server.server_address[1])

    @property
    def delivered(self) -> int:
        """How many different messages were taken so far."""
        with self._lock:
            return len(self._taken)

    @property
    def arrivals(self) -> int:
        """How many requests came so far."""
        with self._lock:
            return len(self._accepted) + len(self._refused)

    @property
    def accepted(self) -> list[Entry]:
        """What was taken, an entry for each arrival."""
        with self._lock:
            return list(self._accepted)

    @property
    def refused(self) -> list[Entry]:
        """What was answered with 503, an entry for each arrival."""
        with self._lock:
            return list(self._refused)

    def take(self, headers: Mapping[str, str], body: bytes) -> HTTPStatus:
        """Write an arrival down and say how to answer it."""
        entry = Entry(int(headers[NUMBER_HEADER]), int(headers[MESSAGE_HEADER]), fingerprint(json.loads(body)))
        with self._lock:
            if self._refusals[entry.number] < refusals(self._seed, entry.number):
                self._refusals[entry.number] += 1
                self._refused.append(entry)
                return HTTPStatus.SERVICE_UNAVAILABLE
            interrupting = self._middle is not None and len(self._taken) >= self._middle
            if interrupting:
                self._middle = None
            self._accepted.append(entry)
            self._taken.add(entry.number)
        if interrupting:
            self._interrupt(headers[WORKER_HEADER])
        return HTTPStatus.OK


def refusals(seed: int, number: int) -> int:
    """Say how often the receiver refuses an order before it takes it."""
    return Random(f"refusals/{seed}/{number}").choices(list(_REFUSALS), list(_REFUSALS.values()))[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, receiver: Receiver) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.receiver: Final = receiver

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the sender was killed before the answer
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = cast(_Server, self.server).receiver.take(cast(Mapping[str, str], self.headers), body)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base's
        """Stay quiet."""
