"""60 reclaim_expired: leases nobody extended end the attempt as lost and go the way of a failure."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


def reclaim(jobs, **arguments):
    return jobs.reclaim_expired(**arguments)[0].reclaim_expired


def test_a_lost_attempt_is_retried_after_the_backoff(jobs, clock):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    claimed_at = clock.now()
    clock.advance(minutes=5, microseconds=-1)
    assert reclaim(jobs) == 0
    clock.advance(microseconds=1)
    assert reclaim(jobs) == 1
    assert reclaim(jobs) == 0
    found = jobs.find(job.job_id)
    assert (found.state, found.attempt, found.due_at) == ("retrying", 1, clock.now() + MINUTE)
    assert found.leased_by is None
    log = jobs.one("select * from almanac.attempt_log")
    assert (log.attempt, log.outcome, log.worker) == (1, "lost", "w")
    assert (log.claimed_at, log.finished_at) == (claimed_at, clock.now())
    assert "w" in log.error
    for call in (jobs.complete, jobs.release, jobs.extend_lease):
        with refused("PA002"):
            call(**held(job))


def test_a_job_that_kills_its_workers_ends_dead(jobs, clock):
    jobs.put(max_attempts=3)
    job_id = jobs.add()
    for _ in range(3):
        clock.advance(days=1)
        jobs.claim_one()
        clock.advance(days=1)
        reclaim(jobs)
    assert jobs.state(job_id) == "dead"
    assert jobs.attempts(job_id) == [(1, "lost"), (2, "lost"), (3, "lost")]
    assert jobs.one("select end_reason from almanac.dead_job") == "attempt 3 of 3 lost"


def test_batches_are_bounded_and_can_be_limited_to_a_queue(jobs, clock):
    for queue in ("q", "other"):
        jobs.put(queue)
        jobs.enqueue_many(queue=queue, job_type="t", payloads=[{}] * 5)
        jobs.claim(queue, 5)
    clock.advance(days=1)
    assert reclaim(jobs, queue="other", batch_size=3) == 3
    assert reclaim(jobs, queue="other", batch_size=3) == 2
    assert reclaim(jobs, batch_size=3) == 3
    assert reclaim(jobs) == 2
    assert reclaim(jobs, queue="unknown") == 0


@pytest.mark.parametrize("batch_size", [-1, 0, 100_001, None])
def test_a_batch_of_impossible_size_is_refused(jobs, batch_size):
    with refused("22023"):
        reclaim(jobs, batch_size=batch_size)


def test_what_is_locked_by_somebody_else_is_left_for_next_time(jobs, session, clock):
    jobs.put()
    first, second = jobs.running(), jobs.running()
    clock.advance(days=1)
    other = session()
    with other.conn.transaction():
        other.sql("select 1 from almanac.job where id = %s for update", first.job_id)
        assert reclaim(jobs) == 1
        assert jobs.state(second.job_id) == "retrying"
    assert reclaim(jobs) == 1


def test_recovery_reads_leases_only(jobs, clock):
    jobs.put()
    jobs.report_worker(worker="w", host="h", pid=1, version="1", queues=["q"], concurrency=1, running=1)
    job = jobs.running()
    jobs.retire_worker(worker="w")
    clock.advance(days=1)
    jobs.report_worker(worker="w", host="h", pid=2, version="1", queues=["q"], concurrency=1, running=0)
    assert reclaim(jobs) == 1
    assert jobs.state(job.job_id) == "retrying"


def test_an_expired_lease_shows_up_as_stuck_until_it_is_reclaimed(jobs, clock):
    jobs.put()
    job = jobs.running(lease=MINUTE)
    clock.advance(minutes=3)
    stuck = jobs.one("select job_id, expired_for from almanac.stuck_job")
    assert stuck == (job.job_id, 2 * MINUTE)
    reclaim(jobs)
    assert jobs.sql("select 1 from almanac.stuck_job") == []
