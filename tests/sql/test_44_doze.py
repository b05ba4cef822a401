"""44 doze: a worker that naps is rung for, and one that naps again and again does not write each time. count_due: what
waits although it is due."""

from datetime import timedelta

import psycopg
import pytest

from tests.jobs import Jobs, entries_read, refused

NAP = timedelta(seconds=5)


def doze(jobs, worker="w"):
    jobs.doze(queue="q", worker=worker, at_most=NAP)
    return jobs.one("select sleeps_until from almanac.sleeper where queue = 'q' and worker = %s", worker)


def test_the_mark_outlasts_every_nap(jobs, clock):
    jobs.put()
    for _ in range(30):
        assert doze(jobs) >= clock.now() + NAP
        clock.advance(seconds=1.7)


@pytest.mark.parametrize("later, writes", [(0, False), (4, False), (6, True), (-60, True)])
def test_a_mark_is_written_again_only_when_it_would_not_last(jobs, clock, later, writes):
    jobs.put()
    before = doze(jobs)
    clock.advance(seconds=later)
    after = doze(jobs)
    assert (after != before) == writes
    assert after == (clock.now() + 2 * NAP if writes else before)


def test_workers_have_marks_of_their_own(jobs, clock):
    jobs.put()
    first = doze(jobs, "one")
    clock.advance(seconds=2)
    assert doze(jobs, "two") > first


def next_due(jobs, *types):
    return jobs.doze(queue="q", worker="w", at_most=NAP, job_types=list(types) or None)[0].doze


def test_the_next_job_is_the_next_one_of_the_types_asked_for(jobs, clock):
    """A worker that were told of a job it has no handler for would sleep too short, or too long for its own."""
    jobs.put()
    soon, later = clock.now() + timedelta(seconds=1), clock.now() + timedelta(seconds=3)
    jobs.add(job_type="of others")
    jobs.add(job_type="mine", due_at=later)
    jobs.add(job_type="mine too", due_at=soon, priority=-5)
    assert next_due(jobs) == clock.now()
    assert next_due(jobs, "mine") == later
    assert next_due(jobs, "mine", "mine too") == soon
    assert next_due(jobs, "nobody's") is None


def test_behind_much_of_other_types_the_worker_looks_when_that_is_due(jobs, clock):
    jobs.put()
    soon, last = clock.now() + timedelta(seconds=1), clock.now() + timedelta(seconds=2)
    jobs.enqueue_many(queue="q", job_type="of others", payloads=[{}] * 999, due_at=soon)
    jobs.add(job_type="of others", due_at=last)
    jobs.enqueue_many(queue="q", job_type="of others", payloads=[{}] * 3000, due_at=last + NAP)
    jobs.add(job_type="mine", due_at=last + 2 * NAP)
    jobs.sql("analyze almanac.job")
    for _ in range(8):  # by then the plan is a generic one
        assert entries_read(jobs, lambda: next_due(jobs, "mine")) <= 2010
        assert entries_read(jobs, lambda: next_due(jobs, "of others")) <= 10
    assert next_due(jobs, "mine") == last


def test_a_plan_from_a_time_without_jobs_serves_for_many(jobs, clock):
    """A worker keeps its connection, and its plans, for days."""
    jobs.put("planned")
    later = clock.now() + timedelta(days=1)

    def sleeps_until():
        return jobs.doze(queue="planned", worker="w", at_most=NAP, job_types=["mine"])[0].doze

    jobs.sql("analyze almanac.job")
    assert sleeps_until() is None
    jobs.enqueue_many(queue="planned", job_type="mine", payloads=[{}] * 3000, due_at=later)
    assert 1 <= entries_read(jobs, sleeps_until) <= 10
    assert sleeps_until() == later


def due(jobs, queue="q"):
    return jobs.count_due(queue=queue)[0].count_due


