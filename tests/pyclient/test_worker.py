"""The worker: what becomes of jobs whose handlers do all the things handlers do."""

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pyclient import Almanac, Cancelled, JobContext, PermanentError, RetryAfter, Snooze, database, errors
from pyclient.migrate import migrate
from pyclient.worker import reporting
from pyclient.worker.claiming import Fetcher
from pyclient.worker.leases import Keeper
from pyclient.worker.rounds import Ticks
from pyclient.worker.threads import Threads
from tests import proxy
from tests.workers import ROOT, Jobs, in_thread, process, run_due, wait_until


@pytest.fixture
def jobs(live_dsn: str):
    jobs = Jobs(live_dsn)
    yield jobs
    jobs.close()


@pytest.fixture
def app(live_dsn: str):
    app = Almanac(live_dsn)
    yield app
    app.close()


class Odd(BaseException):
    """Not an Exception."""


def test_what_handlers_say_becomes_the_state_of_the_job(app, live_dsn, jobs):
    @app.job("works")
    async def works(ctx: JobContext) -> dict[str, Any]:
        ctx.external_id = 'theirs "7" \\'
        return {"quoted": '"\\', "nothing": None}

    @app.job("fails")
    async def fails() -> None:
        raise ValueError("wrong \0 number \udcff")

    @app.job("gives_up")
    def gives_up() -> None:
        raise PermanentError("no such phone")

    @app.job("later")
    async def later() -> None:
        raise RetryAfter(90, "busy")

    @app.job("snoozes")
    async def snoozes() -> None:
        raise Snooze(timedelta(hours=1))

    @app.job("not_wanted")
    async def not_wanted() -> None:
        raise Cancelled("the order is gone")

    made = {name: app.enqueue(name) for name in app.jobs}
    run_due(app, live_dsn)
    found = {name: jobs.one(job) for name, job in made.items()}
    assert {name: job.state for name, job in found.items()} == {
        "works": "completed", "fails": "retrying", "gives_up": "dead", "later": "retrying", "snoozes": "scheduled",
        "not_wanted": "cancelled",
    }  # fmt: skip
    assert found["works"].result == {"quoted": '"\\', "nothing": None}
    assert found["works"].external_id == 'theirs "7" \\'
    assert found["fails"].last_error.startswith("ValueError: wrong \ufffd number ?\n")
    assert "in fails" in found["fails"].last_error
    assert found["gives_up"].last_error.startswith("no such phone")
    assert (found["later"].attempt, found["snoozes"].attempt) == (1, 0)
    now = jobs.rows("select now()")[0][0]
    assert timedelta(seconds=80) < found["later"].due_at - now <= timedelta(seconds=90)
    assert timedelta(minutes=59) < found["snoozes"].due_at - now <= timedelta(hours=1)


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Odd("odd"),
               StopIteration(1), RecursionError("deep")], ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_handler_that_raises_anything_fails_its_job_and_the_worker_lives_on(app, live_dsn, jobs, raised):
    @app.job("async")
    async def asynchronous() -> None:
        raise raised

    @app.job("sync")
    def synchronous() -> None:
        raise raised

    @app.job("after")
    async def after() -> None: ...

    with in_thread(app, live_dsn):
        for name in ("async", "sync"):
            job = app.enqueue(name)
            found = jobs.wait(job, "retrying")
            assert type(raised).__name__ in found.last_error
        jobs.wait(app.enqueue("after"), "completed")


@pytest.mark.parametrize(
    ("returned", "said"),
    [(object(), "has no form in JSON"), ({1, 2, object()}, "has no form in JSON"), ("\udcff", "has no form in JSON"),
     (10**200_000, "result cannot be stored")],
    ids=["object", "set", "surrogate", "number"],
)  # fmt: skip
def test_a_result_that_is_not_json_is_a_clear_failure(app, live_dsn, jobs, returned, said):
    @app.job("odd")
    async def odd() -> Any:
        return returned

    @app.job("even")
    async def even() -> Any:
        return {"nan": float("nan"), "nul": "a\0b", "literally": "\\u0000"}

    one, *others = app.enqueue("odd"), *(app.enqueue("even") for _ in range(3))
    run_due(app, live_dsn)
    assert jobs.one(one).state == "dead"
    assert said in jobs.one(one).last_error
    assert [jobs.one(job).state for job in others] == ["completed"] * 3
    assert jobs.one(others[0]).result == {"nan": None, "nul": "a\ufffdb", "literally": "\\u0000"}


def test_five_megabytes_go_through_where_the_queue_allows_them(app, live_dsn, jobs):
    jobs.rows("select * from almanac.put_queue('default', max_payload_bytes => 10000000)")

    @app.job("big")
    async def big(payload: dict[str, Any]) -> dict[str, Any]:
        return {"length": len(payload["text"]), "back": payload["text"]}

    text = "".join(chr(32 + (i * 7919) % 90) for i in range(1000)) * 5000
    job = app.enqueue("big", {"text": text})
    run_due(app, live_dsn)
    assert jobs.one(job).result == {"length": 5_000_000, "back": text}


def test_a_time_out_ends_the_handler_and_fails_the_attempt(app, live_dsn, jobs):
    ended = threading.Event()

    @app.job("hangs", timeout=0.2)
    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    @app.job("hangs_in_a_thread", timeout=0.2)
    def hangs_in_a_thread(ctx: JobContext) -> None:
        wait_until(lambda: ctx.cancelled, 5)
        ended.set()

    @app.job("swallows", timeout=0.2)
    async def swallows() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "made it"

    with in_thread(app, live_dsn, concurrency=1):
        for name in ("hangs", "hangs_in_a_thread"):
            ended.clear()
            found = jobs.wait(app.enqueue(name), "retrying")
            assert found.last_error.startswith("timed out after 0.2 s")
            assert ended.wait(5)
        # One that finishes all the same has finished, and the slot is whole again.
        for _ in range(2):
            assert jobs.wait(app.enqueue("swallows"), "completed").result == "made it"


def test_a_handler_that_swallows_its_time_out_loses_job_and_slot_and_has_no_late_result(
    app, live_dsn, jobs, monkeypatch, caplog
):
    monkeypatch.setattr("pyclient.worker.running.STUBBORN", 0.3)
    ends, ended = threading.Event(), threading.Event()

    @app.job("stubborn", timeout=0.2, max_attempts=1)
    async def stubborn() -> str:
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.set()
        return "made it, far too late"

    @app.job("fine")
    async def fine() -> None: ...

    with in_thread(app, live_dsn, concurrency=1) as worker:
        job = app.enqueue("stubborn")
        found = jobs.wait(job, "dead")
        assert found.last_error.startswith("timed out after 0.2 s")
        # Its place is another one's, and nobody keeps its lease alive.
        jobs.wait(app.enqueue("fine"), "completed")
        wait_until(lambda: not worker.worker.held)
        assert worker.worker.slots.abandoned == 1
        ends.set()
        assert ended.wait(5)
        wait_until(lambda: worker.worker.slots.abandoned == 0)
        jobs.wait(app.enqueue("fine"), "completed")
    assert (jobs.state(job), jobs.one(job).result) == ("dead", None)
    (said,) = [one for one in caplog.records if "CancelledError" in one.getMessage()]
    assert (said.levelname, said.job.job_id) == ("WARNING", job.job_id)


