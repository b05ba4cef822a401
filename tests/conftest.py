"""Fixtures. One server for a run, one template database, a clone for each test.

dsn, conn, connect()    a fresh database whose almanac.clock() obeys the fixture `clock`
db, clock               the calls of pyclient.database on `conn`; the time
live_dsn, live_conn     a fresh database with the real clock
cron_dsn, cron_conn     a fresh database on a server where pg_cron runs (mark: pg_cron)
empty_dsn               a fresh database without pg_almanac
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row

from pyclient import database
from pyclient.migrate import migrate
from tests import breaches, pg_cron, servers
from tests.jobs import Jobs

TEMPLATE, LIVE_TEMPLATE, CRON_DATABASE = "almanac_template", "almanac_live_template", "almanac_cron"
STACK = pytest.StashKey[contextlib.ExitStack]()
SERVER = pytest.StashKey[servers.Server]()
CHOICE = pytest.StashKey[servers.Choice]()
USED = pytest.StashKey[set[str]]()

# Read by every session of a database, so time is the same for all of them. By an index: where enable_seqscan is off,
# the planner would take the cost of reading a table without one for a reason to compile the query.
TEST_CLOCK = """
create schema test_clock;
create table test_clock.setting (
    the_only_row boolean primary key default true, frozen_at timestamptz, "offset" interval not null default '0');
insert into test_clock.setting default values;
grant usage on schema test_clock to public;
grant select on test_clock.setting to public;
create or replace function almanac.clock() returns timestamptz language sql volatile
    return (select coalesce(frozen_at, clock_timestamp()) + "offset" from test_clock.setting where the_only_row);
"""


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pg_almanac")
    group.addoption("--full", action="store_true", help="also the long property and soak runs")
    group.addoption(
        "--pg",
        default=os.environ.get("ALMANAC_TEST_PG", "auto"),
        choices=["auto", "dsn", "local", "docker", "embedded"],
        help="which PostgreSQL to use (default: the first that is there, in this order)",
    )
    group.addoption(
        "--breach",
        choices=list(breaches.BREACHES),
        help="a bug of tests/breaches.py to plant in the databases of the tests: those that guard its promise fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    used: set[str] = set()
    config.stash[USED] = used
    config.stash[STACK] = contextlib.ExitStack()
    if breach := planted(config):
        try:
            breach.statement()
        except breaches.DoesNotApplyError as error:
            raise pytest.UsageError(str(error)) from None


def planted(config: pytest.Config) -> breaches.Breach | None:
    return breaches.BREACHES.get(config.getoption("--breach"))


def template_name(template: str, breach: breaches.Breach | None) -> str:
    """A run with a breach may share its server with others."""
    return f"{template}_{breach.name}" if breach and template in (TEMPLATE, LIVE_TEMPLATE) else template


def _server(config: pytest.Config) -> servers.Server:
    """The server of this run, started by whoever needs it first: the controller, or the only process."""
    if SERVER not in config.stash:
        choice = config.stash[CHOICE] = servers.Choice(config.getoption("--pg"))
        server = config.stash[STACK].enter_context(choice.start())
        config.stash[SERVER] = server
        breach = planted(config)
        make_templates(server, breach)
        if breach:
            config.stash[STACK].callback(drop_templates, server, breach)
        config.stash[USED].add(server.describe())
    return config.stash[SERVER]


def drop_templates(server: servers.Server, breach: breaches.Breach | None) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        for template in (TEMPLATE, LIVE_TEMPLATE):
            name = sql.Identifier(template_name(template, breach))
            conn.execute(sql.SQL("drop database if exists {} with (force)").format(name))


def make_templates(server: servers.Server, breach: breaches.Breach | None) -> None:
    template, live_template = template_name(TEMPLATE, breach), template_name(LIVE_TEMPLATE, breach)
    drop_templates(server, breach)
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(f"create database {live_template}")
        migrate(server.dsn_of(live_template))
        if breach:
            with psycopg.connect(server.dsn_of(live_template), autocommit=True) as inside:
                inside.execute(breach.statement())
        database.clone_database(conn, template, live_template)
        with psycopg.connect(server.dsn_of(template), autocommit=True) as inside:
            inside.execute(TEST_CLOCK)


class Distribution:
    """With xdist the controller starts the server and tells the workers where it is."""

    @pytest.hookimpl
    def pytest_configure_node(self, node: Any) -> None:
        server = _server(node.config)
        node.workerinput["almanac_server"] = (server.dsn, server.origin, server.version)

    @pytest.hookimpl
    def pytest_testnodedown(self, node: Any) -> None:
        used: set[str] = node.config.stash[USED]
        used.update(getattr(node, "workeroutput", {}).get("almanac_used", ()))


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    if getattr(plugin, "__class__", type).__name__ == "DSession" and not manager.has_plugin("almanac-distribution"):
        manager.register(Distribution(), "almanac-distribution")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        used = config.stash[USED]
        config.workeroutput["almanac_used"] = sorted(used)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STACK].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="long: runs with --full"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ran = sum(
        1
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if "pg_cron" in getattr(report, "keywords", ()) and report.when == "call"
    )
    skipped = sum(1 for report in terminalreporter.stats.get("skipped", ()) if "pg_cron" in report.keywords)
    terminalreporter.section("servers")
    used = config.stash[USED]
    for line in sorted(used) or ["none"]:
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"pg_cron tests: {ran} ran, {skipped} skipped")


# ── servers and databases ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> servers.Server:
    """The server of this run."""
    given = getattr(request.config, "workerinput", {}).get("almanac_server")
    if given is None:
        return _server(request.config)
    dsn, origin, version = given
    return servers.Server(dsn=dsn, origin=origin, version=version)


@pytest.fixture(scope="session")
def used_servers(request: pytest.FixtureRequest) -> set[str]:
    """What the end of the run prints; for tests that start a server of their own."""
    used: set[str] = request.config.stash[USED]
    return used


@pytest.fixture(scope="session")
def maintenance(server: servers.Server) -> Iterator[psycopg.Connection[Any]]:
    """A superuser's connection to the database postgres, to make databases with."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture(scope="session")
