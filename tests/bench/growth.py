"""What a job costs as things grow: jobs of the future, history, jobs that run, jobs since the last vacuum, queues,
connections; and a tick, as schedules do.

Each curve starts small and is measured again after every step, so that a point costs only what it adds. The plot goes
to docs/growth.svg: cost relative to the first point of its curve, against the number of things. Flat is wanted.
"""

import functools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from tests.bench import jobs, schedules
from tests.bench.harness import Bench, Connection, Leg, Measurement, together

PLOT = Path(__file__).parents[2] / "docs" / "growth.svg"
DATABASE = "growth"
TIMES = 3
JOBS = 5_000

FUTURE = """
insert into almanac.job (queue, due_at, created_at, max_attempts, job_type, created_by)
select 'default', now() + interval '1 day' + n * interval '1 ms', now(), 5, 'noop', 'bench'
  from generate_series(1, %s) n
"""
HISTORY = """
insert into almanac.job_history (id, due_at, lease_token, created_at, finished_at, attempt, max_attempts, priority,
                                 caught_up, queue, state, job_type, created_by, payload)
select nextval('almanac.job_id_seq'), now(), n, now(), now(), 1, 5, 0, false, 'default', 'completed', 'noop', 'bench',
       '{}'
  from generate_series(1, %s) n
"""
QUEUES = "select almanac.put_queue('queue ' || n) from generate_series(%s::integer, %s::integer) n"
IN_EACH_QUEUE = """
insert into almanac.job (queue, due_at, created_at, max_attempts, job_type, created_by)
select queue.queue, now(), now(), 5, 'noop', 'bench' from almanac.queue where queue.queue <> 'default'
"""


def growth(bench: Bench) -> Iterator[Leg]:
    """No legs: a curve is measured from left to right, once."""
    for curve in (future, history, running, unvacuumed, queues, connections, due_schedules):
        for point in curve(bench):
            bench.emit("growth", point)
        bench.drop(DATABASE)
    PLOT.write_text(plot([result for result in bench.results if result["scenario"] == "growth"]), encoding="utf-8")
    yield from ()


def measured(bench: Bench, things: str, count: int, clients: int = 1, batch: int = 100) -> list[Measurement]:
    """Microseconds of all connections together for a job, claimed and completed."""
    found = []
    for _ in range(TIMES):
        with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
            # What a session does once, such as to compile functions, shall not count for much.
            jobs.fill(conn, max(JOBS, 1000 * clients))
            bench.settle(conn, "almanac.job")
        took, done = together(bench.dsn(DATABASE), clients, functools.partial(jobs.worked_off, jobs.OURS, batch, False))
        found.append(described(things, count, took / sum(done) * 1e6, "us a job"))
    return found


def described(things: str, count: int, value: float, unit: str) -> Measurement:
    return {"metric": "growth_us", "value": value, "unit": unit, "things": things, "count": count}


def grown(conn: Connection, statement: str, *numbers: Any) -> None:
    conn.execute(statement.encode(), numbers)


def future(bench: Bench) -> Iterator[list[Measurement]]:
    yield from stepwise(bench, "jobs of the future", FUTURE, "almanac.job")


def history(bench: Bench) -> Iterator[list[Measurement]]:
    yield from stepwise(bench, "rows of history", HISTORY, "almanac.job_history")


def running(bench: Bench) -> Iterator[list[Measurement]]:
    """So many are run by others, for longer than this takes."""
    there = 0
    for count in (1_000, 10_000, 100_000):
        with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
            jobs.fill(conn, count - there)
            while conn.execute("select from almanac.claim_due('default', 'others', 10000, lease => '1 day')").rowcount:
                pass
            bench.settle(conn, "almanac.job")
        there = count
        yield measured(bench, "jobs that run", count)


