"""Jobs through the SQL functions alone: claim and complete, enqueue, and what must not slow them down.

The yardstick is the least that a queue in PostgreSQL can do: one narrow table, a skip-locked claim, a DELETE by id. It
keeps no history, fences nothing and has one index besides its key. In between lies the same work without functions:
bare statements that write the rows we write into our tables, and ask for nothing. It tells what the rows cost from what
enforcing costs. Then come the same statements, each in a function that does nothing else. Where a worker works beside
what is measured, the yardstick is also measured beside a bare consumer: what two cores spend on the one, the other
cannot have.
"""

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pyclient import Almanac
from pyclient.worker import claiming
from tests.bench import worker
from tests.bench.harness import Bench, Connection, Leg, Measurement, least_function, together

CEILING_TABLE = """
drop table if exists q;
create table q (id bigserial primary key, run_at timestamptz not null, state text not null default 'pending',
                attempts int not null default 0, payload jsonb, done_at timestamptz);
create index on q (run_at) where state = 'pending';
"""
CEILING_FILL = """
insert into q (run_at, payload)
select now() - interval '1 hour' + n * interval '1 ms', '{}' from generate_series(1, %s) n
"""
CEILING_DELETE = "delete from q where id = any (%b)"
CEILING_CLAIM = """
with c as (select id from q where run_at <= now() and state = 'pending' order by run_at limit %s for update skip locked)
update q set state = 'running', attempts = attempts + 1 from c where q.id = c.id returning q.id
"""
SAME_ROWS_CLAIM = """
with claimed as (
    update almanac.job
       set state = 'running', attempt = attempt + 1, lease_token = lease_token + 1, leased_by = 'bench',
           claimed_at = now(), lease_expires_at = now() + interval '5 minutes'
     where ctid = any (array(
        select ctid from almanac.job
         where queue = 'default' and priority = 0 and due_at <= now()
           and state in ('scheduled', 'retrying') and parked_at is null and counted_at is null
         order by due_at, id limit %s for update skip locked))
    returning id
), listed as (
    insert into almanac.claim (queue, look_at, job_ids)
    select 'default', now() + interval '1 second', array_agg(id) from claimed having count(*) > 0
)
select id from claimed
"""
SAME_ROWS_END = "with ended as (delete from almanac.job where queue = 'default' and id = any (%b) returning *)"
SAME_ROWS_KEEP = """
insert into almanac.job_history (id, due_at, lease_token, created_at, finished_at, attempt, max_attempts, priority,
                                 caught_up, queue, state, job_type, created_by, payload, leased_by, claimed_at)
select id, due_at, lease_token, created_at, now(), attempt, max_attempts, priority, caught_up, queue, 'completed',
       job_type, created_by, payload, leased_by, claimed_at
  from ended
"""
SAME_ROWS_COMPLETE = SAME_ROWS_END + SAME_ROWS_KEEP
SAME_ROWS_INSERT = """
insert into almanac.job (queue, due_at, created_at, max_attempts, job_type, created_by)
values ('default', now(), now(), 5, 'noop', 'bench')
"""
LEAST_FUNCTIONS = (
    least_function(
        "bench_claim(integer)", "setof bigint", f"begin return query {SAME_ROWS_CLAIM.replace('%s', '$1')}; end"
    )
    + least_function(
        "bench_complete(bigint[])", "setof bigint",
        "begin return query "
        f"{SAME_ROWS_END.replace('%b', '$1')}, kept as ({SAME_ROWS_KEEP}) select id from ended; end",
    )
    + least_function(
        "bench_enqueue()", "bigint",
        f"declare v_id bigint; begin {SAME_ROWS_INSERT} returning id into v_id; return v_id; end",
    )
)  # fmt: skip
CLAIM = "select job_id, lease_token from almanac.claim_due('default', 'bench', %s)"
COMPLETE = "select almanac.complete_many('default', %b, %b)"
COMPLETE_AND_CLAIM = """
with ended as materialized (select count(*)::integer as jobs from almanac.complete_many('default', %b, %b))
select claimed.job_id, claimed.lease_token from ended, almanac.claim_due('default', 'bench', ended.jobs) as claimed
"""
FILL = """
select count(*) from almanac.enqueue_many('default', 'noop', array_fill('{}'::jsonb, array[%s]), due_at => %s,
                                          priority => %s)
"""


