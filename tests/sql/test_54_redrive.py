"""54 redrive: a dead job comes back with a fresh counter, and history keeps both lives."""

import pytest

from tests.jobs import held, refused


def test_both_lives_are_in_history_with_all_their_attempts(jobs, clock):
    jobs.put(max_attempts=2)
    job_id = jobs.add(payload={"a": 1}, priority=4, idempotency_key="i", headers={"h": 1})

    def live_until_dead():
        for _ in range(2):
            clock.advance(hours=1)
            jobs.fail_with_backoff(**held(jobs.claim_one()), error="x")

    live_until_dead()
    clock.advance(hours=1)
    assert [row.redrive for row in jobs.redrive(queue="q", job_id=job_id, reason="fixed")] == [job_id]
    found = jobs.find(job_id)
    assert (found.state, found.attempt, found.max_attempts, found.due_at) == ("scheduled", 0, 2, clock.now())
    assert (found.payload, found.priority, found.idempotency_key, found.headers) == ({"a": 1}, 4, "i", {"h": 1})
    assert jobs.sql("select 1 from almanac.dead_job") == []
    live_until_dead()
    jobs.redrive(queue="q", job_id=job_id)
    clock.advance(hours=1)
    jobs.complete(**held(jobs.claim_one()))
    lives = jobs.sql("select state, attempt, redriven_at is null as last from almanac.job_history order by finished_at")
    assert lives == [("dead", 2, False), ("dead", 2, False), ("completed", 1, True)]
    assert jobs.attempts(job_id) == [(1, "failed"), (2, "failed"), (1, "failed"), (2, "failed"), (1, "completed")]
    log = jobs.sql("select * from almanac.audit_log where action = 'redrive' order by at")
    assert [entry.reason for entry in log] == ["fixed", None]
    assert (log[0].subject, log[0].before["state"], log[0].after["state"]) == (str(job_id), "dead", "scheduled")


@pytest.mark.parametrize("state", ["missing", "scheduled", "running", "completed", "cancelled", "redriven before"])
def test_only_dead_jobs_can_be_redriven(jobs, state):
    jobs.put()
    job = jobs.running()
    job_id = job.job_id
    if state == "missing":
        job_id = 2**62
    elif state == "scheduled":
        jobs.release(**held(job))
    elif state == "completed":
        jobs.complete(**held(job))
    elif state == "cancelled":
        jobs.cancel(queue="q", job_id=job_id)
        jobs.release(**held(job))
    elif state == "redriven before":
        jobs.fail_with_backoff(**held(job), error="x", permanent=True)
        jobs.redrive(queue="q", job_id=job_id)
        jobs.complete(**held(jobs.claim_one()))
    before = jobs.sql("select * from almanac.job"), jobs.sql("select * from almanac.job_history order by finished_at")
    with refused("PA003") as said:
        jobs.redrive(queue="q", job_id=job_id)
    assert ("make_due" in said.value.diag.message_hint) == (state == "scheduled")
    after = jobs.sql("select * from almanac.job"), jobs.sql("select * from almanac.job_history order by finished_at")
    assert before == after


def test_all_that_match_come_back_in_bounded_batches_oldest_first(jobs, clock):
    jobs.put()
    jobs.put("other")
    ids = []
    for n in range(10):
        clock.advance(seconds=1)
        ids.append(jobs.dead(job_type="ab"[n % 2], error=f"HTTP {500 + n % 5}: 100% of it's_gone").job_id)
    jobs.dead("other")

    def redriven(**arguments):
        return [row.redrive for row in jobs.redrive(queue="q", **arguments)]

    assert redriven(error_like="nothing") == []
    assert redriven(error_like="HTTP 500%") == [ids[0], ids[5]]
    assert redriven(job_type="a", error_like="%100\\% of it's\\_gone", batch_size=2) == [ids[2], ids[4]]
    assert redriven(batch_size=3) == [ids[1], ids[3], ids[6]]
    assert redriven() == ids[7:]
    assert redriven() == []
    assert jobs.one("select count(*) from almanac.job where queue = 'q'") == 10
    assert jobs.one("select count(*) from almanac.dead_job") == 1


