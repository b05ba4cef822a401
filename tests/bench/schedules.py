"""Schedules: claims one at a time by 50 connections, a thousand at a time by one tick, and a tick that finds nothing.

The yardstick for the claims is what the idea amounts to without a ledger, a job, a rule or policies: one narrow table,
and an UPDATE of a row that FOR UPDATE SKIP LOCKED has taken, either by name, as advance_schedule does, or whichever is
due first. In between lies the same work without functions: one statement that moves a schedule of ours on, and writes
its row of the ledger and its job; and that statement in a function that does nothing else.
"""

import functools
import time
from collections.abc import Iterator

import psycopg

from tests.bench.harness import Bench, Connection, Leg, Measurement, Start, least_function, percentile, together

CONNECTIONS = 50
DUE = 1_000
#: 1,000 claims are over in a moment: so often, and the time of all of them.
PASSES = 4
#: Claims of each connection before it counts: plans are made by then.
WARM = 8

CEILING_TABLE = """
drop table if exists s;
create table s (name text primary key, next_run_at timestamptz not null, cron text not null, payload jsonb);
create index on s (next_run_at);
insert into s select 's' || n, now(), '* * * * *', '{}' from generate_series(0, %s) n
"""
CEILING_CLAIM = """
update s set next_run_at = next_run_at + interval '1 minute'
 where name = (select name from s where name = %s and next_run_at <= now() for update skip locked)
returning name, next_run_at
"""
CEILING_CLAIM_ANY = """
with due as (select name from s where next_run_at <= now() order by next_run_at limit 1 for update skip locked)
update s set next_run_at = next_run_at + interval '1 minute' from due where s.name = due.name
returning s.name, s.next_run_at
"""
SAME_ROWS_CLAIM = """
with due as (
    select name, next_due_at as at from almanac.schedule
     where queue = 'default' and name = %s and look_at <= now() for update skip locked
), made as (
    insert into almanac.job (queue, due_at, created_at, max_attempts, job_type, created_by, schedule, tick_at)
    select 'default', due.at, now(), 5, 'noop', 'bench', due.name, due.at from due
    returning id
), noted as (
    insert into almanac.tick (queue, schedule, tick_at, decision, job_id, decided_at, lateness, ticked_by)
    select 'default', due.name, due.at, 'fired', made.id, now(), now() - due.at, 'bench' from due, made
)
update almanac.schedule
   set next_due_at = due.at + interval '1 minute', look_at = due.at + interval '1 minute', decided_until = due.at,
       fires = fires + 1
  from due where schedule.queue = 'default' and schedule.name = due.name
returning due.at
"""
LEAST_FUNCTION = least_function(
    "bench_advance(text)", "setof timestamptz", f"begin return query {SAME_ROWS_CLAIM.replace('%s', '$1')}; end"
)
LEAST_CLAIM = "select * from bench_advance(%s)"
CLAIM = "select tick_at, job_id from almanac.advance_schedule('default', %s)"
#: Many schedules like the one that put_schedule made, due at the full minute that has just passed.
COPY = """
do $$
declare
    v_columns text := (select string_agg(quote_ident(attname), ', ') from pg_attribute
                        where attrelid = 'almanac.schedule'::regclass and attnum > 0 and attname <> 'name');
begin
    execute format('insert into almanac.schedule (name, %1$s) select ''s'' || n, %1$s
                      from almanac.schedule, generate_series(1, {count} - 1) n where name = ''s0''', v_columns);
    update almanac.schedule
       set next_due_at = due.at, look_at = due.at, decided_until = due.at - interval '1 second'
      from (select date_trunc('minute', clock_timestamp()) + {ahead} as at) due;
end;
$$
"""


def made(bench: Bench, conn: Connection, count: int, ahead: str = "interval '0'", cron: str = "* * * * *") -> None:
    conn.execute("truncate almanac.schedule, almanac.tick, almanac.schedule_revision")
    conn.execute("select almanac.put_schedule('default', 's0', %s, 'noop')", [cron])
    conn.execute(COPY.format(count=count, ahead=ahead).encode())
    bench.settle(conn, "almanac.schedule")
    # What is measured shall not be split by a full minute, at which everything becomes due once more.
    row = conn.execute("select extract(second from clock_timestamp())").fetchone()
    if row and row[0] > 45:
        time.sleep(60 - float(row[0]))
        conn.execute(
            """update almanac.schedule set next_due_at = next_due_at + interval '1 minute',
                      look_at = look_at + interval '1 minute', decided_until = decided_until + interval '1 minute'"""
        )


