"""Databases that write times and lengths of time in another style than the driver reads."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pyclient import Almanac, JobContext, database
from pyclient.testing import Clock
from tests.pyclient.test_cli import in_process
from tests.workers import Jobs, run_due

STYLES = [("SQL, DMY", "sql_standard"), ("German", "iso_8601"), ("Postgres, MDY", "postgres_verbose")]


@pytest.fixture(params=STYLES, ids=lambda styles: styles[0])
def styled_dsn(request, live_dsn):
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        for setting, style in zip(("datestyle", "intervalstyle"), request.param, strict=True):
            conn.execute(sql.SQL("alter database {} set {} to {}").format(name, sql.SQL(setting), style))
    with psycopg.connect(live_dsn) as conn, pytest.raises(NotImplementedError):
        conn.execute("select now()").fetchone()  # what everybody meets who does nothing about it
    return live_dsn


def test_an_app_is_declared_and_its_jobs_end_as_they_should(styled_dsn):
    seen: list[Any] = []
    with contextlib.closing(Almanac(styled_dsn)) as app, contextlib.closing(Jobs(styled_dsn)) as jobs:

        @app.schedule("0 9 1 1 *", timezone="Europe/Brussels", max_age=timedelta(hours=36))
        @app.job("yearly")
        async def yearly() -> None: ...

        @app.job("looks", max_attempts=1)
        async def looks(ctx: JobContext) -> None:
            async with ctx.transaction() as conn:
                row = await (await conn.execute("select due_at, now() - due_at from almanac.job")).fetchone()
            seen.append((row, ctx.due_at, ctx.lateness))

        @app.job("looks in a thread")
        def looks_in_a_thread(ctx: JobContext) -> None:
            with ctx.transaction() as conn:
                seen.append(conn.execute("select interval '1 day 2 seconds'").fetchone())

        @app.job("raises", base_delay=3600)
        async def raises() -> None:
            raise ValueError

        app.declare()
        at = datetime(2026, 2, 3, 4, 5, 6, 789, UTC)
        app.enqueue("looks", due_at=at)
        run_due(app, styled_dsn)
        (((due_at, late), told, lateness),) = seen
        assert due_at == told == at
        assert lateness <= late
        app.enqueue("raises")
        asyncio.run(app.enqueue_async("looks in a thread"))
        run_due(app, styled_dsn)
        assert seen[1:] == [(timedelta(days=1, seconds=2),)]
        assert jobs.counts() == {"completed": 2, "retrying": 1}


def test_calls_can_be_made_on_any_connection(styled_dsn):
    """Of the user's, with the session's own styles."""
    at = datetime(2026, 2, 3, 4, 5, 6, 789, UTC)

    def claim(conn):
        database.enqueue(conn, queue="default", job_type="t", due_at=at)
        (job,) = database.claim_due(conn, queue="default", worker="w", lease=timedelta(minutes=5))
        assert (job.due_at, job.lateness > timedelta(days=1)) == (at, True)
        arguments = {"queue": "default", "job_id": job.job_id, "lease_token": job.lease_token}
        failed = database.fail_with_backoff(conn, **arguments, error="no", retry_after=timedelta(days=1.5))
        assert failed.due_at is not None
        assert timedelta(days=1) < failed.due_at - datetime.now(UTC) <= timedelta(days=1.5)

    with psycopg.connect(styled_dsn) as conn:
        claim(conn)
    with contextlib.closing(database.pool(styled_dsn)) as pool, pool.connection() as conn:
        claim(conn)

    async def preview() -> None:
        async with await psycopg.AsyncConnection.connect(styled_dsn) as conn:
            (run,) = await database.preview_cron(conn, cron="0 9 * * *", timezone="Asia/Kolkata", count=1, after=at)
            assert (run.run_at, run.local_time) == (datetime(2026, 2, 4, 3, 30, tzinfo=UTC), datetime(2026, 2, 4, 9))

    asyncio.run(preview())


def test_client_side_cursors_have_the_answers_as_text(live_dsn):
    with psycopg.connect(live_dsn, cursor_factory=psycopg.ClientCursor) as conn:
        assert database.enqueue(conn, queue="default", job_type="t", payload={"a": 1}).created


def test_the_command_line_shows_the_next_runs(styled_dsn):
    done = in_process("--dsn", styled_dsn, "cron", "next", "0 9 * * *", "-n", "1", "--after", "2026-02-03")
    assert done.stdout.startswith("Tue 2026-02-03 09:00:00"), done.output


def test_a_test_database_can_have_another_style(styled_dsn):
    with database.connect(styled_dsn) as conn:
        database.install_test_clock(conn)
        assert Clock(conn).jump("1 day") == Clock(conn).now
