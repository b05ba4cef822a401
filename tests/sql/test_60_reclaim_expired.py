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


# ── an operator does not want to wait ───────────────────────────────────────────────────────────────────────────────


def test_an_operator_ends_the_lease_of_a_worker_that_is_gone(jobs, clock):
    jobs.put()
    job = jobs.running(lease=timedelta(days=30))
    (ended,) = jobs.end_lease(queue="q", job_id=job.job_id, reason="its host burnt down")
    assert (ended.state, ended.due_at, ended.attempt) == ("retrying", clock.now() + MINUTE, 1)
    assert jobs.attempts(job.job_id) == [(1, "lost")]
    assert "its host burnt down" in jobs.find(job.job_id).last_error
    log = jobs.one("select * from almanac.audit_log where action = 'end_lease'")
    assert (log.subject, log.reason) == (str(job.job_id), "its host burnt down")
    assert (log.before["leased_by"], log.after["state"]) == ("w", "retrying")
    with refused("PA002"):
        jobs.complete(**held(job))
    clock.advance(minutes=1)
    assert jobs.claim_one().job_id == job.job_id


@pytest.mark.parametrize("becomes", ["dead", "cancelled"])
def test_a_lease_that_is_ended_goes_the_way_of_one_that_ends(jobs, becomes):
    jobs.put(max_attempts=1 if becomes == "dead" else 5, max_running=1)
    job = jobs.running()
    if becomes == "cancelled":
        jobs.cancel(queue="q", job_id=job.job_id)
    waiting = jobs.add()
    assert jobs.end_lease(queue="q", job_id=job.job_id)[0].state == becomes
    assert jobs.state(job.job_id) == becomes
    assert jobs.claim_ids() == [waiting], "its place is free"


@pytest.mark.parametrize("state", ["scheduled", "completed", None])
def test_only_a_lease_that_there_is_can_be_ended(jobs, state):
    jobs.put()
    job_id = -1 if state is None else jobs.add()
    if state == "completed":
        jobs.complete(**held(jobs.claim_one()))
    with refused("PA003"):
        jobs.end_lease(queue="q", job_id=job_id)


# ── how running jobs are found ──────────────────────────────────────────────────────────────────────────────────────


def claims(jobs):
    """What is listed, in the order in which it will be looked at."""
    return [
        (row.look_at, sorted(row.job_ids))
        for row in jobs.sql("select look_at, job_ids from almanac.claim order by look_at, id")
    ]


@pytest.mark.parametrize("limits", [{}, {"max_running": 100}, {"rate_limit": 100, "rate_interval": MINUTE}])
def test_whatever_runs_is_found_when_its_lease_ends(jobs, clock, limits):
    jobs.put(**limits)
    job_id = jobs.add()
    jobs.claim_one(lease=timedelta(seconds=1))
    assert jobs.unwatched() == []
    clock.advance(seconds=1, microseconds=-1)
    assert reclaim(jobs) == 0
    clock.advance(microseconds=1)
    assert reclaim(jobs) == 1
    assert jobs.state(job_id) == "retrying"


def test_what_has_ended_is_forgotten_at_the_first_look(jobs, clock):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 10)
    for _ in range(2):
        batch = jobs.claim(batch_size=5)
        jobs.complete_many(queue="q", job_ids=[j.job_id for j in batch], lease_tokens=[j.lease_token for j in batch])
    assert len(claims(jobs)) == 2
    clock.advance(seconds=1)
    assert reclaim(jobs) == 0
    assert claims(jobs) == []


def test_what_still_runs_is_looked_at_again_when_the_first_of_its_leases_may_have_ended(jobs, clock):
    jobs.put()
    start = clock.now()
    brief, long, ended = (jobs.running(lease=minutes * MINUTE) for minutes in (2, 9, 5))
    jobs.complete(**held(ended))
    clock.advance(seconds=1)
    assert reclaim(jobs) == 0
    assert claims(jobs) == [(start + 2 * MINUTE, [brief.job_id, long.job_id])]
    clock.freeze(start + MINUTE)
    jobs.extend_lease(**held(brief), lease=5 * MINUTE)
    clock.freeze(start + 2 * MINUTE)
    assert reclaim(jobs) == 0
    assert claims(jobs) == [(start + 6 * MINUTE, [brief.job_id, long.job_id])]
    clock.freeze(start + 6 * MINUTE)
    assert reclaim(jobs) == 1
    assert jobs.state(brief.job_id) == "retrying"
    assert claims(jobs) == [(start + 9 * MINUTE, [long.job_id])]


def test_a_job_that_was_given_back_and_claimed_again_is_watched_by_its_new_lease(jobs, clock):
    jobs.put()
    first = jobs.running(lease=2 * MINUTE)
    jobs.release(**held(first))
    assert jobs.claim_one(lease=9 * MINUTE).job_id == first.job_id
    clock.advance(minutes=2)
    assert reclaim(jobs) == 0
    assert jobs.unwatched() == []
    clock.advance(minutes=7)
    assert reclaim(jobs) == 1
    assert claims(jobs) == []


def test_a_claim_that_is_rolled_back_is_not_listed(jobs, session, clock):
    jobs.put()
    job_id = jobs.add()
    other = session()
    with other.conn.transaction(force_rollback=True):
        assert other.claim_ids() == [job_id]
    assert claims(jobs) == []


def test_each_of_two_who_look_at_once_leaves_the_claims_of_the_other_alone(jobs, session, clock):
    jobs.put(max_attempts=2)
    jobs.running()
    clock.advance(days=1)
    other = session()
    with other.conn.transaction():
        assert reclaim(other) == 1
        assert reclaim(jobs) == 0
    assert reclaim(jobs) == 0
    assert jobs.attempts(jobs.one("select id from almanac.job")) == [(1, "lost")]


def test_one_look_is_bounded_and_the_next_goes_on(jobs, clock):
    """Of many claims, so that nobody waits for long, whether or not anything has expired."""
    jobs.put()
    jobs.sql("""
        insert into almanac.claim (queue, look_at, job_ids)
        select 'q', almanac.clock(), array(select -100 * n - m from generate_series(1, 100) as m)
          from generate_series(1, 1000) as n""")
    looks = 0
    while claims(jobs):
        assert reclaim(jobs, batch_size=200) == 0
        looks += 1
    assert looks == 5


def test_a_locked_job_whose_lease_has_ended_does_not_hold_up_the_look(jobs, session, clock):
    jobs.put()
    stuck = jobs.running()
    clock.advance(days=1)
    other = session()
    with other.conn.transaction():
        other.sql("select from almanac.job for update")
        assert reclaim(jobs) == 0
        assert jobs.unwatched() == []
    assert reclaim(jobs) == 1
    assert jobs.state(stuck.job_id) == "retrying"


def test_what_runs_since_before_there_was_a_limit_counts(jobs):
    jobs.put()
    for _ in range(2):
        jobs.running()
    waiting = [jobs.add() for _ in range(3)]
    jobs.put(max_running=3)
    assert jobs.claim_ids() == waiting[:1]
    assert jobs.claim_ids() == []
