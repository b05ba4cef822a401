"""Connections: what a DSN is given beside what it says, and what a worker needs of one."""

import atexit
import contextlib
import math
import os
import re
import select
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pyclient import errors
from pyclient.database.calling import AsyncConnection, Connection

Pool = ConnectionPool[Connection]
AsyncPool = AsyncConnectionPool[AsyncConnection]

CONNECT_TIMEOUT = 10  # seconds; without it an address that nobody answers at is waited for by the minute
# How long a call waits for a connection, while the database is away or all of them are in use.
POOL_TIMEOUT = 30.0
# Unless the DSN says otherwise: from a database that has none of its own the driver would take all text for bytes.
ENCODING = "UTF8"


def connect(dsn: str, *, autocommit: bool = True, is_worker: bool = False) -> Connection:
    """A connection, or CannotConnect with one line that says why."""
    try:
        conn = psycopg.connect(_with_defaults(dsn, is_worker), autocommit=True)
        _settle(conn, is_worker)
        conn.autocommit = autocommit
        return conn
    except psycopg.Error as error:
        raise cannot_connect(error) from error


async def connect_async(dsn: str, *, is_worker: bool = False) -> AsyncConnection:
    """The same for asyncio, in autocommit."""
    try:
        conn = await psycopg.AsyncConnection.connect(_with_defaults(dsn, is_worker), autocommit=True)
        await _settle_async(conn, is_worker)
        return conn
    except psycopg.Error as error:
        raise cannot_connect(error) from error


def _with_defaults(dsn: str, is_worker: bool) -> str:
    """What the DSN says goes first."""
    given = conninfo_to_dict(dsn)
    defaults: dict[str, str | int] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "fallback_application_name": "pyclient worker" if is_worker else "pyclient",
        "client_encoding": ENCODING,
    }
    return make_conninfo(dsn, **{name: value for name, value in defaults.items() if name not in given})


def patient(dsn: str) -> str:
    """The DSN with what a process that runs for months needs: a dead network is noticed, and of several hosts the
    one that can be written to is used. What the DSN says itself stays."""
    given = conninfo_to_dict(dsn)
    wanted: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "client_encoding": ENCODING,
    }
    if "," in str(given.get("host", "")):
        wanted["target_session_attrs"] = "read-write"
    return make_conninfo(**(wanted | given))


def is_proxied(conn: Connection | AsyncConnection, server_pid: int) -> bool:
    """A pooler answers with a process number of its own: sessions are shared then, so neither LISTEN nor prepared
    statements can be relied on."""
    return conn.info.backend_pid != server_pid


_WHO = "select pg_backend_pid()"


def _settle(conn: Connection, is_worker: bool = False) -> None:
    """Once for a connection."""
    try:
        for statement in _settings(conn, conn.execute(_WHO).fetchone(), is_worker):
            conn.execute(statement)
    except BaseException:
        conn.close()
        raise


async def _settle_async(conn: AsyncConnection, is_worker: bool = False) -> None:
    try:
        for statement in _settings(conn, await (await conn.execute(_WHO)).fetchone(), is_worker):
            await conn.execute(statement)
    except BaseException:
        await conn.close()
        raise


