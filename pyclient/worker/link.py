"""A connection that comes back.

`Link.call` runs something on a connection and, when the database cannot be reached or refuses for a passing reason,
waits and runs it again: at once, then after 1, 2, 4 and at most 8 seconds, each shortened at random so that a fleet
does not return in step. What went wrong is logged when it changes, not each time.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from pyclient import database, errors

T = TypeVar("T")
logger = logging.getLogger("pyclient.worker")

LONGEST_PAUSE = 8.0
_PASSING = (psycopg.OperationalError, psycopg.InterfaceError, errors.CannotConnect, TimeoutError, OSError)
# Raised as other classes, and yet they pass: read-only standby, a schema that is being installed or upgraded, a server
# that is out of resources or shutting down, a pooler that forgot what was prepared.
_PASSING_STATES = ("25006", "26000", "42883", "42P01", "3F000", "53", "55P03", "57", "40", "08", "58", "XX000")


def passes(error: BaseException) -> bool:
    """Whether the same call may well succeed a little later."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate.startswith(_PASSING_STATES)
    return isinstance(error, _PASSING)


def needs_another_connection(error: BaseException) -> bool:
    """The connection is gone, leads to a server that cannot be written to, or holds statements that were prepared for
    what is no longer there (0A000: an upgrade changed the type of their result)."""
    return (
        not isinstance(error, psycopg.Error)
        or error.sqlstate is None
        or error.sqlstate.startswith(("25006", "26000", "0A000", "57P"))
    )


def pause(failures: int) -> float:
    return 0.0 if failures <= 1 else float(min(LONGEST_PAUSE, 2.0 ** (failures - 2)) * random.uniform(0.5, 1.0))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class State:
    """Whether the database is there, as this process sees it. Threads and the event loop share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._down: dict[str, str] = {}
        self._since: float | None = None
        self.proxied = False

    @property
    def is_up(self) -> bool:
        return self._since is None

    def failed(self, link: str, error: BaseException) -> None:
        with self._lock:
            first = self._since is None
            self._down[link] = one_line(error)
            if first:
                self._since = time.monotonic()
                logger.warning("database lost error=%r", one_line(error))

    def works(self, link: str) -> None:
        if self._since is None:
            return
        with self._lock:
            self._down.pop(link, None)
            if not self._down and self._since is not None:
                logger.warning("database back after=%.1fs", time.monotonic() - self._since)
                self._since = None


class Link:
    """One connection of the event loop's, used by one task at a time."""

    def __init__(
        self,
        name: str,
        dsn: str,
        state: State,
        prepare: Callable[[database.AsyncConnection], Awaitable[None] | None] | None = None,
    ) -> None:
        self.name = name
        self.dsn = dsn
        self.state = state
        self.prepare = prepare
        self.conn: database.AsyncConnection | None = None
        self._failures = 0
        self._lock = asyncio.Lock()

    async def call(
        self,
        operation: Callable[[database.AsyncConnection], Awaitable[T]],
        *,
        until: Callable[[], bool] | None = None,
        asks: bool = True,
    ) -> T:
        """The answer of `operation`, however long the database is away; `until()` true gives up with the last error.
        With `asks` false it does not ask on this connection."""
        async with self._lock:
            while True:
                try:
                    conn = self.conn or await self._connect()
                    with database.answered(conn) if asks else contextlib.nullcontext():
                        answer = await operation(conn)
                except Exception as error:
                    if needs_another_connection(error) or (self.conn is not None and self.conn.closed):
                        await self.drop()
                    if not passes(error):
                        raise
                    self._failures += 1
                    if self._failures > 1:
                        self.state.failed(self.name, error)
                    if until is not None and until():
                        raise
                    await self._wait(pause(self._failures), until)
                except BaseException:
                    # Cancelled in the middle of a call: what the connection would answer next belongs to that call.
                    await self.drop()
                    raise
                else:
                    if self._failures:
                        self._failures = 0
                        self.state.works(self.name)
                    return answer

    async def _wait(self, seconds: float, until: Callable[[], bool] | None) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and not (until is not None and until()):  # noqa: ASYNC110
            await asyncio.sleep(min(left, 0.2))

    async def _connect(self) -> database.AsyncConnection:
        conn = await database.connect_worker_async(self.dsn)
        self.state.proxied = conn.prepare_threshold is None
        try:
            with database.answered(conn):
                if self.prepare is not None and (waiting := self.prepare(conn)) is not None:
                    await waiting
        except BaseException:
            await conn.close()
            raise
        self.conn = conn
        return conn

    async def drop(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                await conn.close()


class ThreadLink:
    """The same for a thread, which does not wait: a call that fails is tried again at the next round."""

    def __init__(self, name: str, dsn: str, state: State, *, may_take_long: bool = False) -> None:
        self.name = name
        self.dsn = dsn
        self.state = state
        self.may_take_long = may_take_long
        self.conn: database.Connection | None = None
        self._failures = 0
        self._not_before = 0.0

    def call(self, operation: Callable[[database.Connection], T]) -> T | None:
        """The answer, or None if the database cannot be had at the moment."""
        if time.monotonic() < self._not_before:
            return None
        try:
            if self.conn is None:
                self.conn = database.connect_worker(self.dsn)
            with database.answered(self.conn, self.dsn if self.may_take_long else None):
                answer = operation(self.conn)
        except Exception as error:
            if needs_another_connection(error) or (self.conn is not None and self.conn.closed):
                self.drop()
            if not passes(error):
                raise
            self._failures += 1
            if self._failures > 1:
                self.state.failed(self.name, error)
            self._not_before = time.monotonic() + pause(self._failures)
            return None
        if self._failures:
            self._failures = 0
            self.state.works(self.name)
        return answer

    def drop(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.close()
