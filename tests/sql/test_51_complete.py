"""51 complete: once, by the holder of a live lease; said twice it is still once."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


def test_a_completed_job_leaves_the_live_table_with_its_result(jobs, clock):
    jobs.put()
    job = jobs.running(payload={"a": 1}, headers={"h": 1}, idempotency_key="i", priority=3)
    claimed_at = clock.now()
    clock.advance(minutes=1)
    jobs.complete(**held(job), result={"ok": True}, external_id="ext-1")
    assert jobs.sql("select 1 from almanac.job") == []
    found = jobs.find(job.job_id)
    assert (found.state, found.result, found.external_id) == ("completed", {"ok": True}, "ext-1")
    assert (found.payload, found.headers, found.idempotency_key, found.priority) == ({"a": 1}, {"h": 1}, "i", 3)
    assert (found.attempt, found.leased_by, found.claimed_at, found.finished_at) == (1, "w", claimed_at, clock.now())
    log = jobs.one("select * from almanac.attempt_log")
    assert (log.attempt, log.worker, log.outcome, log.external_id) == (1, "w", "completed", "ext-1")
    assert (log.claimed_at, log.finished_at, log.attempt_key) == (claimed_at, clock.now(), job.attempt_key)


def test_the_same_call_again_is_success_and_changes_nothing(jobs, clock):
    jobs.put()
    job = jobs.running()
    jobs.complete(**held(job), result={"first": True})
    before = jobs.sql("select * from almanac.job_history")
    clock.advance(hours=1)
    jobs.complete(**held(job), result={"second": True})
    assert jobs.complete_many(queue="q", job_ids=[job.job_id], lease_tokens=[job.lease_token])[0][0] == job.job_id
    assert jobs.sql("select * from almanac.job_history") == before


@pytest.mark.parametrize("result", [None, 1, "text", [], {}, False])
def test_any_json_is_a_result(jobs, result):
    jobs.put()
    job = jobs.running()
    jobs.complete(**held(job), result=result)
    assert jobs.find(job.job_id).result == result


@pytest.mark.parametrize(("minutes", "offset"), [(0, 1), (0, -1), (5, 0), (6, 0)])
def test_without_the_live_lease_nothing_is_completed(jobs, clock, minutes, offset):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    clock.advance(minutes=minutes)
    token = job.lease_token + offset
    with refused("PA002"):
        jobs.complete(queue="q", job_id=job.job_id, lease_token=token)
    assert jobs.complete_many(queue="q", job_ids=[job.job_id], lease_tokens=[token]) == []
    assert jobs.state(job.job_id) == "running"
    assert jobs.sql("select 1 from almanac.job_history") == []


def test_the_token_of_an_earlier_attempt_completes_nothing(jobs, clock):
    jobs.put()
    first = jobs.running()
    jobs.fail_with_backoff(**held(first), error="x")
    clock.advance(minutes=1)
    second = jobs.claim_one()
    with refused("PA002"):
        jobs.complete(**held(first))
    jobs.complete(**held(second))
    with refused("PA002"):
        jobs.complete(**held(first))
    assert jobs.attempts(first.job_id) == [(1, "failed"), (2, "completed")]


@pytest.mark.parametrize("end", ["failed for good", "cancelled"])
def test_completing_what_ended_otherwise_is_refused(jobs, end):
    jobs.put()
    job = jobs.running()
    if end == "cancelled":
        jobs.cancel(queue="q", job_id=job.job_id)
        jobs.release(**held(job))
    else:
        jobs.fail_with_backoff(**held(job), error="x", permanent=True)
    with refused("PA002"):
        jobs.complete(**held(job))


def test_many_at_once_and_the_lost_ones_are_left_out(jobs, clock):
    jobs.put()
    lost = jobs.running(lease=MINUTE)
    clock.advance(minutes=2)
    good, also, before = jobs.running(), jobs.running(), jobs.running()
    jobs.complete(**held(before))
    batch = [also, lost, good, before, good]
    answer = jobs.complete_many(
        queue="q", job_ids=[job.job_id for job in batch], lease_tokens=[job.lease_token for job in batch],
        results=[{"n": n} for n in range(5)], external_ids=["a", "b", None, "d", None],
    )  # fmt: skip
    assert sorted(row[0] for row in answer) == [good.job_id, also.job_id, before.job_id]
    assert (jobs.find(also.job_id).result, jobs.find(also.job_id).external_id) == ({"n": 0}, "a")
    assert jobs.find(before.job_id).result is None
    assert jobs.state(lost.job_id) == "running"


@pytest.mark.parametrize("apart", [1, 2, 1000], ids=["in a row", "close together", "far apart"])
def test_only_the_jobs_that_are_named_are_completed_however_far_apart_they_are(jobs, apart):
    """Also where one that lies between two of them happens to have the same token."""
    jobs.put()
    first = jobs.one("select nextval('almanac.job_id_seq')")
    jobs.sql(
        """insert into almanac.job (queue, id, due_at, created_at, max_attempts, job_type, created_by)
           select 'q', %s + n * %s, almanac.clock(), almanac.clock(), 5, 't', 'somebody'
             from generate_series(1, 7) as n""",
        first, apart,
    )  # fmt: skip
    batch = jobs.claim(batch_size=7)
    token = batch[0].lease_token
    jobs.sql("update almanac.job set lease_token = %s", token)
    named = [j.job_id for j in batch if j is not batch[2] and j is not batch[5]]
    tokens = [token + (job_id == named[1]) for job_id in named]
    done = jobs.complete_many(queue="q", job_ids=named, lease_tokens=tokens, results=[{"n": n} for n in named])
    assert sorted(row[0] for row in done) == [named[0], *named[2:]]
    left = [row.id for row in jobs.sql("select id from almanac.job order by id")]
    assert left == sorted([named[1], batch[2].job_id, batch[5].job_id])
    assert all(jobs.find(row[0]).result == {"n": row[0]} for row in done)


# As in docs/any-language.md.
END_AND_CLAIM = """
with ended as materialized (
    select count(*)::integer as jobs from almanac.complete_many('q', %s::bigint[], %s::bigint[]))
