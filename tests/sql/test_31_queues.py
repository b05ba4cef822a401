"""31 queues: made before they are used, changed piece by piece, paused and resumed."""

import re
from datetime import timedelta

import psycopg
import pytest

from tests.jobs import held, refused

NAMES = [
    "mail",
    'it\'s "quoted"',
    "100 % {sure} $1 \\ :name ; --",
    "очередь 队列 🐘",
    " leading and trailing ",
    "line\nbreak",
    "almanac.job",
    "x" * 200,
    "🐘" * 200,
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_readable_text_is_a_name_for_queue_type_and_worker(jobs, name):
    jobs.put(name)
    jobs.put_job_type(queue=name, job_type=name, description=name, schema={"title": name})
    job_id = jobs.add(name, name, dedup_key=name, concurrency_key=name)
    claimed = jobs.claim_one(name, worker=name, job_types=[name])
    assert (claimed.queue, claimed.job_type, claimed.concurrency_key) == (name,) * 3
    assert re.fullmatch("[!-~]{14,128}", claimed.idempotency_key), "a receiver compares bytes"
    waiting = jobs.add(name, name, concurrency_key=name)
    assert jobs.claim(name) == []
    assert jobs.extend_lease(**held(claimed))[0].job_id == job_id
    jobs.complete(**held(claimed))
    jobs.pause_queue(queue=name, reason=name)
    assert jobs.claim(name) == []
    jobs.resume_queue(queue=name)
    again = jobs.claim_one(name, worker=name)
    assert again.job_id == waiting
    jobs.fail_with_backoff(**held(again), error=name, permanent=True)
    assert jobs.one("select error from almanac.dead_job") == name
    jobs.sql(jobs.one("select redrive from almanac.dead_job"))
    assert jobs.claim_ids(name) == [waiting]
    assert jobs.one("select queue from almanac.queue_overview where running = 1") == name


@pytest.mark.parametrize(
    ("name", "sqlstate"),
    [
        (None, "22004"),
        ("", "22023"),
        (" \t\n", "22023"),
        ("x" * 401, "22023"),
        ("x" * 8_000_000, "22023"),
        ("\u200b", "22023"),
        ("\u3164\u2800", "22023"),
        ("bell\a", "22023"),
        ("control\x9b", "22023"),
        ("txt.\u202eexe", "22023"),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_a_name_that_cannot_be_read_is_refused(jobs, name, sqlstate):
    with refused(sqlstate):
        jobs.put_queue(queue=name)
    jobs.put()
    with refused(sqlstate):
        jobs.put_job_type(queue="q", job_type=name)
    with refused(sqlstate):
        jobs.enqueue(queue="q", job_type=name)
    calls = [
        lambda: jobs.put_schedule(queue="q", name=name, cron="@hourly", job_type="t"),
        lambda: jobs.put_schedule(queue="q", name="s", cron="@hourly", job_type=name),
        lambda: jobs.put_schedule_template(name=name),
        lambda: jobs.claim_due(queue="q", worker=name),
        lambda: jobs.doze(queue="q", worker=name),
        lambda: jobs.tick_if_stale(worker=name),
        lambda: jobs.report_worker(worker=name, host="", pid=0, version="", queues=[], concurrency=0, running=0),
    ]
    if name is not None:
        calls += [
            lambda: jobs.enqueue(queue="q", job_type="t", dedup_key=name),
            lambda: jobs.enqueue(queue="q", job_type="t", concurrency_key=name),
            lambda: jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], dedup_keys=[name]),
            lambda: jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], concurrency_keys=[name]),
        ]
    for call in calls:
        with refused(sqlstate) as caught:
            call()
        assert caught.value.diag.message_hint


def test_a_default_queue_exists(jobs):
    jobs.add("default")
    assert len(jobs.claim("default")) == 1


def test_changing_one_setting_leaves_the_others(jobs, clock):
    before = jobs.put_queue(queue="q", lease="7 minutes", max_attempts=9, jitter=0.5, max_running=3)[0]
    after = jobs.put_queue(queue="q", max_running=4)[0]
    assert after == before._replace(max_running=4)
    lifted = jobs.put_queue(queue="q", unset=["max_running"])[0]
    assert lifted == before._replace(max_running=None)


