"""LISTEN: what becomes of it when its connection ends."""

import asyncio
import os
import socket
from typing import Any

import psycopg
import pytest

from pyclient.worker.link import State
from pyclient.worker.listening import Listener
from pyclient.worker.process import _loop_factory


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, _loop_factory()], ids=["asyncio", "uvloop where it is"])
def test_a_connection_that_gets_the_number_of_the_one_that_ended_is_heard(live_dsn, factory):
    """libpq closes the socket when it finds it ended, and whoever connects next in that moment gets its number."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        rings: asyncio.Queue[Any] = asyncio.Queue()
        heard = asyncio.Event()
        pairs: list[tuple[socket.socket, socket.socket]] = []

        class Meanwhile(asyncio.Event):
            """Another connection opens between the end of the old one and what the listener does about it."""

            def set(self) -> None:
                one, other = socket.socketpair()
                if other.fileno() == number:
                    one, other = other, one
                pairs.append((one, other))
                if one.fileno() != number:  # lower numbers were free
                    os.dup2(one.fileno(), number)
                loop.add_reader(number, heard.set)
                super().set()

        listener = Listener(live_dsn, State(), rings.put_nowait)
        listener._broken = Meanwhile()
        task = asyncio.create_task(listener.run())
        await asyncio.wait_for(rings.get(), 10)
        listening = listener.link.conn
        assert listening is not None
        number = listening.fileno()
        with psycopg.connect(live_dsn, autocommit=True) as conn:
            conn.execute("select pg_terminate_backend(%s)", [listening.info.backend_pid])
        await asyncio.wait_for(rings.get(), 10)
        pairs[0][1].send(b"x")
        await asyncio.wait_for(heard.wait(), 5)
        loop.remove_reader(number)
        task.cancel()
        if pairs[0][0].fileno() != number:
            os.close(number)
        for end in pairs[0]:
            end.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scene())
