"""From the bare ceiling to our functions, step by step: what each thing that a job gets costs.

Claim and end in batches of 100 by one connection, as in `jobs`. Measured is the CPU time of the backend (Linux), which
tells steps apart that wall time does not: waiting for the disk and for others is not in it. Each step has what the one
before has and one thing more; each is a table of its own, worked off by bare statements, up to the last three.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import psycopg

from tests.bench import harness, jobs
from tests.bench.harness import Bench, Connection, Leg, Measurement, cpu_ns

JOBS = 30_000
BATCH = 100

TABLE = """
drop table if exists work, history;
create table work (id bigserial, run_at timestamptz not null, state text not null default 'pending',
                   attempts int not null default 0, payload jsonb, done_at timestamptz {columns}, primary key ({key}))
    with (fillfactor = {fillfactor});
create index on work ({claimed_by}) {only};
insert into work (run_at, payload)
select now() - interval '1 hour' + n * interval '1 ms', '{{}}' from generate_series(1, {jobs}) n;
"""
HISTORY = """
create table history (like work, finished_at timestamptz not null {history_key}) {partitioned};
"""
TODAY = "create table history_today partition of history default;"
CLAIM = """
update work set state = 'running', attempts = attempts + 1 {lease}
 where ctid = any (array(
    select ctid from work where {queue} {level} run_at <= now() and state = 'pending'
     order by run_at, id limit %s for update skip locked))
returning id
"""
DELETE = "delete from work where {queue} id = any (%b)"
MOVE = f"with ended as ({DELETE} returning *) insert into history select *, now() from ended"

LEASE_COLUMNS = ", token bigint not null default 0, leased_by text, claimed_at timestamptz, expires_at timestamptz"
LEASE = ", token = token + 1, leased_by = 'bench', claimed_at = now(), expires_at = now() + interval '5 minutes'"
QUEUE_COLUMNS = """, queue text collate "C" not null default 'default', priority smallint not null default 0"""


@dataclass(frozen=True)
class Step:
    says: str
    keeps_history: bool = False
    partitioned: str = ""
    history_key: str = ""
    columns: str = ""
    lease: str = ""
    queue: str = ""
    level: str = ""
    key: str = "id"
    claimed_by: str = "run_at, id"
    only: str = "where state = 'pending'"
    fillfactor: int = 100

    def filled(self, statement: str) -> str:
        return statement.format(jobs=JOBS, **vars(self))

    def prepare(self, conn: Connection) -> None:
        statements = [TABLE, HISTORY if self.keeps_history else "", TODAY if self.partitioned else ""]
        conn.execute(self.filled("".join(statements)).encode())

    def work(self, conn: Connection) -> int:
        end = MOVE if self.keeps_history else DELETE
        return jobs.worked_off(jobs.Work(self.filled(CLAIM), self.filled(end)), BATCH, False, conn)


BARE = Step("claimed by ctid")
KEPT = replace(BARE, says="and a row of history", keeps_history=True)
BY_DAY = replace(
    KEPT, says="and its key, in partitions", partitioned="partition by range (finished_at)",
    history_key=", primary key (id, finished_at)",
)  # fmt: skip
LEASED = replace(BY_DAY, says="and a lease", columns=LEASE_COLUMNS, lease=LEASE)
QUEUED = replace(
    LEASED, says="and queues, first in every key, with priorities", columns=LEASE_COLUMNS + QUEUE_COLUMNS,
    queue="queue = 'default' and", level="priority = 0 and", key="queue, id",
    claimed_by="queue, priority, run_at, id", history_key=", primary key (queue, id, finished_at)",
)  # fmt: skip
HEAP_ONLY = replace(
    QUEUED, says="without an index that knows the state, pages filled to less than half", only="", fillfactor=45
)
STEPS = [BARE, KEPT, BY_DAY, LEASED, QUEUED, HEAP_ONLY]


def ladder(bench: Bench) -> Iterator[Leg]:
    def of(says: str, dsn: str, table: str, prepare: Callable[[Connection], None], work: harness.Loop) -> Leg:
        return functools.partial(measured, bench, says, dsn, table, prepare, work)

    def ceiling_table(conn: Connection) -> None:
        conn.execute(jobs.CEILING_TABLE)
        conn.execute(jobs.CEILING_FILL, [JOBS])

    def our_tables(_: Connection) -> None:
        with bench.emptied() as conn:
            conn.execute(jobs.LEAST_FUNCTIONS.encode())
            jobs.fill(conn, JOBS)

    bare = bench.bare_dsn("ladder")
    ceiling = functools.partial(jobs.worked_off, jobs.CEILING, BATCH, False)
    same_rows = functools.partial(jobs.worked_off, jobs.SAME_ROWS, BATCH, False)
    least = functools.partial(jobs.worked_off, jobs.LEAST, BATCH, False)
    ours = functools.partial(jobs.worked_off, jobs.OURS, BATCH, False)
    chained = functools.partial(jobs.worked_off, jobs.OURS, BATCH, True)
    yield of("the ceiling", bare, "q", ceiling_table, ceiling)
    for step in STEPS:
        yield of(step.says, bare, "work", step.prepare, step.work)
    yield of("our tables, by bare statements", bench.dsn(), "almanac.job", our_tables, same_rows)
    yield of("the same by functions that do nothing else", bench.dsn(), "almanac.job", our_tables, least)
    yield of("our functions", bench.dsn(), "almanac.job", our_tables, ours)
    yield of("our functions, chained", bench.dsn(), "almanac.job", our_tables, chained)


def measured(
    bench: Bench, says: str, dsn: str, table: str, prepare: Callable[[Connection], None], work: harness.Loop
) -> Iterator[Measurement]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        prepare(conn)
        bench.settle(conn, table)
    with psycopg.connect(dsn, autocommit=True) as conn:
        pid = conn.info.backend_pid
        began = cpu_ns(pid)
        done = work(conn)
        assert done == JOBS, done
        yield {
            "metric": "ladder_cpu_us", "value": (cpu_ns(pid) - began) / 1000 / done, "unit": "us a job",
            "batch": BATCH, "step": says,
        }  # fmt: skip