def test_what_an_operator_does_is_written_down_with_before_and_after(jobs, clock):
    jobs.put(max_running=3)
    jobs.put(max_running=3)  # changes nothing, and says nothing
    jobs.put(max_running=4)
    jobs.pause_queue(queue="q", reason="deploy")
    jobs.resume_queue(queue="q", reason="done")
    log = jobs.sql("select * from almanac.audit where queue = 'q' order by id")
    assert [(entry.action, entry.reason) for entry in log] == [
        ("put_queue", None), ("put_queue", None), ("pause_queue", "deploy"), ("resume_queue", "done"),
    ]  # fmt: skip
    assert (log[0].before, log[0].after["max_running"]) == (None, 3)
    assert (log[1].before["max_running"], log[1].after["max_running"]) == (3, 4)
    assert log[2].before["paused_at"] is None
    assert log[2].after["paused_at"] is not None
    assert {entry.actor for entry in log} == {jobs.one("select session_user::text")}
    assert {entry.at for entry in log} == {clock.now()}


@pytest.mark.parametrize(
    "settings",
    [
        {"lease": "0"}, {"lease": "-1 second"}, {"lease": "31 days"}, {"max_attempts": 0}, {"max_attempts": -1},
        {"max_attempts": 2**31 - 1}, {"base_delay": "-1 second"}, {"base_delay": "2 days", "max_delay": "1 day"},
        {"max_delay": "4000 days"}, {"jitter": -0.1}, {"jitter": 1.1}, {"jitter": float("nan")}, {"retention": "0"},
        {"max_running": 0}, {"max_running_per_key": 0}, {"rate_limit": 0, "rate_interval": "1 second"},
        {"rate_limit": 5}, {"rate_interval": "1 second"}, {"rate_limit": 5, "rate_interval": "0"},
        {"max_payload_bytes": 0}, {"unset": ["lease"]}, {"unset": ["nonsense"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_and_changes_nothing(jobs, settings):
    jobs.put()
    before = jobs.sql("select * from almanac.queue where queue = 'q'")
    with refused("22023") as said:
        jobs.put(**settings)
    diag = said.value.diag
    assert any(name in f"{diag.message_primary} {diag.message_detail}" for name in settings), (
        "in words, not by a constraint"
    )
    assert "violates" not in str(said.value)
    with refused("22023"):
        jobs.put("another", **settings)
    assert jobs.sql("select * from almanac.queue where queue = 'q'") == before
    assert jobs.sql("select 1 from almanac.queue where queue = 'another'") == []


def test_an_unknown_queue_is_refused_with_the_line_that_makes_it(jobs):
    name = "it's new"
    calls = [
        lambda: jobs.add(name),
        lambda: jobs.enqueue_many(queue=name, job_type="t", payloads=[{}]),
        lambda: jobs.claim(name),
        lambda: jobs.extend_lease(queue=name, job_id=1, lease_token=1),
        lambda: jobs.release(queue=name, job_id=1, lease_token=1),
        lambda: jobs.complete(queue=name, job_id=1, lease_token=1),
        lambda: jobs.fail_with_backoff(queue=name, job_id=1, lease_token=1, error="x"),
        lambda: jobs.cancel(queue=name, job_id=1),
        lambda: jobs.redrive(queue=name, job_id=1),
        lambda: jobs.pause_queue(queue=name),
        lambda: jobs.resume_queue(queue=name),
        lambda: jobs.put_job_type(queue=name, job_type="t"),
        lambda: jobs.job(queue=name, job_id=1),
    ]
    for call in calls:
        with refused("PA001") as caught:
            call()
    hint = caught.value.diag.message_hint
    jobs.sql(hint.removeprefix("Make it: "))
    jobs.add(name)
    with refused("PA001"):
        jobs.enqueue(queue=None, job_type="t")


# ── pause ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_claimed_from_a_paused_queue_and_what_runs_goes_on(jobs):
    jobs.put()
    running, waiting = jobs.running(), jobs.add()
    jobs.pause_queue(queue="q", reason="maintenance")
    assert jobs.claim() == []
    jobs.extend_lease(**held(running))
    jobs.complete(**held(running))
    assert jobs.add() is not None
    jobs.resume_queue(queue="q")
    assert jobs.claim_ids(batch_size=1) == [waiting]


@pytest.mark.parametrize("limits", [{}, {"max_running": 5}], ids=["no limits", "with limits"])
def test_a_pause_ends_by_itself_at_its_time(jobs, clock, limits):
    jobs.put(**limits)
    job_id = jobs.add()
    jobs.pause_queue(queue="q", until=clock.now() + timedelta(minutes=10))
    clock.advance(minutes=10, microseconds=-1)
    assert jobs.claim() == []
    clock.advance(microseconds=1)
    assert jobs.claim_ids() == [job_id]


def test_a_pause_into_the_past_is_refused(jobs, clock):
    jobs.put()
    with refused("22023"):
        jobs.pause_queue(queue="q", until=clock.now())


def test_pausing_again_replaces_the_end(jobs, clock):
    jobs.put()
    jobs.add()
    jobs.pause_queue(queue="q", until=clock.now() + timedelta(minutes=1))
    jobs.pause_queue(queue="q")
    clock.advance(days=1000)
    assert jobs.claim() == []


def test_a_pause_until_the_end_of_time_is_one_without_an_end(jobs):
    """A worker asks for how long it can sleep, and an infinite time cannot be subtracted from."""
    jobs.put()
    jobs.pause_queue(queue="q", until="infinity")
    assert jobs.one("select paused_until from almanac.queue_overview where queue = 'q'") is None
    assert jobs.one("select almanac.doze('q', 'w') - almanac.clock()") is None
    assert jobs.one("select paused from almanac.queue_overview where queue = 'q'")


def test_a_pause_is_for_one_queue(jobs):
    jobs.put()
    jobs.put("other")
    job_id = jobs.add("other")
    jobs.pause_queue(queue="q")
    assert jobs.claim_ids("other") == [job_id]


# ── job types ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_type_overrides_the_queue_and_the_job_overrides_the_type(jobs, clock):
    jobs.put(lease="1 minute", max_attempts=2, base_delay="10 s", max_delay="1 hour")
    jobs.put_job_type(queue="q", job_type="t", lease="2 minutes", max_attempts=3, base_delay="20 s")
    other, typed, own = (
        jobs.running(job_type="other"),
        jobs.running(),
        jobs.running(max_attempts=4, base_delay=timedelta(seconds=30)),
    )
    assert [c.max_attempts for c in (other, typed, own)] == [2, 3, 4]
    assert [c.lease_expires_at - clock.now() for c in (other, typed, own)] == [
        timedelta(minutes=minutes) for minutes in (1, 2, 2)
    ]
    retried = [jobs.fail_with_backoff(**held(c), error="x")[0].due_at - clock.now() for c in (other, typed, own)]
    assert retried == [timedelta(seconds=seconds) for seconds in (10, 20, 30)]
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}])
    (many,) = jobs.claim()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], max_attempts=4)
    (own,) = jobs.claim()
    assert [c.max_attempts for c in (many, own)] == [3, 4]
    assert {c.lease_expires_at - clock.now() for c in (many, own)} == {timedelta(minutes=2)}
    assert jobs.fail_with_backoff(**held(many), error="x")[0].due_at - clock.now() == timedelta(seconds=20)


