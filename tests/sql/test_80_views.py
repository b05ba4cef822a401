"""80 views: what an operator looks at, while the things to be seen are there."""

from datetime import timedelta

import pytest

from tests.jobs import held


def queue(jobs, name="q"):
    return jobs.one("select * from almanac.queue_overview where queue = %s", name)


def test_queue_overview_counts_each_job_once_where_it_is(jobs, clock):
    jobs.put(max_running_per_key=1)
    jobs.add(due_at=clock.now() + timedelta(hours=1))
    jobs.dead()
    failed = jobs.running()
    jobs.fail_with_backoff(**held(failed), error="no")
    for _ in range(3):
        jobs.add(concurrency_key="k")
    jobs.claim(batch_size=10)
    jobs.add()
    clock.advance(seconds=30)
    row = queue(jobs)
    assert (row.scheduled, row.due, row.running, row.retrying, row.parked, row.dead) == (4, 3, 1, 1, 2, 1)
    assert row.lateness == timedelta(seconds=30), "of what could be claimed: parked ones wait for their key"
    assert (row.paused, row.restricted) == (False, False)


def test_an_empty_queue_is_listed_with_nothing_in_it(jobs):
    jobs.put("nothing yet")
    row = queue(jobs, "nothing yet")
    assert (row.scheduled, row.due, row.running, row.retrying, row.dead, row.oldest_due_at) == (0, 0, 0, 0, 0, None)


def test_a_pause_that_has_ended_is_none(jobs, clock):
    jobs.put()
    jobs.pause_queue(queue="q", reason="lunch", until=clock.now() + timedelta(minutes=30))
    assert (queue(jobs).paused, queue(jobs).pause_reason) == (True, "lunch")
    clock.advance(minutes=30)
    assert queue(jobs).paused is False


@pytest.mark.parametrize(
    ("why", "settings"),
    [
        ("no worker has reported for the queue", {}),
        ("the workers of the queue are busy, or have no handler for its type", {}),
        ("no worker has reported for the queue", {"max_running": 2}),
        ("no worker has reported for the queue", {"rate_limit": 2, "rate_interval": timedelta(hours=1)}),
        ("queue is at its limit", {"max_running": 1}),
        ("queue is at its limit", {"rate_limit": 1, "rate_interval": timedelta(hours=1)}),
        ("queue is paused: it's raining", {}),
        ("concurrency_key k is busy", {}),
    ],
)
def test_late_job_says_the_likely_reason(jobs, clock, why, settings):
    jobs.put(**settings)
    if settings:
        jobs.add()
        jobs.claim(lease=timedelta(hours=1))
    if why.startswith("concurrency_key"):
        jobs.add(concurrency_key="k")
        jobs.add(concurrency_key="k")
        jobs.claim(batch_size=2)
    else:
        jobs.add()
    if "paused" in why:
        jobs.pause_queue(queue="q", reason="it's raining")
    clock.advance(seconds=60)
    assert jobs.sql("select * from almanac.late_job") == [], "a minute is not late"
    clock.advance(seconds=1)
    if "workers of" in why:
        jobs.report_worker(worker="w", host="h", pid=7, version="1", queues=["p", "q"], concurrency=4, running=2)
    row = jobs.one("select * from almanac.late_job")
    assert (row.why, row.lateness) == (why, timedelta(seconds=61))


def test_a_bucket_that_is_dated_ahead_is_not_said_to_be_empty(jobs, clock):
    jobs.put(rate_limit=10, rate_interval="1 minute")
    jobs.running()
    clock.advance(hours=-1)
    jobs.add(due_at=clock.now() - timedelta(minutes=2))
    assert "limit" not in jobs.one("select why from almanac.late_job")
    assert len(jobs.claim()) == 1


def test_job_overview_has_every_job_once_wherever_it_is(jobs, clock):
    jobs.put()
    waiting = jobs.add(payload={"order": 7}, due_at=clock.now() + timedelta(hours=1))
    back = jobs.dead(error="boom")
    jobs.redrive(queue="q", job_id=back.job_id)
    jobs.dead(error="still")
    done = jobs.running()
    jobs.complete(**held(done), result={"ok": True}, external_id="theirs")
    running = jobs.running()
    rows = {row.job_id: row for row in jobs.sql("select * from almanac.job_overview")}
    assert len(rows) == jobs.one("select count(*) from almanac.job_overview"), "a job that was brought back is one job"
    assert {job: (row.state, row.last_error) for job, row in rows.items()} == {
        job.job_id: (job.state, job.last_error) for n in rows for job in jobs.job(queue="q", job_id=n)
    }
    assert (rows[waiting].state, rows[waiting].payload) == ("scheduled", {"order": 7})
    assert (rows[running.job_id].state, rows[running.job_id].finished_at) == ("running", None)
    assert (rows[done.job_id].result, rows[done.job_id].external_id) == ({"ok": True}, "theirs")


