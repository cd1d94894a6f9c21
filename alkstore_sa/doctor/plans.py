"""The plan that the database has for a claim."""

from typing import Any, Final

from sqlalchemy import Connection

from alkstore_sa.statements.jobs import claim_jobs
from alkstore_sa.store import Store

INDEX: Final = "alkstore_job_ready"


def explained(store: Store, bind: Connection, prefix: str) -> list[tuple[Any, ...]]:
    """Let the database explain a claim, which it does not run."""
    compiled = claim_jobs().compile(
        dialect=bind.dialect, schema_translate_map={None: store.parts.database.schema}, render_schema_translate=True
    )
    values: dict[str, Any] = dict(compiled.construct_params({"job_queue": "doctor", "job_worker": "doctor", "job_limit": 100}))
    places: list[str] | None = getattr(compiled, "positiontup", None)
    parameters = values if places is None else tuple(values[place] for place in places)
    return [tuple(row) for row in bind.exec_driver_sql(f"{prefix} {compiled}", parameters)]