def test_declaring_the_same_type_again_changes_and_logs_nothing(jobs, clock):
    jobs.put()
    declaration = {"queue": "q", "job_type": "t", "lease": "1 minute", "schema": {"type": "object"}}
    jobs.put_job_type(**declaration)
    before = jobs.sql("select * from almanac.job_type")
    clock.advance(minutes=1)
    jobs.put_job_type(**declaration)
    assert jobs.sql("select * from almanac.job_type") == before
    assert jobs.one("select count(*) from almanac.audit_log where action = 'put_job_type'") == 1


@pytest.mark.parametrize(
    "settings",
    [{"lease": "0"}, {"max_attempts": 0}, {"base_delay": "2 s", "max_delay": "1 s"}, {"jitter": 2}],
    ids=str,
)
def test_a_type_that_makes_no_sense_is_refused(jobs, settings):
    jobs.put()
    with refused("22023"):
        jobs.put_job_type(queue="q", job_type="t", **settings)


# ── dropping ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_queue_is_dropped_with_all_that_is_its_own(jobs, name):
    for queue in (name, "other"):
        jobs.put(queue)
        jobs.put_job_type(queue=queue, job_type="t", max_attempts=9)
        jobs.complete(**held(jobs.running(queue, dedup_key="k", dedup_for="1 hour")))
        jobs.put(queue, rate_limit=5, rate_interval="1 minute")
        jobs.doze(queue=queue, worker="w")
        jobs.grant_queue(queue=queue, role="postgres", may="operate")
    jobs.drop_queue(queue=name, reason="a typing error")
    for table in ("queue", "queue_turn", "queue_grant", "job_type", "dedup", "sleeper", "claim"):
        left = jobs.sql(f"select distinct queue from almanac.{table} where queue <> 'default'")
        assert left == [("other",)], table
    log = jobs.one("select * from almanac.audit_log where action = 'drop_queue'")
    assert (log.queue, log.reason, log.before["rate_limit"], log.after) == (name, "a typing error", 5, None)
    for call in (jobs.add, lambda queue: jobs.drop_queue(queue=queue)):
        with pytest.raises(psycopg.Error) as caught:
            call(name)
        assert caught.value.sqlstate == "PA001"
    jobs.put(name)
    assert jobs.row(jobs.add(name)).max_attempts == 5, "nothing is left of what it was"


