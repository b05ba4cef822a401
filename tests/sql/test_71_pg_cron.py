"""71 pg_cron: a doorbell, not a clock: losing it delays, never loses."""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pyclient.migrate import migrate
from tests import servers
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
    return jobs.sql("select jobname, schedule, command, active, database from cron.job order by jobname")


@pytest.mark.pg_cron
def test_starting_and_stopping_twice_is_fine(cron_jobs):
    database = cron_jobs.one("select current_database()")
    said = cron_jobs.one("select almanac.start_ticking()")
    rows = cron_rows(cron_jobs)
    assert [(row.jobname, row.active, row.database) for row in rows] == [
        ("almanac", True, database),
        ("almanac log", True, database),
    ]
    version = cron_jobs.one("select extversion from pg_extension where extname = 'pg_cron'")
    if version.startswith("1.4"):
        assert (rows[0].schedule, rows[0].command) == ("* * * * *", "call almanac._tick_loop()")
    else:
        assert rows[0].schedule == "1 seconds"
    assert cron_jobs.one("select almanac.start_ticking()") == said
    assert cron_rows(cron_jobs) == rows
    assert cron_jobs.one("select count(*) from almanac.audit where action = 'start_ticking'") == 1
    # Changed by hand, or gone in part: it is set right again.
    for change in ("update cron.job set active = false", "delete from cron.job where jobname = 'almanac log'"):
        cron_jobs.sql(change)
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
    assert len(cron_rows(cron_jobs)) == 2
    assert cron_jobs.one("select count(*) from almanac.audit where action = 'start_ticking'") == 1


@pytest.mark.pg_cron
def test_a_tick_never_touches_pg_cron(cron_jobs):
    """Not even where it should tick and does not, or ticks and has no job: only start_ticking and stop_ticking do."""
    cron_jobs.sql("select almanac.start_ticking()")
    end_loops(cron_jobs.conn)
    rows = "select xmin::text, * from cron.job order by jobid"
    before = cron_jobs.sql(rows)
    cron_jobs.sql("update almanac.heartbeat set ticked_at = ticked_at - interval '100 seconds'")
    (check,) = [check for check in cron_jobs.health() if check.name == "pg_cron"]
    assert check.status == "warning"
    assert "has not ticked for 10" in check.message
    assert "start_ticking" in check.hint
    assert cron_jobs.tick_if_stale(worker="pg_cron")[0].tick_if_stale is True
    assert cron_jobs.sql(rows) == before
    cron_jobs.sql("update cron.job set active = false")
    cron_jobs.sql("delete from cron.job where jobname = 'almanac'")
    before = cron_jobs.sql(rows)
    cron_jobs.sql("delete from almanac.heartbeat where source = 'housekeeper'")
    cron_jobs.sql("select almanac._try_tick('pg_cron', 'pg_cron')")
    assert cron_jobs.sql(rows) == before


@pytest.mark.pg_cron
def test_a_stop_that_pg_cron_missed_is_heard_when_it_is_stopped_again(cron_jobs):
    launcher = Launcher(cron_jobs.conn)
    if not launcher.shows_when_it_reads():
        pytest.skip("this pg_cron does not show that it has read its jobs when there are none")
    time.sleep(2.5)  # it has heard of everything that came before

    def stop_again() -> None:
        cron_jobs.sql("select almanac._try_tick('pg_cron', 'pg_cron')")
        assert "goes on" in cron_jobs.one("select almanac.stop_ticking()")

    assert any(launcher.hears(stop_again) for _ in range(4))
    assert cron_rows(cron_jobs) == []


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
        jobs.sql("select almanac._try_tick('pg_cron', 'pg_cron')")
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
    jobs.sql(
        """insert into cron.job_run_details (jobid, runid, command, database, username, status, start_time, end_time)
           select 77, 1000000 + row_number() over (), command, current_database(), username, 'succeeded', at, at
             from (select command, username from cron.job union all values ('select 1', current_user),
                   ((select command from cron.job where jobname = 'almanac'), 'another')) as ran (command, username),
                  unnest(array[clock_timestamp() - '2 h'::interval, clock_timestamp() - '1 min'::interval]) as at"""
    )
    jobs.sql(jobs.one("select command from cron.job where jobname = 'almanac log'"))
    kept = jobs.sql(
        """select command ~ 'almanac' as ours, username = current_user as mine, count(*)
             from cron.job_run_details where runid > 1000000 group by 1, 2 order by 1, 2"""
    )
    assert [tuple(row) for row in kept] == [(False, True, 2), (True, False, 2), (True, True, 2)]


