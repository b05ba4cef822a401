"""43 release, snooze: a job goes back unworked and the attempt does not count."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


def test_a_released_job_is_due_as_before_and_has_its_attempt_back(jobs, clock):
    jobs.put(max_attempts=1)
    job_id = jobs.add()
    clock.advance(minutes=3)
    for _ in range(5):
        job = jobs.claim_one()
        assert (job.job_id, job.attempt, job.lateness) == (job_id, 1, 3 * MINUTE)
        answer = jobs.release(**held(job), reason="shutting down")[0]
        assert (answer.state, answer.due_at, answer.attempt) == ("scheduled", job.due_at, 0)
        found = jobs.find(job_id)
        assert (found.state, found.attempt, found.leased_by, found.lease_expires_at) == ("scheduled", 0, None, None)
    assert jobs.attempts(job_id) == [(1, "released")] * 5
    assert jobs.one("select distinct error from almanac.attempt_log") == "shutting down"


def test_a_snoozed_job_comes_back_at_its_time(jobs, clock):
    jobs.put(max_attempts=1)
    job = jobs.running()
    until = clock.now() + 10 * MINUTE
    answer = jobs.snooze(**held(job), until=until)[0]
    assert (answer.state, answer.due_at, answer.attempt) == ("scheduled", until, 0)
    clock.advance(minutes=10, microseconds=-1)
    assert jobs.claim() == []
    clock.advance(microseconds=1)
    again = jobs.claim_one()
    assert (again.job_id, again.attempt, again.due_at) == (job.job_id, 1, until)
    assert jobs.attempts(job.job_id) == [(1, "released"), (1, None)]


@pytest.mark.parametrize("until", [None, "infinity", "-infinity", "3000-01-01"])
def test_a_snooze_without_a_sensible_end_is_refused(jobs, until):
    jobs.put()
    job = jobs.running()
    with refused("22023"):
        jobs.snooze(**held(job), until=until)
    assert jobs.state(job.job_id) == "running"


@pytest.mark.parametrize("call", ["release", "snooze"])
@pytest.mark.parametrize(("minutes", "offset"), [(0, 1), (6, 0)], ids=["not the holder", "too late"])
def test_only_the_holder_of_a_live_lease_may(jobs, clock, call, minutes, offset):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    before = jobs.row(job.job_id)
    clock.advance(minutes=minutes)
    arguments = {"until": clock.now()} if call == "snooze" else {}
    with refused("PA002"):
        getattr(jobs, call)(**{**held(job), "lease_token": job.lease_token + offset}, **arguments)
    assert jobs.row(job.job_id) == before
    assert jobs.sql("select 1 from almanac.attempt") == []


def test_released_twice_is_refused_the_second_time(jobs):
    jobs.put()
    job = jobs.running()
    jobs.release(**held(job))
    with refused("PA002"):
        jobs.release(**held(job))
    with refused("PA002"):
        jobs.complete(**held(job))


def test_a_retrying_job_that_is_released_keeps_its_count(jobs, clock):
    jobs.put(max_attempts=3)
    job = jobs.running()
    jobs.fail_with_backoff(**held(job), error="x")
    clock.advance(minutes=1)
    jobs.release(**held(jobs.claim_one()))
    assert jobs.claim_one().attempt == 2