def test_a_handler_that_swallows_its_cancellation_still_has_its_time_out(app, live_dsn, jobs, monkeypatch):
    monkeypatch.setattr("pyclient.worker.running.STUBBORN", 0.3)
    ends, told = threading.Event(), threading.Event()

    @app.job("stubborn", timeout=3, max_attempts=1)
    async def stubborn() -> None:
        while not ends.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                told.set()

    with in_thread(app, live_dsn, lease=timedelta(seconds=1)):
        job = app.enqueue("stubborn")
        jobs.wait(job, "running")
        app.cancel(job)
        assert told.wait(5)
        # Whoever asked for the cancellation gets it: the attempt was the last thing in its way.
        jobs.wait(job, "cancelled", "dead")
        ends.set()


def test_threads_that_come_back_after_their_time_out_are_not_counted_for_ever(app, live_dsn, jobs):
    @app.job("slow", timeout=0.05, max_attempts=1)
    def slow(ctx: JobContext) -> None:
        wait_until(lambda: ctx.cancelled, 5)

    with in_thread(app, live_dsn, concurrency=1) as worker:
        for _ in range(6):
            jobs.wait(app.enqueue("slow"), "dead")
            wait_until(lambda: worker.worker.slots.abandoned == 0 or worker.worker.stopping)
        assert not worker.worker.stopping


def test_a_cancelled_job_is_told(app, live_dsn, jobs):
    told = []

    @app.job("async")
    async def asynchronous() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.append("async")
            raise

    @app.job("sync")
    def synchronous(ctx: JobContext) -> None:
        wait_until(lambda: ctx.cancelled)
        told.append("sync")
        raise Cancelled

    with in_thread(app, live_dsn, lease=timedelta(seconds=1.5)):
        made = [app.enqueue("async"), app.enqueue("sync")]
        for job in made:
            jobs.wait(job, "running")
            assert app.cancel(job, reason="changed my mind") == "running"
        for job in made:
            jobs.wait(job, "cancelled")
    assert sorted(told) == ["async", "sync"]


def test_long_handlers_keep_their_leases_even_while_the_loop_is_blocked(app, live_dsn, jobs):
    @app.job("long")
    async def long() -> None:
        await asyncio.sleep(2.5)

    @app.job("blocks")
    async def blocks() -> None:
        time.sleep(2.5)  # noqa: ASYNC251

    with in_thread(app, live_dsn, lease=timedelta(seconds=1)):
        made = [app.enqueue("long"), app.enqueue("blocks")]
        for job in made:
            found = jobs.wait(job, "completed", "dead", "retrying")
            assert (found.state, found.attempt) == ("completed", 1)


@pytest.mark.parametrize(
    "external_id, stored", [(42, "42"), ("a\0b", "a\ufffdb"), ("\ud800", "?"), (b"x", "b'x'")], ids=repr
)
@pytest.mark.parametrize("in_transaction", [False, True], ids=["reported", "in a transaction"])
def test_an_external_id_of_any_kind_is_stored_as_text(app, live_dsn, jobs, external_id, stored, in_transaction):
    """A number is what many services call their things by."""

    @app.job("one")
    async def one(ctx: JobContext) -> None:
        ctx.external_id = external_id
        if in_transaction:
            async with ctx.transaction():
                pass

    job = app.enqueue("one")
    worker = run_due(app, live_dsn)
    assert not worker._restart
    assert (jobs.one(job).state, jobs.one(job).external_id) == ("completed", stored)


def test_a_role_whose_default_is_serializable_can_work_on_a_queue_with_limits(live_dsn, jobs):
    app = Almanac(make_conninfo(live_dsn, options="-c default_transaction_isolation=serializable"))

    @app.job("t")
    async def handle() -> None: ...

    jobs.rows("select almanac.put_queue('default', max_running => 1)")
    job = app.enqueue("t")
    run_due(app, app.dsn)
    assert jobs.state(job) == "completed"
    app.close()


@pytest.mark.parametrize("limits, key", [("max_running => 1", None), ("max_running_per_key => 1", "k")])
def test_a_burst_leaves_nothing_due_behind_where_jobs_wait_for_each_other(app, live_dsn, jobs, limits, key):
    @app.job("t")
    async def handle() -> None: ...

    jobs.rows(f"select almanac.put_queue('default', {limits})")
    made = [app.enqueue("t", concurrency_key=key) for _ in range(5)]
    run_due(app, live_dsn)
    assert [jobs.state(job) for job in made] == ["completed"] * 5


def test_a_queue_of_any_name_is_worked_on_whatever_encoding_the_dsn_asks_for(live_dsn, jobs):
    app = Almanac(make_conninfo(live_dsn, client_encoding="latin1"))
    jobs.rows("select almanac.put_queue('€')")

    @app.job("long", queue="€")
    async def long() -> None:
        await asyncio.sleep(1.5)

    job = jobs.rows("select * from almanac.enqueue('€', 'long')")[0]
    with in_thread(app, app.dsn, lease=timedelta(seconds=1), queues={"€": 1.0}):
        found = jobs.wait(job, "completed", "dead", "retrying")
        assert (found.state, found.attempt) == ("completed", 1)
    app.close()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_what_went_wrong_is_recorded_in_a_database_that_lacks_the_letters(server, maintenance, worker_id, encoding):
    """Otherwise nothing of it would be, and a job that is not to be repeated would be, when its lease ends."""
    name = f"almanac_{worker_id}_letters"
    maintenance.execute(f"drop database if exists {name} with (force)")
    maintenance.execute(
        f"create database {name} template template0 encoding '{encoding}' locale_provider libc locale 'C'"
    )
    try:
        dsn = server.dsn_of(name)
        migrate(dsn)
        assert migrate(dsn).before == migrate(dsn).after
        app, jobs = Almanac(dsn), Jobs(make_conninfo(dsn, client_encoding="UTF8"))

        @app.job("gives_up")
        async def gives_up() -> None:
            raise PermanentError("5 € – …")

        @app.job("snoozes")
        async def snoozes() -> None:
            raise Snooze(3600, "until 5 €")

        given_up, snoozed = app.enqueue("gives_up"), app.enqueue("snoozes")
        run_due(app, dsn)
        found = jobs.one(given_up)
        assert (found.state, found.last_error.partition("\n")[0]) == ("dead", r"5 \u20ac \u2013 \u2026")
        assert (jobs.state(snoozed), jobs.one(snoozed).attempt) == ("scheduled", 0)
        app.close()
        jobs.close()
    finally:
        maintenance.execute(f"drop database {name} with (force)")


