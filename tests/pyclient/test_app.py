"""Almanac: what code declares, and how jobs are made from it."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Required, TypedDict
from uuid import UUID

import psycopg
import pytest
from psycopg_pool import ConnectionPool
from pydantic import BaseModel, ConfigDict, Field

from pyclient import Almanac, JobContext, PermanentError, database, errors, payload
from pyclient.database import calling, connecting, working
from tests.servers import free_port
from tests.workers import Jobs, run_due


class Call(BaseModel):
    phone: str
    at: datetime | None = None


@dataclasses.dataclass
class Letter:
    street: str
    number: int


class Mail(TypedDict):
    to: str


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


def test_a_payload_that_the_handler_would_refuse_is_refused_when_it_is_enqueued(app, jobs):
    @app.job("call")
    async def call(call: Call) -> None: ...

    @app.job("plain")
    async def plain(payload: dict[str, Any]) -> None: ...

    app.declare()
    said = "payload does not fit Call: phone: Field required"
    for job in (call, "call"):
        with pytest.raises(errors.PayloadRefused, match=said):
            app.enqueue(job, {"text": "hello"})
    with pytest.raises(errors.PayloadRefused, match=said):
        app.enqueue(call)
    with pytest.raises(errors.PayloadRefused, match=said):
        asyncio.run(app.enqueue_async(call, {}))
    many = [{"phone": "1"}, {"phone": "2"}, {}]
    with pytest.raises(errors.PayloadRefused, match=rf"payloads\[2\]: {said}"):
        app.enqueue_many(call, many)
    with pytest.raises(errors.PayloadRefused, match=rf"payloads\[2\]: {said}"):
        asyncio.run(app.enqueue_many_async(call, many))
    assert jobs.counts() == {}
    # Whoever does not have the handler cannot tell, and what is handed over as it is is not looked at.
    with contextlib.closing(Almanac(app.dsn)) as producer:
        assert producer.enqueue("call", {}).created
    assert app.enqueue(plain, {"anything": None}).created


def test_a_payload_becomes_what_the_annotation_says(app, live_dsn, jobs):
    seen: dict[str, Any] = {}

    @app.job("model")
    async def model(ctx: JobContext, call: Call) -> None:
        seen["model"] = call

    @app.job("dataclass")
    def dataclass(ctx: JobContext, letter: Letter) -> None:
        seen["dataclass"] = letter

    @app.job("typed")
    async def typed(mail: Mail) -> None:
        seen["typed"] = mail

    @app.job("plain")
    async def plain(payload: dict[str, Any]) -> None:
        seen["plain"] = payload

    @app.job("nothing")
    def nothing() -> None:
        seen["nothing"] = True

    moment = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    app.enqueue(model, Call(phone="1", at=moment))
    app.enqueue(dataclass, Letter("Main", 7))
    app.enqueue("typed", Mail(to="a@example.org"))
    app.enqueue("plain", {"a": [1, None, "é"]})
    app.enqueue("nothing")
    run_due(app, live_dsn)
    assert seen == {
        "model": Call(phone="1", at=moment),
        "dataclass": Letter("Main", 7),
        "typed": {"to": "a@example.org"},
        "plain": {"a": [1, None, "é"]},
        "nothing": True,
    }
    assert jobs.counts() == {"completed": 5}


@pytest.mark.parametrize(
    "number", [2**64 + 1, -(2**63) - 1, 10**400, 2**64 - 1, 7], ids=lambda number: str(number)[:30]
)
def test_an_integer_of_any_size_is_read_as_it_was_enqueued(number):
    def as_orjson_does(raw: bytes) -> Any:
        return json.loads(raw, parse_int=lambda text: int(text) if -(2**63) <= int(text) < 2**64 else float(text[:300]))

    assert working.exact(as_orjson_does)(b'{"id": %d, "a": [1, 0.5]}' % number) == {"id": number, "a": [1, 0.5]}


@pytest.mark.skipif(importlib.util.find_spec("orjson") is None, reason="orjson is in the extra speed")
def test_integers_are_read_as_they_were_enqueued_where_orjson_is_installed():
    assert database.json_value(b'\x01{"id": 18446744073709551617}') == {"id": 2**64 + 1}


def test_a_payload_that_does_not_fit_is_dead_with_a_readable_error(app, live_dsn, jobs):
    @app.job("call")
    async def call(ctx: JobContext, call: Call) -> None:
        raise AssertionError("must not run")

    # From somebody who does not have the handler.
    with contextlib.closing(Almanac(live_dsn)) as producer:
        job = producer.enqueue("call", {"at": "yesterday", "secret": "do not log me"})
    run_due(app, live_dsn)
    found = jobs.one(job)
    assert found.state == "dead"
    assert found.last_error.startswith("payload does not fit Call: phone: Field required; at: ")
    assert "do not log me" not in found.last_error


def test_classes_with_a_payload_model_and_handle_are_handlers(app, live_dsn, jobs):
    seen = []

    class Summary:
        @classmethod
        def payload_model(cls) -> type[BaseModel]:
            return Call

        def handle(self, payload: Call) -> dict[str, Any]:
            seen.append(payload)
            return {"done": payload.phone}

    class WithContext:
        async def handle(self, ctx: JobContext, payload: dict[str, Any]) -> int:
            return ctx.attempt

    app.register("summary", Summary)
    app.job("with_context")(WithContext)
    one, two = app.enqueue("summary", {"phone": "7"}), app.enqueue(WithContext)
    run_due(app, live_dsn)
    assert seen == [Call(phone="7")]
    assert jobs.one(one).result == {"done": "7"}
    assert jobs.one(two).result == 1


def test_a_job_of_a_transaction_that_rolls_back_does_not_exist(app, live_dsn, jobs):
    with psycopg.connect(live_dsn) as conn:
        app.enqueue("anything", conn=conn)
        conn.rollback()
    assert jobs.counts() == {}
    with psycopg.connect(live_dsn) as conn:
        app.enqueue_many("anything", [{}, {}], conn=conn)
    assert jobs.counts() == {"scheduled": 2}


def test_async_callers_join_their_transaction_too(app, live_dsn, jobs):
    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(live_dsn) as conn:
            await app.enqueue_async("anything", conn=conn)
            await conn.rollback()
        await app.enqueue_async("anything", {"n": 1})
        assert len(await app.enqueue_many_async("anything", [{"n": 2}, {"n": 3}])) == 2
        await app.close_async()

    asyncio.run(main())
    assert jobs.counts() == {"scheduled": 3}


def test_due_at_is_a_time_with_a_zone_or_a_delay_by_the_databases_clock(app, jobs):
    fixed = datetime(2030, 1, 1, tzinfo=UTC)
    assert jobs.one(app.enqueue("x", due_at=fixed)).due_at == fixed
    delayed = jobs.one(app.enqueue("x", due_at=timedelta(hours=1)))
    assert abs(delayed.due_at - delayed.created_at - timedelta(hours=1)) < timedelta(seconds=1)
    with pytest.raises(ValueError, match="time zone"):
        app.enqueue("x", due_at=datetime(2030, 1, 1))


def test_declaring_writes_queues_and_what_differs_for_a_type(app, live_dsn, jobs):
    @app.job("call", queue="calls", max_attempts=3, lease=30, base_delay=timedelta(seconds=2))
    async def call(ctx: JobContext, call: Call) -> None:
        """Call somebody."""

    app.declare()
    app.declare()
    (found,) = jobs.rows("select * from almanac.job_type")
    assert (found.queue, found.job_type, found.max_attempts, found.lease) == ("calls", "call", 3, timedelta(seconds=30))
    assert found.description == "Call somebody."
    assert found.schema["required"] == ["phone"]
    assert jobs.one(app.enqueue(call, Call(phone="1"))).max_attempts == 3


@pytest.mark.parametrize("setting", ["lease", "max_attempts", "base_delay", "max_delay", "jitter"])
def test_each_of_the_settings_of_a_type_is_declared_by_itself(app, live_dsn, jobs, setting):
    @app.job("t", **{setting: 1})
    async def handle(payload: dict[str, Any]) -> None: ...

    app.declare()
    (found,) = jobs.rows("select * from almanac.job_type")
    assert getattr(found, setting) in (1, timedelta(seconds=1))


def test_apps_combine_and_do_not_hide_each_others_jobs(app):
    other, third = Almanac(queue="other"), Almanac()

    @other.job("theirs")
    async def theirs() -> None: ...

    @third.job("theirs")
    async def also_theirs() -> None: ...

    app.include(other)
    assert app.jobs["theirs"].queue == "other"
    with pytest.raises(ValueError, match="declared twice"):
        app.include(third)


def test_what_cannot_be_a_handler_is_refused_where_it_is_declared(app):
    with pytest.raises(TypeError, match="takes \\(ctx, payload\\)"):
        app.job("x")(lambda a, b, c: None)
    with pytest.raises(TypeError, match="needs a method handle"):
        app.job("x")(type("Nothing", (), {}))
    with pytest.raises(ValueError, match="stands above"):

        @app.job("below")
        @app.schedule("* * * * *")
        def below() -> None: ...

    with pytest.raises(ValueError, match="not a job of this app"):
        app.enqueue(print)


def test_dedup_and_cancel_through_the_app(app, jobs):
    first = app.enqueue("x", dedup_key="k")
    second = app.enqueue("x", dedup_key="k")
    assert (first.created, second.created, second.job_id) == (True, False, first.job_id)
    assert app.cancel(first, reason="not needed") == "cancelled"
    with pytest.raises(errors.JobNotFound):
        app.cancel(dataclasses.replace(first, job_id=first.job_id + 1000))


def test_an_app_without_a_database_says_what_to_set(monkeypatch):
    for name in ("ALMANAC_DSN", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.CannotConnect, match="no database") as refused:
        Almanac().enqueue("x")
    assert "ALMANAC_DSN" in (refused.value.hint or "")


def test_an_error_shows_what_to_do_next_where_nobody_catches_it(app):
    with pytest.raises(errors.QueueUnknown) as refused:
        app.enqueue("x", queue="nope")
    assert "select almanac.put_queue('nope');" in "".join(traceback.format_exception(refused.value, chain=False))


def test_a_database_without_the_schema_names_the_command(empty_dsn):
    app = Almanac(empty_dsn)
    app.register("x", lambda: None)
    for call in (app.declare, lambda: app.enqueue("x"), lambda: asyncio.run(app.enqueue_async("x"))):
        with pytest.raises(errors.SchemaMismatch) as refused:
            call()
        assert refused.value.hint == "Run: pyclient migrate"
    app.close()


def test_a_server_that_is_not_there_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(connecting, "POOL_TIMEOUT", 0.5)
    app = Almanac(f"postgresql://127.0.0.1:{free_port()}/almanac")
    for call in (lambda: app.enqueue("x"), lambda: asyncio.run(app.enqueue_async("x"))):
        with pytest.raises(errors.CannotConnect, match="refused"):
            call()
    app.close()


def test_a_decorator_without_its_parentheses_is_refused(app):
    for decorator in (app.job, app.schedule):
        with pytest.raises(TypeError, match="with parentheses"):

            @decorator
            def handler() -> None: ...


def test_lengths_of_time_are_seconds_as_in_the_declaration_and_a_due_time_is_not(app, jobs):
    first = app.enqueue("x", dedup_key="k", dedup_for=60, base_delay=1.5, max_delay=3)
    assert app.enqueue("x", dedup_key="k", dedup_for=60).job_id == first.job_id
    (row,) = jobs.rows("select base_delay, max_delay from almanac.job")
    assert tuple(row) == (timedelta(seconds=1.5), timedelta(seconds=3))
    for wrong in (60, "tomorrow"):
        with pytest.raises(TypeError, match="due_at is a datetime or a timedelta"):
            app.enqueue("x", due_at=wrong)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    of: UUID


class Positive(TypedDict, total=False):
    n: Required[Annotated[int, Field(gt=0)]]
    m: Annotated[int, Field(gt=0)]


def test_a_strict_model_reads_what_it_wrote():
    written = Strict(at=datetime(2026, 1, 2, tzinfo=UTC), of=UUID(int=7))
    read = payload.reader(Strict)
    assert read is not None
    assert read(payload.to_payload(written)) == written


@pytest.mark.parametrize("given", [{"n": 0}, {"n": 1, "m": 0}, {"m": 1}])
def test_a_typed_dict_keeps_its_constraints(given):
    read = payload.reader(Positive)
    assert read is not None
    assert read({"n": 1}) == {"n": 1}
    with pytest.raises(PermanentError):
        read(given)


def test_a_partial_is_read_as_the_function_inside(app):
    def send(host: str, ctx: JobContext, letter: Letter) -> None: ...

    app.register("send", functools.partial(send, "mail.example.org"))
    assert app.jobs["send"].annotation is Letter
    with pytest.raises(TypeError, match="has no name of its own; give the job type"):
        app.job()(functools.partial(send, "mail.example.org"))


def test_a_payload_may_have_a_default_and_other_arguments_with_one_are_the_handlers_own(app, live_dsn):
    seen = []

    @app.job("a")
    async def a(ctx: JobContext, payload: dict[str, int] | None = None, retries: int = 3) -> None:
        seen.append((payload, retries))

    @app.job("b")
    async def b(payload: Any = None) -> None:
        seen.append(payload)

    app.enqueue("a", {"n": 1})
    app.enqueue("b", {"n": 2})
    run_due(app, live_dsn)
    assert sorted(map(repr, seen)) == ["({'n': 1}, 3)", "{'n': 2}"]
    with pytest.raises(TypeError, match="takes payload by name only"):

        @app.job("c")
        def c(ctx: JobContext, *, payload: Any) -> None: ...


def test_what_is_no_handler_is_refused_by_name(app):
    class Static:
        @staticmethod
        def handle(payload: dict[str, Any]) -> None: ...

    class Callable:
        def __call__(self, a: int, b: int, c: int) -> None: ...

    with pytest.raises(TypeError, match=r"handle\(self, payload\)"):
        app.register("static", Static)
    with pytest.raises(TypeError, match="takes 3 arguments"):
        app.register("callable", Callable())


def test_two_schedules_of_one_name_are_refused_also_from_two_apps():
    one, other = Almanac(), Almanac()
    one.schedule("0 1 * * *", name="nightly")(lambda: None)
    other.schedule("0 2 * * *", name="nightly")(other_handler)
    whole = Almanac().include(one)
    with pytest.raises(ValueError, match="'nightly' is declared twice"):
        whole.include(other)
    assert whole.include(one).schedules == one.schedules


def other_handler() -> None: ...


def test_an_option_that_schedules_do_not_have_is_refused_where_it_is_declared(app):
    for wrong in ("overlp", "job_type"):
        with pytest.raises(TypeError, match=f"a schedule has no option '{wrong}'"):
            app.schedule("0 9 * * *", **{wrong: "skip"})


@pytest.mark.parametrize("option", ["max_fires", "max_running", "max_runs", "pace", "priority", "max_attempts"])
def test_half_a_number_is_refused_where_it_is_declared(app, option):
    with pytest.raises(TypeError, match=rf"{option} must be a whole number, not 2\.5"):
        app.schedule("0 9 * * *", **{option: 2.5})
    with pytest.raises(TypeError, match=r"max_attempts must be a whole number, not 2\.5"):
        app.job(max_attempts=2.5)


def test_lengths_of_time_of_a_schedule_are_seconds_or_timedeltas(app, jobs):
    options = {"jitter": 1.5, "max_age": 3600, "within": timedelta(hours=2), "gate_wait": 60}

    @app.schedule("0 9 * * *", after_schedule="extract", **options)
    def load() -> None: ...

    app.declare()
    (row,) = jobs.rows("select jitter, max_age, within, gate_wait from almanac.schedule")
    assert [length.total_seconds() for length in row] == [1.5, 3600, 7200, 60]


def test_an_option_that_is_taken_away_is_gone_from_the_database(live_dsn, live_conn):
    for options, stored in (({"max_attempts": 3}, 3), ({}, None)):
        app = Almanac(live_dsn)
        app.register("send", other_handler, **options)
        app.declare()
        app.close()
        assert live_conn.execute("select max_attempts from almanac.job_type").fetchall() == [(stored,)]


# ── the connections of an app ───────────────────────────────────────────────────────────────────────────────────────


def pids(jobs: Jobs) -> list[int]:
    return [
        pid
        for (pid,) in jobs.rows(
            "select pid from pg_stat_activity where datname = current_database() and application_name = 'pyclient'"
        )
    ]


def ended(jobs: Jobs) -> None:
    """As by a restart of the server: every session of an app is told farewell, and is gone."""
    before = pids(jobs)
    assert before
    jobs.rows("select pg_terminate_backend(pid, 5000) from unnest(%s::integer[]) as pid", before)
    assert not pids(jobs)


def test_what_an_app_sends_often_is_prepared(app, jobs):
    app.job("call")(lambda: None)
    app.declare()
    for _ in range(8):
        app.enqueue("call")
    with database.lend(app._pools.sync()) as conn:
        said = conn.execute("select count(*) from pg_prepared_statements where statement like '%enqueue%'").fetchone()
    assert said == (1,)
    assert len(pids(jobs)) == 1


def test_connections_that_the_server_has_ended_are_replaced_all_at_once(live_dsn, jobs):
    """The pool pauses for longer after each one that it finds broken, and gives up after 30 seconds."""
    with database.pool(live_dsn) as pool:
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(pool.connection())
        assert len(pids(jobs)) == 8
        ended(jobs)
        began = time.monotonic()
        with pool.connection() as conn:
            conn.execute("select 1")
        assert time.monotonic() - began < 5


def test_a_connection_that_the_server_has_ended_is_not_lent(app, jobs):
    app.job("call")(lambda: None)
    app.declare()
    app.enqueue("call")
    ended(jobs)
    app.enqueue("call")

    async def scene() -> None:
        await app.enqueue_async("call")
        ended(jobs)
        await app.enqueue_async("call")
        await app.close_async()

    asyncio.run(scene())
    assert jobs.counts() == {"scheduled": 4}


def test_a_connection_that_was_lent_just_now_is_not_asked_whether_it_lives(app, monkeypatch):
    """It would be a round trip for each call."""
    asked: list[database.Connection] = []
    monkeypatch.setattr(ConnectionPool, "check_connection", asked.append)
    monkeypatch.setattr(connecting, "RECENT", 60.0)
    app.job("call")(lambda: None)
    app.declare()
    asked.clear()
    for _ in range(5):
        app.enqueue("call")
    assert asked == []
    monkeypatch.setattr(connecting, "RECENT", -1.0)
    app.enqueue("call")
    assert len(asked) == 1


def test_a_call_goes_on_when_an_upgrade_has_changed_what_it_returns(live_dsn):
    @calling.call
    def answer(*, question: str) -> Any: ...

    def upgrade(returns: str) -> None:
        with psycopg.connect(live_dsn, autocommit=True) as other:
            other.execute("drop function if exists almanac.answer(text)")
            other.execute(
                f"create function almanac.answer(question text) returns {returns} return '42'::{returns}".encode()
            )

    async def scene() -> None:
        async with await psycopg.AsyncConnection.connect(live_dsn, autocommit=True) as conn:
            upgrade("integer")
            assert [await answer(conn, question="?") for _ in range(7)] == 7 * [42]
            upgrade("text")
            assert await answer(conn, question="?") == "42"

    with psycopg.connect(live_dsn, autocommit=True) as conn:
        upgrade("integer")
        assert [answer(conn, question="?") for _ in range(7)] == 7 * [42]
        upgrade("text")
        # What the transaction did before is lost with it: that is for its owner to know.
        with pytest.raises(psycopg.errors.FeatureNotSupported), conn.transaction():
            answer(conn, question="?")
        assert answer(conn, question="?") == "42"
        upgrade("integer")
        assert [answer(conn, question="?") for _ in range(7)] == 7 * [42]
        upgrade("text")
        assert answer(conn, question="?") == "42"
    asyncio.run(scene())


@pytest.mark.parametrize(
    "behind_the_back", ["deallocate all", "prepare _pg3_0 as select 1"], ids=["not there", "somebody else's"]
)
def test_a_call_goes_on_in_a_session_that_others_have_used(live_dsn, behind_the_back):
    """As behind a pooler that was not recognised. In a block, because the driver would notice the command itself."""
    with psycopg.connect(live_dsn, autocommit=True) as conn:

        def ask(times: int) -> list[Any]:
            after = datetime(2026, 1, 1, tzinfo=UTC)
            return [database.next_runs(conn, cron="@daily", timezone="UTC", after=after, count=1) for _ in range(times)]

        before = ask(7 if behind_the_back.startswith("deallocate") else 1)
        conn.execute(f"do $$ begin execute '{behind_the_back}'; end $$".encode())
        assert ask(7) == 7 * before[:1]


# Registered first and so run last: what is left of a pool then is joined, or not, by an interpreter that shuts down.
PRODUCER = """
import asyncio, atexit, os, threading
atexit.register(lambda: print([one.name for one in threading.enumerate() if one.name.startswith("pyclient")]))
from pyclient import Almanac, database
app, other = Almanac(queue="calls"), Almanac(queue="calls")

