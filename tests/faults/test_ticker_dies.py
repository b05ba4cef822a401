"""Whoever ticks goes away, with the server or alone; each tick is decided once all the same, and somebody goes on."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests import servers
from tests.faults.conftest import Breakable
from tests.jobs import Jobs
from tests.pg_cron import Launcher
from tests.workers import wait_until

SCHEDULES, TICKERS = 300, 6


class Tickers:
    """Sessions that tick without a pause, come back after a crash, and remember what was confirmed to them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.fired = 0
        self.lost = 0
        self.unexpected: list[BaseException] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(TICKERS)]

    def __enter__(self) -> "Tickers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def go_on(self) -> None:
        confirmed = self.fired
        wait_until(lambda: self.fired > confirmed + SCHEDULES, 60)

    def notice(self, lost: int) -> None:
        wait_until(lambda: self.lost > lost, 30)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True, application_name="ticker") as conn:
                    while not self._stop.is_set():
                        row = conn.execute("select fired from almanac.tick(29)").fetchone()
                        with self._lock:
                            self.fired += row[0] if row else 0
            except psycopg.OperationalError:
                with self._lock:
                    self.lost += 1
                time.sleep(0.05)
            except BaseException as error:
                self.unexpected.append(error)
                return


def crash_again_and_again(behind: Breakable, crashes: int) -> None:
    """In turn the postmaster, which is started again, and a session that ticks: the server then starts again itself."""
    chance = random.Random(crashes)
    behind.execute(
        f"""select almanac.put_schedule('default', n::text, '@every 2s', 'beat', catch_up => 'all')
              from generate_series(1, {SCHEDULES}) as n"""
    )
    with Tickers(behind.dsn) as tickers:
        for number in range(crashes):
            tickers.go_on()
            time.sleep(chance.uniform(0, 2))  # they are due every other second; in between ticks are idle
            lost, confirmed = tickers.lost, tickers.fired
            if number % 2 == 0:
                behind.crash()
                behind.start_after_crash()
            else:
                kill_a_session_that_ticks(behind)
            tickers.notice(lost)
            (fired,) = wait_until(lambda: in_the_ledger(behind), 30)
            assert fired >= confirmed, "confirmed, and lost"
        tickers.go_on()
    assert tickers.unexpected == []
    with psycopg.connect(behind.dsn, autocommit=True) as conn:
        check(Jobs(conn), tickers.fired)


def in_the_ledger(behind: Breakable) -> tuple[int] | None:
    """How many fired; None while the server is on its way down, or up."""
    try:
        with psycopg.connect(behind.dsn) as conn:
            return conn.execute("select count(*) from almanac.tick where decision = 'fired'").fetchone()
    except psycopg.OperationalError:
        return None


def kill_a_session_that_ticks(behind: Breakable) -> None:
    with psycopg.connect(behind.dsn, autocommit=True) as conn:
        find = "select pid from pg_stat_activity where application_name = 'ticker' and state = 'active' limit 1"
        (pid,) = wait_until(lambda: conn.execute(find).fetchone())
    os.kill(pid, signal.SIGKILL)


def check(jobs: Jobs, confirmed: int) -> None:
    while jobs.tick(batch_size=2000)[0].more:
        pass
    # Every tick of the rule from the first on, up to where each schedule says it is, and each of them with its job.
    wrong = jobs.sql(
        """select s.name, s.fires, t.ticks, t.made, t.jobs, t.first, s.decided_until
             from almanac.schedule s
             join lateral (select count(*) as ticks, count(j.id) as made, count(distinct j.id) as jobs,
                                  min(t.tick_at) as first
                             from almanac.tick t
                             left join almanac.job j on j.queue = t.queue and j.id = t.job_id
                                   and j.schedule = t.schedule and j.tick_at = t.tick_at
                            where t.queue = s.queue and t.schedule = s.name and t.decision = 'fired') t on true
            where array[s.fires, t.ticks, t.made, t.jobs]
                  <> array_fill(extract(epoch from s.decided_until - t.first)::bigint / 2 + 1, array[4])
               or s.error is not null"""
    )
    assert wrong == []
    total = jobs.one("select count(*) from almanac.tick")
    assert total >= confirmed
    assert jobs.one("select count(*) from almanac.job") == total, "a job for each tick, and no other"


