"""41 extend_lease: only the holder of a live lease may extend it."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("minutes_later", "token_offset"), [(1, +1), (1, -1), (5, 0), (6, 0)], ids=["later", "earlier", "ends", "too late"]
)
def test_a_lease_that_is_not_held_is_refused(jobs, clock, minutes_later, token_offset):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    clock.advance(minutes=minutes_later)
    token = job.lease_token + token_offset
    with refused("PA002"):
        jobs.extend_lease(queue="q", job_id=job.job_id, lease_token=token)
    assert jobs.extend_leases(queue="q", job_ids=[job.job_id], lease_tokens=[token]) == []
    assert jobs.row(job.job_id).lease_expires_at == job.lease_expires_at


def test_an_extension_counts_from_now(jobs, clock):
    jobs.put(lease="5 minutes")
    job = jobs.running()
    clock.advance(minutes=4)
    extended = jobs.extend_lease(**held(job))[0]
    assert (extended.job_id, extended.lease_token) == (job.job_id, job.lease_token)
    assert extended.lease_expires_at == clock.now() + 5 * MINUTE
    assert extended.cancel_requested_at is None
    assert jobs.extend_lease(**held(job), lease=30 * MINUTE)[0].lease_expires_at == clock.now() + 30 * MINUTE


def test_a_lease_never_gets_shorter(jobs, clock):
    jobs.put()
    job = jobs.running(lease=60 * MINUTE)
    assert jobs.extend_lease(**held(job), lease=MINUTE)[0].lease_expires_at == job.lease_expires_at
    clock.advance(hours=-2)
    assert jobs.extend_lease(**held(job), lease=MINUTE)[0].lease_expires_at == job.lease_expires_at


def test_a_worker_that_extends_keeps_its_job_for_any_time(jobs, clock):
    jobs.put(lease="1 minute")
    job = jobs.running()
    for _ in range(20):
        clock.advance(seconds=59)
        jobs.extend_lease(**held(job))
        assert jobs.reclaim_expired()[0].reclaim_expired == 0
    jobs.complete(**held(job))


def test_extending_tells_that_cancellation_was_asked_for(jobs, clock):
    jobs.put()
    job = jobs.running()
    jobs.cancel(queue="q", job_id=job.job_id)
    asked_at = clock.now()
    clock.advance(seconds=10)
    assert jobs.extend_lease(**held(job))[0].cancel_requested_at == asked_at


def test_many_leases_at_once_and_the_lost_ones_are_left_out(jobs, clock):
    jobs.put()
    live, other, done = jobs.running(), jobs.running(), jobs.running()
    short = jobs.running(lease=MINUTE)
    waiting = jobs.add()
    jobs.complete(**held(done))
    clock.advance(minutes=2)
    answer = jobs.extend_leases(
        queue="q",
        job_ids=[other.job_id, live.job_id, done.job_id, short.job_id, waiting, 999_999_999, live.job_id, None],
        lease_tokens=[other.lease_token, live.lease_token, done.lease_token, short.lease_token, 0, 1, 5, None],
    )
    assert {row.job_id for row in answer} == {live.job_id, other.job_id}
    assert all(row.lease_expires_at == clock.now() + 5 * MINUTE for row in answer)


def test_a_job_of_another_queue_is_not_found(jobs):
    jobs.put()
    jobs.put("other")
    job = jobs.running()
    with refused("PA002"):
        jobs.extend_lease(queue="other", job_id=job.job_id, lease_token=job.lease_token)


@pytest.mark.parametrize("lease", ["0", "-1 s", "31 days"])
def test_a_lease_of_impossible_length_is_refused(jobs, lease):
    jobs.put()
    with refused("22023"):
        jobs.extend_lease(**held(jobs.running()), lease=lease)


@pytest.mark.parametrize("lease_token", [None, 0, -1, 2**63 - 1])
def test_odd_tokens_are_refused(jobs, lease_token):
    jobs.put()
    job_id = jobs.add()
    with refused("PA002"):
        jobs.extend_lease(queue="q", job_id=job_id, lease_token=lease_token)
    with refused("PA002"):
        jobs.complete(queue="q", job_id=job_id, lease_token=lease_token)
    with refused("PA002"):
        jobs.fail_with_backoff(queue="q", job_id=job_id, lease_token=lease_token, error="x")
    with refused("PA002"):
        jobs.release(queue="q", job_id=job_id, lease_token=lease_token)
    assert jobs.state(job_id) == "scheduled"
