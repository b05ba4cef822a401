"""70 advance_schedule: one decision for each tick, by the policies, written down."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.jobs import held, refused
from tests.sql.test_33_schedules import overview, put

START = datetime(2026, 3, 10, 12, 0, 30, tzinfo=UTC)
MINUTELY = "* * * * *"


@pytest.fixture
def now(clock):
    clock.freeze(START)
    return clock


def drain(jobs, batch_size=2000):
    """Tick until nothing is left; everything reported together."""
    fired = skipped = 0
    for _ in range(1000):
        (report,) = jobs.tick(batch_size=batch_size)
        fired, skipped = fired + report.fired, skipped + report.skipped
        if not report.more:
            return fired, skipped
    raise AssertionError("there is always more")


def decisions(jobs, name="daily"):
    rows = jobs.sql("select decision, count(*) from almanac.tick where schedule = %s group by 1 order by 1", name)
    return {row.decision: row.count for row in rows}


def at(jobs, decision, name="daily"):
    rows = jobs.sql(
        "select tick_at from almanac.tick where schedule = %s and decision = %s order by tick_at", name, decision
    )
    return [row.tick_at for row in rows]


def minutes(first, count):
    return [datetime(2026, 3, 10, 12, tzinfo=UTC) + timedelta(minutes=first + n) for n in range(count)]


def finish(jobs, name="daily"):
    for job in jobs.claim("default", 100):
        if job.schedule == name:
            jobs.complete(**held(job))


# ── one tick ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tick_makes_a_job_a_ledger_row_and_the_next_tick(jobs, now):
    put(jobs, cron=MINUTELY, payload='{"a": 1}', priority=7, headers='{"trace": "x"}', max_attempts=3)
    now.advance(seconds=31)
    (tick,) = jobs.advance_schedule(queue="default", name="daily")
    assert (tick.tick_at, tick.decision, tick.lateness) == (minutes(1, 1)[0], "fired", timedelta(seconds=1))
    assert tick.ticked_by == "postgres"
    job = jobs.row(tick.job_id)
    assert (job.job_type, job.payload, job.priority, job.max_attempts) == ("report", {"a": 1}, 7, 3)
    assert (job.schedule, job.tick_at, job.due_at, job.caught_up) == ("daily", tick.tick_at, tick.tick_at, False)
    assert job.idempotency_key == f"default-000000000000:daily:{int(tick.tick_at.timestamp())}"
    assert job.headers == {"trace": "x"}
    assert overview(jobs).next_due_at == minutes(2, 1)[0]
    assert jobs.advance_schedule(queue="default", name="daily") == []
    (claimed,) = jobs.claim("default")
    assert (claimed.tick_at, claimed.schedule, claimed.lateness) == (tick.tick_at, "daily", timedelta(seconds=1))


def test_nothing_fires_early(jobs, now):
    put(jobs, cron=MINUTELY)
    now.advance(seconds=29.999)
    assert jobs.advance_schedule(queue="default", name="daily") == []
    assert jobs.tick()[0].schedules == 0
    now.advance(seconds=0.001)
    assert jobs.tick()[0].fired == 1


def test_a_schedule_that_does_not_exist_is_an_error(jobs, now):
    with refused("PA006"):
        jobs.advance_schedule(queue="default", name="nonesuch")
    with refused("PA001"):
        jobs.advance_schedule(queue="nonesuch", name="daily")


def test_job_type_and_queue_lend_their_defaults(jobs, now):
    jobs.put_queue(queue="default", max_attempts=9)
    jobs.put_job_type(queue="default", job_type="report", lease=timedelta(minutes=7))
    put(jobs, "a", cron=MINUTELY)
    put(jobs, "b", cron=MINUTELY, after_schedule="x", within="1 day", gate_closed="wait", gate_wait="1 day")
    jobs.sql("update almanac.schedule set after_schedule = null, within = null, gate_closed = null, gate_wait = null")
    now.advance(minutes=1)
    drain(jobs)
    assert jobs.sql("select distinct max_attempts, lease from almanac.job") == [(9, timedelta(minutes=7))]


def test_jitter_is_the_same_every_time_and_differs_by_name(jobs, now):
    names = [f"s{n}" for n in range(20)]
    for name in names:
        put(jobs, name, cron=MINUTELY, jitter="30 seconds")
    for _ in range(2):
        now.advance(minutes=1)
        drain(jobs)
    rows = jobs.sql("select schedule, array_agg(distinct due_at - tick_at) as offsets from almanac.job group by 1")
    assert all(len(row.offsets) == 1 for row in rows)
    offsets = {row.offsets[0] for row in rows}
    assert len(offsets) > 15
    assert all(timedelta(0) <= offset < timedelta(seconds=30) for offset in offsets)


def test_a_schedule_ends_after_max_fires(jobs, now):
    put(jobs, "a", cron=MINUTELY, max_fires=2)
    put(jobs, "b", cron=MINUTELY, max_fires=3, catch_up="all")
    for _ in range(4):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs, "a") == {"fired": 2}
    assert overview(jobs, "a").status == "finished"
    assert decisions(jobs, "b") == {"fired": 3}
    put(jobs, "b", cron=MINUTELY, max_fires=4, catch_up="all")
    now.advance(minutes=3)
    drain(jobs)
    assert decisions(jobs, "b") == {"fired": 4}


# ── downtime ────────────────────────────────────────────────────────────────────────────────────────────────────────

DAY = 24 * 60


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"catch_up": "all"}, {"fired": DAY}),
        ({"catch_up": "latest"}, {"coalesced": DAY - 1, "fired": 1}),
        ({"catch_up": "none"}, {"skipped_catchup": DAY}),
        ({"catch_up": "all", "max_age": "1 hour"}, {"fired": 60, "skipped_catchup": DAY - 60}),
        ({"catch_up": "all", "max_runs": 10}, {"fired": 10, "skipped_catchup": DAY - 10}),
        ({"catch_up": "all", "max_runs": 90, "max_age": "1 hour"}, {"fired": 60, "skipped_catchup": DAY - 60}),
        ({"catch_up": "latest", "max_age": "10 seconds"}, {"skipped_catchup": DAY}),
        ({"catch_up": "latest", "max_age": "1 hour"}, {"coalesced": DAY - 1, "fired": 1}),
    ],
    ids=str,
)
def test_a_day_of_downtime(jobs, now, options, expected):
    put(jobs, cron=MINUTELY, **options)
    now.advance(days=1)
    # A batch smaller than the backlog: the policy holds over the whole of it all the same.
    fired, skipped = drain(jobs, batch_size=333)
    assert (fired, fired + skipped) == (expected.get("fired", 0), DAY)
    assert decisions(jobs) == expected
    newest = expected.get("fired", 0)
    assert at(jobs, "fired") == minutes(1 + DAY - newest, newest)
    rows = jobs.sql("select tick_at, lateness, decided_at, caught_up from almanac.tick")
    assert all(row.lateness == row.decided_at - row.tick_at and row.decided_at == now.now() for row in rows)
    assert all(row.caught_up for row in rows)
    live = jobs.claim("default", 2000)
    assert [job.tick_at for job in live] == minutes(1 + DAY - newest, newest), "in order"
    assert all(job.caught_up for job in live)
    assert overview(jobs).next_due_at == minutes(1 + DAY, 1)[0]
    now.advance(minutes=1)
    assert drain(jobs) == (1, 0)
    assert not jobs.one("select caught_up from almanac.tick order by tick_at desc limit 1")


def test_pace_spreads_what_is_made_up(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all", pace=10, max_age="30 minutes")
    now.advance(days=1)
    drain(jobs, batch_size=7)
    rows = jobs.sql("select tick_at, due_at from almanac.job order by tick_at")
    assert [row.due_at for row in rows] == [now.now() + timedelta(seconds=6 * n) for n in range(30)]
    assert [row.tick_at for row in rows] == minutes(1 + DAY - 30, 30)
    now.advance(minutes=1)
    assert len(jobs.claim("default", 100)) == 11
    drain(jobs)
    (on_time,) = jobs.sql("select due_at, caught_up from almanac.job where tick_at = %s", minutes(DAY + 1, 1)[0])
    assert (on_time.due_at, on_time.caught_up) == (minutes(DAY + 1, 1)[0], False)


def test_pace_begins_anew_with_each_downtime(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all", pace=6)
    for _ in range(2):
        now.advance(hours=1)
        drain(jobs)
        dues = [row.due_at for row in jobs.sql("select due_at from almanac.job order by id desc limit 60")]
        assert (min(dues), max(dues)) == (now.now(), now.now() + 59 * timedelta(seconds=10))


def test_a_change_while_a_backlog_is_worked_off_leaves_backlog_and_pace_as_they_are(jobs, now):
    put(jobs, cron=MINUTELY)
    put(jobs, "paced", cron=MINUTELY, catch_up="all", pace=6)
    now.advance(hours=1)
    drain(jobs)
    last = jobs.one("select max(due_at) from almanac.job where schedule = 'paced'")
    put(jobs, "paced", cron=MINUTELY, catch_up="all", pace=6, payload='{"a": 1}')
    now.advance(minutes=5)
    jobs.advance_schedule(queue="default", name="paced")
    dues = jobs.one("select array_agg(due_at order by due_at) from almanac.job where schedule = 'paced'")
    assert dues[60:] == [last + n * timedelta(seconds=10) for n in range(1, 6)]
    jobs.tick(batch_size=3)
    put(jobs, cron=MINUTELY, payload='{"a": 1}')
    drain(jobs)
    assert at(jobs, "fired") == minutes(60, 1) + minutes(65, 1), "of the last two minutes, too, only the latest"


def test_the_latest_of_a_downtime_is_the_last_one_before_the_end(jobs, now):
    put(jobs, cron=MINUTELY, ends_at="2026-03-10 12:10+00")
    now.advance(hours=1)
    drain(jobs)
    assert (at(jobs, "coalesced"), at(jobs, "fired")) == (minutes(1, 9), minutes(10, 1))


@pytest.mark.parametrize("catch_up", ["none", "latest", "all"])
def test_a_tick_late_by_the_tick_interval_is_no_downtime(jobs, now, catch_up):
    put(jobs, cron=MINUTELY, catch_up=catch_up)
    for _ in range(3):
        now.advance(seconds=60)
        assert drain(jobs) == (1, 0)
    now.advance(seconds=89)
    assert drain(jobs)[1] == 0
    assert set(decisions(jobs)) == {"fired"}


@pytest.mark.parametrize(
    "night, zone, expected",
    [
        # 02:00 to 03:00 does not exist: 02:30 runs at 03:00; 24 minus one local hours.
        ("2026-03-28 12:00+00", "Europe/Berlin", 23),
        ("2026-10-24 12:00+00", "Europe/Berlin", 25),
        ("2026-10-03 00:00+00", "Australia/Lord_Howe", None),
    ],
)
def test_downtime_over_the_night_the_clocks_change(jobs, now, night, zone, expected):
    now.freeze(night)
    put(jobs, "daily", cron="30 2 * * *", timezone=zone, catch_up="all")
    put(jobs, "hourly", cron="@hourly", timezone=zone, catch_up="all")
    now.advance(days=2)
    drain(jobs)
    for name, cron in [("daily", "30 2 * * *"), ("hourly", "@hourly")]:
        chain = jobs.sql("select r from almanac.next_runs(%s, %s, %s::timestamptz, 60) r", cron, zone, night)
        assert at(jobs, "fired", name) == [row.r for row in chain if row.r <= now.now()]
    assert decisions(jobs, "daily") == {"fired": 2}
    if expected:
        day = "tick_at at time zone 'Europe/Berlin'"
        counts = jobs.sql(
            f"select ({day})::date, count(*) as n from almanac.tick where schedule = 'hourly' group by 1 order by 1"
        )
        assert counts[1].n == expected


@pytest.mark.parametrize(
    "night, expected",
    [("2026-03-29 00:00+00", "2026-03-29T01:00:00+00:00"), ("2026-10-25 00:00+00", "2026-10-25T00:30:00+00:00")],
)
def test_the_clock_runs_through_the_night(jobs, now, night, expected):
    now.freeze(night)
    put(jobs, "daily", cron="30 2 * * *", timezone="Europe/Berlin")
    put(jobs, "half", cron="*/30 * * * *", timezone="Europe/Berlin")
    for _ in range(18):
        now.advance(minutes=10)
        drain(jobs)
    assert [tick.isoformat() for tick in at(jobs, "fired", "daily")] == [expected]
    assert decisions(jobs, "half") == {"fired": 6}


def test_the_clock_may_step_back_and_forth(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all")
    now.advance(minutes=5)
    drain(jobs)
    for minutes_back in (1, 3, 120):
        now.advance(minutes=-minutes_back)
        drain(jobs)
        put(jobs, cron=MINUTELY, catch_up="all")
        now.advance(minutes=minutes_back)
        drain(jobs)
    assert decisions(jobs) == {"fired": 5}
    now.advance(hours=4)
    drain(jobs)
    assert decisions(jobs) == {"fired": 245}


def test_a_tick_does_not_fire_again_after_the_ledger_is_pruned(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all")
    now.advance(minutes=5)
    drain(jobs)
    jobs.sql("delete from almanac.tick")
    now.advance(minutes=-5)
    drain(jobs)
    now.advance(minutes=5)
    drain(jobs)
    assert jobs.one("select count(*) from almanac.job") == 5


def test_the_ledger_alone_keeps_a_tick_from_firing_twice(jobs, now):
    """The high-water mark is pushed back by hand: the key of the ledger still holds."""
    put(jobs, cron=MINUTELY, catch_up="all")
    now.advance(minutes=5)
    drain(jobs)
    jobs.sql(
        """update almanac.schedule set decided_until = decided_until - interval '3 minutes',
                  next_due_at = next_due_at - interval '3 minutes', look_at = look_at - interval '3 minutes'"""
    )
    assert drain(jobs)[0] == 0
    assert jobs.one("select count(*) from almanac.job") == 5
    jobs.sql(
        """update almanac.schedule set decided_until = decided_until - interval '1 minutes',
                  next_due_at = next_due_at - interval '1 minutes', look_at = look_at - interval '1 minutes'"""
    )
    assert jobs.advance_schedule(queue="default", name="daily") == []
    assert (jobs.one("select count(*) from almanac.job"), overview(jobs).next_due_at) == (5, minutes(6, 1)[0])


# ── overlap ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_overlap_allow_fires_whatever_runs(jobs, now):
    put(jobs, cron=MINUTELY)
    for _ in range(3):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs) == {"fired": 3}


@pytest.mark.parametrize("options", [{"overlap": "skip"}, {"overlap": "allow", "max_running": 1}], ids=str)
def test_overlap_skip_waits_for_the_end_of_the_last_one(jobs, now, options):
    put(jobs, cron=MINUTELY, **options)
    for _ in range(3):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs) == {"fired": 1, "skipped_overlap": 2}
    finish(jobs)
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"fired": 2, "skipped_overlap": 2}


def test_max_running_counts_every_live_job(jobs, now):
    put(jobs, cron=MINUTELY, overlap="skip", max_running=2, catch_up="all")
    now.advance(minutes=10)
    drain(jobs)
    assert decisions(jobs) == {"fired": 2, "skipped_overlap": 8}
    assert at(jobs, "fired") == minutes(1, 2)


def test_queue_one_runs_one_and_keeps_one(jobs, now):
    put(jobs, cron=MINUTELY, overlap="queue_one")
    for _ in range(4):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs) == {"fired": 2, "skipped_overlap": 2}
    (first,) = jobs.claim("default", 10)
    assert first.tick_at == minutes(1, 1)[0]
    assert jobs.claim("default", 10) == []
    jobs.complete(**held(first))
    (second,) = jobs.claim("default", 10)
    assert second.tick_at == minutes(2, 1)[0]


def test_cancel_running_makes_room(jobs, now):
    put(jobs, cron=MINUTELY, overlap="cancel_running")
    now.advance(minutes=1)
    drain(jobs)
    (first,) = jobs.claim("default", 10)
    now.advance(minutes=1)
    drain(jobs)
    assert jobs.row(first.job_id).cancel_requested_by == "tick"
    assert jobs.claim("default", 10) == [], "the second waits until the first has let go"
    now.advance(minutes=1)
    drain(jobs)
    assert jobs.one("select count(*) from almanac.job_history where state = 'cancelled'") == 1
    jobs.release(**held(first))
    (third,) = jobs.claim("default", 10)
    assert third.tick_at == minutes(3, 1)[0]
    assert decisions(jobs) == {"fired": 3}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_job_that_somebody_holds_stops_only_the_schedule_that_would_cancel_it(jobs, session, now, ending):
    put(jobs, cron=MINUTELY, overlap="cancel_running")
    put(jobs, "other", cron=MINUTELY, catch_up="all")
    now.advance(minutes=1)
    drain(jobs)
    holder = session()
    holder.sql("begin")
    holder.cancel(queue="default", job_id=jobs.one("select id from almanac.job where schedule = 'daily'"))
    now.advance(minutes=2)
    ticker = session()
    ticker.sql("set statement_timeout = '5s'")
    assert drain(ticker) == (2, 0)
    assert at(jobs, "fired") == minutes(1, 1)
    holder.sql(ending)
    assert drain(ticker) == (1, 1)
    assert at(jobs, "coalesced") == minutes(2, 1)
    assert at(jobs, "fired") == [*minutes(1, 1), *minutes(3, 1)]
    assert jobs.one("select count(*) from almanac.job where schedule = 'daily'") == 1


def test_cancel_running_after_downtime_makes_one_job(jobs, now):
    put(jobs, cron=MINUTELY, overlap="cancel_running", catch_up="all")
    now.advance(minutes=10)
    drain(jobs)
    assert decisions(jobs) == {"coalesced": 9, "fired": 1}
    assert jobs.one("select tick_at from almanac.job") == minutes(10, 1)[0]


def test_ticks_that_have_their_jobs_already_are_not_counted_twice(jobs, now):
    put(jobs, cron=MINUTELY, overlap="skip", max_running=5, catch_up="all")
    now.advance(minutes=5)
    jobs.backfill_schedule(name="daily", from_at=minutes(1, 1)[0], to_at=minutes(3, 1)[0])
    drain(jobs)
    assert decisions(jobs) == {"backfilled": 3, "fired": 2}


@pytest.mark.parametrize("ticker", ["tick", "advance_schedule"])
def test_a_tick_that_has_its_job_already_cancels_none(jobs, now, ticker):
    put(jobs, cron=MINUTELY, overlap="cancel_running")
    now.advance(minutes=1)
    # Due, and made up by hand before the heartbeat came to it.
    (made,) = jobs.backfill_schedule(name="daily", from_at=minutes(1, 1)[0], to_at=minutes(1, 1)[0])[0].job_ids
    if ticker == "tick":
        drain(jobs)
    else:
        jobs.advance_schedule(queue="default", name="daily")
    assert jobs.sql("select id, state from almanac.job") == [(made, "scheduled")]
    assert decisions(jobs) == {"backfilled": 1}
    (running,) = jobs.claim("default", 10)
    now.advance(minutes=1)
    jobs.backfill_schedule(name="daily", from_at=minutes(2, 1)[0], to_at=minutes(2, 1)[0])
    drain(jobs)
    assert jobs.row(running.job_id).cancel_requested_at is None
    now.advance(minutes=1)
    drain(jobs)
    assert jobs.row(running.job_id).cancel_requested_by == "tick", "this one fires"
    assert decisions(jobs) == {"backfilled": 2, "fired": 1}


# ── one by one ──────────────────────────────────────────────────────────────────────────────────────────────────────


def overdue_in_a_pause(jobs, now, name):
    jobs.pause_schedule(name=name)
    now.advance(seconds=31)
    jobs.resume_schedule(name=name)
    now.advance(seconds=-31)


@pytest.mark.parametrize(
    "options, act",
    [
        ({}, None),
        ({"timezone": "Europe/Berlin", "jitter": "10 seconds", "priority": 3, "max_attempts": 2}, None),
        ({}, lambda jobs, now, name: jobs.pause_schedule(name=name, reason="lunch")),
        ({}, lambda jobs, now, name: jobs.pause_schedule(name=name, until="2026-03-10 12:02:30+00")),
        ({}, overdue_in_a_pause),
        ({"max_fires": 2}, None),
        ({"ends_at": "2026-03-10 12:02+00"}, None),
        ({"cron": None, "at": "2026-03-10 12:02+00"}, None),
        ({}, lambda jobs, now, name: jobs.reschedule(name=name, at="2026-03-10 12:02:20+00")),
        ({}, lambda jobs, now, name: jobs.reschedule(name=name, at="2026-03-10 11:20+00")),
        ({"overlap": "skip"}, None),
        ({"max_running": 2}, None),
        ({"overlap": "queue_one"}, None),
        ({"overlap": "cancel_running"}, None),
        ({"after_schedule": "extract", "within": "1 hour"}, None),
        ({"after_schedule": "extract", "within": "1 hour", "gate_wait": "90 seconds"}, None),
        # The end of a backlog of which the rest is decided.
        (
            {"catch_up": "all", "max_runs": 1},
            lambda jobs, now, name: jobs.sql(
                "update almanac.schedule set backlog_until = '2026-03-10 12:02:30+00', "
                "backlog_from = '2026-03-10 12:02+00' where name = %s", name
            ),
        ),
        ({}, lambda jobs, now, name: now.advance(minutes=5)),
    ],
    ids=[
        "usual", "options", "paused", "pause that ends", "overdue in a pause", "max_fires", "ends_at", "once",
        "moved to later", "moved to earlier", "skip", "max_running", "queue_one", "cancel_running", "gate",
        "waits at a gate", "end of a backlog", "downtime",
    ],
)  # fmt: skip
def test_a_schedule_advanced_by_itself_is_decided_as_with_all_the_others(jobs, now, options, act):
    names = "alone", "with others"
    for name in names:
        put(jobs, name, **({"cron": MINUTELY} | options))
    for name in names:
        if act is not None:
            act(jobs, now, name)
    for _ in range(4):
        now.advance(minutes=1)
        jobs.advance_schedule(queue="default", name="alone")
        jobs.tick()
    told = [
        (
            jobs.sql(
                "select tick_at, decision, reason, caught_up, decided_at, lateness, job_id is not null "
                "from almanac.tick where schedule = %s order by tick_at", name
            ),
            jobs.sql(
                "select tick_at, due_at - tick_at between '0' and '10 seconds', priority, max_attempts, caught_up, "
                "job_type, replace(idempotency_key, %s, '') from almanac.job where schedule = %s order by tick_at",
                name, name
            ),
            jobs.one(
                "select next_due_at, look_at, decided_until, decided_local, moved_to, gate_waiting_at, backlog_until, "
                "skip_until, fires, paused_at, paused_until, error from almanac.schedule where name = %s", name
            ),
        )
        for name in names
    ]  # fmt: skip
    assert told[0] == told[1]
    assert told[0][0]


# ── gates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_closed_gate_skips_and_an_open_one_lets_through(jobs, now):
    put(jobs, "extract", cron="0 * * * *")
    put(jobs, "load", cron=MINUTELY, after_schedule="extract", within="5 minutes")
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs, "load") == {"skipped_gate": 1}
    jobs.trigger_schedule(name="extract")
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs, "load") == {"skipped_gate": 2}, "it runs, but has not succeeded"
    (job,) = jobs.claim("default")
    jobs.fail_with_backoff(**held(job), error="no", permanent=True)
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs, "load") == {"skipped_gate": 3}, "it is dead"
    jobs.trigger_schedule(name="extract")
    finish(jobs, "extract")
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs, "load") == {"fired": 1, "skipped_gate": 3}
    now.advance(minutes=5)
    drain(jobs)
    assert decisions(jobs, "load")["fired"] == 1


def test_a_tick_waits_at_a_gate_for_so_long(jobs, now):
    put(jobs, "extract", cron="0 0 * * *")
    put(jobs, "load", cron="5 * * * *", after_schedule="extract", within="2 hours", gate_wait="30 minutes")
    now.freeze("2026-03-10 12:05:01+00")
    drain(jobs)
    assert (decisions(jobs, "load"), overview(jobs, "load").status) == ({}, "waiting for its gate")
    assert jobs.one("select look_at from almanac.schedule where name = 'load'") == now.now() + timedelta(seconds=5)
    now.advance(minutes=20)
    drain(jobs)
    jobs.trigger_schedule(name="extract")
    finish(jobs, "extract")
    now.advance(seconds=5)
    drain(jobs)
    (tick,) = jobs.sql("select * from almanac.tick where schedule = 'load'")
    assert (tick.decision, tick.caught_up, tick.tick_at) == ("fired", False, datetime(2026, 3, 10, 12, 5, tzinfo=UTC))
    now.freeze("2026-03-10 16:05:00+00")
    drain(jobs)
    now.freeze("2026-03-10 16:34:59+00")
    drain(jobs)
    assert overview(jobs, "load").status == "waiting for its gate"
    now.advance(seconds=6)
    drain(jobs)
    assert (
        jobs.one("select decision from almanac.tick where schedule = 'load' order by tick_at desc limit 1")
        == "skipped_gate"
    )
    assert overview(jobs, "load").status == "active"


@pytest.mark.parametrize("catch_up", ["none", "latest", "all"])
def test_ticks_behind_one_that_waits_at_a_gate_wait_with_it(jobs, now, catch_up):
    put(jobs, "extract", cron="0 0 * * *")
    gate = {"after_schedule": "extract", "within": "2 hours", "gate_wait": "12 minutes"}
    put(jobs, "load", cron="*/5 * * * *", catch_up=catch_up, **gate)
    now.freeze("2026-03-10 12:04:00+00")
    for _ in range(18):
        now.advance(minutes=1)
        drain(jobs)
    assert at(jobs, "skipped_gate", "load") == minutes(5, 1) + minutes(10, 1), "each of them for as long"
    jobs.trigger_schedule(name="extract")
    finish(jobs, "extract")
    now.advance(seconds=5)
    drain(jobs)
    assert at(jobs, "fired", "load") == minutes(15, 1) + minutes(20, 1)
    assert jobs.sql("select from almanac.tick where caught_up") == [], "nobody was away"


@pytest.mark.parametrize(
    "change", [{"payload": '{"a": 1}'}, {"cron": "10 * * * *"}, None], ids=["payload", "rule", "no gate any more"]
)
def test_a_tick_that_waits_at_a_gate_is_not_missed_when_the_definition_changes(jobs, now, change):
    gate = {"after_schedule": "extract", "within": "2 hours", "gate_wait": "30 minutes"}
    definition = {"cron": "5 * * * *", "catch_up": "none"}
    put(jobs, "load", **definition, **gate)
    for _ in range(20):
        now.advance(minutes=1)
        drain(jobs)
    assert overview(jobs, "load").status == "waiting for its gate"
    if change is None:
        put(jobs, "load", **definition)
    else:
        put(jobs, "load", **(definition | gate | change))
        drain(jobs)
        assert decisions(jobs, "load") == {}
        put(jobs, "extract", cron="0 0 * * *")
        jobs.trigger_schedule(name="extract")
        finish(jobs, "extract")
        now.advance(seconds=5)
    drain(jobs)
    assert at(jobs, "fired", "load") == minutes(5, 1)


# ── trouble ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "damage",
    [
        "timezone = 'Mars/Phobos'",
        "rule = null",
        "rule.month_mask = 0",
        "cron = '@every 0s', rule.every_us = 0",
        "jitter = '900000000 days'",
    ],
)
def test_one_bad_schedule_does_not_stop_the_others(jobs, now, damage):
    for n in range(20):
        put(jobs, f"s{n:02}", cron="@every 60s" if n % 3 else MINUTELY)
    jobs.sql(f"update almanac.schedule set {damage} where name = 's06'")
    now.advance(minutes=1)
    (report,) = jobs.tick()
    assert (report.fired, report.broken) == (19, 1)
    row = overview(jobs, "s06")
    assert (row.status, row.paused_by, row.next_due_at is not None) == ("broken", "tick", True)
    assert row.error
    assert [a.subject for a in jobs.alerts() if a.alert == "schedule_broken"] == ["default/s06"]
    assert jobs.one("select count(*) from almanac.audit where action = 'quarantine' and subject = 's06'") == 1
    now.advance(minutes=1)
    (report,) = jobs.tick()
    assert (report.schedules, report.fired, report.broken) == (19, 19, 0), "no hot loop"
    # Correcting it ends the quarantine.
    put(jobs, "s06", cron="0 * * * *")
    assert (overview(jobs, "s06").status, overview(jobs, "s06").error) == ("active", None)
    assert not [a for a in jobs.alerts() if a.alert == "schedule_broken"]


def test_a_bad_schedule_advanced_alone_is_set_aside(jobs, now):
    put(jobs, cron=MINUTELY)
    jobs.sql("update almanac.schedule set timezone = 'Mars/Phobos'")
    now.advance(minutes=1)
    assert jobs.advance_schedule(queue="default", name="daily") == []
    assert overview(jobs).status == "broken"
    with refused("22023"):
        jobs.resume_schedule(name="daily")
    jobs.sql("update almanac.schedule set timezone = 'UTC'")
    jobs.resume_schedule(name="daily")
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"fired": 1, "skipped_paused": 1}


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_name_in_two_queues_sends_two_keys(jobs, now):
    for queue in ("tenant a", "tenant b", "täglich " * 20):
        jobs.put(queue)
        put(jobs, "bill", cron=MINUTELY, queue=queue)
    now.advance(minutes=1)
    drain(jobs)
    keys = [row.idempotency_key for row in jobs.sql("select idempotency_key from almanac.job")]
    assert len(set(keys)) == 3
    assert all(len(key) <= 128 and key.isascii() and key.isprintable() for key in keys), keys


def test_names_that_cannot_be_read_in_a_key_share_none(jobs, now):
    names = ["é" * 60, "è" * 60, "x" * 60 + "1", "x" * 60 + "2"]
    hashed = jobs.one("select '_______________~' || md5(%s)", names[0])
    for name in [*names, hashed]:
        put(jobs, name, cron=MINUTELY)
    now.advance(minutes=1)
    drain(jobs)
    assert jobs.one("select count(distinct idempotency_key) from almanac.job") == 5


@pytest.mark.parametrize("overlap", ["queue_one", "cancel_running"])
def test_one_at_a_time_is_one_whatever_the_queue_allows_for_keys(jobs, now, overlap):
    jobs.put_queue(queue="default", max_running_per_key=3)
    put(jobs, cron="*/20 * * * * *", overlap=overlap)
    running = []
    for _ in range(4):
        now.advance(seconds=20)
        drain(jobs)
        running += jobs.claim("default", 10)
        assert jobs.one("select count(*) from almanac.job where state = 'running'") == 1
    for claimed in running:
        jobs.release(**held(claimed))
    jobs.tick()
    for key, most in (("schedule:daily", 1), ("customer 7", 3)):
        for _ in range(5):
            jobs.add("default", concurrency_key=key)
        jobs.claim("default", 100)
        jobs.tick()
        jobs.claim("default", 100)
        count = "select count(*) from almanac.job where state = 'running' and concurrency_key = %s"
        assert jobs.one(count, key) == most


def test_jobs_of_before_count_when_a_schedule_becomes_one_at_a_time(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all")
    now.advance(minutes=3)
    drain(jobs)
    (first,) = jobs.claim("default")
    put(jobs, cron=MINUTELY, catch_up="all", overlap="queue_one")
    assert jobs.claim("default", 10) == [], "one of before still runs"
    assert jobs.unwatched() == []
    jobs.complete(**held(first))
    (second,) = jobs.claim("default", 10)
    assert jobs.claim("default", 10) == []
    jobs.complete(**held(second))
    assert len(jobs.claim("default", 10)) == 1


def test_a_key_of_ones_own_goes_with_one_at_a_time_only_if_it_means_one(jobs, now):
    with refused("PA009") as caught:
        put(jobs, cron=MINUTELY, overlap="queue_one", concurrency_key="account 7")
    assert "schedule:" in caught.value.diag.message_hint
    put(jobs, cron=MINUTELY, overlap="queue_one", concurrency_key="schedule:account 7")
