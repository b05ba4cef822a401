"""Two or more sessions, interleaved statement by statement. What waits is run in a thread (see tests.jobs.Blocked)."""

import contextlib
import random
import threading
import time
from collections import Counter
from datetime import timedelta

import psycopg
import pytest

from tests.jobs import Blocked, Jobs, held, littered, refused

MINUTE = timedelta(minutes=1)
ENDINGS = ["commit", "rollback"]


@pytest.fixture
def sessions(session):
    """Two sessions beside `jobs`, which watches."""
    return session(), session()


# ── dropping a queue ────────────────────────────────────────────────────────────────────────────────────────────────

MAKERS = {
    "enqueue": lambda s: s.enqueue(queue="q", job_type="t"),
    "enqueue, first of a priority": lambda s: s.enqueue(queue="q", job_type="t", priority=3),
    "enqueue, keyed": lambda s: s.enqueue(queue="q", job_type="t", dedup_key="k"),
    "enqueue_many": lambda s: s.enqueue_many(queue="q", job_type="t", payloads=[{}, {}]),
    "redrive": lambda s: s.redrive(queue="q"),
    "put_schedule": lambda s: s.put_schedule(queue="q", name="s", cron="0 9 * * *", job_type="t"),
    "put_job_type": lambda s: s.put_job_type(queue="q", job_type="t", max_attempts=3),
}


OWNED = ("job", "schedule", "job_type")


def orphans(jobs):
    return jobs.one(
        """
        select count(*) from (table owned) o where o.queue not in (select queue from almanac.queue)
    """.replace("table owned", " union all ".join(f"select queue from almanac.{t}" for t in OWNED))
    )


@pytest.mark.parametrize("make", MAKERS)
def test_a_queue_is_not_dropped_while_somebody_puts_something_into_it(jobs, sessions, make):
    a, b = sessions
    jobs.put()
    jobs.dead()
    a.sql("begin")
    MAKERS[make](a)
    with refused("PA013"):
        b.drop_queue(queue="q")
    a.sql("rollback")
    b.drop_queue(queue="q")
    assert orphans(jobs) == 0


def between_lock_and_end(dropper):
    """Where drop_queue is while others wait for it: the table of queues is its own, and the row is gone."""
    dropper.sql("begin")
    dropper.sql("lock table almanac.queue in access exclusive mode")
    dropper.sql("delete from almanac.queue where queue = 'q'")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", MAKERS)
def test_whoever_puts_something_into_a_queue_that_is_being_dropped_finds_it_gone(jobs, sessions, make, ending):
    a, b = sessions
    jobs.put()
    jobs.dead()
    between_lock_and_end(a)
    with Blocked(jobs.conn, b.conn, lambda: MAKERS[make](b)) as waiting:
        a.sql(ending)
    if ending == "commit":
        with refused("PA001"):
            waiting.value()
    else:
        waiting.value()
    assert orphans(jobs) == 0


@pytest.mark.parametrize("make", MAKERS)
def test_whoever_finds_a_queue_made_again_after_waiting_for_its_drop_holds_the_new_one(jobs, sessions, make):
    a, b = sessions
    jobs.put()
    jobs.dead()
    between_lock_and_end(a)
    b.sql("begin")
    with Blocked(jobs.conn, b.conn, lambda: MAKERS[make](b)) as waiting:
        a.put()
        a.sql("commit")
    waiting.value()
    with refused("PA013"):
        jobs.drop_queue(queue="q")
    b.sql("commit")
    assert orphans(jobs) == 0


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("make", MAKERS)
def test_whoever_still_sees_a_queue_that_was_dropped_puts_nothing_into_it(jobs, sessions, make, level):
    a, b = sessions
    jobs.put()
    jobs.dead()
    b.sql(f"begin isolation level {level}")
    b.sql("select from almanac.audit")  # takes the snapshot, and no lock on the table of queues
    a.drop_queue(queue="q")
    with refused("40001"):
        MAKERS[make](b)
    b.sql("rollback")
    assert orphans(jobs) == 0


def test_nobody_waits_for_long_behind_a_drop_that_is_left_open(jobs, session):
    jobs.put()
    left_open = session()
    left_open.sql("begin")
    left_open.drop_queue(queue="q")
    jobs.sql("set lock_timeout = '60s'")
    jobs.add()
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        left_open.sql("select 1")


def test_dropping_a_queue_waits_only_briefly_and_nobody_waits_after_it(jobs, sessions):
    a, b = sessions
    jobs.put()
    jobs.put("other")
    a.sql("begin")
    a.add("other")
    with refused("PA013") as error:
        b.drop_queue(queue="q")
    assert "has not ended yet" in error.value.diag.message_detail
    b.sql("set lock_timeout = '10s'")
    b.add()
    a.sql("commit")


def test_put_queue_that_waits_for_a_drop_makes_the_queue_anew(jobs, sessions):
    a, b = sessions
    jobs.put(max_attempts=9)
    between_lock_and_end(a)
    with Blocked(jobs.conn, b.conn, lambda: b.put_queue(queue="q", max_running=2)) as waiting:
        a.sql("commit")
    (made,) = waiting.value()
    assert (made.queue, made.max_attempts, made.max_running) == ("q", 5, 2)
    assert jobs.one("select count(*) from almanac.queue where queue = 'q'") == 1


