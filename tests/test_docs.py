"""The README and every page under docs/ are true: their code runs, and their links lead somewhere.

A page's blocks run in the order in which they stand, in an empty folder: `python` blocks in one namespace, `sh` blocks with this
environment's programs first on the PATH. `sql` blocks run on a database with the tables and some jobs in it, each in a transaction that is
rolled back, and must find something. Comments directly before a block steer it:

    <!-- postgresql -->   it needs PostgreSQL; the URL of an empty database is in DATABASE_URL
    <!-- sqlite -->       it is for SQLite (a `sql` block without a mark runs on both)
    <!-- file PATH -->    it is the text of that file, which the blocks after it may use

Blocks of any other language (`text`, `ini`, `toml`) are not code.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from databases import TestDatabase

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
POSTGRESQL = dict(pair.split("=", 1) for pair in os.environ.get("ALKSTORE_TEST_SERVERS", "").split())

PAGES = sorted(
    page
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    if EXAMPLES not in page.parents or not (EXAMPLES / "README.md").exists()
)
# the README's two commands make an environment of their own: the gate runs the second, and whoever tries the library the first
GATE_COMMANDS = re.compile(r"python3 -m venv \.venv")
RUNNABLE = ("python", "sh")
FENCE = re.compile(r"^(?P<marks>(?:<!--[^\n]*-->\n)*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    marks: tuple[str, ...]

    @property
    def needs_postgresql(self):
        return "postgresql" in self.marks

    @property
    def file(self):
        return next((mark.removeprefix("file ") for mark in self.marks if mark.startswith("file ")), None)


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        marks = tuple(re.findall(r"<!--\s*(.*?)\s*-->", found["marks"]))
        yield Block(found["language"], found["code"], text.count("\n", 0, found.start("code")) + 1, marks)


def name_of(page):
    return str(page.relative_to(ROOT))


RUNNER = """
import json, pathlib, subprocess, sys

namespace = {"__name__": "__main__"}
for block in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    where = f"{sys.argv[2]}, line {block['line']}"
    if block["file"]:
        path = pathlib.Path(block["file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block["code"], encoding="utf-8")
    elif block["language"] == "sh":
        if subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]], stdin=subprocess.DEVNULL).returncode:
            raise SystemExit(f"{where}: the shell block failed")
    else:
        exec(compile("\\n" * (block["line"] - 1) + block["code"], sys.argv[2], "exec"), namespace)
