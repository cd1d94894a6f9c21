"""The doctor's command."""

import sys
from datetime import timedelta
from typing import Final

import click
from rich.text import Text

from alkstore_sa.cli.frame import DURATION, Target, as_json, on_store
from alkstore_sa.cli.root import main
from alkstore_sa.cli.shape import cell, show_json, show_lines
from alkstore_sa.doctor import Level, Limits, Verdict, examine, raise_ids

_STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


@main.command(epilog="Keys of --json: level (the worst), verdicts (a list of objects with check, level, finding, advice).")
@on_store
@click.option("--max-transaction", type=DURATION, default="5m", show_default=True, help="Warn of transactions that keep dead rows longer.")
@click.option(
    "--max-wait",
    type=DURATION,
    default="5m",
    show_default=True,
    help="Warn of due jobs that have waited for longer; a fifth of it where no live worker serves them.",
)
@click.option("--after-restore", is_flag=True, help="A backup was restored: raise the ids of new jobs by 1,000,000 first.")
@as_json
def doctor(target: Target, *, max_transaction: timedelta, max_wait: timedelta, after_restore: bool, as_json: bool) -> None:
    """Look for what is wrong with the database and the store, and say what to do; exit code 1 if there is a problem.

    Checks: connection, schema, clock, pooler, wakes, horizon, vacuum, journal, engine, claim plan, queues, schedules, workers. What is a
    warning from a --max on is a problem from twelve times as much on.

    A restored backup does not know of the ids that were handed out since it was made; receivers that deduplicate by job id would take new
    jobs for old ones. Run it once with --after-restore, before anything enqueues.
    """
    verdicts: list[Verdict] = []
    if after_restore:
        verdicts.append(Verdict("ids", Level.OK, f"new jobs have ids from {raise_ids(target.store) + 1} on"))
    verdicts += examine(target.store, Limits(max_transaction, max_wait), whole_application=target.tasks is not None)
    worst = max((verdict.level for verdict in verdicts), key=list(Level).index)
    if as_json:
        show_json({"level": worst, "verdicts": verdicts})
    else:
        _show(verdicts)
    sys.exit(1 if worst is Level.PROBLEM else 0)


def _show(verdicts: list[Verdict]) -> None:
    show_lines(
        (
            Text(verdict.level, style=_STYLES[verdict.level]),
            verdict.check,
            cell(f"{verdict.finding}. {verdict.advice}" if verdict.advice else verdict.finding),
        )
        for verdict in verdicts
    )