def unvacuumed(bench: Bench) -> Iterator[list[Measurement]]:
    """So many were done since the table was vacuumed, and what is left of them lies before what is due."""
    there = 0
    with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
        conn.execute("alter table almanac.job set (autovacuum_enabled = off)")
        for count in (1_000, 10_000, 100_000, 1_000_000):
            found = []
            jobs.fill(conn, count - there)
            together(bench.dsn(DATABASE), 1, functools.partial(jobs.worked_off, jobs.OURS, 1000, False))
            there = count
            for _ in range(TIMES):
                jobs.fill(conn, JOBS)
                took, done = together(bench.dsn(DATABASE), 1, functools.partial(jobs.worked_off, jobs.OURS, 100, False))
                found.append(described("jobs since the last vacuum", count, took / sum(done) * 1e6, "us a job"))
            yield found


def stepwise(bench: Bench, things: str, statement: str, table: str) -> Iterator[list[Measurement]]:
    there = 0
    for count in (1_000, 10_000, 100_000, 1_000_000):
        with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
            grown(conn, statement, count - there)
            bench.settle(conn, table)
        there = count
        yield measured(bench, things, count)


def queues(bench: Bench) -> Iterator[list[Measurement]]:
    there = 0
    for count in (1, 10, 100, 1_000, 10_000):
        with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
            if count > 1:
                grown(conn, QUEUES, there + 1, count)
                conn.execute("delete from almanac.job where queue <> 'default'")
                conn.execute(IN_EACH_QUEUE)
            bench.settle(conn, "almanac.job", "almanac.queue")
        there = count
        yield measured(bench, "queues", count)


def connections(bench: Bench) -> Iterator[list[Measurement]]:
    for count in (1, 2, 10, 50, 200):
        yield measured(bench, "connections", count, clients=count, batch=10)


def due_schedules(bench: Bench) -> Iterator[list[Measurement]]:
    """A tick with 100 schedules due among so many."""
    for count in (1_000, 10_000, 100_000, 1_000_000):
        with psycopg.connect(bench.dsn(DATABASE), autocommit=True) as conn:
            schedules.made(bench, conn, count, "interval '1 day' + random() * interval '364 days'", "0 9 1 1 *")
            found = []
            conn.execute("select almanac.tick()")
            for _ in range(TIMES):
                conn.execute(
                    """update almanac.schedule
                          set next_due_at = now(), look_at = now(), decided_until = now() - interval '1 second'
                        where name in (select 's' || n from generate_series(1, 100) n)"""
                )
                bench.settle(conn)
                began, decided = time.perf_counter(), 0
                while decided < 100:
                    row = conn.execute("select schedules from almanac.tick()").fetchone()
                    decided += row[0] if row else 0
                found.append(described("schedules", count, (time.perf_counter() - began) * 1e4, "us a schedule"))
        yield found


# ── the plot ────────────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 60, 40, 190, 50
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b"]


def plot(results: Iterable[Measurement]) -> str:
    curves: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        curves.setdefault(result["things"], []).append((result["count"], result["value"]))
    relative = {things: [(count, value / points[0][1]) for count, value in points] for things, points in curves.items()}
    most = max([2.0, *(ratio for points in relative.values() for _, ratio in points)]) * 1.1

    def place(count: float, ratio: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * math.log10(count) / 6
        return round(across, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ratio / most, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        '     font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Cost of one, relative to the first point of its curve</text>',
    ]
    for power in range(7):
        x, y = place(10**power, 0)
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{TOP}" stroke="#eee"/>')
        lines.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{10**power:,}</text>')
    for ratio in range(int(most) + 1):
        x, y = place(1, ratio)
        lines.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{ratio}×</text>')
    for number, (things, points) in enumerate(relative.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (place(count, ratio) for count, ratio in points))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
            for x, y in (place(count, ratio) for count, ratio in points)
        ]
        first, last = curves[things][0][1], curves[things][-1][1]
        y = TOP + 16 + 34 * number
        lines.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{WIDTH - RIGHT + 28}" y="{y}">{things}</text>')
        lines.append(f'<text x="{WIDTH - RIGHT + 28}" y="{y + 14}" fill="#666">{first:,.0f} → {last:,.0f} µs</text>')
    return "\n".join([*lines, "</svg>", ""])
