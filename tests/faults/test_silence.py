"""Nothing breaks, and nothing answers: connections stay open though the other side has stopped. All that waits is back
within a multiple of ALMANAC_PATIENCE."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pyclient import database, errors
from pyclient.worker.link import LONGEST_PAUSE
from tests import proxy
from tests.faults.conftest import Breakable, frozen
from tests.workers import Jobs, process, wait_until

PATIENCE = 2.0
ENVIRONMENT = {"ALMANAC_PATIENCE": f"{PATIENCE:g}"}
LEASE = 1.0
# A claim and then the connection of a handler are waited for in vain, and its pool pauses for a second.
BACK = 3 * PATIENCE + 2
# The longer a server is away, the longer a worker pauses before it tries again.
RECONNECTED = BACK + LONGEST_PAUSE

CODE = """
    @app.job("plain")
    async def plain(): ...

    @app.job("lost")
    async def lost(): ...

    @app.job("writes")
    async def writes(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            await asyncio.sleep(0.2)

    @app.job("writes_sync")
    def writes_sync(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.attempt])
            time.sleep(0.2)

    @app.job("empty")
    async def empty(ctx: JobContext) -> None:
        async with ctx.transaction():
            await asyncio.sleep(0.2)

    @app.job("empty_sync")
    def empty_sync(ctx: JobContext) -> None:
        with ctx.transaction():
            time.sleep(0.2)
"""
WRITES, EMPTY = ("writes", "writes_sync", "plain"), ("empty", "empty_sync", "plain")
# The longest sleep is shorter than the bound: a session that listens is never asked, and a silent one rings no more.
OPTIONS = ("--lease", f"{LEASE:g}", "--poll", "1", "--concurrency", "16")


class Seen(Jobs):
    """The jobs of a database, seen past what is silent, and for how long one ran on after its lease."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.dsn = dsn
        self.conn.execute("create table if not exists effect (job_id bigint, attempt int)")
        self.rows("select almanac.put_queue('default', base_delay => interval '0', max_attempts => 1000)")

    def enqueue(self, job_type: str, many: int = 1, queue: str = "default") -> None:
        self.rows("select almanac.enqueue_many(%s, %s, array_fill('{}'::jsonb, array[%s]))", queue, job_type, many)

    def now(self) -> Any:
        return self.rows("select almanac.clock() as now")[0].now

    def ended_since(self, moment: Any) -> set[str]:
        found = self.rows("select distinct job_type from almanac.job_history where claimed_at > %s", moment)
        return {row.job_type for row in found}

    def ticked_since(self, moment: Any) -> bool:
        return bool(self.rows("select from almanac.tick where decided_at > %s limit 1", moment))

    def all_ended(self) -> bool:
        return set(self.counts()) == {"completed"}

    def check(self) -> None:
        """Nothing is lost, nothing happened twice."""
        assert self.all_ended(), self.counts()
        (twice,) = self.rows("select count(*) - count(distinct id) as n from almanac.job_history")
        assert twice.n == 0
        wrong = self.rows(
            "select h.id from almanac.job_history h left join effect e on e.job_id = h.id"
            " where h.job_type in ('writes', 'writes_sync') group by h.id having count(e.*) <> 1"
        )
        assert wrong == [], "each effect is there exactly once"
        assert self.rows("select from effect where job_id not in (select id from almanac.job_history)") == []

    @contextlib.contextmanager
    def ticking(self) -> Iterator[list[float]]:
        """Ticks of a session that is not silent; by how many seconds a job ran on after its lease."""
        ended, late = threading.Event(), [0.0]

        def tick() -> None:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                while not ended.wait(0.2):
                    conn.execute("select almanac.tick()")
                    (by,) = conn.execute(
                        "select extract(epoch from max(almanac.clock() - lease_expires_at)) from almanac.running_job"
                    ).fetchone() or (None,)
                    late[0] = max(late[0], float(by or 0))

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            yield late
        finally:
            ended.set()
            thread.join(30)