def test_a_worker_can_have_more_room_than_a_claim_may_ask_for(app, live_dsn, jobs):
    @app.job("one")
    async def one() -> None: ...

    job = app.enqueue("one")
    run_due(app, live_dsn, concurrency=10_001)
    assert jobs.state(job) == "completed"


def test_a_claim_that_had_to_wait_for_the_database_brings_fresh_leases(app, live_dsn, jobs):
    """The lease counts from when the claim was sent that brought the job, not from the first of those that failed."""

    @app.job("takes a while")
    async def takes_a_while() -> None:
        await asyncio.sleep(1.5)

    types = "(text, text, integer, interval, text[])"
    with in_thread(app, live_dsn, lease=timedelta(seconds=2)) as running:
        jobs.conn.execute(f"alter function almanac.claim_due{types} rename to claim_later".encode())
        wait_until(lambda: not running.worker.state.is_up)
        job = app.enqueue("takes a while", base_delay=timedelta(0))
        time.sleep(2.5)
        jobs.conn.execute(f"alter function almanac.claim_later{types} rename to claim_due".encode())
        found = jobs.wait(job, "completed", "retrying", "dead")
        assert (found.state, found.attempt) == ("completed", 1)
        assert running.worker.metrics.lost == 0


def test_a_handler_whose_lease_is_lost_is_ended_and_its_result_discarded(app, live_dsn, jobs):
    ended = threading.Event()

    @app.job("slow")
    async def slow(ctx: JobContext) -> str:
        if ctx.attempt > 1:
            return "second"
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "first"

    with in_thread(app, live_dsn, lease=timedelta(seconds=1)) as running:
        job = app.enqueue("slow", base_delay=timedelta(0))
        jobs.wait(job, "running")
        jobs.rows(
            "with x as (update almanac.job set lease_expires_at = now() - interval '1 s' returning 1) select * from x"
        )
        jobs.rows("select almanac.reclaim_expired()")
        assert ended.wait(5)
        assert jobs.wait(job, "completed").result == "second"
        assert running.worker.metrics.lost == 1


def test_unknown_types_are_left_for_others(app, live_dsn, jobs):
    @app.job("known")
    async def known() -> None: ...

    one, other = app.enqueue("known"), app.enqueue("unknown")
    run_due(app, live_dsn)
    assert (jobs.state(one), jobs.state(other)) == ("completed", "scheduled")


def test_a_sleeping_worker_wakes_for_new_jobs_and_for_future_ones(app, live_dsn, jobs):
    seen: list[tuple[int, float]] = []

    @app.job("stamp")
    async def stamp(ctx: JobContext) -> None:
        seen.append((ctx.job_id, ctx.lateness.total_seconds()))

    with in_thread(app, live_dsn, poll=30.0):
        wait_until(lambda: jobs.rows("select from almanac.sleeper"))
        now = [app.enqueue("stamp") for _ in range(1)]
        wait_until(lambda: len(seen) == 1, 2)
        soon = app.enqueue("stamp", due_at=timedelta(seconds=0.7))
        wait_until(lambda: len(seen) == 2, 3)
    assert [job_id for job_id, _ in seen] == [now[0].job_id, soon.job_id]
    assert 0 <= seen[1][1] < 0.5


def test_a_job_of_another_type_does_not_keep_a_sleeping_worker_spinning(app, live_dsn, jobs, monkeypatch):
    looks, claim = 0, Fetcher._claim

    async def counted(fetcher: Fetcher, *arguments: Any) -> int:
        nonlocal looks
        looks += 1
        return await claim(fetcher, *arguments)

    monkeypatch.setattr(Fetcher, "_claim", counted)

    @app.job("known")
    async def known() -> None: ...

    other = app.enqueue("unknown")
    with in_thread(app, live_dsn, poll=30.0):
        wait_until(lambda: jobs.rows("select from almanac.sleeper"))
        time.sleep(1.5)
        before = looks
        time.sleep(1.5)
        assert looks - before < 20
        jobs.wait(app.enqueue("known"), "completed", timeout=1)
    assert jobs.state(other) == "scheduled"


def test_a_queue_that_nobody_rings_for_can_be_empty_for_long(app, live_dsn, jobs):
    @app.job("known")
    async def known() -> None: ...

    with in_thread(app, live_dsn) as running:
        wait_until(lambda: jobs.rows("select from almanac.sleeper"))
        running.worker.listener.is_heard = False
        (feed,) = running.worker.fetcher.feeds
        feed.looks, feed.idle_until = 2000, 0.0
        wait_until(lambda: feed.looks > 2000)
        jobs.wait(app.enqueue("known"), "completed")


def test_a_worker_that_is_always_busy_is_not_rung_for(app, live_dsn, jobs):
    @app.job("quick")
    async def quick() -> None: ...

    with in_thread(app, live_dsn, poll=30.0):
        wait_until(lambda: jobs.rows("select from almanac.sleeper"))
        ends = time.monotonic() + 0.6
        while time.monotonic() < ends:
            app.enqueue("quick")
        assert not jobs.rows("select from almanac.sleeper")
        wait_until(lambda: jobs.rows("select from almanac.sleeper"), 3)


def test_queues_share_by_weight(app, live_dsn, jobs):
    order: list[str] = []

    @app.job("one")
    async def one(ctx: JobContext) -> None:
        order.append(ctx.queue)
        await asyncio.sleep(0.002)

    for queue in ("heavy", "light"):
        jobs.rows("select * from almanac.put_queue(%s)", queue)
        app.enqueue_many("one", [{}] * 200, queue=queue)
    run_due(app, live_dsn, queues={"heavy": 4.0, "light": 1.0}, concurrency=10, prefetch=0)
    first = order[:150]
    assert 2.5 < first.count("heavy") / first.count("light") < 6
    assert len(order) == 400


def test_prefetch_follows_the_pace_of_the_handlers(app, live_dsn, jobs):
    @app.job("slow")
    async def slow() -> None:
        await asyncio.sleep(0.3)

    app.enqueue_many("slow", [{}] * 500)
    with in_thread(app, live_dsn, concurrency=5, grace=1.0) as running:
        time.sleep(1.2)
        assert len(running.worker.held) <= 15
    counts = jobs.counts()
    assert counts["completed"] + counts["scheduled"] == 500


def test_the_worker_shows_itself_and_leaves_nothing_behind(app, live_dsn, jobs):
    @app.job("x", queue="here")
    async def x() -> None: ...

    with in_thread(app, live_dsn, concurrency=7) as running:
        (row,) = wait_until(lambda: jobs.rows("select * from almanac.worker"))
        assert (row.worker, row.queues, row.concurrency) == (running.worker.name, ["here"], 7)
    assert jobs.rows("select * from almanac.worker") == []
    assert jobs.rows("select * from almanac.sleeper") == []


