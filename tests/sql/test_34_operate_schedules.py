"""34 operate on schedules: each act has one documented outcome, is written down, and can be tried without doing it."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.jobs import Blocked, held, refused
from tests.sql.test_33_schedules import overview, put
from tests.sql.test_70_advance_schedule import MINUTELY, at, decisions, drain, finish, minutes, now

__all__ = ["now"]


def state(jobs):
    """Everything an operator's act could change."""
    return [
        jobs.sql(f"select * from almanac.{table} order by 1, 2, 3")
        for table in ("schedule", "schedule_revision", "tick", "job", "audit", "alert")
    ]


# ── pause and resume ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_paused_schedule_says_so_of_each_tick_as_time_passes(jobs, now):
    put(jobs, cron=MINUTELY)
    jobs.pause_schedule(name="daily", reason="release day")
    for _ in range(3):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs) == {"skipped_paused": 3}
    assert jobs.one("select distinct reason from almanac.tick") == "release day"
    assert (overview(jobs).status, overview(jobs).pause_reason) == ("paused", "release day")
    jobs.resume_schedule(name="daily")
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"fired": 1, "skipped_paused": 3}
    acts = [
        row.action for row in jobs.sql("select action from almanac.audit where action ~ 'pause|resume' order by id")
    ]
    assert acts == ["pause_schedule", "resume_schedule"]


