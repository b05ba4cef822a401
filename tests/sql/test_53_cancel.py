"""53 cancel: at once while a job waits; a running one is asked to stop."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("state", ["scheduled", "future", "retrying", "parked"])
def test_a_waiting_job_is_cancelled_at_once(jobs, clock, state):
    jobs.put()
    if state == "retrying":
        job = jobs.running()
        job_id = job.job_id
        jobs.fail_with_backoff(**held(job), error="x")
    elif state == "parked":
        jobs.running(concurrency_key="k")
        job_id = jobs.add(concurrency_key="k")
        jobs.claim()
        assert jobs.parked() == [job_id]
    else:
        job_id = jobs.add(due_at=clock.now() + (MINUTE if state == "future" else -MINUTE))
    assert jobs.cancel(queue="q", job_id=job_id, reason="not needed")[0].cancel == "cancelled"
    found = jobs.find(job_id)
    assert (found.state, found.finished_at) == ("cancelled", clock.now())
    clock.advance(days=1)
    assert job_id not in jobs.claim_ids()
    ended = jobs.one("select ended_by, end_reason from almanac.job_history where id = %s", job_id)
    assert ended == (jobs.one("select session_user::text"), "not needed")
    log = jobs.one("select * from almanac.audit_log where action = 'cancel'")
    assert (log.subject, log.reason) == (str(job_id), "not needed")
    assert log.before["state"] == ("retrying" if state == "retrying" else "scheduled")
    assert log.after["state"] == "cancelled"


@pytest.mark.parametrize("ending", ["release", "snooze", "fail", "fail for good", "lost"])
def test_a_running_job_is_cancelled_when_the_worker_lets_go(jobs, clock, ending):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    assert jobs.cancel(queue="q", job_id=job.job_id, reason="stop")[0].cancel == "running"
    assert jobs.state(job.job_id) == "running"
    assert jobs.find(job.job_id).cancel_requested_at == clock.now()
    clock.advance(minutes=1)
    if ending == "release":
        answer = jobs.release(**held(job))[0]
    elif ending == "snooze":
        answer = jobs.snooze(**held(job), until=clock.now() + MINUTE)[0]
    elif ending == "lost":
        clock.advance(minutes=4)
        assert jobs.reclaim_expired()[0].reclaim_expired == 1
    else:
        answer = jobs.fail_with_backoff(**held(job), error="stopped", permanent=ending == "fail for good")[0]
    if ending != "lost":
        assert (answer.state, answer.due_at) == ("cancelled", None)
    assert jobs.state(job.job_id) == "cancelled"
    assert jobs.one("select end_reason from almanac.job_history") == "stop"
    assert jobs.attempts(job.job_id) == [(1, "cancelled")]
    clock.advance(days=1)
    assert jobs.claim() == []


def test_asking_twice_keeps_the_first_who_and_why_and_when(jobs, clock):
    jobs.put()
    job = jobs.running()
    jobs.sql("set role almanac_operator")
    jobs.cancel(queue="q", job_id=job.job_id, reason="first")
    jobs.sql("reset role")
    asked_at = clock.now()
    clock.advance(minutes=1)
    assert jobs.cancel(queue="q", job_id=job.job_id, reason="second")[0].cancel == "running"
    assert jobs.find(job.job_id).cancel_requested_at == asked_at
    jobs.release(**held(job))
    assert jobs.one("select ended_by, end_reason from almanac.job_history") == ("almanac_operator", "first")


def test_cancelling_what_is_cancelled_is_success(jobs):
    jobs.put()
    job_id = jobs.add()
    for _ in range(2):
        assert jobs.cancel(queue="q", job_id=job_id)[0].cancel == "cancelled"
    assert jobs.one("select count(*) from almanac.job_history") == 1


@pytest.mark.parametrize("state", ["completed", "dead", "missing", "in another queue", "null"])
def test_what_cannot_be_cancelled_is_refused(jobs, state):
    jobs.put()
    jobs.put("other")
    job = jobs.running()
    job_id: int | None = job.job_id
    if state == "completed":
        jobs.complete(**held(job))
    elif state == "dead":
        jobs.fail_with_backoff(**held(job), error="x", permanent=True)
    elif state == "missing":
        job_id = 2**62
    elif state == "null":
        job_id = None
    with refused("PA003"):
        jobs.cancel(queue="other" if state == "in another queue" else "q", job_id=job_id)
    assert jobs.sql("select 1 from almanac.audit_log where action = 'cancel'") == []


def test_a_job_that_ignores_the_request_shows_up_as_stuck(jobs, clock):
    jobs.put()
    job = jobs.running(lease=60 * MINUTE)
    jobs.cancel(queue="q", job_id=job.job_id)
    assert jobs.sql("select 1 from almanac.stuck_job") == []
    clock.advance(minutes=2)
    assert jobs.one("select job_id from almanac.stuck_job") == job.job_id
