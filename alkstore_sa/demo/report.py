"""What the demo says at its end."""

from rich.console import Console
from rich.table import Table

from alkstore_sa.demo.trial import Outcome


def show(outcome: Outcome, console: Console) -> None:
    """Print the totals of the books, and whether they balance."""
    table = Table("messages", "", title="alkstore demo")
    table.columns[1].justify = "right"
    for name, count in outcome.books.totals().items():
        table.add_row(name, f"{count:,}")
    console.print(table)
    for worker_id in outcome.killed:
        console.print(f"{worker_id} was killed (SIGKILL) with a message in its hands, and another process started.", soft_wrap=True)
    findings = outcome.findings()
    for finding in findings:
        console.print(finding, style="red", markup=False, soft_wrap=True)
    if not findings:
        console.print("The books balance: each committed message arrived with an equal payload, no rolled-back one did.", soft_wrap=True)
    else:
        console.print("The books do not balance.", style="bold red")
