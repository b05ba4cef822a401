"""A connection that comes back: what happens to a call that gets no answer."""

import asyncio
from typing import Any

import psycopg
import pytest

from pyclient.worker.link import Link, Patience, State
from tests.workers import wait_until


def test_a_call_without_an_answer_is_given_up_and_made_again_on_another_connection(live_dsn):
    async def scene() -> None:
        link = Link("test", live_dsn, State())
        link._patience = Patience(0.3)
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


def test_every_call_has_its_own_time():
    """One timer serves all of them: those before do not count, however many there were."""

    async def scene() -> None:
        patience = Patience(0.4)
        for _ in range(8):
            with patience:
                await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError, match=r"0\.4 s"), patience:
            await asyncio.sleep(30)
        with patience:
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_task_that_is_cancelled_is_not_said_to_have_run_out_of_time():
    async def scene() -> None:
        patience = Patience(0.2)

        async def waiting() -> None:
            with patience:
                await asyncio.sleep(30)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Nobody is cancelled later in its place.
        await asyncio.sleep(0.3)
        both = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(patience._ends, both.cancel)
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_error_of_the_call_stays_what_it_is():
    async def scene() -> None:
        patience = Patience(30)
        with pytest.raises(ValueError, match="own"), patience:
            raise ValueError("own")

    asyncio.run(scene())
