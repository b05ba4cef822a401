"""The database goes away in all its ways; the worker comes back by itself, and what was acknowledged stays."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from pyclient import Almanac, JobContext, database
from tests.faults.conftest import Breakable
from tests.workers import InThread, Jobs, in_thread, wait_until


@pytest.fixture
def acknowledged(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The jobs whose completion the database has confirmed to the worker."""
    confirmed: set[int] = set()
    complete_rows = database.complete_rows

    async def remember(conn: Any, queue: str, ended: Any) -> set[int] | None:
        accepted = await complete_rows(conn, queue, ended)
        confirmed.update({e[0] for e in ended} if accepted is None else accepted)
        return accepted

    monkeypatch.setattr(database, "complete_rows", remember)
    return confirmed


def restart_again_and_again(behind: Breakable, acknowledged: set[int], restarts: int, caplog: Any) -> None:
    app = Almanac(behind.dsn)

    @app.job("work", base_delay=0, max_attempts=1000)
    async def work(ctx: JobContext) -> dict[str, int]:
        await asyncio.sleep(0.002)
        return {"attempt": ctx.attempt}

    made = 0
    back: list[float] = []
    with in_thread(app, behind.dsn, lease=timedelta(seconds=2), concurrency=20) as running:
        for number in range(restarts):
            with psycopg.connect(behind.dsn, autocommit=True) as conn:
                app.enqueue_many("work", [{}] * 5000, conn=conn)
            made += 5000
            completed = running.worker.metrics.completed
            wait_until(partial(_done, running, completed + 200), 30)
            behind.stop("fast" if number % 2 == 0 else "immediate")
            behind.start()
            before, began = running.worker.metrics.completed, time.monotonic()
            wait_until(partial(_done, running, before + 50), 30)
            back.append(time.monotonic() - began)
            confirmed = set(acknowledged)
            assert confirmed - _completed(behind) == set(), "acknowledged, and lost"
        jobs = Jobs(behind.dsn)
        wait_until(lambda: set(jobs.counts()) == {"completed"}, 60, pause=0.2)
        assert jobs.counts() == {"completed": made}
        (twice,) = jobs.rows("select count(*) - count(distinct id) as n from almanac.job_history")
        assert twice.n == 0
        jobs.close()
    app.close()
    assert max(back) < 10, f"back after {back}"
    lost = [record for record in caplog.records if record.message.startswith("database lost")]
    assert len(lost) <= restarts, "one line for each change of state"


def _done(running: InThread, number: int) -> bool:
    return running.worker.metrics.completed > number


def _completed(behind: Breakable) -> set[int]:
    with psycopg.connect(behind.dsn, autocommit=True) as conn:
        return {row[0] for row in conn.execute("select id from almanac.job_history where state = 'completed'")}


def test_two_restarts_under_load(breakable: Callable[..., Breakable], acknowledged, caplog):
    restart_again_and_again(breakable(), acknowledged, 2, caplog)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_restarts_under_load(breakable: Callable[..., Breakable], acknowledged, caplog):
    restart_again_and_again(breakable(), acknowledged, 10, caplog)


def test_a_result_is_kept_until_the_database_is_back(breakable: Callable[..., Breakable]):
    behind = breakable()
    app = Almanac(behind.dsn)
    may_end = threading.Event()

    @app.job("work")
    async def work(ctx: JobContext) -> dict[str, Any]:
        await asyncio.to_thread(may_end.wait)
        return {"attempt": ctx.attempt, "long": "x" * 1000}

    with in_thread(app, behind.dsn, lease=timedelta(seconds=30)) as running:
        with psycopg.connect(behind.dsn, autocommit=True) as conn:
            job = app.enqueue("work", conn=conn)
        wait_until(lambda: running.worker.slots.busy)
        behind.stop("immediate")
        may_end.set()
        wait_until(lambda: not running.worker.slots.busy)
        time.sleep(1)
        behind.start()
        jobs = Jobs(behind.dsn)
        assert jobs.wait(job, "completed").result["attempt"] == 1
        jobs.close()


def test_a_lease_that_runs_out_while_the_database_is_away_ends_its_handler(breakable: Callable[..., Breakable]):
    behind = breakable()
    app = Almanac(behind.dsn)
    ended = threading.Event()

    @app.job("work", base_delay=0)
    async def work(ctx: JobContext) -> int:
        if ctx.attempt == 1:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
        return ctx.attempt

    with in_thread(app, behind.dsn, lease=timedelta(seconds=2)) as running:
        with psycopg.connect(behind.dsn, autocommit=True) as conn:
            job = app.enqueue("work", conn=conn)
        wait_until(lambda: running.worker.slots.busy)
        behind.stop()
        assert ended.wait(4), "it must not run on without its lease"
        behind.start()
        jobs = Jobs(behind.dsn)
        assert jobs.wait(job, "completed", timeout=30).result == 2
        jobs.close()