@pytest.mark.pg_cron
@pytest.mark.timeout(200)
def test_a_loop_hands_over_at_the_minute(cron_jobs):
    """Before 1.5: the next run waits for the one that ticks to the end of the minute, so that no second is left out."""
    jobs = cron_jobs
    jobs.sql("select almanac.start_ticking()")
    if cron_rows(jobs)[0].schedule == "1 seconds":
        pytest.skip("this pg_cron ticks every second by itself")
    jobs.sql("select almanac.put_schedule('default', 'often', '* * * * * *', 'beat', catch_up => 'all')")
    by_pg_cron = "select count(*) from almanac.tick where ticked_by = 'pg_cron' and tick_at > %s"
    first = wait_for(lambda: jobs.one("select min(start_time) from cron.job_run_details where status = 'running'"), 70)
    minute = first.replace(second=0, microsecond=0) + timedelta(minutes=1)
    wait_for(lambda: jobs.one(by_pg_cron, minute) >= 5, 80)
    late = jobs.one(
        "select max(lateness) from almanac.tick where tick_at between %s and %s",
        minute - timedelta(seconds=5), minute + timedelta(seconds=5),
    )  # fmt: skip
    assert late < timedelta(seconds=4), "the loop that ended early left a gap, and the next one began late"
    assert jobs.one("select count(*) from cron.job_run_details where status = 'failed'") == 0


# ── what any role could plant, and what the owner may not see ───────────────────────────────────────────────────────

PLANTED = """
create schema cron authorization {role};
set role {role};
create function cron.was_run() returns boolean language plpgsql as $$
    begin raise exception 'ran as %', current_user; end $$;
create view cron.job as
    select 1::bigint as jobid, 'almanac'::text as jobname, ''::text as schedule, ''::text as command,
           current_database()::text as database, current_user::text as username, cron.was_run() as active;
create view cron.job_run_details as
    select *, now() as start_time, now() as end_time, ''::text as status from cron.job;
create function cron.schedule(text, text, text) returns bigint
    language sql as 'select cron.was_run(); select 1::bigint';
create function cron.unschedule(bigint) returns boolean language sql as 'select cron.was_run()';
reset role;
"""


def test_a_schema_that_is_only_called_cron_is_never_used(jobs, own_database, maintenance, worker_id):
    role = f"test_{worker_id}_planter"
    maintenance.execute(f"drop role if exists {role}")
    maintenance.execute(f"create role {role} in role almanac_worker")
    try:
        jobs.conn.execute(PLANTED.format(role=role).encode())
        jobs.sql("insert into almanac.heartbeat values ('pg_cron', now() - interval '1 hour', 'pg_cron')")
        jobs.sql(f"set role {role}")
        for name in ("pg_cron", "start_ticking"):
            jobs.tick_if_stale(worker=name, stale_after="0 s")
        jobs.sql("reset role")
        jobs.sql("select almanac._try_tick('pg_cron', 'pg_cron')")
        jobs.tick()
        (beat,) = [check for check in jobs.health() if check.name == "heartbeat"]
        assert beat.status == "ok"
        with refused("PA011"):
            jobs.start_ticking()
        jobs.stop_ticking()
        assert not [alert for alert in jobs.alerts() if alert.alert in ("tick_failed", "housekeeping")]
    finally:
        jobs.sql(f"drop owned by {role} cascade")
        maintenance.execute(f"drop role {role}")


