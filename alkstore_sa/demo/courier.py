"""A delivery process: runs the outbox's loop and posts each message to the receiver, until its input ends.

`python -m alkstore_sa.demo.courier OUTBOX WORKER PORT`, with the database's URL in the environment, where `ps` does not show it.
"""

import json
import os
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Final

from alkstore_sa.demo.receiver import LOOPBACK, MESSAGE_HEADER, WORKER_HEADER
from alkstore_sa.handles import JobHandle
from alkstore_sa.stop import StopToken
from alkstore_sa.store import Store

URL_VARIABLE: Final = "ALKSTORE_DEMO_URL"
CLAIM_SECONDS: Final = 2.0  # instead of an outbox's 60 s, so that the message of a killed process comes again while one watches
RETRY_SECONDS: Final = 0.2  # likewise, instead of 5, 10, 20, 40 s
ANSWER_SECONDS: Final = 30.0


def main() -> None:
    """Deliver until standard input ends or a signal comes."""
    outbox, worker_id, port = sys.argv[1:]
    stop = StopToken().on_signals()
    threading.Thread(target=_cancel_at_end_of_input, args=(stop,), daemon=True).start()
    receiver = HTTPConnection(LOOPBACK, int(port), timeout=ANSWER_SECONDS)
    with Store(os.environ[URL_VARIABLE]) as store:
        store.outbox(outbox).run(worker_id, partial(deliver, receiver), stop)


def deliver(receiver: HTTPConnection, job: JobHandle) -> None:
    """Post a message; settle it here where the receiver asks for another try, and leave the rest to the loop."""
    if not job.heartbeat(ttl=CLAIM_SECONDS):
        return
    status = _post(receiver, job)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        job.retry(f"the receiver answered {status}", delay=RETRY_SECONDS)
    elif status >= HTTPStatus.MULTIPLE_CHOICES:
        raise RuntimeError(f"the receiver answered {status}")


def _post(receiver: HTTPConnection, job: JobHandle) -> int:
    headers = {**job.headers, MESSAGE_HEADER: str(job.id), WORKER_HEADER: job.worker_id, "Content-Type": "application/json"}
    try:
        receiver.request("POST", "/", json.dumps(job.payload).encode(), headers)
        response = receiver.getresponse()
        response.read()
    except (HTTPException, OSError):
        receiver.close()  # the next request connects anew
        raise
    return response.status


def _cancel_at_end_of_input(stop: StopToken) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    stop.cancel()


if __name__ == "__main__":
    main()
