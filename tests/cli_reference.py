"""Writes docs/reference/cli.md from the commands themselves: `python tests/cli_reference.py`."""

import inspect
from pathlib import Path

import click

from alkstore_sa.cli import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

HEAD = """\
# The command line

This page is generated from the commands: `python tests/cli_reference.py`.

`alkstore [--debug] COMMAND …`. Which database: `--url` or `ALKSTORE_URL`, with `--schema` or `ALKSTORE_SCHEMA` on PostgreSQL; or `--app
module:attribute` (`ALKSTORE_APP`), the application's bound `Tasks`. Errors are one sentence on stderr and exit code 1 (2 for a wrong call);
`--debug` shows the traceback. With `--json`, instants are ISO 8601 in UTC and lengths of time are seconds. On a terminal narrower than 120
columns tables leave columns out; JSON has everything. `eval "$(alkstore completion bash)"` completes commands and options.
"""


def commands(group, prefix=""):
    for name, command in sorted(group.commands.items()):
        yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")


def page():
    parts = [HEAD]
    for name, command in commands(main):
        arguments = " ".join(one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument))
        parts.append(f"## alkstore {name} {arguments}".rstrip() + "\n")
        parts.append("\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")) + "\n")
        options = [row for row in map(option, command.params) if row]
        if options:
            parts.append("| Option | |\n|---|---|\n" + "\n".join(options) + "\n")
        if command.epilog:
            parts.append(command.epilog + "\n")
    return "\n".join(parts)


def option(parameter):
    if not isinstance(parameter, click.Option):
        return None
    names, text = parameter.get_help_record(click.Context(main))
    return f"| `{names}` | {text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