def test_a_queue_that_nobody_made_is_refused_at_the_start(app, live_dsn):
    with pytest.raises(errors.QueueUnknown, match="clals"):
        run_due(app, live_dsn, queues={"clals": 1.0})


@pytest.fixture
def workers_dsn(live_dsn, maintenance, worker_id):
    """As a role that may work and nothing else."""
    name = f"test_{worker_id}_worker"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login in role almanac_worker")
    yield make_conninfo(live_dsn, user=name)
    maintenance.execute(f"drop role {name}")


def test_a_role_that_may_not_declare_works_all_the_same(workers_dsn, jobs, caplog, monkeypatch):
    app, ran = Almanac(workers_dsn), []

    @app.schedule("0 9 * * *")
    @app.job("beat")
    async def beat(ctx: JobContext) -> None:
        ran.append(ctx.schedule)

    @app.job("other", queue="not made yet")
    async def other() -> None: ...

    jobs.rows("select almanac.put_schedule('default', 's', at => now() - interval '1 s', job_type => 'beat')")
    # What ticks in any case may come too late for a burst.
    monkeypatch.setattr("pyclient.worker.rounds.Rounds._quietly", lambda *_: None)
    run_due(app, workers_dsn)
    assert ran == ["s"]
    assert "were not declared error='permission denied for function put_queue'" in caplog.text
    with pytest.raises(errors.QueueUnknown, match="nope"):
        run_due(app, workers_dsn, queues={"nope": 1.0})


def test_stopping_finishes_what_runs_and_gives_back_the_rest(app, live_dsn, jobs):
    @app.job("second")
    async def second() -> str:
        await asyncio.sleep(1)
        return "finished"

    @app.job("minute")
    async def minute() -> None:
        await asyncio.sleep(60)

    short, long = app.enqueue("second"), app.enqueue("minute")
    with in_thread(app, live_dsn, grace=2.0, concurrency=2) as running:
        jobs.wait(long, "running")
        waiting = app.enqueue_many("minute", [{}] * 20)
        time.sleep(0.1)
        running.stop()
        began = time.monotonic()
        assert running.join() == 0
        assert time.monotonic() - began < 4
    assert jobs.one(short).result == "finished"
    assert [(jobs.one(job).state, jobs.one(job).attempt) for job in (long, *waiting)] == [("scheduled", 0)] * 21


def test_a_second_signal_ends_at_once(app, live_dsn, jobs):
    @app.job("minute")
    async def minute() -> None:
        await asyncio.sleep(60)

    job = app.enqueue("minute")
    with in_thread(app, live_dsn, grace=60.0) as running:
        jobs.wait(job, "running")
        running.stop()
        time.sleep(0.2)
        began = time.monotonic()
        running.stop()
        assert running.join() == 0
        assert time.monotonic() - began < 3
    assert (jobs.one(job).state, jobs.one(job).attempt) == ("scheduled", 0)


# ── one transaction ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def effects(live_dsn: str):
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        conn.execute("create table effect (job_id bigint, attempt int)")
        yield lambda: conn.execute("select job_id, attempt from effect order by 1, 2").fetchall()