def test_what_is_due_and_waits_is_counted(jobs, clock):
    jobs.put(max_attempts=3)
    jobs.put("other")
    assert due(jobs) == 0
    jobs.running(concurrency_key="k")
    jobs.add(concurrency_key="k")
    assert jobs.claim() == [], "the key is busy, so it is parked"
    for priority in (0, 7, -3):
        jobs.add(priority=priority)
    jobs.add(due_at=clock.now() + timedelta(hours=1))
    jobs.add(queue="other")
    assert due(jobs) == 4
    assert due(jobs, "other") == 1
    clock.advance(hours=1)
    assert due(jobs) == 5


def test_counting_what_is_due_does_not_read_what_is_not(jobs, clock):
    # A queue of its own: entries of jobs that other tests had in "q" may still be in the index.
    jobs.put("counted")
    later = clock.now() + timedelta(days=1)
    for priority in (0, 5):
        jobs.enqueue_many(queue="counted", job_type="t", payloads=[{}] * 2000, due_at=later, priority=priority)
    jobs.add("counted", priority=5)
    jobs.sql("analyze almanac.job")
    for _ in range(8):  # by then the plan is a generic one
        assert 1 <= entries_read(jobs, lambda: due(jobs, "counted")) <= 10
    assert due(jobs, "counted") == 1


def test_an_unknown_queue_is_not_an_empty_one(jobs):
    with refused("PA001"):
        due(jobs, "nowhere")


@pytest.mark.parametrize(
    "call",
    [
        "doze('q', null)",
        "doze('q', 'w', null)",
        "report_worker('w', null, 1, '1', '{q}', 1, 1)",
        "report_worker('w', 'h', 1, '1', null, 1, 1)",
        "tick_if_stale(null)",
        "tick_if_stale('w', null)",
    ],
)
def test_null_is_refused_with_what_to_do_instead(jobs, call):
    jobs.put()
    with refused("22004") as error:
        jobs.sql("select almanac." + call)
    assert error.value.diag.message_hint


@pytest.mark.parametrize("at_most", ["-1 s", "31 days", "300000 years"])
def test_a_sleep_of_impossible_length_is_refused(jobs, at_most):
    jobs.put()
    with refused("22023") as error:
        jobs.doze(queue="q", worker="w", at_most=at_most)
    assert error.value.diag.message_hint


# ── a worker's row is of the role that reports it ───────────────────────────────────────────────────────────────────


def test_a_role_changes_neither_the_row_nor_the_bell_of_another(jobs, own_database, dsn, maintenance, worker_id):
    roles = [f"test_{worker_id}_{name}" for name in ("first", "second")]
    for role in roles:
        maintenance.execute(f"drop role if exists {role}")
        maintenance.execute(f"create role {role} login in role almanac_worker")
    report = {"host": "h", "pid": 1, "version": "1", "queues": ["secret"], "concurrency": 1, "running": 0}
    try:
        jobs.put("secret")
        jobs.grant_queue(queue="secret", role=roles[0], may="work")
        jobs.put("open")
        with psycopg.connect(dsn, user=roles[0], autocommit=True) as a, psycopg.connect(dsn, user=roles[1]) as b:
            b.autocommit = True
            first, second = Jobs(a), Jobs(b)
            first.report_worker(worker="w", **report)
            for queue in ("secret", "open"):
                first.doze(queue=queue, worker="w")
            with refused("PA004"):
                second.report_worker(worker="w", **report | {"host": "mine"})
            second.retire_worker(worker="w")
            assert [row.host for row in jobs.sql("select host from almanac.worker")] == ["h"]
            asleep = "select queue from almanac.sleeper order by queue"
            assert [row.queue for row in jobs.sql(asleep)] == ["secret"], "where every role may, it may"
            first.report_worker(worker="w", **report | {"running": 1})
            first.retire_worker(worker="w")
        assert jobs.sql("select from almanac.worker") == jobs.sql(asleep) == []
    finally:
        for role in roles:
            maintenance.execute(f"drop role {role}")
