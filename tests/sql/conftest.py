"""The fixture `jobs`: the functions of the schema on the test's connection; `session()` for another one."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.jobs import Jobs


@pytest.fixture
def jobs(conn: Any) -> Jobs:
    return Jobs(conn)


@pytest.fixture
def session(connect: Callable[..., Any]) -> Callable[..., Jobs]:
    return lambda **options: Jobs(connect(**options))


@pytest.fixture
def live_jobs(live_conn: Any) -> Jobs:
    return Jobs(live_conn)
