"""The worker: how fast it drains a queue, and how soon it picks up a job when it is idle.

Every run yields {"metric", "value", "unit", …}; the runner repeats and takes medians.
"""

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from pyclient import database
from tests.bench.handlers import SLOTS
from tests.bench.harness import paced

TREE = Path(__file__).resolve().parents[2]
JOBS = 50_000
# Waiting or running, by an index: to look among a million jobs of the future would take as long as a good part of a
# drain.
UNFINISHED = """
select from almanac.job
 where queue = 'default' and priority = 0 and due_at <= now() and parked_at is null and counted_at is null
 limit 1
"""


class Counts:
    """What the handlers have counted, over all processes."""

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="almanac-bench-")
        os.write(handle, b"\0" * 16 * SLOTS)
        os.close(handle)

    def total(self) -> int:
        values = struct.unpack(f"<{2 * SLOTS}q", Path(self.path).read_bytes())
        return sum(values[1::2])

    def close(self) -> None:
        os.unlink(self.path)


@contextlib.contextmanager
def worker(
    dsn: str, *options: str, counts: Counts | None = None, tree: Path = TREE, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`pyclient worker` as anybody would start it; log lines for each job are off, as they are for the peers."""
    environment |= {
        "ALMANAC_DSN": dsn, "ALMANAC_BENCH_COUNTS": counts.path if counts else "", "PYTHONPATH": str(tree),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "pyclient", "worker", "--app", "tests.bench.handlers:app", "--queue", "default",
         "--log-level", "warning", *options],
        cwd=tree, env=os.environ | environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_until(condition: Any, timeout: float = 120.0, pause: float = 0.003) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the worker did not get there")
        time.sleep(pause)


def fill(conn: psycopg.Connection[Any], count: int, job_type: str = "noop") -> None:
    for start in range(0, count, 10_000):
        size = min(10_000, count - start)
        database.enqueue_many(conn, queue="default", job_type=job_type, payloads=[{}] * size)


def drain(
    dsn: str, *, processes: int = 1, jobs: int = JOBS, future: int = 0, job_type: str = "noop"
) -> Iterator[dict[str, Any]]:
    """Async handlers, no-op unless told otherwise, with everything switched on: from the first job handled until all
    are recorded."""
    counts = Counts()
    with psycopg.connect(dsn, autocommit=True) as conn:
        fill(conn, jobs, job_type)
        conn.execute("vacuum analyze almanac.job")
        conn.execute("checkpoint")
        with worker(dsn, "--processes", str(processes), counts=counts):
            wait_until(lambda: counts.total() > 0, pause=0.001)
            began, first = time.perf_counter(), counts.total()
            wait_until(lambda: counts.total() >= jobs)
            wait_until(lambda: not conn.execute(UNFINISHED).rowcount)
            took = time.perf_counter() - began
        handled = counts.total()
        counts.close()
        assert handled == jobs, f"{handled} handled of {jobs}"
    yield {
        "metric": "worker_drain_per_s", "value": (jobs - first) / took, "unit": "jobs/s", "processes": processes,
        "jobs": jobs, "future": future,
    }  # fmt: skip


def pickup(dsn: str, *, jobs: int = 120, per_second: float = 20.0) -> Iterator[dict[str, Any]]:
    """From the moment enqueue has returned to the first line of the handler, into a worker that sleeps."""
    with worker(dsn), psycopg.connect(dsn, autocommit=True) as conn:
        warm = database.enqueue(conn, queue="default", job_type="stamp")
        wait_until(lambda: _found(conn, warm.job_id) is not None, pause=0.05)
        time.sleep(2.0)
        calls = paced(lambda _: database.enqueue(conn, queue="default", job_type="stamp"), jobs, per_second)
        sent = {job.job_id: at for job, at in calls}
        wait_until(lambda: _found(conn, max(sent)) is not None, pause=0.05)
        time.sleep(0.2)
        latencies = sorted(
            (picked_up - sent[job_id]) * 1000
            for job_id, picked_up in conn.execute(
                "select id, (result ->> 'picked_up')::float8 from almanac.job_history where job_type = 'stamp'"
            ).fetchall()
            if job_id in sent
        )
    assert len(latencies) == jobs, f"{len(latencies)} of {jobs} were picked up"
    for name, part in (("pickup_ms_p50", 0.5), ("pickup_ms_p99", 0.99)):
        value = latencies[min(len(latencies) - 1, int(part * len(latencies)))]
        yield {"metric": name, "value": value, "unit": "ms", "jobs": jobs, "per_second": per_second}


def _found(conn: psycopg.Connection[Any], job_id: int) -> Any:
    return conn.execute(
        "select state from almanac.job_history where queue = 'default' and id = %s", [job_id]
    ).fetchone()
