"""The fixture `jobs`: the functions of the schema on the test's connection; `session()` for another one.

A test that asks for `jobs` shares its database with others (see tests/jobs.py) unless it asks for `own_database`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.conftest import TEMPLATE
from tests.jobs import Jobs, Shared


@pytest.fixture(scope="session")
def shared_database(clone: Any) -> Iterator[Shared]:
    with clone(TEMPLATE) as dsn:
        shared = Shared(dsn)
        yield shared
        shared.conn.close()


@pytest.fixture
def own_database() -> None:
    """Asked for by a test that changes functions or tables."""


def _shares(request: pytest.FixtureRequest) -> bool:
    return "jobs" in request.fixturenames and "own_database" not in request.fixturenames


@pytest.fixture
def dsn(request: pytest.FixtureRequest, clone: Any) -> Iterator[str]:
    if _shares(request):
        yield request.getfixturevalue("shared_database").emptied().dsn
    else:
        with clone(TEMPLATE) as dsn:
            yield dsn


@pytest.fixture
def conn(request: pytest.FixtureRequest, dsn: str) -> Iterator[psycopg.Connection[Any]]:
    if _shares(request):
        yield request.getfixturevalue("shared_database").conn
    else:
        with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as conn:
            yield conn


@pytest.fixture
def jobs(conn: psycopg.Connection[Any]) -> Jobs:
    return Jobs(conn)


@pytest.fixture
def session(connect: Callable[..., Any]) -> Callable[..., Jobs]:
    return lambda **options: Jobs(connect(**options))


@pytest.fixture
def live_jobs(live_conn: Any) -> Jobs:
    return Jobs(live_conn)