@pytest.fixture(scope="module")
def preloaded(request):
    """A server where pg_cron is loaded and lives in the database `home` once it is created there; databases of plain
    owners."""
    choice = servers.Choice(request.config.getoption("--pg"))
    if reason := choice.why_no_pg_cron():
        pytest.skip(f"pg_cron: {reason}")
    with choice.start_with_pg_cron("home") as server:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            for name in ("home", "elsewhere"):
                admin.execute(f"create role owner_of_{name} login password 'x'")
                admin.execute(f"create database {name} owner owner_of_{name}")
            for role in ("producer", "worker", "operator", "observer", "admin"):
                admin.execute(f"create role almanac_{role} nologin")
            for name in ("home", "elsewhere"):
                migrate(server.dsn_of(name, user=f"owner_of_{name}", password="x"))
        yield server


@pytest.mark.pg_cron
def test_an_owner_without_attributes_gets_true_answers(preloaded):
    def as_owner(name: str) -> Jobs:
        return Jobs(stack.enter_context(psycopg.connect(preloaded.dsn_of(name, user=f"owner_of_{name}", password="x"),
                                                        autocommit=True)))  # fmt: skip

    def shown(jobs: Jobs) -> tuple[str, str, str | None]:
        jobs.alerts()
        (check,) = [check for check in jobs.health() if check.name == "pg_cron"]
        return check.status, check.message, check.hint

    def refusal(jobs: Jobs) -> Any:
        with refused("PA011") as caught:
            jobs.start_ticking()
        return caught.value.diag

    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(preloaded.dsn_of("home"), autocommit=True))
        home, elsewhere = as_owner("home"), as_owner("elsewhere")
        # Not created, in either: the owner may not ask which database it would be.
        for jobs, name in ((home, "home"), (elsewhere, "elsewhere")):
            may = f"grant pg_read_all_settings to owner_of_{name};"
            assert shown(jobs)[0] == "ok"
            assert may in str(shown(jobs)[2])
            assert refusal(jobs).message_hint == f"Let an administrator run: {may}"
            assert jobs.one("select almanac.stop_ticking()") == "pg_cron was not ticking"
            jobs.tick()
            jobs.sql("select almanac.metrics()")
            admin.execute(may.encode())
        assert "create extension pg_cron" in refusal(home).message_hint
        assert refusal(elsewhere).message_primary == "pg_cron lives in database home, not in this one"
        admin.execute("revoke pg_read_all_settings from owner_of_home, owner_of_elsewhere")
        # Created, in one.
        admin.execute("create extension pg_cron schema pg_catalog")
        usage = "grant usage on schema cron to owner_of_home;"
        assert usage in str(shown(home)[2])
        assert refusal(home).message_hint == f"Let an administrator run: {usage}"
        with refused("PA011"):
            home.stop_ticking()
        assert refusal(elsewhere).message_primary == "role owner_of_elsewhere may not look at pg_cron"
        admin.execute(usage.encode())
        assert home.one("select almanac.start_ticking()").startswith("pg_cron ")
        assert "version" in shown(home)[1]
        assert [name for (name,) in admin.execute("select username from cron.job")] == ["owner_of_home"] * 2
        assert home.one("select almanac.stop_ticking()").startswith("pg_cron does not tick any more")
        assert admin.execute("select count(*) from cron.job").fetchone() == (0,)
        # It used to tick, and is gone.
        home.sql("select almanac.start_ticking()")
        home.sql("update almanac.heartbeat set ticked_at = ticked_at - interval '2 minutes' where source = 'pg_cron'")
        admin.execute("drop extension pg_cron cascade")
        assert shown(home)[0] == "warning"


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