@pytest.mark.parametrize("states", ["'running'", "'scheduled', 'retrying'"])
def test_job_overview_leaves_history_alone_where_only_live_jobs_are_asked_for(jobs, states):
    plan = jobs.sql(f"explain select * from almanac.job_overview where state in ({states})")
    assert "job_history" not in "\n".join(row if isinstance(row, str) else row[0] for row in plan)


def test_running_job_shows_what_runs_and_each_once(jobs, clock):
    jobs.put()
    jobs.put("limited", max_running=10)
    again, ended, back = jobs.running(), jobs.running(), jobs.running()
    jobs.release(**held(again))
    again = jobs.claim_one(worker="the second")
    jobs.complete(**held(ended))
    jobs.fail_with_backoff(**held(back), error="x")
    jobs.add("limited")
    (counted,) = jobs.claim("limited")
    jobs.add()
    clock.advance(seconds=30)
    rows = {row.job_id: row for row in jobs.sql("select * from almanac.running_job")}
    assert sorted(rows) == [again.job_id, counted.job_id]
    assert len(jobs.sql("select * from almanac.running_job")) == 2
    row = rows[again.job_id]
    assert (row.leased_by, row.runs_for, row.attempt) == ("the second", timedelta(seconds=30), 1)
    assert (row.lease_expires_at, row.attempt_key) == (again.lease_expires_at, again.attempt_key)


def test_running_job_does_not_read_what_waits(jobs):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 5000)
    jobs.claim(batch_size=10)
    jobs.sql("analyze almanac.job, almanac.claim")
    plan = "\n".join(row[0] for row in jobs.sql("explain (analyze, costs off) select * from almanac.running_job"))
    assert "Seq Scan on job" not in plan, plan
    assert "job_counted_idx" in plan, plan


def test_stuck_job_shows_leases_that_ended_and_workers_that_do_not_listen(jobs, clock):
    jobs.put()
    ended = jobs.running(lease=timedelta(seconds=30))
    deaf = jobs.running(lease=timedelta(hours=1))
    jobs.running(lease=timedelta(hours=1))
    jobs.cancel(queue="q", job_id=deaf.job_id, reason="not wanted")
    assert jobs.sql("select * from almanac.stuck_job") == []
    clock.advance(seconds=61)
    rows = {row.job_id: row for row in jobs.sql("select * from almanac.stuck_job")}
    assert set(rows) == {ended.job_id, deaf.job_id}
    assert rows[ended.job_id].expired_for == timedelta(seconds=31)
    assert rows[deaf.job_id].cancel_requested_at is not None


def test_the_line_that_dead_job_gives_brings_the_job_back(jobs, clock):
    jobs.put('it\'s; drop table "x"')
    dead = jobs.dead('it\'s; drop table "x"', error="boom")
    row = jobs.one("select * from almanac.dead_job")
    assert (row.job_id, row.error.split("\n")[0], row.end_reason) == (dead.job_id, "boom", "permanent failure")
    jobs.sql(row.redrive)
    assert jobs.sql("select * from almanac.dead_job") == []
    assert jobs.state(dead.job_id, 'it\'s; drop table "x"') == "scheduled"


def test_attempt_log_has_every_attempt_under_the_key_its_worker_had(jobs, clock):
    jobs.put()
    job = jobs.running()
    keys = [job.attempt_key]
    jobs.fail_with_backoff(**held(job), error="once", retry_after=timedelta(0))
    again = jobs.claim_one()
    keys.append(again.attempt_key)
    log = "select attempt_key, outcome, error from almanac.attempt_log where job_id = %s order by attempt"
    assert [tuple(row) for row in jobs.sql(log, job.job_id)] == [(keys[0], "failed", "once"), (keys[1], None, None)]
    jobs.complete(**held(again), external_id="theirs")
    assert [tuple(row) for row in jobs.sql(log, job.job_id)][1] == (keys[1], "completed", None)
    assert jobs.one("select external_id from almanac.attempt_log where attempt_key = %s", keys[1]) == "theirs"


def test_worker_overview_says_how_long_a_worker_has_been_silent(jobs, clock):
    jobs.report_worker(worker="w", host="h", pid=7, version="1", queues=["q"], concurrency=4, running=2)
    clock.advance(minutes=3)
    row = jobs.one("select * from almanac.worker_overview")
    assert (row.worker, row.pid, row.queues, row.running) == ("w", 7, ["q"], 2)
    assert row.silent_for == timedelta(minutes=3)
