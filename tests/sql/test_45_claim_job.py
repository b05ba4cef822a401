"""45 claim_job: one job by its id, under the same rules as any claim."""

from datetime import timedelta

import pytest

from tests.jobs import Blocked, held, refused


def claim(jobs, job_id, queue="q", **arguments):
    return jobs.claim_job(queue=queue, job_id=job_id, worker="w", **arguments)[0]


def test_one_job_is_claimed_past_those_before_it(jobs, clock):
    jobs.put()
    first, second = jobs.add(payload={"n": 1}), jobs.add(payload={"n": 2})
    claimed = claim(jobs, second, lease=timedelta(minutes=1))
    assert (claimed.job_id, claimed.payload, claimed.attempt) == (second, {"n": 2}, 1)
    assert claimed.lease_expires_at == clock.now() + timedelta(minutes=1)
    assert jobs.claim_ids() == [first]
    jobs.complete(**held(claimed))


def test_a_parked_job_whose_key_became_free_can_be_claimed(jobs):
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    waiting = [jobs.add(concurrency_key="k") for _ in range(2)]
    assert jobs.claim() == []
    with refused("PA003"):
        claim(jobs, waiting[1])
    jobs.complete(**held(holder))
    claimed = claim(jobs, waiting[1])
    assert jobs.claim() == []
    jobs.complete(**held(claimed))
    assert jobs.claim_ids() == [waiting[0]]


@pytest.mark.parametrize("why", ["future", "running", "ended", "missing", "paused", "full", "out of tokens"])
def test_what_may_not_run_now_is_refused(jobs, clock, why):
    jobs.put()
    job_id = jobs.add(due_at=clock.now() + timedelta(seconds=1 if why == "future" else 0))
    if why == "running":
        jobs.claim()
    elif why == "ended":
        jobs.cancel(queue="q", job_id=job_id)
    elif why == "missing":
        job_id = 2**62
    elif why == "paused":
        jobs.pause_queue(queue="q")
    elif why == "full":
        jobs.claim()
        job_id = jobs.add()
        jobs.put(max_running=1)
    elif why == "out of tokens":
        jobs.put(rate_limit=1, rate_interval="1 minute")
        jobs.claim()
        job_id = jobs.add()
    before = jobs.sql("select * from almanac.job order by id")
    with refused("PA003"):
        claim(jobs, job_id)
    assert jobs.sql("select * from almanac.job order by id") == before


def test_a_token_is_taken_from_the_same_bucket(jobs, clock):
    jobs.put(rate_limit=2, rate_interval="1 minute")
    ids = [jobs.add() for _ in range(4)]
    claim(jobs, ids[3])
    assert jobs.claim_ids() == ids[:1]
    clock.advance(seconds=30)
    claim(jobs, ids[2])
    assert jobs.claim() == []


@pytest.mark.parametrize("change", ["pause", "limit"])
def test_one_that_waits_for_its_turn_sees_what_came_meanwhile(jobs, session, change):
    a, b = session(), session()
    jobs.put(max_running=5)
    jobs.add()
    job_id = jobs.add()
    a.sql("begin")
    a.claim()
    with Blocked(jobs.conn, b.conn, lambda: claim(b, job_id)) as waiting:
        if change == "pause":
            jobs.pause_queue(queue="q")
        else:
            jobs.put(max_running=1)
        a.sql("commit")
    with refused("PA003"):
        waiting.value()


def test_one_who_ends_a_job_and_waits_for_the_next_does_not_wait_in_a_circle(jobs, session):
    """Whoever claims one job by its id has the turn; whoever ends that job and then claims waits for the turn."""
    a, b = session(), session()
    jobs.put(max_running=5)
    first = jobs.running()
    second = jobs.add()
    a.sql("begin")
    a.complete(**held(first))
    b.sql("begin")
    b.sql("set local deadlock_timeout = '60 s'")
    b.sql("select almanac._take_turn('q')")
    with Blocked(jobs.conn, a.conn, lambda: a.claim_ids()) as waiting:
        with refused("PA003") as said:
            claim(b, first.job_id)
        assert "just being changed" in said.value.diag.message_primary
        b.sql("rollback")
    assert waiting.value() == [second]
    a.sql("commit")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_limits_are_refused_where_they_cannot_be_kept(jobs, level):
    jobs.put(max_running=1)
    job_id = jobs.add()
    jobs.sql(f"begin isolation level {level}")
    with refused("25000"):
        claim(jobs, job_id)
    jobs.sql("rollback")
