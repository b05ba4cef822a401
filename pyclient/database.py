"""The calls. The only module with SQL in it.

Each call is written once, as a signature: its name and arguments are those of the function in the schema `almanac`,
its return annotation says what comes back. `@call` turns it into something that runs on a sync or an async
connection:

    job = database.enqueue(conn, queue="mail", job_type="send", payload={"to": "a@example.org"})
    jobs = await database.claim_due(aconn, queue="mail", worker="w1", batch_size=10)

An argument that is not given is not sent, so the default is the one the database has. `call_sql` builds the statement
and `_Rows` reads the answer; the two shells at the end of `Call` only carry them to the server and back.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import struct
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, cast, overload

import psycopg
import psycopg.errors
import psycopg.rows
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pyclient import errors, wire

try:
    import orjson
except ImportError:
    json_loads: Callable[[bytes], Any] = json.loads
else:
    json_loads = orjson.loads

P = ParamSpec("P")
R = TypeVar("R")
Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
DatabaseError = psycopg.Error
Pool = ConnectionPool[Connection]
AsyncPool = AsyncConnectionPool[AsyncConnection]

Json = Annotated[Any, "jsonb"]
JsonList = Annotated[Sequence[Any], "jsonb[]"]
Small = Annotated[int, "smallint"]
# A time, or so long from the database's now: the caller's clock is not asked.
Instant = Annotated[datetime | timedelta, "instant"]
FROM_NOW = "from now"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class JsonText(str):
    """JSON that is text already; sent as it stands."""

    __slots__ = ()


# Stands for "not given": the argument is left out and the default of the SQL function holds. Typed Any so that it can
# be the default of every argument.
OMIT: Any = type("Omit", (), {"__repr__": lambda self: "OMIT", "__bool__": lambda self: False})()


# ── how a call is made ──────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def call_sql(name: str, given: tuple[str, ...], casts: tuple[str, ...] = ()) -> sql.Composed:
    """`select * from almanac.name(a => %(a)s, …)`, cached so that psycopg sees one text and prepares it.

    The column list comes from the function's result type: a later column does not disturb an older client.
    """
    typed = dict(zip(given, casts, strict=False))
    arguments = [
        sql.SQL("{} => {}{}{}").format(
            sql.Identifier(argument),
            sql.SQL("almanac.clock() + " if typed.get(argument) == FROM_NOW else ""),
            sql.Placeholder(argument),
            sql.SQL(f"::{typed[argument]}" if typed.get(argument, FROM_NOW) not in ("", FROM_NOW) else ""),
        )
        for argument in given
    ]
    return sql.SQL("select * from almanac.{}({})").format(sql.Identifier(name), sql.SQL(", ").join(arguments))


class _Rows:
    """Reads an answer as the annotation says: list[X], X | None, X or None; X a dataclass or a scalar."""

    def __init__(self, annotation: Any) -> None:
        self.many = typing.get_origin(annotation) is list
        arguments = typing.get_args(annotation)
        self.optional = annotation is None or annotation is type(None)
        self.nothing = self.optional
        row = annotation
        if self.many:
            (row,) = arguments
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in arguments:
            self.optional = True
            (row,) = (argument for argument in arguments if argument is not type(None))
        self.row: Callable[..., Any] | None = None
        self.fields: list[str] = []
        if isinstance(row, type) and dataclasses.is_dataclass(row):
            self.row, self.fields = row, [field.name for field in dataclasses.fields(row)]

    def read(self, cursor: Any, rows: list[tuple[Any, ...]]) -> Any:
        if self.nothing:
            return None
        if self.row is not None:
            columns = {column.name: position for position, column in enumerate(cursor.description)}
            take = [(field, columns[field]) for field in self.fields if field in columns]
            # A function that returns one composite and found nothing answers with a row of nulls.
            read = [
                self.row(**{field: row[at] for field, at in take}) for row in rows if any(x is not None for x in row)
            ]
        else:
            read = [row[0] for row in rows]
        if self.many:
            return read
        return read[0] if read else None


def _adapter(annotation: Any) -> tuple[str, Callable[[Any], Any] | None]:
    """How an argument travels: the cast it needs, and what wraps its value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        for hint in getattr(candidate, "__metadata__", ()):
            if hint == "jsonb":
                return "", lambda value: value if isinstance(value, JsonText) else Jsonb(value)
            if hint == "jsonb[]":
                # One text for all: adapted one by one they would take the client as long as the server takes for them.
                return "jsonb[]", lambda value: _texts(map(_json_text, value))
            return hint, None
    return "", None