@pytest.fixture
def seen(live_dsn: str) -> Iterator[Seen]:
    seen = Seen(live_dsn)
    yield seen
    seen.close()


def warm_up(seen: Seen) -> None:
    """As many connections in both pools of the worker as can be: each of them is going to be silent."""
    seen.enqueue("writes", 16)
    wait_until(seen.all_ended, 30)
    seen.enqueue("writes_sync", 16)
    wait_until(seen.all_ended, 30)
    (pooled,) = seen.rows("select count(*) from pg_stat_activity where application_name = 'pyclient'")
    assert pooled.count >= 10


def in_the_middle(seen: Seen, types: tuple[str, ...], many: int) -> None:
    for job_type in types:
        seen.enqueue(job_type, many)
    wait_until(lambda: many / 5 < seen.counts().get("completed", 0))


def begin_again(seen: Seen) -> Any:
    """The moment from which on all of that is awaited."""
    since = seen.now()
    seen.rows("select almanac.put_schedule('default', 's', '@every 1s', 'plain')")
    for job_type in WRITES:
        seen.enqueue(job_type)
    return since


def end(seen: Seen) -> None:
    seen.rows("select almanac.drop_schedule('s')")
    wait_until(seen.all_ended, 60)
    seen.check()


def take_and_die(seen: Seen) -> None:
    """Another worker claims a job, and is not heard of again."""
    with seen.conn.transaction():
        seen.enqueue("lost")
        claim = "select from almanac.claim_due('default', 'gone', lease => '1 second', job_types => array['lost'])"
        assert seen.rows(claim)


def is_all_back(seen: Seen, since: Any) -> bool:
    """Claims, both kinds of handlers, ticks, and the end of what another worker had."""
    return seen.ended_since(since) >= {*WRITES, "lost"} and seen.ticked_since(since)


def test_connections_that_fall_silent_for_good_are_replaced_within_the_bound(tmp_path, live_dsn, seen):
    seen.rows("select almanac.put_queue('patient', base_delay => interval '0')")
    with proxy.in_front_of(live_dsn) as between, contextlib.ExitStack() as stack:
        patient = stack.enter_context(
            process(tmp_path / "patient", between.dsn, CODE, *OPTIONS, "--queue", "patient", ALMANAC_PATIENCE="60")
        )
        stack.callback(patient.kill)
        stack.enter_context(process(tmp_path / "worker", between.dsn, CODE, *OPTIONS, **ENVIRONMENT))
        warm_up(seen)
        seen.enqueue("writes", queue="patient")
        wait_until(seen.all_ended)
        time.sleep(1.5)  # so that connections are asked before they are lent
        take_and_die(seen)
        between.forget()
        # One of each: if each silent connection of a pool were waited for, one after the other, it would take minutes.
        since = begin_again(seen)
        seen.enqueue("writes", queue="patient")
        wait_until(lambda: is_all_back(seen, since), BACK)
        assert seen.rows("select from almanac.job where queue = 'patient'"), "with a longer patience it still waits"


def test_work_goes_on_when_connections_fall_silent_in_the_middle_of_it(tmp_path, live_dsn, seen):
    """For good. A handler's own statements have no bound but the job's time-out, so these have none."""
    with (
        proxy.in_front_of(live_dsn) as between,
        process(tmp_path, between.dsn, CODE, *OPTIONS, **ENVIRONMENT),
        seen.ticking() as late,
    ):
        in_the_middle(seen, EMPTY, 100)
        between.forget()
        since = seen.now()
        wait_until(lambda: seen.ended_since(since) >= set(EMPTY[1:]), BACK)
        wait_until(seen.all_ended, 60)
        assert late[0] < BACK
    seen.check()


