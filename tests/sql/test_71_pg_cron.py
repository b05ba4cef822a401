"""71 pg_cron: a doorbell, not a clock: losing it delays, never loses."""

import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pyclient.migrate import migrate
from tests.jobs import Jobs, refused
from tests.pg_cron import Launcher, end_loops

# ── where there is no pg_cron ───────────────────────────────────────────────────────────────────────────────────────


def test_without_pg_cron_the_error_says_what_to_add(jobs):
    if jobs.one("select current_setting('cron.database_name', true)") is not None:
        pytest.skip("this server has pg_cron loaded")
    with refused("PA011") as caught:
        jobs.start_ticking()
    assert "shared_preload_libraries = 'pg_cron'" in caught.value.diag.message_hint
    assert jobs.one("select almanac.stop_ticking()") == "pg_cron was not ticking"
    assert jobs.one("select almanac.stop_ticking()") == "pg_cron was not ticking"


# ── where there is ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cron_jobs(cron_conn) -> Jobs:
    return Jobs(cron_conn)


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
    return found


def cron_rows(jobs: Jobs) -> list[Any]:
    return jobs.sql("select schedule, command, active, database from cron.job order by jobid")


@pytest.mark.pg_cron
def test_starting_and_stopping_twice_is_fine(cron_jobs):
    database = cron_jobs.one("select current_database()")
    said = cron_jobs.one("select almanac.start_ticking()")
    rows = cron_rows(cron_jobs)
    assert len(rows) == 1
    assert (rows[0].active, rows[0].database) == (True, database)
    version = cron_jobs.one("select extversion from pg_extension where extname = 'pg_cron'")
    if version.startswith("1.4"):
        assert (rows[0].schedule, rows[0].command) == ("* * * * *", "call almanac._tick_loop()")
    else:
        assert rows[0].schedule == "1 seconds"
    assert cron_jobs.one("select almanac.start_ticking()") == said
    assert cron_rows(cron_jobs) == rows
    assert cron_jobs.one("select count(*) from almanac.audit where action = 'start_ticking'") == 1
    # Somebody changed it by hand: it is set right again.
    cron_jobs.sql("update cron.job set active = false")
    cron_jobs.sql("select almanac.start_ticking()")
    assert cron_rows(cron_jobs) == rows
    cron_jobs.sql("select almanac.stop_ticking()")
    cron_jobs.sql("select almanac.stop_ticking()")
    assert cron_rows(cron_jobs) == []


# ── its launcher misses the message that there is a job, and does not look by itself ────────────────────────────────


@pytest.mark.pg_cron
def test_a_start_that_pg_cron_missed_is_heard_when_it_is_started_again(cron_jobs):
    launcher = Launcher(cron_jobs.conn)
    with launcher.reads_its_jobs(expected=False), launcher.deaf():
        said = cron_jobs.one("select almanac.start_ticking()")
    with launcher.reads_its_jobs():
        assert cron_jobs.one("select almanac.start_ticking()") == said
    assert len(cron_rows(cron_jobs)) == 1
    assert cron_jobs.one("select count(*) from almanac.audit where action = 'start_ticking'") == 1


@pytest.mark.pg_cron
def test_whoever_ticks_instead_of_pg_cron_lets_it_hear_of_its_job(cron_jobs):
    launcher = Launcher(cron_jobs.conn)
    with launcher.reads_its_jobs(expected=False), launcher.deaf():
        cron_jobs.sql("select almanac.start_ticking()")
    rows = cron_rows(cron_jobs)
    cron_jobs.sql("update almanac.heartbeat set ticked_at = ticked_at - interval '100 seconds'")
    (check,) = [check for check in cron_jobs.health() if check.name == "pg_cron"]
    assert check.status == "warning"
    assert "has not ticked for 10" in check.message
    assert "start_ticking" in check.hint
    with launcher.reads_its_jobs():
        assert cron_jobs.tick_if_stale(worker="w1")[0].tick_if_stale is True
    assert cron_rows(cron_jobs) == rows
    rung = cron_jobs.one("select xmin::text from cron.job")
    cron_jobs.sql("select almanac.tick()")
    assert cron_jobs.one("select xmin::text from cron.job") == rung, "once a minute is enough"


@pytest.mark.pg_cron
def test_a_stop_that_pg_cron_missed_is_heard_when_it_ticks_on(cron_jobs):
    launcher = Launcher(cron_jobs.conn)
    if not launcher.shows_when_it_reads():
        pytest.skip("this pg_cron does not show that it has read its jobs when there are none")
    time.sleep(2.5)  # it has heard of everything that came before

    def tick_a_minute_later() -> None:
        """What pg_cron does that still has a job in mind which is gone. The house is kept once a minute, and a loop of
        pg_cron's that the test before left behind may have kept it."""
        cron_jobs.sql("delete from almanac.heartbeat where source = 'housekeeper'")
        cron_jobs.sql("select almanac._tick_from_pg_cron()")

    assert any(launcher.hears(tick_a_minute_later) for _ in range(4))
    assert cron_rows(cron_jobs) == []


@pytest.mark.pg_cron
@pytest.mark.parametrize(
    ("command", "active", "is_left_alone"),
    [
        ("call almanac._tick_loop()", True, True),
        ('SELECT "almanac"._Tick_From_Pg_Cron()', True, True),
        ("call almanac._tick_loop()", False, False),
        ("select almanac.health()", True, False),
    ],
)
def test_pg_cron_is_left_alone_while_it_ticks_by_a_job_of_somebodys_own(cron_jobs, command, active, is_left_alone):
    jobid = cron_jobs.one("select cron.schedule('my own', '0 0 30 2 *', %s)", command)
    cron_jobs.sql("update cron.job set active = %s", active)
    jobs_ever = "select last_value from cron.jobid_seq"
    before = cron_jobs.one(jobs_ever)
    cron_jobs.sql("select almanac._tick_from_pg_cron()")
    assert (cron_jobs.one(jobs_ever) == before) is is_left_alone
    assert cron_jobs.one("select jobid from cron.job") == jobid