def test_many_enqueue_while_a_queue_comes_and_goes(jobs, connect):
    """Whatever the interleaving: no job without its queue."""
    stop = threading.Event()
    outcomes: Counter[str | None] = Counter()

    def produce(n):
        mine = Jobs(connect())
        while not stop.is_set():
            try:
                priority = random.choice((0, n))
                if n % 2:
                    mine.enqueue_many(queue="q", job_type="t", payloads=[{}], priority=priority)
                else:
                    mine.add(priority=priority)
                outcomes["made"] += 1
            except psycopg.Error as error:
                outcomes[error.sqlstate] += 1

    threads = [threading.Thread(target=produce, args=[n]) for n in range(4)]
    drops: Counter[str | None] = Counter()
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (drops["done"] < 15 or not outcomes["PA001"] or not outcomes["made"]):
        jobs.put()
        jobs.sql("delete from almanac.job")
        try:
            jobs.drop_queue(queue="q")
            drops["done"] += 1
        except psycopg.Error as error:
            drops[error.sqlstate] += 1
        drops["orphans"] += orphans(jobs)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert orphans(jobs) == 0
    assert set(outcomes) == {"made", "PA001"}
    assert drops["orphans"] == 0
    assert drops["done"] >= 15
    assert set(drops) <= {"done", "orphans", "PA013"}


