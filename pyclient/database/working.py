"""What workers call. The same functions, for a thousand jobs at a time: rows stay tuples, columns are read when a
handler asks for them."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import psycopg.rows
from psycopg.types.json import Jsonb
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

from pyclient import errors
from pyclient.database import wire
from pyclient.database.calling import AsyncConnection, Connection, bigints, texts, translated
from pyclient.database.calls import cancel, release, wake

# 64 bits may not hold 19 digits. Every digit as a 0 and one search: cheaper than a regular expression, at every job.
_DIGITS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19


def exact(loads: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """For a reader such as orjson, which makes a float of an integer beyond 64 bits: somebody's id becomes another."""

    def exactly(raw: bytes) -> Any:
        return json.loads(raw) if len(raw) > 19 and _LONG in raw.translate(_DIGITS) else loads(raw)

    return exactly


try:
    import orjson
except ImportError:
    json_loads: Callable[[bytes], Any] = json.loads
else:
    json_loads = exact(orjson.loads)

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

# The rows, and when they were claimed in microseconds since 2000.
ClaimedRows = tuple[list[tuple[Any, ...]], int]
# Queue, worker, lease and job types as they are sent with every claim.
ClaimArguments = tuple[bytes, bytes, bytes | None, bytes]


def claim_arguments(queue: str, worker: str, lease: timedelta | None, job_types: Iterable[str]) -> ClaimArguments:
    in_seconds = None if lease is None else f"{lease.total_seconds()} s".encode()
    return queue.encode(), worker.encode(), in_seconds, texts(job_types).encode()


class Claimed:
    """Where a column stands in a row of `claimed_rows`."""

    (
        JOB_ID, LEASE_TOKEN, JOB_TYPE, PAYLOAD, ATTEMPT, MAX_ATTEMPTS, DUE_AT, LEASE_EXPIRES_AT, LATENESS,
        IDEMPOTENCY_KEY, ATTEMPT_KEY, SCHEDULE, TICK_AT, CAUGHT_UP, PRIORITY, CONCURRENCY_KEY, HEADERS, CREATED_AT,
    ) = range(18)  # fmt: skip


_CLAIM = wire.Statement(
    b"almanac_claim",
    b"""
select job_id, lease_token, job_type, payload, attempt, max_attempts, due_at, lease_expires_at, lateness,
       idempotency_key, attempt_key, schedule, tick_at, caught_up, priority, concurrency_key, headers, created_at
  from almanac.claim_due(queue => $1, worker => $2, batch_size => $3, lease => $4, job_types => $5)
""",
)
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
select extract(epoch from almanac.doze(queue => $1, worker => $2, at_most => $3, job_types => $4::text[])
                          - almanac.clock())::float8
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


async def for_reports(conn: AsyncConnection, *, patience: timedelta) -> None:
    """Prepare a connection that does not wait longer for what somebody else has locked. Does nothing where a pooler
    shares sessions: the setting would stay for others."""
    if conn.prepare_threshold is not None:
        milliseconds = int(patience.total_seconds() * 1000)
        await conn.execute("select set_config('lock_timeout', %s, false)", [str(milliseconds)])


async def doze_for(
    conn: AsyncConnection, queue: str, worker: str, at_most: timedelta, job_types: Iterable[str]
) -> float | None:
    """`doze`, answered in seconds from now: a worker's clock need not agree with the database's."""
    with translated():
        cursor = psycopg.AsyncRawCursor(conn, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(_DOZE, (queue, worker, at_most, texts(job_types)), prepare=True)
        row = await cursor.fetchone()
    return None if row is None else row[0]


def send_claim(conn: AsyncConnection, arguments: ClaimArguments, batch_size: int) -> None:
    """Claim without waiting for the answer, which `claimed_rows` gives. After `for_claims`."""
    queue, worker, lease, job_types = arguments
    with translated():
        _CLAIM.send(conn, (queue, worker, b"%d" % batch_size, lease, job_types))


async def claimed_rows(conn: AsyncConnection) -> ClaimedRows:
    """Rows in the order of `Claimed`."""
    with translated():
        rows = await _CLAIM.answer(conn)
    if not rows:
        return rows, 0
    microseconds, days, _ = struct.unpack(">qii", rows[0][Claimed.LATENESS])
    return rows, rows[0][Claimed.DUE_AT] + microseconds + days * 86_400_000_000


def json_value(raw: bytes) -> Any:
    """A jsonb as it comes over the wire: one byte of version, then text."""
    return json_loads(raw[1:])


def instant(microseconds: int) -> datetime:
    """A timestamptz as it comes over the wire."""
    return _EPOCH + timedelta(microseconds=microseconds)


# job_id, lease_token, result as JSON text, external_id.
Ended = tuple[int, int, str | None, str | None]


async def complete_rows(conn: AsyncConnection, queue: str, ended: Sequence[Ended]) -> set[int] | None:
    """Complete jobs. None: all of them; else the ids that are completed, the lease of the others is lost."""
    ids, tokens = bigints([e[0] for e in ended]), bigints([e[1] for e in ended])
    results = texts([e[2] for e in ended]) if any(e[2] is not None for e in ended) else None
    externals = texts([e[3] for e in ended]) if any(e[3] is not None for e in ended) else None
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
    ids, tokens = bigints([h[0] for h in held]), bigints([h[1] for h in held])
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


async def listen(conn: AsyncConnection) -> None:
    await conn.execute("listen almanac")


def rung(conn: AsyncConnection) -> list[str]:
    """The queues for which somebody rang, without waiting. Raises when the connection is gone."""
    conn.pgconn.consume_input()
    queues = []
    while (notification := conn.pgconn.notifies()) is not None:
        queues.append(notification.extra.decode())
    return queues