@pytest.mark.pg_cron
def test_right_after_an_installation_pg_cron_is_given_time_to_listen(cron_jobs, cron_dsn):
    launcher = Launcher(cron_jobs.conn)
    with psycopg.connect(cron_dsn, autocommit=True) as conn:
        starting = threading.Thread(target=conn.execute, args=["select almanac.start_ticking()"])
        with launcher.deaf():
            starting.start()
            time.sleep(0.3)
        with launcher.reads_its_jobs():
            starting.join()


@pytest.mark.pg_cron
@pytest.mark.timeout(300)  # pg_cron 1.4 may let a full minute pass
def test_a_schedule_fires_with_no_worker_and_a_worker_takes_over(cron_jobs, cron_dsn):
    """The whole of it: pg_cron ticks, is stopped in mid-minute, a worker takes over, pg_cron comes back."""
    jobs = cron_jobs
    jobs.sql("select almanac.start_ticking()")
    jobs.sql("select almanac.put_schedule('default', 'often', '@every 5s', 'beat', catch_up => 'all')")
    # pg_cron 1.4 starts at the next full minute; from then on ticks are decided within their second or two.
    in_time = "select count(*) from almanac.tick where ticked_by = 'pg_cron' and lateness < '2.5 seconds'"
    try:
        wait_for(lambda: jobs.one(in_time) >= 2, 200)
    except AssertionError as error:
        runs = jobs.sql("select status, return_message, start_time from cron.job_run_details order by runid")
        launcher = jobs.sql("select state, query from pg_stat_activity where backend_type ~ 'pg_cron'")
        raise AssertionError(
            f"{error}: runs {runs}, processes {launcher}, ticks {jobs.sql('select * from almanac.tick')}"
        ) from error
    assert [check.status for check in jobs.health() if check.name in ("heartbeat", "pg_cron")] == ["ok", "ok"]
    assert jobs.tick_if_stale(worker="w1")[0].tick_if_stale is False, "it stands back"

    # Its job is taken away behind our back, and the loop that runs is ended.
    jobs.sql("update cron.job set active = false")
    end_loops(jobs.conn)
    stopped = time.monotonic()
    with psycopg.connect(cron_dsn, autocommit=True) as conn:
        worker = Jobs(conn)
        wait_for(lambda: worker.tick_if_stale(worker="w1")[0].tick_if_stale, 10)
        assert time.monotonic() - stopped < 5
        (alert,) = [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"]
        assert "w1" in alert.message

        def a_tick_by_the_worker() -> bool:
            worker.tick_if_stale(worker="w1")
            return bool(jobs.one("select count(*) from almanac.tick where ticked_by = 'w1'"))

        wait_for(a_tick_by_the_worker, 10)

        # It comes back; on 1.4 that is tested by running what pg_cron runs.
        jobs.sql("select almanac.start_ticking()")
        jobs.sql("select almanac._tick_from_pg_cron()")
        assert worker.tick_if_stale(worker="w1")[0].tick_if_stale is False
        assert not [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"]

    ticks = jobs.sql("select tick_at, count(*) from almanac.tick where schedule = 'often' group by 1 order by 1")
    gaps = {(b.tick_at - a.tick_at).total_seconds() for a, b in itertools.pairwise(ticks)}
    assert gaps == {5.0}, "none lost"
    assert jobs.one("select count(*) = count(distinct tick_at) from almanac.job"), "none twice"
    assert jobs.one("select count(*) from almanac.job") == len(ticks)


@pytest.mark.pg_cron
def test_the_log_of_its_own_runs_is_pruned_and_others_are_left(cron_jobs):
    jobs = cron_jobs
    jobs.sql("select almanac.start_ticking()")
    mine = jobs.one("select jobid from cron.job")
    jobs.sql(
        """insert into cron.job_run_details (jobid, runid, status, start_time, end_time)
           select job, 1000000 + row_number() over (), 'succeeded', at, at
             from unnest(array[%s, 77]) as job,
                  unnest(array[clock_timestamp() - '2 h'::interval, clock_timestamp() - '1 min'::interval]) as at""",
        mine,
    )
    jobs.sql(
        "create or replace function almanac.clock() returns timestamptz language sql "
        "return date_trunc('minute', clock_timestamp()) + interval '30.4 seconds'"
    )
    jobs.sql("select almanac._tick_from_pg_cron()")
    rows = jobs.sql("select jobid, count(*) from cron.job_run_details where runid > 1000000 group by 1 order by 1")
    assert dict(tuple(row) for row in rows) == {mine: 1, 77: 2}


@pytest.mark.pg_cron
def test_pg_cron_in_another_database_is_pointed_to(cron_server, cron_jobs):
    cron_jobs.sql("drop database if exists elsewhere with (force)")
    cron_jobs.sql("create database elsewhere")
    migrate(cron_server.dsn_of("elsewhere"))
    with psycopg.connect(cron_server.dsn_of("elsewhere"), autocommit=True) as conn, refused("PA011") as caught:
        conn.execute("select almanac.start_ticking()")
    # The line of the hint does it.
    line = re.search(r"with 1\.4: (select cron\.schedule_in_database\(.*\);)", caught.value.diag.message_hint)
    assert line
    cron_jobs.sql(line.group(1))
    assert [row.database for row in cron_rows(cron_jobs)] == ["elsewhere"]
    cron_jobs.sql("select cron.unschedule(jobid) from cron.job")
    cron_jobs.sql("drop database elsewhere with (force)")