def test_a_long_pause_with_nobody_ticking_is_written_down_in_pieces(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all")
    jobs.pause_schedule(name="daily")
    now.advance(minutes=100)
    jobs.resume_schedule(name="daily")
    assert jobs.one("select count(*) from almanac.tick") == 0, "not by the operator's call"
    (report,) = jobs.tick(batch_size=40)
    assert (report.skipped, report.more) == (40, True)
    drain(jobs, 40)
    assert decisions(jobs) == {"skipped_paused": 100}
    now.advance(minutes=2)
    drain(jobs)
    assert decisions(jobs) == {"fired": 2, "skipped_paused": 100}


def test_a_pause_until_the_end_of_time_is_one_without_an_end(jobs, now):
    put(jobs, cron=MINUTELY)
    jobs.pause_schedule(name="daily", until="infinity")
    assert (overview(jobs).status, overview(jobs).paused_until) == ("paused", None)


def test_a_pause_ends_by_itself(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all")
    jobs.pause_schedule(name="daily", until=minutes(5, 1)[0])
    for _ in range(7):
        now.advance(minutes=1)
        drain(jobs)
    assert at(jobs, "skipped_paused") == minutes(1, 4)
    assert at(jobs, "fired") == minutes(5, 3)
    assert overview(jobs).status == "active"
    assert jobs.one("select count(*) from almanac.audit where action = 'pause_ended'") == 1
    with refused("22023"):
        jobs.pause_schedule(name="daily", until=minutes(0, 1)[0])


@pytest.mark.parametrize(
    "options, made_up",
    [
        ({"catch_up": "all"}, minutes(1, 10)),
        ({"catch_up": "all", "max_runs": 3}, minutes(8, 3)),
        ({"catch_up": "all", "max_age": "5 minutes"}, minutes(6, 5)),
        ({"catch_up": "latest"}, minutes(10, 1)),
        ({"catch_up": "none"}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("ticked", [True, False], ids=["ticked meanwhile", "nobody ticked"])
def test_resume_with_catch_up_follows_the_policy(jobs, now, options, made_up, ticked):
    put(jobs, cron=MINUTELY, **options)
    jobs.pause_schedule(name="daily")
    now.advance(minutes=10)
    if ticked:
        drain(jobs)
    jobs.resume_schedule(name="daily", catch_up=True)
    drain(jobs)
    live = [row.tick_at for row in jobs.sql("select tick_at from almanac.job where caught_up order by tick_at")]
    assert live == made_up
    assert jobs.one("select count(*) from almanac.tick") == 10
    assert jobs.one("select count(job_id) from almanac.tick") == len(made_up)
    jobs.resume_schedule(name="daily", catch_up=True)
    assert jobs.one("select count(*) from almanac.job") == len(made_up)


def test_a_pause_after_one_that_ended_by_itself_is_another(jobs, now):
    put(jobs, cron="0 12 * * *", catch_up="all")
    jobs.pause_schedule(name="daily", until="2026-03-12 00:00+00")
    now.freeze("2026-03-11 12:00:01+00")
    drain(jobs)
    now.freeze("2026-03-12 11:00:00+00")
    jobs.pause_schedule(name="daily")
    assert overview(jobs).paused_at == now.now()
    now.freeze("2026-03-12 12:00:01+00")
    drain(jobs)
    (resumed,) = jobs.resume_schedule(name="daily", catch_up=True)
    assert resumed.ticks == 1
    assert at(jobs, "backfilled") == [datetime(2026, 3, 12, 12, tzinfo=UTC)]


def test_a_pause_waits_for_a_tick_that_is_being_decided(jobs, now, session):
    put(jobs, cron=MINUTELY)
    now.advance(minutes=1)
    ticking = session(autocommit=False)
    ticking.tick()
    operator = session()
    with Blocked(jobs.conn, operator.conn, lambda: operator.pause_schedule(name="daily")) as pause:
        ticking.conn.commit()
    pause.value()
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"fired": 1, "skipped_paused": 1}


# ── trigger, reschedule, backfill, drop ─────────────────────────────────────────────────────────────────────────────


def test_trigger_makes_a_job_now_and_leaves_the_next_tick(jobs, now):
    put(jobs, cron="0 * * * *", payload='{"a": 1}')
    before = overview(jobs).next_due_at
    (first,) = jobs.trigger_schedule(name="daily", reason="customer asked")
    jobs.trigger_schedule(name="daily")
    assert overview(jobs).next_due_at == before
    assert (overview(jobs).fires, decisions(jobs)) == (0, {"triggered": 2})
    (row,) = jobs.sql("select * from almanac.tick where job_id = %s", first.job_ids[0])
    assert (row.ticked_by, row.reason, row.tick_at) == ("postgres", "customer asked", now.now())
    keys = jobs.sql("select idempotency_key, payload from almanac.job order by id")
    moment = int(row.tick_at.timestamp()) * 1_000_000 + row.tick_at.microsecond
    assert [key.idempotency_key for key in keys] == [
        f"default-000000000000:daily:triggered:{moment + later:x}" for later in (0, 1)
    ], "a number would come again after a restore"
    assert len(jobs.claim("default", 10)) == 2


def test_reschedule_into_the_future_merges_what_lies_before(jobs, now):
    put(jobs, cron=MINUTELY)
    jobs.reschedule(name="daily", at="2026-03-10 12:05:20+00")
    assert overview(jobs).next_due_at == datetime(2026, 3, 10, 12, 5, 20, tzinfo=UTC)
    for _ in range(3):
        now.advance(minutes=1)
        drain(jobs)
    assert decisions(jobs) == {}
    now.freeze("2026-03-10 12:05:21+00")
    drain(jobs)
    assert at(jobs, "fired") == [datetime(2026, 3, 10, 12, 5, 20, tzinfo=UTC)]
    assert at(jobs, "coalesced") == minutes(1, 5)
    assert overview(jobs).next_due_at == minutes(6, 1)[0]
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"coalesced": 5, "fired": 2}


def test_reschedule_into_the_past_fires_at_once(jobs, now):
    put(jobs, cron="0 * * * *", catch_up="none")
    jobs.reschedule(name="daily", at="2026-03-09 03:00+00")
    assert drain(jobs) == (1, 0)
    assert at(jobs, "fired") == [datetime(2026, 3, 9, 3, tzinfo=UTC)]
    assert overview(jobs).next_due_at == datetime(2026, 3, 10, 13, tzinfo=UTC)
    now.freeze("2026-03-10 13:00+00")
    assert drain(jobs) == (1, 0)
    with refused("PA009"):
        jobs.reschedule(name="daily", at="2026-03-09 03:00+00")
    with refused("22023"):
        jobs.reschedule(name="daily", at="infinity")


@pytest.mark.parametrize(
    "act, decision",
    [
        (lambda jobs: put(jobs, cron="30 * * * *"), "coalesced"),
        (lambda jobs: jobs.drop_schedule(name="daily"), "skipped_catchup"),
    ],
    ids=["change", "drop"],
)
def test_ticks_before_one_that_was_moved_are_written_down_though_it_never_comes(jobs, now, act, decision):
    put(jobs, cron="0 * * * *")
    jobs.reschedule(name="daily", at="2026-03-10 18:45+00")
    now.freeze("2026-03-10 15:05+00")
    assert drain(jobs) == (0, 0)
    act(jobs)
    assert at(jobs, decision) == [datetime(2026, 3, 10, hour, tzinfo=UTC) for hour in (13, 14, 15)]
    now.freeze("2026-03-10 15:31+00")
    drain(jobs)
    assert len(at(jobs, "fired")) == (decision == "coalesced"), "the new rule goes on at once"


def test_a_tick_that_was_due_and_is_moved_once_more_is_written_down(jobs, now):
    put(jobs, cron="0 * * * *")
    now.freeze("2026-03-10 13:00:01+00")
    put(jobs, cron="30 * * * *")
    jobs.reschedule(name="daily", at="2026-03-10 13:15+00")
    jobs.reschedule(name="daily", at="2026-03-10 13:20+00")
    now.freeze("2026-03-10 13:20:01+00")
    drain(jobs)
    assert at(jobs, "coalesced") == [datetime(2026, 3, 10, 13, tzinfo=UTC)]
    assert at(jobs, "fired") == [datetime(2026, 3, 10, 13, 20, tzinfo=UTC)]


@pytest.mark.parametrize(
    "moves", [["13:00"], ["16:00"], ["13:00", "16:00"], ["13:00", "15:00"], ["16:00", "13:00"]], ids=" then ".join
)
def test_a_schedule_that_runs_once_runs_once_also_if_it_is_moved(jobs, now, moves):
    put(jobs, cron=None, at="2026-03-10 15:00+00")
    for move in moves:
        jobs.reschedule(name="daily", at=f"2026-03-10 {move}+00")
        # What else is changed about it leaves it where it was moved to.
        put(jobs, cron=None, at="2026-03-10 15:00+00", description=move)
    for hour in range(13, 20):
        now.freeze(f"2026-03-10 {hour}:00:01+00")
        drain(jobs)
    assert at(jobs, "fired") == [datetime.fromisoformat(f"2026-03-10 {moves[-1]}+00:00")]
    assert len(at(jobs, "coalesced")) == (moves == ["16:00"])
    assert overview(jobs).next_due_at is None


def test_a_tick_that_was_moved_is_of_a_whole_second_and_shares_its_key_with_no_other(jobs, now):
    put(jobs, cron=MINUTELY)
    now.freeze("2026-03-10 12:01:00.4+00")
    drain(jobs)
    with refused("PA009"):
        jobs.reschedule(name="daily", at=now.now())
    jobs.reschedule(name="daily", at=now.now() + timedelta(seconds=5.3))
    now.advance(seconds=6)
    drain(jobs)
    ticks = jobs.sql("select tick_at, idempotency_key from almanac.job order by tick_at")
    assert [tick.tick_at.isoformat() for tick in ticks] == ["2026-03-10T12:01:00+00:00", "2026-03-10T12:01:05+00:00"]
    assert len({tick.idempotency_key for tick in ticks}) == 2


def test_backfill_makes_up_what_has_not_fired_and_nothing_twice(jobs, now):
    put(jobs, cron=MINUTELY)
    now.advance(minutes=1)
    drain(jobs)
    jobs.pause_schedule(name="daily")
    now.advance(minutes=2)
    drain(jobs)
    jobs.resume_schedule(name="daily")
    span = {"from_at": "2026-03-10 11:58+00", "to_at": "2026-03-10 13:00+00"}
    (dry,) = jobs.backfill_schedule(name="daily", **span, dry_run=True)
    assert (dry.ticks, dry.job_ids) == (5, [])
    (done,) = jobs.backfill_schedule(name="daily", **span)
    assert (done.ticks, len(done.job_ids)) == (5, 5)
    assert at(jobs, "backfilled") == [*minutes(-2, 3), *minutes(2, 2)]
    assert at(jobs, "fired") == minutes(1, 1)
    (again,) = jobs.backfill_schedule(name="daily", **span)
    assert (again.ticks, again.changed) == (0, False)
    assert jobs.one("select count(*) from almanac.job") == 6
    assert jobs.one("select count(*) filter (where caught_up) from almanac.job") == 5
    keys = jobs.sql("select idempotency_key from almanac.job")
    assert len({key.idempotency_key for key in keys}) == 6
    now.advance(minutes=1)
    drain(jobs)
    assert decisions(jobs) == {"backfilled": 5, "fired": 2}
    with refused("PA009"):
        jobs.backfill_schedule(name="daily", from_at="2025-12-01 00:00+00", to_at="2025-12-02 00:00+00")
    with refused("22023"):
        jobs.backfill_schedule(name="daily", from_at=span["to_at"], to_at=span["from_at"])


def test_backfill_fires_nothing_again_that_the_queue_did_not_keep_long_enough(jobs, now):
    """The ledger of it is gone, and keeping more from now on does not bring it back."""
    jobs.put("other", retention="1 day")
    jobs.put("q", retention="1 hour")
    put(jobs, queue="q", cron=MINUTELY)
    now.advance(minutes=1)
    drain(jobs)
    jobs.pause_schedule(name="daily")
    now.advance(minutes=90)
    drain(jobs)
    jobs.sql("select almanac._prune()")
    assert at(jobs, "fired") == []
    jobs.put("q", retention="1 day")
    with refused("PA009"):
        jobs.backfill_schedule(name="daily", from_at=minutes(1, 1)[0], to_at=minutes(2, 1)[0])
    (done,) = jobs.backfill_schedule(name="daily", from_at=minutes(32, 1)[0], to_at=minutes(41, 1)[0])
    assert done.ticks == 10


def test_backfill_before_a_tick_is_decided_is_that_tick(jobs, now):
    put(jobs, cron=MINUTELY)
    now.advance(minutes=1)
    jobs.backfill_schedule(name="daily", from_at="2026-03-10 12:01+00", to_at="2026-03-10 12:01+00")
    drain(jobs)
    assert (decisions(jobs), jobs.one("select count(*) from almanac.job")) == ({"backfilled": 1}, 1)
    assert overview(jobs).next_due_at == minutes(2, 1)[0]


def test_backfill_keeps_the_pace(jobs, now):
    put(jobs, cron=MINUTELY, catch_up="all", pace=6)
    jobs.backfill_schedule(name="daily", from_at="2026-03-10 11:00+00", to_at="2026-03-10 11:04+00")
    dues = [row.due_at - now.now() for row in jobs.sql("select due_at from almanac.job order by tick_at")]
    assert dues == [timedelta(seconds=10 * n) for n in range(5)]


def test_a_dropped_schedule_leaves_its_job_and_its_past(jobs, now):
    put(jobs, cron=MINUTELY)
    now.advance(minutes=1)
    drain(jobs)
    (job,) = jobs.claim("default")
    now.advance(minutes=1)
    jobs.drop_schedule(name="daily", reason="gone")
    assert decisions(jobs) == {"fired": 1, "skipped_catchup": 1}, "the one that was due says why it did not run"
    jobs.complete(**held(job))
    now.advance(minutes=5)
    drain(jobs)
    assert jobs.one("select schedule from almanac.job_history") == "daily"
    assert jobs.one("select count(*) from almanac.tick") == 2
    assert jobs.one("select action from almanac.schedule_history order by revision desc limit 1") == "drop_schedule"
    with refused("PA006"):
        jobs.pause_schedule(name="daily")


def test_a_new_job_type_holds_from_the_next_tick_on(jobs, now):
    put(jobs, cron=MINUTELY, job_type="old")
    now.advance(minutes=1)
    drain(jobs)
    put(jobs, cron=MINUTELY, job_type="new")
    now.advance(minutes=1)
    drain(jobs)
    assert [row.job_type for row in jobs.sql("select job_type from almanac.job order by tick_at")] == ["old", "new"]


def test_a_zone_change_across_the_night_the_clocks_change(jobs, now):
    now.freeze("2026-03-28 20:00+00")
    put(jobs, cron="30 2 * * *", timezone="America/New_York")
    assert overview(jobs).next_due_at == datetime(2026, 3, 29, 6, 30, tzinfo=UTC)
    put(jobs, cron="30 2 * * *", timezone="Europe/Berlin")
    assert overview(jobs).next_due_at == datetime(2026, 3, 29, 1, 0, tzinfo=UTC), "02:30 is left out: after the gap"
    now.freeze("2026-03-29 01:00:01+00")
    drain(jobs)
    put(jobs, cron="30 2 * * *", timezone="America/New_York")
    now.freeze("2026-03-30 07:00+00")
    drain(jobs)
    assert [tick.isoformat() for tick in at(jobs, "fired")] == [
        "2026-03-29T01:00:00+00:00",
        "2026-03-30T06:30:00+00:00",
    ]


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────────

ACTS: list[tuple[str, dict[str, Any]]] = [
    ("pause_schedule", {}),
    ("resume_schedule", {"catch_up": True}),
    ("trigger_schedule", {}),
    ("reschedule", {"at": "2026-03-10 15:00+00"}),
    ("backfill_schedule", {"from_at": "2026-03-10 10:00+00", "to_at": "2026-03-10 11:00+00"}),
    ("drop_schedule", {}),
    ("revert_schedule", {"revision": 1}),
]


@pytest.mark.parametrize("act, arguments", ACTS, ids=[act for act, _ in ACTS])
def test_a_dry_run_reports_and_changes_nothing(jobs, now, act, arguments):
    put(jobs, cron=MINUTELY)
    put(jobs, cron="*/2 * * * *")
    jobs.pause_schedule(name="daily")
    now.advance(minutes=4)
    drain(jobs)
    before = state(jobs)
    (report,) = getattr(jobs, act)(name="daily", **arguments, dry_run=True)
    assert (report.dry_run, report.changed, report.action) == (True, True, act)
    assert report.message
    assert state(jobs) == before
    (report,) = getattr(jobs, act)(name="daily", **arguments)
    assert (report.dry_run, report.changed) == (False, True)
    assert state(jobs) != before
    audited = jobs.one("select action, actor from almanac.audit order by id desc limit 1")
    assert (audited.action, audited.actor) == (act, "postgres")


@pytest.mark.parametrize("act, arguments", ACTS, ids=[act for act, _ in ACTS])
def test_the_queue_is_needed_only_where_the_name_is_not_enough(jobs, now, act, arguments):
    jobs.put("other")
    put(jobs, cron=MINUTELY)
    put(jobs, queue="other", cron=MINUTELY)
    put(jobs, queue="other", cron="0 0 * * *")
    jobs.pause_schedule(name="daily", queue="other")
    with refused("PA006"):
        getattr(jobs, act)(name="daily", **arguments)
    (report,) = getattr(jobs, act)(name="daily", **arguments, queue="other")
    assert report.queue == "other"
    with refused("PA006" if act != "revert_schedule" else "PA012"):
        getattr(jobs, act)(name="nonesuch", **arguments, queue="other")


def test_operating_needs_the_right_to_operate(jobs, now, worker_id):
    role = f"test_{worker_id}_schedule_operator"
    put(jobs, cron=MINUTELY)
    jobs.grant_queue(queue="default", role="postgres", may="operate")
    jobs.sql(f"drop role if exists {role}")
    jobs.sql(f"create role {role}; grant almanac_operator to {role}")
    try:
        jobs.grant_queue(queue="default", role=role, may="produce")
        jobs.sql(f"set role {role}")
        for (act, arguments), queue, dry_run in itertools.product(ACTS, ({}, {"queue": "default"}), (True, False)):
            with refused("PA004"):
                getattr(jobs, act)(name="daily", **arguments, **queue, dry_run=dry_run)
        jobs.sql("reset role")
        jobs.grant_queue(queue="default", role=role, may="operate")
        jobs.sql(f"set role {role}")
        jobs.pause_schedule(name="daily")
        jobs.sql("reset role")
        assert overview(jobs).paused_by == role
    finally:
        jobs.sql("reset role")
        jobs.sql(f"drop role {role}")


# ── why ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def explain(jobs, moment, name="daily"):
    return jobs.explain_tick(name=name, at=moment)[0]


def test_every_moment_can_be_explained(jobs, now):
    put(jobs, cron="*/10 * * * *", overlap="skip", catch_up="all", max_age="20 minutes")
    now.freeze("2026-03-10 12:10:01+00")
    drain(jobs)
    now.freeze("2026-03-10 12:20:01+00")
    drain(jobs)
    finish(jobs)
    jobs.pause_schedule(name="daily", reason="lunch")
    now.freeze("2026-03-10 12:30:01+00")
    drain(jobs)
    jobs.resume_schedule(name="daily")
    now.freeze("2026-03-10 13:20:01+00")
    drain(jobs)
    jobs.trigger_schedule(name="daily", reason="try")
    said = {
        "12:10:00": ("fired", "It fired as job"),
        "12:20:00": ("skipped_overlap", "earlier jobs of it live"),
        "12:30:00": ("skipped_paused", "lunch"),
        "12:40:00": ("skipped_catchup", "older than max_age"),
        "12:15:00": (None, 'no tick of "*/10 * * * *"; before it is 2026-03-10 12:10:00+00 (fired, job '),
        "12:35:00": (None, "before it is 2026-03-10 12:30:00+00 (skipped_paused), after it 2026-03-10 12:40:00+00."),
        "13:20:01": ("triggered", "by hand"),
        "13:30:00": (None, "It is due in 00:09:59"),
        "11:50:00": (None, "The schedule was made after it"),
    }
    for time, (decision, words) in said.items():
        row = explain(jobs, f"2026-03-10 {time}+00")
        assert (row.decision, words in row.explanation) == (decision, True), row.explanation
    now.freeze("2026-03-10 13:30:00+00")
    assert "nobody has ticked since" in explain(jobs, "2026-03-10 13:30:00+00").explanation
    jobs.reschedule(name="daily", at="2026-03-10 15:05+00")
    assert "moved to 2026-03-10 15:05" in explain(jobs, "2026-03-10 14:50:00+00").explanation
    jobs.pause_schedule(name="daily", reason="lunch again")
    assert "lunch again" in explain(jobs, "2026-03-10 16:00:00+00").explanation
    jobs.drop_schedule(name="daily")
    assert "It fired as job" in explain(jobs, "2026-03-10 12:10:00+00").explanation
    assert "was dropped at" in explain(jobs, "2026-03-10 12:15:00+00").explanation
    with refused("PA006"):
        explain(jobs, "2026-03-10 12:15:00+00", "nonesuch")


def test_what_will_not_be_decided_is_not_said_to_wait_for_a_tick(jobs, now):
    put(jobs, cron=MINUTELY, max_fires=1)
    put(jobs, "moved", cron=MINUTELY)
    jobs.reschedule(name="moved", at="2026-03-10 15:05+00")
    now.advance(minutes=5)
    drain(jobs)
    assert "has fired 1 times and is finished" in explain(jobs, "2026-03-10 12:06:00+00").explanation
    now.advance(minutes=5)
    assert "has fired 1 times and is finished" in explain(jobs, "2026-03-10 12:06:00+00").explanation
    assert "moved to 2026-03-10 15:05" in explain(jobs, "2026-03-10 12:06:00+00", "moved").explanation


@pytest.mark.parametrize("damage", ["timezone = 'Mars/Phobos'", "rule = null", "rule.month_mask = 0"])
def test_a_schedule_that_cannot_be_evaluated_can_be_explained(jobs, now, damage):
    put(jobs, cron=MINUTELY)
    now.advance(minutes=1)
    drain(jobs)
    jobs.sql(f"update almanac.schedule set {damage}")
    now.advance(minutes=1)
    drain(jobs)
    error = overview(jobs).error
    before, fired, missed = minutes(-1, 1) + minutes(1, 2)
    for moment in (before, missed, *minutes(9, 1)):
        row = explain(jobs, moment)
        assert (row.is_tick, error in row.explanation) == (None, True), row.explanation
    assert "It fired as job" in explain(jobs, fired).explanation


@pytest.mark.parametrize("moment", [None, "infinity", "-infinity", "4714-11-24 00:00+00 BC", "294276-12-31 23:59+00"])
def test_a_moment_that_no_calendar_holds_is_refused(jobs, now, moment):
    put(jobs, cron=MINUTELY)
    with refused("22023" if moment else "22004") as caught:
        explain(jobs, moment)
    assert caught.value.diag.message_hint
    with refused("22023"):
        jobs.reschedule(name="daily", at=moment)
    if moment and moment.endswith("BC"):
        for bound in ("at", "starts_at", "ends_at"):
            with refused("22023"):
                put(jobs, "other", **{"cron": None if bound == "at" else MINUTELY, bound: moment})
