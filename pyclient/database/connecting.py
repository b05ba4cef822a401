"""Connections: what a DSN is given beside what it says, and what a worker needs of one."""

import atexit
import contextlib
import functools
import logging
import math
import os
import re
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pyclient import errors, settings
from pyclient.database.calling import AsyncConnection, Connection

logger = logging.getLogger("pyclient")
Pool = ConnectionPool[Connection]
AsyncPool = AsyncConnectionPool[AsyncConnection]

CONNECT_TIMEOUT = 10.0  # seconds; without it an address that does not answer is waited for by the minute
# How long a call waits for a connection, while the database is away or all of them are in use.
POOL_TIMEOUT = 30.0
# Unless the DSN says otherwise: from a database that has none of its own the driver would take all text for bytes.
ENCODING = "UTF8"


def connect(dsn: str, *, autocommit: bool = True, is_worker: bool = False) -> Connection:
    """A connection, or CannotConnect with one line that says why."""
    try:
        conn = psycopg.connect(patient(dsn, is_worker=is_worker), autocommit=True)
        _settle(conn, is_worker)
        conn.autocommit = autocommit
        return conn
    except psycopg.Error as error:
        raise cannot_connect(error) from error


async def connect_async(dsn: str, *, is_worker: bool = False) -> AsyncConnection:
    """The same for asyncio, in autocommit."""
    try:
        conn = await psycopg.AsyncConnection.connect(patient(dsn, is_worker=is_worker), autocommit=True)
        await _settle_async(conn, is_worker)
        return conn
    except psycopg.Error as error:
        raise cannot_connect(error) from error


def patient(dsn: str, *, is_worker: bool = False) -> str:
    """The DSN with what a process that runs for months needs: a dead network is noticed, and of several hosts the
    one that can be written to is used. What the DSN says itself stays, but for a worker's encoding: queues, types and
    errors can have any name and text."""
    given = conninfo_to_dict(dsn)
    try:
        patience = settings.patience()
    except ValueError as error:
        raise errors.CannotConnect(str(error), hint="Leave it out for 30 seconds.") from error
    wanted: dict[str, Any] = {
        "fallback_application_name": "pyclient worker" if is_worker else "pyclient",
        "connect_timeout": math.ceil(min(CONNECT_TIMEOUT, patience)),
        "keepalives_idle": math.ceil(patience / 2),
        "keepalives_interval": math.ceil(patience / 6),
        "keepalives_count": 3,
        "tcp_user_timeout": round(1000 * patience),
        "client_encoding": ENCODING,
    }
    if "," in str(given.get("host", "")):
        wanted["target_session_attrs"] = "read-write"
    return make_conninfo(**(wanted | given | ({"client_encoding": ENCODING} if is_worker else {})))


_WHO = "select pg_backend_pid()"


def _settle(conn: Connection, is_worker: bool = False) -> None:
    """Once for a connection."""
    try:
        with answered(conn):
            for statement in _settings(conn, conn.execute(_WHO).fetchone(), is_worker):
                conn.execute(statement)
    except BaseException:
        conn.close()
        raise


async def _settle_async(conn: AsyncConnection, is_worker: bool = False) -> None:
    try:
        with answered(conn):
            for statement in _settings(conn, await (await conn.execute(_WHO)).fetchone(), is_worker):
                await conn.execute(statement)
    except BaseException:
        await conn.close()
        raise