def test_writes_and_completion_are_one_transaction(app, live_dsn, jobs, effects):
    @app.job("async")
    async def asynchronous(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            ctx.result, ctx.external_id = {"written": True}, "e1"

    @app.job("sync")
    def synchronous(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            ctx.result = [1, 2]

    one, two = app.enqueue("async"), app.enqueue("sync")
    run_due(app, live_dsn)
    assert effects() == [(one.job_id, 1), (two.job_id, 1)]
    assert (jobs.one(one).result, jobs.one(one).external_id) == ({"written": True}, "e1")
    assert (jobs.one(two).state, jobs.one(two).result) == ("completed", [1, 2])


@pytest.mark.parametrize("is_async", [True, False])
def test_a_handler_that_raises_in_its_transaction_has_written_nothing(app, live_dsn, jobs, effects, is_async):
    async def asynchronous(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            raise ValueError("no")

    def synchronous(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            raise ValueError("no")

    app.register("x", asynchronous if is_async else synchronous)
    job = app.enqueue("x")
    run_due(app, live_dsn)
    assert effects() == []
    assert jobs.one(job).state == "retrying"
    assert 'raise ValueError("no")' in jobs.one(job).last_error


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lost_lease_rolls_back_what_was_written(app, live_dsn, jobs, effects, is_async):
    def lose(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            with psycopg.connect(live_dsn, autocommit=True) as other:
                other.execute("select almanac.end_lease(%s, %s)", [ctx.queue, ctx.job_id])

    async def asynchronous(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            lose(ctx)

    def synchronous(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            lose(ctx)

    app.register("x", asynchronous if is_async else synchronous)
    with in_thread(app, live_dsn, lease=timedelta(seconds=10)):
        job = app.enqueue("x", base_delay=timedelta(0))
        jobs.wait(job, "completed")
    assert effects() == [(job.job_id, 2)]
    assert [row.outcome for row in jobs.rows("select outcome from almanac.attempt")] == ["lost"]


def test_a_call_gets_a_thread_of_its_own_while_the_only_one_is_just_taking_another():
    slowly, taking, go_on, end = (threading.Event() for _ in range(4))

    class Work(SimpleQueue):  # type: ignore[type-arg]
        def get(self, *arguments: Any) -> Any:
            taken = super().get(*arguments)
            if slowly.is_set() and not taking.is_set():
                taking.set()
                go_on.wait(20)
            return taken

    async def scene() -> None:
        threads = Threads()
        threads._work = Work()
        await threads.submit(lambda: None)
        await asyncio.sleep(0.1)  # until its thread waits for the next
        slowly.set()
        long = threads.submit(lambda: end.wait(20))
        assert await asyncio.to_thread(taking.wait, 20)
        short = threads.submit(lambda: "came back")
        go_on.set()
        try:
            assert await asyncio.wait_for(short, 5) == "came back"
        finally:
            end.set()
        await long

    asyncio.run(scene())


# ── as a process ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_a_handler_ends_is_replaced(tmp_path, live_dsn, jobs):
    code = """
        @app.job("exits", lease=1, max_attempts=2, base_delay=0)
        async def exits(ctx: JobContext) -> None:
            os._exit(9)

        @app.job("fine")
        async def fine() -> None: ...
    """
    app = Almanac(live_dsn)
    with process(tmp_path, live_dsn, code) as running:
        wait_until(lambda: jobs.rows("select from almanac.job_type"))
        poison = app.enqueue("exits", max_attempts=2, base_delay=timedelta(0))
        found = jobs.wait(poison, "dead", timeout=30)
        assert "did not report back" in found.last_error
        jobs.wait(app.enqueue("fine"), "completed")
        assert running.text().count("worker process died") == 2
        assert running.terminate() == 0
    app.close()


def test_a_handler_that_blocks_the_loop_beyond_its_time_out_fails_and_the_process_is_replaced(tmp_path, live_dsn, jobs):
    code = """
        @app.job("blocks", timeout=1, max_attempts=1)
        async def blocks(ctx: JobContext) -> None:
            time.sleep(600)

        @app.job("fine")
        async def fine() -> None: ...
    """
    app = Almanac(live_dsn)
    with process(tmp_path, live_dsn, code) as running:
        wait_until(lambda: jobs.rows("select from almanac.job_type"))
        found = jobs.wait(app.enqueue("blocks"), "dead", timeout=30)
        assert found.last_error == "timed out after 1 s: the handler blocked the event loop"
        jobs.wait(app.enqueue("fine"), "completed")
        assert "time.sleep(600)" in running.text()
    app.close()


def test_what_others_came_to_is_recorded_when_a_handler_blocks_the_loop(tmp_path, live_dsn, jobs):
    """All of it in one turn of the loop, so that nothing was reported before."""
    code = """
        @app.job("done")
        async def done(ctx: JobContext) -> str:
            ctx.external_id = "theirs"
            return "ours"

        @app.job("fails")
        async def fails() -> None:
            raise PermanentError("never")

        @app.job("blocks", timeout=1)
        async def blocks() -> None:
            time.sleep(600)
    """
    app = Almanac(live_dsn)
    done, fails, blocks = (
        app.enqueue(name, priority=priority, max_attempts=1)
        for name, priority in (("done", 3), ("fails", 2), ("blocks", 1))
    )
    with process(tmp_path, live_dsn, code, "--concurrency", "3") as running:
        assert jobs.wait(blocks, "dead", timeout=30).last_error.startswith("timed out")
        found = jobs.wait(done, "completed")
        assert (found.result, found.external_id) == ("ours", "theirs")
        assert jobs.wait(fails, "dead").last_error.startswith("never")
        assert running.text().count("blocks the event loop beyond its time-out") == 1
        assert jobs.rows("select outcome from almanac.attempt where outcome = 'released'") == []
    app.close()


def test_a_signal_that_comes_while_a_process_is_made_reaches_it_too():
    code = """
        import os, select, signal, sys
        from pyclient.worker.supervisor import supervise

        fork = os.fork

        def fork_and_hear() -> int:
            pid = fork()
            if pid:
                os.kill(os.getpid(), signal.SIGTERM)
            return pid

        os.fork = fork_and_hear
        sys.exit(supervise(2, lambda number, lifeline: bool(select.select([lifeline], [], [])), grace=600))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=20, check=True)


@pytest.mark.parametrize("supervised", [True, False], ids=["supervised", "alone"])
@pytest.mark.parametrize("waits", ["await asyncio.sleep(600)", "await asyncio.to_thread(time.sleep, 600)"])
def test_a_worker_ends_when_told_whatever_its_handlers_do(tmp_path, live_dsn, jobs, supervised, waits):
    code = f"""
        @app.job("stubborn")
        async def stubborn() -> None:
            while True:
                try:
                    {waits}
                except asyncio.CancelledError:
                    pass
    """
    app = Almanac(live_dsn)
    options = ["--grace", "0.2"] if supervised else ["--grace", "0.2", "--no-supervise"]
    with process(tmp_path, live_dsn, code, *options) as running:
        wait_until(lambda: jobs.rows("select from almanac.job_type"))
        job = app.enqueue("stubborn")
        jobs.wait(job, "running")
        # Sooner than a supervisor would kill it.
        assert running.terminate(timeout=14) == 0
        assert "is killed" not in running.text()
    assert (jobs.one(job).state, jobs.one(job).attempt) == ("scheduled", 0)
    app.close()


def test_a_process_that_has_to_be_killed_is_told_by_the_exit_code():
    code = """
        import os, signal, sys, time
        from pyclient.worker import supervisor

        supervisor.SLACK = 0.1

        def work(number: int, lifeline: int) -> int:
            if number == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(1, b"ready\\n")  # as a whole: print may write the end of its line by itself
            time.sleep(600)
            return 0

        sys.exit(supervisor.supervise(2, work, grace=0.1))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        running.terminate()
        _, said = running.communicate(timeout=20)
    assert running.returncode == 1
    assert "does not stop and is killed" in said


def test_children_stop_when_their_supervisor_is_killed(tmp_path, live_dsn, jobs):
    code = '@app.job("fine")\nasync def fine() -> None: ...'
    with process(tmp_path, live_dsn, code, "--processes", "2") as running:
        wait_until(lambda: len(jobs.rows("select from almanac.worker")) == 2)
        running.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not jobs.rows("select from almanac.worker"))


def test_an_app_that_is_not_there_is_one_line_and_exit_code_2(tmp_path, live_dsn):
    with process(tmp_path, live_dsn, "", "--app", "nowhere:app") as running:
        assert running.process.wait(20) == 2
        assert "pyclient: --app nowhere:app: there is no module nowhere" in running.text()
        assert "Traceback" not in running.text()


@pytest.mark.parametrize(
    "code, said",
    [("import not_there", "No module named 'not_there'"), ("x = = 1", "SyntaxError: "), ("1 / 0", "ZeroDivisionError")],
    ids=["import", "syntax", "error"],
)
def test_an_app_that_cannot_be_imported_is_said_once_and_not_tried_again(tmp_path, live_dsn, code, said):
    with process(tmp_path, live_dsn, code) as running:
        assert running.process.wait(20) == 2
        assert running.text().count(said) == 1
        assert "pyclient: --app handlers_under_test:app: its module cannot be imported" in running.text()
        assert "importlib" not in running.text()


@pytest.mark.parametrize("code", ["", "0", "'set SHOP_DSN first'"])
def test_an_app_that_ends_the_program_is_one_line_and_not_tried_again(tmp_path, live_dsn, code):
    with process(tmp_path, live_dsn, f"import sys; sys.exit({code})") as running:
        assert running.process.wait(20) == 2
        assert running.text().startswith("pyclient: --app handlers_under_test:app: its module calls sys.exit(" + code)
        assert len(running.text().splitlines()) == 1


@pytest.mark.parametrize(
    "declared, said",
    [
        ('@app.schedule("0 9 * * *", overlap="sometimes")', "overlap must be allow, skip, queue_one or cancel_running"),
        ('@app.schedule("0 9 * * *", max_runs="few")', 'invalid input syntax for type integer: "few"'),
        ('@app.job("other", max_attempts=0)', "job type other cannot be set so"),
    ],
    ids=["schedule", "not a number", "job"],
)
def test_an_app_with_an_option_that_is_refused_is_one_line_and_exit_code_2(tmp_path, live_dsn, declared, said):
    code = f"""
        {declared}
        async def wrong() -> None: ...
        @app.schedule("0 9 * * *")
        async def right() -> None: ...
    """
    with process(tmp_path, live_dsn, code) as running:
        assert running.process.wait(20) == 2
        assert running.text().startswith(f"pyclient: cannot declare the app: {said}")
        assert len(running.text().splitlines()) == 1


def test_a_burst_decides_what_is_due_of_schedules_where_nobody_ticks(app, live_dsn, jobs):
    ran = []

    @app.job("beat")
    async def beat(ctx: JobContext) -> None:
        ran.append(ctx.schedule)

    app.declare()
    jobs.rows("select almanac.put_schedule('default', 's', at => now() - interval '1 s', job_type => 'beat')")
    run_due(app, live_dsn)
    assert ran == ["s"]


def test_a_port_that_is_taken_is_one_line_and_not_tried_again(tmp_path, live_dsn):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with process(tmp_path, live_dsn, "", "--metrics-port", str(port)) as running:
            assert running.process.wait(20) == 2
            assert f"pyclient: --metrics-port: port {port} cannot be served" in running.text()
            assert "Traceback" not in running.text()


def test_a_metrics_port_without_the_extra_names_what_to_install(app, live_dsn, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(errors.CannotServe) as refused:
        run_due(app, live_dsn, metrics_port=0)
    assert refused.value.hint == "Run: pip install 'pg-almanac[metrics]'"


def test_a_worker_ticks_when_nobody_else_does(app, live_dsn, jobs):
    seen = []

    @app.schedule("* * * * * *", timezone="Europe/Brussels", payload={"n": 1})
    async def every_second(ctx: JobContext, payload: dict[str, Any]) -> None:
        seen.append((ctx.schedule, ctx.tick_at, payload))

    with in_thread(app, live_dsn):
        wait_until(lambda: len(seen) >= 2, 15)
    assert {(schedule, payload["n"]) for schedule, _, payload in seen} == {("every_second", 1)}
    ticks = [tick for _, tick, _ in seen]
    assert all(tick is not None and tick.microsecond == 0 for tick in ticks)
    assert len(set(ticks)) == len(ticks)


RAISING = """
create or replace function almanac.tick_if_stale(worker text, stale_after interval default '3 seconds')
    returns boolean language plpgsql as $$ begin {} end $$
"""


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("raise exception 'no room' using errcode = '53100'", None),
        ("raise exception 'no such day' using errcode = '2BP01'", ("no such day", "2BP01")),
        ("raise warning 'tick failed: no such day'; return false", ("no such day", "01000")),
        ("raise notice 'tick failed: not at all'; return false", None),
    ],
    ids=["the database is away", "raised", "warned of", "a notice"],
)
def test_ticks_that_fail_are_said_once_and_again_after_a_while(live_dsn, jobs, caplog, monkeypatch, failing, said):
    caplog.set_level("INFO", "pyclient.worker")
    definition = "select pg_get_functiondef('almanac.tick_if_stale'::regproc)"
    as_it_was = jobs.conn.execute(definition).fetchone()[0]
    ticks = Ticks("w")

    def tick() -> list[tuple[Any, ...]]:
        caplog.clear()
        with contextlib.suppress(psycopg.OperationalError):
            ticks(conn)
        return [
            (one.levelname, one.getMessage(), getattr(one, "error", None), getattr(one, "sqlstate", None))
            for one in caplog.records
        ]

    def replace(body: str) -> None:
        jobs.conn.execute(RAISING.format(body + ";").encode())

    warning = [("WARNING", "tick failed", *said)] if said else []
    with database.connect_worker(live_dsn) as conn:
        assert tick() == []
        replace(failing)
        assert tick() == warning
        assert tick() == tick() == []
        monkeypatch.setattr("pyclient.worker.rounds.REMIND_EVERY", 0.0)
        assert tick() == warning
        monkeypatch.setattr("pyclient.worker.rounds.REMIND_EVERY", 60.0)
        replace("raise exception 'something else' using errcode = 'P0001'")
        assert tick() == [("WARNING", "tick failed", "something else", "P0001")]
        # Another worker has the tick, and it may fail there.
        replace("return false")
        assert tick() == []
        jobs.conn.execute(as_it_was.encode())
        jobs.conn.execute("delete from almanac.heartbeat")
        assert tick() == [("INFO", "ticks work again", None, None)]
        assert tick() == []


def test_a_worker_says_why_its_ticks_fail_and_when_they_work_again(app, live_dsn, jobs, caplog):
    caplog.set_level("INFO", "pyclient.worker")

    def said(level: str, message: str) -> list[Any]:
        return [one for one in caplog.records if (one.levelname, one.getMessage()) == (level, message)]

    beat = jobs.conn.execute("select pg_get_functiondef('almanac._beat'::regproc)").fetchone()[0]
    jobs.conn.execute("""
        create or replace function almanac._beat(source text, ticked_by text) returns void language plpgsql as $$
        begin raise exception 'the view mine is in the way'; end $$""")
    with in_thread(app, live_dsn):
        (failed,) = wait_until(lambda: said("WARNING", "tick failed"))
        assert failed.error == "the view mine is in the way"
        wait_until(lambda: jobs.rows("select from almanac.alert where alert = 'tick_failed' and occurrences > 2"))
        jobs.conn.execute(beat.encode())
        wait_until(lambda: said("INFO", "ticks work again"))
    assert len(said("WARNING", "tick failed")) == 1


def test_ctrl_c_is_heard_once_and_handlers_finish(tmp_path, live_dsn, jobs):
    code = """
        @app.job("second")
        async def second() -> str:
            await asyncio.sleep(1)
            return "finished"
    """
    app = Almanac(live_dsn)
    with process(tmp_path, live_dsn, code) as running:
        job = app.enqueue("second")
        wait_until(lambda: "processing job" in running.text())  # one that is claimed and has not begun is given back
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(20) == 0
    app.close()
    assert jobs.one(job).result == "finished"


@pytest.mark.parametrize("times, seconds, state", [(1, 2, "completed"), (2, 600, "scheduled")], ids=["once", "twice"])
def test_sigterm_for_the_whole_group_is_heard_as_often_as_it_was_sent(tmp_path, live_dsn, jobs, times, seconds, state):
    """As systemd stops a service: the supervisor hears it, and so do its children."""
    code = f"""
        @app.job("slow")
        async def slow() -> None:
            await asyncio.sleep({seconds})
    """
    app = Almanac(live_dsn)
    with process(tmp_path, live_dsn, code, "--grace", "600", "--processes", "2") as running:
        wait_until(lambda: len(jobs.rows("select from almanac.worker")) == 2)
        job = app.enqueue("slow")
        wait_until(lambda: "processing job" in running.text())
        for _ in range(times):
            os.killpg(running.process.pid, signal.SIGTERM)
            # Also by the supervisor: of two signals that come before it runs again, a process hears one.
            wait_until(lambda: running.text().count("stopping running=") == 2)
            wait_until(lambda: "supervisor stopping" in running.text())
        assert running.process.wait(30) == 0
    assert jobs.state(job) == state
    app.close()


def test_a_handler_that_cancels_its_own_task_does_not_cost_a_slot(app, live_dsn, jobs):
    @app.job("leaves")
    async def leaves() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @app.job("fine")
    async def fine() -> None: ...

    with in_thread(app, live_dsn, concurrency=1):
        for _ in range(3):
            jobs.wait(app.enqueue("leaves"), "completed")
            jobs.wait(app.enqueue("fine"), "completed")


def test_what_a_handler_sets_for_itself_is_not_there_for_the_next(app, live_dsn, jobs):
    tenant = contextvars.ContextVar("tenant", default="nobody")

    @app.job("async")
    async def asynchronous() -> str:
        found = tenant.get()
        tenant.set("async")
        return found

    @app.job("sync")
    def synchronous() -> str:
        found = tenant.get()
        tenant.set("sync")
        return found

    made = [app.enqueue(name) for name in ("async", "sync", "async", "async", "sync")]
    with in_thread(app, live_dsn, concurrency=1):
        assert [jobs.wait(job, "completed").result for job in made] == ["nobody"] * 5


def test_a_worker_that_waits_for_its_database_can_be_stopped():
    code = """
        import logging
        from pyclient import Almanac
        from pyclient.worker.process import Options, run
        logging.basicConfig()
        nobody = "postgresql://postgres@127.0.0.1:1/nothing"
        raise SystemExit(run(Almanac(), nobody, Options(queues={"default": 1.0})))
    """
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert running.stderr is not None
    assert "database lost" in running.stderr.readline()
    time.sleep(2)
    running.terminate()
    _, rest = running.communicate(timeout=10)
    assert (running.returncode, rest) == (0, "")


@pytest.mark.parametrize("supervised", ["--supervise", "--no-supervise"])
def test_a_worker_that_waits_for_a_lock_while_it_declares_can_be_stopped(tmp_path, live_dsn, jobs, supervised):
    code = """
        @app.schedule("0 9 * * *")
        async def report() -> None: ...
    """
    with psycopg.connect(live_dsn) as holder:
        holder.execute("lock table almanac.schedule in access exclusive mode")
        with process(tmp_path, live_dsn, code, supervised) as running:
            waits = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            wait_until(lambda: jobs.rows(waits))
            assert running.terminate(10) == 0


# ── claims that are sent while the worker wakes up ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("meanwhile", ["nothing", "stop", "connection ends", "another ring"])
def test_a_claim_that_was_sent_on_a_ring_is_answered_for_whatever_happens_next(app, live_dsn, jobs, meanwhile):
    """In the same turn of the loop: nothing may happen in between."""
    seen: SimpleQueue[int] = SimpleQueue()

    @app.job("t")
    async def t(ctx: JobContext) -> None:
        seen.put(ctx.attempt)

    jobs.rows("select almanac.put_queue('default', lease => interval '1 second', base_delay => interval '0')")
    with in_thread(app, live_dsn) as running:
        fetcher = running.worker.fetcher
        wait_until(lambda: running.worker.listener.is_heard)
        was_sent: SimpleQueue[bool] = SimpleQueue()

        def scene() -> None:
            conn = fetcher.link.conn
            if conn is None or not fetcher._asleep:
                running.loop.call_later(0.01, scene)
                return
            with psycopg.connect(live_dsn, autocommit=True) as other:
                other.execute("delete from almanac.sleeper")
                other.execute("select almanac.enqueue('default', 't')")
                fetcher.ring(["default"])
                was_sent.put(fetcher._sent is not None)
                if meanwhile == "stop":
                    running.worker.stop()
                elif meanwhile == "connection ends":
                    other.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
                elif meanwhile == "another ring":
                    fetcher.ring(None)

        running.loop.call_soon_threadsafe(scene)
        assert was_sent.get(timeout=10)
        if meanwhile != "stop":
            # Where the connection ended with the claim, the lease has to end first.
            seen.get(timeout=20)
    ((state,),) = jobs.rows("select state from almanac.job union all select state from almanac.job_history")
    assert state in (("completed", "scheduled") if meanwhile == "stop" else ("completed",))


@pytest.mark.parametrize("outcome", ["completes", "fails", "snoozes"])
def test_a_job_that_somebody_holds_keeps_no_other_from_being_reported(app, live_dsn, jobs, outcome):
    ends = threading.Event()

    @app.job("t")
    async def handler(ctx: JobContext) -> None:
        await asyncio.to_thread(ends.wait, 10)
        if outcome == "fails":
            raise RetryAfter(3600, "busy")
        if outcome == "snoozes":
            raise Snooze(timedelta(hours=1))

    @app.job("later")
    async def later() -> None: ...

    made = [app.enqueue("t") for _ in range(5)]
    with in_thread(app, live_dsn) as running, psycopg.connect(live_dsn) as holder:
        wait_until(lambda: running.worker.slots.busy == 5)
        holder.execute("select from almanac.job where id = %s for update", [made[2].job_id])
        ends.set()
        state = {"completes": "completed", "fails": "retrying", "snoozes": "scheduled"}[outcome]
        for job in made[:2] + made[3:]:
            jobs.wait(job, state, timeout=5)
        # The database knows before its answer is heard here.
        wait_until(lambda: running.worker._gauges()["unreported"][1] == 1)
        # Nor those that come after.
        for _ in range(20):
            jobs.wait(app.enqueue("later"), "completed", timeout=2)
        assert jobs.state(made[2]) == "running"
        assert running.worker.state.is_up
        holder.rollback()
        jobs.wait(made[2], state, timeout=5)
        wait_until(lambda: not running.worker.held and running.worker.outbox.is_empty)


def test_a_worker_can_be_stopped_while_somebody_holds_a_job_of_it(app, live_dsn, jobs):
    began, ends = threading.Event(), threading.Event()

    @app.job("t")
    async def handler() -> None:
        began.set()
        await asyncio.to_thread(ends.wait, 10)

    job = app.enqueue("t")
    with in_thread(app, live_dsn) as running, psycopg.connect(live_dsn) as holder:
        began.wait(10)
        holder.execute("select from almanac.job where id = %s for update", [job.job_id])
        ends.set()
        wait_until(lambda: running.worker.slots.busy == 0)
        running.stop()
        time.sleep(1)
        holder.rollback()
        assert running.join() == 0
        assert jobs.state(job) == "completed"


def test_a_tick_that_takes_long_costs_no_lease(app, live_dsn, jobs):
    @app.job("t")
    async def handler() -> None:
        await asyncio.sleep(3)

    with in_thread(app, live_dsn, lease=timedelta(seconds=1)), psycopg.connect(live_dsn) as holder:
        holder.execute("lock table almanac.heartbeat")
        job = jobs.wait(app.enqueue("t"), "completed")
        assert job.attempt == 1
        # It was under way all the time.
        assert jobs.rows("select from pg_locks where relation = 'almanac.heartbeat'::regclass and not granted")
        holder.rollback()


def test_a_worker_that_holds_no_lease_notices_that_its_database_is_back(app, live_dsn):
    @app.job("t")
    async def handler() -> None: ...

    with in_thread(app, live_dsn) as running:
        keeper = running.worker.keeper
        wait_until(lambda: keeper.link.conn)
        # Two in a row, as when a lease had to be extended meanwhile.
        keeper.link._not_before = time.monotonic() + 60
        keeper.link._failures = 2
        running.worker.state.failed("leases", psycopg.OperationalError("away"))
        assert running.worker.trouble() == "the database cannot be reached"
        keeper.link._not_before = 0.0
        wait_until(lambda: running.worker.trouble() is None, 5)


def test_large_results_do_not_go_in_one_message(app, live_dsn, jobs, monkeypatch):
    ends, sent = threading.Event(), []

    @app.job("t")
    async def handler() -> str:
        await asyncio.to_thread(ends.wait, 10)
        return "x" * 1_000_000

    @app.job("too large")
    async def too_large() -> str:
        return "x" * 3_000_000

    complete_rows = database.complete_rows

    async def noted(conn, queue, ended):
        sent.append(sum(len(result) for _, _, result, _ in ended))
        return await complete_rows(conn, queue, ended)

    monkeypatch.setattr(database, "complete_rows", noted)
    monkeypatch.setattr(reporting, "HEAVIEST", 2_500_000)
    monkeypatch.setattr(reporting, "HEAVIEST_RESULT", 2_900_000)
    made = [app.enqueue("t") for _ in range(7)]
    with in_thread(app, live_dsn) as running:
        wait_until(lambda: running.worker.slots.busy == 7)
        refused = jobs.wait(app.enqueue("too large"), "dead")
        ends.set()
        assert {jobs.wait(job, "completed").state for job in made} == {"completed"}
    assert refused.last_error == "the result cannot be stored: it has 3000002 characters"
    assert max(sent) < 2_500_000


def test_a_handler_that_goes_on_after_its_lease_does_not_keep_the_worker_spinning(app, live_dsn, jobs, monkeypatch):
    rounds, ends = 0, threading.Event()
    one = Keeper._round

    def counted(keeper: Keeper) -> float:
        nonlocal rounds
        rounds += 1
        return one(keeper)

    monkeypatch.setattr(Keeper, "_round", counted)

    @app.job("t")
    async def handler(ctx: JobContext) -> None:
        # As it is told of one that somebody has locked, just before it runs out.
        ctx.extended(time.monotonic(), 0.0001)
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.to_thread(ends.wait, 10)

    with in_thread(app, live_dsn) as running:
        app.enqueue("t")
        wait_until(lambda: running.worker.slots.busy and all(job.lost for job in running.worker.held.copy()))
        before = rounds
        time.sleep(1)
        ends.set()
        assert rounds - before < 100


def test_an_app_that_takes_long_to_declare_is_waited_for(app, live_dsn, jobs, monkeypatch):
    declared, put_job_type = 0, database.put_job_type

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal declared
        declared += 1
        time.sleep(0.3)
        return put_job_type(*arguments, **options)

    for number in range(5):
        app.register(f"t{number}", lambda: None)
    monkeypatch.setattr(database, "put_job_type", slow)
    monkeypatch.setenv("ALMANAC_PATIENCE", "1")
    run_due(app, live_dsn)
    assert declared == 5


@pytest.fixture
def hung_extension(monkeypatch):
    """The first call that extends leases does not come back, as from a server that is frozen and still has its network;
    `calls` counts those after it."""
    calls, ends = [], threading.Event()
    extend = database.extend_rows
    first = threading.Lock()

    def extend_rows(*arguments: Any) -> Any:
        if first.acquire(blocking=False):
            ends.wait(60)
        answer = extend(*arguments)
        calls.append(arguments)
        return answer

    monkeypatch.setattr(database, "extend_rows", extend_rows)
    yield calls
    ends.set()


def test_a_handler_is_ended_when_its_lease_runs_out_while_the_keeper_hangs(app, live_dsn, jobs, hung_extension):
    ended = threading.Event()

    @app.job("t")
    async def handler() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with in_thread(app, live_dsn, lease=timedelta(seconds=1)):
        app.enqueue("t")
        assert ended.wait(15)
        assert hung_extension == []


def test_leases_are_kept_and_ticks_go_on_though_connections_fall_silent(app, live_dsn, jobs, monkeypatch, caplog):
    monkeypatch.setenv("ALMANAC_PATIENCE", "1")
    with proxy.in_front_of(live_dsn) as between:
        began, ends = threading.Event(), threading.Event()

        @app.job("t")
        async def handler() -> None:
            began.set()
            while not ends.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        with in_thread(app, between.dsn, lease=timedelta(seconds=10)):
            job = app.enqueue("t")
            assert began.wait(15)
            between.forget()
            jobs.rows("select almanac.put_schedule('default', 's', '@every 1s', 'other')")
            wait_until(lambda: jobs.rows("select from almanac.tick"))
            lasts = "select lease_expires_at from almanac.running_job"
            (before,) = jobs.rows(lasts)
            wait_until(lambda: jobs.rows(lasts) != [before])
            ends.set()
            found = jobs.wait(job, "completed", "dead", "retrying", timeout=30)
            assert (found.state, found.attempt) == ("completed", 1)
    assert "the database does not answer: connection cut" in caplog.text


# ── held ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_says_in_one_line_that_all_work_is_held(app, live_dsn, jobs, monkeypatch, caplog):
    monkeypatch.setattr("pyclient.worker.rounds.REPORT_EVERY", 0.2)
    caplog.set_level("INFO", "pyclient.worker")

    @app.job("t")
    async def handler() -> None: ...

    jobs.rows("select almanac.hold('a rumour')")
    with in_thread(app, live_dsn, poll=0.1):
        wait_until(lambda: "all work is held" in caplog.text)
        job = app.enqueue("t")
        time.sleep(1)
        assert jobs.state(job) == "scheduled"
        assert caplog.text.count("a rumour") == 1
        jobs.rows("select almanac.end_hold()")
        jobs.wait(job, "completed")
        wait_until(lambda: "work goes on" in caplog.text)


def test_a_tick_that_has_much_to_do_is_told_from_one_that_gets_no_answer(live_dsn, monkeypatch, caplog):
    monkeypatch.setenv("ALMANAC_PATIENCE", "1")
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        conn.execute("create table public.work (done int); grant all on public.work to public")
        conn.execute("""
            create or replace function almanac.tick_if_stale(worker text, stale_after interval default '3 seconds')
            returns boolean language plpgsql as
            $$ begin perform pg_sleep(4); insert into public.work values (1); return true; end $$""")

        @(app := Almanac()).job("t")
        async def handler() -> None: ...

        with in_thread(app, live_dsn):
            wait_until(lambda: conn.execute("select from public.work").fetchone() is not None)
    assert "does not answer" not in caplog.text
