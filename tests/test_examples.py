"""The example applications under the servers they are deployed with: orders over HTTP, a killed process, and the books after it."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import server_urls
from databases import TestDatabase
from eventually import eventually

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
ORDERS = 200
LOOK = 0.1  # seconds between two looks: to look takes time from those who are looked at
BIN = Path(sys.executable).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SETUPS = {
    "flask_orders": ([["flask", "--app", "app", "db", "upgrade"], ["flask", "--app", "app", "alkstore", "upgrade"]]),
    "fastapi_orders": ([["alembic", "upgrade", "head"], ["alkstore", "upgrade"]]),
}
SERVERS = {
    "flask_orders": lambda port: ["gunicorn", "--bind", f"127.0.0.1:{port}", "app:create_app()"],
    "fastapi_orders": lambda port: ["uvicorn", "app:app", "--workers", "2", "--port", str(port), "--log-level", "warning"],
}
RUNNERS = {
    "flask_orders": ["flask", "--app", "app", "alkstore", "run"],
    "fastapi_orders": ["alkstore", "run", "--app", "jobs:tasks"],
}


class Site:
    """One example, installed into a database of its own and started."""

    def __init__(self, name, database, folder):
        self.name, self.database, self.log = name, database, folder / "log"
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DATABASE_URL": database.url,
            "ALKSTORE_URL": database.url,
            "REPORT_EVERY": "1s",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.processes = []

    def serve(self):
        """Start the server, on a port that was free a moment ago, and make a client of it."""
        port = free_port()
        self.start(SERVERS[self.name](port))
        # a connection a request, as from many clients, so that the processes share them; a context for TLS each would take most of the time
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False, limits=httpx.Limits(max_keepalive_connections=0))

    def run(self, command):
        done = subprocess.run(
            command, cwd=EXAMPLES / self.name, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, command):
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command, cwd=EXAMPLES / self.name, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def pid(self):
        """The process that answers, or None."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self.http.get("/", timeout=5)
            return answer.json()["pid"] if answer.status_code == 200 else None
        return None

    def order(self, number, failing):
        """Place one order; True: placed, False: refused, None: nobody knows."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self.http.post("/orders", json={"item": f"tea {number}", "fail": failing}, timeout=20)
            return answer.status_code == 201
        return None

    def count(self, what):
        return self.database.sql(f"SELECT count(*) FROM {what}")[0][0]

    def stop(self):
        self.http.close()
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(20))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                codes.append(process.wait())
        return codes


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        yield TestDatabase("sqlite:///" + str(tmp_path / "orders.db"), "sqlite")
        return
    if "18" not in server_urls():
        pytest.skip("requires_postgresql")
    database = TestDatabase.postgresql(server_urls()["18"], template="template1")
    yield database
    database.drop()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SETUPS)
def test_the_books_balance_though_a_web_process_is_killed(name, place, tmp_path):
    site = Site(name, place, tmp_path)
    for command in SETUPS[name]:
        site.run(command)
    site.serve()
    site.start(RUNNERS[name])
    rng = random.Random(name)
    failing = [rng.random() < 0.2 for _ in range(ORDERS)]
    killed = threading.Event()

    def order(number):
        if number == ORDERS // 2:
            os.kill(eventually(site.pid, within=60, every=LOOK), signal.SIGKILL)
            killed.set()
        return site.order(number, failing[number])

    try:
        eventually(site.pid, within=60, every=LOOK)
        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(order, range(ORDERS)))
        assert killed.is_set()
        eventually(lambda: site.count("alkstore_fire WHERE job_id IS NOT NULL") >= 3, within=60, every=LOOK)
        eventually(site.pid, within=60, every=LOOK)
        eventually(lambda: site.count("alkstore_job WHERE queue LIKE '%mail'") == 0, within=60, every=LOOK)
        codes = site.stop()
    except BaseException:
        site.stop()
        print(site.log.read_text())  # noqa: T201 - what the processes said is what one needs now
        raise
    assert codes[1] == 0, site.log.read_text()
    balance(site, failing, outcomes)


def balance(site, failing, outcomes):
    placed = [number for number, outcome in enumerate(outcomes) if outcome]
    orders = {item: order_id for order_id, item in site.database.sql("SELECT id, item FROM orders")}
    mailed = [order_id for (order_id,) in site.database.sql("SELECT order_id FROM mails")]
    assert sorted(mailed) == sorted(orders.values())  # one e-mail an order, and none without one
    assert all(f"tea {number}" in orders for number in placed)
    assert not any(f"tea {number}" in orders for number, fails in enumerate(failing) if fails)
    assert len(placed) > ORDERS // 2
    assert sum(outcome is None for outcome in outcomes) < 20  # what was under way in the killed process
    fires = site.database.sql("SELECT count(*), count(DISTINCT boundary) FROM alkstore_fire WHERE job_id IS NOT NULL")[0]
    assert fires[0] == fires[1] == site.count("reports") + site.count("alkstore_job WHERE queue = 'reports'")
    assert site.count("alkstore_dead") == 0
