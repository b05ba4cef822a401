"""Hours of work in little: half of what the server can do, for a while, and how large the hot tables have become."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from tests.bench import jobs
from tests.bench.harness import Bench, Connection, Leg, Measurement

# What a job passes through: its table and that of claims, with all indexes and toast.
SIZES = """
select sum(pg_total_relation_size(relid))::bigint, sum(pg_indexes_size(relid))::bigint, sum(n_dead_tup)::bigint
  from pg_stat_user_tables where relid in ('almanac.job'::regclass, 'almanac.claim'::regclass)
"""
BATCH = 100


def soak(bench: Bench) -> Iterator[Leg]:
    # Once is enough, however many rounds there are: it is long by itself.
    measured = soaked(bench)
    yield lambda: measured


def soaked(bench: Bench) -> Iterator[Measurement]:
    maximum = next(jobs.ours(bench, BATCH, 1))["value"]
    per_second = maximum / 2
    seconds = bench.soak_seconds
    stop = threading.Event()
    done = [0]

    def produce() -> None:
        with psycopg.connect(bench.dsn(), autocommit=True) as conn:
            began, made = time.monotonic(), 0
            while not stop.is_set():
                conn.execute(jobs.FILL, [BATCH, None, 0], prepare=True)
                made += BATCH
                stop.wait(max(0.0, began + made / per_second - time.monotonic()))

    def consume() -> None:
        with psycopg.connect(bench.dsn(), autocommit=True) as conn:
            cursor = conn.cursor(binary=True)
            while not stop.is_set():
                cursor.execute(jobs.CLAIM, (BATCH,), prepare=True)
                rows = cursor.fetchall()
                if not rows:
                    stop.wait(0.002)
                    continue
                cursor.execute(jobs.COMPLETE, ([row[0] for row in rows], [row[1] for row in rows]), prepare=True)
                cursor.fetchall()
                done[0] += len(rows)

    def tick() -> None:
        with psycopg.connect(bench.dsn(), autocommit=True) as conn:
            while not stop.wait(1.0):
                conn.execute("select almanac.tick()")

    with bench.emptied() as conn:
        threads = [threading.Thread(target=part) for part in (produce, consume, tick)]
        for thread in threads:
            thread.start()
        try:
            first = min(60.0, seconds / 3)
            time.sleep(first)
            early = sizes(conn)
            time.sleep(seconds - first)
            late = sizes(conn)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    described: dict[str, Any] = {"seconds": round(seconds), "batch": BATCH, "per_s": round(per_second)}
    yield {"metric": "soak_done_per_s", "value": done[0] / seconds, "unit": "jobs/s", **described}
    for name, unit, column in (("size", "MB", 0), ("index_size", "MB", 1), ("dead_rows", "rows", 2)):
        scale = 2**20 if unit == "MB" else 1
        yield {"metric": f"soak_{name}_early", "value": early[column] / scale, "unit": unit, **described}
        yield {"metric": f"soak_{name}_end", "value": late[column] / scale, "unit": unit, **described}
    yield {"metric": "soak_size_ratio", "value": late[0] / early[0], "unit": "×", **described}


def sizes(conn: Connection) -> tuple[int, int, int]:
    row = conn.execute(SIZES).fetchone()
    assert row is not None
    return row[0], row[1], row[2] or 0
