"""The fixtures: `pytest_plugins = ["pyclient.testing.plugin"]`."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyclient import database, embedded, settings
from pyclient.migrate import migrate
from pyclient.testing import TestAlmanac

_numbers = itertools.count()


@pytest.fixture(scope="session")
def almanac_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server to make databases on: ALMANAC_TEST_DSN, else an embedded one for the time of the run."""
    given = settings.dsn_for_tests()
    if given is not None:
        yield given
        return
    folder: Path = tmp_path_factory.mktemp("almanac")
    for parent in (folder, *folder.parents):
        # The server may run as another user, who has to get there.
        if parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            with contextlib.suppress(PermissionError):
                parent.chmod(0o755)
    with embedded.server(folder) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def almanac_template(almanac_server: str) -> Iterator[str]:
    """A database with pg_almanac and a clock that obeys, to be cloned."""
    name = f"almanac_template_{os.getpid()}"
    with database.connect(almanac_server) as conn:
        database.drop_database(conn, name)
        database.clone_database(conn, name)
        try:
            migrate(database.dsn_of(almanac_server, name))
            with database.connect(database.dsn_of(almanac_server, name)) as inside:
                database.install_test_clock(inside)
            yield name
        finally:
            database.drop_database(conn, name)


@pytest.fixture
def almanac(almanac_server: str, almanac_template: str) -> Iterator[TestAlmanac]:
    """pg_almanac in a fresh database: `almanac.use(app)`, `almanac.clock`, `almanac.run_due()`."""
    name = f"almanac_test_{os.getpid()}_{next(_numbers)}"
    with database.connect(almanac_server) as conn:
        database.clone_database(conn, name, almanac_template)
        made = TestAlmanac(database.dsn_of(almanac_server, name))
        try:
            yield made
        finally:
            made.close()
            database.drop_database(conn, name)