class Call(Generic[P, R]):
    """One function of the schema, callable on a sync or an async connection."""

    def __init__(self, signature: Callable[P, R]) -> None:
        functools.update_wrapper(self, signature)
        self.name = signature.__name__
        hints = typing.get_type_hints(signature, include_extras=True)
        self.rows = _Rows(hints.pop("return"))
        parameters = inspect.signature(signature).parameters
        self.adapters = {name: _adapter(hints[name]) for name in parameters}
        self.required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}

    def statement(self, arguments: Mapping[str, Any]) -> tuple[sql.Composed, dict[str, Any]]:
        values = {}
        for name, value in arguments.items():
            if value is OMIT:
                continue
            try:
                wrap = self.adapters[name][1]
            except KeyError:
                raise TypeError(f"{self.name}() has no argument {name!r}") from None
            values[name] = wrap(value) if wrap is not None and value is not None else value
        return call_sql(self.name, tuple(values), tuple(map(self._cast, values, values.values()))), values

    def _cast(self, name: str, value: Any) -> str:
        hint = self.adapters[name][0]
        if hint == "instant":
            return FROM_NOW if isinstance(value, timedelta) else ""
        return hint

    @overload
    def __call__(self, conn: Connection, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, conn: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def __call__(self, conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        statement, values = self.statement(kwargs)
        return (self._run_async if isinstance(conn, psycopg.AsyncConnection) else self._run)(conn, statement, values)

    def _run(self, conn: Connection, statement: sql.Composed, values: dict[str, Any]) -> R:
        with translated(), conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(statement, values)
            return cast(R, self.rows.read(cursor, cursor.fetchall()))

    async def _run_async(self, conn: AsyncConnection, statement: sql.Composed, values: dict[str, Any]) -> R:
        with translated():
            async with conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
                await cursor.execute(statement, values)
                return cast(R, self.rows.read(cursor, await cursor.fetchall()))


def call(signature: Callable[P, R]) -> Call[P, R]:
    return Call(signature)


class _Translated:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, psycopg.Error) and (known := errors.from_database(error)):
            raise known from error


_TRANSLATED = _Translated()


def translated() -> _Translated:
    """Errors of class PA leave as the exceptions of `errors`; all others stay psycopg's."""
    return _TRANSLATED


# ── rows that come back ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedJob:
    queue: str
    job_id: int
    created: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    queue: str
    job_id: int
    job_type: str
    payload: Any
    attempt: int
    max_attempts: int
    due_at: datetime
    lateness: timedelta
    lease_token: int
    lease_expires_at: datetime
    idempotency_key: str | None = None
    attempt_key: str | None = None
    schedule: str | None = None
    tick_at: datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedJob:
    state: str
    due_at: datetime | None
    attempt: int


# ── producers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def enqueue(
    *,
    queue: str,
    job_type: str,
    payload: Json = OMIT,
    due_at: Instant = OMIT,
    priority: Small = OMIT,
    dedup_key: str | None = OMIT,
    dedup_for: timedelta | None = OMIT,
    concurrency_key: str | None = OMIT,
    idempotency_key: str | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    headers: Json = OMIT,
) -> EnqueuedJob: ...


@call
def enqueue_many(
    *,
    queue: str,
    job_type: str,
    payloads: JsonList,
    due_at: Instant = OMIT,
    priority: Small = OMIT,
    dedup_keys: Sequence[str | None] | None = OMIT,
    dedup_for: timedelta | None = OMIT,
    concurrency_keys: Sequence[str | None] | None = OMIT,
    idempotency_keys: Sequence[str | None] | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    headers: Json = OMIT,
) -> list[EnqueuedJob]: ...


@call
def cancel(*, queue: str, job_id: int, reason: str | None = OMIT) -> str: ...


@call
def redrive(
    *,
    queue: str,
    job_id: int = OMIT,
    reason: str | None = OMIT,
    job_type: str | None = OMIT,
    error_like: str | None = OMIT,
    batch_size: int = OMIT,
) -> list[int]: ...


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def claim_due(
    *,
    queue: str,
    worker: str,
    batch_size: int = OMIT,
    lease: timedelta | None = OMIT,
    job_types: Sequence[str] | None = OMIT,
) -> list[ClaimedJob]: ...


@call
def extend_lease(*, queue: str, job_id: int, lease_token: int, lease: timedelta | None = OMIT) -> datetime: ...