def _settings(conn: Connection | AsyncConnection, who: Any, is_worker: bool) -> Iterator[bytes]:
    """Times as the driver reads them, and the isolation level that a worker's calls are made for: role and database may
    have others. A pooler answers with a process number of its own. Sessions are shared then: neither LISTEN nor what
    is prepared can be relied on, and a setting would stay for others; the DateStyle of each is kept by poolers."""
    if who is None or conn.info.backend_pid != who[0]:
        conn.prepare_threshold = None
    if not (conn.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        yield b"set datestyle to iso"
    if conn.prepare_threshold is not None:
        # So that the server, too, notices that we are gone, also in the middle of a query where its platform can tell,
        # and lets go of the jobs that the session holds.
        patience = settings.patience()
        yield f"""do $$ begin
            perform set_config('tcp_keepalives_idle', '{math.ceil(patience / 2)}', false),
                    set_config('tcp_keepalives_interval', '{math.ceil(patience / 6)}', false),
                    set_config('tcp_keepalives_count', '3', false),
                    set_config('tcp_user_timeout', '{round(1000 * patience)}', false),
                    set_config('almanac.patience', '{patience:g}s', false);
            begin
                perform set_config('client_connection_check_interval', '{round(500 * patience)}', false);
            exception when invalid_parameter_value then null;
            end;
        end $$""".encode()
        if conn.info.parameter_status("IntervalStyle") != "postgres":
            yield b"set intervalstyle to postgres"
        if is_worker:
            yield b"set default_transaction_isolation to 'read committed'"


connect_worker = functools.partial(connect, is_worker=True)
connect_worker_async = functools.partial(connect_async, is_worker=True)


def check(conn: Connection) -> None:
    """Raises if the connection is broken."""
    conn.execute("")


# ── silence ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A server that is frozen, or a pooler that hangs, keeps its connections open: nothing on the network says so. So one
# thread of each process looks at who waits, and cuts connections that have not answered for as long as we wait.

# Until when, and where to ask whether the server is at work.
_asked: dict[Connection | AsyncConnection, tuple[float, str | None]] = {}
_watcher: tuple[int, threading.Thread] | None = None


@contextlib.contextmanager
def answered(conn: Connection | AsyncConnection, dsn: str | None = None) -> Iterator[None]:
    """What is asked in the block is answered in time, or the connection is closed and an OperationalError says so. Not
    for statements of users, which may take long. With a DSN the server is asked first whether it is at work."""
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid():
        _asked.clear()  # those of the parent of a fork are the parent's
        _watcher = os.getpid(), threading.Thread(target=_cut_silent, name="silence", daemon=True)
        _watcher[1].start()
    _asked[conn] = time.monotonic() + settings.patience(), dsn
    try:
        yield
    finally:
        _asked.pop(conn, None)


def _cut_silent() -> None:
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        for conn, (until, dsn) in _asked.copy().items():
            if until < now and dsn is None:
                _cut(conn)
            elif until < now:
                _asked[conn] = mark = now + settings.patience(), dsn
                threading.Thread(target=_cut_unless_at_work, args=[conn, mark], daemon=True).start()


def _cut_unless_at_work(conn: Connection | AsyncConnection, mark: tuple[float, str]) -> None:
    with contextlib.suppress(errors.AlmanacError, psycopg.Error), contextlib.closing(connect(mark[1])) as other:
        at_work = "select from pg_stat_activity where pid = %s and state = 'active'"
        if other.execute(at_work, [conn.info.backend_pid]).fetchone() is not None:
            return
    if _asked.get(conn) is mark:
        _cut(conn)


def _cut(conn: Connection | AsyncConnection) -> None:
    _asked.pop(conn, None)
    logger.warning("the database does not answer: connection cut after=%gs", settings.patience())
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


# A connection that was lent within so many seconds is not asked, only looked at: it costs a round trip less.
RECENT = 1.0
_lent_at: WeakKeyDictionary[Connection | AsyncConnection, float] = WeakKeyDictionary()


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

    def look(conn: Connection) -> None:
        if _is_in_doubt(conn):
            try:
                with answered(conn):
                    opened.check_connection(conn)
            except psycopg.Error:
                # The others are no better, and the pool pauses longer after each that it has asked.
                opened.drain()
                raise

    opened: Pool = ConnectionPool(
        patient(dsn),
        kwargs={"autocommit": True},
        min_size=0,
        max_size=max_size,
        timeout=POOL_TIMEOUT,
        open=True,
        configure=_settle,
        check=look,
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

    async def look(conn: AsyncConnection) -> None:
        if _is_in_doubt(conn):
            try:
                with answered(conn):
                    await made.check_connection(conn)
            except psycopg.Error:
                await made.drain()
                raise

    made: AsyncPool = AsyncConnectionPool(
        patient(dsn),
        kwargs={"autocommit": True},
        min_size=0,
        max_size=max_size,
        timeout=POOL_TIMEOUT,
        open=False,
        configure=_settle_async,
        check=look,
        name="pyclient",
    )
    return made


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


def cannot_connect(error: psycopg.Error) -> errors.CannotConnect:
    reason = " ".join(str(error).split()) or type(error).__name__
    hint = "Check --dsn, ALMANAC_DSN or DATABASE_URL; without any of them an embedded server is used."
    if isinstance(error, psycopg.ProgrammingError):
        # A DSN that cannot be read. Which part of it is the password is not known then, and this goes into logs.
        if not reason.startswith(("invalid connection option", "invalid URI query parameter")):
            reason = re.sub(r'^(missing "=" after |.*?)".*"', r"\1…", reason)
        hint += " Write postgresql://user@host:5432/database, or host=… dbname=…"
    return errors.CannotConnect(f"cannot connect to the database: {reason}", hint=hint)