"""


@pytest.mark.timeout(400)  # against a hang; a page takes seconds
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs_as_it_stands(page, tmp_path):
    blocks = [block for block in blocks_of(page) if block.language in RUNNABLE or block.file]
    blocks = [block for block in blocks if not GATE_COMMANDS.search(block.code)]
    wanted = [block for block in blocks if POSTGRESQL or not block.needs_postgresql]
    server = TestDatabase.postgresql(POSTGRESQL[max(POSTGRESQL)], template="template0") if any(b.needs_postgresql for b in wanted) else None
    if wanted:
        try:
            run_blocks(page, wanted, tmp_path, server)
        finally:
            if server is not None:
                server.drop()
    if len(wanted) < len(blocks):
        pytest.skip(f"requires_postgresql: {len(blocks) - len(wanted)} blocks of {name_of(page)} were not run")


def run_blocks(page, blocks, folder, server):
    (folder / "work").mkdir()
    script = folder / "blocks.json"
    script.write_text(json.dumps([{"language": b.language, "code": b.code, "line": b.line, "file": b.file} for b in blocks]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ALKSTORE_", "PYTEST_", "COV_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONWARNINGS"] = "error"
    if server is not None:
        environment["DATABASE_URL"] = server.url
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER, script, name_of(page)],
        cwd=folder / "work",
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


ENGINES = ("sqlite", "postgresql")
SQL_BLOCKS = [
    pytest.param(block.code, engine, id=f"{name_of(page)}:{block.line}-{engine}")
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "sql" and not block.file
    for engine in ENGINES
    if engine in block.marks or not set(ENGINES) & set(block.marks)
]
MUST_FIND = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b", re.IGNORECASE)


@pytest.fixture
def filled(engine, tmp_path):
    if engine == "sqlite":
        database = TestDatabase.sqlite(tmp_path / "jobs.db")
    elif POSTGRESQL:
        database = TestDatabase.postgresql(POSTGRESQL[max(POSTGRESQL)])
    else:
        pytest.skip("requires_postgresql")
    fill(database)
    yield database
    database.drop()


@pytest.mark.parametrize(("code", "engine"), SQL_BLOCKS)
def test_a_query_of_a_page_finds_what_it_asks_for(code, filled):
    with filled.engine().connect() as connection, connection.begin() as transaction:
        run_sql(connection, code)
        transaction.rollback()


def run_sql(connection, code):
    for statement in filter(str.strip, re.sub(r"--[^\n]*", "", code).split(";\n")):
        result = connection.execution_options(no_parameters=True).exec_driver_sql(statement.strip())
        found = len(result.all()) if result.returns_rows else result.rowcount
        assert found or not MUST_FIND.match(statement), f"nothing found by {statement}"


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_that_the_operating_page_writes_by_hand_are_jobs_like_any_other(engine, filled):
    page = ROOT / "docs" / "how-to" / "operating.md"
    written = [block.code for block in blocks_of(page) if engine in block.marks and "INSERT INTO alkstore_job" in block.code]
    with filled.engine().begin() as connection:
        for code in written:
            run_sql(connection, code)
    with filled.store() as store:
        assert not store.queue("emails").dead()
        claimed = {job.id: job for job in store.queue("emails").claim("press-2", limit=10)}
        assert claimed[6].payload == {"order": 6}
        assert (claimed[6].fence, claimed[6].attempts) == (2, 1)
        assert claimed[9].payload == {"to": "ada@example.org"}
        assert all(job.ack() for job in claimed.values())


@pytest.mark.parametrize("engine", ["postgresql"])
def test_the_grants_of_the_operating_page_are_enough(filled):
    page = ROOT / "docs" / "how-to" / "operating.md"
    [grants] = [block.code for block in blocks_of(page) if "GRANT" in block.code]
    with filled.store() as store, filled.engine().connect() as connection, connection.begin() as transaction:
        run_sql(connection, grants)
        connection.exec_driver_sql("SET LOCAL ROLE shop_web")
        store.enqueue_tx(connection, "emails", {"order": 10})
        store.queue("emails").enqueue_many_tx(connection, [{"order": 11}, {"order": 12}], delay=1)
        connection.exec_driver_sql("SET LOCAL ROLE shop_worker")
        verbs = store._jobs  # its public verbs would use a connection of another role
        for job in verbs.claim_fresh(connection, "emails", "press-3", 100):
            assert verbs.heartbeat(connection, job.id, job.fence, None)
            assert verbs.fail(connection, job.id, job.fence, "no")
            assert verbs.replay(connection, "emails", job.id)
        assert verbs.count(connection)
        transaction.rollback()


def fill(database):
    """Put into the queue `emails`: job 1 ready, 2 delayed, 3 claimed and living, 4 lapsed, 5 failed once, 6 and 7 dead."""
    with database.store() as store:
        emails = store.queue("emails", base_backoff=60)
        emails.enqueue_many([{"order": number} for number in range(1, 8)])
        claimed = {job.id: job for job in emails.claim("press-1", limit=7)}
        for job_id in (1, 2):
            claimed[job_id].release(delay=None if job_id == 1 else 3600)
        claimed[5].retry("ConnectionError: no route to host")
        for job_id in (6, 7):
            claimed[job_id].fail("ValueError: no such address\nTraceback ...")
        store.outbox("webhooks").enqueue({"event": "order.paid"}, headers={"trace": "abc"})
        database.sql(f"UPDATE alkstore_job SET enqueued_at = {database.now(-90)}, run_at = {database.now(-90)} WHERE id = 1")
        database.sql(f"UPDATE alkstore_job SET claim_expires_at = {database.now(-60)} WHERE id = 4")
        database.sql(f"UPDATE alkstore_dead SET died_at = {database.now(-40 * 86_400)} WHERE id = 7")


HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors_of(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(prose)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        reached = (page.parent / path).resolve() if path else page
        assert reached.exists(), f"{name_of(page)} links to {target}"
        assert reached.is_relative_to(ROOT), f"{name_of(page)} links out of the project: {target}"
        if anchor:
            assert anchor in anchors_of(reached), f"{name_of(page)} links to {target}: no such heading"


def test_the_readme_starts_with_its_two_commands():
    first, second, *_ = [block for block in blocks_of(ROOT / "README.md") if block.language == "sh"]
    assert GATE_COMMANDS.search(first.code)
    assert first.code.strip().endswith("alkstore demo")
    assert GATE_COMMANDS.search(second.code)
    assert second.code.strip().endswith(".ci/check")


def test_the_gate_runs_the_second_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    extract = re.search(r"<<'PY'\n(.*?)\nPY\n", script, re.DOTALL)[1]
    found = subprocess.run([sys.executable, "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    second = [block for block in blocks_of(ROOT / "README.md") if block.language == "sh"][1]
    assert found == second.code.strip()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_language_it_is_in(page):
    for block in blocks_of(page):
        assert block.language in (*RUNNABLE, "sql", "text", "ini", "toml"), f"{name_of(page)}, line {block.line}: {block.language!r}"
    fences = re.findall(r"^[ >\-*]*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(list(blocks_of(page))), f"{name_of(page)}: a fence that is indented, unclosed or unseen by these tests"