@call
def complete(
    *, queue: str, job_id: int, lease_token: int, result: Json = OMIT, external_id: str | None = OMIT
) -> None: ...


@call
def complete_many(
    *,
    queue: str,
    job_ids: Sequence[int],
    lease_tokens: Sequence[int],
    results: JsonList = OMIT,
    external_ids: Sequence[str | None] = OMIT,
) -> list[int]: ...


@call
def fail_with_backoff(
    *,
    queue: str,
    job_id: int,
    lease_token: int,
    error: str,
    permanent: bool = OMIT,
    retry_after: timedelta | None = OMIT,
) -> FailedJob: ...


@call
def release(*, queue: str, job_id: int, lease_token: int, reason: str | None = OMIT) -> FailedJob: ...


@call
def snooze(*, queue: str, job_id: int, lease_token: int, until: Instant, reason: str | None = OMIT) -> FailedJob: ...


@call
def doze(*, queue: str, worker: str, at_most: timedelta = OMIT) -> datetime | None: ...


@call
def wake(*, queue: str, worker: str) -> None: ...


@call
def report_worker(
    *, worker: str, host: str, pid: int, version: str, queues: Sequence[str], concurrency: int, running: int
) -> None: ...


@call
def tick_if_stale(*, worker: str, stale_after: timedelta = OMIT) -> bool: ...


@call
def reclaim_expired(*, queue: str | None = OMIT, batch_size: int = OMIT) -> int: ...


@call
def retire_worker(*, worker: str) -> None: ...


@call
def put_job_type(
    *,
    queue: str,
    job_type: str,
    lease: timedelta | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    jitter: float | None = OMIT,
    schema: Json = OMIT,
    description: str | None = OMIT,
) -> None: ...


# ── the worker's hot path ───────────────────────────────────────────────────────────────────────────────────────────
# The same functions, for a thousand jobs at a time: rows stay tuples, columns are read when a handler asks for them.


# The rows, and when they were claimed in microseconds since 2000.
ClaimedRows = tuple[list[tuple[Any, ...]], int]
# Queue, worker, lease and job types as they are sent with every claim.
ClaimArguments = tuple[bytes, bytes, bytes | None, bytes]


def claim_arguments(queue: str, worker: str, lease: timedelta | None, job_types: Iterable[str]) -> ClaimArguments:
    in_seconds = None if lease is None else f"{lease.total_seconds()} s".encode()
    return queue.encode(), worker.encode(), in_seconds, _texts(job_types).encode()


class Claimed:
    """Where a column stands in a row of `claimed_rows`."""

    (
        JOB_ID, LEASE_TOKEN, JOB_TYPE, PAYLOAD, ATTEMPT, MAX_ATTEMPTS, DUE_AT, LEASE_EXPIRES_AT, LATENESS,
        IDEMPOTENCY_KEY, ATTEMPT_KEY, SCHEDULE, TICK_AT, CAUGHT_UP, PRIORITY, CONCURRENCY_KEY, HEADERS, CREATED_AT,
    ) = range(18)  # fmt: skip


_CLAIMED = b"""
select job_id, lease_token, job_type, payload, attempt, max_attempts, due_at, lease_expires_at, lateness,
       idempotency_key, attempt_key, schedule, tick_at, caught_up, priority, concurrency_key, headers, created_at
  from almanac."""
_CLAIM = wire.Statement(
    b"almanac_claim",
    _CLAIMED + b"claim_due(queue => $1, worker => $2, batch_size => $3, lease => $4, job_types => $5)",
)
_CLAIM_ONE = _CLAIMED + b"claim_job(queue => $1, job_id => $2, worker => $3, lease => $4)"
# Only the number comes back: all of them is the usual answer, and asking again is harmless where it is not.
_COMPLETE = b"""
select count(*)
  from almanac.complete_many(queue => $1, job_ids => $2::bigint[], lease_tokens => $3::bigint[],
                             results => $4::jsonb[], external_ids => $5::text[])
"""
_COMPLETED = b"""
select almanac.complete_many(queue => $1, job_ids => $2::bigint[], lease_tokens => $3::bigint[])
"""
# In the order of the ids, as every batch locks them.
_FAIL = b"""
select f.job_id, r.state, r.due_at
  from (select * from jsonb_to_recordset($2::jsonb)
            as f (job_id bigint, lease_token bigint, error text, permanent boolean, retry_after float8)
         order by f.job_id) f,
       almanac.fail_with_backoff(queue => $1, job_id => f.job_id, lease_token => f.lease_token, error => f.error,
                                 permanent => f.permanent, retry_after => make_interval(secs => f.retry_after)) r
"""
_RELEASE = b"""
select f.job_id
  from (select * from jsonb_to_recordset($2::jsonb) as f (job_id bigint, lease_token bigint, reason text)
         order by f.job_id) f,
       almanac.release(queue => $1, job_id => f.job_id, lease_token => f.lease_token, reason => f.reason) r
"""
_DOZE = b"""
select extract(epoch from almanac.doze(queue => $1, worker => $2, at_most => $3) - almanac.clock())::float8
"""
_EXTEND = b"""
select e.job_id, e.lease_token, extract(epoch from e.lease_expires_at - almanac.clock())::float8,
       e.cancel_requested_at is not null
  from almanac.extend_leases(queue => $1, job_ids => $2::bigint[], lease_tokens => $3::bigint[], lease => $4) e
"""


