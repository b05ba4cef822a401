"""JobContext: what a handler knows about its job, and how its writes and the job's completion become one.

Built for each job on the hot path, so it keeps the row as it came and reads a column when somebody asks for it.
"""

import logging
import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pyclient import database
from pyclient.database import Claimed
from pyclient.payload import clean, to_result

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("pyclient.job")


class Services(Protocol):
    """What a worker lends to its handlers."""

    def connection(self) -> AbstractContextManager[database.Connection]: ...
    def connection_async(self) -> AbstractAsyncContextManager[database.AsyncConnection]: ...
    @property
    def name(self) -> str: ...
    def http_transport(self) -> "httpx.BaseTransport": ...
    def http_transport_async(self) -> "httpx.AsyncBaseTransport": ...


class Claim:
    """What the jobs of one claim have in common. `sent_at` is our monotonic time before the claim was sent, so a lease
    counted from there never ends later here than in the database."""

    __slots__ = ("claimed_at", "queue", "sent_at", "services")

    def __init__(self, services: Services, queue: str, claimed_at: int, sent_at: float) -> None:
        self.services = services
        self.queue = queue
        self.claimed_at = claimed_at
        self.sent_at = sent_at


def _column(at: int) -> Any:
    return property(lambda job: job._row[at])


class JobContext:
    """A job while it is worked on."""

    # Defaults of the class, not set in __init__: most jobs never touch them, and there are thousands a second.
    #: The other side's id of the effect; stored with the result.
    external_id: str | None = None
    #: What a handler that completes in its own transaction wants stored; otherwise what it returns is.
    result: Any = None
    #: True once the job was completed by `transaction()`.
    completed: bool = False
    #: True once somebody else may be working on this job.
    lost: bool = False
    _cancelled: threading.Event | None = None
    _extended: tuple[float, float] | None = None
    _started: float | None = None
    _http: Any = None

    def __init__(self, claim: Claim, row: tuple[Any, ...]) -> None:
        self._claim = claim
        self._row = row

    # ── which job ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def queue(self) -> str:
        return self._claim.queue

    job_id: int = _column(Claimed.JOB_ID)
    job_type: str = _column(Claimed.JOB_TYPE)
    attempt: int = _column(Claimed.ATTEMPT)  # 1 for the first
    max_attempts: int = _column(Claimed.MAX_ATTEMPTS)
    # Larger than every earlier one of this job: systems further down can refuse smaller ones.
    lease_token: int = _column(Claimed.LEASE_TOKEN)
    # The same over all attempts; what a receiver de-duplicates on.
    idempotency_key: str = _column(Claimed.IDEMPOTENCY_KEY)
    attempt_key: str = _column(Claimed.ATTEMPT_KEY)  # unique for each attempt; for audit trails

    @property
    def payload(self) -> Any:
        """The payload as it was enqueued."""
        return database.json_value(self._row[Claimed.PAYLOAD])

    @property
    def headers(self) -> dict[str, Any] | None:
        value = self._row[Claimed.HEADERS]
        return None if value is None else database.json_value(value)

    priority: int = _column(Claimed.PRIORITY)
    concurrency_key: str | None = _column(Claimed.CONCURRENCY_KEY)

    @property
    def worker(self) -> str:
        """The worker that runs it."""
        return self._claim.services.name

    # ── when ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def due_at(self) -> datetime:
        return database.instant(self._row[Claimed.DUE_AT])

    @property
    def lateness(self) -> timedelta:
        """How long after `due_at` it was claimed."""
        return timedelta(microseconds=self._claim.claimed_at - self._row[Claimed.DUE_AT])

    @property
    def claimed_at(self) -> datetime:
        return database.instant(self._claim.claimed_at)

    @property
    def created_at(self) -> datetime:
        return database.instant(self._row[Claimed.CREATED_AT])

    schedule: str | None = _column(Claimed.SCHEDULE)  # the schedule that made the job, if one did

    @property
    def tick_at(self) -> datetime | None:
        """The moment of that schedule it stands for."""
        value = self._row[Claimed.TICK_AT]
        return None if value is None else database.instant(value)

    caught_up: bool = _column(Claimed.CAUGHT_UP)  # true when the tick was decided late, after downtime

    # ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def cancelled(self) -> bool:
        """True when somebody cancelled the job, its time is up, the lease was lost or the worker stops.

        A sync handler that runs long looks here from time to time; an async one gets asyncio.CancelledError.
        """
        return self._cancelled is not None and self._cancelled.is_set()

    @property
    def logger(self) -> "logging.LoggerAdapter[logging.Logger]":
        """Lines carry the job's fields."""
        return logging.LoggerAdapter(logger, {"job": self})

    @property
    def http(self) -> "httpx.AsyncClient":
        """An httpx client whose requests carry `Idempotency-Key` (extra `http`). Connections are the worker's."""
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(
                transport=self._claim.services.http_transport_async(), headers={"Idempotency-Key": self.idempotency_key}
            )
        return self._http  # type: ignore[no-any-return]

    @property
    def http_sync(self) -> "httpx.Client":
        """`http` for handlers that are not async."""
        import httpx

        if self._http is None:
            self._http = httpx.Client(
                transport=self._claim.services.http_transport(), headers={"Idempotency-Key": self.idempotency_key}
            )
        return self._http  # type: ignore[no-any-return]

    def transaction(self) -> "JobTransaction":
        """`async with ctx.transaction() as conn:` (or `with`): what is written there and the completion of the job
        commit together, or not at all. `ctx.result` and `ctx.external_id` set inside are stored with it.

        Leaving the block with an exception rolls back, and the attempt fails as usual. If the lease was lost the
        block ends with LeaseLost, and nothing was written.
        """
        return JobTransaction(self)

    # ── for the worker ──────────────────────────────────────────────────────────────────────────────────────────────

    def lease(self) -> tuple[float, float]:
        """(when it was last confirmed, how long it lasts from there), in monotonic seconds."""
        if self._extended is None:
            lasts = (self._row[Claimed.LEASE_EXPIRES_AT] - self._claim.claimed_at) / 1e6
            self._extended = (self._claim.sent_at, lasts)
        return self._extended

    def extended(self, at: float, lasts: float) -> None:
        self._extended = (at, lasts)

    def external_text(self) -> str | None:
        """`external_id` as it is stored. The other side's ids are numbers as often as not."""
        return None if self.external_id is None else clean(str(self.external_id))

    def started(self, at: float) -> None:
        self._started = at

    @property
    def started_at(self) -> float | None:
        return self._started

    def watch(self) -> None:
        """From now on `cancelled` can become true; for handlers in threads."""
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        if self._cancelled is None:
            self._cancelled = threading.Event()
        self._cancelled.set()

    def __repr__(self) -> str:
        return f"<job {self.job_id} {self.job_type} attempt {self.attempt}/{self.max_attempts} in {self.queue}>"


