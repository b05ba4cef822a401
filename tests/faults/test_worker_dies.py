"""kill -9 at any moment, SIGTERM under load: no job is lost, none ends twice, no effect in the database doubles."""

import os
import random
import signal
import time
from datetime import timedelta
from functools import partial

import psycopg
import pytest

from pyclient import Almanac, database
from tests.workers import Jobs, process, wait_until

CODE = """
    async def write(ctx, conn):
        await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])

    @app.job("writes")
    async def writes(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await write(ctx, conn)
            await asyncio.sleep(0.002)

    @app.job("writes_sync")
    def writes_sync(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            time.sleep(0.002)

    @app.job("plain")
    async def plain(ctx: JobContext) -> dict:
        await asyncio.sleep(0.001)
        return {"attempt": ctx.attempt}
"""
TYPES = ("writes", "writes_sync", "plain")


@pytest.fixture
def jobs(live_dsn: str):
    jobs = Jobs(live_dsn)
    jobs.conn.execute("create table effect (job_id bigint, attempt int)")
    jobs.conn.execute("select almanac.put_queue('default', base_delay => interval '0', max_attempts => 1000)")
    yield jobs
    jobs.close()


def check(jobs: Jobs, made: int) -> None:
    assert jobs.counts() == {"completed": made}, "each job has ended, completed"
    (twice,) = jobs.rows("select count(*) - count(distinct id) as n from almanac.job_history")
    assert twice.n == 0, "no job ended twice"
    wrong = jobs.rows(
        "select h.id, h.job_type, count(e.*) as effects"
        "  from almanac.job_history h left join effect e on e.job_id = h.id"
        " where h.job_type in ('writes', 'writes_sync')"
        " group by h.id, h.job_type having count(e.*) <> 1"
    )
    assert wrong == [], "each effect is there exactly once"
    assert (
        jobs.rows("select e.* from effect e left join almanac.job_history h on h.id = e.job_id where h.id is null")
        == []
    )


def _more_than(jobs: Jobs, before: int) -> bool:
    return jobs.counts().get("completed", 0) > before


def kill_again_and_again(tmp_path, live_dsn, jobs, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    app = Almanac(live_dsn)
    made = 0
    with process(tmp_path, live_dsn, CODE, "--lease", "1", "--log-level", "error", "--processes", "1") as running:
        for number in range(kills):
            before = jobs.counts().get("completed", 0)
            # Enough for a worker in full flight, and not more than the last one can finish.
            for job_type in TYPES if made - before < 600 else ():
                app.enqueue_many(job_type, [{}] * 150)
                made += 150
            # Some die while they start, most in full flight.
            if chance.random() < 0.9:
                wait_until(partial(_more_than, jobs, before), 40)
                time.sleep(chance.uniform(0, 0.25))
            else:
                time.sleep(chance.uniform(0, 0.6))
            running.kill()
            assert running.process.poll() is not None, f"kill {number}"
            running.start()
        try:
            wait_until(lambda: set(jobs.counts()) == {"completed"}, 120, pause=0.2)
        except TimeoutError:
            raise AssertionError(f"not all have ended: {jobs.counts()}\n{running.text()[-3000:]}") from None
        assert running.terminate() == 0
    app.close()
    check(jobs, made)


def test_kill_9_at_a_few_random_moments(tmp_path, live_dsn, jobs):
    kill_again_and_again(tmp_path, live_dsn, jobs, kills=3, seed=int(time.time()))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_kill_9_at_a_hundred_random_moments(tmp_path, live_dsn, jobs):
    kill_again_and_again(tmp_path, live_dsn, jobs, kills=100, seed=6)


def test_a_process_killed_between_the_write_and_the_end_has_written_nothing(tmp_path, live_dsn, jobs):
    code = """
        @app.job("writes")
        async def writes(ctx: JobContext) -> None:
            async with ctx.transaction() as conn:
                await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
                if ctx.attempt == 1:
                    os.kill(os.getpid(), 9)
    """
    with process(tmp_path, live_dsn, code, "--lease", "1"), Almanac(live_dsn)._pools.sync().connection() as conn:
        job = database.enqueue(conn, queue="default", job_type="writes")
        assert jobs.wait(job, "completed", timeout=30).attempt == 2
    assert [tuple(row) for row in jobs.rows("select * from effect")] == [(job.job_id, 2)]


def test_two_seconds_of_sigterm_under_load_lose_nothing_and_leave_nothing_leased(tmp_path, live_dsn, jobs):
    code = """
        @app.job("slow")
        async def slow(ctx: JobContext) -> None:
            await asyncio.sleep(0.3)

        @app.job("endless")
        async def endless(ctx: JobContext) -> None:
            await asyncio.sleep(600)

        @app.job("quick")
        async def quick(ctx: JobContext) -> None: ...
    """
    app = Almanac(live_dsn)
    with process(tmp_path, live_dsn, code, "--grace", "2", "--concurrency", "20", "--processes", "2") as running:
        app.enqueue_many("endless", [{}] * 10)
        app.enqueue_many("slow", [{}] * 1000)
        app.enqueue_many("quick", [{}] * 20000)
        wait_until(lambda: jobs.counts().get("completed", 0) > 100, 30)
        began = time.monotonic()
        assert running.terminate() == 0
        assert time.monotonic() - began < 10
    app.close()
    counts = jobs.counts()
    assert set(counts) == {"completed", "scheduled"}, "none left leased"
    assert sum(counts.values()) == 21010, "none lost"
    assert jobs.rows("select attempt from almanac.job where attempt > 0") == [], "what was given back did not count"
    assert jobs.rows("select outcome from almanac.attempt where outcome <> 'released'") == []


def test_a_frozen_worker_that_comes_back_is_refused(tmp_path, live_dsn, jobs):
    code = """
        @app.job("slow")
        async def slow(ctx: JobContext) -> dict:
            await asyncio.sleep(0.3)
            return {"by": os.getpid()}
    """
    app = Almanac(live_dsn)
    options = ("--lease", "1", "--no-supervise")
    with process(tmp_path / "a", live_dsn, code, *options) as first:
        job = app.enqueue("slow", base_delay=timedelta(0))
        jobs.wait(job, "running")
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            with process(tmp_path / "b", live_dsn, code, *options) as second:
                assert jobs.wait(job, "completed", timeout=30).result == {"by": second.process.pid}
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        other = app.enqueue("slow")
        assert jobs.wait(other, "completed").result == {"by": first.process.pid}
    app.close()
    assert jobs.one(job).result == {"by": second.process.pid}
    with psycopg.connect(live_dsn) as conn:
        assert conn.execute("select count(*) from almanac.job_history where id = %s", [job.job_id]).fetchone() == (1,)
