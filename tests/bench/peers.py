"""Other job queues on the same server in the same run: each in the best configuration that its pages describe.

They are installed on demand from PyPI and npm into the cache folder of the user, not into this project.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.bench import jobs, worker
from tests.bench.harness import Bench, Leg, Measurement, paced, percentile

DRIVERS = Path(__file__).parent / "drivers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pg-almanac-bench"
NODE_PACKAGES = ["graphile-worker@0.18", "pg-boss@12.33.7", "node@22", "pg@8"]
PYTHON_PACKAGES = ["pgqueuer[asyncpg]==1.6.0", "uvloop"]
JOBS = 30_000
# Enough for a 99th percentile that is not one bad moment.
PICKUPS, PER_SECOND = 300, 20


@dataclass(frozen=True)
class Peer:
    name: str
    driver: str
    #: Whether jobs that are due are left, finished ones not counted.
    left: str
    emptied: str
    #: Adds the job of a number, where its pages say how SQL does that.
    add: str | None = None

    def command(self, *arguments: object) -> list[str]:
        runtime = CACHE / ("python/bin/python" if self.driver.endswith(".py") else "node/node_modules/.bin/node")
        return [str(runtime), str(CACHE / "drivers" / self.driver), *map(str, arguments)]

    def ask(self, *arguments: object) -> Any:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name} {arguments[0]}: {done.stderr[-2000:]}")
        lines = done.stdout.split("\n")
        return json.loads(lines[-2]) if len(lines) > 1 else None

    @contextlib.contextmanager
    def running(self, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
        process = subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, text=True, env=environment())
        try:
            yield process
        finally:
            process.kill()
            process.wait()


PEERS = [
    Peer(
        "graphile-worker", "graphile.cjs",
        left="select exists (select from graphile_worker._private_jobs where run_at <= now())",
        emptied="truncate graphile_worker._private_jobs",
        add="select graphile_worker.add_job('noop', json_build_object('number', %s::integer))",
    ),
    Peer(
        "pg-boss", "pgboss.cjs",
        left="select exists (select from pgboss.job where name = 'noop' and state < 'completed')",
        emptied="truncate pgboss.job",
    ),
    Peer(
        "PgQueuer", "queuer.py",
        left="select exists (select from pgqueuer where status in ('queued', 'picked'))",
        emptied="truncate pgqueuer, pgqueuer_log",
    ),
]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"NODE_PATH": str(CACHE / "node" / "node_modules")}


def install() -> None:
    """Once for a machine; a change of the versions above installs again."""
    stamp, wanted = CACHE / "installed", "\n".join(NODE_PACKAGES + PYTHON_PACKAGES)
    shutil.copytree(DRIVERS, CACHE / "drivers", dirs_exist_ok=True)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if shutil.which("npm") is None:
        raise SystemExit("npm was not found: the peers graphile-worker and pg-boss need Node")
    print(f"installing the peers into {CACHE} ...", file=sys.stderr, flush=True)
    (CACHE / "node").mkdir(parents=True, exist_ok=True)
    (CACHE / "node" / "package.json").write_text('{"private": true}')
    quietly = ["--silent", "--no-audit", "--no-fund"]
    subprocess.run(["npm", "install", *quietly, *NODE_PACKAGES], cwd=CACHE / "node", check=True)
    subprocess.run([sys.executable, "-m", "venv", str(CACHE / "python")], check=True)
    pip = [str(CACHE / "python" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *PYTHON_PACKAGES], check=True)
    stamp.write_text(wanted)


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


def peers(bench: Bench) -> Iterator[Leg]:
    """Drain, bulk enqueue and pick-up, one system after the other, round after round."""
    install()
    for peer in PEERS:
        peer.ask("install", url(bench, peer))
    yield functools.partial(our_drain, bench)
    for peer in PEERS:
        yield functools.partial(filled_and_drained, bench, peer)
    yield functools.partial(jobs.enqueue_bulk, bench, 1000)
    yield functools.partial(our_pickup, bench)
    for peer in PEERS:
        yield functools.partial(pickup, bench, peer)
        if peer.add is not None:
            yield functools.partial(pickup, bench, peer, peer.add)


def our_drain(bench: Bench) -> Iterator[Measurement]:
    with bench.emptied():
        pass
    for found in worker.drain(bench.dsn(), jobs=JOBS):
        yield found | {"system": "pg_almanac"}


def our_pickup(bench: Bench) -> Iterator[Measurement]:
    with bench.emptied() as conn:
        bench.settle(conn)
    for found in worker.pickup(bench.dsn(), jobs=PICKUPS, per_second=PER_SECOND):
        yield found | {"system": "pg_almanac"}


def url(bench: Bench, peer: Peer) -> str:
    """Over TCP: asyncpg and node-postgres do not read a socket's folder the same way."""
    bench.bare_dsn(peer.driver)
    return f"postgresql://postgres@127.0.0.1:{bench.server.port}/{peer.driver}"


def filled_and_drained(bench: Bench, peer: Peer) -> Iterator[Measurement]:
    dsn = url(bench, peer)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(peer.emptied.encode())
        bench.settle(conn)
        seconds = peer.ask("bulk", dsn, JOBS)["seconds"]
        yield {
            "metric": "peer_enqueue_bulk_per_s", "value": JOBS / seconds, "unit": "jobs/s", "system": peer.name,
            "batch": 1000,
        }  # fmt: skip
        conn.execute("vacuum analyze")
        bench.settle(conn)
        with peer.running("work", dsn, JOBS) as process:
            assert process.stdout is not None
            marks = json.loads(process.stdout.readline())["marks"]
            while conn.execute(peer.left.encode()).fetchone()[0]:  # type: ignore[index]
                time.sleep(0.003)
            ended = time.time()
        (began, first) = marks[0]
    yield {
        "metric": "peer_drain_per_s", "value": (JOBS - first) / (ended - began), "unit": "jobs/s", "system": peer.name,
        "processes": 1, "jobs": JOBS,
    }  # fmt: skip


def pickup(bench: Bench, peer: Peer, add: str | None = None) -> Iterator[Measurement]:
    """From the moment when the call that adds a job has returned. How soon a client notices that differs with its
    language, and counts as if the worker had been quicker: so also with `add`, by the client that adds ours."""
    dsn = url(bench, peer)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(peer.emptied.encode())
        bench.settle(conn)
    with peer.running("stamp", dsn) as process:
        time.sleep(2.5)
        if add is None:
            sent = {int(number): at for number, at in peer.ask("paced", dsn, PICKUPS, PER_SECOND)["sent"].items()}
        else:
            with psycopg.connect(bench.bare_dsn(peer.driver), autocommit=True) as conn:
                calls = paced(lambda number: conn.execute(add.encode(), [number], prepare=True), PICKUPS, PER_SECOND)
            sent = {number: at for number, (_, at) in enumerate(calls)}
        assert process.stdout is not None
        stamps = [json.loads(process.stdout.readline()) for _ in range(PICKUPS)]
    latencies = [(one["at"] - sent[one["number"]]) * 1000 for one in stamps]
    for name, part in (("peer_pickup_ms_p50", 0.5), ("peer_pickup_ms_p99", 0.99)):
        yield {
            "metric": name, "value": percentile(latencies, part), "unit": "ms", "system": peer.name, "jobs": PICKUPS,
            "per_second": PER_SECOND, "added_by": "its client" if add is None else "psycopg",
        }  # fmt: skip