def test_work_goes_on_after_nothing_was_answered_for_a_while(tmp_path, live_dsn, seen):
    """New connections neither: the worker keeps trying."""
    with (
        proxy.in_front_of(live_dsn) as between,
        process(tmp_path, between.dsn, CODE, *OPTIONS, **ENVIRONMENT) as worker,
    ):
        with seen.ticking() as late:
            in_the_middle(seen, WRITES, 100)
            between.silent.set()
            wait_until(lambda: "database lost" in worker.text(), BACK)
            time.sleep(PATIENCE)
        assert late[0] < BACK, "also what the silent sessions had locked"
        take_and_die(seen)
        between.silent.clear()
        since = begin_again(seen)
        wait_until(lambda: is_all_back(seen, since), RECONNECTED)
        end(seen)


@pytest.fixture
def behind(breakable: Callable[..., Breakable]) -> Breakable:
    return breakable()


@pytest.fixture
def seen_behind(behind: Breakable) -> Iterator[Seen]:
    seen = Seen(behind.dsn)
    yield seen
    seen.close()


def test_a_server_that_is_stopped_is_noticed_and_found_again(tmp_path, behind, seen_behind):
    seen = seen_behind
    with process(tmp_path, behind.dsn, CODE, *OPTIONS, **ENVIRONMENT) as worker:
        in_the_middle(seen, WRITES, 100)
        take_and_die(seen)
        with frozen(behind.processes()):
            wait_until(lambda: "database lost" in worker.text(), BACK)
            time.sleep(PATIENCE)
        since = begin_again(seen)
        wait_until(lambda: is_all_back(seen, since), RECONNECTED)
        end(seen)


def test_sessions_that_are_stopped_are_left_for_others(tmp_path, behind, seen_behind):
    """The server accepts connections, and none of those that the worker has says anything."""
    seen = seen_behind
    held = "select pid, state from pg_stat_activity where application_name like 'pyclient%'"
    with process(tmp_path, behind.dsn, CODE, *OPTIONS, **ENVIRONMENT):
        warm_up(seen)
        time.sleep(1.5)
        take_and_die(seen)
        with contextlib.ExitStack() as stack:

            def all_idle() -> bool:
                # One that is stopped in the middle of something would hold its locks.
                stack.enter_context(frozen([row.pid for row in seen.rows(held)]))
                if all(row.state == "idle" for row in seen.rows(held)):
                    return True
                stack.close()
                return False

            wait_until(all_idle)
            since = begin_again(seen)
            wait_until(lambda: is_all_back(seen, since), BACK)
        end(seen)


@pytest.mark.parametrize("hangs", ["all of its sessions are taken", "it is stopped"])
def test_a_pooler_that_hangs_is_noticed_and_found_again(tmp_path, pgbouncer, hangs):
    seen = Seen(pgbouncer.behind.dsn)
    # So that the worker's own calls do not wait for three sessions that its handlers have.
    options = (*OPTIONS, "--concurrency", "2")
    with contextlib.closing(seen), process(tmp_path, pgbouncer.dsn, CODE, *options, **ENVIRONMENT) as worker:
        in_the_middle(seen, WRITES, 20)
        with contextlib.ExitStack() as stack:
            if hangs == "it is stopped":
                stack.enter_context(frozen([pgbouncer.pid()]))
            else:
                for _ in range(3):
                    stack.enter_context(psycopg.connect(pgbouncer.dsn)).execute("select 1")
            wait_until(lambda: "database lost" in worker.text(), BACK)
            time.sleep(PATIENCE)
            take_and_die(seen)
            since = begin_again(seen)
        wait_until(lambda: is_all_back(seen, since), RECONNECTED)
        end(seen)


# ── a worker that is silent itself ──────────────────────────────────────────────────────────────────────────────────

STOPS = """
    import signal
    from pyclient import database

    complete = database.complete

    def stop() -> None:
        with open("stopped", "w"):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # a thread may run on for a moment

    def completed(conn, **arguments):
        if not hasattr(conn, "__aenter__"):
            complete(conn, **arguments)
            return stop()

        async def completed():
            await complete(conn, **arguments)
            stop()

        return completed()

    database.complete = completed
"""


