"""The three ways in which the tables come into a host's database, each with the built wheel in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import server_urls
from hosts import GIVEN_UP, MODELS, OUR_REVISIONS, Host, Interpreter, empty_postgresql, empty_sqlite, operations, shape

from alkstore_sa import metadata_for, migrate

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("alkstore_sa", "alembic", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources: of those files that it ships."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel in it; what the wheel depends on is borrowed from the running one."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (own / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    return str(folder / "bin" / "python")


def run(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request, tmp_path):
    if request.param == "sqlite":
        made = empty_sqlite(tmp_path / "shop.db")
    elif "18" in server_urls():
        made = empty_postgresql(server_urls()["18"])
    else:
        pytest.skip("requires_postgresql")
    yield made
    made.drop()


@pytest.fixture(scope="module")
def interpreter(python):
    with Interpreter(python) as made:
        yield made


@pytest.fixture
def host(empty, interpreter, tmp_path):
    """A host whose own tables are at the head of its own history."""
    made = Host(tmp_path / "shop", empty.url, interpreter)
    made.configure(models=MODELS + GIVEN_UP)
    made.revision("first")
    made.alembic("upgrade|head")
    return made


def expected_shape(empty, tmp_path, schema=None):
    other = empty_sqlite(tmp_path / "created.db") if empty.kind == "sqlite" else empty_postgresql(empty.server_url)
    try:
        if schema is not None:
            other.sql(f'CREATE SCHEMA "{schema}"')
        metadata_for(schema=schema).create_all(other.engine())
        return shape(other, schema)
    finally:
        other.drop()


def assert_right(empty, tmp_path, schema=None):
    """The tables are as `create_all` makes them, CHECK, partial indexes and descending column included, and nothing differs."""
    made = shape(empty, schema)
    assert made == expected_shape(empty, tmp_path, schema)
    told = " ".join(made.values())
    assert "CHECK" in told and "priority DESC" in told and "WHERE" in told
    assert migrate.check(empty.engine(prepared=False), schema=schema) == []


def test_the_wheel_holds_the_revisions_and_no_package_named_alembic(wheel, python):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"alkstore_sa/_alembic/env.py", "alkstore_sa/_alembic/versions/0001_jobs.py", "alkstore_sa/py.typed"} <= set(names)
    assert not [
        name
        for name in names
        if name.startswith(("alembic", "tests", "docs")) or name.endswith("_alembic/__init__.py") or "__pycache__" in name
    ]
    where = run(
        python, "-c", "import alkstore_sa, alkstore_sa.migrate as m; print(alkstore_sa.__file__); print(m.script_location())", cwd="/"
    ).split()
    own = Path(python).parent.parent
    assert all(Path(path).is_relative_to(own) for path in where), where
    assert "0.1.0" in run(own / "bin" / "alkstore", "--version")


def test_way_a_our_own_command_and_version_table(empty, host, tmp_path):
    host.filter(models=MODELS + GIVEN_UP)
    version = empty.sql("SELECT version_num FROM alembic_version")
    code, out, err = host.alkstore("upgrade")
    assert (code, out) == (0, "the tables are at alkstore_0003\n")
    assert "include_name=include_name()" in err
    host.alembic("check")
    assert host.alkstore("check") == (0, "the tables are as this version makes them\n", "")
    assert_right(empty, tmp_path)
    assert empty.sql("SELECT version_num FROM alembic_version") == version

    host.filter()
    assert operations(host.revision("second")) == [("drop_table", "given_up")]
    host.alembic("upgrade|head", "check")
    assert host.alkstore("downgrade", "--yes") == (0, "the tables are at base\n", "")
    host.alembic("check")
    assert host.alkstore("upgrade")[0] == 0
    assert_right(empty, tmp_path)


def test_way_b_our_revisions_as_a_second_branch_of_the_hosts_history(empty, host, tmp_path):
    host.filter(ini=OUR_REVISIONS)
    host.alembic("upgrade|heads")
    assert_right(empty, tmp_path)
    assert ("alkstore_0003",) in empty.sql("SELECT version_num FROM alembic_version")
    assert operations(host.revision("second")) == [("drop_table", "given_up")]  # with --head, the cost of this way
    host.alembic("upgrade|heads", "check")
    code, out, err = host.alkstore("upgrade")
    assert (code, out) == (1, "")
    assert "another Alembic history" in err
    assert "another Alembic history" in host.alkstore("current")[1]
    host.alembic("downgrade|alkstore@base", "upgrade|alkstore@head")
    assert_right(empty, tmp_path)


@pytest.mark.parametrize("schema", [None, "Mixed Case"])
def test_way_c_our_metadata_in_the_hosts_autogenerate(empty, host, tmp_path, schema):
    if schema is not None:
        if empty.kind == "sqlite":
            return  # SQLite has no schemas
        empty.sql(f'CREATE SCHEMA "{schema}"')
    host.include(schema)
    text = host.revision("second")
    assert "alkstore_sa" not in text
    assert {"create_table", "create_index", "drop_table"} == {kind for kind, _ in operations(text)}
    host.configure(options=", include_schemas=True" if schema else "")  # the revision runs where nothing of ours is imported
    host.alembic("upgrade|head")
    host.include(schema)
    host.alembic("check")
    assert_right(empty, tmp_path, schema)
    host.alembic("downgrade|-1", "upgrade|head")
    assert_right(empty, tmp_path, schema)


def test_way_c_without_the_hook_would_name_a_type_that_the_script_does_not_import(empty, host):
    host.include()
    host.configure(imports="from alkstore_sa import metadata_for\n", target="[metadata, metadata_for()]")
    assert "alkstore_sa.constructs.UtcInstant" in host.revision("second")
