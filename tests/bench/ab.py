"""make ab BASE=<commit> [ONLY=row,row]: is the working tree slower than BASE? A JSON object a row, and a table.

Both states are installed side by side on one server, and their calls take turns. What counts is the CPU time of the
backend: waiting for the disk or for a neighbour is not in it. A slow moment of the machine hits both states, because
they take turns forty times a second; what is left of it goes with the lower quartile of the rounds. Each round has
copies of both databases and backends of its own, so that no state keeps a lucky place in memory. Both backends and
their client share one core, a different one in each round.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psycopg
from psycopg import sql

from tests import servers
from tests.bench import harness, worker
from tests.bench.rows import NO_COPY, ROWS, Row

# What else a server does from time to time shall not fall into a slice.
SETTINGS = {
    "shared_buffers": "512MB",
    "synchronous_commit": "on",
    "autovacuum": "off",
    "bgwriter_lru_maxpages": "0",
    "checkpoint_timeout": "1d",
    "min_wal_size": "1GB",
    "wal_init_zero": "off",
}
# A backend whose heap ends in a free stretch gives that back to the kernel after each call and asks for it at the next,
# which was a fifth of the CPU of advance_schedule. Whether it does is luck, down to the length of the environment, and
# the same in every round. So glibc keeps what it has.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
ROUNDS = 11
#: CPU of one state in a round.
SECONDS = 0.5
SLICES = 20
#: The most calls to find out how many make a round.
PROBED = 300
#: Apart by less is the same.
NOISE = 0.03


class State:
    """A tree of files, and its databases: one with the schema, one with what a row works on, and a copy for a round."""

    def __init__(self, name: str, tree: Path) -> None:
        self.name, self.tree = name, tree
        self.schema, self.row, self.round = f"{name}_schema", f"{name}_row", f"{name}_round"


@dataclass(frozen=True)
class Plan:
    """How many calls make a round, the same for both states."""

    calls_a_slice: int
    slices: int


class Session:
    """One state during one round: the backend whose CPU counts, or the worker."""

    def __init__(self, row: Row, state: State, dsn: str, stack: contextlib.ExitStack) -> None:
        self.conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self._refill = row.refill
        if row.refill:
            self._helper = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        if row.by_worker:
            counts = worker.Counts()
            stack.callback(counts.close)
            process = stack.enter_context(
                worker.worker(dsn, "--no-supervise", counts=counts, tree=state.tree, **ENVIRONMENT)
            )
            self._read_cpu = functools.partial(process_cpu_ns, process.pid)
        else:
            self._read_cpu = functools.partial(harness.cpu_ns, self.conn.info.backend_pid)
        self._calls = row.calls(self.conn)
        self.reset()

    def reset(self) -> None:
        self.cpu_ns, self.calls, self.units = 0, 0, 0

    def slice(self, calls: int) -> None:
        if self._refill:
            self._refill(self._helper)
        began = self._read_cpu()
        self.units += sum(itertools.islice(self._calls, calls))
        self.cpu_ns += self._read_cpu() - began
        self.calls += calls

    def us(self) -> float:
        return self.cpu_ns / 1000 / self.units


class Comparison:
    def __init__(self, server: servers.Server, base: Path, tree: Path, rounds: int, seconds: float) -> None:
        self._server, self._rounds, self._seconds = server, rounds, seconds
        self.states = (State("base", base), State("tree", tree))
        for state in self.states:
            install(state, self._copy(state.schema, "template1"))

    def compare(self, name: str) -> dict[str, Any]:
        row = ROWS[name]
        for state in self.states:
            self._copy(state.row, state.schema)
        # The partitions of today are there wherever something ticks.
        self._fill(row, "select almanac.tick();" + row.prepare, PROBED)
        plan = self._plan(row)
        self._fill(row, "", plan.calls_a_slice * (plan.slices + row.warm))
        found = [self._round(row, plan, number) for number in range(self._rounds)]
        base, tree = (lower_quartile(of_one) for of_one in zip(*found, strict=True))
        quartiles = statistics.quantiles([tree / base for base, tree in found], n=4, method="inclusive")
        return {
            "row": name, "base_us": round(base, 3), "tree_us": round(tree, 3), "ratio": round(tree / base, 3),
            "spread": [round(quartiles[0], 3), round(quartiles[2], 3)], "rounds": len(found), "unit": row.unit,
        }  # fmt: skip

    def _fill(self, row: Row, prepare: str, calls: int) -> None:
        for state in self.states:
            with psycopg.connect(self._server.dsn_of(state.row), autocommit=True) as conn:
                conn.execute(prepare.encode())
                if row.fill:
                    row.fill(conn, calls)
                conn.execute("vacuum (freeze, analyze)")

    def _plan(self, row: Row) -> Plan:
        most = row.calls_a_slice or sys.maxsize
        with self._sessions(row, 0) as sessions:
            took = min(self._took(session, most) for session in sessions)
        calls_a_slice = min(max(1, round(self._seconds / SLICES / took)), most)
        return Plan(calls_a_slice, math.ceil(1.1 * self._seconds / took / calls_a_slice))

    def _took(self, session: Session, most: int) -> float:
        """Seconds of a call, in slices that become longer: what is seldom called finds its caches cold."""
        calls, called = 1, 0
        for number in itertools.count():
            session.reset()
            session.slice(calls)
            called += calls
            is_long = calls == most or session.cpu_ns > self._seconds * 1e9 / SLICES
            if (is_long and number > 1) or called + 2 * calls > PROBED:
                break
            calls = min(2 * calls, most)
        return session.cpu_ns / 1e9 / session.calls

    def _round(self, row: Row, plan: Plan, number: int) -> tuple[float, float]:
        with self._sessions(row, number) as sessions:
            for at in range(row.warm + plan.slices):
                for session in sessions if (at + number) % 2 else sessions[::-1]:
                    if at == row.warm:
                        session.reset()
                    session.slice(plan.calls_a_slice)
            base, tree = sessions
            return base.us(), tree.us()

    @contextlib.contextmanager
    def _sessions(self, row: Row, number: int) -> Iterator[list[Session]]:
        with contextlib.ExitStack() as stack:
            in_turn = self.states if number % 2 else self.states[::-1]
            dsns = {state: self._copy(state.round, state.row) for state in in_turn}
            sessions = {state: Session(row, state, dsns[state], stack) for state in in_turn}
            if not row.by_worker:
                backends = [session.conn.info.backend_pid for session in sessions.values()]
                stack.enter_context(on_one_core(number, backends))
            yield [sessions[state] for state in self.states]

    def _copy(self, name: str, template: str) -> str:
        self._maintain("drop database if exists {} with (force)", name)
        self._maintain("create database {} template {}", name, template)
        dsn = self._server.dsn_of(name)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(NO_COPY)
        return dsn

    def _maintain(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._server.dsn, autocommit=True) as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def started() -> contextlib.AbstractContextManager[servers.Server]:
    return replace(harness.binaries(), environment=ENVIRONMENT).start(**SETTINGS)


def install(state: State, dsn: str) -> None:
    """By the state's own client."""
    done = subprocess.run(
        [sys.executable, "-m", "pyclient", "migrate"], cwd=state.tree, capture_output=True, text=True, check=False,
        env=os.environ | {"ALMANAC_DSN": dsn, "PYTHONPATH": str(state.tree)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{state.name} cannot be installed:\n{done.stderr}")


def process_cpu_ns(pid: int) -> int:
    """CPU time of another process with all its threads: what clock_getcpuclockid(3) stands for on Linux."""
    return time.clock_gettime_ns((~pid << 3) | 2)


@contextlib.contextmanager
def on_one_core(number: int, pids: Sequence[int]) -> Iterator[None]:
    """This process and the given ones on the same core: neither state has the quicker one, and to wake each other up
    costs the same each time."""
    allowed = os.sched_getaffinity(0)
    core = {sorted(allowed)[number % len(allowed)]}
    try:
        for pid in (0, *pids):
            os.sched_setaffinity(pid, core)
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of that commit, for as long as this lasts."""
    with tempfile.TemporaryDirectory(prefix="almanac-ab-") as folder:
        tree = Path(folder) / "base"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=worker.TREE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def verdict(result: dict[str, Any]) -> str:
    low, high = result["spread"]
    if result["ratio"] > 1 + NOISE and low > 1:
        return "slower"
    return "quicker" if result["ratio"] < 1 - NOISE and high < 1 else ""


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'row':18}{'base':>10}{'tree':>10}  {'unit':14}{'ratio':>6}  middle half"]
    for result in results:
        low, high = result["spread"]
        lines.append(
            f"{result['row']:18}{result['base_us']:>10.2f}{result['tree_us']:>10.2f}  {result['unit']:14}"
            f"{result['ratio']:>6.3f}  {low:.3f} to {high:.3f}  {verdict(result)}"
        )
    return "\n".join(lines)


def refuse(message: str) -> NoReturn:
    print(f"make ab: {message}", file=sys.stderr)
    sys.exit(2)


def counts_cpu() -> bool:
    """Some kernels have no such file, others have it and count nothing in it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ab", description=__doc__)
    parser.add_argument("base", help="the commit to compare the working tree with")
    parser.add_argument("--only", default="", help="rows, comma-separated: " + ", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of CPU, for each state in each round")
    given = parser.parse_args()
    given.rows = [name for name in given.only.split(",") if name] or list(ROWS)
    if unknown := [name for name in given.rows if name not in ROWS]:
        refuse(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if given.rounds < 2 or given.seconds <= 0:
        refuse("it takes at least two rounds of more than no time")
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{given.base}^{{commit}}"],
        cwd=worker.TREE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        refuse(f"BASE={given.base} is no commit here")
    given.base = found.stdout.strip()
    return given


def main() -> None:
    given = arguments()
    if not counts_cpu():
        refuse("/proc/<pid>/schedstat, where the CPU time of a backend is read, is missing or empty here")
    # As Ctrl-C: the server and the worktree have to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, results = time.monotonic(), []
    with checked_out(given.base) as base, started() as server:
        comparison = Comparison(server, base, worker.TREE, given.rounds, given.seconds)
        for number, name in enumerate(given.rows, 1):
            at = time.monotonic()
            result = comparison.compare(name)
            results.append(result)
            print(json.dumps(result), flush=True)
            print(f"{number} of {len(given.rows)}: {name}, {time.monotonic() - at:.0f} s", file=sys.stderr, flush=True)
    print(f"\n{table(results)}\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