class JobTransaction:
    """A transaction that ends with the completion of its job. Works with `with` and with `async with`."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._connection: Any = None
        self._transaction: Any = None
        self._conn: Any = None

    def _arguments(self) -> dict[str, Any]:
        job = self._job
        result = None if job.result is None else database.JsonText(to_result(job.result))
        return {
            "queue": job.queue,
            "job_id": job.job_id,
            "lease_token": job.lease_token,
            "result": result,
            "external_id": job.external_text(),
        }

    def _check_first_use(self) -> None:
        if self._job.completed:
            raise RuntimeError("this job was completed by an earlier transaction(); a job is completed once")

    def __enter__(self) -> database.Connection:
        self._check_first_use()
        self._connection = self._job._claim.services.connection()
        self._conn = self._connection.__enter__()
        try:
            self._transaction = self._conn.transaction()
            with database.answered(self._conn):
                self._transaction.__enter__()
        except BaseException as error:
            self._connection.__exit__(type(error), error, error.__traceback__)
            raise
        return self._conn  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        raised, rolled_back = error, None
        try:
            try:
                if raised is None:
                    with database.answered(self._conn):
                        database.complete(self._conn, **self._arguments())
            except BaseException as failure:
                raised = failure
                raise
            finally:
                # True for psycopg.Rollback: the handler takes back its writes, and the job is not completed here.
                with database.answered(self._conn):
                    rolled_back = self._transaction.__exit__(type(raised) if raised else None, raised, None)
        finally:
            self._connection.__exit__(None, None, None)
            if error is not None:
                # The driver cuts it, and a handler's author wants to see the line of the handler.
                error.__traceback__ = traceback
        if raised is None:
            self._job.completed = True
        return bool(rolled_back)

    async def __aenter__(self) -> database.AsyncConnection:
        self._check_first_use()
        self._connection = self._job._claim.services.connection_async()
        self._conn = await self._connection.__aenter__()
        try:
            self._transaction = self._conn.transaction()
            with database.answered(self._conn):
                await self._transaction.__aenter__()
        except BaseException as error:
            await self._connection.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._conn  # type: ignore[no-any-return]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        raised, rolled_back = error, None
        try:
            try:
                if raised is None:
                    with database.answered(self._conn):
                        await database.complete(self._conn, **self._arguments())
            except BaseException as failure:
                raised = failure
                raise
            finally:
                # True for psycopg.Rollback: the handler takes back its writes, and the job is not completed here.
                with database.answered(self._conn):
                    rolled_back = await self._transaction.__aexit__(type(raised) if raised else None, raised, None)
        finally:
            await self._connection.__aexit__(None, None, None)
            if error is not None:
                # The driver cuts it, and a handler's author wants to see the line of the handler.
                error.__traceback__ = traceback
        if raised is None:
            self._job.completed = True
        return bool(rolled_back)