# ── claim / claim ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ending", ENDINGS)
def test_claim_claim_passes_over_what_another_claims(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    ids = [jobs.add() for _ in range(4)]
    a.sql("begin")
    assert a.claim_ids(batch_size=2) == ids[:2]
    assert b.claim_ids(batch_size=3) == ids[2:]
    a.sql(ending)
    clock.advance(seconds=2)
    assert b.claim_ids(batch_size=9) == ([] if ending == "commit" else ids[:2])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("limit", [{"max_running": 2}, {"rate_limit": 2, "rate_interval": "1 hour"}], ids=str)
def test_claim_claim_on_the_last_place_takes_turns(jobs, sessions, ending, limit):
    a, b = sessions
    jobs.put(**limit)
    ids = [jobs.add() for _ in range(4)]
    a.sql("begin")
    assert a.claim_ids(batch_size=2) == ids[:2]
    with Blocked(jobs.conn, b.conn, lambda: b.claim_ids(batch_size=4)) as waiting:
        a.sql(ending)
    assert waiting.value() == ([] if ending == "commit" else ids[:2])


@pytest.mark.parametrize("ending", ENDINGS)
def test_claim_claim_on_one_key(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    first, second = (jobs.add(concurrency_key="k") for _ in range(2))
    a.sql("begin")
    assert a.claim_ids(batch_size=5) == [first]
    with Blocked(jobs.conn, b.conn, lambda: b.claim_ids(batch_size=5)) as waiting:
        a.sql(ending)
    assert waiting.value() == ([] if ending == "commit" else [first])
    assert jobs.parked() == [second]


@pytest.mark.parametrize("batch_size", [1, 5])
def test_claim_release_while_another_claim_looks(jobs, own_database, sessions, batch_size):
    """Claimed and given back between the moment another claim sees the job and the moment it locks it: that claim has
    it, rather than keep it from everybody for as long as its transaction lasts."""
    a, b = sessions
    jobs.put()
    job_id = jobs.add()
    # Waits where the statement that claims has its snapshot and has locked nothing yet.
    looks = "from unnest(v_queue.priorities) as level (priority)\n"
    source = jobs.one("select pg_get_functiondef('almanac.claim_due'::regproc)")
    assert source.count(looks) == 1
    jobs.sql("""
        create function almanac.wait_and_unnest(numbers smallint[]) returns setof smallint language plpgsql as $$
        begin
            perform pg_advisory_xact_lock_shared(1);
            return query select unnest(numbers);
        end $$""")
    waits = source.replace(looks, looks.replace("unnest", "almanac.wait_and_unnest"))
    jobs.sql(waits.replace("claim_due", "claim_late"))
    jobs.sql("select pg_advisory_lock(1)")
    a.sql("begin")
    with Blocked(b.conn, a.conn, lambda: a.claim_late(queue="q", worker="w", batch_size=batch_size)) as waiting:
        b.release(**held(b.claim_one(worker="b")))
        jobs.sql("select pg_advisory_unlock(1)")
    assert [claimed.job_id for claimed in waiting.value()] == [job_id]
    a.sql("commit")
    assert jobs.row(job_id).leased_by == "w"


def test_fifty_sessions_on_one_job_make_one_claim(jobs, connect):
    jobs.put()
    jobs.add()
    callers = [Jobs(connect()) for _ in range(50)]
    barrier = threading.Barrier(50)
    claimed = []

    def call(caller):
        barrier.wait()
        claimed.extend(caller.claim())

    threads = [threading.Thread(target=call, args=[caller]) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 1


# ── claim / cancel ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ending", ENDINGS)
def test_cancel_waits_for_a_claim_and_then_sees_what_became_of_it(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    job_id = jobs.add()
    a.sql("begin")
    claimed = a.claim_one()
    with Blocked(jobs.conn, b.conn, lambda: b.cancel(queue="q", job_id=job_id)) as waiting:
        a.sql(ending)
    if ending == "commit":
        assert waiting.value()[0].cancel == "running"
        assert a.extend_lease(**held(claimed))[0].cancel_requested_at is not None
        assert a.release(**held(claimed))[0].state == "cancelled"
    else:
        assert waiting.value()[0].cancel == "cancelled"
    assert jobs.state(job_id) == "cancelled"


@pytest.mark.parametrize("ending", ENDINGS)
def test_claim_passes_over_what_is_being_cancelled(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    job_id = jobs.add()
    a.sql("begin")
    a.cancel(queue="q", job_id=job_id)
    assert b.claim() == []
    a.sql(ending)
    assert b.claim_ids() == ([] if ending == "commit" else [job_id])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("call", ["complete", "extend_lease", "release"])
def test_the_holder_waits_for_a_cancel_and_then_goes_on(jobs, sessions, ending, call):
    a, b = sessions
    jobs.put()
    job = jobs.running()
    a.sql("begin")
    a.cancel(queue="q", job_id=job.job_id)
    with Blocked(jobs.conn, b.conn, lambda: getattr(b, call)(**held(job))) as waiting:
        a.sql(ending)
    (answer,) = waiting.value()
    if call == "complete":
        assert jobs.state(job.job_id) == "completed"
    elif call == "extend_lease":
        assert (answer.cancel_requested_at is not None) == (ending == "commit")
    else:
        assert answer.state == ("cancelled" if ending == "commit" else "scheduled")


@pytest.mark.parametrize("ending", ENDINGS)
def test_complete_and_cancel(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running()
    a.sql("begin")
    a.complete(**held(job))
    with Blocked(jobs.conn, b.conn, lambda: b.cancel(queue="q", job_id=job.job_id)) as waiting:
        a.sql(ending)
    if ending == "commit":
        with refused("PA003"):
            waiting.value()
        assert jobs.state(job.job_id) == "completed"
    else:
        assert waiting.value()[0].cancel == "running"


# ── the end of a lease ──────────────────────────────────────────────────────────────────────────────────────────────


def test_complete_after_expiry_is_refused_before_and_after_the_job_is_reclaimed_and_claimed(jobs, sessions, clock):
    a, b = sessions
    jobs.put()
    job = a.running(lease=MINUTE)
    clock.advance(minutes=1)
    with refused("PA002"):
        a.complete(**held(job))
    assert b.reclaim_expired()[0].reclaim_expired == 1
    with refused("PA002"):
        a.complete(**held(job))
    clock.advance(minutes=1)
    second = b.claim_one(worker="b")
    with refused("PA002"):
        a.complete(**held(job))
    b.complete(**held(second))
    with refused("PA002"):
        a.complete(**held(job))
    assert jobs.attempts(job.job_id) == [(1, "lost"), (2, "completed")]


@pytest.mark.parametrize("call", ["fail_with_backoff", "release"])
def test_a_lease_that_ends_while_its_holder_waits_for_the_row_has_ended(jobs, sessions, clock, call):
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    a.sql("begin")
    a.cancel(queue="q", job_id=job.job_id)
    arguments = {"error": "x"} if call == "fail_with_backoff" else {}
    with Blocked(jobs.conn, b.conn, lambda: getattr(b, call)(**held(job), **arguments)) as waiting:
        clock.advance(minutes=2)
        a.sql("rollback")
    with refused("PA002"):
        waiting.value()
    assert jobs.state(job.job_id) == "running"


@pytest.mark.parametrize("ending", ENDINGS)
def test_reclaim_passes_over_what_is_being_completed(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    a.sql("begin")
    a.complete(**held(job))
    clock.advance(minutes=2)
    assert b.reclaim_expired()[0].reclaim_expired == 0
    a.sql(ending)
    assert b.reclaim_expired()[0].reclaim_expired == (0 if ending == "commit" else 1)
    assert jobs.state(job.job_id) == ("completed" if ending == "commit" else "retrying")
    assert len(jobs.attempts(job.job_id)) == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_complete_during_a_reclaim_is_refused_whatever_becomes_of_it(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    clock.advance(minutes=2)
    a.sql("begin")
    assert a.reclaim_expired()[0].reclaim_expired == 1
    b.sql("set statement_timeout = '10s'")
    with refused("PA002"):
        b.complete(**held(job))
    assert b.complete_many(queue="q", job_ids=[job.job_id], lease_tokens=[job.lease_token]) == []
    a.sql(ending)
    assert jobs.state(job.job_id) == ("retrying" if ending == "commit" else "running")


@pytest.mark.parametrize("ending", ENDINGS)
def test_complete_that_began_in_time_and_a_reclaim_that_began_late_end_it_once(jobs, sessions, clock, ending):
    """The clock is set back for the completing session, as if its statement had begun before the lease ended."""
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    clock.advance(minutes=2)
    a.sql("begin")
    a.reclaim_expired()
    clock.advance(minutes=-2)
    with Blocked(jobs.conn, b.conn, lambda: b.complete(**held(job))) as waiting:
        a.sql(ending)
    if ending == "commit":
        with refused("PA002"):
            waiting.value()
        assert jobs.attempts(job.job_id) == [(1, "lost")]
    else:
        waiting.value()
        assert jobs.attempts(job.job_id) == [(1, "completed")]


@pytest.mark.parametrize("ending", ENDINGS)
def test_reclaim_passes_over_a_lease_that_is_being_extended(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    a.sql("begin")
    a.extend_lease(**held(job), lease=10 * MINUTE)
    clock.advance(minutes=2)
    assert b.reclaim_expired()[0].reclaim_expired == 0
    a.sql(ending)
    assert b.reclaim_expired()[0].reclaim_expired == (0 if ending == "commit" else 1)
    if ending == "commit":
        a.complete(**held(job))
    else:
        with refused("PA002"):
            a.extend_lease(**held(job))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("act", ["cancel", "complete"])
def test_a_job_that_somebody_holds_does_not_cost_the_leases_of_the_others(jobs, sessions, clock, act, ending):
    a, b = sessions
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 3)
    claimed = jobs.claim(batch_size=3, lease=MINUTE)
    a.sql("begin")
    if act == "cancel":
        a.cancel(queue="q", job_id=claimed[1].job_id)
    else:
        a.complete(**held(claimed[1]))
    b.sql("set statement_timeout = '5s'")

    def extended():
        leases = b.extend_leases(
            queue="q",
            job_ids=[job.job_id for job in claimed],
            lease_tokens=[job.lease_token for job in claimed],
            lease=10 * MINUTE,
        )
        return {lease.job_id: lease.lease_expires_at - clock.now() for lease in leases}

    clock.freeze(claimed[0].lease_expires_at - MINUTE)
    first, second, third = (job.job_id for job in claimed)
    assert extended() == {first: 10 * MINUTE, second: MINUTE, third: 10 * MINUTE}
    a.sql(ending)
    gone = act == "complete" and ending == "commit"
    assert extended().get(second) == (None if gone else 10 * MINUTE)


@pytest.mark.parametrize("act", ["claim_due", "claim_due within limits", "extend_lease"])
def test_a_lease_counts_from_when_it_is_had_not_from_when_it_was_asked_for(jobs, sessions, clock, act):
    """Somebody builds an index, or else keeps everybody from writing for longer than the lease lasts."""
    a, b = sessions
    jobs.put(max_running=7 if "limits" in act else None)
    job_id = jobs.add()
    tokens = [job.lease_token for job in (jobs.claim(lease=MINUTE) if act == "extend_lease" else [])]
    a.sql("begin")
    a.sql("lock table almanac.job in share mode")

    def ask():
        if act == "extend_lease":
            return b.extend_leases(queue="q", job_ids=[job_id], lease_tokens=tokens, lease=MINUTE)
        return b.claim(lease=MINUTE)

    with Blocked(jobs.conn, b.conn, ask) as waiting:
        clock.advance(minutes=2)
        a.sql("commit")
    (lease,) = waiting.value()
    assert lease.lease_expires_at == clock.now() + MINUTE
    jobs.complete(**held(lease))


@pytest.mark.parametrize("ending", ENDINGS)
def test_extend_that_began_in_time_waits_for_a_reclaim_and_is_then_refused(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running(lease=MINUTE)
    clock.advance(minutes=2)
    a.sql("begin")
    a.reclaim_expired()
    clock.advance(minutes=-2)
    with Blocked(jobs.conn, b.conn, lambda: b.extend_lease(**held(job))) as waiting:
        a.sql(ending)
    if ending == "commit":
        with refused("PA002"):
            waiting.value()
        assert jobs.state(job.job_id) == "retrying"
    else:
        assert waiting.value()[0].job_id == job.job_id


@pytest.mark.parametrize("first", ["complete", "fail", "release", "reclaim", "cancel"])
@pytest.mark.parametrize("second", ["complete", "fail", "release", "reclaim", "cancel"])
def test_of_two_that_end_one_attempt_exactly_one_does(jobs, sessions, clock, first, second):
    a, b = sessions
    jobs.put(max_attempts=1)
    job = jobs.running(lease=MINUTE)
    jobs.cancel(queue="q", job_id=job.job_id)

    def end(caller, how):
        if how == "complete":
            return caller.complete(**held(job))
        if how == "fail":
            return caller.fail_with_backoff(**held(job), error="x")
        if how == "release":
            return caller.release(**held(job))
        if how == "cancel":
            return caller.cancel(queue="q", job_id=job.job_id)
        return caller.reclaim_expired()

    if first == "reclaim":
        clock.advance(minutes=2)
    a.sql("begin")
    end(a, first)
    if first == "reclaim":
        clock.advance(minutes=-2)
    if second == "reclaim":
        clock.advance(minutes=2)
        assert end(b, second)[0].reclaim_expired == 0
        a.sql("commit")
    else:
        with Blocked(jobs.conn, b.conn, lambda: end(b, second)) as waiting:
            a.sql("commit")
        if first == "cancel" or (first == second == "complete") or (second == "cancel" and first != "complete"):
            waiting.value()
        else:
            with refused("PA003" if second == "cancel" else "PA002"):
                waiting.value()
    ended = [outcome for _, outcome in jobs.attempts(job.job_id) if outcome is not None]
    assert len(ended) <= 1
    assert jobs.one("select count(*) from almanac.job_history") == len(ended)
    assert len(ended) + jobs.one("select count(*) from almanac.job") == 1


# ── enqueue / enqueue ───────────────────────────────────────────────────────────────────────────────────────────────


def enqueue(caller, **arguments):
    made = caller.enqueue(queue="q", job_type="t", dedup_key="k", **arguments)[0]
    return made.job_id, made.created


@pytest.mark.parametrize("window", [None, MINUTE], ids=["live", "window"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_second_enqueue_waits_for_the_first(jobs, sessions, window, ending):
    a, b = sessions
    jobs.put()
    a.sql("begin")
    first, created = enqueue(a, dedup_for=window)
    assert created
    with Blocked(jobs.conn, b.conn, lambda: enqueue(b, dedup_for=window)) as waiting:
        a.sql(ending)
    second, created = waiting.value()
    assert created == (ending == "rollback")
    assert (second == first) == (ending == "commit")
    assert jobs.one("select count(*) from almanac.job") == 1
    assert jobs.one("select job_id from almanac.dedup") == second


@pytest.mark.parametrize("ending", ENDINGS)
def test_of_two_that_take_over_a_window_that_has_passed_one_gets_it(jobs, sessions, clock, ending):
    a, b = sessions
    jobs.put()
    enqueue(jobs, dedup_for=MINUTE)
    clock.advance(minutes=2)
    a.sql("begin")
    first, created = enqueue(a)
    assert created
    with Blocked(jobs.conn, b.conn, lambda: enqueue(b)) as waiting:
        a.sql(ending)
    second, created = waiting.value()
    assert created == (ending == "rollback")
    assert (second == first) == (ending == "commit")
    assert jobs.one("select count(*) from almanac.job") == 2


@pytest.mark.parametrize("ending", ENDINGS)
def test_enqueue_waits_for_the_holder_that_is_just_completing(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    job = jobs.running(dedup_key="k")
    a.sql("begin")
    a.complete(**held(job))
    with Blocked(jobs.conn, b.conn, lambda: enqueue(b)) as waiting:
        a.sql(ending)
    second, created = waiting.value()
    assert created == (ending == "commit")
    assert (second == job.job_id) == (ending == "rollback")


def test_many_that_waited_for_one_key_do_not_lose_a_job_whose_key_was_freed_meanwhile(jobs, session):
    a, b, c = session(), session(), session()
    jobs.put()
    holder = jobs.running(dedup_key="a")
    c.sql("begin")
    c.add(dedup_key="b")
    with Blocked(
        jobs.conn,
        b.conn,
        lambda: b.enqueue_many(queue="q", job_type="t", payloads=[{"n": 1}, {"n": 2}], dedup_keys=["a", "b"]),
    ) as waiting:
        a.complete(**held(holder))
        c.sql("commit")
    first, second = waiting.value()
    assert not second.created
    assert jobs.state(first.job_id) is not None, "an answer names a job that was never made"
    assert first.created == (first.job_id != holder.job_id)


def test_batches_with_keys_in_common_do_not_deadlock(jobs, sessions):
    a, b = sessions
    jobs.put()
    keys = [f"k{n}" for n in range(50)]
    a.sql("begin")
    a.enqueue_many(queue="q", job_type="t", payloads=[{}] * 50, dedup_keys=keys)
    with Blocked(
        jobs.conn,
        b.conn,
        lambda: b.enqueue_many(queue="q", job_type="t", payloads=[{}] * 50, dedup_keys=keys[::-1]),
    ) as waiting:
        a.sql("commit")
    assert not any(row.created for row in waiting.value())
    assert jobs.one("select count(*) from almanac.job") == 50


@pytest.mark.parametrize("window", ["never used", "passed"])
@pytest.mark.parametrize("seed", range(3))
def test_thirty_two_sessions_with_one_key_make_one_job_though_some_roll_back(jobs, connect, clock, seed, window):
    jobs.put()
    if window == "passed":
        jobs.complete(**held(jobs.running(dedup_key="k", dedup_for=MINUTE)))
        clock.advance(minutes=2)
    rng = random.Random(seed)
    rolls_back = [rng.random() < 0.5 for _ in range(31)] + [False]
    barrier = threading.Barrier(32)
    answers: list[tuple[int, bool]] = []

    def call(caller, roll_back):
        barrier.wait()
        caller.sql("begin")
        answer = enqueue(caller)
        time.sleep(0.002)
        caller.sql("rollback" if roll_back else "commit")
        if not roll_back:
            answers.append(answer)

    threads = [threading.Thread(target=call, args=[Jobs(connect()), roll_back]) for roll_back in rolls_back]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == rolls_back.count(False)
    (job_id,) = {answer[0] for answer in answers}
    assert [created for _, created in answers].count(True) == 1
    assert jobs.one("select id from almanac.job") == job_id


# ── redrive / retention, redrive / redrive ──────────────────────────────────────────────────────────────────────────


def old_and_dead(jobs, clock):
    jobs.put(retention="1 hour")
    dead = jobs.dead()
    clock.advance(hours=2)
    return dead.job_id


@pytest.mark.parametrize("ending", ENDINGS)
def test_retention_passes_over_a_job_that_is_being_redriven(jobs, sessions, clock, ending):
    a, b = sessions
    job_id = old_and_dead(jobs, clock)
    a.sql("begin")
    a.redrive(queue="q", job_id=job_id)
    assert b.one("select almanac._prune()")["history"] == 0
    a.sql(ending)
    assert jobs.state(job_id) == ("scheduled" if ending == "commit" else "dead")


@pytest.mark.parametrize("ending", ENDINGS)
def test_redrive_passes_over_a_job_that_retention_is_dropping(jobs, sessions, clock, ending):
    a, b = sessions
    job_id = old_and_dead(jobs, clock)
    a.sql("begin")
    assert a.one("select almanac._prune()")["history"] == 1
    with refused("PA003"):
        b.redrive(queue="q", job_id=job_id)
    assert b.redrive(queue="q") == []
    a.sql(ending)
    assert jobs.state(job_id) == (None if ending == "commit" else "dead")
    assert jobs.sql("select 1 from almanac.job") == []


def test_a_partition_is_not_dropped_under_a_redrive_and_the_housekeeper_does_not_wait_long(
    jobs, own_database, sessions, clock
):
    a, b = sessions
    jobs.put()
    job_id = jobs.dead().job_id
    clock.advance(days=40)
    a.sql("begin")
    a.redrive(queue="q", job_id=job_id)
    began = time.monotonic()
    report = b.one("select almanac._keep_partitions()")
    assert "job_history" in report["waiting"]
    assert time.monotonic() - began < 5
    a.sql("commit")
    assert b.one("select almanac._keep_partitions()")["waiting"] == []
    assert jobs.state(job_id) == "scheduled"
    assert jobs.claim_ids() == [job_id]


def test_redrive_that_waits_for_a_partition_to_be_dropped_finds_nothing(jobs, own_database, sessions, clock):
    a, b = sessions
    jobs.put()
    job_id = jobs.dead().job_id
    clock.advance(days=40)
    a.sql("begin")
    a.sql("select almanac._keep_partitions()")
    with Blocked(jobs.conn, b.conn, lambda: b.redrive(queue="q", job_id=job_id)) as waiting:
        a.sql("commit")
    with refused("PA003"):
        waiting.value()


@pytest.mark.parametrize("ending", ENDINGS)
def test_of_two_redrives_of_one_job_one_brings_it_back(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    job_id = jobs.dead().job_id
    a.sql("begin")
    a.redrive(queue="q", job_id=job_id)
    with refused("PA003"):
        b.redrive(queue="q", job_id=job_id)
    a.sql(ending)
    if ending == "rollback":
        b.redrive(queue="q", job_id=job_id)
    assert jobs.one("select count(*) from almanac.job") == 1
    assert jobs.one("select count(*) from almanac.job_history where redriven_at is not null") == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_redrive_and_enqueue_of_one_key_make_one_live_job(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    dead = jobs.dead(dedup_key="k")
    a.sql("begin")
    other, created = enqueue(a)
    assert created
    with Blocked(jobs.conn, b.conn, lambda: b.redrive(queue="q", job_id=dead.job_id)) as waiting:
        a.sql(ending)
    if ending == "commit":
        with refused("PA003"):
            waiting.value()
        assert jobs.one("select id from almanac.job") == other
    else:
        waiting.value()
        assert jobs.one("select id from almanac.job") == dead.job_id


# ── pause / claim, grant / claim ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [{}, {"max_running": 5}], ids=["no limits", "with limits"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pause_holds_from_its_commit_on(jobs, sessions, limits, ending):
    a, b = sessions
    jobs.put(**limits)
    ids = [jobs.add() for _ in range(2)]
    a.sql("begin")
    a.pause_queue(queue="q")
    assert b.claim_ids(batch_size=1) == ids[:1]
    a.sql(ending)
    assert b.claim_ids(batch_size=1) == ([] if ending == "commit" else ids[1:])


def test_a_claim_that_waits_for_its_turn_sees_a_pause_that_came_meanwhile(jobs, sessions):
    a, b = sessions
    jobs.put(max_running=5)
    [jobs.add() for _ in range(3)]
    a.sql("begin")
    assert len(a.claim()) == 1
    with Blocked(jobs.conn, b.conn, lambda: b.claim()) as waiting:
        jobs.pause_queue(queue="q")
        a.sql("commit")
    assert waiting.value() == []


def test_a_claim_that_waits_for_its_turn_sees_a_limit_that_came_meanwhile(jobs, sessions):
    a, b = sessions
    jobs.put(max_running=5)
    [jobs.add() for _ in range(3)]
    a.sql("begin")
    assert len(a.claim()) == 1
    with Blocked(jobs.conn, b.conn, lambda: b.claim()) as waiting:
        jobs.put(max_running=1)
        a.sql("commit")
    assert waiting.value() == []


@pytest.fixture
def worker_login(dsn, maintenance, worker_id):
    name = f"test_{worker_id}_races"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login in role almanac_worker")
    with psycopg.connect(dsn, user=name, autocommit=True) as conn:
        yield Jobs(conn)
    maintenance.execute(f"drop role {name}")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_grant_to_others_holds_from_its_commit_on(jobs, session, worker_login, ending):
    a = session()
    jobs.put()
    [jobs.add() for _ in range(3)]
    a.sql("begin")
    a.grant_queue(queue="q", role="almanac_admin", may="work")
    assert len(worker_login.claim()) == 1
    a.sql(ending)
    if ending == "commit":
        with refused("PA004"):
            worker_login.claim()
        a.grant_queue(queue="q", role="almanac_worker", may="work")
    assert len(worker_login.claim()) == 1


def test_a_claim_that_waits_for_its_turn_sees_a_grant_that_came_meanwhile(jobs, session, worker_login):
    a = session()
    jobs.put(max_running=5)
    [jobs.add() for _ in range(3)]
    a.sql("begin")
    assert len(a.claim()) == 1
    with Blocked(jobs.conn, worker_login.conn, lambda: worker_login.claim()) as waiting:
        jobs.grant_queue(queue="q", role="almanac_admin", may="work")
        a.sql("commit")
    with refused("PA004"):
        waiting.value()


# ── parking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ending", ENDINGS)
def test_two_priorities_that_are_new_at_once_are_both_looked_at(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    a.sql("begin")
    first = a.add(priority=1, concurrency_key="k")
    with Blocked(jobs.conn, b.conn, lambda: b.add(priority=2)) as waiting:
        a.sql(ending)
    second = waiting.value()
    assert jobs.claim_ids() == ([second, first] if ending == "commit" else [second])


@pytest.mark.parametrize("start", ["from the start", "from where it stopped"])
def test_a_claim_that_began_before_the_first_key_leaves_keyed_jobs_alone(jobs, sessions, clock, start):
    a, b = sessions
    jobs.put()
    with littered(b) if start == "from where it stopped" else contextlib.nullcontext():
        a.sql("begin")
        a.sql("lock table almanac.job in exclusive mode")
        with Blocked(jobs.conn, b.conn, lambda: b.claim_ids()) as claiming:
            a.add(concurrency_key="k")
            a.add(concurrency_key="k")
            keyless = a.add()
            a.sql("commit")
        assert claiming.value() == [keyless]
    assert len(jobs.claim_ids()) == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_key_whose_holder_is_just_completing_parks_nobody(jobs, sessions, ending):
    a, b = sessions
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    waiting = jobs.add(concurrency_key="k")
    a.sql("begin")
    a.complete(**held(holder))
    assert b.claim(batch_size=5) == []
    a.sql(ending)
    assert jobs.forgotten() == []
    assert b.claim_ids(batch_size=5) == ([waiting] if ending == "commit" else [])
    if ending == "rollback":
        a.complete(**held(holder))
        assert b.claim_ids(batch_size=5) == [waiting]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("let_go", ["complete", "release", "fail", "reclaim"])
def test_the_holder_of_a_key_cannot_let_go_before_the_parked_job_can_be_seen(jobs, sessions, clock, ending, let_go):
    a, b = sessions
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    waiting_job = jobs.add(concurrency_key="k")
    a.sql("begin")
    assert a.claim(batch_size=5) == []
    if let_go == "reclaim":
        clock.advance(hours=1)
        assert b.reclaim_expired()[0].reclaim_expired == 0
        a.sql(ending)
        assert b.reclaim_expired()[0].reclaim_expired == 1
    else:
        call = {
            "complete": lambda: b.complete(**held(holder)),
            "release": lambda: b.release(**held(holder)),
            "fail": lambda: b.fail_with_backoff(**held(holder), error="x"),
        }[let_go]
        with Blocked(jobs.conn, b.conn, call) as waiting:
            a.sql(ending)
        waiting.value()
    assert jobs.forgotten() == []
    assert jobs.claim_ids(batch_size=5) == ([holder.job_id] if let_go == "release" else [waiting_job])


def test_a_job_whose_cancellation_is_rolled_back_is_not_forgotten(jobs, sessions):
    a, b = sessions
    jobs.put()
    holder = jobs.running(concurrency_key="k")
    waiting = jobs.add(concurrency_key="k")
    assert jobs.claim(batch_size=5) == []
    assert jobs.parked() == [waiting]
    a.sql("begin")
    a.cancel(queue="q", job_id=waiting)
    b.complete(**held(holder))
    a.sql("rollback")
    jobs.reclaim_expired()
    assert jobs.claim_ids() == [waiting]


def test_more_places_per_key_wait_for_nobody(jobs, sessions):
    """One that waited for parked jobs in no order was seen to deadlock with a batch that completes them."""
    a, b = sessions
    jobs.put()
    jobs.running(concurrency_key="k")
    first, second = (jobs.add(concurrency_key="k") for _ in range(2))
    assert jobs.claim(batch_size=5) == []
    a.sql("begin")
    a.cancel(queue="q", job_id=first)
    b.sql("set lock_timeout = '1s'")
    b.put(max_running_per_key=2)
    a.sql("commit")
    assert jobs.claim_ids(batch_size=5) == [second]


def test_a_job_that_is_parked_while_its_key_gets_more_places_is_not_forgotten(jobs, sessions):
    """The claim that parks it has seen the queue as it was; the holder may go on for hours."""
    a, b = sessions
    jobs.put()
    jobs.running(concurrency_key="k")
    waiting = jobs.add(concurrency_key="k")
    a.sql("begin")
    assert a.claim(batch_size=5) == []
    b.put(max_running_per_key=2)
    a.sql("commit")
    assert jobs.forgotten() == [waiting]
    jobs.reclaim_expired()
    assert jobs.claim_ids() == [waiting]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("per_key", [1, 2])
def test_a_crowd_on_few_keys_never_exceeds_them_and_forgets_nobody(jobs, connect, per_key, seed):
    """Eight sessions; what runs per key is counted outside the database."""
    jobs.put(max_running_per_key=per_key, base_delay="0", max_attempts=1000)
    total = 150
    jobs.enqueue_many(
        queue="q", job_type="t", payloads=[{}] * total, concurrency_keys=[f"k{n % 3}" for n in range(total)]
    )
    running: Counter[str] = Counter()
    worst: Counter[str] = Counter()
    done: set[int] = set()
    errors: list[BaseException] = []
    lock = threading.Lock()
    deadline = time.monotonic() + 60

    def work(n):
        rng = random.Random(f"{seed}-{n}")
        mine = Jobs(connect())
        try:
            while len(done) < total and time.monotonic() < deadline:
                batch = mine.claim(batch_size=rng.choice([1, 2, 5]))
                with lock:
                    for job in batch:
                        key = job.concurrency_key
                        running[key] += 1
                        worst[key] = max(worst[key], running[key])
                for job in batch:
                    end = rng.random()
                    with lock:
                        running[job.concurrency_key] -= 1
                    if end < 0.7:
                        mine.complete(**held(job))
                        done.add(job.job_id)
                    elif end < 0.85:
                        mine.release(**held(job))
                    else:
                        mine.fail_with_backoff(**held(job), error="x")
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(done) == total, f"seed {seed}: parked {jobs.parked()}"
    assert max(worst.values()) <= per_key


@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_never_exceeds_max_running(jobs, connect, seed):
    jobs.put(max_running=3)
    total = 120
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * total)
    done: set[int] = set()
    lock, running, worst = threading.Lock(), [0], [0]

    def work(n):
        rng = random.Random(f"{seed}-{n}")
        mine = Jobs(connect())
        while len(done) < total:
            batch = mine.claim(batch_size=rng.choice([1, 2, 5]))
            with lock:
                running[0] += len(batch)
                worst[0] = max(worst[0], running[0])
            for job in batch:
                with lock:
                    running[0] -= 1
                mine.complete(**held(job))
                done.add(job.job_id)

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == total
    assert worst[0] <= 3


# ── other isolation levels ──────────────────────────────────────────────────────────────────────────────────────────


def serialised(call):
    """The call's answer, or None where PostgreSQL asks to try again."""
    try:
        return call()
    except psycopg.errors.SerializationFailure:
        return None


@pytest.fixture(params=["repeatable read", "serializable"])
def strict(request, session):
    both = [session() for _ in range(2)]
    for one in both:
        one.sql(f"set default_transaction_isolation = '{request.param}'")
    return both


def test_at_other_levels_nothing_is_claimed(jobs, strict):
    """An older snapshot would show a queue from before a pause, a limit or a grant that others rely on."""
    a, _ = strict
    jobs.put()
    job_id = jobs.add()
    with refused("25000") as caught:
        a.claim()
    assert "read committed" in caught.value.diag.message_hint
    a.sql("begin isolation level read committed")
    assert a.claim_ids() == [job_id]
    a.sql("commit")


def test_at_other_levels_one_key_makes_one_job(jobs, strict):
    a, b = strict
    jobs.put()
    for caller in (a, b):
        caller.sql("begin")
        caller.sql("select 1 from almanac.job")
    first, created = enqueue(a)
    assert created
    a.sql("commit")
    assert serialised(lambda: enqueue(b)) is None
    b.sql("rollback")
    assert enqueue(b) == (first, False)


def test_at_other_levels_an_attempt_ends_once(jobs, strict, clock):
    a, b = strict
    jobs.put()
    job = jobs.running(lease=MINUTE)
    b.sql("begin")
    b.sql("select 1 from almanac.job")
    clock.advance(minutes=2)
    a.reclaim_expired()
    clock.advance(minutes=-2)
    with pytest.raises(psycopg.Error) as caught:
        b.complete(**held(job))
    assert caught.value.sqlstate in ("PA002", "40001")
    b.sql("rollback")
    assert jobs.attempts(job.job_id) == [(1, "lost")]


def test_at_other_levels_a_whole_life_works(jobs, strict, clock):
    for caller in strict:
        jobs.put()
        caller.add(dedup_key="k")
        job = jobs.claim_one()
        caller.extend_lease(**held(job))
        caller.fail_with_backoff(**held(job), error="x")
        clock.advance(minutes=1)
        job = jobs.claim_one()
        caller.fail_with_backoff(**held(job), error="x", permanent=True)
        caller.redrive(queue="q", job_id=job.job_id)
        clock.advance(minutes=1)
        caller.complete(**held(jobs.claim_one()))
        caller.cancel(queue="q", job_id=caller.add())
        caller.reclaim_expired()
        assert jobs.state(job.job_id) == "completed"
