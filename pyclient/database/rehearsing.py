"""For tests: databases of their own, in which the clock obeys and everything can be seen."""

import dataclasses
from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
import psycopg.rows
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pyclient.database.calling import Connection
from pyclient.database.installing import run_script

# Read by every session of the database, so that time is the same for all of them.
_TEST_CLOCK = """
create schema test_clock;
create table test_clock.setting (now timestamptz not null);
insert into test_clock.setting select clock_timestamp();
grant usage on schema test_clock to public;
grant select on test_clock.setting to public;
create or replace function almanac.clock() returns timestamptz language sql volatile
    return (select now from test_clock.setting);
"""


def install_test_clock(conn: Connection) -> None:
    """Replace the clock of a database that is only there for a test."""
    run_script(conn, _TEST_CLOCK)


def set_test_clock(conn: Connection, *, to: datetime | str | None = None, by: timedelta | str = "0") -> datetime:
    """Set the time, or move it; text is read by PostgreSQL: '2026-03-29 02:30 Europe/Brussels', '1 day'."""
    row = conn.execute(
        "update test_clock.setting set now = coalesce(%s::timestamptz, now) + %s::interval returning now", [to, by]
    ).fetchone()
    assert row is not None
    return cast(datetime, row[0])


def next_tick_before(conn: Connection, until: datetime) -> datetime | None:
    """The earliest moment up to `until` at which a schedule is due."""
    row = conn.execute(
        "select min(next_due_at) from almanac.schedule_overview where next_due_at <= %s and status <> 'paused'", [until]
    ).fetchone()
    return row[0] if row else None


def tick_until_done(conn: Connection) -> None:
    while True:
        row = conn.execute("select more from almanac.tick()").fetchone()
        if row is None or not row[0]:
            return


_ALL_JOBS = """
select queue, id as job_id, job_type, state, payload, due_at, attempt, priority, dedup_key, schedule, tick_at,
       caught_up, last_error, null::jsonb as result
  from almanac.job
union all
select queue, id, job_type, state, payload, due_at, attempt, priority, dedup_key, schedule, tick_at, caught_up,
       error, result
  from almanac.job_history
 order by job_id
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenJob:
    """A job as a test sees it."""

    queue: str
    job_id: int
    job_type: str
    state: str
    payload: Any
    due_at: datetime
    attempt: int
    priority: int
    dedup_key: str | None
    schedule: str | None
    tick_at: datetime | None
    caught_up: bool
    last_error: str | None
    result: Any


def all_jobs(conn: Connection) -> list[SeenJob]:
    with conn.cursor(row_factory=psycopg.rows.class_row(SeenJob)) as cursor:
        return cursor.execute(_ALL_JOBS).fetchall()


def clone_database(conn: Connection, name: str, template: str | None = None) -> None:
    conn.execute(
        sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template or "template0"))
    )
    if template is not None:
        no_copy(dsn_of(conn.info.dsn, name), conn.info.password)


def no_copy(dsn: str, password: str | None = None) -> None:
    """A database that was cloned for a test works at once, as if it had been made there."""
    with psycopg.connect(dsn, password=password, autocommit=True) as conn:
        conn.execute("select almanac._note_home()")


def drop_database(conn: Connection, name: str) -> None:
    conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def dsn_of(dsn: str, name: str) -> str:
    """The same server, another database."""
    return make_conninfo(dsn, dbname=name)