def test_the_server_crashes_while_sessions_tick(breakable: Callable[..., Breakable]) -> None:
    crash_again_and_again(breakable(), 2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_server_crashes_thirty_times_while_sessions_tick(breakable: Callable[..., Breakable]) -> None:
    crash_again_and_again(breakable(), 30)


# ── pg_cron alone ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pg_cron_server(breakable: Callable[..., Breakable], request: pytest.FixtureRequest) -> Callable[..., Breakable]:
    """`pg_cron_server()`: one where pg_cron could tick, and does not yet."""
    binaries = servers.Choice(request.config.getoption("--pg")).binaries or servers.local_binaries()
    if binaries is None or not binaries.has_pg_cron:
        pytest.skip("no server binaries with pg_cron on this machine")

    def make(**settings: str) -> Breakable:
        usual = {"cron.database_name": "work", "cron.use_background_workers": "on"}
        behind = breakable(shared_preload_libraries="pg_cron", **(usual | settings))
        behind.execute("create extension pg_cron")
        return behind

    return make


@pytest.fixture
def with_pg_cron(pg_cron_server: Callable[..., Breakable]) -> Breakable:
    behind = pg_cron_server()
    behind.execute("select almanac.start_ticking()")
    return behind


def launchers(jobs: Jobs) -> Any:
    return jobs.one("select count(*) from pg_stat_activity where backend_type = 'pg_cron launcher'")


@pytest.mark.pg_cron
@pytest.mark.parametrize(
    "fault, message",
    [
        ("select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'pg_cron launcher'", "active"),
        ("drop extension pg_cron", "is loaded and not created"),
    ],
    ids=["its launcher ended", "its extension dropped"],
)
def test_pg_cron_goes_away_and_a_worker_ticks(with_pg_cron: Breakable, fault: str, message: str) -> None:
    with psycopg.connect(with_pg_cron.dsn, autocommit=True) as conn:
        jobs = Jobs(conn)
        wait_until(lambda: launchers(jobs) == 1)
        jobs.sql("select almanac.put_schedule('default', 'often', '@every 1s', 'beat')")
        jobs.sql(fault)
        went = time.monotonic()
        wait_until(lambda: jobs.tick_if_stale(worker="w1")[0].tick_if_stale, 10, pause=0.2)
        assert time.monotonic() - went < 5
        assert [alert.subject for alert in jobs.alerts() if alert.alert == "ticker_silent"] == ["pg_cron"]
        assert jobs.one("select count(*) > 0 from almanac.tick where ticked_by = 'w1'")
        (found,) = [check.message for check in jobs.health() if check.name == "pg_cron"]
        assert message in found
        jobs.sql("select almanac.stop_ticking()")
        assert not [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"]


# ── pg_cron finds no place ──────────────────────────────────────────────────────────────────────────────────────────
# pg_cron 1.4 starts its jobs with the minute, so each of these takes some.


def started(jobs: Jobs) -> None:
    """From now on pg_cron should tick, and a schedule that is due every second shows whether it does."""
    jobs.sql("select almanac.start_ticking()")
    jobs.sql("select almanac.put_schedule('default', 'often', '* * * * * *', 'beat', catch_up => 'all')")


def wrong(jobs: Jobs) -> dict[str, str]:
    return {check.name: check.hint for check in jobs.health() if check.status != "ok"}


def take_every_connection(behind: Breakable, held: contextlib.ExitStack) -> None:
    while True:
        held.enter_context(psycopg.connect(behind.dsn))


def check_late_and_then_correct(jobs: Jobs) -> None:
    """pg_cron makes up for it by itself: every second from the first on, once."""
    wait_until(lambda: jobs.one("select next_due_at > now() - interval '3 s' from almanac.schedule"), 130, pause=0.2)
    chain = """select r from almanac.schedule s, almanac.next_runs(s.cron, s.timezone, s.created_at, 1000) r
                where r < s.next_due_at order by r"""
    with jobs.conn.transaction():
        jobs.sql("set transaction isolation level repeatable read")
        ticks = jobs.sql("select tick_at, decision, ticked_by, job_id from almanac.tick order by tick_at")
        assert [tick.tick_at for tick in ticks] == [row.r for row in jobs.sql(chain)]
        assert {(tick.decision, tick.ticked_by) for tick in ticks} == {("fired", "pg_cron")}
        made = jobs.sql("select id, tick_at from almanac.job order by tick_at")
        assert [(job.tick_at, job.id) for job in made] == [(tick.tick_at, tick.job_id) for tick in ticks]
    wait_until(lambda: not wrong(jobs).keys() - {"oldest_due_job"}, 10, pause=0.2)  # nobody works here


@pytest.mark.pg_cron
@pytest.mark.full
@pytest.mark.timeout(600)
def test_other_jobs_take_all_the_places_of_pg_cron(pg_cron_server: Callable[..., Breakable]) -> None:
    behind = pg_cron_server(**{"cron.max_running_jobs": "2"})
    with psycopg.connect(behind.dsn, autocommit=True) as conn, psycopg.connect(behind.dsn) as holder:
        jobs = Jobs(conn)
        Launcher(conn).catch_up()
        holder.execute("select pg_advisory_lock(11)")
        for name in ("other", "another"):
            jobs.sql("select cron.schedule(%s, '* * * * *', 'select pg_advisory_lock_shared(11)')", name)
        waiting = "select count(*) from pg_stat_activity where query ~ 'lock_shared' and wait_event = 'advisory'"
        wait_until(lambda: jobs.one(waiting) == 2, 130, pause=0.2)
        started(jobs)
        wait_until(lambda: {"heartbeat", "late_schedules", "pg_cron"} <= wrong(jobs).keys(), 150, pause=1)
        assert "max_running_jobs" in wrong(jobs)["pg_cron"]
        assert jobs.sql("select * from almanac.tick") == []
        jobs.sql("select cron.unschedule(jobname) from cron.job where jobname ~ 'other'")
        holder.close()
        check_late_and_then_correct(jobs)


@pytest.mark.pg_cron
@pytest.mark.full
@pytest.mark.timeout(600)
def test_others_take_all_the_connections_that_pg_cron_could_have(pg_cron_server: Callable[..., Breakable]) -> None:
    behind = pg_cron_server(**{"cron.use_background_workers": "off", "max_connections": "20"})
    with psycopg.connect(behind.dsn, autocommit=True) as conn, contextlib.ExitStack() as others:
        jobs = Jobs(conn)
        Launcher(conn).catch_up()
        started(jobs)
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            take_every_connection(behind, others)
        wait_until(lambda: {"heartbeat", "pg_cron"} <= wrong(jobs).keys(), 130, pause=0.5)
        assert "return_message" in wrong(jobs)["pg_cron"]
        assert jobs.sql("select * from almanac.tick") == []
        others.close()
        check_late_and_then_correct(jobs)


# ── a restored copy ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.pg_cron
def test_a_copy_is_not_ticked_whoever_asks(with_pg_cron: Breakable) -> None:
    """The job of pg_cron is in the dump. It names its database, so a copy under another name is left alone; under the
    same name on another server it would be run, and by workers anywhere."""
    behind = with_pg_cron
    behind.execute("select almanac.put_schedule('default', 'often', '@every 1s', 'beat', catch_up => 'all')")
    behind.execute("select almanac.tick()")
    assert behind.server.bin_dir is not None
    dump = subprocess.run([behind.server.bin_dir / "pg_dump", behind.dsn], capture_output=True, check=True).stdout
    assert b"COPY cron.job " in dump, "the job of pg_cron comes along"
    with psycopg.connect(behind.server.dsn, autocommit=True) as conn:
        conn.execute("create database copy")
    copy = behind.server.dsn_of("copy")
    # Only pg_cron's own tables cannot be restored there: it lives in one database of a server.
    restored = subprocess.run(
        [behind.server.bin_dir / "psql", "-X", "-q", copy], input=dump, capture_output=True, check=True
    )
    assert b"can only create extension in database work" in restored.stderr
    with psycopg.connect(copy, autocommit=True) as conn:
        jobs = Jobs(conn)
        state = (
            "select (select array_agg(h) from almanac.heartbeat h) as beats,"
            "       (select array_agg(t) from almanac.tick t) as ticks"
        )
        before = jobs.sql(state)
        assert jobs.one("select held_at from almanac.installation") is None
        time.sleep(3)
        assert jobs.one("select held_at from almanac.installation") is None, "pg_cron was here"

        jobs.sql("call almanac._tick_loop(true)")  # as pg_cron does
        assert jobs.tick_if_stale(worker="w1")[0].tick_if_stale is False
        assert jobs.tick()[0].fired == 0
        jobs.add("default", "beat")
        assert jobs.claim("default", 10) == []
        assert jobs.sql(state) == before
        assert [alert.message for alert in jobs.alerts() if "copy of another one" in alert.message]
        behind.execute("select almanac.tick()")