def _settings(conn: Connection | AsyncConnection, who: Any, is_worker: bool) -> Iterator[bytes]:
    """Times as the driver reads them, and the isolation level that a worker's calls are made for: role and database may
    have others. Where a pooler shares sessions (see `is_proxied`) there are no prepared statements, and a setting would
    stay for others. Not the DateStyle, which poolers keep for each client."""
    if who is None or is_proxied(conn, who[0]):
        conn.prepare_threshold = None
    if not (conn.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        yield b"set datestyle to iso"
    if conn.prepare_threshold is not None:
        if conn.info.parameter_status("IntervalStyle") != "postgres":
            yield b"set intervalstyle to postgres"
        if is_worker:
            yield b"set default_transaction_isolation to 'read committed'"


def connect_worker(dsn: str) -> Connection:
    """For a worker, in UTF-8 whatever the DSN says: queues, types and errors can have any name and text."""
    return connect(make_conninfo(patient(dsn), client_encoding=ENCODING), is_worker=True)


async def connect_worker_async(dsn: str) -> AsyncConnection:
    """The same for asyncio."""
    return await connect_async(make_conninfo(patient(dsn), client_encoding=ENCODING), is_worker=True)


def check(conn: Connection) -> None:
    """Raises if the connection is broken."""
    conn.execute("")


# A connection that was lent within so many seconds is not asked, only looked at: it costs a round trip less.
RECENT = 1.0
_lent_at: WeakKeyDictionary[Connection | AsyncConnection, float] = WeakKeyDictionary()


def _look_at(conn: Connection) -> None:
    if _is_in_doubt(conn):
        ConnectionPool.check_connection(conn)


async def _look_at_async(conn: AsyncConnection) -> None:
    if _is_in_doubt(conn):
        await AsyncConnectionPool.check_connection(conn)


def _is_in_doubt(conn: Connection | AsyncConnection) -> bool:
    """Whether to ask the server before this connection is lent. Where nothing was asked there is nothing to read, but
    for the farewell of a server that ended the session."""
    now = time.monotonic()
    lent_at, _lent_at[conn] = _lent_at.get(conn, -math.inf), now
    return now - lent_at > RECENT or _is_readable(conn.fileno())


def _is_readable(fileno: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([fileno], [], [], 0)[0])
    # select takes no numbers above 1023.
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))


def pool(dsn: str, *, max_size: int = 10) -> Pool:
    """Connections for an application's own calls, opened as they are needed. Each is looked at before it is lent: the
    one that a restart of the server broke would fail somebody's attempt."""
    opened = ConnectionPool(
        patient(dsn),
        kwargs=_POOLED,
        min_size=0,
        max_size=max_size,
        timeout=POOL_TIMEOUT,
        open=True,
        configure=_settle,
        check=_look_at,
        name="pyclient",
    )
    _opened[opened] = os.getpid()
    return opened


_opened: WeakKeyDictionary[Pool, int] = WeakKeyDictionary()


@atexit.register
def _close_pools() -> None:
    """While threads can still be joined: a pool that dies with the interpreter waits for each of its own (Python 3.13)
    or prints a traceback (3.14). A pool of the parent of a fork is the parent's."""
    for opened in [one for one, pid in _opened.items() if pid == os.getpid()]:
        opened.close(timeout=1)


def pool_async(dsn: str, *, max_size: int = 10) -> AsyncPool:
    """The same for asyncio; to be opened."""
    return AsyncConnectionPool(
        patient(dsn),
        kwargs=_POOLED,
        min_size=0,
        max_size=max_size,
        timeout=POOL_TIMEOUT,
        open=False,
        configure=_settle_async,
        check=_look_at_async,
        name="pyclient",
    )


@contextlib.contextmanager
def lend(pool: Pool) -> Iterator[Connection]:
    """A connection of the pool. A pool knows only that it took too long; asking once more tells why."""
    try:
        with _installed(), pool.connection() as conn:
            yield conn
    except PoolTimeout:
        connect(str(pool.conninfo)).close()
        raise


@contextlib.asynccontextmanager
async def lend_async(pool: AsyncPool) -> AsyncIterator[AsyncConnection]:
    """The same for asyncio."""
    try:
        with _installed():
            async with pool.connection() as conn:
                yield conn
    except PoolTimeout:
        await (await connect_async(str(pool.conninfo))).close()
        raise


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InvalidSchemaName as error:
        raise errors.SchemaMismatch("the database does not have pg_almanac", hint="Run: pyclient migrate") from error


_POOLED: dict[str, Any] = {"autocommit": True, "fallback_application_name": "pyclient"}


def cannot_connect(error: psycopg.Error) -> errors.CannotConnect:
    reason = " ".join(str(error).split()) or type(error).__name__
    hint = "Check --dsn, ALMANAC_DSN or DATABASE_URL; without any of them an embedded server is used."
    if isinstance(error, psycopg.ProgrammingError):
        # A DSN that cannot be read. Which part of it is the password is not known then, and this goes into logs.
        if not reason.startswith(("invalid connection option", "invalid URI query parameter")):
            reason = re.sub(r'^(missing "=" after |.*?)".*"', r"\1…", reason)
        hint += " Write postgresql://user@host:5432/database, or host=… dbname=…"
    return errors.CannotConnect(f"cannot connect to the database: {reason}", hint=hint)
