"""Almanac: the jobs and schedules that a piece of code declares, and the calls that enqueue them.

    app = Almanac()

    @app.job("send_mail", queue="mail", max_attempts=3)
    async def send_mail(ctx: JobContext, mail: Mail) -> None: ...

    app.enqueue(send_mail, Mail(to="a@example.org"))

An app knows nothing about workers; a worker is given one. Several apps become one with `include`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack, overload

from pyclient import database, errors, payload, settings
from pyclient.context import JobContext
from pyclient.database import OMIT, EnqueuedJob
from pyclient.observe import tracing
from pyclient.outcomes import PermanentError

Handler = TypeVar("Handler", bound=Callable[..., Any])

# An hour: a handler that hangs is ended some time, and nobody is surprised by it within minutes.
DEFAULT_TIMEOUT = 3600.0
# Options of jobs and schedules that are lengths of time.
LENGTHS = frozenset({"jitter", "max_age", "within", "gate_wait", "dedup_for", "base_delay", "max_delay"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A handler and how its jobs are made and run. `call(ctx, payload)` takes what `read` made of the payload."""

    job_type: str
    queue: str
    call: Callable[[JobContext, Any], Any]
    is_async: bool
    read: Callable[[Any], Any] | None
    annotation: Any
    timeout: float | None
    max_attempts: int | None = None
    lease: timedelta | None = None
    base_delay: timedelta | None = None
    max_delay: timedelta | None = None
    jitter: float | None = None
    description: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule as it is given to put_schedule."""

    queue: str
    name: str
    cron: str
    job_type: str
    timezone: str
    payload: Any
    options: Mapping[str, Any]


class _Options(TypedDict, total=False):
    """What a job can be given; see `enqueue` in sql/README.md. `due_at` is a time with a zone, or a timedelta from now.
    Lengths of time are timedeltas or seconds."""

    queue: str | None
    due_at: datetime | timedelta
    priority: int
    dedup_for: float | timedelta | None
    max_attempts: int | None
    base_delay: float | timedelta | None
    max_delay: float | timedelta | None
    headers: Mapping[str, Any] | None


class EnqueueOptions(_Options, total=False):
    dedup_key: str | None
    concurrency_key: str | None
    idempotency_key: str | None


class EnqueueManyOptions(_Options, total=False):
    dedup_keys: Sequence[str | None] | None
    concurrency_keys: Sequence[str | None] | None
    idempotency_keys: Sequence[str | None] | None


class Almanac:
    """A registry of jobs and schedules, and a way to enqueue.

    `dsn` is found when it is first needed: here, else in ALMANAC_DSN, else in DATABASE_URL.
    """

    def __init__(self, dsn: str | None = None, *, queue: str = "default") -> None:
        self._dsn = dsn
        self.queue = queue
        self.jobs: dict[str, Job] = {}
        self.schedules: dict[tuple[str, str], Schedule] = {}
        self._handlers: dict[Any, str] = {}
        self._included: list[Almanac] = []
        self._pools = _Pools(lambda: self.dsn)

    @property
    def dsn(self) -> str:
        found = settings.load(self._dsn).dsn
        if found is None:
            raise errors.CannotConnect(
                "this app has no database", hint="Give Almanac(dsn=...) or set ALMANAC_DSN or DATABASE_URL."
            )
        return found

    def bind(self, dsn: str) -> None:
        """Use this database unless the app names one itself. A worker does it, so that its handlers can enqueue."""
        if self._dsn is None:
            self._dsn = dsn
        for other in self._included:
            other.bind(dsn)

    # ── declaring ───────────────────────────────────────────────────────────────────────────────────────────────────

    def job(
        self,
        job_type: str | None = None,
        *,
        queue: str | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        max_attempts: int | None = None,
        lease: float | timedelta | None = None,
        base_delay: float | timedelta | None = None,
        max_delay: float | timedelta | None = None,
        jitter: float | None = None,
    ) -> Callable[[Handler], Handler]:
        """Declare a handler: a function, a coroutine function, or a class with `payload_model()` and `handle()`.

        Without a job type its name is used. `timeout=None` lets it run for as long as it likes.
        """

        _with_parentheses("job", job_type)
        database.put_job_type.statement({"max_attempts": max_attempts})  # as in `schedule`

        def declare(handler: Handler) -> Handler:
            name = job_type or getattr(handler, "__name__", None)
            if name is None:
                raise TypeError(f"{handler!r} has no name of its own; give the job type")
            if self._handlers.get(handler) == name:
                raise ValueError(f"{name} is a job already; @app.schedule(...) stands above @app.job(...), not below")
            call, is_async, annotation = _shape(handler)
            self._add(
                Job(
                    job_type=name,
                    queue=queue or self.queue,
                    call=call,
                    is_async=is_async,
                    read=payload.reader(annotation),
                    annotation=annotation,
                    timeout=timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
                    max_attempts=max_attempts,
                    lease=_interval(lease),
                    base_delay=_interval(base_delay),
                    max_delay=_interval(max_delay),
                    jitter=jitter,
                    description=(inspect.getdoc(handler) or "").partition("\n")[0] or None,
                )
            )
            self._handlers[handler] = name
            return handler

        return declare

    def register(self, job_type: str, handler: Callable[..., Any], **options: Any) -> None:
        """`job` for a handler that is defined elsewhere: `app.register("daily_summary", DailySummaryHandler)`."""
        self.job(job_type, **options)(handler)

    def schedule(
        self,
        cron: str,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        payload: Any = None,
        queue: str | None = None,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Run a handler by a cron expression. Kept in the database, so it fires whether or not this code runs.

        Stands above `@app.job(...)`, or alone. Options are those of put_schedule: overlap, catch_up, …. Lengths of time
        are timedeltas or seconds.
        """

        _with_parentheses("schedule", cron)
        for option in options:
            if option == "job_type" or option not in database.put_schedule.arguments:
                raise TypeError(f"a schedule has no option {option!r}; see the arguments of put_schedule")
        options = {name: _interval(value) if name in LENGTHS else value for name, value in options.items()}
        database.put_schedule.statement(options)  # refuses here what it would refuse when the app is declared

        def declare(handler: Handler) -> Handler:
            if handler not in self._handlers:
                self.job(queue=queue)(handler)
            job = self.jobs[self._handlers[handler]]
            declared = Schedule(
                queue=queue or job.queue,
                name=name or job.job_type,
                cron=cron,
                job_type=job.job_type,
                timezone=timezone,
                payload=_dump(payload),
                options=options,
            )
            self._add_schedule(declared)
            return handler

        return declare

    def include(self, *others: "Almanac") -> "Almanac":
        """Take over the jobs and schedules of other apps; returns this one."""
        for other in others:
            self._included.append(other)
            for job in other.jobs.values():
                self._add(job)
            self._handlers.update(other._handlers)
            for schedule in other.schedules.values():
                if self.schedules.get((schedule.queue, schedule.name)) is not schedule:
                    self._add_schedule(schedule)
        return self

    def _add(self, job: Job) -> None:
        if self.jobs.get(job.job_type, job) is not job:
            raise ValueError(f"job type {job.job_type!r} is declared twice")
        self.jobs[job.job_type] = job

    def _add_schedule(self, schedule: Schedule) -> None:
        if (schedule.queue, schedule.name) in self.schedules:
            raise ValueError(f"schedule {schedule.name!r} is declared twice; give one of them another name=")
        self.schedules[schedule.queue, schedule.name] = schedule

    def queues(self) -> list[str]:
        """The queues that the declared jobs and schedules use."""
        return sorted({job.queue for job in self.jobs.values()} | {queue for queue, _ in self.schedules})

    def declare(self, conn: database.Connection | None = None) -> None:
        """Write queues, job types and schedules into the database, as a worker does when it starts."""
        if conn is None:
            with database.lend(self._pools.sync()) as conn:
                return self.declare(conn)
        for queue in self.queues():
            database.put_queue_if_missing(conn, queue=queue)
        for job in self.jobs.values():
            schema = payload.schema(job.annotation)
            # Also where nothing differs: it may have before.
            database.put_job_type(
                conn,
                queue=job.queue,
                job_type=job.job_type,
                lease=job.lease,
                max_attempts=job.max_attempts,
                base_delay=job.base_delay,
                max_delay=job.max_delay,
                jitter=job.jitter,
                schema=schema,
                description=job.description,
            )
        for schedule in self.schedules.values():
            database.put_schedule(
                conn,
                queue=schedule.queue,
                name=schedule.name,
                cron=schedule.cron,
                job_type=schedule.job_type,
                payload=schedule.payload,
                timezone=schedule.timezone,
                **schedule.options,
            )
        return None

    # ── enqueueing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(
        self,
        job: str | Callable[..., Any],
        payload: Any = None,
        *,
        conn: database.Connection | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueuedJob:
        """Make a job. With `conn` it is part of that connection's transaction: no commit, no job."""
        arguments = self._arguments(job, options)
        arguments["payload"] = self._payloads(arguments["job_type"], [payload])[0]
        if conn is not None:
            return database.enqueue(conn, **arguments)
        with database.lend(self._pools.sync()) as own:
            return database.enqueue(own, **arguments)

    async def enqueue_async(
        self,
        job: str | Callable[..., Any],
        payload: Any = None,
        *,
        conn: database.AsyncConnection | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueuedJob:
        """`enqueue` for asyncio."""
        arguments = self._arguments(job, options)
        arguments["payload"] = self._payloads(arguments["job_type"], [payload])[0]
        if conn is not None:
            return await database.enqueue(conn, **arguments)
        async with database.lend_async(await self._pools.asynchronous()) as own:
            return await database.enqueue(own, **arguments)

    def enqueue_many(
        self,
        job: str | Callable[..., Any],
        payloads: Iterable[Any],
        *,
        conn: database.Connection | None = None,
        **options: Unpack[EnqueueManyOptions],
    ) -> list[EnqueuedJob]:
        """Make many jobs of one type in one statement; answers in the order of the payloads."""
        arguments = self._arguments(job, options)
        arguments["payloads"] = self._payloads(arguments["job_type"], payloads, "payloads[{}]: ")
        if conn is not None:
            return database.enqueue_many(conn, **arguments)
        with database.lend(self._pools.sync()) as own:
            return database.enqueue_many(own, **arguments)

    async def enqueue_many_async(
        self,
        job: str | Callable[..., Any],
        payloads: Iterable[Any],
        *,
        conn: database.AsyncConnection | None = None,
        **options: Unpack[EnqueueManyOptions],
    ) -> list[EnqueuedJob]:
        """`enqueue_many` for asyncio."""
        arguments = self._arguments(job, options)
        arguments["payloads"] = self._payloads(arguments["job_type"], payloads, "payloads[{}]: ")
        if conn is not None:
            return await database.enqueue_many(conn, **arguments)
        async with database.lend_async(await self._pools.asynchronous()) as own:
            return await database.enqueue_many(own, **arguments)

    def cancel(self, job: EnqueuedJob, *, reason: str | None = None, conn: database.Connection | None = None) -> str:
        """Cancel a waiting job at once, or ask for it while it runs; returns cancelled or running."""
        if conn is not None:
            return database.cancel(conn, queue=job.queue, job_id=job.job_id, reason=reason)
        with database.lend(self._pools.sync()) as own:
            return database.cancel(own, queue=job.queue, job_id=job.job_id, reason=reason)

    def _arguments(self, job: str | Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
        due_at = options.get("due_at", OMIT)
        try:
            job_type = job if isinstance(job, str) else self._handlers[job]
        except KeyError:
            raise ValueError(f"{job!r} is not a job of this app; declare it with @app.job(...)") from None
        declared = self.jobs.get(job_type)
        if not (due_at is OMIT or due_at is None or isinstance(due_at, datetime | timedelta)):
            raise TypeError(f"due_at is a datetime or a timedelta from now, not {due_at!r}")
        if isinstance(due_at, datetime) and due_at.tzinfo is None:
            raise ValueError("due_at needs a time zone: datetime.now(timezone.utc) + ...")
        return {name: _interval(value) if name in LENGTHS else value for name, value in options.items()} | {
            "queue": options.get("queue") or (declared.queue if declared else self.queue),
            "job_type": job_type,
            "headers": tracing.inject(options.get("headers")) or OMIT,
        }

    def _payloads(self, job_type: str, payloads: Iterable[Any], which: str = "") -> list[Any]:
        """As they are enqueued. What the handler would refuse is refused here, where this app has the handler: whoever
        made the mistake hears of it, instead of a dead job later."""
        dumped = [_dump(one) for one in payloads]
        declared = self.jobs.get(job_type)
        if declared is not None and declared.read is not None:
            for number, one in enumerate(dumped):
                try:
                    declared.read(one)
                except PermanentError as error:
                    raise errors.PayloadRefused(
                        f"{which.format(number)}{error}",
                        detail="Nothing was enqueued.",
                        hint=f"Give what the handler of {job_type!r} takes.",
                    ) from None
        return dumped

    # ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close the connections that `enqueue` opened."""
        self._pools.close()

    async def close_async(self) -> None:
        """Close the connections that `enqueue_async` opened."""
        await self._pools.close_async()


class _Pools:
    """Opened when they are first needed: an app that only declares, or only gets conn=, opens none."""

    def __init__(self, dsn: Callable[[], str]) -> None:
        self._find_dsn = dsn
        self._lock = threading.Lock()
        self._sync: database.Pool | None = None
        self._async: dict[tuple[asyncio.AbstractEventLoop, str], database.AsyncPool] = {}

    def sync(self) -> database.Pool:
        with self._lock:
            if self._sync is None:
                self._sync = database.pool(self._find_dsn())
            return self._sync

    async def asynchronous(self) -> database.AsyncPool:
        """One for each event loop, as a connection belongs to the loop it was opened in, and for each database: in the
        tests of an application one loop may see many."""
        here = asyncio.get_running_loop(), self._find_dsn()
        with self._lock:
            for closed in [one for one in self._async if one[0].is_closed()]:
                del self._async[closed]
            pool = self._async.get(here)
            if pool is None:
                pool = self._async[here] = database.pool_async(here[1])
                _ENDINGS.add(ending := here[0].create_task(_close_with_its_loop(pool)))
                ending.add_done_callback(_ENDINGS.discard)
        await pool.open()
        return pool

    def close(self) -> None:
        with self._lock:
            pool, self._sync = self._sync, None
        if pool is not None:
            pool.close()

    async def close_async(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = [self._async.pop(one) for one in list(self._async) if one[0] is loop]
        for pool in pools:
            await pool.close()


_ENDINGS: set[asyncio.Task[None]] = set()  # an event loop alone does not keep a task


async def _close_with_its_loop(pool: database.AsyncPool) -> None:
    """When asyncio.run cancels what is left. A task of the pool that is just connecting swallows its cancellation, and
    asyncio.run would wait for it for ever."""
    try:
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await pool.close(timeout=1)


_dump = payload.to_payload


@overload
def _interval(value: None) -> None: ...
@overload
def _interval(value: float | timedelta) -> timedelta: ...
@overload
def _interval(value: float | timedelta | None) -> timedelta | None: ...
def _interval(value: float | timedelta | None) -> timedelta | None:
    return timedelta(seconds=value) if isinstance(value, int | float) else value


def _with_parentheses(decorator: str, argument: Any) -> None:
    """`@app.job` alone would replace the handler and declare nothing, without a word."""
    if callable(argument):
        raise TypeError(f"write @app.{decorator}(...), with parentheses")


# ── what a handler looks like ───────────────────────────────────────────────────────────────────────────────────────


def _shape(handler: Any) -> tuple[Callable[[JobContext, Any], Any], bool, Any]:
    """How to call it with (ctx, payload), whether to await it, and the annotation of its payload."""
    if inspect.isclass(handler):
        return _class_shape(handler)
    return _function_shape(handler)


def _class_shape(handler: Any) -> tuple[Callable[[JobContext, Any], Any], bool, Any]:
    """A class with `handle(self, payload)`, made anew for each job, and the model from `payload_model()`."""
    if not callable(getattr(handler, "handle", None)):
        raise TypeError(f"{handler.__name__} needs a method handle(self, payload)")
    if isinstance(inspect.getattr_static(handler, "handle"), staticmethod | classmethod):
        raise TypeError(f"{handler.__name__}.handle is called on an instance: handle(self, payload)")
    model = handler.payload_model() if hasattr(handler, "payload_model") else None
    call, is_async, annotation = _function_shape(handler.handle, bound=True)

    def made_anew(ctx: JobContext, value: Any) -> Any:
        return call(handler(), ctx, value)

    return made_anew, is_async, annotation if model is None else model


def _function_shape(handler: Any, *, bound: bool = False) -> tuple[Callable[..., Any], bool, Any]:
    """Handlers name what they want: (ctx, payload), (payload), (ctx) or nothing. Arguments with a default are the
    handler's own, but for one that is called payload."""
    taken = inspect.signature(handler).parameters.values()
    if missing := [one.name for one in taken if one.kind is one.KEYWORD_ONLY and one.default is one.empty]:
        raise TypeError(f"{_called(handler)} takes {missing[0]} by name only; a handler is given (ctx, payload)")
    parameters = [
        one
        for one in taken
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        and (one.default is one.empty or one.name == "payload")
    ][1 if bound else 0 :]
    hints = _hints(handler)
    wants_ctx = bool(parameters) and (hints.get(parameters[0].name) is JobContext or parameters[0].name == "ctx")
    rest = parameters[1:] if wants_ctx else parameters
    if len(rest) > 1:
        raise TypeError(f"{_called(handler)} takes {len(parameters)} arguments; a handler takes (ctx, payload)")
    annotation = hints.get(rest[0].name, Any) if rest else Any
    call = _CALLS[wants_ctx, bool(rest), bound](handler)
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
    return call, is_async, annotation


def _hints(handler: Any) -> dict[str, Any]:
    function = handler
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"the annotations of {_called(handler)} cannot be read: {error}. Payload types must be importable "
            "from the module of the handler, not defined inside a function."
        ) from None


def _called(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", None) or repr(handler))


# (wants ctx, wants payload, is a method) → how the worker's (ctx, payload) reaches it.
_CALLS: dict[tuple[bool, bool, bool], Callable[[Any], Callable[..., Any]]] = {
    (True, True, False): lambda handler: handler,
    (True, False, False): lambda handler: lambda ctx, value: handler(ctx),
    (False, True, False): lambda handler: lambda ctx, value: handler(value),
    (False, False, False): lambda handler: lambda ctx, value: handler(),
    (True, True, True): lambda handler: handler,
    (True, False, True): lambda handler: lambda self, ctx, value: handler(self, ctx),
    (False, True, True): lambda handler: lambda self, ctx, value: handler(self, value),
    (False, False, True): lambda handler: lambda self, ctx, value: handler(self),
}