def loop(statement: str, start: Start, shares: list[list[str]], conn: Connection) -> tuple[float, float, list[float]]:
    """Claim the share of this connection, one by one: when it began and ended, and how long each took, in ms."""
    row = conn.execute("select nextval('bench_share')").fetchone()
    assert row is not None
    names = shares[(row[0] - 1) % len(shares)]
    cursor, took = conn.cursor(binary=True), []
    for number, name in enumerate(names):
        # A worker's connection lives for days: what a session does once is not what is measured.
        if number == WARM:
            start.wait()
            started = time.perf_counter()
        began = time.perf_counter()
        cursor.execute(statement.encode(), [name] if "%s" in statement else None, prepare=True)
        assert len(cursor.fetchall()) == 1
        took.append((time.perf_counter() - began) * 1000)
    return started, time.perf_counter(), took[WARM:]


def claims(bench: Bench, metric: str, statement: str, **described: str) -> Iterator[Measurement]:
    ours = statement in (CLAIM, SAME_ROWS_CLAIM, LEAST_CLAIM)
    dsn = bench.dsn() if ours else bench.bare_dsn("ceiling")
    count = DUE + WARM * CONNECTIONS
    shares = [[f"s{n}" for n in range(share, count, CONNECTIONS)] for share in range(CONNECTIONS)]
    seconds, each = 0.0, []
    for _ in range(PASSES):
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("drop sequence if exists bench_share; create sequence bench_share")
            if ours:
                conn.execute("truncate almanac.job")
                conn.execute(LEAST_FUNCTION.encode())
                made(bench, conn, count)
            else:
                conn.execute((CEILING_TABLE % (count - 1)).encode())
                bench.settle(conn, "s")
        _, answers = together(dsn, CONNECTIONS, functools.partial(loop, statement, Start(CONNECTIONS), shares))
        seconds += max(ended for _, ended, _ in answers) - min(started for started, _, _ in answers)
        each += [latency for _, _, latencies in answers for latency in latencies]
    yield {
        "metric": metric, "value": PASSES * DUE / seconds, "unit": "schedules/s", "connections": CONNECTIONS,
        **described,
    }  # fmt: skip
    if statement == CLAIM:
        yield {
            "metric": "schedule_claim_ms_p99", "value": percentile(each, 0.99), "unit": "ms",
            "connections": CONNECTIONS,
        }  # fmt: skip


def fanout(bench: Bench, schedules: int = 10_000) -> Iterator[Measurement]:
    with bench.emptied() as conn:
        made(bench, conn, schedules)
        began, more = time.perf_counter(), True
        while more:
            row = conn.execute("select more from almanac.tick()").fetchone()
            more = bool(row and row[0])
        took = time.perf_counter() - began
        row = conn.execute("select count(*) from almanac.job").fetchone()
        assert row == (schedules,), row
    yield {"metric": "tick_fanout_per_s", "value": schedules / took, "unit": "schedules/s", "schedules": schedules}


def idle(bench: Bench, schedules: int = 1_000_000, ticks: int = 200) -> Iterator[Measurement]:
    with psycopg.connect(bench.dsn("bench_idle"), autocommit=True) as conn:
        row = conn.execute("select count(*) from almanac.schedule").fetchone()
        if row != (schedules,):
            # Birthdays: due over the coming year.
            made(bench, conn, schedules, "interval '1 day' + random() * interval '364 days'", "0 9 1 1 *")
        conn.execute("select almanac.tick()")
        took = []
        for _ in range(ticks):
            began = time.perf_counter()
            row = conn.execute("select schedules from almanac.tick()", prepare=True).fetchone()
            took.append((time.perf_counter() - began) * 1_000_000)
            assert row == (0,), row
    yield {"metric": "tick_idle_us", "value": percentile(took, 0.5), "unit": "us", "schedules": schedules}


def run(bench: Bench) -> Iterator[Leg]:
    yield functools.partial(claims, bench, "ceiling_schedule_claims_per_s", CEILING_CLAIM, claimed="by name")
    yield functools.partial(claims, bench, "ceiling_schedule_claims_per_s", CEILING_CLAIM_ANY, claimed="first due")
    yield functools.partial(claims, bench, "same_rows_schedule_claims_per_s", SAME_ROWS_CLAIM)
    yield functools.partial(claims, bench, "least_function_schedule_claims_per_s", LEAST_CLAIM)
    yield functools.partial(claims, bench, "schedule_claims_per_s", CLAIM)
    yield functools.partial(fanout, bench)
    yield functools.partial(idle, bench)