@dataclass(frozen=True)
class Work:
    """Statements that claim so many jobs and end those that were claimed, given the columns that the claim returned."""

    claim: str
    end: str
    #: Ends those and claims as many others, where one statement can.
    both: str | None = None
    #: Whether it is planned once, as our functions are, and not anew for each array of ids.
    planned_once: bool = False


CEILING = Work(CEILING_CLAIM, CEILING_DELETE)
SAME_ROWS = Work(SAME_ROWS_CLAIM, SAME_ROWS_COMPLETE, planned_once=True)
LEAST = Work("select * from bench_claim(%s)", "select * from bench_complete(%b)", planned_once=True)
OURS = Work(CLAIM, COMPLETE, COMPLETE_AND_CLAIM)
METRICS = {
    CEILING: "ceiling_claim_delete_per_s",
    SAME_ROWS: "same_rows_claim_complete_per_s",
    LEAST: "least_function_claim_complete_per_s",
    OURS: "claim_complete_per_s",
}
#: How long a consumer leaves the table alone, which is how long our worker does where it finds little.
REST = claiming.LONGEST_REST
# Enough for a second or two.
JOBS = {1: 800, 10: 5_000, 100: 50_000, 1000: 50_000}


# ── the loops ───────────────────────────────────────────────────────────────────────────────────────────────────


def batches(work: Work, batch: int, chained: bool, conn: Connection) -> Iterator[int]:
    """Claim and end until nothing is due: the size of each batch when it has ended. Chained, the end of a batch and the
    claim of the next go in one round trip and one transaction, so that a batch waits for the disk once."""
    if work.planned_once:
        conn.execute("set plan_cache_mode = force_generic_plan")
    cursor, ending = conn.cursor(binary=True), conn.cursor(binary=True)
    cursor.execute(work.claim.encode(), (batch,), prepare=True)
    while rows := cursor.fetchall():
        columns = [list(column) for column in zip(*rows, strict=True)]
        if chained and work.both:
            cursor.execute(work.both.encode(), columns, prepare=True)
            yield len(rows)
            continue
        with conn.pipeline() if chained else contextlib.nullcontext():
            ending.execute(work.end.encode(), columns, prepare=True)
            cursor.execute(work.claim.encode(), (batch,), prepare=True)
        assert ending.rowcount == len(rows), f"{ending.rowcount} of {len(rows)} ended"
        yield len(rows)


def worked_off(work: Work, batch: int, chained: bool, conn: Connection) -> int:
    return sum(batches(work, batch, chained, conn))


def ceiling(bench: Bench, batch: int, connections: int, chained: bool = False) -> Iterator[Measurement]:
    jobs = JOBS[batch]
    with psycopg.connect(bench.bare_dsn("ceiling"), autocommit=True) as conn:
        conn.execute(CEILING_TABLE)
        conn.execute(CEILING_FILL, [jobs])
        bench.settle(conn, "q")
    yield drain(bench.bare_dsn("ceiling"), batch, connections, CEILING, chained, jobs=jobs)


def fill(conn: Connection, jobs: int, due_at: Any = None, priority: int = 0) -> None:
    for start in range(0, jobs, 10_000):
        conn.execute(FILL, [min(10_000, jobs - start), due_at, priority])


def drain(
    dsn: str, batch: int, connections: int, work: Work = OURS, chained: bool = False, *, jobs: int, **described: Any
) -> Measurement:
    """Work off what is due, which the caller has enqueued."""
    took, done = together(dsn, connections, functools.partial(worked_off, work, batch, chained))
    assert sum(done) == jobs, f"{sum(done)} of {jobs}"
    return {
        "metric": METRICS[work], "value": jobs / took, "unit": "jobs/s",
        "batch": batch, "connections": connections, "chained": chained, **described,
    }  # fmt: skip


