"""55 make_due: what waits for its backoff, or one job that waits for its time, is due now."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused


def retrying(jobs, error="timeout", **arguments):
    job = jobs.running(**arguments)
    jobs.fail_with_backoff(**held(job), error=error)
    return job.job_id


def test_retrying_jobs_that_match_are_claimed_now_and_keep_their_attempts(jobs, clock):
    jobs.put(base_delay="1 hour")
    first, second = retrying(jobs), retrying(jobs)
    other_error, other_type = retrying(jobs, "refused"), retrying(jobs, job_type="other")
    planned = jobs.add(due_at=clock.now() + timedelta(hours=1))
    assert jobs.claim(batch_size=10) == []
    made = jobs.make_due(queue="q", job_type="t", error_like="time%", reason="upstream is back")
    assert {row.make_due for row in made} == {first, second}
    claimed = jobs.claim(batch_size=10)
    assert {(job.job_id, job.attempt) for job in claimed} == {(first, 2), (second, 2)}
    assert {row.make_due for row in jobs.make_due(queue="q")} == {other_error, other_type}, "what is planned stays"
    assert jobs.find(planned).due_at == clock.now() + timedelta(hours=1)
    log = jobs.sql("select * from almanac.audit_log where action = 'make_due' and subject = %s", str(first))
    assert [(entry.reason, entry.before["state"]) for entry in log] == [("upstream is back", "retrying")]


def test_one_job_is_made_due_by_its_id_also_one_that_was_never_tried(jobs, clock):
    jobs.put()
    planned = jobs.add(due_at=clock.now() + timedelta(hours=1))
    assert [row.make_due for row in jobs.make_due(queue="q", job_id=planned)] == [planned]
    assert jobs.claim_one().job_id == planned


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("missing", "does not exist"),
        ("due", "is due already"),
        ("running", "is running, not waiting"),
        ("completed", "is completed, not waiting"),
        ("dead", "is dead, not waiting"),
    ],
)
def test_a_job_that_does_not_wait_is_refused(jobs, state, why):
    jobs.put()
    job = jobs.running()
    if state == "due":
        jobs.release(**held(job))
    elif state == "completed":
        jobs.complete(**held(job))
    elif state == "dead":
        jobs.fail_with_backoff(**held(job), error="x", permanent=True)
    with refused("PA003") as said:
        jobs.make_due(queue="q", job_id=2**62 if state == "missing" else job.job_id)
    assert {"missing": "does not exist", "due": "is due already"}.get(state, f"is {state}, not waiting") in str(
        said.value
    )


def test_a_batch_takes_so_many_and_the_next_ones_first(jobs, clock):
    jobs.put(base_delay="1 hour")
    ids = []
    for _ in range(3):
        ids.append(retrying(jobs))
        clock.advance(seconds=1)
    assert [row.make_due for row in jobs.make_due(queue="q", batch_size=2)] == ids[:2]
    assert [row.make_due for row in jobs.make_due(queue="q", batch_size=2)] == ids[2:]
    assert jobs.make_due(queue="q") == []
    for size in (0, None, 10001):
        with refused("22023"):
            jobs.make_due(queue="q", batch_size=size)
    with refused("PA001"):
        jobs.make_due(queue="nope")
