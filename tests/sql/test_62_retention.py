"""62 retention: what partitions cannot take with them, a bounded number at a time."""

from datetime import timedelta

import pytest

from tests.jobs import held


def prune(jobs, batch_size=1000):
    return jobs.one("select almanac._prune(%s)", batch_size)


def finish(jobs, queue, count):
    ids = []
    for _ in range(count):
        job = jobs.running(queue)
        jobs.complete(**held(job))
        ids.append(job.job_id)
    return ids


def test_a_queue_that_keeps_less_loses_its_rows_and_the_others_keep_theirs(jobs, clock):
    jobs.put("short", retention=timedelta(hours=1))
    jobs.put("long", retention=timedelta(days=10))
    (gone,), (kept,) = finish(jobs, "short", 1), finish(jobs, "long", 1)
    clock.advance(hours=1)
    assert prune(jobs)["history"] == 0, "not a moment too early"
    clock.advance(milliseconds=1)
    assert prune(jobs)["history"] == 1
    assert jobs.find(gone, "short") is None
    assert jobs.state(kept, "long") == "completed"


def test_so_many_at_a_time_and_the_next_call_goes_on(jobs, clock):
    jobs.put("short", retention=timedelta(hours=1))
    jobs.put("long", retention=timedelta(days=10))
    finish(jobs, "short", 7)
    clock.advance(hours=2)
    assert [prune(jobs, 3)["history"] for _ in range(4)] == [3, 3, 1, 0]


def test_a_queue_with_much_to_drop_does_not_keep_the_others_from_it(jobs, clock):
    for queue in ("a", "b"):
        jobs.put(queue, retention=timedelta(hours=1))
    finish(jobs, "a", 40)
    finish(jobs, "b", 1)
    clock.advance(hours=2)
    for _ in range(40):
        assert prune(jobs, 1)["more"]
    assert jobs.sql("select distinct queue from almanac.job_history") == [("a",)]
    assert prune(jobs, 2) == {"history": 1, "attempts": 0, "ticks": 0, "dedup": 0, "more": False}


def test_attempts_and_the_ledger_go_with_history(jobs, clock):
    jobs.put("short", retention=timedelta(hours=1))
    jobs.put("long", retention=timedelta(days=10))
    job, kept = jobs.dead("short"), jobs.dead("long")
    for queue in ("short", "long"):
        jobs.put_schedule(queue=queue, name=queue, cron="@every 1m", job_type="t")
    clock.advance(minutes=1)
    jobs.tick()
    clock.advance(hours=2)
    # Their next ticks are not what this is about.
    for queue in ("short", "long"):
        jobs.pause_schedule(name=queue, reason="enough")
    report = prune(jobs)
    assert (report["history"], report["attempts"], report["ticks"]) == (1, 1, 1)
    assert jobs.attempts(job.job_id) == []
    assert jobs.attempts(kept.job_id) == [(1, "failed")]
    assert jobs.sql("select queue from almanac.tick_log") == [("long",)]


def test_what_was_finished_on_a_day_that_never_got_a_partition_goes_when_its_time_has_come(jobs, own_database, clock):
    """Somebody worked, nobody ticked: then the day is over, and no partition of it is made any more."""
    jobs.put()
    clock.advance(days=10)
    finish(jobs, "q", 1)
    jobs.release(**held(jobs.running()))
    clock.advance(days=29)
    jobs.tick()
    assert jobs.one("select count(*) from almanac.attempt_log where outcome is not null") == 2
    clock.advance(days=2)
    jobs.tick()
    assert jobs.one("select count(*) from almanac.attempt_log where outcome is not null") == 0


def test_live_jobs_are_never_pruned(jobs, clock):
    jobs.put("short", retention=timedelta(hours=1))
    jobs.put("long", retention=timedelta(days=10))
    waiting = jobs.add("short", due_at=clock.now() + timedelta(days=300))
    clock.advance(days=200)
    prune(jobs)
    assert jobs.state(waiting, "short") == "scheduled"


def test_workers_and_sleepers_that_are_gone_are_forgotten(jobs, clock):
    jobs.put()
    for worker in ("gone", "here"):
        jobs.report_worker(
            worker=worker, host="h", pid=1, version="1", queues=["q"], concurrency=1, running=0,
        )  # fmt: skip
        jobs.doze(queue="q", worker=worker)
    clock.advance(hours=25)
    jobs.report_worker(worker="here", host="h", pid=1, version="1", queues=["q"], concurrency=1, running=0)
    jobs.doze(queue="q", worker="here")
    prune(jobs)
    assert [row.worker for row in jobs.sql("select worker from almanac.worker_overview")] == ["here"]
    assert [row.worker for row in jobs.sql("select worker from almanac.sleeper")] == ["here"]


@pytest.mark.parametrize(
    "call",
    [
        "select almanac.doze('q', 'w')",
        "select almanac.report_worker('w', 'h', 1, '1', array['q'], 1, 0)",
        "select almanac._raise_alert('a', 's', 'warning', 'm', 'h')",
    ],
)
def test_a_tick_does_not_wait_for_whoever_comes_back_just_now(jobs, session, clock, call):
    jobs.put()
    jobs.sql(call)
    jobs.sql("select almanac._clear_alert('a', 's')")
    clock.advance(days=40)
    returning, ticker = session(), session()
    returning.sql("begin")
    returning.sql(call)
    ticker.sql("set statement_timeout = '5s'")
    ticker.tick()
    returning.sql("commit")
    tables = ("sleeper", "worker", "alert")
    kept = [table for table in tables if jobs.one(f"select count(*) from almanac.{table}")]
    assert len(kept) == 1, "whoever came back, and nobody else"


def test_what_operators_did_is_kept_for_a_year(jobs, clock):
    jobs.put()
    jobs.pause_queue(queue="q", reason="first")
    clock.advance(days=364)
    prune(jobs)
    assert jobs.one("select count(*) from almanac.audit_log where action = 'pause_queue'") == 1
    clock.advance(days=2)
    prune(jobs)
    assert jobs.one("select count(*) from almanac.audit_log where action = 'pause_queue'") == 0