def ours(bench: Bench, batch: int, connections: int, work: Work = OURS, chained: bool = False) -> Iterator[Measurement]:
    """Our tables, worked off by our functions, by bare statements, or by functions of these."""
    jobs = JOBS[batch]
    with bench.emptied() as conn:
        conn.execute(LEAST_FUNCTIONS.encode())
        fill(conn, jobs)
        bench.settle(conn, "almanac.job")
    yield drain(bench.dsn(), batch, connections, work, chained, jobs=jobs)
    with psycopg.connect(bench.dsn(), autocommit=True) as conn:
        assert not conn.execute(worker.UNFINISHED).rowcount, "claimed and not ended"


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


def claim(bench: Bench) -> Iterator[Leg]:
    for batch in JOBS:
        for connections in (1, 4):
            yield functools.partial(ceiling, bench, batch, connections)
            if batch == 100:
                yield functools.partial(ours, bench, batch, connections, SAME_ROWS)
                yield functools.partial(ours, bench, batch, connections, LEAST)
            yield functools.partial(ours, bench, batch, connections)
        yield functools.partial(ceiling, bench, batch, 1, chained=True)
        if batch == 100:
            yield functools.partial(ours, bench, batch, 1, SAME_ROWS, chained=True)
            yield functools.partial(ours, bench, batch, 1, LEAST, chained=True)
        yield functools.partial(ours, bench, batch, 1, chained=True)


