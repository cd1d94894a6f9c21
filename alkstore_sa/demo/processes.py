"""The delivery processes of a run: started, killed, replaced, stopped."""

import os
import subprocess
import sys
import threading
from typing import Final

from alkstore_sa.demo.courier import URL_VARIABLE

_STOP_SECONDS: Final = 30.0


class DeliveryProcesses:
    """Processes that deliver one outbox, by worker id. They end by themselves when this process ends, however it does."""

    def __init__(self, url: str, outbox: str) -> None:
        self._environment: Final = {**os.environ, URL_VARIABLE: url}
        self._outbox: Final = outbox
        self._lock: Final = threading.Lock()
        self._started = 0
        self._stopped = False
        self._processes: Final[dict[str, subprocess.Popen[bytes]]] = {}
        self._killed: Final[list[str]] = []

    @property
    def killed(self) -> tuple[str, ...]:
        """The worker ids of the processes that `kill` ended."""
        with self._lock:
            return tuple(self._killed)

    def start(self, port: int) -> None:
        """Start one more process, delivering to `port`; none after `stop`."""
        with self._lock:
            if self._stopped:
                return
            self._started += 1
            worker_id = f"courier-{self._started}"
            command = [sys.executable, "-m", "alkstore_sa.demo.courier", self._outbox, worker_id, str(port)]
            self._processes[worker_id] = subprocess.Popen(  # noqa: S603 - all ours
                command,
                stdin=subprocess.PIPE,
                env=self._environment,
                process_group=0,  # so that Ctrl-C reaches this process alone, which then stops them
            )

    def kill(self, worker_id: str) -> None:
        """Send SIGKILL to a process and wait until it is gone."""
        with self._lock:
            process = self._processes.pop(worker_id)
            process.kill()
            process.wait()
            _close_input(process)
            self._killed.append(worker_id)

    def stop(self) -> None:
        """Let every process finish its delivery and end; kill what has not ended after half a minute."""
        with self._lock:
            self._stopped = True
            for process in self._processes.values():
                _close_input(process)
            for process in self._processes.values():
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def failures(self) -> list[str]:
        """Name the processes that ended before they were stopped, or badly."""
        with self._lock:
            return [
                f"the delivery process {worker_id} ended with exit code {process.returncode}"
                for worker_id, process in self._processes.items()
                if process.poll() not in ((None, 0) if self._stopped else (None,))
            ]


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
