"""Ticks in many sessions at once, with sessions killed: each tick is decided once, and none is lost."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.jobs import Jobs

SCHEDULES = 1000


def make_schedules(conn: psycopg.Connection[Any], count: int = SCHEDULES, cron: str = "* * * * *") -> None:
    """As put_schedule makes them, but all at once, and due a little while ago."""
    conn.execute("select almanac.put_schedule('default', '0', %s, 'race', catch_up => 'all')", [cron])
    conn.execute(
        """update almanac.schedule set decided_until = date_trunc('minute', almanac.clock()) - interval '1 second',
                  next_due_at = date_trunc('minute', almanac.clock()),
                  look_at = date_trunc('minute', almanac.clock())"""
    )
    columns = ", ".join(
        row[0]
        for row in conn.execute(
            """select quote_ident(attname) from pg_attribute
                where attrelid = 'almanac.schedule'::regclass and attnum > 0 and attname <> 'name'"""
        )
    )
    conn.execute(
        f"insert into almanac.schedule (name, {columns}) select n::text, {columns} from almanac.schedule,"
        f" generate_series(1, {count - 1}) n".encode()
    )


def check(conn: psycopg.Connection[Any], expected: int) -> None:
    (row,) = conn.execute(
        """select (select count(*) from almanac.tick) as ticks,
                  (select count(*) from almanac.job) as jobs,
                  (select count(distinct (schedule, tick_at)) from almanac.job) as distinct_jobs,
                  (select count(*) from almanac.tick t join almanac.job j
                       on j.queue = t.queue and j.id = t.job_id and j.schedule = t.schedule
                      and j.tick_at = t.tick_at) as matched,
                  (select count(*) from almanac.schedule where next_due_at <= almanac.clock()) as due,
                  (select sum(fires) from almanac.schedule) as fires"""
    ).fetchall()
    assert row == (expected, expected, expected, expected, 0, expected)


def in_threads(count: int, run: Callable[[int], None]) -> list[BaseException]:
    failures: list[BaseException] = []

    def guarded(n: int) -> None:
        try:
            run(n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=[n]) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return failures


def test_ten_sessions_tick_at_once(conn, clock, connect):
    make_schedules(conn)
    sessions = [connect() for _ in range(10)]
    barrier = threading.Barrier(10)

    def tick(n: int) -> None:
        barrier.wait()
        for _ in range(200):
            row = sessions[n].execute("select schedules, more from almanac.tick(37)").fetchone()
            if row and not row[0]:
                return

    assert in_threads(10, tick) == []
    # What a session found locked, another one was deciding.
    assert Jobs(conn).tick(batch_size=2000)[0].schedules == 0
    check(conn, SCHEDULES)


def test_ten_sessions_advance_one_at_a_time(conn, clock, connect):
    make_schedules(conn, 200)
    sessions = [connect() for _ in range(10)]
    decided: list[int] = []

    def advance(n: int) -> None:
        names = [str(name) for name in range(200)]
        random.Random(n).shuffle(names)
        for name in names:
            decided.extend(
                1 for _ in sessions[n].execute("select from almanac.advance_schedule('default', %s)", [name])
            )

    assert in_threads(10, advance) == []
    assert len(decided) == 200
    check(conn, 200)


@pytest.mark.parametrize("seed", range(2))
def test_sessions_are_killed_while_they_tick(conn, clock, dsn, seed):
    """Killed after statements that did half of the work, before they could commit, and at any other moment."""
    make_schedules(conn)
    chance = random.Random(seed)
    stop = threading.Event()
    pids: dict[int, int] = {}
    killed = 0

    def tick(n: int) -> None:
        while not stop.is_set():
            try:
                with psycopg.connect(dsn) as session:
                    pids[n] = session.info.backend_pid
                    while not stop.is_set():
                        row = session.execute("select schedules from almanac.tick(11)").fetchone()
                        # Sometimes the whole of it is done and only the commit is missing.
                        if row and row[0] and random.random() < 0.3:
                            time.sleep(0.01)
                        session.commit()
                        if row and not row[0]:
                            return
            except psycopg.OperationalError:
                continue

    ticking = threading.Thread(target=lambda: in_threads(10, tick))
    ticking.start()
    deadline = time.monotonic() + 60
    while ticking.is_alive() and time.monotonic() < deadline:
        time.sleep(chance.uniform(0.005, 0.03))
        if pids:
            row = conn.execute("select pg_terminate_backend(%s)", [chance.choice(list(pids.values()))]).fetchone()
            killed += bool(row and row[0])
    stop.set()
    ticking.join(30)
    assert killed > 5, "nobody was killed: the test shows nothing"
    Jobs(conn).tick(batch_size=2000)
    check(conn, SCHEDULES)


def test_declaring_from_ten_processes_at_once_makes_one_schedule(conn, clock, connect):
    sessions = [connect() for _ in range(10)]
    barrier = threading.Barrier(10)

    def declare(n: int) -> None:
        for release in range(5):
            barrier.wait()
            sessions[n].execute(
                "select almanac.put_schedule('default', 'app', '0 9 * * *', 'x', payload => %s::jsonb)",
                [f'{{"release": {release}}}'],
            )

    assert in_threads(10, declare) == []
    rows = conn.execute(
        "select after->'payload'->>'release' from almanac.schedule_revision order by revision"
    ).fetchall()
    assert [release for (release,) in rows] == ["0", "1", "2", "3", "4"]


def test_a_locked_schedule_holds_up_nobody_and_fires_later_once(conn, clock, connect):
    make_schedules(conn, 20)
    holder = connect(autocommit=False)
    holder.execute("select from almanac.schedule where name = '7' for update")
    assert Jobs(conn).tick()[0].fired == 19
    holder.rollback()
    assert Jobs(conn).tick()[0].fired == 1
    check(conn, 20)


def test_a_statement_timeout_leaves_everything_for_the_next_tick(conn, clock, connect):
    make_schedules(conn)
    session = connect()
    for timeout in range(2, 60, 7):
        session.execute(f"set statement_timeout = '{timeout}ms'".encode())
        try:
            session.execute("select almanac.tick(2000)")
        except psycopg.errors.QueryCanceled:
            continue
        break
    assert conn.execute("select count(*) from almanac.schedule where error is not null").fetchone() == (0,)
    session.execute("set statement_timeout = 0")
    session.execute("select almanac.tick(2000)")
    check(conn, SCHEDULES)


def test_a_lock_that_is_not_had_in_time_is_no_fault_of_a_schedule(conn, clock, connect):
    Jobs(conn).tick()  # keeps house, which is not what is to be held up
    make_schedules(conn, 20)
    holder, session = connect(autocommit=False), connect()
    holder.execute("lock table almanac.tick in access exclusive mode")
    session.execute("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        session.execute("select almanac.tick(2000)")
    holder.rollback()
    assert conn.execute("select count(*) from almanac.schedule where error is not null").fetchone() == (0,)
    session.execute("select almanac.tick(2000)")
    check(conn, 20)