async def for_claims(conn: AsyncConnection) -> None:
    """Prepare a connection for `send_claim`: jsonb, timestamptz and interval stay nearly as they come over the wire."""
    conn.adapters.register_loader("jsonb", ByteaBinaryLoader)
    conn.adapters.register_loader("interval", ByteaBinaryLoader)
    conn.adapters.register_loader("timestamptz", Int8BinaryLoader)
    with translated():
        await _CLAIM.prepare(conn)


async def doze_for(conn: AsyncConnection, queue: str, worker: str, at_most: timedelta) -> float | None:
    """`doze`, answered in seconds from now: a worker's clock need not agree with the database's."""
    with translated():
        cursor = psycopg.AsyncRawCursor(conn, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(_DOZE, (queue, worker, at_most), prepare=True)
        row = await cursor.fetchone()
    return None if row is None else row[0]


async def claim_one(
    conn: AsyncConnection, queue: str, job_id: int, worker: str, lease: timedelta | None
) -> ClaimedRows:
    """As `send_claim` and `claimed_rows`, for one job by its id."""
    with translated():
        cursor = psycopg.AsyncRawCursor(conn, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(_CLAIM_ONE, (queue, job_id, worker, lease), binary=True)
        return _claimed(await cursor.fetchall())


def _claimed(rows: list[tuple[Any, ...]]) -> ClaimedRows:
    if not rows:
        return rows, 0
    microseconds, days, _ = struct.unpack(">qii", rows[0][Claimed.LATENESS])
    return rows, rows[0][Claimed.DUE_AT] + microseconds + days * 86_400_000_000


def send_claim(conn: AsyncConnection, arguments: ClaimArguments, batch_size: int) -> None:
    """Claim without waiting for the answer, which `claimed_rows` gives. After `for_claims`."""
    queue, worker, lease, job_types = arguments
    with translated():
        _CLAIM.send(conn, (queue, worker, b"%d" % batch_size, lease, job_types))


async def claimed_rows(conn: AsyncConnection) -> ClaimedRows:
    """Rows in the order of `Claimed`."""
    with translated():
        return _claimed(await _CLAIM.answer(conn))


def json_value(raw: bytes) -> Any:
    """A jsonb as it comes over the wire: one byte of version, then text."""
    return json_loads(raw[1:])


def instant(microseconds: int) -> datetime:
    """A timestamptz as it comes over the wire."""
    return _EPOCH + timedelta(microseconds=microseconds)


def _bigints(numbers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"


def _json_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, JsonText) else json.dumps(value)


def _texts(values: Iterable[str | None]) -> str:
    quoted = ("null" if x is None else '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"' for x in values)
    return "{" + ",".join(quoted) + "}"


# job_id, lease_token, result as JSON text, external_id.
Ended = tuple[int, int, str | None, str | None]


async def complete_rows(conn: AsyncConnection, queue: str, ended: Sequence[Ended]) -> set[int] | None:
    """Complete jobs. None: all of them; else the ids that are completed, the lease of the others is lost."""
    ids, tokens = _bigints([e[0] for e in ended]), _bigints([e[1] for e in ended])
    results = _texts([e[2] for e in ended]) if any(e[2] is not None for e in ended) else None
    externals = _texts([e[3] for e in ended]) if any(e[3] is not None for e in ended) else None
    with translated():
        cursor = psycopg.AsyncRawCursor(conn, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(_COMPLETE, (queue, ids, tokens, results, externals), prepare=True)
        row = await cursor.fetchone()
        if row is not None and row[0] == len(ended):
            return None
        await cursor.execute(_COMPLETED, (queue, ids, tokens), prepare=True)
        return {row[0] for row in await cursor.fetchall()}


async def fail_rows(
    conn: AsyncConnection, queue: str, failed: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str, datetime | None]]:
    """(job_id, state, due_at) of each. Raises LeaseLost if one of the leases is lost, and nothing is recorded."""
    with translated():
        cursor = psycopg.AsyncRawCursor(conn, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(_FAIL, (queue, Jsonb(failed)), prepare=True)
        return await cursor.fetchall()


async def release_rows(conn: AsyncConnection, queue: str, released: Sequence[Mapping[str, Any]]) -> None:
    """As `fail_rows`, for jobs that are given back."""
    with translated():
        await psycopg.AsyncRawCursor(conn).execute(_RELEASE, (queue, Jsonb(released)), prepare=True)


def extend_rows(
    conn: Connection, queue: str, held: Sequence[tuple[int, int]], lease: timedelta | None
) -> list[tuple[int, int, float, bool]]:
    """(job_id, lease_token, seconds it lasts, cancellation was asked for) of the leases that go on."""
    ids, tokens = _bigints([h[0] for h in held]), _bigints([h[1] for h in held])
    with translated():
        cursor = psycopg.RawCursor(conn, row_factory=psycopg.rows.tuple_row)
        return cursor.execute(_EXTEND, (queue, ids, tokens, lease), prepare=True).fetchall()


async def cancel_held(conn: AsyncConnection, queue: str, job_id: int, lease_token: int, reason: str) -> None:
    """A handler says its job is not wanted any more: ask for the cancellation, then let go."""
    async with conn.transaction():
        await cancel(conn, queue=queue, job_id=job_id, reason=reason)
        await release(conn, queue=queue, job_id=job_id, lease_token=lease_token, reason=reason)


def put_queue_if_missing(conn: Connection, *, queue: str) -> None:
    """Make the queue unless it is there. Asked by a call that changes nothing: a worker may use a queue without the
    right to make or change one."""
    try:
        wake(conn, queue=queue, worker="nobody")
    except errors.QueueUnknown:
        with translated():
            conn.execute("select almanac.put_queue(%s)", [queue])


def count_due(conn: Connection, *, queue: str) -> int:
    """Jobs that are due and wait."""
    with translated():
        row = conn.execute("select almanac.count_due(%s)", [queue], prepare=True).fetchone()
    assert row is not None
    return int(row[0])


async def listen(conn: AsyncConnection) -> None:
    await conn.execute("listen almanac")


def rung(conn: AsyncConnection) -> list[str]:
    """The queues for which somebody rang, without waiting. Raises when the connection is gone."""
    conn.pgconn.consume_input()
    queues = []
    while (notification := conn.pgconn.notifies()) is not None:
        queues.append(notification.extra.decode())
    return queues


# ── schedules ───────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def put_schedule(
    *,
    queue: str,
    name: str,
    cron: str | None = OMIT,
    job_type: str | None = OMIT,
    payload: Json = OMIT,
    timezone: str | None = OMIT,
    at: datetime | None = OMIT,
    template: str | None = OMIT,
    starts_at: datetime | None = OMIT,
    ends_at: datetime | None = OMIT,
    dst_gap: str | None = OMIT,
    dst_overlap: str | None = OMIT,
    jitter: timedelta | None = OMIT,
    max_fires: int | None = OMIT,
    overlap: str | None = OMIT,
    max_running: int | None = OMIT,
    catch_up: str | None = OMIT,
    max_age: timedelta | None = OMIT,
    max_runs: int | None = OMIT,
    pace: int | None = OMIT,
    after_schedule: str | None = OMIT,
    within: timedelta | None = OMIT,
    gate_closed: str | None = OMIT,
    gate_wait: timedelta | None = OMIT,
    priority: int = OMIT,
    max_attempts: int | None = OMIT,
    concurrency_key: str | None = OMIT,
    headers: Json = OMIT,
    description: str | None = OMIT,
    kind: str = OMIT,
) -> None: ...


# ── cron ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedRun:
    run_at: datetime
    local_time: datetime
    utc_time: datetime
    utc_offset: str
    rule_kind: str
    note: str | None = None


@call
def describe_cron(*, cron: str) -> str: ...


@call
def next_runs(
    *,
    cron: str,
    timezone: str,
    after: datetime,
    count: int = OMIT,
    dst_gap: str = OMIT,
    dst_overlap: str = OMIT,
    anchor: datetime = OMIT,
) -> list[datetime]: ...


@call
def preview_cron(
    *,
    cron: str,
    timezone: str = OMIT,
    count: int = OMIT,
    after: datetime | None = OMIT,
    dst_gap: str = OMIT,
    dst_overlap: str = OMIT,
    anchor: datetime = OMIT,
) -> list[PreviewedRun]: ...


# ── connecting, installing ──────────────────────────────────────────────────────────────────────────────────────────


CONNECT_TIMEOUT = 10  # seconds; without it an address that nobody answers at is waited for by the minute


def connect(dsn: str, *, autocommit: bool = True, application_name: str = "pyclient") -> Connection:
    """A connection, or CannotConnect with one line that says why."""
    try:
        return psycopg.connect(_with_defaults(dsn, application_name), autocommit=autocommit)
    except psycopg.Error as error:
        raise _cannot_connect(error) from error


async def connect_async(dsn: str, *, autocommit: bool = True, application_name: str = "pyclient") -> AsyncConnection:
    """The same for asyncio."""
    try:
        return await psycopg.AsyncConnection.connect(_with_defaults(dsn, application_name), autocommit=autocommit)
    except psycopg.Error as error:
        raise _cannot_connect(error) from error


def _with_defaults(dsn: str, application_name: str) -> str:
    """What the DSN says goes first."""
    given = conninfo_to_dict(dsn)
    defaults: dict[str, str | int] = {"connect_timeout": CONNECT_TIMEOUT, "fallback_application_name": application_name}
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
    }
    if "," in str(given.get("host", "")):
        wanted["target_session_attrs"] = "read-write"
    return make_conninfo(**(wanted | given))


def is_proxied(conn: Connection | AsyncConnection, server_pid: int) -> bool:
    """A pooler answers with a process number of its own: sessions are shared then, so neither LISTEN nor prepared
    statements can be relied on."""
    return conn.info.backend_pid != server_pid


_READ_COMMITTED = "set default_transaction_isolation to 'read committed'"


def connect_worker(dsn: str) -> Connection:
    """A connection for a worker; without prepared statements where a pooler shares sessions (see `is_proxied`), and in
    UTF-8 whatever the DSN says: queues, types and errors can have any name and text. Where the session is its own, in
    the isolation level that the calls of a worker are made for, whatever the role or the database has for others."""
    conn = connect(make_conninfo(patient(dsn), client_encoding="UTF8"), application_name="pyclient worker")
    try:
        row = conn.execute("select pg_backend_pid()").fetchone()
        if row is None or is_proxied(conn, row[0]):
            conn.prepare_threshold = None
        else:
            conn.execute(_READ_COMMITTED)
    except BaseException:
        conn.close()
        raise
    return conn


async def connect_worker_async(dsn: str) -> AsyncConnection:
    """The same for asyncio."""
    conn = await connect_async(make_conninfo(patient(dsn), client_encoding="UTF8"), application_name="pyclient worker")
    try:
        row = await (await conn.execute("select pg_backend_pid()")).fetchone()
        if row is None or is_proxied(conn, row[0]):
            conn.prepare_threshold = None
        else:
            await conn.execute(_READ_COMMITTED)
    except BaseException:
        await conn.close()
        raise
    return conn


def pool(dsn: str, *, max_size: int = 10) -> Pool:
    """Connections for an application's own calls, opened as they are needed. Each is tried before it is lent: the one
    that a restart of the server broke would fail somebody's attempt."""
    return ConnectionPool(
        patient(dsn),
        kwargs=_POOLED,
        min_size=0,
        max_size=max_size,
        open=True,
        check=ConnectionPool.check_connection,
        name="pyclient",
    )


def pool_async(dsn: str, *, max_size: int = 10) -> AsyncPool:
    """The same for asyncio; to be opened."""
    return AsyncConnectionPool(
        patient(dsn),
        kwargs=_POOLED,
        min_size=0,
        max_size=max_size,
        open=False,
        check=AsyncConnectionPool.check_connection,
        name="pyclient",
    )


# Never prepared: a pool may sit behind another one that shares sessions.
_POOLED: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "fallback_application_name": "pyclient"}


