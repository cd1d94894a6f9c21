"""What every test starts from: real servers, a database of its own with the tables in it, and a store on it."""

import os

import pytest
import servers
from callers import PAIRS, calling
from databases import TestDatabase, make_template
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gate", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], derandomize=True
)
settings.register_profile("soak", parent=settings.get_profile("gate"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))

URLS = "ALKSTORE_TEST_SERVERS"  # version=url pairs, handed to the workers of pytest-xdist
_running = []


os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the package anew


def pytest_configure(config):
    if hasattr(config, "workerinput") or URLS in os.environ or config.option.collectonly:
        return
    for version, folder in servers.installations().items():
        _running.append(servers.Server(version, folder))
        make_template(_running[-1].url())
    os.environ[URLS] = " ".join(f"{server.version}={server.url()}" for server in _running)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        for server in _running:
            server.stop()
        if _running:
            del os.environ[URLS]


def pytest_terminal_summary(terminalreporter):
    if not server_urls():
        terminalreporter.write_line("NOT RUN: the PostgreSQL half of the suite, since no PostgreSQL could be found (requires_postgresql)")


def server_urls():
    return dict(pair.split("=", 1) for pair in os.environ.get(URLS, "").split())


EVERY_DATABASE = ("sqlite", "postgresql-18", "postgresql-16", "postgresql-15")
ASYNC_DRIVERS = (("sqlite", "aiosqlite"), ("postgresql-18", "psycopg"), ("postgresql-18", "asyncpg"))
BOTH_BACKENDS = ("sqlite", "postgresql-18")


def pytest_generate_tests(metafunc):
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "database" in metafunc.fixturenames and not any("database" in names for names in given):
        marker = metafunc.definition.get_closest_marker("databases")
        names = marker.args if marker else BOTH_BACKENDS
        if "async_driver" in metafunc.fixturenames:
            pairs = [pair for pair in ASYNC_DRIVERS if marker is None or pair[0] in marker.args]
            metafunc.parametrize(("database", "async_driver"), pairs, indirect=["database"], ids=[driver for _, driver in pairs])
        elif "caller" in metafunc.fixturenames and marker is None:
            metafunc.parametrize(("database", "caller"), PAIRS, indirect=True)
        else:
            metafunc.parametrize("database", names, indirect=True)


@pytest.fixture
def database(request, tmp_path):
    """A fresh database with the tables at head; `@pytest.mark.databases(…)` says of which kinds (default: SQLite and the newest PostgreSQL)."""
    kind, _, version = request.param.partition("-")
    if kind == "sqlite":
        made = TestDatabase.sqlite(tmp_path / "test.db")
    elif version in server_urls():
        made = TestDatabase.postgresql(server_urls()[version])
    else:
        pytest.skip(f"requires_postgresql: version {version} is not to be had here")
    yield made
    made.drop()


@pytest.fixture
def store(database):
    with database.store() as made:
        yield made


@pytest.fixture
def caller(request, database):
    """The application's open transaction, in each of the ways it may be brought."""
    with calling(database, request.param) as made:
        yield made


@pytest.fixture
def queue(store):
    return store.queue("q")