def test_the_worker_moves_to_the_host_that_can_be_written_to(breakable: Callable[..., Breakable]):
    first, second = breakable(), breakable()
    app = Almanac(first.dsn)
    handled = []

    @app.job("work")
    async def work(payload: dict[str, Any]) -> None:
        handled.append(payload["on"])

    def enqueue(behind: Breakable, name: str) -> None:
        with psycopg.connect(behind.dsn, autocommit=True) as conn:
            app.enqueue("work", {"on": name}, conn=conn)

    def place(behind: Breakable) -> tuple[str, int]:
        assert behind.server.data_dir is not None
        assert behind.server.port is not None
        return str(behind.server.data_dir.parent), behind.server.port

    (host1, port1), (host2, port2) = place(first), place(second)
    both = f"host={host1},{host2} port={port1},{port2} user=postgres dbname=work"
    with in_thread(app, both):
        enqueue(first, "first")
        wait_until(lambda: handled == ["first"])
        # As a primary that was demoted: sessions stay, writes are refused.
        first.execute("alter system set default_transaction_read_only = on")
        first.execute("select pg_reload_conf()")
        enqueue(second, "second")
        wait_until(lambda: handled == ["first", "second"], 20)


def test_no_free_connection_and_cancelled_statements_are_waited_out(breakable: Callable[..., Breakable], caplog):
    behind = breakable()
    behind.execute("create role limited superuser login connection limit 0")
    # A superuser is not limited, so the database is.
    behind.execute("alter role limited nosuperuser")
    behind.execute("grant almanac_worker, almanac_admin to limited")
    app = Almanac(behind.dsn)

    @app.job("work")
    async def work() -> None: ...

    limited = behind.server.dsn_of("work", user="limited")
    jobs = Jobs(behind.dsn)
    with in_thread(app, limited):
        job = app.enqueue("work")
        time.sleep(1.5)
        assert jobs.state(job) == "scheduled"
        behind.execute("alter role limited connection limit 50")
        jobs.wait(job, "completed", timeout=15)
        with psycopg.connect(behind.dsn) as blocker:
            blocker.execute("lock table almanac.job in access exclusive mode")
            for _ in range(10):
                behind.execute(
                    "select pg_cancel_backend(pid) from pg_stat_activity where usename = 'limited' and state = 'active'"
                )
                time.sleep(0.05)
        jobs.wait(app.enqueue("work"), "completed", timeout=15)
    jobs.close()
    app.close()


def test_through_pgbouncer_in_transaction_mode(pgbouncer):
    behind, dsn, restart, _ = pgbouncer
    behind.execute("create table effect (job_id bigint)")
    app = Almanac(dsn)

    @app.job("plain")
    async def plain() -> dict[str, bool]:
        return {"ok": True}

    @app.job("writes")
    async def writes(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s)", [ctx.job_id])

    jobs = Jobs(behind.dsn)
    with in_thread(app, dsn, lease=timedelta(seconds=2)) as running:
        app.enqueue_many("plain", [{}] * 2980)
        app.enqueue_many("writes", [{}] * 200)
        # More often than it takes a driver to prepare a statement, in sessions that others use meanwhile.
        with ThreadPoolExecutor(5) as many:
            assert len(list(many.map(lambda _: app.enqueue("plain"), range(20)))) == 20
        wait_until(lambda: jobs.counts() == {"completed": 3200}, 40)
        assert running.worker.state.proxied
        assert not running.worker.listener.is_heard
        assert jobs.rows("select count(*) from effect")[0][0] == 200
        restart()
        wait_until(lambda: _enqueued(app), 15)
        wait_until(lambda: jobs.counts() == {"completed": 3201}, 15)
        assert jobs.rows("select * from almanac.sleeper") == [], "nobody rings for one who cannot hear"
    jobs.close()
    app.close()


def test_the_style_of_dates_that_we_ask_for_behind_a_pooler_is_not_that_of_others(pgbouncer):
    behind, dsn, restart, _ = pgbouncer
    behind.execute("alter database work set datestyle to 'German, DMY'")
    behind.execute("alter database work set intervalstyle to sql_standard")
    restart()
    shown = "select current_setting('datestyle'), current_setting('intervalstyle'), pg_backend_pid(), pg_sleep(0.005)"

    def shown_to(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
        return [row for _ in range(50) if (row := conn.execute(shown).fetchone()) is not None]

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as many:
        ours = [stack.enter_context(database.connect(dsn)) for _ in range(2)]
        others = [stack.enter_context(psycopg.connect(dsn, autocommit=True, prepare_threshold=None)) for _ in range(2)]
        seen = list(many.map(shown_to, [*ours, *others]))
    assert {row[:2] for rows in seen[:2] for row in rows} == {("ISO, DMY", "sql_standard")}
    assert {row[:2] for rows in seen[2:] for row in rows} == {("German, DMY", "sql_standard")}
    assert {row[2] for rows in seen[:2] for row in rows} & {row[2] for rows in seen[2:] for row in rows}


def _enqueued(app: Almanac) -> bool:
    try:
        app.enqueue("plain")
    except psycopg.OperationalError:
        return False
    return True