def _cannot_connect(error: psycopg.Error) -> errors.CannotConnect:
    reason = " ".join(str(error).split()) or type(error).__name__
    return errors.CannotConnect(
        f"cannot connect to the database: {reason}",
        hint="Check --dsn, ALMANAC_DSN or DATABASE_URL; without any of them an embedded server is used.",
    )


def run_script(conn: Connection, script: str) -> None:
    """A whole SQL file through the driver, untouched: no parameters, so neither `%` nor `:name` means anything."""
    conn.execute(sql.SQL(script))


@call
def start_ticking() -> str: ...


def lock_installation(conn: Connection) -> None:
    """Held to the end of the transaction: two migrations of one database wait for each other."""
    conn.execute("select pg_advisory_xact_lock(hashtext('pg_almanac migrate'))")


@call
def revision() -> str | None: ...


def installed_revision(conn: Connection) -> str | None:
    """The newest revision this database has; None where pg_almanac is not installed."""
    try:
        with conn.transaction():
            return revision(conn)
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        return None
    except psycopg.errors.InsufficientPrivilege as error:
        raise errors.CannotConnect(
            f'role "{conn.info.user}" may not use pg_almanac',
            hint=f'Let an administrator run: grant almanac_worker to "{conn.info.user}"; (or another of its roles)',
        ) from error


