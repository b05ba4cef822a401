"""70 tick: everything that is due, once; by pg_cron, by a worker, by hand; and who noticed."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.jobs import refused
from tests.sql.test_33_schedules import overview, put
from tests.sql.test_70_advance_schedule import MINUTELY, at, decisions, drain, now

__all__ = ["now"]


def beats(jobs):
    return {row.source: row for row in jobs.sql("select * from almanac.heartbeat")}


def check(jobs, name):
    (found,) = [row for row in jobs.health() if row.name == name]
    return found


# ── what a tick does ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_says_what_was_done_and_whether_there_is_more(jobs, now):
    for n in range(5):
        put(jobs, f"s{n}", cron=MINUTELY)
    jobs.running("default", lease=timedelta(seconds=10))
    now.advance(minutes=1)
    (report,) = jobs.tick(batch_size=3)
    assert (report.schedules, report.fired, report.skipped, report.broken) == (3, 3, 0, 0)
    assert (report.reclaimed, report.more, report.ticked_by, report.ticked_at) == (1, True, "postgres", now.now())
    (report,) = jobs.tick(batch_size=3)
    assert (report.fired, report.reclaimed, report.more) == (2, 0, False)
    with refused("22023"):
        jobs.tick(batch_size=0)


def test_what_comes_due_at_present_does_not_wait_for_the_backlogs_of_others(jobs, now):
    for n in range(20):
        put(jobs, f"late {n}", cron=MINUTELY, catch_up="all")
    put(jobs, "daily", cron="0 14 * * *")
    now.freeze("2026-03-10 14:00:01+00")
    (report,) = jobs.tick(batch_size=10)
    assert report.more
    assert decisions(jobs) == {"fired": 1}


def test_a_tick_works_at_every_isolation_level(jobs, now, session):
    put(jobs, cron=MINUTELY)
    for level in ("repeatable read", "serializable"):
        now.advance(minutes=1)
        other = session(autocommit=False)
        other.sql(f"set transaction isolation level {level}")
        assert other.tick()[0].fired == 1
        other.conn.commit()


def test_partitions_are_kept_and_the_ledger_with_them(jobs, now, own_database):
    put(jobs, cron="0 0 * * *", catch_up="all")
    now.freeze("2026-04-01 00:00:10+00")
    drain(jobs)
    tables = "select tableoid::regclass::text as p, count(*) as n from almanac.tick group by 1"
    assert {row.p: row.n for row in jobs.sql(tables)}["almanac_days.tick_20260401"] == 1
    jobs.put_queue(queue="default", retention=timedelta(days=5))
    now.advance(minutes=2)
    drain(jobs)
    oldest = "select min(tick_at) from almanac.tick"
    assert jobs.one(oldest) < now.now() - timedelta(days=20), "decided just now, so somebody may want to know"
    now.advance(days=6)
    for _ in range(3):
        now.advance(minutes=2)
        drain(jobs)
    assert jobs.one(oldest) >= now.now() - timedelta(days=5 + 1), "dropped by whole days"
    drain(jobs)
    assert jobs.one("select count(*) from almanac.job") == 28, "forgotten, not fired again"


def test_housekeeping_is_done_once_a_minute(jobs, now):
    jobs.tick()
    first = beats(jobs)["housekeeper"].ticked_at
    now.advance(seconds=30)
    jobs.tick()
    assert beats(jobs)["housekeeper"].ticked_at == first
    now.advance(seconds=31)
    jobs.tick()
    assert beats(jobs)["housekeeper"].ticked_at == now.now()


def test_retention_goes_on_with_the_next_tick_while_there_is_more_of_it(jobs, now):
    jobs.put()
    for key in range(5):
        jobs.add(dedup_key=str(key), dedup_for=timedelta(hours=1))
    now.advance(hours=2)
    left = []
    for _ in range(4):
        jobs.tick(batch_size=2)
        left.append(jobs.one("select count(*) from almanac.dedup"))
        now.advance(seconds=1)
    assert left == [3, 1, 0, 0]
    assert beats(jobs)["housekeeper"].ticked_at == now.now() - timedelta(seconds=4), "the rest is done once a minute"
    jobs.add(dedup_key="late", dedup_for=timedelta(milliseconds=1))
    now.advance(seconds=1)
    jobs.tick(batch_size=2)
    assert jobs.one("select count(*) from almanac.dedup") == 1, "and so is this, once it has caught up"


# ── who ticks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stale(jobs, worker="w1"):
    return jobs.tick_if_stale(worker=worker)[0].tick_if_stale


def test_workers_tick_while_nobody_else_does(jobs, now):
    put(jobs, cron="@every 1s", catch_up="all")
    assert stale(jobs)
    assert beats(jobs)["worker"].ticked_by == "w1"
    now.advance(seconds=0.5)
    assert not stale(jobs, "w2"), "one of them is enough"
    now.advance(seconds=0.5)
    assert stale(jobs, "w2")
    assert jobs.one("select count(*) from almanac.tick where ticked_by = 'w2'") == 1
    assert not [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"], "nobody expected pg_cron"


def test_somebody_who_ticks_by_hand_counts(jobs, now):
    jobs.tick()
    now.advance(seconds=3)
    assert not stale(jobs)
    now.advance(seconds=0.1)
    assert stale(jobs)


def test_the_silence_of_pg_cron_is_an_alert_until_it_is_back(jobs, now):
    jobs.sql("select almanac._tick(100, 'pg_cron', 'pg_cron')")
    now.advance(seconds=2)
    assert not stale(jobs)
    now.advance(seconds=2)
    assert stale(jobs)
    now.advance(seconds=1)
    assert stale(jobs, "w2")
    (alert,) = [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"]
    assert (alert.subject, alert.occurrences, alert.severity) == ("pg_cron", 2, "warning")
    jobs.sql("select almanac._tick(100, 'pg_cron', 'pg_cron')")
    assert not stale(jobs)
    assert not [alert for alert in jobs.alerts() if alert.alert == "ticker_silent"]
    assert jobs.one("select cleared_at from almanac.alert") == now.now()


@pytest.mark.parametrize("is_back", [False, True])
def test_workers_tick_though_somebody_is_about_to_stop_pg_cron(jobs, now, session, is_back):
    jobs.sql("select almanac._beat('pg_cron', 'pg_cron')")
    now.advance(seconds=10)
    assert stale(jobs)
    if is_back:
        jobs.sql("select almanac._beat('pg_cron', 'pg_cron')")
    operator, worker = session(), session()
    operator.sql("begin")
    operator.stop_ticking()
    now.advance(seconds=2)
    worker.sql("set statement_timeout = '10s'")
    assert stale(worker) is not is_back
    operator.sql("rollback")
    now.advance(seconds=1)
    assert stale(worker) is not is_back
    assert [alert.alert for alert in jobs.alerts()].count("ticker_silent") == (not is_back)


def test_a_beat_from_the_future_does_not_silence_the_workers(jobs, now):
    jobs.sql("select almanac._tick(100, 'pg_cron', 'pg_cron')")
    now.advance(hours=-2)
    assert stale(jobs)
    assert check(jobs, "heartbeat").status == "ok"


# ── zones change their rules ────────────────────────────────────────────────────────────────────────────────────────


def rules_were(jobs, next_due_at, decided_until, decided_local):
    """As if next_due_at had been computed by earlier rules of the zone."""
    jobs.sql(
        "update almanac.schedule set next_due_at = %s, look_at = %s, decided_until = %s, decided_local = %s",
        next_due_at, next_due_at, decided_until, decided_local,
    )  # fmt: skip
    jobs.sql("update almanac.zone_watch set offsets = 'as they were'")


@pytest.mark.parametrize(
    "stored, decided, local, expected",
    [
        # 9:00 was 07:00 UTC and is 08:00 UTC now: the tick moves along.
        ("2026-03-11 07:00+00", "2026-03-10 07:00+00", "2026-03-10 09:00", ["2026-03-11T08:00:00+00:00"]),
        # Today's 9:00 has had its run, at what is now 8:00: it does not get another.
        ("2026-03-11 07:00+00", "2026-03-10 12:00+00", "2026-03-11 09:00", ["2026-03-12T08:00:00+00:00"]),
        # 9:00 was 15:00 UTC, and is past already by the new rules: late, but not lost.
        ("2026-03-10 15:00+00", "2026-03-09 15:00+00", "2026-03-09 09:00", ["2026-03-10T08:00:00+00:00"]),
    ],
    ids=["moves along", "not repeated", "not lost"],
)
def test_a_change_of_zone_rules_loses_and_repeats_nothing(jobs, now, stored, decided, local, expected):
    put(jobs, cron="0 9 * * *", timezone="Europe/Berlin")
    jobs.tick()
    rules_were(jobs, stored, decided, local)
    now.advance(hours=1, minutes=1)
    drain(jobs)
    assert jobs.one("select after->'schedules_moved' from almanac.audit where action = 'zone_changed'") == 1
    now.freeze(datetime.fromisoformat(expected[-1]) + timedelta(seconds=1))
    drain(jobs)
    assert [tick.isoformat() for tick in at(jobs, "fired")] == expected
    assert set(decisions(jobs)) == {"fired"}


def test_a_schedule_that_somebody_holds_does_not_stop_the_heartbeat_when_its_zone_changes(jobs, now, session):
    put(jobs, cron="0 9 * * *", timezone="Europe/Berlin")
    put(jobs, "other", cron="0 9 * * *", timezone="Europe/Berlin")
    jobs.tick()
    rules_were(jobs, "2026-03-11 07:00+00", "2026-03-10 07:00+00", "2026-03-10 09:00")
    holder, ticker = session(), session()
    holder.sql("begin")
    holder.pause_schedule(name="daily", reason="looking into it")
    now.advance(hours=1, minutes=1)
    ticker.sql("set statement_timeout = '10s'")
    ticker.tick()
    moved = datetime(2026, 3, 11, 8, tzinfo=UTC)
    assert overview(jobs, "other").next_due_at == moved
    assert overview(jobs).next_due_at != moved
    holder.sql("rollback")
    now.advance(minutes=1, seconds=1)
    ticker.tick()
    assert overview(jobs).next_due_at == moved, "its turn comes with the next housekeeping"
    now.advance(minutes=1, seconds=1)
    ticker.tick()
    moves = jobs.sql("select (after->'schedules_moved')::integer from almanac.audit where action = 'zone_changed'")
    assert [count for (count,) in moves] == [1, 1]


def test_zone_rules_that_stay_move_nothing(jobs, now):
    put(jobs, cron="0 9 * * *", timezone="Europe/Berlin")
    before = overview(jobs).next_due_at
    # Whoever ticks writes an interval in its own way.
    for style in ("postgres", "iso_8601", "sql_standard", "postgres"):
        jobs.sql(f"set intervalstyle = {style}")
        jobs.sql("select from almanac.tick()")
        now.advance(hours=1, minutes=1)
    jobs.sql("reset intervalstyle")
    assert overview(jobs).next_due_at == before
    assert jobs.sql("select from almanac.audit where action = 'zone_changed'") == []


def test_a_zone_that_is_gone_stops_its_own_schedules_only(jobs, now):
    put(jobs, cron="0 9 * * *", timezone="Europe/Berlin")
    put(jobs, "other", cron=MINUTELY)
    jobs.tick()
    for table in ("schedule", "zone_watch"):
        jobs.sql(f"update almanac.{table} set timezone = 'Mars/Phobos' where timezone = 'Europe/Berlin'")
    for _ in range(2):
        now.advance(hours=1, minutes=1)
        drain(jobs)
    assert decisions(jobs, "other")["fired"] == 2
    row = overview(jobs)
    assert (row.status, row.error) == ("broken", 'time zone "Mars/Phobos" not recognized')


# ── health ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_health_is_ok_when_all_is_well(jobs, now):
    put(jobs, cron=MINUTELY)
    jobs.tick()
    assert {row.name: row.status for row in jobs.health() if row.status != "ok"} == {}
    assert jobs.alerts() == []


def test_health_names_what_is_wrong(jobs, now):
    assert check(jobs, "heartbeat").status == "critical"
    put(jobs, "late", cron=MINUTELY)
    put(jobs, "off", cron=MINUTELY)
    jobs.tick()
    jobs.pause_schedule(name="off")
    jobs.put("stopped")
    jobs.pause_queue(queue="stopped")
    jobs.dead("default")
    jobs.running("default", lease=timedelta(seconds=5))
    jobs.add("default")
    now.advance(hours=2)
    wrong = {row.name: row.status for row in jobs.health() if row.status != "ok"}
    assert wrong == {
        "heartbeat": "critical",
        "housekeeping": "warning",
        "late_schedules": "critical",
        "oldest_due_job": "critical",
        "expired_leases": "warning",
        "dead_jobs": "warning",
        "paused_queues": "warning",
        "paused_schedules": "warning",
    }
    assert all(row.hint for row in jobs.health() if row.status != "ok")
    assert {alert.alert for alert in jobs.alerts()} == set(wrong)


def test_birthdays_on_the_last_of_february(jobs, now):
    now.freeze(datetime(2026, 1, 1, tzinfo=UTC))
    put(jobs, "leap child", cron="0 9 L 2 *", timezone="Asia/Tokyo")
    seen = []
    for _ in range(3):
        due = overview(jobs, "leap child").next_due_at
        seen.append(due.isoformat())
        now.freeze(due)
        drain(jobs)
    assert seen == ["2026-02-28T00:00:00+00:00", "2027-02-28T00:00:00+00:00", "2028-02-29T00:00:00+00:00"]


# ── what cannot be done stops nothing else ──────────────────────────────────────────────────────────────────────────


def test_a_view_on_one_day_keeps_that_day_and_stops_nothing(jobs, now, own_database):
    put(jobs, cron=MINUTELY)
    jobs.running("default", lease=timedelta(seconds=10))
    now.advance(minutes=1)
    jobs.tick()
    day = jobs.one("select min(relname) from pg_class where relname ~ '^attempt_[0-9]{8}$'")
    jobs.sql(f"create view public.report as select 1 from almanac_days.{day}")
    before = jobs.one("select count(*) from pg_class where relnamespace = 'almanac_days'::regnamespace")
    now.advance(days=40)
    (report,) = jobs.tick()
    assert report.fired + report.skipped > 0
    assert jobs.one("select count(*) from pg_class where relname = %s", day) == 1
    assert jobs.one("select count(*) from pg_class where relnamespace = 'almanac_days'::regnamespace") != before
    (alert,) = [alert for alert in jobs.alerts() if alert.alert == "housekeeping"]
    assert alert.subject == f"attempt of {day[8:12]}-{day[12:14]}-{day[14:]}"
    assert "view report depends on" in alert.message.replace("public.", "")
    jobs.sql("drop view public.report")
    now.advance(minutes=2)
    jobs.tick()
    assert not [alert for alert in jobs.alerts() if alert.alert == "housekeeping"]
    assert jobs.one("select count(*) from pg_class where relname = %s", day) == 0


def test_no_role_can_name_a_day(jobs, own_database):
    for role in ("producer", "worker", "operator", "observer", "admin"):
        jobs.sql(f"set role almanac_{role}")
        with refused("42501"):
            jobs.sql("select 1 from almanac_days.job_history_default")
        jobs.sql("reset role")


EVENT_TRIGGER = """
create function public.no_tables() returns event_trigger language plpgsql as
$$ begin raise exception 'tables are made by the release only'; end $$;
create event trigger no_tables on ddl_command_start execute function public.no_tables();
"""


def test_a_rule_against_new_tables_stops_housekeeping_only(jobs, now, own_database):
    put(jobs, cron=MINUTELY, catch_up="all")
    jobs.running("default", lease=timedelta(seconds=10))
    jobs.conn.execute(EVENT_TRIGGER)
    try:
        now.advance(days=2)
        (report,) = jobs.tick()
        assert (report.fired, report.reclaimed) == (2000, 1)
        said = {alert.subject: alert.message for alert in jobs.alerts() if alert.alert == "housekeeping"}
        assert len(said) >= 3
        assert all("made by the release only" in message for message in said.values())
    finally:
        jobs.sql("drop event trigger no_tables")


def test_a_task_of_the_housekeeper_that_fails_is_set_aside_by_name(jobs, now, own_database):
    put(jobs, cron=MINUTELY)
    jobs.sql("create or replace function almanac._prune(batch_size integer default 1000) returns jsonb "
             "language sql as 'select to_jsonb(1 / 0)'")  # fmt: skip
    now.advance(minutes=2)
    assert jobs.tick()[0].fired == 2
    (alert,) = [alert for alert in jobs.alerts() if alert.alert == "housekeeping"]
    assert (alert.subject, "division by zero" in alert.message) == ("retention", True)
    assert jobs.one("select count(*) from almanac.zone_watch") == 0


BROKEN_ADVANCE = """
create or replace function almanac._advance_due(batch_size integer, ticked_by text) returns almanac.tick_report
language plpgsql as $$ begin raise exception 'the disk is gone'; end $$
"""


def test_the_reason_of_a_tick_that_fails_is_in_health_until_one_succeeds(jobs, now, own_database):
    jobs.tick()
    put(jobs, cron=MINUTELY)
    works = jobs.one("select pg_get_functiondef('almanac._advance_due(integer,text)'::regprocedure)")
    jobs.sql(BROKEN_ADVANCE)
    now.advance(minutes=1)
    notices: list[str] = []
    jobs.conn.add_notice_handler(lambda diag: notices.append(f"{diag.severity_nonlocalized} {diag.message_primary}"))
    assert jobs.tick_if_stale(worker="w1")[0].tick_if_stale is False
    assert notices == ["WARNING tick failed: the disk is gone"]
    found = check(jobs, "heartbeat")
    assert (found.status, "a tick by w1 failed: the disk is gone" in found.message) == ("critical", True)
    now.advance(seconds=1)
    jobs.sql("call almanac._tick_loop(once => true)")
    assert "a tick by pg_cron failed" in check(jobs, "heartbeat").message
    with refused("P0001"):
        jobs.tick()
    jobs.conn.execute(works.encode())
    now.advance(seconds=61)
    assert jobs.tick_if_stale(worker="w1")[0].tick_if_stale is True
    assert check(jobs, "heartbeat").status == "ok"
    assert not [alert for alert in jobs.alerts() if alert.alert == "tick_failed"]


def test_health_sees_that_the_house_is_not_kept(jobs, now):
    jobs.tick()
    assert check(jobs, "housekeeping").status == "ok"
    now.advance(minutes=11)
    jobs.sql("update almanac.heartbeat set ticked_at = almanac.clock() where source = 'manual'")
    found = check(jobs, "housekeeping")
    assert (found.status, bool(found.hint)) == ("warning", True)


def test_one_tick_keeps_house_while_another_does(jobs, now, session):
    jobs.tick()
    now.advance(minutes=2)
    other = session()
    other.sql("begin")
    other.tick()
    jobs.sql("set lock_timeout = '2s'")
    jobs.tick()
    jobs.tick_if_stale(worker="w")
    other.sql("commit")
