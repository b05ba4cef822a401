"""What tests of jobs share: the functions of the schema by name, without the client in between.

`Jobs(conn).claim_due(queue="q", worker="w")` returns rows with named columns; errors are psycopg's.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

JSON = {"payload", "result", "headers", "schema"}
JSON_ARRAYS = {"payloads", "results"}


class Jobs:
    """The functions of the schema on one connection."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def sql(self, query: str, *params: Any) -> list[Any]:
        with self.conn.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(query.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def one(self, query: str, *params: Any) -> Any:
        """The only row, or its only value."""
        (row,) = self.sql(query, *params)
        return row[0] if len(row) == 1 else row

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        def call(**arguments: Any) -> list[Any]:
            values = dict(arguments)
            for argument, value in arguments.items():
                if argument in JSON and value is not None:
                    values[argument] = Jsonb(value)
                elif argument in JSON_ARRAYS and value is not None:
                    values[argument] = [item if item is None else Jsonb(item) for item in value]
            given = ", ".join(
                f"{argument} => %({argument})s" + ("::jsonb[]" if argument in JSON_ARRAYS else "")
                for argument in values
            )
            with self.conn.cursor(row_factory=namedtuple_row) as cursor:
                cursor.execute(f"select * from almanac.{name}({given})".encode(), values)
                return cursor.fetchall()

        return call

    # Shorthand for what nearly every test starts with.

    def put(self, queue: str = "q", **settings: Any) -> str:
        self.put_queue(queue=queue, **settings)
        return queue

    def add(self, queue: str = "q", job_type: str = "t", **arguments: Any) -> int:
        """Enqueue; the job's id."""
        return cast(int, self.enqueue(queue=queue, job_type=job_type, **arguments)[0].job_id)

    def claim(self, queue: str = "q", batch_size: int = 1, worker: str = "w", **arguments: Any) -> list[Any]:
        return self.claim_due(queue=queue, worker=worker, batch_size=batch_size, **arguments)

    def claim_one(self, queue: str = "q", **arguments: Any) -> Any:
        (claimed,) = self.claim(queue, 1, **arguments)
        return claimed

    def claim_ids(self, queue: str = "q", batch_size: int = 100, **arguments: Any) -> list[int]:
        return [claimed.job_id for claimed in self.claim(queue, batch_size, **arguments)]

    def running(self, queue: str = "q", lease: timedelta | None = None, **arguments: Any) -> Any:
        """A job that was just enqueued and claimed."""
        job_id = self.add(queue, **arguments)
        (claimed,) = [c for c in self.claim(queue, 1000, lease=lease) if c.job_id == job_id]
        return claimed

    def dead(self, queue: str = "q", error: str = "no", **arguments: Any) -> Any:
        claimed = self.running(queue, **arguments)
        self.fail_with_backoff(**held(claimed), error=error, permanent=True)
        return claimed

    def find(self, job_id: int, queue: str = "q") -> Any:
        """The job wherever it is, by the product's own function; None if nowhere."""
        found = self.job(queue=queue, job_id=job_id)
        return found[0] if found else None

    def state(self, job_id: int, queue: str = "q") -> str | None:
        found = self.find(job_id, queue)
        return found.state if found else None

    def row(self, job_id: int) -> Any:
        """The row in the live table."""
        return self.one("select * from almanac.job where id = %s", job_id)

    def parked(self) -> list[int]:
        return [row.id for row in self.sql("select id from almanac.job where parked_at is not null order by id")]

    def forgotten(self) -> list[int]:
        """Jobs parked for a key that has a free place, with nobody unparked who would take it."""
        rows = self.sql("""
            select p.id from almanac.job p join almanac.queue q using (queue)
             where p.parked_at is not null
               and q.max_running_per_key > (select count(*) from almanac.job r
                                             where r.queue = p.queue and r.state = 'running'
                                               and r.concurrency_key = p.concurrency_key)
               and not exists (select from almanac.job w
                                where w.queue = p.queue and w.concurrency_key = p.concurrency_key
                                  and w.state in ('scheduled', 'retrying') and w.parked_at is null)""")
        return [row.id for row in rows]

    def unwatched(self) -> list[int]:
        """Running jobs whose lease could end unnoticed: neither counted nor in a claim that is looked at by then."""
        rows = self.sql("""
            select job.id from almanac.job
             where job.state = 'running' and job.counted_at is null
               and not exists (select from almanac.claim
                                where claim.queue = job.queue and job.id = any (claim.job_ids)
                                  and claim.look_at <= job.lease_expires_at)""")
        return [row.id for row in rows]

    def attempts(self, job_id: int) -> list[tuple[int, str | None]]:
        rows = self.sql(
            "select attempt, outcome from almanac.attempt_log where job_id = %s order by claimed_at, attempt_key",
            job_id,
        )
        return [(row.attempt, row.outcome) for row in rows]


@contextlib.contextmanager
def littered(jobs: Jobs, queue: str = "q", choices: Sequence[list[str] | None] = (None,)) -> Iterator[None]:
    """Meanwhile somebody keeps an old snapshot, and so much was done since that claims of this session go on from where
    they stopped instead of from the start; for each choice of job types."""
    with psycopg.connect(jobs.conn.info.dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select from almanac.job")
        jobs.enqueue_many(queue=queue, job_type="litter", payloads=[{}] * 1000)
        while batch := jobs.claim(queue, 250):
            jobs.complete_many(
                queue=queue, job_ids=[j.job_id for j in batch], lease_tokens=[j.lease_token for j in batch]
            )
        for job_types in choices:
            assert jobs.claim(queue, job_types=job_types) == []
        yield


def entries_read(jobs: Jobs, call: Callable[[], Any]) -> int:
    """Entries of the index of claims that a call reads, those of jobs long claimed included."""
    return _read(jobs, "pg_stat_get_xact_tuples_returned", call)


def pages_read(jobs: Jobs, call: Callable[[], Any]) -> int:
    """Pages of that index."""
    return _read(jobs, "pg_stat_get_xact_blocks_fetched", call)


def _read(jobs: Jobs, counter: str, call: Callable[[], Any]) -> int:
    count = f"select {counter}('almanac.job_claim_due_idx'::regclass)"
    with jobs.conn.transaction():
        before = jobs.one(count)
        call()
        return cast(int, jobs.one(count) - before)


def held(claimed: Any) -> dict[str, Any]:
    """The arguments that name a lease."""
    return {"queue": claimed.queue, "job_id": claimed.job_id, "lease_token": claimed.lease_token}


@contextlib.contextmanager
def refused(sqlstate: str) -> Iterator[Any]:
    """The block raises this SQLSTATE; an error of class PA has one line of message, a detail and a hint."""
    with pytest.raises(psycopg.Error) as caught:
        yield caught
    assert caught.value.sqlstate == sqlstate, f"{caught.value.sqlstate}: {caught.value}"
    if sqlstate.startswith("PA"):
        diag = caught.value.diag
        assert diag.message_primary
        assert "\n" not in diag.message_primary
        assert diag.message_detail
        assert diag.message_hint


class Blocked:
    """A call in a thread of its own, which is expected to wait for a lock: `with Blocked(conn, call) as it`."""

    def __init__(
        self, watcher: psycopg.Connection[Any], conn: psycopg.Connection[Any], call: Callable[[], Any]
    ) -> None:
        self.watcher, self.conn, self.call = watcher, conn, call
        self.pid = conn.info.backend_pid
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> "Blocked":
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.waits():
            assert self.thread.is_alive(), f"did not wait: {self.result!r} {self.error!r}"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self

    def waits(self) -> bool:
        row = self.watcher.execute("select cardinality(pg_blocking_pids(%s)) > 0", [self.pid]).fetchone()
        return bool(row and row[0])

    def __exit__(self, *exc: object) -> None:
        self.thread.join(20)

    def value(self) -> Any:
        """What the call returned once it went on; raises what it raised."""
        self.thread.join(20)
        assert not self.thread.is_alive(), "still waits"
        if self.error is not None:
            raise self.error
        return self.result


# ── one database for many tests ─────────────────────────────────────────────────────────────────────────────────────
# A clone for each test costs more than most of these tests: the server reads its catalogs and compiles its functions
# anew. So they share a database, emptied before each test, and one connection. A test that changes functions or tables
# asks for the fixture `own_database`.

EMPTY = """
do $$
declare
    v_table text;
begin
    for v_table in
        select oid::regclass::text from pg_class
         where relnamespace = 'almanac'::regnamespace and relkind in ('r', 'p') and not relispartition
           and relname not in ('migration', 'schedule_template', 'installation')
         order by relname
    loop
        execute 'delete from ' || v_table;
    end loop;
    insert into almanac.queue (queue, key_prefix, created_at, created_by)
    values ('default', 'default-000000000000', almanac.clock(), session_user);
    insert into almanac.queue_turn (queue) values ('default');
    update almanac.installation set held_at = null, held_by = null, hold_reason = null;
    perform almanac._note_home();
    update test_clock.setting set frozen_at = null, "offset" = '0';
end;
$$
"""


class Shared:
    """The database that tests share, and a connection that stays open."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.conn = psycopg.connect(dsn, autocommit=True)

    def emptied(self) -> "Shared":
        if self.conn.closed or self.conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.conn.close()
            self.conn = psycopg.connect(self.dsn, autocommit=True)
        self.conn.execute("reset session authorization")
        self.conn.execute("reset all")
        self.conn.execute(EMPTY)
        return self
