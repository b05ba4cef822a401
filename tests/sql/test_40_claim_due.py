"""40 claim_due: highest priority first, then oldest due; never early, never two workers, within every limit."""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.jobs import Jobs, entries_read, held, littered, pages_read, refused
from tests.workers import wait_until

MINUTE = timedelta(minutes=1)


@pytest.fixture(params=["claims from the start", "claims from where the last one stopped"])
def worked(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Both ways in which claims find jobs: while the head of the index is clean, and where it is littered."""
    with contextlib.ExitStack() as stack:

        def work(*arguments: Any) -> None:
            if request.param != "claims from the start":
                stack.enter_context(littered(*arguments))

        yield work


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [{}, {"max_running": 10_000}], ids=["no limits", "with limits"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_highest_priority_first_then_oldest_due_then_oldest(jobs, clock, limits, batch_size, worked):
    jobs.put(**limits)
    worked(jobs)
    shuffle = random.Random(1)
    made = []
    for _ in range(40):
        priority, minutes = shuffle.choice([-32768, -1, 0, 5, 32767]), shuffle.randrange(4)
        made.append((-priority, minutes, jobs.add(priority=priority, due_at=clock.now() + minutes * MINUTE)))
    clock.advance(minutes=5)
    order = []
    while claimed := jobs.claim_ids(batch_size=batch_size):
        order += claimed
    assert order == [job_id for *_, job_id in sorted(made)]


@pytest.mark.parametrize("limits", [{}, {"max_running": 5}], ids=["no limits", "with limits"])
def test_a_job_is_never_claimed_early(jobs, clock, limits, worked):
    jobs.put(**limits)
    worked(jobs)
    jobs.add(due_at=clock.now() + timedelta(microseconds=1))
    assert jobs.claim() == []
    clock.advance(microseconds=1)
    claimed = jobs.claim_one()
    assert claimed.lateness == timedelta(0)


def test_what_becomes_claimable_between_claims_takes_its_place_in_the_line(live_jobs, worked):
    """On the clock of production: a session remembers how far it has claimed."""
    jobs = live_jobs
    jobs.put(base_delay="0")
    worked(jobs)
    waiting = [jobs.add() for _ in range(5)]
    assert jobs.claim_ids(batch_size=1) == waiting[:1]
    back_dated = jobs.add(due_at=jobs.one("select now() - interval '1 hour'"))
    assert jobs.claim_ids(batch_size=1) == [back_dated]
    earlier = jobs.enqueue_many(
        queue="q", job_type="t", payloads=[{}], due_at=jobs.one("select now() - interval '2 hours'")
    )
    assert jobs.claim_ids(batch_size=1) == [earlier[0].job_id]
    urgent = jobs.add(priority=1)
    assert jobs.claim_ids(batch_size=1) == [urgent]
    more_urgent = jobs.add(priority=2, due_at=jobs.one("select now() - interval '1 second'"))
    claimed = jobs.claim_one()
    assert claimed.job_id == more_urgent
    jobs.release(**held(claimed))
    assert jobs.claim_ids(batch_size=1) == [more_urgent]
    next_one = jobs.claim_one()
    assert next_one.job_id == waiting[1]
    jobs.snooze(**held(next_one), until=jobs.one("select now() - interval '3 hours'"))
    assert jobs.claim_ids(batch_size=1) == [waiting[1]]
    failed = jobs.claim_one()
    assert failed.job_id == waiting[2]
    jobs.fail_with_backoff(**held(failed), error="x", retry_after="0")
    assert jobs.claim_ids(batch_size=1) == [waiting[3]]
    assert jobs.claim_ids() == [waiting[4], waiting[2]]


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "a new priority"])
def test_what_is_enqueued_behind_a_session_is_claimed_next(jobs, clock, worked, how):
    """Each by itself: a claim that finds it may find so little in the way that the session forgets its position."""
    jobs.put()
    worked(jobs)
    waiting = [jobs.add() for _ in range(3)]
    assert jobs.claim_ids(batch_size=1) == waiting[:1]
    past = clock.now() - timedelta(hours=1)
    if how == "a new priority":
        late = jobs.add(priority=1)
    elif how == "enqueue_many":
        late = jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], due_at=past)[0].job_id
    else:
        late = jobs.add(due_at=past)
    assert jobs.claim_ids(batch_size=1) == [late]


def test_what_becomes_claimable_at_the_same_instant_takes_its_place(jobs, clock, worked):
    jobs.put(base_delay="0")
    worked(jobs)
    waiting = [jobs.add() for _ in range(4)]
    first, second = jobs.claim(batch_size=2)
    jobs.fail_with_backoff(**held(first), error="x")
    assert jobs.claim_ids(batch_size=1) == [first.job_id]
    jobs.fail_with_backoff(**held(second), error="x", permanent=True)
    jobs.redrive(queue="q", job_id=second.job_id)
    assert jobs.claim_ids(batch_size=1) == [second.job_id]
    assert jobs.claim_ids() == waiting[2:]


def test_a_rolled_back_claim_is_forgotten_by_the_session_too(live_jobs, worked):
    jobs = live_jobs
    jobs.put()
    worked(jobs)
    waiting = [jobs.add() for _ in range(4)]
    assert jobs.claim_ids(batch_size=1) == waiting[:1]
    with jobs.conn.transaction(force_rollback=True):
        assert jobs.claim_ids(batch_size=2) == waiting[1:3]
    assert jobs.claim_ids(batch_size=1) == waiting[1:2]


def test_one_session_serves_many_queues_and_choices_of_types(live_jobs, worked):
    jobs = live_jobs
    expected: dict[tuple[str, str], list[int]] = {}
    for queue in ("a", "b", "it's"):
        jobs.put(queue)
        worked(jobs, queue, [["x"], ["y"], ["z"]])
        for n in range(12):
            job_type = "xyz"[n % 3]
            expected.setdefault((queue, job_type), []).append(jobs.add(queue, job_type))
    for _ in range(4):
        for (queue, job_type), ids in expected.items():
            assert jobs.claim_ids(queue, 1, job_types=[job_type]) == [ids.pop(0)]
    assert [jobs.claim(queue) for queue in ("a", "b", "it's")] == [[], [], []]


def test_a_clock_that_was_set_back_does_not_hide_jobs(jobs, clock, worked):
    jobs.put()
    worked(jobs)
    jobs.add()
    jobs.add()
    assert len(jobs.claim()) == 1
    clock.advance(hours=-2)
    job_id = jobs.add()
    assert jobs.claim_ids() == [job_id]


def test_a_clock_that_leaps_during_a_claim_does_not_blind_the_session_for_long(jobs, own_database, clock, worked):
    """How long looking back took is measured by the clock, and decides when to look back again."""
    jobs.put()
    worked(jobs)
    late, *_ = [jobs.add() for _ in range(3)]
    with jobs.conn.transaction(force_rollback=True):
        pass
    jobs.sql("create sequence leap")
    jobs.sql("""
        create or replace function almanac.clock() returns timestamptz language sql volatile
            return timestamptz '2030-01-01' + nextval('public.leap') * interval '1 hour'""")
    other = Jobs(jobs.conn.__class__.connect(jobs.conn.info.dsn, autocommit=True))
    with other.conn:
        other.sql("begin")
        assert other.claim_ids(batch_size=1) == [late]
        assert len(jobs.claim(batch_size=2)) == 2
        other.sql("rollback")
    jobs.sql("""
        create or replace function almanac.clock() returns timestamptz language sql volatile
            return timestamptz '2030-01-01' + currval('public.leap') * interval '1 hour' + interval '1 minute'""")
    assert jobs.claim_ids() == [late]


def test_jobs_long_claimed_are_not_in_the_way_while_somebody_keeps_an_old_snapshot(live_jobs):
    """Their entries stay in the index for as long as it is kept; a session passes over them once a second at most."""
    jobs = live_jobs
    jobs.put()
    with littered(jobs), psycopg.connect(jobs.conn.info.dsn, autocommit=True) as newcomer:
        read = []
        for _ in range(300):
            jobs.add()
            read.append(entries_read(jobs, jobs.claim_one))
        assert entries_read(Jobs(newcomer), Jobs(newcomer).claim) > 1000
        assert sorted(read)[len(read) * 3 // 4] < 100


def test_jobs_long_claimed_are_not_in_the_way_until_the_next_vacuum(live_jobs):
    """Their entries are known to be dead and cost nothing by themselves, but the pages of the index that hold nothing
    else stay there."""
    jobs = live_jobs
    jobs.put()
    jobs.sql("alter table almanac.job set (autovacuum_enabled = off)")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 30_000)
    while batch := jobs.claim(batch_size=10_000):
        jobs.complete_many(queue="q", job_ids=[j.job_id for j in batch], lease_tokens=[j.lease_token for j in batch])
    jobs.claim()  # passes over what the last batch left, and marks it dead
    with psycopg.connect(jobs.conn.info.dsn, autocommit=True) as newcomer:
        assert pages_read(Jobs(newcomer), Jobs(newcomer).claim) > 100
        read = []
        for _ in range(100):
            jobs.add()
            read.append(pages_read(jobs, jobs.claim_one))
        assert sorted(read)[len(read) * 3 // 4] < 20


def test_jobs_that_run_are_not_in_the_way(live_jobs):
    """They stay in the index until they end; a session passes over them once a second at most."""
    jobs = live_jobs
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 2000)
    assert len(jobs.claim(batch_size=2000)) == 2000
    with psycopg.connect(jobs.conn.info.dsn, autocommit=True) as newcomer:
        assert entries_read(Jobs(newcomer), Jobs(newcomer).claim) >= 2000
        read = []
        for _ in range(300):
            jobs.add()
            read.append(entries_read(jobs, jobs.claim_one))
        assert sorted(read)[len(read) * 3 // 4] < 20


def test_a_claim_needs_no_entry_in_any_index(jobs):
    """Which would cost more than the claim."""

    def counts():
        return jobs.one("""select pg_stat_get_xact_tuples_updated('almanac.job'::regclass),
                                  pg_stat_get_xact_tuples_hot_updated('almanac.job'::regclass)""")

    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{"n": n} for n in range(1000)])
    with jobs.conn.transaction():
        before = counts()
        assert len(jobs.claim(batch_size=1000)) == 1000
        after = counts()
    assert (after[0] - before[0], after[1] - before[1]) == (1000, 1000)


@pytest.mark.parametrize("column", ["state", "attempt", "lease_token", "leased_by", "claimed_at", "lease_expires_at"])
def test_no_index_knows_what_a_claim_or_an_extension_changes(jobs, column):
    """Neither as a column nor in its predicate."""
    indexes = jobs.sql(
        "select pg_get_indexdef(indexrelid) as made from pg_index where indrelid = 'almanac.job'::regclass"
    )
    assert len(indexes) >= 5
    for index in indexes:
        assert not re.search(rf"\b{column}\b", index.made), index.made


def test_claims_go_from_the_start_again_once_nothing_is_in_the_way(live_jobs):
    jobs = live_jobs
    jobs.put()
    jobs.sql("set track_functions = 'pl'")

    def goes_on() -> bool:
        """Whether a claim asks for the position of the last one."""
        calls = "select coalesce(pg_stat_get_xact_function_calls('almanac._pick_due'::regproc), 0)"
        with jobs.conn.transaction():
            before = jobs.one(calls)
            assert jobs.claim() == []
            return bool(jobs.one(calls) > before)

    assert not goes_on()
    with littered(jobs):
        assert goes_on()
        assert goes_on()
    jobs.sql("vacuum almanac.job")
    # The first that looks back finds the way clear. How soon that is depends on how long it took the last time.
    wait_until(lambda: not goes_on(), timeout=30.0, pause=0.05)


# ── what is claimed, and by whom ────────────────────────────────────────────────────────────────────────────────────


def test_no_claim_sees_a_job_while_its_lease_lives_nor_before_it_is_reclaimed(jobs, session, clock):
    jobs.put()
    first = jobs.running(lease=5 * MINUTE)
    assert session().claim() == []
    clock.advance(minutes=5)
    assert jobs.claim() == []
    assert jobs.reclaim_expired()[0].reclaim_expired == 1
    clock.advance(minutes=1)
    again = jobs.claim_one(worker="another")
    assert (again.job_id, again.attempt) == (first.job_id, 2)
    assert again.lease_token > first.lease_token


def test_only_the_given_types_of_the_given_queue(jobs):
    jobs.put()
    jobs.put("other")
    a, b, c = (jobs.add(job_type=job_type) for job_type in "abc")
    jobs.add("other", "a")
    assert jobs.claim_ids(job_types=["c", "a", "unknown"]) == [a, c]
    assert jobs.claim_ids(job_types=[]) == []
    assert jobs.claim_ids() == [b]


@pytest.mark.parametrize("batch_size", [None, 0, -1, 10_001, 2**31 - 1])
def test_a_batch_of_impossible_size_is_refused(jobs, batch_size):
    jobs.put()
    with refused("22023"):
        jobs.claim(batch_size=batch_size)


@pytest.mark.parametrize("lease", ["0", "-1 s", "0.5 s", "31 days"])
def test_a_lease_of_impossible_length_is_refused(jobs, lease):
    jobs.put()
    with refused("22023"):
        jobs.claim(lease=lease)


def test_a_batch_of_ten_thousand(jobs):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 10_100)
    assert len(set(jobs.claim_ids(batch_size=10_000))) == 10_000


def test_tokens_grow_over_every_life_of_a_job(jobs, clock):
    jobs.put(max_attempts=2)
    job_id = jobs.add()
    tokens, keys = [], []
    ends = ["release", "snooze", "fail", "dead", "redrive", "lost", "release"]
    for end in ends:
        if end == "redrive":
            jobs.redrive(queue="q", job_id=job_id)
            continue
        clock.advance(hours=1)
        claimed = jobs.claim_one(lease=MINUTE)
        tokens.append(claimed.lease_token)
        keys.append(claimed.attempt_key)
        if end == "release":
            jobs.release(**held(claimed))
        elif end == "snooze":
            jobs.snooze(**held(claimed), until=clock.now() + MINUTE)
        elif end == "lost":
            clock.advance(minutes=2)
            jobs.reclaim_expired(queue="q")
        else:
            jobs.fail_with_backoff(**held(claimed), error="x")
    assert tokens == sorted(set(tokens))
    assert len({token >> 20 for token in tokens}) == len(tokens)
    assert len(set(keys)) == len(keys)
    assert jobs.sql("select attempt_key from almanac.attempt_log group by 1 having count(*) > 1") == []


def test_the_low_bits_of_tokens_are_random(jobs):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 200)
    low = [claimed.lease_token & 0xFFFFF for claimed in jobs.claim(batch_size=200)]
    assert len(set(low)) > 190
    assert max(low) > 900_000
    assert min(low) < 100_000


def test_idempotency_key_stays_and_attempt_key_changes(jobs, clock):
    jobs.put(max_attempts=2)
    job_id = jobs.add()
    claims = []
    for attempt in (1, 2, 1):
        claims += jobs.claim()
        assert claims[-1].attempt == attempt
        if len(claims) < 3:
            jobs.fail_with_backoff(**held(claims[-1]), error="x")
            clock.advance(hours=1)
        if len(claims) == 2:
            jobs.redrive(queue="q", job_id=job_id)
    made = int(claims[0].created_at.timestamp()) * 1_000_000 + claims[0].created_at.microsecond
    prefix = jobs.one("select key_prefix from almanac.queue where queue = 'q'")
    assert re.fullmatch("q-[0-9a-f]{12}", prefix)
    assert {claimed.idempotency_key for claimed in claims} == {f"{prefix}:{job_id}:{made:x}"}
    assert len({claimed.attempt_key for claimed in claims}) == 3
    assert jobs.find(job_id).idempotency_key == claims[0].idempotency_key


# ── max_running ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_more_run_than_the_fleet_may(jobs, session, clock):
    jobs.put(max_running=3, max_attempts=1)
    ids = [jobs.add() for _ in range(8)]
    claimed = jobs.claim(batch_size=2) + session().claim(batch_size=2)
    assert [c.job_id for c in claimed] == ids[:3]
    assert jobs.claim() == []
    jobs.complete(**held(claimed[0]))
    assert jobs.claim_ids() == ids[3:4]
    jobs.fail_with_backoff(**held(claimed[1]), error="x")
    jobs.cancel(queue="q", job_id=claimed[2].job_id)
    jobs.release(**held(claimed[2]))
    assert jobs.claim_ids() == ids[4:6]
    clock.advance(hours=1)
    assert jobs.claim() == []
    jobs.reclaim_expired(queue="q")
    assert jobs.claim_ids() == ids[6:]


def test_a_limit_that_is_lowered_below_what_runs_waits_for_it(jobs):
    jobs.put()
    running = [jobs.running() for _ in range(3)]
    waiting = jobs.add()
    jobs.put(max_running=2)
    for claimed in running[:2]:
        assert jobs.claim() == []
        jobs.complete(**held(claimed))
    assert jobs.claim_ids() == [waiting]
    jobs.put(unset=["max_running"])
    assert len([jobs.running() for _ in range(3)]) == 3


# ── rate_limit ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_bucket_lets_through_so_many_per_interval(jobs, clock):
    jobs.put(rate_limit=10, rate_interval="1 minute")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 100)
    assert len(jobs.claim(batch_size=100)) == 10
    assert jobs.claim() == []
    clock.advance(seconds=5.9)
    assert jobs.claim() == []
    clock.advance(seconds=0.1)
    assert len(jobs.claim(batch_size=100)) == 1
    clock.advance(seconds=33)
    assert len(jobs.claim(batch_size=3)) == 3
    assert len(jobs.claim(batch_size=100)) == 2
    clock.advance(seconds=3)
    assert len(jobs.claim(batch_size=100)) == 1
    clock.advance(days=3)
    assert len(jobs.claim(batch_size=100)) == 10


def test_over_a_long_time_the_rate_is_kept_however_often_one_asks(jobs, clock):
    jobs.put(rate_limit=7, rate_interval="10 seconds")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 300)
    seconds, claimed = 0.0, 0
    for step in random.Random(2).choices([0.05, 0.3, 1.1, 2.0], k=150):
        clock.advance(seconds=step)
        seconds += step
        claimed += len(jobs.claim(batch_size=5))
        assert claimed <= 7 + seconds * 0.7 + 1e-6
    assert claimed >= seconds * 0.7 - 1


def test_a_clock_that_was_set_back_takes_no_tokens_away(jobs, clock):
    jobs.put(rate_limit=10, rate_interval="1 minute")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 100)
    assert len(jobs.claim(batch_size=4)) == 4
    jobs.sql("update almanac.job set due_at = due_at - interval '1 day'")
    clock.advance(hours=-1)
    assert len(jobs.claim(batch_size=100)) == 6


def test_a_bucket_that_was_emptied_before_the_clock_was_set_back_fills_again(jobs, clock):
    jobs.put(rate_limit=10, rate_interval="1 minute")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 100)
    assert len(jobs.claim(batch_size=100)) == 10
    jobs.sql("update almanac.job set due_at = due_at - interval '1 day'")
    clock.advance(hours=-1)
    assert jobs.claim(batch_size=100) == []
    clock.advance(seconds=30)
    assert len(jobs.claim(batch_size=100)) == 5


def test_a_rate_that_is_changed_or_lifted_holds_at_once(jobs):
    jobs.put(rate_limit=1, rate_interval="1 hour")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 100)
    assert len(jobs.claim(batch_size=10)) == 1
    jobs.put(rate_limit=3)
    assert len(jobs.claim(batch_size=10)) == 3
    jobs.put(unset=["rate_limit"])
    assert len(jobs.claim(batch_size=10)) == 10


# ── concurrency_key ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_busy_key_is_passed_over_without_holding_up_those_behind(jobs):
    jobs.put()
    a1, a2, b1, none, a3, b2 = (jobs.add(concurrency_key=key) for key in ("a", "a", "b", None, "a", "b"))
    claimed = jobs.claim(batch_size=10)
    assert [c.job_id for c in claimed] == [a1, b1, none]
    assert jobs.claim() == []
    jobs.complete(**held(claimed[0]))
    assert jobs.claim_ids(batch_size=10) == [a2]
    jobs.complete(**held(claimed[1]))
    assert jobs.claim_ids(batch_size=10) == [b2]
    assert jobs.parked() == [a3]


def test_a_page_full_of_busy_keys_does_not_hide_a_free_one(jobs):
    jobs.put()
    jobs.running(concurrency_key="busy")
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 500, concurrency_keys=["busy"] * 500)
    free = jobs.add(concurrency_key="free")
    assert jobs.claim_ids(batch_size=1) == [free]


def end_complete(jobs, clock, claimed):
    jobs.complete(**held(claimed))


def end_complete_many(jobs, clock, claimed):
    jobs.complete_many(queue="q", job_ids=[claimed.job_id], lease_tokens=[claimed.lease_token])


def end_fail(jobs, clock, claimed):
    jobs.fail_with_backoff(**held(claimed), error="x")


def end_fail_for_good(jobs, clock, claimed):
    jobs.fail_with_backoff(**held(claimed), error="x", permanent=True)


def end_release(jobs, clock, claimed):
    jobs.release(**held(claimed))


def end_snooze(jobs, clock, claimed):
    jobs.snooze(**held(claimed), until=clock.now() + timedelta(hours=5))


def end_lost(jobs, clock, claimed):
    jobs.sql("update almanac.job set lease_expires_at = almanac.clock() where id = %s", claimed.job_id)
    jobs.reclaim_expired(queue="q")


def end_cancel(jobs, clock, claimed):
    jobs.cancel(queue="q", job_id=claimed.job_id)
    jobs.release(**held(claimed))


def end_cancel_lost(jobs, clock, claimed):
    jobs.cancel(queue="q", job_id=claimed.job_id)
    end_lost(jobs, clock, claimed)


ENDS = [
    end_complete, end_complete_many, end_fail, end_fail_for_good, end_release, end_snooze, end_lost, end_cancel,
    end_cancel_lost,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("per_key", [1, 2])
def test_however_a_job_lets_go_of_its_key_the_next_one_gets_it(jobs, clock, end, per_key):
    jobs.put(max_running_per_key=per_key)
    ids = [jobs.add(concurrency_key="k") for _ in range(per_key + 3)]
    claimed = jobs.claim(batch_size=10)
    assert [c.job_id for c in claimed] == ids[:per_key]
    assert jobs.parked() == ids[per_key:]
    end(jobs, clock, claimed[0])
    expected = claimed[0].job_id if end is end_release else ids[per_key]
    assert jobs.claim_ids(batch_size=10) == [expected]
    assert jobs.claim(batch_size=10) == []
    assert jobs.one("select count(*) from almanac.job where state = 'running'") == per_key


@pytest.mark.parametrize("parked", [True, False], ids=["parked", "brought back"])
def test_cancelling_one_that_waits_for_a_key_leaves_the_key_to_the_next(jobs, clock, parked):
    jobs.put()
    _, second, third = (jobs.add(concurrency_key="k") for _ in range(3))
    claimed = jobs.claim(batch_size=10)
    if parked:
        jobs.cancel(queue="q", job_id=second)
        assert jobs.claim(batch_size=10) == []
        jobs.complete(**held(claimed[0]))
    else:
        jobs.complete(**held(claimed[0]))
        jobs.cancel(queue="q", job_id=second)
    assert jobs.claim_ids(batch_size=10) == [third]


def test_a_redriven_job_waits_for_its_key_like_any_other(jobs):
    jobs.put()
    dead = jobs.dead(concurrency_key="k")
    holder = jobs.running(concurrency_key="k")
    jobs.redrive(queue="q", job_id=dead.job_id)
    assert jobs.claim() == []
    assert jobs.parked() == [dead.job_id]
    jobs.complete(**held(holder))
    assert jobs.claim_ids() == [dead.job_id]


def test_the_place_goes_to_the_highest_priority_then_the_oldest(jobs, clock):
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    clock.advance(minutes=1)
    late = jobs.add(concurrency_key="k", priority=1)
    early = jobs.add(concurrency_key="k", priority=1, due_at=clock.now() - MINUTE)
    low = jobs.add(concurrency_key="k", due_at=clock.now() - 2 * MINUTE)
    assert jobs.claim(batch_size=10) == []
    order = []
    while holder:
        jobs.complete(**held(holder))
        claimed = jobs.claim(batch_size=10)
        order += [c.job_id for c in claimed]
        holder = claimed[0] if claimed else None
    assert order == [early, late, low]


def test_a_key_whose_next_job_nobody_works_does_not_hold_up_other_types(jobs):
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    nobody, somebody = (jobs.add(job_type=t, concurrency_key="k") for t in ("nobody works", "somebody works"))
    assert jobs.claim(batch_size=10) == []
    assert jobs.parked() == [nobody, somebody]
    jobs.complete(**held(holder))
    assert jobs.claim_ids(job_types=["somebody works"]) == [somebody]
    assert jobs.claim(batch_size=10) == []


def test_a_released_job_that_nobody_works_does_not_hold_up_other_types(jobs):
    jobs.put()
    holder = jobs.running(job_type="nobody works", concurrency_key="k")
    waiting = jobs.add(job_type="somebody works", concurrency_key="k")
    assert jobs.claim(batch_size=10) == []
    jobs.release(**held(holder))
    assert jobs.claim_ids(job_types=["somebody works"]) == [waiting]


def test_more_per_key_sets_parked_jobs_free_and_fewer_holds_back(jobs):
    jobs.put()
    ids = [jobs.add(concurrency_key="k") for _ in range(6)]
    assert jobs.claim_ids(batch_size=10) == ids[:1]
    jobs.put(max_running_per_key=3)
    claimed = jobs.claim(batch_size=10)
    assert [c.job_id for c in claimed] == ids[1:3]
    jobs.put(max_running_per_key=2)
    jobs.complete(**held(claimed[0]))
    assert jobs.claim(batch_size=10) == []
    jobs.complete(**held(claimed[1]))
    assert jobs.claim_ids(batch_size=10) == [ids[3]]


def test_a_batch_that_ends_frees_as_many_places_of_a_key_as_it_had(jobs):
    jobs.put(max_running_per_key=2)
    ids = [jobs.add(concurrency_key="k") for _ in range(5)]
    claimed = jobs.claim(batch_size=10)
    assert [c.job_id for c in claimed] == ids[:2]
    jobs.complete_many(queue="q", job_ids=ids[:2], lease_tokens=[c.lease_token for c in claimed])
    assert jobs.claim_ids(batch_size=10) == ids[2:4]


def test_keys_of_queues_do_not_meet(jobs):
    jobs.put()
    jobs.put("other")
    jobs.add(concurrency_key="k")
    jobs.add("other", concurrency_key="k")
    assert len(jobs.claim()) == len(jobs.claim("other")) == 1


def test_all_limits_at_once(jobs, clock):
    jobs.put(max_running=4, rate_limit=3, rate_interval="1 minute", max_running_per_key=2)
    a = [jobs.add(concurrency_key="a") for _ in range(4)]
    free = [jobs.add() for _ in range(4)]
    assert jobs.claim_ids() == [*a[:2], free[0]]
    assert jobs.claim() == []
    clock.advance(minutes=1)
    assert jobs.claim_ids() == [free[1]]
    assert jobs.claim() == []


def test_a_queue_without_keys_goes_on_when_the_first_key_appears(jobs):
    jobs.put()
    plain = [jobs.add() for _ in range(3)]
    assert jobs.claim_ids(batch_size=1) == plain[:1]
    keyed = [jobs.add(concurrency_key="k") for _ in range(2)]
    assert jobs.claim_ids(batch_size=10) == [*plain[1:], keyed[0]]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_limits_are_refused_where_they_cannot_be_kept(jobs, level):
    jobs.put(max_running=1)
    jobs.add()
    jobs.sql(f"begin isolation level {level}")
    with refused("25000"):
        jobs.claim()
    jobs.sql("rollback")
    assert len(jobs.claim()) == 1


# ── what a session may write into its own settings ──────────────────────────────────────────────────────────────────

RUBBISH = [
    "garbage",
    "(,,,,,,,)",
    "(q,,,,,,,)",
    "(q,{0},,,1,2026-01-01,00:00:00,f)",
    "(q,{0},{},{},1,2026-01-01,00:00:00,f)",
    '(q,{0},{NULL},{NULL},1,"2026-01-01 00:00:00+00",00:00:00,f)',
    '(q,{0},{infinity},{0},1,"2026-01-01 00:00:00+00","10 years",f)',
    '(q,{0},{-infinity},{0},0,infinity,"-1 days",f)',
]


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_a_memory_that_is_none_does_not_keep_a_job_from_a_claim(jobs, clock, rubbish):
    jobs.put()
    with littered(jobs):
        (name,) = jobs.sql("select name from pg_settings where name like 'almanac.claimed_%%'") or [None]
        name = name or jobs.sql("select 'almanac.claimed_' || to_hex(hashtextextended('q', 0)) as name")[0]
        assert jobs.one("select current_setting(%s)", name.name), "the session remembers"
        job_id = jobs.add()
        jobs.sql("select set_config(%s, %s, false)", name.name, rubbish)
        clock.advance(seconds=61)  # as long as a look back may be put off
        assert jobs.claim_ids() == [job_id]


def test_a_claim_in_a_queue_with_limits_that_finds_nothing_takes_no_turn(jobs, session, clock):
    jobs.put(max_running=5)
    other = session()
    other.sql("begin")
    other.sql("select from almanac.queue_turn where queue = 'q' for update")
    jobs.sql("begin")
    jobs.sql("set local lock_timeout = '2s'")
    assert jobs.claim() == []
    assert jobs.one("select pg_current_xact_id_if_assigned()") is None, "and writes nothing"
    jobs.sql("commit")
    other.sql("rollback")