def grown(bench: Bench, batch: int = 100, jobs: int = 30_000) -> Iterator[Leg]:
    """The same claim beside things that must not matter."""

    def measured(beside: str, dsn: str, priorities: int = 1) -> Iterator[Measurement]:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for priority in range(priorities):
                fill(conn, jobs // priorities, priority=priority)
            bench.settle(conn, "almanac.job")
        yield drain(dsn, batch, 1, jobs=jobs, beside=beside)

    def beside_nothing() -> Iterator[Measurement]:
        with bench.emptied():
            pass
        yield from measured("nothing", bench.dsn())

    def beside_future() -> Iterator[Measurement]:
        yield from measured("1,000,000 future jobs, 10 priorities", bench.prepared("bench_future_10", in_ten), 10)

    def beside_history() -> Iterator[Measurement]:
        yield from measured("1,000,000 rows of history", bench.prepared("bench_history", with_history))

    def beside_partitions() -> Iterator[Measurement]:
        yield from measured("30 partitions", bench.prepared("bench_month", with_partitions))

    yield from (beside_nothing, beside_future, beside_history, beside_partitions)


def in_ten(conn: Connection) -> None:
    for priority in range(10):
        conn.execute(FUTURE, [priority])


def in_one(conn: Connection) -> None:
    for _ in range(10):
        conn.execute(FUTURE, [0])


def with_history(conn: Connection) -> None:
    conn.execute(HISTORY)
    conn.execute("vacuum analyze almanac.job_history")


def with_partitions(conn: Connection, days: int = 30) -> None:
    """Daily partitions as a month of work leaves them."""
    for day in range(1, days + 1):
        (bounds,) = conn.execute(
            "select format('from (%%L) to (%%L)', current_date - %s::integer, current_date - %s::integer)",
            [day, day - 1],
        ).fetchone() or ("",)
        conn.execute(
            f"create table almanac.bench_day_{day} partition of almanac.job_history for values {bounds}".encode()
        )


FUTURE = """
insert into almanac.job (queue, due_at, created_at, max_attempts, priority, job_type, created_by)
select 'default', now() + interval '1 day' + n * interval '1 ms', now(), 5, %s, 'noop', 'bench'
  from generate_series(1, 100000) n
"""
HISTORY = """
insert into almanac.job_history (id, due_at, lease_token, created_at, finished_at, attempt, max_attempts, priority,
                                 caught_up, queue, state, job_type, created_by, payload)
select -n, now(), n, now(), now(), 1, 5, 0, false, 'default', 'completed', 'noop', 'bench', '{}'
  from generate_series(1, 1000000) n
"""


def snapshot(bench: Bench, batch: int = 100, jobs: int = 100_000) -> Iterator[Leg]:
    """A transaction somewhere keeps an old snapshot open: no dead row can go while the queue is drained."""

    def quarters() -> Iterator[Measurement]:
        with bench.emptied() as conn:
            fill(conn, jobs)
            bench.settle(conn, "almanac.job")
        with psycopg.connect(bench.dsn()) as holder:
            holder.execute("set transaction isolation level repeatable read")
            holder.execute("select from almanac.job limit 1")
            _, (marks,) = together(bench.dsn(), 1, functools.partial(timed_quarters, batch, jobs))
        for quarter, took in enumerate(marks, 1):
            yield {
                "metric": "claim_complete_snapshot_per_s", "value": jobs / 4 / took, "unit": "jobs/s",
                "batch": batch, "connections": 1, "jobs": jobs, "quarter": quarter,
            }  # fmt: skip
        yield {
            "metric": "claim_complete_snapshot_last_to_first", "value": marks[0] / marks[3], "unit": "×",
            "batch": batch, "connections": 1, "jobs": jobs,
        }  # fmt: skip

    yield quarters


def timed_quarters(batch: int, jobs: int, conn: Connection) -> list[float]:
    done, marks = 0, [time.perf_counter()]
    for size in batches(OURS, batch, False, conn):
        done += size
        if done >= jobs * len(marks) // 4:
            marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


def limits(bench: Bench, batch: int = 100, jobs: int = 10_000) -> Iterator[Leg]:
    """Limits switched on, wide enough not to hold anything back: what looking after them costs."""

    def limited(limit: str, settings: str, keys: bool = False) -> Iterator[Measurement]:
        with bench.emptied() as conn:
            conn.execute(f"select almanac.put_queue('default', {settings})".encode())
            try:
                conn.execute(
                    """select count(*) from almanac.enqueue_many(
                           'default', 'noop', array_fill('{}'::jsonb, array[%(jobs)s]), concurrency_keys =>
                           case when %(keys)s then array(select n::text from generate_series(1, %(jobs)s) n) end)""",
                    {"jobs": jobs, "keys": keys},
                )
                bench.settle(conn, "almanac.job")
                yield drain(bench.dsn(), batch, 1, jobs=jobs, limit=limit)
            finally:
                conn.execute("select almanac.put_queue('default', unset => array['max_running', 'rate_limit'])")

    yield functools.partial(limited, "none", "max_running_per_key => 1")
    yield functools.partial(limited, "10,000 concurrency keys", "max_running_per_key => 1", True)
    yield functools.partial(limited, "max_running", "max_running => 1000000")
    yield functools.partial(limited, "rate limit", "rate_limit => 1000000, rate_interval => interval '1 second'")


def enqueue_bulk(bench: Bench, batch: int, listening: bool = False, jobs: int = 50_000) -> Iterator[Measurement]:
    with bench.emptied() as conn:
        bench.settle(conn, "almanac.job")
    with listening_worker(bench) if listening else contextlib.nullcontext():
        took, _ = together(bench.dsn(), 1, functools.partial(bulk_loop, jobs, batch))
    yield {
        "metric": "enqueue_bulk_per_s", "value": jobs / took, "unit": "jobs/s",
        "batch": batch, "connections": 1, "listening": listening,
    }  # fmt: skip


def enqueue(bench: Bench, single: int = 12_000, connections: int = 16) -> Iterator[Leg]:
    def bare_insert(consumed: bool = False) -> Iterator[Measurement]:
        dsn = bench.bare_dsn("ceiling")
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(CEILING_TABLE)
            bench.settle(conn, "q")
        insert = functools.partial(
            statement_loop, single // connections, "insert into q (run_at, payload) values (now(), '{}')"
        )
        with consumer(dsn, CEILING) if consumed else contextlib.nullcontext():
            took, _ = together(dsn, connections, insert)
        yield {
            "metric": "ceiling_insert_per_s", "value": single / took, "unit": "jobs/s", "connections": connections,
            "consumed": consumed,
        }  # fmt: skip

    def same_row(metric: str, statement: str, consumed: bool = False) -> Iterator[Measurement]:
        with bench.emptied() as conn:
            conn.execute(LEAST_FUNCTIONS.encode())
            bench.settle(conn, "almanac.job")
        insert = functools.partial(statement_loop, single // connections, statement)
        with consumer(bench.dsn(), LEAST) if consumed else contextlib.nullcontext():
            took, _ = together(bench.dsn(), connections, insert)
        yield {
            "metric": metric, "value": single / took, "unit": "jobs/s", "connections": connections,
            "consumed": consumed,
        }  # fmt: skip

    def enqueue_single(listening: bool) -> Iterator[Measurement]:
        with bench.emptied() as conn:
            bench.settle(conn, "almanac.job")
        call = functools.partial(statement_loop, single // connections, "select almanac.enqueue('default', 'noop')")
        with listening_worker(bench) if listening else contextlib.nullcontext():
            took, _ = together(bench.dsn(), connections, call)
        yield {
            "metric": "enqueue_single_per_s", "value": single / took, "unit": "jobs/s",
            "connections": connections, "listening": listening,
        }  # fmt: skip

    def one_by_one(by: str, loop: Callable[[int, Connection], float], jobs: int = 3_000) -> Iterator[Measurement]:
        with bench.emptied() as conn:
            bench.settle(conn, "almanac.job")
        _, (took,) = together(bench.dsn(), 1, functools.partial(loop, jobs))
        yield {
            "metric": "enqueue_one_by_one_per_s", "value": jobs / took, "unit": "jobs/s", "connections": 1, "by": by,
        }  # fmt: skip

    yield functools.partial(one_by_one, "a prepared statement", by_statement)
    yield functools.partial(one_by_one, "app.enqueue", by_app)
    yield functools.partial(enqueue_bulk, bench, 1000)
    yield functools.partial(enqueue_bulk, bench, 10_000)
    yield functools.partial(enqueue_bulk, bench, 1000, True)
    yield bare_insert
    yield functools.partial(bare_insert, True)
    yield functools.partial(same_row, "same_rows_enqueue_per_s", SAME_ROWS_INSERT)
    for consumed in (False, True):
        yield functools.partial(same_row, "least_function_enqueue_per_s", "select bench_enqueue()", consumed)
    yield functools.partial(enqueue_single, False)
    yield functools.partial(enqueue_single, True)


def bulk_loop(jobs: int, batch: int, conn: Connection) -> None:
    for _ in range(0, jobs, batch):
        # As the client sends them: one text.
        payloads = "{" + ",".join(['"{}"'] * batch) + "}"
        conn.execute(
            "select count(*) from almanac.enqueue_many('default', 'noop', %s::jsonb[])", (payloads,), prepare=True
        )


def by_statement(times: int, conn: Connection) -> float:
    cursor, began = conn.cursor(), time.perf_counter()
    for _ in range(times):
        cursor.execute(b"select * from almanac.enqueue('default', 'noop', %s)", [Jsonb({})], prepare=True).fetchone()
    return time.perf_counter() - began


def by_app(times: int, conn: Connection) -> float:
    """As an application does it that says no more than app.enqueue: with a connection from the pool of the app."""
    app = Almanac(conn.info.dsn)
    app.job("noop", queue="default")(lambda: None)
    app.enqueue("noop")
    began = time.perf_counter()
    for _ in range(times):
        app.enqueue("noop")
    took = time.perf_counter() - began
    app.close()
    return took


def statement_loop(times: int, statement: str, conn: Connection) -> None:
    cursor = conn.cursor()
    for _ in range(times):
        cursor.execute(statement.encode(), prepare=True)


@contextlib.contextmanager
def consumer(dsn: str, work: Work) -> Iterator[None]:
    """What a worker amounts to without handlers and fences: claims and ends what there is, then rests."""
    context = multiprocessing.get_context("fork")
    ready, stop = context.Event(), context.Event()

    def consume() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            ready.set()
            while not stop.wait(REST):
                worked_off(work, 1000, False, conn)

    process = context.Process(target=consume)
    process.start()
    ready.wait(60)
    try:
        yield
    finally:
        stop.set()
        process.join()


@contextlib.contextmanager
def listening_worker(bench: Bench) -> Iterator[None]:
    """A worker that sleeps until the first job rings, and then works on what is enqueued."""
    counts = worker.Counts()
    with worker.worker(bench.dsn(), counts=counts), psycopg.connect(bench.dsn(), autocommit=True) as conn:
        while not conn.execute("select exists (select from almanac.sleeper)").fetchone()[0]:  # type: ignore[index]
            time.sleep(0.05)
        yield
    counts.close()
