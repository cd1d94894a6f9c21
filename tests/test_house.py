"""The rules of the house that no linter knows."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from sqlalchemy import Delete, Insert, Update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import psycopg

import alkstore_sa
from alkstore_sa import constructs, errors, statements, tables
from alkstore_sa._options import Timing
from alkstore_sa.records import JobState
from alkstore_sa.statements import dead, fires, inspection, jobs, leases, schedules

PACKAGE = Path(alkstore_sa.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_alembic" not in path.parts)
DIALECTS = {"postgresql": psycopg.dialect(), "sqlite": sqlite.dialect()}


def every_builder():
    """Every builder of the shelves with every shape that its annotations allow."""
    choices = {
        bool: [False, True],
        Timing: list(Timing.__args__),
        JobState | None: [None, *JobState],
        type(tables.jobs): [tables.jobs, tables.dead],
    }
    for module in pkgutil.iter_modules(statements.__path__):
        room = importlib.import_module(f"alkstore_sa.statements.{module.name}")
        for name, function in inspect.getmembers(room, inspect.isfunction):
            if function.__module__ != room.__name__ or name.startswith("_") or name == "shown_state":
                continue
            shapes = [()]
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                assert parameter.annotation in choices, f"{name}({parameter}): say which shapes there are"
                shapes = [(*shape, value) for shape in shapes for value in choices[parameter.annotation]]
            for shape in shapes:
                yield pytest.param(function, shape, id="-".join([name, *(getattr(value, "name", None) or str(value) for value in shape)]))


ANSWERLESS = (dead.delete_moved, fires.insert_fires, fires.insert_skips, schedules.advance_schedules)
BUILDERS = list(every_builder())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("builder", "shape"), BUILDERS)
def test_every_statement_compiles_and_a_writing_one_begins_with_its_verb(builder, shape, dialect):
    statement = builder(*shape)
    text = str(statement.compile(dialect=DIALECTS[dialect]))
    verb = text.split()[0]

    if isinstance(statement, (Insert, Update, Delete)):
        assert verb in {"INSERT", "UPDATE", "DELETE"}
        assert "RETURNING" in text or builder in ANSWERLESS
    else:
        assert verb in {"SELECT", "WITH"}
    if dialect == "sqlite":
        assert "= 1 " not in text.replace("= 1 OR", "")
        assert "FOR UPDATE" not in text


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("builder", "shape"), BUILDERS)
def test_no_subselect_on_a_table_lost_its_own_from(builder, shape, dialect):
    """An UPDATE or DELETE swallows the FROM of a subselect on the same table unless that is aliased."""
    text = str(builder(*shape).compile(dialect=DIALECTS[dialect]))
    named = set(re.findall(r"(?:FROM|JOIN|INTO|UPDATE|AS|RECURSIVE) (\w+)", text))
    assert set(re.findall(r"\b([a-z_0-9]+)\.[a-z_]+", text)) <= named


def test_nothing_but_the_two_spellings_tells_the_dialects_apart_in_the_lower_rooms():
    for room in (
        jobs,
        dead,
        inspection,
        leases,
        schedules,
        fires,
        importlib.import_module("alkstore_sa.queues"),
        importlib.import_module("alkstore_sa.outbox"),
    ):
        assert "sqlite" not in inspect.getsource(room).replace("on SQLite", "").replace("SQLite", ""), room


def test_verbs_and_builders_never_commit_wait_or_read_the_clock():
    mechanisms = ("queues", "outbox", "leases", "schedules", "ticks")
    for name in (*mechanisms, *(f"statements/{room}" for room in ("jobs", "dead", "inspection", "leases", "schedules", "fires"))):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
        assert not called & {"commit", "rollback", "sleep", "monotonic", "now", "begin", "connect", "wait"}, name


def test_the_public_names_are_those_listed_and_each_is_documented():
    assert alkstore_sa.__all__ == sorted(alkstore_sa.__all__)
    for name in alkstore_sa.__all__:
        thing = getattr(alkstore_sa, name)
        if inspect.isclass(thing) and thing.__module__.startswith("alkstore_sa"):
            assert thing.__doc__, name
            for member, value in vars(thing).items():
                if inspect.isfunction(value) and not member.startswith("_"):
                    assert value.__doc__, f"{name}.{member}"


def test_every_error_is_an_alkstore_error_and_a_builtin_that_one_would_catch():
    for name in alkstore_sa.__all__:
        thing = getattr(alkstore_sa, name)
        if inspect.isclass(thing) and issubclass(thing, Exception):
            if thing.__module__ == "alkstore_sa.outcomes":
                continue  # no error of ours: what a handler raises to say what becomes of its job
            assert issubclass(thing, errors.AlkstoreError)
            assert thing is errors.AlkstoreError or issubclass(thing, (ValueError, RuntimeError, TimeoutError))


def test_files_and_functions_stay_small():
    for path in SOURCES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 50, f"{path}:{node.name}"


def test_raw_sql_is_never_built_with_text():
    for path in SOURCES:
        assert "sqlalchemy.text" not in path.read_text()
        assert "import text" not in path.read_text()


def test_names_in_the_database_are_explicit_and_short():
    for table in tables.metadata.tables.values():
        assert table.name.startswith(tables.PREFIX)
        for thing in (*table.constraints, *table.indexes):
            assert thing.name, table
            assert thing.name.startswith(tables.PREFIX)
            assert len(thing.name.encode()) <= 40
    assert tables.metadata.naming_convention == {"ix": "ix_%(column_0_label)s"}


def test_a_constant_of_ours_is_written_and_a_value_is_bound():
    assert str(constructs.constant("ready")) == "'ready'"
    text = str(jobs.claim_jobs().compile(dialect=DIALECTS["postgresql"]))
    assert "due.state = 'ready'" in text
    assert "%(job_queue)s" in text
