"""The verbs on live workers and on pauses: bind first, statements run, answers returned. Nothing here commits, waits or spawns.

Nothing depends on these rows but what people are shown, and when a worker stops claiming from a paused queue.
"""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from alkstore_sa.engines import Database
from alkstore_sa.records import WorkerInfo
from alkstore_sa.seam import Bind
from alkstore_sa.statements import workers as statements

BEAT_SECONDS: Final = 4.0  # a paused queue is to rest within 5 s
ALIVE_BEATS: Final = 3
KEPT_SILENT: Final = timedelta(hours=1)


class Workers:
    """The verbs on workers and pauses of one database."""

    def __init__(self, database: Database) -> None:
        self._database: Final = database

    def beat(self, bind: Bind, worker_id: str, said: Mapping[str, Any]) -> None:
        """Write what a worker says of itself."""
        values = {name: json.dumps(value) if isinstance(value, list) else value for name, value in said.items()}
        bound = {"worker": worker_id, **{f"worker_{name}": value for name, value in values.items()}}
        bind.execute(self._database.statement(statements.upsert_worker), bound)

    def leave(self, bind: Bind, worker_id: str) -> None:
        """Forget a worker that leaves."""
        bind.execute(self._database.statement(statements.delete_worker), {"worker": worker_id})

    def prune(self, bind: Bind) -> None:
        """Forget the workers that were silent for an hour."""
        bind.execute(self._database.statement(statements.delete_silent), {"minus_age": -KEPT_SILENT})

    def every(self, bind: Bind) -> list[WorkerInfo]:
        """List the workers by id."""
        values = {"minus_age": -timedelta(seconds=ALIVE_BEATS * BEAT_SECONDS)}
        found = []
        for row in bind.execute(self._database.statement(statements.select_workers), values).mappings():
            lists = {name: tuple(json.loads(row[name])) for name in ("queues", "tasks", "raw_queues")}
            found.append(WorkerInfo(**{**row, **lists, "alive": bool(row["alive"])}))
        return found

    def pause(self, bind: Bind, queue: str) -> bool:
        """Pause a queue; False where it is paused already."""
        return bind.execute(self._database.statement(statements.insert_pause), {"pause_queue": queue}).first() is not None

    def resume(self, bind: Bind, queue: str) -> bool:
        """Resume a queue; False where it is not paused."""
        return bind.execute(self._database.statement(statements.delete_pause), {"pause_queue": queue}).first() is not None

    def paused(self, bind: Bind) -> Mapping[str, datetime]:
        """Tell which queues are paused, and since when."""
        rows = bind.execute(self._database.statement(statements.select_pauses))
        return MappingProxyType({row.queue: row.paused_at for row in rows})
