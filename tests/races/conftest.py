"""The fixtures of tests/sql: `jobs`, `session()`, `own_database`."""

from tests.sql.conftest import conn, dsn, jobs, live_jobs, own_database, session, shared_database

__all__ = ["conn", "dsn", "jobs", "live_jobs", "own_database", "session", "shared_database"]
