"""Four processes; each registers the schedule and stands by to serve it, from a thread that starts after the fork."""

import threading

from alkstore_sa import StopToken

bind = "127.0.0.1:8000"
workers = 4
preload_app = True


def post_worker_init(worker):
    from app import alkstore, register_schedules

    app = worker.app.callable
    stop = worker.alkstore_stop = StopToken()

    def serve():
        with app.app_context():
            register_schedules()
            alkstore.store.serve_schedules(stop)

    threading.Thread(target=serve, name="schedules", daemon=True).start()


def worker_exit(server, worker):
    if hasattr(worker, "alkstore_stop"):
        worker.alkstore_stop.cancel()
