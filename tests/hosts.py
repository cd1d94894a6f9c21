"""A host application with tables and an Alembic history of its own, on disk, driven by the `alembic` command as its developers would."""

import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from databases import TestDatabase, admin
from sqlalchemy import make_url

INI = """\
[alembic]
script_location = %(here)s/migrations
prepend_sys_path = .
path_separator = newline
"""

OUR_REVISIONS = """\
version_locations =
    %(here)s/migrations/versions
    alkstore_sa:_alembic/versions
"""

ENV = """\
import os

from alembic import context
from sqlalchemy import create_engine

from shop import metadata
{imports}
engine = create_engine(os.environ["SHOP_URL"])
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata={target}{options})
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""

# the host has a hook of its own already: it hides a table that another program keeps
FILTER = "from alkstore_sa.migrate import include_name\n\n\ndef not_foreign(name, kind, parents):\n    return kind != 'table' or name != 'foreign_table'\n\n"
RENDER = "from alkstore_sa import metadata_for\nfrom alkstore_sa.migrate import render_item\n"

MODELS = """\
from sqlalchemy import Column, Integer, MetaData, Table, Text

metadata = MetaData()
Table("invoice", metadata, Column("id", Integer, primary_key=True), Column("number", Text, nullable=False))
"""
GIVEN_UP = 'Table("given_up", metadata, Column("id", Integer, primary_key=True))\n'

MAKO = '''\
"""${message}"""
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

def upgrade() -> None:
    ${upgrades if upgrades else "pass"}

def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
'''

# Starting Python and importing SQLAlchemy takes most of a command's time: one process does it, and forks for each command
COMMANDS = """
import json, os, sys, tempfile, traceback
import alembic.config, alkstore_sa.cli, sqlalchemy.dialects.sqlite, sqlalchemy.dialects.postgresql.psycopg

def run(job):
    os.chdir(job["folder"])
    for name, value in job["environment"].items():
        os.environ[name] = value
    if job["program"] == "alkstore":
        alkstore_sa.cli.main(job["commands"][0], prog_name="alkstore")
    for command in job["commands"]:
        alembic.config.main(command, prog="alembic")

def start(job):
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    pid = os.fork()
    if pid:
        return pid, out, err
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    code = 0
    try:
        run(job)
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    told = []
    for pid, out, err in [start(job) for job in json.loads(line)]:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with out, err:
            told.append([code, *(os.pread(file.fileno(), 1_000_000, 0).decode() for file in (out, err))])
    print(json.dumps(told), flush=True)
"""


class Interpreter:
    """A Python in which `alembic` and `alkstore` are run, each in a process of its own."""

    def __init__(self, python=sys.executable):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ALKSTORE_", "PYTEST_", "PYTHONPATH"))}
        kept |= {"PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [python, "-c", COMMANDS], env=kept, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.communicate(timeout=60)

    def run(self, program, *commands, folder="/", times=1, **environment):
        """Run commands, one after the other, in one process (of `times` processes at once); (exit code, output, errors) of each."""
        job = {"program": program, "commands": commands, "folder": str(folder), "environment": environment}
        self._process.stdin.write(json.dumps([job] * times) + "\n")
        self._process.stdin.flush()
        return [tuple(told) for told in json.loads(self._process.stdout.readline())]


@dataclass
class Host:
    """The application `shop` in `folder`, its database at `url`, whose developers work in `interpreter`."""

    folder: Path
    url: str
    interpreter: Interpreter

    def __post_init__(self):
        (self.folder / "migrations" / "versions").mkdir(parents=True)
        (self.folder / "migrations" / "script.py.mako").write_text(MAKO)
        self.configure()

    def configure(self, *, imports="", target="metadata", options="", ini="", models=MODELS):
        (self.folder / "alembic.ini").write_text(INI + ini)
        (self.folder / "migrations" / "env.py").write_text(ENV.format(imports=imports, target=target, options=options))
        (self.folder / "shop.py").write_text(models)

    def filter(self, **more):
        """Write the documented line into env.py, chained with the host's own hook."""
        self.configure(imports=FILTER, options=", include_name=include_name(not_foreign)", **more)

    def include(self, schema=None, **more):
        """Write our metadata into env.py, for way (c)."""
        options = ", render_item=render_item, include_schemas=True" if schema else ", render_item=render_item"
        self.configure(imports=RENDER, target=f"[metadata, metadata_for(schema={schema!r})]", options=options, **more)

    def alembic(self, *commands):
        """Run commands of Alembic, each with its arguments parted by `|`, all of which must succeed."""
        split = [command.split("|") for command in commands]
        [(code, out, err)] = self.interpreter.run("alembic", *split, folder=self.folder, SHOP_URL=self.url)
        assert code == 0, f"{commands}\n{out}\n{err}"

    def alkstore(self, *arguments, times=1):
        """Run a command of ours; (exit code, output, errors), of each where there are several at once."""
        told = self.interpreter.run("alkstore", arguments, folder=self.folder, times=times, ALKSTORE_URL=self.url)
        return told if times > 1 else told[0]

    def revision(self, message):
        """Let the host autogenerate a revision; its text."""
        self.alembic(
            f"revision|--autogenerate|--head|{self.head()}|-m|{message}" if self.head() else f"revision|--autogenerate|-m|{message}"
        )
        return next((self.folder / "migrations" / "versions").glob(f"*_{message}.py")).read_text()

    def head(self):
        """The newest revision of the host's own, which it must name where a second branch is there."""
        texts = [path.read_text() for path in (self.folder / "migrations" / "versions").glob("*.py")]
        made = [re.search(r"^revision = '(.*)'", text, re.MULTILINE)[1] for text in texts]
        used = {found[1] for text in texts if (found := re.search(r"^down_revision = '(.*)'", text, re.MULTILINE))}
        return next((revision for revision in made if revision not in used), None)