def test_a_queue_in_which_something_lives_is_not_dropped(jobs):
    jobs.put()
    running = jobs.running()
    jobs.add()
    with refused("PA013") as caught:
        jobs.drop_queue(queue="q")
    assert caught.value.diag.message_detail == "Live jobs in it: 2."
    # The lines of the hints do it, once the worker has let go.
    jobs.sql(caught.value.diag.message_hint.partition(": ")[2])
    with refused("PA013"):
        jobs.drop_queue(queue="q")
    jobs.release(**held(running))
    jobs.put_schedule(queue="q", name="it's", cron="0 3 * * *", job_type="t")
    with refused("PA013") as caught:
        jobs.drop_queue(queue="q")
    assert "'it''s'" in caught.value.diag.message_detail
    jobs.sql(caught.value.diag.message_hint.partition(": ")[2])
    jobs.drop_queue(queue="q")


def test_the_default_queue_stays(jobs):
    with refused("PA013"):
        jobs.drop_queue(queue="default")
    with refused("PA001"):
        jobs.drop_queue(queue=None)


def test_history_of_a_queue_that_was_dropped_is_read_and_goes_when_its_time_has_come(jobs, own_database, clock):
    clock.freeze("2031-05-01 12:00Z")
    jobs.put(retention=timedelta(days=365))
    dead = jobs.dead()
    jobs.drop_queue(queue="q")
    assert jobs.sql("select queue, job_id from almanac.dead_job") == [("q", dead.job_id)]
    assert jobs.attempts(dead.job_id) == [(1, "failed")]
    with refused("PA001"):
        jobs.job(queue="q", job_id=dead.job_id)
    clock.freeze("2031-05-31 11:00Z")
    jobs.tick()
    assert jobs.one("select count(*) from almanac.dead_job") == 1
    clock.freeze("2031-06-02 00:00Z")
    jobs.tick()
    assert jobs.one("select count(*) from almanac.job_history") == 0
    assert jobs.one("select count(*) from almanac.attempt") == 0


@pytest.mark.parametrize("arguments", [{}, {"priority": 7}, {"concurrency_key": "k"}], ids=str)
def test_a_job_of_a_queue_that_was_dropped_can_be_brought_back_once_there_is_one(jobs, arguments):
    jobs.put()
    dead = jobs.dead(**arguments)
    jobs.drop_queue(queue="q")
    with refused("PA001"):
        jobs.redrive(queue="q", job_id=dead.job_id)
    jobs.put()
    jobs.redrive(queue="q", job_id=dead.job_id)
    assert jobs.claim_one().lease_token > dead.lease_token


def test_what_fired_before_a_queue_was_dropped_is_not_made_up_after_it_came_back(jobs, clock):
    clock.freeze("2031-05-01 12:00Z")
    jobs.put()
    clock.advance(days=1)
    jobs.drop_queue(queue="q")
    clock.advance(days=1)
    jobs.put()
    jobs.put_schedule(queue="q", name="s", cron="0 * * * *", job_type="t")
    with refused("PA009"):
        jobs.backfill_schedule(name="s", from_at="2031-05-02 11:59Z", to_at="2031-05-03Z")
    (made,) = jobs.backfill_schedule(name="s", from_at="2031-05-03 11:00Z", to_at="2031-05-03 11:00Z")
    assert made.ticks == 1


def test_a_restricted_queue_is_dropped_only_by_those_who_operate_it(jobs, own_database, maintenance, worker_id):
    jobs.put()
    role = f"dropper_{worker_id}"
    maintenance.execute(f"create role {role} in role almanac_admin")
    try:
        jobs.sql("select almanac.grant_queue('q', 'postgres', 'operate')")
        jobs.sql(f"set role {role}")
        with refused("PA004"):
            jobs.drop_queue(queue="q")
        jobs.sql("reset role")
        jobs.grant_queue(queue="q", role=role, may="operate")
        jobs.sql(f"set role {role}")
        jobs.drop_queue(queue="q")
    finally:
        jobs.sql("reset role")
        maintenance.execute(f"drop role {role}")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_queue_is_dropped_only_by_those_who_see_what_is_committed(jobs, session, level):
    jobs.put()
    strict = session()
    strict.sql(f"begin isolation level {level}")
    with refused("25000"):
        strict.drop_queue(queue="q")


def test_a_queue_keeps_history_for_as_long_as_its_gates_look_back(jobs):
    jobs.put()
    jobs.put_schedule(queue="q", name="first", cron="0 3 * * *", job_type="t")
    jobs.put_schedule(
        queue="q", name="second", cron="0 4 * * *", job_type="t", after_schedule="first", within=timedelta(days=7)
    )
    with refused("PA009"):
        jobs.put_queue(queue="q", retention=timedelta(days=6))
    assert jobs.put_queue(queue="q", retention=timedelta(days=7))
    jobs.drop_schedule(queue="q", name="second")
    jobs.put_queue(queue="q", retention=timedelta(days=6))