@contextlib.contextmanager
def install_errors() -> typing.Iterator[None]:
    """What the server says while installing, with its DETAIL and HINT, as one of our errors."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise _cannot_connect(error) from error
        diag = error.diag
        raise errors.from_database(error) or errors.InstallRefused(
            f"cannot install: {diag.message_primary or error}", detail=diag.message_detail, hint=diag.message_hint
        ) from error


def drop_all_except(conn: Connection, functions: Sequence[str], views: Sequence[str]) -> None:
    """Drop functions and views that no file defines any more: an old signature must not stay as an overload."""
    doomed = conn.execute(
        """
        select 'pg_proc'::regclass::oid, oid
          from pg_proc
         where pronamespace = to_regnamespace('almanac')
           and oid not in (select to_regprocedure(name) from unnest(%(functions)s::text[]) as name
                            where to_regprocedure(name) is not null)
        union all
        select 'pg_class'::regclass::oid, oid
          from pg_class
         where relnamespace = to_regnamespace('almanac') and relkind = 'v' and relname <> all (%(views)s::text[])
        """,
        {"functions": list(functions), "views": list(views)},
    ).fetchall()
    _drop(conn, doomed)


def replace_all(conn: Connection, script: str, functions: Sequence[str], views: Sequence[str]) -> None:
    """Run a file of functions or views. What cannot be replaced in place (another result type, other argument names,
    other columns) is dropped first; that loses grants made on it by hand, so it is done only when needed."""
    try:
        with conn.transaction():
            run_script(conn, script)
    except (psycopg.errors.InvalidFunctionDefinition, psycopg.errors.InvalidTableDefinition):
        doomed = conn.execute(
            """
            select 'pg_proc'::regclass::oid, to_regprocedure(name)::oid from unnest(%s::text[]) as name
            union all
            select 'pg_class'::regclass::oid, to_regclass('almanac.' || name)::oid from unnest(%s::text[]) as name
            """,
            [list(functions), list(views)],
        ).fetchall()
        _drop(conn, [(kind, oid) for kind, oid in doomed if oid is not None])
        run_script(conn, script)


def _drop(conn: Connection, doomed: Sequence[tuple[int, int]]) -> None:
    """Drop functions and views with what depends on them inside the schema, all of which is made again afterwards.

    Something outside that depends on them belongs to the user and is never dropped: that is an error.
    """
    kinds, oids = [kind for kind, _ in doomed], [oid for _, oid in doomed]
    closure = conn.execute(
        """
        with recursive doomed (classid, objid) as (
            select kind, oid from unnest(%s::oid[], %s::oid[]) as given (kind, oid)
            union
            select case when rule.oid is null then depend.classid else 'pg_class'::regclass end,
                   coalesce(rule.ev_class, depend.objid)
              from doomed
              join pg_depend as depend on depend.refclassid = doomed.classid and depend.refobjid = doomed.objid
              left join pg_rewrite as rule on depend.classid = 'pg_rewrite'::regclass and rule.oid = depend.objid
             where depend.deptype in ('n', 'a', 'i')
        )
        select doomed.objid, pg_describe_object(doomed.classid, doomed.objid, 0),
               case when doomed.classid = 'pg_proc'::regclass then 'routine ' || doomed.objid::regprocedure::text
                    when view.relkind = 'v' then 'view ' || doomed.objid::regclass::text
               end,
               coalesce(function.pronamespace, view.relnamespace, type.typnamespace, hooked.relnamespace)
               is not distinct from to_regnamespace('almanac')
          from doomed
          left join pg_proc as function on doomed.classid = 'pg_proc'::regclass and function.oid = doomed.objid
          left join pg_class as view
            on doomed.classid = 'pg_class'::regclass and view.oid = doomed.objid and view.relkind = 'v'
          left join pg_type as type on doomed.classid = 'pg_type'::regclass and type.oid = doomed.objid
          left join pg_trigger as trigger on doomed.classid = 'pg_trigger'::regclass and trigger.oid = doomed.objid
          left join pg_class as hooked on hooked.oid = trigger.tgrelid
        """,
        [kinds, oids],
    ).fetchall()
    if foreign := sorted(description for _, description, _, ours in closure if not ours):
        raise errors.InstallRefused(
            "something outside of pg_almanac depends on a function or view that this version replaces",
            detail="It is: " + ", ".join(foreign) + ".",
            hint="Drop it, migrate, and make it again.",
        )
    for statement in (f"drop {what} cascade" for _, _, what, _ in closure if what):
        with contextlib.suppress(psycopg.errors.UndefinedFunction, psycopg.errors.UndefinedTable), conn.transaction():
            conn.execute(sql.SQL(statement))


def create_database_if_missing(conn: Connection, name: str) -> None:
    if conn.execute("select from pg_database where datname = %s", [name]).fetchone() is None:
        conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))


# ── for tests: a clock that obeys ───────────────────────────────────────────────────────────────────────────────────

# Read by every session of the database, so that time is the same for all of them.
_TEST_CLOCK = """
create schema test_clock;
create table test_clock.setting (now timestamptz not null);
insert into test_clock.setting select clock_timestamp();
grant usage on schema test_clock to public;
grant select on test_clock.setting to public;
create or replace function almanac.clock() returns timestamptz language sql volatile
    return (select now from test_clock.setting);
