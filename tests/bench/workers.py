"""The scenarios of the worker, of cron and of schedules, as legs of the runner."""

import functools
import itertools
import time
from collections.abc import Iterator

import psycopg

from tests.bench import cron, jobs, worker
from tests.bench.harness import TRACES, Bench, Leg, Measurement


def drains(bench: Bench) -> Iterator[Leg]:
    """1, 2 and 4 processes; beside a million jobs of the future; with an old snapshot held open; in transactions."""
    # What is compared comes three times in each round: a drain takes two seconds, and single ones differ by a third.
    for _ in range(3):
        yield functools.partial(drained, bench, 1)
        yield functools.partial(drained, bench, 1, future=1_000_000)
    for processes in (2, 4):
        yield functools.partial(drained, bench, processes)
    yield functools.partial(drained_by_quarters, bench)
    yield functools.partial(drained_in_transactions, bench)


def drained(bench: Bench, processes: int, future: int = 0) -> Iterator[Measurement]:
    if future:
        dsn = bench.prepared("bench_future", jobs.in_one)
        # What the runs before have left besides their jobs is gone for the other runs too.
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"truncate {TRACES}".encode())
    else:
        dsn = bench.dsn()
        with bench.emptied():
            pass
    yield from worker.drain(dsn, processes=processes, future=future)


def drained_in_transactions(bench: Bench, count: int = 5_000) -> Iterator[Measurement]:
    """Each handler writes a row in the transaction that ends its job."""
    with bench.emptied() as conn:
        conn.execute("create table if not exists public.effect (job_id bigint primary key); truncate public.effect")
        for measurement in worker.drain(bench.dsn(), jobs=count, job_type="write"):
            yield measurement | {"metric": "worker_drain_in_transactions_per_s"}
        assert conn.execute("select count(*) from public.effect").fetchone() == (count,)


def drained_by_quarters(bench: Bench, count: int = 100_000) -> Iterator[Measurement]:
    counts = worker.Counts()
    with bench.emptied() as conn:
        worker.fill(conn, count)
        bench.settle(conn, "almanac.job")
        with psycopg.connect(bench.dsn()) as holder:
            holder.execute("set transaction isolation level repeatable read")
            holder.execute("select from almanac.job limit 1")
            with worker.worker(bench.dsn(), counts=counts):
                marks: list[tuple[float, int]] = []
                deadline = time.monotonic() + 120
                while len(marks) < 5 and time.monotonic() < deadline:
                    done = counts.total()
                    if done and done >= count * len(marks) // 4:
                        marks.append((time.perf_counter(), done))
                    time.sleep(0.002)
    counts.close()
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]
    for quarter, rate in enumerate(rates, 1):
        yield {
            "metric": "worker_drain_snapshot_per_s", "value": rate, "unit": "jobs/s", "processes": 1, "jobs": count,
            "quarter": quarter,
        }  # fmt: skip
    yield {
        "metric": "worker_drain_snapshot_last_to_first", "value": rates[3] / rates[0], "unit": "×", "processes": 1,
        "jobs": count,
    }  # fmt: skip


def pickups(bench: Bench) -> Iterator[Leg]:
    def picked_up() -> Iterator[Measurement]:
        with bench.emptied() as conn:
            bench.settle(conn)
        yield from worker.pickup(bench.dsn())

    yield picked_up


def cron_next(bench: Bench) -> Iterator[Leg]:
    def asked() -> Iterator[Measurement]:
        with psycopg.connect(bench.dsn(), autocommit=True) as conn:
            yield from (found for found in cron.run(conn, calls=200) if found["metric"] != "cron_next_us")

    yield asked
