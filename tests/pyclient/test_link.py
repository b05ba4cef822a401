"""A connection that comes back: what happens to a call that gets no answer."""

import asyncio
import time
from typing import Any

import psycopg
import pytest

from pyclient import database, errors
from pyclient.worker.link import Link, State, ThreadLink
from tests import proxy
from tests.workers import wait_until


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setenv("ALMANAC_PATIENCE", "1")


def test_a_call_without_an_answer_is_given_up_and_made_again_on_another_connection(live_dsn):
    async def scene() -> None:
        link = Link("test", live_dsn, State())
        backends: list[int] = []

        async def operation(conn: Any) -> str:
            backends.append(conn.info.backend_pid)
            await conn.execute("select pg_sleep(%s)", [60 if len(backends) == 1 else 0])
            return "answered"

        assert await link.call(operation) == "answered"
        assert len(set(backends)) == 2
        await link.drop()
        with psycopg.connect(live_dsn, autocommit=True) as other:
            left = "select count(*) from pg_stat_activity where pid = any (%s)"
            wait_until(lambda: other.execute(left, [backends]).fetchone() == (0,))

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_thread_whose_call_gets_no_answer_goes_on(live_dsn):
    with proxy.in_front_of(live_dsn) as between:
        link = ThreadLink("test", between.dsn, State())
        assert link.call(lambda conn: conn.execute("select 1").fetchone()) == (1,)
        between.silent.set()
        began = time.monotonic()
        assert link.call(lambda conn: conn.execute("select 2").fetchone()) is None
        assert time.monotonic() - began < 5
        between.forget()
        assert wait_until(lambda: link.call(lambda conn: conn.execute("select 3").fetchone())) == (3,)
        link.drop()


def test_a_server_that_answers_nothing_when_it_is_connected_to_is_not_waited_for(live_dsn):
    with proxy.in_front_of(live_dsn) as between:
        between.silent.set()
        began = time.monotonic()
        with pytest.raises(errors.CannotConnect):
            database.connect_worker(between.dsn)
        assert time.monotonic() - began < 10  # the driver waits for two seconds at least


def test_calls_that_are_answered_in_time_are_not_cut_however_many_there_were(live_dsn):
    async def scene() -> None:
        link = Link("test", live_dsn, State())
        backends = set()

        async def operation(conn: Any) -> None:
            backends.add(conn.info.backend_pid)
            await conn.execute("select pg_sleep(0.3)")

        for _ in range(8):
            await link.call(operation)
        assert len(backends) == 1
        await link.drop()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_error_of_the_call_stays_what_it_is(live_dsn):
    async def scene() -> None:
        link = Link("test", live_dsn, State())

        async def operation(conn: Any) -> None:
            raise ValueError("own")

        with pytest.raises(ValueError, match="own"):
            await link.call(operation)
        await link.drop()

    asyncio.run(scene())


@pytest.mark.parametrize("given", ["soon", "0.5", "-1", "nan", "1e9"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(live_dsn, monkeypatch, given):
    monkeypatch.setenv("ALMANAC_PATIENCE", given)
    with pytest.raises(errors.CannotConnect, match="ALMANAC_PATIENCE"):
        database.connect(live_dsn)
