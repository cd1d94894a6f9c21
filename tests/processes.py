"""Functions that tests run in processes of their own, with real connections and real signals."""

import multiprocessing
import os
import signal
import sqlite3
import time

from alkstore_sa import Store

spawn = multiprocessing.get_context("spawn")


def running(target, *args):
    """Start `target` in a process of its own."""
    process = spawn.Process(target=target, args=args)
    process.start()
    return process


def claim_and_hang(url, queue, claimed):
    """Claim one job, say so, and never settle it."""
    store = Store(url)
    job = store.queue(queue, visibility_timeout=2).claim_one("press-1")
    claimed.put(job and job.id)
    time.sleep(60)


def claim_and_ack(url, queue, worker_id, barrier, acked):
    """Claim and ack one by one until the store is empty."""
    store = Store(url)
    handle = store.queue(queue)
    if barrier is not None:
        barrier.wait(120)
    while True:
        job = handle.claim_one(worker_id)
        if job is None:
            if not store.queues():
                break
            handle.wait(0.05)
        elif job.ack() and acked is not None:
            acked.put((job.id, worker_id))
    if acked is not None:
        acked.put(None)


def hold_the_file(path, barrier, times):
    """Hold a write transaction for a second, several times."""
    barrier.wait(120)
    for _ in range(times):
        connection = sqlite3.connect(path, timeout=30, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(1)
        connection.execute("COMMIT")
        connection.close()
        time.sleep(0.05)


def settle_late(url, steps, answers):
    """Claim as `press-1` and send verbs when told to."""
    queue = Store(url).queue("q")
    job = queue.claim_one("press-1")
    answers.put(job.id)
    for verb in iter(steps.get, None):
        answers.put({"heartbeat": job.heartbeat, "ack": job.ack, "retry": lambda: job.retry("late")}[verb]())


def insert_then_die(url, queue):
    """Enqueue inside a transaction and die before the commit."""
    store = Store(url)
    with store.begin() as connection:
        store.enqueue_tx(connection, queue, 1)
        os.kill(os.getpid(), signal.SIGKILL)
