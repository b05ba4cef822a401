"""33 schedules: declared as a whole, changed by name, never forgotten."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.jobs import refused

NOON = datetime(2026, 3, 10, 12, 0, 30, tzinfo=UTC)


@pytest.fixture
def noon(clock):
    clock.freeze(NOON)
    return clock


def put(jobs, name="daily", cron="0 9 * * *", job_type="report", queue="default", **options):
    (row,) = jobs.sql(
        "select * from almanac.put_schedule(queue => %s, name => %s, cron => %s, job_type => %s"
        + "".join(f", {option} => %s" for option in options)
        + ")",
        queue,
        name,
        cron,
        job_type,
        *options.values(),
    )
    return row


def overview(jobs, name="daily"):
    return jobs.one("select * from almanac.schedule_overview where name = %s", name)


def test_the_next_tick_is_visible_at_once(jobs, noon):
    assert put(jobs, timezone="Europe/Berlin").next_due_at == datetime(2026, 3, 11, 8, tzinfo=UTC)
    assert overview(jobs).next_due_at == datetime(2026, 3, 11, 8, tzinfo=UTC)
    assert overview(jobs).next_local == datetime(2026, 3, 11, 9)


def test_declaring_the_same_again_changes_nothing(jobs, noon):
    put(jobs, payload='{"a": 1}', headers='{"x": null}', jitter="5 minutes", overlap="queue_one")
    jobs.sql("select almanac.reschedule('daily', '2026-03-10 15:00+00')")
    jobs.sql("select almanac.pause_schedule('daily', 'holiday')")
    before = jobs.sql("select xmin, * from almanac.schedule")
    noon.advance(minutes=5)
    again = put(jobs, payload='{"a": 1}', headers='{"x": null}', jitter="300 seconds", overlap="queue_one")
    assert (again.created, again.changed, again.revision) == (False, False, 1)
    assert jobs.sql("select xmin, * from almanac.schedule") == before
    assert jobs.one("select count(*) from almanac.schedule_revision") == 1


def test_a_change_keeps_the_pause_the_count_and_the_past(jobs, noon):
    put(jobs, cron="* * * * *")
    noon.advance(minutes=1)
    jobs.tick()
    jobs.sql("select almanac.pause_schedule('daily', 'holiday')")
    changed = put(jobs, cron="*/5 * * * *", job_type="other")
    assert (changed.created, changed.changed, changed.revision) == (False, True, 2)
    row = overview(jobs)
    assert (row.status, row.pause_reason, row.fires, row.job_type) == ("paused", "holiday", 1, "other")
    assert row.next_due_at == datetime(2026, 3, 10, 12, 5, tzinfo=UTC)
    assert jobs.one("select count(*) from almanac.tick") == 1


def test_a_change_of_anything_but_time_leaves_the_next_tick_where_it_is(jobs, noon):
    put(jobs)
    jobs.sql("select almanac.reschedule('daily', '2026-03-10 15:00+00')")
    put(jobs, job_type="other")
    assert overview(jobs).next_due_at == datetime(2026, 3, 10, 15, tzinfo=UTC)
    noon.freeze("2026-03-10 15:00:01+00")
    jobs.tick()
    assert jobs.one("select job_type from almanac.job") == "other"


def test_a_tick_that_was_due_when_the_rule_changed_is_not_lost(jobs, noon):
    put(jobs, cron="* * * * *", payload='{"v": 1}')
    noon.advance(seconds=95)
    put(jobs, cron="0 0 * * *", payload='{"v": 2}')
    jobs.tick()
    assert jobs.sql("select tick_at::time::text, decision from almanac.tick order by 1") == [
        ("12:01:00", "coalesced"),
        ("12:02:00", "fired"),
    ]
    assert jobs.one("select payload from almanac.job") == {"v": 2}
    assert overview(jobs).next_due_at == datetime(2026, 3, 11, tzinfo=UTC)


def resume(jobs):
    jobs.sql("select almanac.resume_schedule('daily')")


@pytest.mark.parametrize(
    "acts",
    [
        (lambda jobs: put(jobs, cron="30 * * * *"), resume),
        (resume, lambda jobs: put(jobs, cron="0 * * * *", payload='{"a": 1}')),
    ],
    ids=["rule", "payload"],
)
def test_a_tick_that_fell_into_a_pause_is_not_fired_by_a_change(jobs, noon, acts):
    put(jobs, cron="0 * * * *")
    jobs.sql("select almanac.pause_schedule('daily')")
    noon.advance(hours=2)
    for act in acts:
        act(jobs)
    jobs.tick()
    ticks = jobs.sql("select tick_at, decision from almanac.tick order by tick_at")
    assert [(tick.tick_at.hour, tick.decision) for tick in ticks] == [(13, "skipped_paused"), (14, "skipped_paused")]


def test_a_schedule_that_has_fired_as_often_as_a_change_allows_is_finished(jobs, noon):
    put(jobs, cron="* * * * *")
    for _ in range(2):
        noon.advance(minutes=1)
        jobs.tick()
    assert put(jobs, cron="* * * * *", max_fires=2).next_due_at is None
    noon.advance(minutes=1)
    jobs.tick()
    assert (overview(jobs).status, overview(jobs).fires) == ("finished", 2)
    put(jobs, cron="* * * * *", max_fires=3)
    noon.advance(minutes=1)
    jobs.tick()
    assert overview(jobs).fires == 3


def test_revisions_say_who_and_what_and_can_be_reverted_to(jobs, noon):
    put(jobs, cron="0 9 * * *")
    put(jobs, cron="0 10 * * *")
    rows = jobs.sql(
        "select revision, changed_by, before->>'cron' b, after->>'cron' a from almanac.schedule_history order by 1"
    )
    assert rows == [(1, "postgres", None, "0 9 * * *"), (2, "postgres", "0 9 * * *", "0 10 * * *")]
    assert jobs.one("select changed from almanac.revert_schedule('daily', 1, dry_run => true)")
    assert overview(jobs).cron == "0 10 * * *"
    jobs.sql("select almanac.revert_schedule('daily', 1)")
    assert (overview(jobs).cron, overview(jobs).revision) == ("0 9 * * *", 3)
    assert overview(jobs).next_due_at == datetime(2026, 3, 11, 9, tzinfo=UTC)
    with refused("PA012"):
        jobs.revert_schedule(name="daily", revision=9)


@pytest.mark.parametrize("queue", [None, "default"])
def test_a_dry_run_of_going_back_says_whether_anything_would_change(jobs, noon, queue):
    put(jobs)
    put(jobs, cron="0 10 * * *")
    for revision, changes in ((1, True), (2, False)):
        (row,) = jobs.revert_schedule(name="daily", revision=revision, queue=queue, dry_run=True)
        assert (row.changed, row.next_due_at) == (changes, datetime(2026, 3, 11, 10, tzinfo=UTC))


def test_a_dropped_schedule_comes_back_by_its_revision(jobs, noon):
    put(jobs, payload='{"a": [1, null]}', timezone="Asia/Tokyo", max_age="3 hours", catch_up="all")
    before = jobs.one("select almanac._definition(s) from almanac.schedule s")
    jobs.sql("select almanac.drop_schedule('daily')")
    jobs.sql("select almanac.revert_schedule('daily', 1, queue => 'default')")
    assert jobs.one("select almanac._definition(s) from almanac.schedule s") == before
    assert overview(jobs).revision == 3


@pytest.mark.parametrize("decided", ["fired", "skipped_paused"])
def test_a_schedule_that_has_run_once_is_not_run_again_by_a_change_after_its_ledger_is_gone(
    jobs, own_database, noon, decided
):
    at = NOON + timedelta(hours=2)
    put(jobs, cron=None, at=at)
    if decided == "skipped_paused":
        jobs.pause_schedule(name="daily")
    noon.advance(hours=3)
    jobs.tick()
    assert jobs.sql("select decision from almanac.tick") == [(decided,)]
    jobs.resume_schedule(name="daily")
    noon.advance(days=40)
    jobs.tick()
    assert jobs.one("select count(*) from almanac.tick") == 0
    assert put(jobs, cron=None, at=at, description="in other words").next_due_at is None
    jobs.tick()
    assert jobs.one("select count(*) from almanac.tick") == 0
    again = noon.now() + timedelta(hours=1)
    assert put(jobs, cron=None, at=again).next_due_at == again, "another time is another run"


@pytest.mark.parametrize("moved_to", ["2026-03-10 14:00+00", "2026-03-10 22:00+00"])
def test_a_schedule_that_runs_once_stays_moved_when_it_is_changed(jobs, noon, moved_to):
    put(jobs, cron=None, at="2026-03-10 18:00+00")
    jobs.reschedule(name="daily", at=moved_to)
    put(jobs, cron=None, at="2026-03-10 18:00+00", ends_at="2026-04-01 00:00+00")
    noon.freeze("2026-03-10 23:00+00")
    jobs.tick()
    jobs.tick()
    (tick,) = jobs.sql("select tick_at from almanac.tick where decision = 'fired'")
    assert tick.tick_at == datetime.fromisoformat(moved_to)


def test_a_schedule_may_run_once(jobs, noon):
    at = NOON + timedelta(hours=2)
    assert put(jobs, cron=None, at=at).next_due_at == at
    noon.advance(hours=2, seconds=3)
    jobs.tick()
    noon.advance(days=1)
    jobs.tick()
    assert jobs.sql("select tick_at, decision, lateness from almanac.tick") == [(at, "fired", timedelta(seconds=3))]
    assert (overview(jobs).next_due_at, overview(jobs).status) == (None, "finished")
    assert put(jobs, cron=None, at=at).changed is False


def test_a_template_gives_what_is_not_said(jobs, noon):
    names = {row.template for row in jobs.sql("select template from almanac.schedule_template_overview")}
    assert {"hourly", "daily midnight", "weekdays 9:00", "weekly Monday 8:00"} <= names
    put(jobs, "a", cron=None, template="weekdays 9:00", timezone="America/New_York")
    assert (overview(jobs, "a").cron, overview(jobs, "a").timezone) == ("0 9 * * MON-FRI", "America/New_York")
    jobs.sql("select almanac.put_schedule_template('calm', catch_up => 'all', pace => 6, overlap => 'skip')")
    put(jobs, "b", cron="0 5 * * *", template="calm", overlap="allow")
    assert (overview(jobs, "b").catch_up, overview(jobs, "b").pace, overview(jobs, "b").overlap) == ("all", 6, "allow")
    jobs.sql("select almanac.put_schedule_template('calm', catch_up => 'none')")
    assert overview(jobs, "b").catch_up == "all"
    with refused("PA012"):
        put(jobs, "c", cron=None, template="nonesuch")


@pytest.mark.parametrize(
    "cron, said",
    [("30 2 * * *", ["skip 02:30", "02:30 twice"]), ("0 12 * * *", []), ("*/30 * * * *", [])],
    ids=["in the gap", "at noon", "wildcard"],
)
def test_a_rule_that_the_clocks_will_skip_or_repeat_is_pointed_out(jobs, conn, noon, cron, said):
    notices: list[str] = []
    conn.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_primary or ""))
    put(jobs, cron=cron, timezone="Europe/Berlin")
    put(jobs, cron=cron, timezone="Europe/Berlin")
    assert len(notices) == bool(said)
    assert all(words in notices[0] for words in said)


@pytest.mark.parametrize(
    "options, sqlstate",
    [
        ({"cron": "61 * * * *"}, "PA007"),
        ({"cron": "0 0 30 2 *"}, "PA007"),
        ({"timezone": "Berlin"}, "PA008"),
        ({"timezone": "UTC+5"}, "PA008"),
        ({"payload": "3"}, "PA005"),
        ({"queue": "nonesuch"}, "PA001"),
        ({"cron": None}, "PA009"),
        ({"at": NOON}, "PA009"),
        ({"overlap": "queue_one", "max_running": 2}, "PA009"),
        ({"after_schedule": "other"}, "PA009"),
        ({"within": "1 hour"}, "PA009"),
        ({"after_schedule": "daily", "within": "1 hour"}, "PA009"),
        ({"after_schedule": "other", "within": "1 hour", "gate_closed": "wait"}, "PA009"),
        # Not seen by its gate for as long: history is kept for 30 days.
        ({"after_schedule": "other", "within": "31 days"}, "PA009"),
        ({"catch_up": "none", "pace": 3}, "PA009"),
        ({"starts_at": NOON, "ends_at": NOON - timedelta(1)}, "PA009"),
        ({"overlap": "perhaps"}, "22023"),
        ({"catch_up": "some"}, "22023"),
        ({"kind": "flow"}, "22023"),
        ({"pace": 0, "catch_up": "all"}, "22023"),
        ({"max_runs": 0}, "22023"),
        ({"jitter": "-1 second"}, "22023"),
        ({"priority": 40000}, "22023"),
        ({"starts_at": "infinity"}, "22023"),
        ({"cron": None, "at": "infinity"}, "22023"),
        ({"name": "  "}, "22023"),
        ({"concurrency_key": "k" * 201}, "22023"),
        ({"concurrency_key": " "}, "22023"),
        ({"job_type": None}, "22004"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(jobs, noon, options, sqlstate):
    with refused(sqlstate) as caught:
        put(jobs, **options)
    assert caught.value.diag.message_hint
    assert jobs.sql("select from almanac.schedule") == []


def test_names_are_any_readable_text(jobs, noon):
    names = ["täglich 100%", 'o\'brien "x"', "生日:42", "a" * 200, "$1;--"]
    for name in names:
        put(jobs, name, cron="* * * * *")
    noon.advance(minutes=1)
    assert jobs.tick()[0].fired == len(names)
    assert {row.schedule for row in jobs.sql("select schedule from almanac.job")} == set(names)
    keys = dict(jobs.sql("select schedule, idempotency_key from almanac.job"))
    assert len(set(keys.values())) == len(names)
    for name in ('o\'brien "x"', "$1;--"):
        assert keys[name] == f"default-000000000000:{name}:1773144060", "readable where it fits"
    for key in keys.values():
        assert re.fullmatch("default-000000000000:[ -~]{1,48}:1773144060", key), key


@pytest.mark.parametrize("length", [191, 192, 200])
def test_a_name_of_any_length_can_run_one_at_a_time(jobs, noon, length):
    names = ["é" * (length - 1) + end for end in "ab"]
    for name in names:
        put(jobs, name, cron="* * * * *", overlap="queue_one")
    noon.advance(minutes=1)
    assert jobs.tick()[0].fired == 2
    keys = [row.concurrency_key for row in jobs.sql("select concurrency_key from almanac.job order by schedule")]
    assert len(set(keys)) == 2
    assert {len(key) for key in keys} == {200}


def test_a_schedule_at_the_end_of_time_can_be_looked_at(jobs, noon):
    jobs.sql("""select from almanac.put_schedule('default', 'far', job_type => 't', at => '294276-12-31 23:59:59+00',
                                                 timezone => 'Asia/Tokyo')""")
    assert jobs.one("select next_local from almanac.schedule_overview") is None
    assert jobs.one("select local_time from almanac.upcoming_tick") is None


def test_starts_at_and_ends_at_bound_the_ticks(jobs, noon):
    put(
        jobs,
        cron="* * * * *",
        starts_at=NOON + timedelta(minutes=10),
        ends_at=NOON + timedelta(minutes=12),
        catch_up="all",
    )
    assert overview(jobs).next_due_at == datetime(2026, 3, 10, 12, 11, tzinfo=UTC)
    noon.advance(hours=1)
    jobs.tick()
    assert [row[0] for row in jobs.sql("select tick_at::time::text from almanac.tick order by 1")] == [
        "12:11:00",
        "12:12:00",
    ]
    assert overview(jobs).status == "finished"


def test_every_is_anchored_at_starts_at(jobs, noon):
    start = datetime(2026, 3, 10, 12, 0, 7, tzinfo=UTC)
    put(jobs, cron="@every 90s", starts_at=start)
    assert overview(jobs).next_due_at == start + timedelta(seconds=90)
    noon.freeze(start + timedelta(seconds=181))
    jobs.tick()
    assert overview(jobs).next_due_at == start + timedelta(seconds=270)


def test_a_name_that_is_dropped_and_made_again_repeats_nothing(jobs, noon):
    put(jobs, cron="* * * * *")
    noon.advance(minutes=3)
    jobs.tick()
    jobs.sql("select almanac.drop_schedule('daily')")
    noon.advance(minutes=-2)
    put(jobs, cron="* * * * *")
    noon.advance(minutes=2, seconds=5)
    jobs.tick()
    assert jobs.one("select count(*) filter (where decision = 'fired') from almanac.tick") == 1
    noon.advance(minutes=1)
    jobs.tick()
    assert jobs.one("select count(*) filter (where decision = 'fired') from almanac.tick") == 2


def test_the_right_to_produce_is_needed_on_a_restricted_queue(jobs, noon, worker_id):
    role = f"test_{worker_id}_schedule_stranger"
    jobs.sql(f"drop role if exists {role}")
    jobs.sql(f"create role {role}; grant almanac_producer to {role}")
    try:
        jobs.sql("select almanac.put_queue('closed')")
        jobs.sql("select almanac.grant_queue('closed', 'postgres', 'produce')")
        jobs.sql(f"set role {role}")
        with refused("PA004"):
            put(jobs, queue="closed")
        assert put(jobs).created
        jobs.sql("reset role")
        assert jobs.one("select created_by from almanac.schedule") == role
    finally:
        jobs.sql("reset role")
        jobs.sql(f"drop role {role}")