async def at_once(count):
    await asyncio.gather(*(app.enqueue_async("call") for _ in range(count)))

def in_a_child():
    global pool
    sessions, pool = [], database.pool(app.dsn)
    for _ in range(2):
        with pool.connection() as conn:
            app.enqueue("call", conn=conn)
            sessions.append(conn.info.backend_pid)
        if os.fork() == 0:
            raise SystemExit
        os.wait()
    assert sessions[0] == sessions[1]
"""


@pytest.mark.parametrize(
    "call",
    ["app.enqueue('call'), other.enqueue('call')", "asyncio.run(at_once(1)), app.enqueue('call')", "in_a_child()"],
    ids=["two apps", "asyncio", "a fork whose child ends"],
)
def test_a_program_that_enqueued_ends_at_once_and_silently(live_dsn, jobs, call):
    jobs.conn.execute("select almanac.put_queue('calls')")
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRODUCER + call]
    done = subprocess.run(program, env={"DATABASE_URL": live_dsn}, capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "[]")
    assert jobs.counts() == {"scheduled": 2}


def test_a_loop_that_ends_while_its_pool_connects_is_not_waited_for(live_dsn, jobs):
    jobs.conn.execute("select almanac.put_queue('calls')")
    program = [sys.executable, "-c", PRODUCER + "asyncio.run(at_once(8))"]
    done = subprocess.run(program, env={"DATABASE_URL": live_dsn}, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    assert jobs.counts() == {"scheduled": 8}