def worker_id(worker_id: str, pytestconfig: pytest.Config) -> str:
    """Part of the names of what the databases of a server share: unlike those of other runs on it."""
    breach = planted(pytestconfig)
    return f"{breach.name}_{worker_id}" if breach else worker_id


@pytest.fixture(scope="session")
def clone(
    server: servers.Server, maintenance: psycopg.Connection[Any], worker_id: str, pytestconfig: pytest.Config
) -> Callable[[str], contextlib.AbstractContextManager[str]]:
    """`with clone(template) as dsn`: a database of one's own."""
    numbers = itertools.count()
    breach = planted(pytestconfig)

    @contextlib.contextmanager
    def clone(template: str) -> Iterator[str]:
        name = sql.Identifier(f"almanac_{worker_id}_{next(numbers)}")
        maintenance.execute(sql.SQL("drop database if exists {} with (force)").format(name))
        maintenance.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(
                name, sql.Identifier(template_name(template, breach))
            )
        )
        try:
            dsn = server.dsn_of(name.as_string(None).strip('"'))
            if template != "template0":
                database.no_copy(dsn)
            yield dsn
        finally:
            maintenance.execute(sql.SQL("drop database {} with (force)").format(name))

    return clone


@pytest.fixture
def dsn(clone: Any) -> Iterator[str]:
    with clone(TEMPLATE) as dsn:
        yield dsn


@pytest.fixture
def live_dsn(clone: Any) -> Iterator[str]:
    with clone(LIVE_TEMPLATE) as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(clone: Any) -> Iterator[str]:
    with clone("template0") as dsn:
        yield dsn


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def live_conn(live_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """`connect()` opens another session on the test's database; closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect(**options: Any) -> psycopg.Connection[Any]:
            return stack.enter_context(psycopg.connect(dsn, **({"autocommit": True} | options)))

        yield connect


@pytest.fixture(scope="session")
def cron_server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    config = request.config
    choice = servers.Choice(config.getoption("--pg"))
    if reason := choice.why_no_pg_cron():
        pytest.skip(f"pg_cron: {reason}")
    with choice.start_with_pg_cron(CRON_DATABASE) as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            database.create_database_if_missing(conn, CRON_DATABASE)
        with psycopg.connect(server.dsn_of(CRON_DATABASE), autocommit=True) as conn:
            conn.execute("create extension if not exists pg_cron schema pg_catalog")  # public is emptied by each test
            row = conn.execute("select extversion from pg_extension where extname = 'pg_cron'").fetchone()
        config.stash[USED].add(f"{server.describe()} with pg_cron {row[0] if row else '?'}")
        yield server


@pytest.fixture
def cron_dsn(cron_server: servers.Server) -> Iterator[str]:
    """The one database of its server where pg_cron lives, as new, and pg_cron ready to hear of a job.

    Database and extension stay: the launcher does not come back once its session has been terminated, and may go on
    looking at the tables of an extension that was dropped.
    """
    dsn = cron_server.dsn_of(CRON_DATABASE)
    with psycopg.connect(dsn, autocommit=True) as conn:
        pg_cron.forget_jobs(conn)
        conn.execute("drop schema if exists almanac cascade")
        conn.execute("drop schema public cascade")
        conn.execute("create schema public")
        migrate(dsn)
        pg_cron.Launcher(conn).catch_up()
        yield dsn
        pg_cron.forget_jobs(conn)


@pytest.fixture
def cron_conn(cron_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(cron_dsn, autocommit=True) as conn:
        yield conn


# ── time, and the calls ─────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """The time of the test's database, in all its sessions. Stands still until `advance` or `run`."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def freeze(self, at: datetime | str | None = None) -> datetime:
        """Stand still at `at`, or at the present time."""
        self.conn.execute(
            "update test_clock.setting set frozen_at = coalesce(%s::timestamptz, almanac.clock()), \"offset\" = '0'",
            [at],
        )
        return self.now()

    def advance(self, **by: float) -> datetime:
        """`advance(minutes=5)`: arguments of timedelta."""
        self.conn.execute('update test_clock.setting set "offset" = "offset" + %s', [timedelta(**by)])
        return self.now()

    def run(self) -> None:
        """Go on from here at the usual pace."""
        self.conn.execute(
            'update test_clock.setting set frozen_at = null, "offset" = almanac.clock() - clock_timestamp()'
        )

    def now(self) -> datetime:
        row = self.conn.execute("select almanac.clock()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]


@pytest.fixture
def clock(dsn: str) -> Iterator[Clock]:
    """The time of `dsn`, standing still; on a connection of its own, so an open transaction does not hold it."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        clock = Clock(conn)
        clock.freeze()
        yield clock


class Db(Jobs):
    """The same through pyclient.database, where that has the call: with the client's rows and errors."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(database, name, None)
        if isinstance(call, database.Call):
            return lambda **arguments: call(self.conn, **arguments)

        def by_name(**arguments: Any) -> list[Any]:
            with database.translated(), self.conn.cursor(row_factory=namedtuple_row) as cursor:
                cursor.execute(database.call_sql(name, tuple(arguments)), arguments)
                return cursor.fetchall()

        return by_name


@pytest.fixture
def db(conn: psycopg.Connection[Any]) -> Db:
    return Db(conn)


@pytest.fixture
def live_db(live_conn: psycopg.Connection[Any]) -> Db:
    return Db(live_conn)
