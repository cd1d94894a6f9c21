"""The command line. `root` holds the group and the schema's commands; each other room adds its commands to the group."""

from alkstore_sa.cli import examining, looking, planning, steering
from alkstore_sa.cli.root import main

__all__ = ["examining", "looking", "main", "planning", "steering"]
