"""The fixtures of tests/sql: `jobs`, `session()`, `own_database`; and `seed`, by which a run can be repeated."""

import os
import random

import pytest

from tests.sql.conftest import conn, dsn, jobs, live_jobs, own_database, session, shared_database

__all__ = ["conn", "dsn", "jobs", "live_jobs", "own_database", "session", "shared_database"]


@pytest.fixture
def seed() -> int:
    seed = int(os.environ.get("ALMANAC_TEST_SEED", random.SystemRandom().randrange(10**9)))
    print(f"seed {seed}: repeat with ALMANAC_TEST_SEED={seed}")
    return seed