select ended.jobs, claimed.job_id
  from ended left join lateral almanac.claim_due('q', 'w', batch_size => greatest(ended.jobs, 1)) as claimed on true
"""


@pytest.mark.parametrize("limits", [{}, {"max_running": 2}, {"max_running_per_key": 2}], ids=["none", "queue", "key"])
def test_one_statement_ends_a_batch_and_claims_what_it_makes_room_for(jobs, clock, limits):
    jobs.put(lease=5 * MINUTE, **limits)
    key = {"concurrency_key": "k"} if "max_running_per_key" in limits else {}
    ids = [jobs.add(**key) for _ in range(4)]
    batch = jobs.claim(batch_size=2)
    assert [j.job_id for j in batch] == ids[:2]
    leases = [j.job_id for j in batch], [j.lease_token for j in batch]
    assert jobs.sql(END_AND_CLAIM, *leases) == [(2, ids[2]), (2, ids[3])]
    assert jobs.unwatched() == []
    # The same again is a success, and finds nothing more that is due.
    assert jobs.sql(END_AND_CLAIM, *leases) == [(2, None)]
    assert [jobs.state(job_id) for job_id in ids] == ["completed", "completed", "running", "running"]
    # Leases that were lost end nothing.
    late = jobs.sql("select array_agg(id) as ids, array_agg(lease_token) as tokens from almanac.job")[0]
    clock.advance(minutes=5)
    assert jobs.sql(END_AND_CLAIM, late.ids, late.tokens) == [(0, None)]


def test_ids_that_nobody_has_given_out_are_left_out(jobs):
    jobs.put()
    job = jobs.running()
    ids = [-(2**63), -1, job.job_id, 2**63 - 1]
    done = jobs.complete_many(queue="q", job_ids=ids, lease_tokens=[job.lease_token] * 4)
    assert [row[0] for row in done] == [job.job_id]


def test_many_of_nothing_is_nothing(jobs):
    jobs.put()
    assert jobs.complete_many(queue="q", job_ids=[], lease_tokens=[]) == []


def test_arrays_of_different_length_are_refused(jobs):
    jobs.put()
    with refused("22023"):
        jobs.complete_many(queue="q", job_ids=[1, 2], lease_tokens=[1])
    with refused("22023"):
        jobs.complete_many(queue="q", job_ids=[1], lease_tokens=[1], results=[{}, {}])


def test_work_in_the_same_transaction_commits_or_rolls_back_with_it(jobs, own_database):
    jobs.put()
    jobs.sql("create table effect (job_id bigint)")
    job = jobs.running()
    with jobs.conn.transaction(force_rollback=True):
        jobs.sql("insert into effect values (%s)", job.job_id)
        jobs.complete(**held(job))
    assert jobs.state(job.job_id) == "running"
    assert jobs.sql("select 1 from effect") == []
    with jobs.conn.transaction():
        jobs.sql("insert into effect values (%s)", job.job_id)
        jobs.complete(**held(job))
    assert jobs.state(job.job_id) == "completed"
    assert len(jobs.sql("select 1 from effect")) == 1


def test_a_job_asked_to_stop_that_finishes_first_is_completed(jobs):
    jobs.put()
    job = jobs.running()
    jobs.cancel(queue="q", job_id=job.job_id)
    jobs.complete(**held(job))
    assert jobs.state(job.job_id) == "completed"


def test_history_goes_into_the_partition_of_its_day_and_no_row_is_lost_without_one(jobs, own_database, clock):
    jobs.put(lease="30 days")
    jobs.complete(**held(jobs.running()))
    today = clock.now().strftime("%Y%m%d")
    assert jobs.one("select tableoid::regclass::text from almanac.job_history").endswith(today)
    job = jobs.running()
    clock.advance(days=20)
    jobs.complete(**held(job))
    assert jobs.one("select tableoid::regclass::text from almanac.job_history where id = %s", job.job_id).endswith(
        "job_history_default"
    )
    assert jobs.state(job.job_id) == "completed"


def test_results_go_to_their_jobs_in_whatever_order_they_are_given(jobs):
    jobs.put()
    for _ in range(20):
        jobs.add()
    claimed = {job.job_id: job for job in jobs.claim(batch_size=20)}
    ids = [*sorted(claimed, key=lambda job_id: (job_id * 7) % 20), None]
    tokens = [claimed[job_id].lease_token if job_id else None for job_id in ids]
    answer = jobs.complete_many(
        queue="q",
        job_ids=ids,
        lease_tokens=tokens,
        results=[{"of": job_id} for job_id in ids],
        external_ids=[str(job_id) for job_id in ids],
    )
    assert sorted(row[0] for row in answer) == sorted(claimed)
    kept = jobs.sql("select id, result ->> 'of' as of, external_id from almanac.job_history")
    assert {(str(row.id), row.of, row.external_id) for row in kept} == {(str(i), str(i), str(i)) for i in claimed}


def test_a_job_given_with_two_tokens_is_completed_by_the_live_one(jobs):
    jobs.put()
    job_id = jobs.add()
    old = jobs.claim_one()
    jobs.release(queue="q", job_id=job_id, lease_token=old.lease_token)
    live = jobs.claim_one()
    for tokens in ([live.lease_token, old.lease_token], [old.lease_token, live.lease_token]):
        answer = jobs.complete_many(queue="q", job_ids=[job_id, job_id], lease_tokens=tokens)
        assert [row[0] for row in answer] == [job_id]


@pytest.mark.parametrize("given", ["[0:2]={%s}", "[5:7]={%s}", "{{%s}}"], ids=["from 0", "from 5", "of two dimensions"])
@pytest.mark.parametrize("which", ["job_ids", "lease_tokens", "results", "external_ids"])
def test_results_go_to_their_jobs_whatever_the_subscripts_of_an_array(jobs, which, given):
    jobs.put()
    for _ in range(3):
        jobs.add()
    claimed = jobs.claim(batch_size=3)
    values = {
        "job_ids": [job.job_id for job in claimed],
        "lease_tokens": [job.lease_token for job in claimed],
        "results": [job.job_id for job in claimed],
        "external_ids": [job.job_id for job in claimed],
    }
    texts = {name: ",".join(map(str, value)) for name, value in values.items()}
    arrays = {name: (given if name == which else "{%s}") % text for name, text in texts.items()}
    jobs.sql("select almanac.complete_many('q', %s::bigint[], %s::bigint[], %s::jsonb[], %s::text[])", *arrays.values())
    kept = jobs.sql("select id, result::text, external_id from almanac.job_history order by id")
    assert [tuple(row) for row in kept] == [(i, str(i), str(i)) for i in sorted(values["job_ids"])]