def operations(revision):
    """The operations in a revision's upgrade."""
    return re.findall(r"op\.(\w+)\((?:op\.f\()?'(\w+)'", revision.split("def upgrade")[1].split("def downgrade")[0])


def empty_sqlite(path):
    return TestDatabase(f"sqlite:///{path}", "sqlite")


def empty_postgresql(server_url):
    return TestDatabase.postgresql(server_url, template="template0")


def shape(database, schema=None):
    """Everything that the database says about our tables: columns, constraints and indexes, without the schema's name."""
    if database.kind == "sqlite":
        rows = database.sql(
            "SELECT name, sql FROM sqlite_master WHERE tbl_name IN ('alkstore_job', 'alkstore_dead', 'alkstore_lock', 'alkstore_schedule', 'alkstore_fire') ORDER BY name"
        )
        return {name: re.sub(r'[\s"]+', " ", sql or "").strip().replace("( ", "(").replace(" )", ")") for name, sql in rows}
    place = "current_schema()" if schema is None else f"'{schema}'"
    columns = database.sql(
        "SELECT table_name, ordinal_position, column_name, data_type, is_nullable, column_default, is_identity, identity_generation"
        f" FROM information_schema.columns WHERE table_schema = {place} AND table_name IN ('alkstore_job', 'alkstore_dead', 'alkstore_lock', 'alkstore_schedule', 'alkstore_fire')"
    )
    constraints = database.sql(
        "SELECT conname, pg_get_constraintdef(c.oid) FROM pg_constraint c JOIN pg_class t ON t.oid = conrelid"
        f" WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = {place}) AND relname IN ('alkstore_job', 'alkstore_dead', 'alkstore_lock', 'alkstore_schedule', 'alkstore_fire')"
    )
    indexes = database.sql(
        f"SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = {place} AND tablename IN ('alkstore_job', 'alkstore_dead', 'alkstore_lock', 'alkstore_schedule', 'alkstore_fire')"
    )
    told = {f"{row[0]}.{row[2]}": str(tuple(row)) for row in columns} | dict(map(tuple, constraints))
    return told | {name: re.sub(r' ON (\w+|"[^"]+")\.', " ON ", definition) for name, definition in indexes}


def login(server_url, database, name=None, **settings):
    """Make a role that owns nothing, and the URL under which it connects to `database`."""
    name = name or f"r_{uuid.uuid4().hex}"
    admin(server_url, f"CREATE ROLE {name} LOGIN", *(f"ALTER ROLE {name} SET {key} = {value}" for key, value in settings.items()))
    return name, str(make_url(database.url).set(username=name))