@pytest.mark.parametrize("job_type", ["writes", "writes_sync"])
def test_a_worker_stopped_between_complete_and_commit_loses_its_job(tmp_path, live_dsn, seen, job_type):
    options = (*OPTIONS, "--no-supervise")
    with process(tmp_path / "first", live_dsn, STOPS + CODE, *options, **ENVIRONMENT) as first:
        seen.enqueue(job_type)
        stopped = tmp_path / "first" / "stopped"
        wait_until(stopped.exists)
        with process(tmp_path / "second", live_dsn, CODE, *options, **ENVIRONMENT):
            try:
                wait_until(seen.all_ended, LEASE + BACK)
            finally:
                os.kill(first.process.pid, signal.SIGCONT)
            # The first one finds out, and what it says of the job changes nothing.
            wait_until(lambda: "job failed" in first.text() or "lease lost" in first.text(), BACK)
    assert [row.outcome for row in seen.rows("select outcome from almanac.attempt")] == ["lost"]
    assert [row.attempt for row in seen.rows("select attempt from effect")] == [2]
    seen.check()


def completing(db: database.Connection, **settings: str) -> int:
    """The number of a job that is completed on this connection, in a transaction that stays open."""
    db.execute("select almanac.enqueue('default', 't')")
    claim = "select job_id, lease_token from almanac.claim_due('default', 'silent', lease => '1 second')"
    job, token = db.execute(claim.encode()).fetchone() or (0, 0)
    for name, value in settings.items():
        db.execute("select set_config(%s, %s, false)", [f"almanac.{name}", value])
    db.execute("begin")
    db.execute("select almanac.complete('default', %s, %s)", [job, token])
    return int(job)


def test_the_attempt_of_a_session_that_says_nothing_more_ends_as_lost(live_dsn, seen):
    with contextlib.closing(psycopg.connect(live_dsn, autocommit=True)) as silent, seen.ticking() as late:
        job = completing(silent, patience=f"{PATIENCE:g}s")
        since = time.monotonic()
        wait_until(lambda: seen.rows("select from almanac.attempt where job_id = %s and outcome = 'lost'", job), BACK)
        assert time.monotonic() - since >= PATIENCE / 2, "until then it may commit"
        assert late[0] < BACK
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            silent.execute("commit")


def test_an_operator_is_told_which_session_holds_a_job(dsn, connect, db, clock):
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as silent:
        job = completing(silent, patience="60s")
        line = f"select pg_terminate_backend({silent.info.backend_pid})"
        clock.advance(seconds=20)
        assert db.one("select reclaimed from almanac.tick()") == 0, "it is locked"
        began = time.monotonic()
        with pytest.raises(errors.JobNotFound, match=f"session {silent.info.backend_pid}") as refused:
            db.end_lease(queue="default", job_id=job)
        assert time.monotonic() - began < 5
        assert line in str(refused.value.hint)
        found = db.one("select status, hint from almanac.health() where name = 'expired_leases'")
        assert found.status == "warning"
        assert line in found.hint
        db.sql(line)
        wait_until(lambda: not db.sql(f"select from pg_stat_activity where pid = {silent.info.backend_pid}"))
        (ended,) = db.end_lease(queue="default", job_id=job)
        assert ended.state == "retrying"


@pytest.mark.parametrize("whose", ["role {role}", "database {database}", "role {role} in database {database}"])
def test_a_limit_of_the_role_or_the_database_stays(dsn, connect, whose):
    with connect() as conn:
        database_name, role = conn.info.dbname, f"limited_{conn.info.dbname}"
        conn.autocommit = True
        conn.execute(f"create role {role} login in role almanac_worker, almanac_producer".encode())
        try:
            whom = whose.format(role=role, database=f'"{database_name}"')
            conn.execute(f"alter {whom} set idle_in_transaction_session_timeout = '1h'".encode())
            with psycopg.connect(dsn, user=role, autocommit=True) as limited:
                completing(limited, patience="2s")
                assert limited.execute("show idle_in_transaction_session_timeout").fetchone() == ("1h",)
                limited.execute("rollback")
        finally:
            conn.execute(f"drop owned by {role}".encode())
            conn.execute(f"drop role {role}".encode())