@pytest.mark.parametrize("batch_size", [None, 0, -1, 10_001])
def test_a_batch_of_impossible_size_is_refused(jobs, batch_size):
    jobs.put()
    with refused("22023"):
        jobs.redrive(queue="q", batch_size=batch_size)


def test_a_job_whose_key_another_has_taken_stays_dead(jobs):
    jobs.put()
    first = jobs.dead(dedup_key="k")
    plain = jobs.dead()
    other = jobs.add(dedup_key="k")
    with refused("PA003"):
        jobs.redrive(queue="q", job_id=first.job_id)
    assert [row.redrive for row in jobs.redrive(queue="q")] == [plain.job_id]
    jobs.cancel(queue="q", job_id=other)
    assert [row.redrive for row in jobs.redrive(queue="q")] == [first.job_id]
    assert jobs.enqueue(queue="q", job_type="t", dedup_key="k")[0] == ("q", first.job_id, False)


def test_of_two_dead_jobs_with_one_key_one_comes_back(jobs):
    jobs.put()
    first, second = jobs.dead(dedup_key="k"), jobs.dead(dedup_key="k")
    assert [row.redrive for row in jobs.redrive(queue="q")] == [min(first.job_id, second.job_id)]
    assert jobs.redrive(queue="q") == []


def test_the_last_life_is_shown_though_the_clock_was_set_back_after_the_first(jobs, clock):
    jobs.put()
    dead = jobs.dead()
    clock.advance(hours=-1)
    jobs.redrive(queue="q", job_id=dead.job_id)
    jobs.cancel(queue="q", job_id=dead.job_id)
    assert jobs.state(dead.job_id) == "cancelled"
    assert jobs.cancel(queue="q", job_id=dead.job_id)[0].cancel == "cancelled"


def test_lives_that_end_at_one_instant_are_all_kept(jobs, clock):
    jobs.put()
    dead = jobs.dead()
    for _ in range(3):
        jobs.redrive(queue="q", job_id=dead.job_id)
        again = jobs.claim_one()
        jobs.fail_with_backoff(**held(again), error="no", permanent=True)
    jobs.redrive(queue="q", job_id=dead.job_id)
    jobs.complete(**held(jobs.claim_one()))
    assert jobs.state(dead.job_id) == "completed"
    lives = jobs.sql("select state, redriven_at from almanac.job_history order by redriven_at is null, finished_at")
    assert [life.state for life in lives] == ["dead"] * 4 + ["completed"]
    assert [life.redriven_at is None for life in lives] == [False] * 4 + [True]


@pytest.mark.parametrize("choice", [{"job_type": "another"}, {"error_like": "another%"}])
def test_a_dead_job_that_does_not_match_is_said_not_to_match(jobs, choice):
    jobs.put()
    dead = jobs.dead()
    with refused("PA003") as said:
        jobs.redrive(queue="q", job_id=dead.job_id, **choice)
    assert "does not match" in said.value.diag.message_primary
    assert jobs.state(dead.job_id) == "dead"


def test_a_redriven_job_keeps_the_window_it_had(jobs, clock):
    jobs.put()
    dead = jobs.dead(dedup_key="k", dedup_for="1 hour")
    jobs.redrive(queue="q", job_id=dead.job_id)
    assert jobs.enqueue(queue="q", job_type="t", dedup_key="k")[0] == ("q", dead.job_id, False)
    clock.advance(minutes=1)
    jobs.complete(**held(jobs.claim_one()))
    assert not jobs.enqueue(queue="q", job_type="t", dedup_key="k")[0].created
    clock.advance(minutes=59)
    assert jobs.enqueue(queue="q", job_type="t", dedup_key="k")[0].created
