"""Statements sent straight through libpq: the same answers, errors and cancellation as from a cursor."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pyclient import database, errors
from pyclient.database.wire import Statement
from pyclient.worker.link import Link, State
from tests.jobs import Jobs
from tests.workers import wait_until

ODD = ["it's", 'a "quoted" one', "back\\slash", "{a,b}", "Büro €", "null", " spaced "]


def ran(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


async def rows(statement: Statement, conn: database.AsyncConnection, parameters: Any) -> list[tuple[Any, ...]]:
    statement.send(conn, parameters)
    return await statement.answer(conn)


@pytest.mark.parametrize("is_pooled", [False, True], ids=["prepared", "as through a pooler"])
def test_rows_are_those_of_a_cursor(live_dsn, is_pooled):
    statement = Statement(b"test", b"select n, $1::text, null::int, '{1,2}'::int[] from generate_series(1, $2::int) n")

    async def scene() -> None:
        async with await database.connect_async(live_dsn) as conn:
            if is_pooled:
                conn.prepare_threshold = None
            await statement.prepare(conn)
            assert await rows(statement, conn, (b"x", b"0")) == []
            assert await rows(statement, conn, (b"x", b"2")) == [(1, "x", None, [1, 2]), (2, "x", None, [1, 2])]
            assert await rows(statement, conn, (None, b"1")) == [(1, None, None, [1, 2])]
            left = await (await conn.execute("select array_agg(name) from pg_prepared_statements")).fetchone()
            assert left == (None if is_pooled else ["test"],)

    ran(scene())


def test_after_an_error_the_connection_goes_on(live_dsn):
    statement = Statement(b"test", b"select 1 / $1::int")

    async def scene() -> None:
        async with await database.connect_async(live_dsn) as conn:
            await statement.prepare(conn)
            with pytest.raises(psycopg.errors.DivisionByZero):
                await rows(statement, conn, (b"0",))
            assert await rows(statement, conn, (b"1",)) == [(1,)]
            with pytest.raises(psycopg.errors.SyntaxError):
                await Statement(b"other", b"selekt").prepare(conn)
            assert await rows(statement, conn, (b"1",)) == [(1,)]

    ran(scene())


def test_a_connection_that_ends_meanwhile_is_an_error_like_any_other(live_dsn):
    statement = Statement(b"test", b"select pg_sleep($1::float8)")

    async def scene() -> None:
        conn = await database.connect_async(live_dsn)
        await statement.prepare(conn)
        waiting = asyncio.create_task(rows(statement, conn, (b"60",)))
        await asyncio.sleep(0.1)
        with psycopg.connect(live_dsn, autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            await waiting
        assert conn.closed

    ran(scene())


def test_a_cancelled_call_cancels_the_statement(live_dsn):
    statement = Statement(b"test", b"select pg_sleep($1::float8)")

    async def scene() -> None:
        async with await database.connect_async(live_dsn) as conn:
            await statement.prepare(conn)
            waiting = asyncio.create_task(rows(statement, conn, (b"60",)))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with psycopg.connect(live_dsn, autocommit=True) as other:
                wait_until(
                    lambda: other.execute(
                        "select state from pg_stat_activity where pid = %s", [conn.info.backend_pid]
                    ).fetchone() in (("idle",), None)
                )  # fmt: skip

    ran(scene())


@pytest.mark.parametrize("encoding", [{}, {"client_encoding": "latin1"}], ids=["utf-8", "the DSN says latin1"])
def test_claims_of_queues_and_types_with_any_name(live_dsn, encoding):
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        jobs = Jobs(conn)
        for name in ODD:
            jobs.put(name)
            for job_type in [*ODD, "not asked for"]:
                jobs.add(name, job_type, payload={"€": name})

    async def scene() -> None:
        async with await database.connect_worker_async(make_conninfo(live_dsn, **encoding)) as conn:
            await database.for_claims(conn)
            for name in ODD:
                arguments = database.claim_arguments(name, "wörker €", timedelta(seconds=90.5), ODD)
                database.send_claim(conn, arguments, 100)
                rows, claimed_at = await database.claimed_rows(conn)
                assert [row[database.Claimed.JOB_TYPE] for row in rows] == ODD
                assert database.json_value(rows[0][database.Claimed.PAYLOAD]) == {"€": name}
                (lasts,) = {row[database.Claimed.LEASE_EXPIRES_AT] - claimed_at for row in rows}
                assert 90_500_000 <= lasts < 91_500_000

    ran(scene())


def test_errors_of_claims_are_those_of_every_call(live_dsn):
    async def scene() -> None:
        async with await database.connect_worker_async(live_dsn) as conn:
            await database.for_claims(conn)
            database.send_claim(conn, database.claim_arguments("nowhere", "w", None, ["t"]), 1)
            with pytest.raises(errors.QueueUnknown, match="nowhere"):
                await database.claimed_rows(conn)

    ran(scene())


def test_a_statement_that_was_forgotten_or_has_become_another_is_prepared_again(live_dsn):
    """Behind a pooler that was not recognised, and after an upgrade under a worker that goes on."""
    statement = Statement(b"test", b"select answer from public.answers")

    async def scene() -> None:
        link = Link("claim", live_dsn, State(), prepare=statement.prepare)
        with psycopg.connect(live_dsn, autocommit=True) as other:
            other.execute("create table public.answers as select 1 as answer")
            assert await link.call(lambda conn: rows(statement, conn, ())) == [(1,)]
            assert link.conn is not None
            await link.conn.execute("deallocate all")
            assert await link.call(lambda conn: rows(statement, conn, ())) == [(1,)]
            other.execute("alter table public.answers alter answer type text")
            with pytest.raises(psycopg.errors.FeatureNotSupported):
                await link.call(lambda conn: rows(statement, conn, ()))
            assert await link.call(lambda conn: rows(statement, conn, ())) == [("1",)]
        await link.drop()

    ran(scene())