def test_without_one_the_session_has_its_limit_from_the_end_of_a_job_to_the_end_of_the_transaction(dsn, connect):
    shown = "show idle_in_transaction_session_timeout"
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert conn.execute(shown).fetchone() == ("0",)
        completing(conn)
        assert conn.execute(shown).fetchone() == ("30s",)
        conn.execute("commit")
        assert conn.execute(shown).fetchone() == ("0",)
        completing(conn, patience="0")
        assert conn.execute(shown).fetchone() == ("0",), "a session that wants none has none"


def test_a_heartbeat_that_is_not_committed_does_not_hold_up_the_end_for_ever(live_dsn, seen):
    with contextlib.closing(psycopg.connect(live_dsn, autocommit=True)) as silent:
        silent.execute(f"set almanac.patience = '{PATIENCE:g}s'".encode())
        seen.enqueue("t")
        (job,) = seen.rows("select * from almanac.claim_due('default', 'w', lease => interval '1 hour')")
        silent.execute("begin")
        silent.execute("select almanac.extend_leases('default', %s, %s)", [[job.job_id], [job.lease_token]])
        seen.conn.execute("set statement_timeout = '20s'")
        began = time.monotonic()
        seen.rows("select almanac.complete('default', %s, %s)", job.job_id, job.lease_token)
        assert PATIENCE / 2 < time.monotonic() - began < BACK
        assert seen.all_ended()


# ── what the server is told ─────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = (
    "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout",
    "client_connection_check_interval",
)  # fmt: skip
SHOWS = f"""
    SHOW = "select json_object_agg(name, setting), current_setting('almanac.patience', true) from pg_settings"
    SHOW += " where name = any (array{list(SETTINGS)})"

    @app.job("shows")
    async def shows(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            ctx.result = list(await (await conn.execute(SHOW)).fetchone())

    @app.job("shows_sync")
    def shows_sync(ctx: JobContext) -> None:
        with ctx.transaction() as conn:
            ctx.result = list(conn.execute(SHOW).fetchone())
"""
# What the worker's own sessions have cannot be seen from others, so one is made as they are.
SHOW = SHOWS.partition('"')[2].partition('"')[0] + f" where name = any (array{list(SETTINGS)})"


def tcp(behind: Breakable) -> str:
    return f"postgresql://postgres@127.0.0.1:{behind.server.port}/work"


def test_the_server_notices_a_worker_that_is_gone_as_soon(tmp_path, behind, seen_behind, monkeypatch):
    seen = seen_behind
    monkeypatch.setenv("ALMANAC_PATIENCE", "12")
    wanted = [dict(zip(SETTINGS, ["6", "2", "3", "12000", "6000"], strict=True)), "12s"]
    with process(tmp_path, tcp(behind), SHOWS, *OPTIONS):
        for job_type in ("shows", "shows_sync"):
            seen.enqueue(job_type)
        wait_until(seen.all_ended)
    assert [row.result for row in seen.rows("select result from almanac.job_history")] == [wanted] * 2
    for connect in (database.connect_worker, database.connect):
        with connect(tcp(behind)) as conn:
            assert list(conn.execute(SHOW.encode()).fetchone() or ()) == wanted


def test_sessions_that_a_pooler_shares_keep_what_they_have(tmp_path, pgbouncer):
    behind, dsn, _, _ = pgbouncer
    with contextlib.closing(Seen(behind.dsn)) as seen, process(tmp_path, dsn, SHOWS, *OPTIONS, **ENVIRONMENT):
        for _ in range(4):
            seen.enqueue("shows")
            seen.enqueue("shows_sync")
        wait_until(seen.all_ended)
        with psycopg.connect(behind.dsn) as conn:
            own, _ = conn.execute(SHOW.encode()).fetchone() or ({}, None)
        assert own["client_connection_check_interval"] == "0"
        for row in seen.rows("select result from almanac.job_history"):
            shown, patience = row.result
            assert {**shown, "tcp_keepalives_idle": 0} == {**own, "tcp_keepalives_idle": 0}
            assert not patience
