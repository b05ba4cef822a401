"""LISTEN on a connection of its own. Hearing nothing costs the polling interval, never a job."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pyclient import database
from pyclient.worker.link import Link, State, pause

logger = logging.getLogger("pyclient.worker")


class Listener:
    def __init__(self, dsn: str, state: State, on_ring: Callable[[Sequence[str] | None], None]) -> None:
        self.link = Link("listen", dsn, state)
        self.state = state
        self.on_ring = on_ring
        self.is_heard = False
        self._broken = asyncio.Event()
        self._fileno: int | None = None

    async def run(self) -> None:
        """Until cancelled, or for good where a pooler shares sessions."""
        failures = 0
        while True:
            self._broken.clear()
            await self.link.call(self._listen)
            conn = self.link.conn
            if conn is None or conn.prepare_threshold is None:
                logger.info("no notifications through a pooler; polling instead")
                await self.link.drop()
                return
            loop = asyncio.get_running_loop()
            self._fileno = conn.fileno()
            loop.add_reader(self._fileno, self._readable, conn)
            self.is_heard = True
            # What was enqueued while nobody listened did not reach us.
            self.on_ring(None)
            began = loop.time()
            try:
                await self._broken.wait()
            finally:
                self.is_heard = False
                self._stop_reading()
                await self.link.drop()
            self.on_ring(None)
            failures = failures + 1 if loop.time() - began < 10 else 1
            await asyncio.sleep(pause(failures))

    async def _listen(self, conn: database.AsyncConnection) -> None:
        if conn.prepare_threshold is not None:
            await database.listen(conn)

    def _readable(self, conn: database.AsyncConnection) -> None:
        try:
            queues = database.rung(conn)
        except database.DatabaseError:
            # Here and now: the socket is closed already, and the next connection anybody opens gets its number.
            self._stop_reading()
            self._broken.set()
            return
        if queues:
            self.on_ring(queues)

    def _stop_reading(self) -> None:
        if self._fileno is not None:
            asyncio.get_running_loop().remove_reader(self._fileno)
            self._fileno = None