"""


def install_test_clock(conn: Connection) -> None:
    """Replace the clock of a database that is only there for a test."""
    run_script(conn, _TEST_CLOCK)


def set_test_clock(conn: Connection, *, to: datetime | str | None = None, by: timedelta | str = "0") -> datetime:
    """Set the time, or move it; text is read by PostgreSQL: '2026-03-29 02:30 Europe/Brussels', '1 day'."""
    row = conn.execute(
        "update test_clock.setting set now = coalesce(%s::timestamptz, now) + %s::interval returning now", [to, by]
    ).fetchone()
    assert row is not None
    return cast(datetime, row[0])


def next_tick_before(conn: Connection, until: datetime) -> datetime | None:
    """The earliest moment up to `until` at which a schedule is due."""
    row = conn.execute(
        "select min(next_due_at) from almanac.schedule_overview where next_due_at <= %s and status <> 'paused'", [until]
    ).fetchone()
    return row[0] if row else None


def tick_until_done(conn: Connection) -> None:
    while True:
        row = conn.execute("select more from almanac.tick()").fetchone()
        if row is None or not row[0]:
            return


_ALL_JOBS = """
select queue, id as job_id, job_type, state, payload, due_at, attempt, priority, dedup_key, schedule, tick_at,
       caught_up, last_error, null::jsonb as result
  from almanac.job
union all
select queue, id, job_type, state, payload, due_at, attempt, priority, dedup_key, schedule, tick_at, caught_up,
       error, result
  from almanac.job_history
 order by job_id
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenJob:
    """A job as a test sees it."""

    queue: str
    job_id: int
    job_type: str
    state: str
    payload: Any
    due_at: datetime
    attempt: int
    priority: int
    dedup_key: str | None
    schedule: str | None
    tick_at: datetime | None
    caught_up: bool
    last_error: str | None
    result: Any


def all_jobs(conn: Connection) -> list[SeenJob]:
    with conn.cursor(row_factory=psycopg.rows.class_row(SeenJob)) as cursor:
        return cursor.execute(_ALL_JOBS).fetchall()


def clone_database(conn: Connection, name: str, template: str | None = None) -> None:
    conn.execute(
        sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template or "template0"))
    )


def drop_database(conn: Connection, name: str) -> None:
    conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def dsn_of(dsn: str, name: str) -> str:
    """The same server, another database."""
    return make_conninfo(dsn, dbname=name)
