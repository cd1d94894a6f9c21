"""Drain of no-op jobs by one worker process, beside pgqueuer in the same interleaved run. A measurement, not a test.

    python -m venv /tmp/rival && /tmp/rival/bin/pip install 'pgqueuer[asyncpg]==1.6.*' uvloop
    python tests/benchmarks/bench_drain.py --rival /tmp/rival/bin/python [--url postgresql+psycopg://…] [--jobs 20000] [--rounds 5]

Without a URL it starts a server of the test suite's own. Each drain is a process of its own; a round runs every contestant once, and the
ratio is the median of the rounds' ratios. pgqueuer: asyncpg, uvloop, batch 500. Ours: concurrency 500, sync handlers, then async ones.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def drain_ours(url, jobs, kind, concurrency):
    from sqlalchemy import create_engine

    from alkstore_sa import StopToken, Store, Tasks, Worker, migrate

    engine = create_engine(url)
    migrate.upgrade(engine)
    with Store(engine) as store:
        tasks = Tasks(store)

        if kind == "sync":

            @tasks.task(name="nothing", queue=f"drain-{kind}")
            def nothing(n: int) -> None: ...

        else:

            @tasks.task(name="nothing", queue=f"drain-{kind}")
            async def nothing(n: int) -> None: ...

        nothing.enqueue_many(nothing.call(n) for n in range(jobs))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE alkstore_job")
        worker = Worker(store, tasks, concurrency=concurrency, max_jobs=jobs)
        began = time.perf_counter()
        report = worker.run(StopToken())
        seconds = time.perf_counter() - began
        assert report.done == jobs
    return jobs / seconds


def drain_pgqueuer(url, jobs):

    import asyncpg
    import uvloop
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.types import QueueExecutionMode

    async def main():
        connection = await asyncpg.connect(url.replace("+psycopg", ""))
        driver = AsyncpgDriver(connection)
        queuer = PgQueuer(driver)
        queries = queuer.qm.queries
        try:
            await queries.install()
        except asyncpg.exceptions.DuplicateObjectError:
            pass
        seen = 0

        @queuer.entrypoint("nothing")
        async def nothing(job):
            nonlocal seen
            seen += 1

        for _ in range(0, jobs, 5_000):
            await queries.enqueue(["nothing"] * 5_000, [b'{"n":1}'] * 5_000, [0] * 5_000)
        await connection.execute("VACUUM ANALYZE pgqueuer")
        began = time.perf_counter()
        await queuer.qm.run(batch_size=500, mode=QueueExecutionMode.drain)
        seconds = time.perf_counter() - began
        assert seen == jobs, seen
        return jobs / seconds

    return uvloop.run(main())


def measured(python, *arguments):
    said = subprocess.run([python, str(HERE), *map(str, arguments)], capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(said.stderr)
    return float(said.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", help="a python with pgqueuer[asyncpg] and uvloop; without it only ours is run")
    parser.add_argument("--url")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=500)
    parser.add_argument("--only", choices=["sync", "async", "pgqueuer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only == "pgqueuer":
        print(drain_pgqueuer(options.url, options.jobs))
    elif options.only:
        print(drain_ours(options.url, options.jobs, options.only, options.concurrency))
    else:
        compare(options)


def compare(options):
    server = None
    if options.url is None:
        sys.path.insert(0, str(HERE.parent.parent))
        import servers

        version, folder = next(iter(servers.installations().items()))
        server = servers.Server(version, folder)
        options.url = server.url()
    common = ("--url", options.url, "--jobs", options.jobs, "--concurrency", options.concurrency)
    rates = {"sync": [], "async": []} | ({"pgqueuer": []} if options.rival else {})
    try:
        for number in range(options.rounds):
            for contestant, measurements in rates.items():
                python = options.rival if contestant == "pgqueuer" else sys.executable
                measurements.append(measured(python, "--only", contestant, *common))
            print(f"round {number + 1}: " + ", ".join(f"{name} {rate[-1]:,.0f}/s" for name, rate in rates.items()), flush=True)
        for name in ("sync", "async") if options.rival else ():
            ratios = [ours / theirs for ours, theirs in zip(rates[name], rates["pgqueuer"], strict=True)]
            print(
                f"{name}: {statistics.median(rates[name]):,.0f}/s, {statistics.median(ratios):.2f} times pgqueuer ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    finally:
        if server is not None:
            server.stop()


if __name__ == "__main__":
    main()
