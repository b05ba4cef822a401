"""One worker process: the parts put together, its signals, its end."""

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from pyclient import __version__, database, errors
from pyclient.app import Almanac, Job
from pyclient.context import JobContext
from pyclient.observe import sentry, tracing
from pyclient.observe.metrics import Metrics
from pyclient.worker.claiming import Fetcher
from pyclient.worker.leases import Keeper, exit_at_once
from pyclient.worker.link import Link, State, one_line, passes
from pyclient.worker.listening import Listener
from pyclient.worker.options import Options
from pyclient.worker.reporting import LOCK_PATIENCE, LOCK_PATIENCE_ASIDE, Failed, Outbox, Released
from pyclient.worker.rounds import Rounds, Ticks
from pyclient.worker.running import CANCELLED, LOST, STOPPING, Slots, drain

if TYPE_CHECKING:
    import httpx

    from pyclient.observe.endpoint import Endpoint

logger = logging.getLogger("pyclient.worker")

# How often time-outs are looked at, and how soon after a blocked loop is noticed.
SWEEP = 0.05
# Handlers that were cancelled get so long to clean up.
UNWIND = 1.0
RESTART = 75
# Thousands of schedules, each a round trip to a database that is far away. To begin anew would take as long again.
DECLARING = 600.0
# An argument out of range, missing or unreadable: a mistake in the app, which is not declared any further.
MISTAKEN = ("22023", "22004", "22P02")
# What threads of asyncio.to_thread are called.
HELPER = "handler-helper"
# An event loop that has not turned for so long is not coming back by itself.
UNHEALTHY = 30.0
# The keeper goes round several times a second. After so long without, the loop looks itself for leases that ran out.
OVERDUE = 1.0


class Worker:
    """`await Worker(app, dsn, options).run()` works until it is stopped; returns the exit code."""

    def __init__(self, app: Almanac, dsn: str, options: Options) -> None:
        self.app = app
        self.dsn = dsn
        app.bind(dsn)
        self.options = options
        # Unique for each process: a restarted worker must not be taken for the one that holds the old leases.
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.metrics = Metrics()
        self.ticks = Ticks(self.name)
        self.state = State()
        self.held: set[JobContext] = set()
        self.services = _Services(self.name, dsn, options.concurrency)
        self.started_at = time.time()
        self.stopping = False
        self._held: str | None = None
        self._signals = 0
        self._declaring: asyncio.Task[None] | None = None
        self._stop_by: float | None = None
        self._restart = False
        #: Jobs due and waiting, as of the last look; only looked at while somebody can see it.
        self.due = 0
        self.endpoint: Endpoint | None = None

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self._wake_up = asyncio.Event()
        self._declaring = asyncio.create_task(self._declare())
        try:
            await self._declaring
        except asyncio.CancelledError:
            if not self.stopping:
                raise
        if self.stopping:
            return 0
        self.outbox = self._open_outbox()
        self.slots = Slots(
            self.options.concurrency, self.app.jobs, self.outbox, self.held, self.metrics, self._around()
        )
        self.listener = Listener(self.dsn, self.state, lambda queues: self.fetcher.ring(queues))
        self.fetcher = Fetcher(
            self.options,
            self.name,
            self.services,
            Link("claim", self.dsn, self.state, prepare=database.for_claims),
            self.slots,
            self.held,
            self.metrics,
            self.state,
            lambda: self.listener.is_heard,
        )
        self.keeper = Keeper(
            self.dsn,
            self.state,
            self.held,
            self.options.lease,
            self.loop,
            on_lost=self._lost,
            on_cancel=self._cancelled,
            is_blocking=self._blocking,
            give_up=self._give_up,
        )
        self.rounds = Rounds(self.dsn, self.state, report=self._report, tick=self._tick)
        # Before anything shows this worker to operators: the port may be taken.
        self.endpoint = self._open_endpoint()
        self.keeper.start()
        self.rounds.start()
        sweeper = asyncio.create_task(self._sweep())
        reporter = asyncio.create_task(self.outbox.run())
        listener = asyncio.create_task(self.listener.run())
        fetcher = asyncio.create_task(self.fetcher.run())
        stop = asyncio.create_task(self._wake_up.wait())
        logger.info(
            "worker started worker=%s queues=%s job_types=%s concurrency=%d version=%s",
            self.name,
            ",".join(self.options.queues),
            ",".join(sorted(self.app.jobs)),
            self.options.concurrency,
            __version__,
        )
        try:
            parts = {sweeper, reporter, listener, fetcher, stop}
            while not self.stopping and not fetcher.done():
                done, parts = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done - {stop, fetcher}:
                    if part.exception() is not None:
                        # A bug of ours. Whoever supervises starts a process that does not have it yet.
                        logger.error("part of the worker failed", exc_info=part.exception())
                        self._restart = True
                        self.stop()
            if fetcher.done() and fetcher.exception() is not None:
                logger.error("part of the worker failed", exc_info=fetcher.exception())
                self._restart = True
            await self._end(fetcher, reporter)
        finally:
            for part in (stop, listener, reporter, sweeper, fetcher):
                part.cancel()
            await asyncio.gather(stop, listener, reporter, sweeper, fetcher, return_exceptions=True)
            self.slots.close()
            await asyncio.to_thread(self.rounds.stop)
            await asyncio.to_thread(self.keeper.stop)
            await self._retire()
            if self.endpoint is not None:
                await asyncio.to_thread(self.endpoint.close)
        logger.info(
            "worker stopped worker=%s completed=%d failed=%d released=%d",
            self.name,
            self.metrics.completed,
            self.metrics.failed,
            self.metrics.released,
        )
        return RESTART if self._restart else 0

    def stop(self) -> None:
        """Once: stop claiming and let handlers finish. Again: now."""
        self._signals += 1
        self.stopping = True
        if self._signals == 1:
            self._stop_by = time.monotonic() + self.options.grace
            logger.info("stopping running=%d grace=%gs", self.slots.busy, self.options.grace)
            self.fetcher.stop()
        else:
            self._stop_by = time.monotonic()
        self._wake_up.set()

    def handle_signals(self, *, supervised: bool) -> None:
        loop = asyncio.get_running_loop()
        if not supervised:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
            return
        # Ctrl-C, and what systemd stops a service with, reach the whole group; the supervisor passes it on, and hearing
        # it twice must not mean "at once". The supervisor has another signal for that.
        loop.add_signal_handler(signal.SIGTERM, self.stop_once)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.add_signal_handler(signal.SIGQUIT, self._at_once)

    def stop_once(self) -> None:
        if not self._signals:
            self._signalled()

    def _at_once(self) -> None:
        self.stop_once()
        self._signalled()

    def _signalled(self) -> None:
        if hasattr(self, "fetcher"):
            self.stop()
        elif self._declaring is not None:
            # Not by raising from here: a declaration that hangs in its thread would be waited for.
            self.stopping = True
            self._declaring.cancel()
        else:
            raise SystemExit(0)

    async def _declare(self) -> None:
        """Queues, types and schedules of the app. Waits for a database that is not there yet; a queue that nobody
        made is a mistake somebody should hear of at once."""
        link = Link("declare", self.dsn, self.state)

        def declare() -> None:
            with contextlib.closing(database.connect_worker(self.dsn)) as conn:
                self._declare_app(conn)
                self._say_hold(conn)
                for queue in self.options.queues:
                    self._look_for(conn, queue)
                if self.options.burst:
                    # It may have ended before the keeper's first round, and a schedule that is due is work.
                    self._tick(conn)

        async def attempt(_: database.AsyncConnection) -> None:
            async with asyncio.timeout(DECLARING):
                await asyncio.to_thread(declare)

        try:
            await link.call(attempt, asks=False)
        finally:
            await link.drop()

    def _declare_app(self, conn: database.Connection) -> None:
        try:
            self.app.declare(conn)
        except database.DatabaseError as error:
            if passes(error):
                raise
            if error.sqlstate in MISTAKEN:
                said = error.diag
                raise errors.DeclarationRefused(
                    f"cannot declare the app: {said.message_primary}",
                    detail=said.message_detail,
                    hint=said.message_hint,
                ) from error
            logger.warning("jobs and schedules of the app were not declared error=%r", one_line(error))

    def _look_for(self, conn: database.Connection, queue: str) -> None:
        try:
            database.wake(conn, queue=queue, worker=self.name)
        except errors.QueueUnknown:
            # One of the app's that this role may not make: claims say so until somebody has made it.
            if queue not in self.app.queues():
                raise

    def _open_outbox(self) -> Outbox:
        def lane(name: str, patience: timedelta, is_busy: Callable[[], bool], aside: Outbox | None = None) -> Outbox:
            link = Link(name, self.dsn, self.state, prepare=partial(database.for_reports, patience=patience))
            return Outbox(link, self.held, self.metrics, is_busy, aside)

        aside = lane("report aside", LOCK_PATIENCE_ASIDE, lambda: False)
        return lane("report", LOCK_PATIENCE, self._is_busy, aside)

    async def _end(self, fetcher: "asyncio.Task[None]", reporter: "asyncio.Task[None]") -> None:
        """Stop claiming, give back what has not started, wait for what runs, give back the rest, report it all."""
        self.stopping = True
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self.options.grace
        self.fetcher.stop()
        # A claim that is under way brings jobs that have to be given back, even if everything is to end now.
        await asyncio.wait([fetcher], timeout=max(1.0, min(5.0, self._stop_by - time.monotonic())))
        self._give_back_buffer()
        await drain(self.slots, lambda: self._stop_by or 0.0)
        for job in self.slots.running():
            self.slots.end(job, STOPPING)
        unwound = time.monotonic() + UNWIND
        await drain(self.slots, lambda: unwound)
        self.slots.leave()
        self._give_back_buffer()
        # The database gets a few seconds more to take what is finished.
        last_moment = max(self._stop_by, time.monotonic()) + 5.0
        for lane in self.outbox.lanes:
            lane.give_up = lambda: time.monotonic() > last_moment
        while not self.outbox.is_empty and not reporter.done() and time.monotonic() < last_moment:
            self.outbox.poke()
            await asyncio.sleep(0.002)
        if self.held:
            logger.warning("worker ends with leases it could not give back jobs=%d", len(self.held))

    def _give_back_buffer(self) -> None:
        while self.slots.buffer:
            self.outbox.add(Released(self.slots.buffer.popleft(), "the worker stopped before it began"))

    async def _retire(self) -> None:
        link = self.outbox.link
        with contextlib.suppress(Exception):
            async with asyncio.timeout(3):
                await link.call(lambda conn: database.retire_worker(conn, worker=self.name), until=lambda: True)
        for one in (*(lane.link for lane in self.outbox.lanes), self.fetcher.link):
            await one.drop()
        await self.services.close()

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _sweep(self) -> None:
        while True:
            now = time.monotonic()
            self.keeper.beat = now
            self.slots.sweep(now)
            if now - self.keeper.turned > OVERDUE:
                self.keeper.lose_expired(now)
            if self.slots.abandoned >= max(4, self.options.concurrency) and not self.stopping:
                logger.error("too many handlers that do not end handlers=%d; restarting", self.slots.abandoned)
                self._restart = True
                self.stop()
            await asyncio.sleep(SWEEP)

    def _is_busy(self) -> bool:
        return bool(self.slots.buffer)

    def _around(self) -> list[Callable[[JobContext], Any]]:
        around: list[Callable[[JobContext], Any]] = []
        if tracing.is_recording():
            around.append(tracing.span)
        if sentry.is_active():
            around.append(sentry.reported)
        return around

    # ── for those who look ──────────────────────────────────────────────────────────────────────────────────────────

    def _open_endpoint(self) -> "Endpoint | None":
        if self.options.metrics_port is None:
            return None
        from pyclient.observe.endpoint import Endpoint

        port = self.options.metrics_port and self.options.metrics_port + self.options.number
        try:
            endpoint = Endpoint(port, self.metrics, self._gauges, self.trouble)
        except ImportError as error:
            raise errors.CannotServe(
                "--metrics-port needs prometheus_client", hint="Run: pip install 'pg-almanac[metrics]'"
            ) from error
        except OSError as error:
            raise errors.CannotServe(
                f"--metrics-port: port {port} cannot be served: {error.strerror}",
                hint="Give each worker a port of its own; process n of --processes uses the port plus n - 1.",
            ) from error
        logger.info("metrics and health served port=%d", endpoint.port)
        return endpoint

    def _gauges(self) -> dict[str, tuple[str, float]]:
        return {
            "running": ("Handlers that run now.", self.slots.busy),
            "buffered": ("Jobs claimed and not yet started.", len(self.slots.buffer)),
            "due": ("Jobs that are due and wait, in the queues of this worker.", self.due),
            "unreported": ("Jobs whose end the database does not know yet.", self._unreported()),
            "database_up": ("1 while the database can be reached.", float(self.state.is_up)),
        }

    def _unreported(self) -> int:
        # Not what lies in the outbox: a batch that is under way, while the database is away for hours, is not there.
        return max(0, len(self.held) - self.slots.busy - len(self.slots.buffer))

    def trouble(self) -> str | None:
        """Why this worker should not be called healthy; None if it should."""
        silent = time.monotonic() - self.keeper.beat
        if silent > UNHEALTHY:
            return f"the event loop has not turned for {silent:.0f} s"
        if not self.state.is_up:
            return "the database cannot be reached"
        if self.stopping:
            return "stopping"
        return None

    def _report(self, conn: database.Connection) -> None:
        database.report_worker(
            conn,
            worker=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=list(self.options.queues),
            concurrency=self.options.concurrency,
            running=self.slots.busy,
        )
        self._say_hold(conn)
        if self.options.metrics_port is not None:
            self.due = sum(self._count_due(conn, queue) for queue in self.options.queues)

    def _say_hold(self, conn: database.Connection) -> None:
        before, self._held = self._held, database.held(conn)
        if self._held is not None and self._held != before:
            logger.warning("all work is held why=%r", self._held)
        elif before is not None and self._held is None:
            logger.info("work goes on")

    def _count_due(self, conn: database.Connection, queue: str) -> int:
        # A queue that is gone or closed to this worker: the claims say so, and the others count.
        with contextlib.suppress(errors.QueueUnknown, errors.QueueRightMissing):
            return database.count_due(conn, queue=queue)
        return 0

    def _tick(self, conn: database.Connection) -> None:
        if self.options.ticks:
            self.ticks(conn)

    def _lost(self, jobs: Sequence[JobContext]) -> None:
        for job in jobs:
            if job in self.held and not job.completed:
                self.slots.end(job, LOST)

    def _cancelled(self, jobs: Sequence[JobContext]) -> None:
        for job in jobs:
            if job in self.held and not job.completed:
                self.slots.end(job, CANCELLED)

    # ── a blocked loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def _blocking(self) -> JobContext | None:
        """The job whose handler holds the event loop; asked from another thread."""
        task = asyncio.current_task(self.loop)
        for slot in (*self.slots.slots, *self.slots.left):
            if slot.task is task:
                return slot.job
        return None

    def _give_up(self, job: JobContext, blocked: float, conn: database.Connection | None) -> None:
        """A handler that blocks the loop beyond its time-out cannot be cancelled. Record that, give the others back,
        and end; the supervisor starts anew."""
        definition: Job = self.app.jobs[job.job_type]
        started = job.started_at
        if definition.timeout is None or started is None or time.monotonic() - started < definition.timeout:
            return
        logger.error("handler blocks the event loop beyond its time-out; the process ends", extra={"job": job})
        if conn is not None:
            with contextlib.suppress(Exception):
                database.fail_with_backoff(
                    conn,
                    queue=job.queue,
                    job_id=job.job_id,
                    lease_token=job.lease_token,
                    error=f"timed out after {definition.timeout:g} s: the handler blocked the event loop",
                )
            for queue, done in [item for lane in self.outbox.lanes for item in lane.done.items()]:
                with contextlib.suppress(Exception):
                    database.complete_many(
                        conn,
                        queue=queue,
                        job_ids=[one.job_id for one, _ in done],
                        lease_tokens=[one.lease_token for one, _ in done],
                        results=[None if text is None else database.JsonText(text) for _, text in done],
                        external_ids=[one.external_text() for one, _ in done],
                    )
            endings = [one for lane in self.outbox.lanes for one in lane.endings]
            for failed in [one for one in endings if isinstance(one, Failed)]:
                with contextlib.suppress(Exception):
                    database.fail_with_backoff(
                        conn,
                        queue=failed.job.queue,
                        job_id=failed.job.job_id,
                        lease_token=failed.job.lease_token,
                        error=failed.error,
                        permanent=failed.permanent,
                        retry_after=failed.retry_after,
                    )
            for other in self.held.copy() - {job}:
                with contextlib.suppress(Exception):
                    database.release(
                        conn,
                        queue=other.queue,
                        job_id=other.job_id,
                        lease_token=other.lease_token,
                        reason="the worker was blocked by another handler",
                    )
        exit_at_once(RESTART)


class _Services:
    """What handlers borrow: connections and HTTP transports, opened when the first one asks."""

    def __init__(self, name: str, dsn: str, size: int) -> None:
        self.name = name
        self.dsn = dsn
        self.size = min(max(size, 1), 20)
        self._lock = threading.Lock()
        self._pool: Any = None
        self._pool_async: Any = None
        self._transport: Any = None
        self._transport_async: Any = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[database.Connection]:
        with self._lock:
            if self._pool is None:
                self._pool = database.pool(self.dsn, max_size=self.size)
        with self._pool.connection() as conn:
            yield conn

    @contextlib.asynccontextmanager
    async def connection_async(self) -> Any:
        if self._pool_async is None:
            self._pool_async = database.pool_async(self.dsn, max_size=self.size)
            await self._pool_async.open()
        async with self._pool_async.connection() as conn:
            yield conn

    def http_transport(self) -> "httpx.BaseTransport":
        import httpx

        with self._lock:
            if self._transport is None:
                self._transport = httpx.HTTPTransport(limits=httpx.Limits(max_connections=None))
            return self._transport  # type: ignore[no-any-return]

    def http_transport_async(self) -> "httpx.AsyncBaseTransport":
        import httpx

        if self._transport_async is None:
            self._transport_async = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        return self._transport_async  # type: ignore[no-any-return]

    async def close(self) -> None:
        for closing in (
            self._pool_async and self._pool_async.close(),
            self._transport_async and self._transport_async.aclose(),
        ):
            if closing is not None:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(2):
                        await closing
        if self._pool is not None:
            with contextlib.suppress(Exception):
                self._pool.close(timeout=1)


def run(app: Almanac, dsn: str, options: Options, *, lifeline: int | None = None) -> int:
    """A worker on an event loop of its own, with signals; on uvloop where it is installed.

    `lifeline` is a descriptor that becomes readable when the supervisor is gone: then the worker stops too.
    """

    is_stuck = False

    async def main() -> int:
        nonlocal is_stuck
        # By a name of its own, to know afterwards which threads handlers left behind.
        executor = ThreadPoolExecutor(thread_name_prefix=HELPER)
        asyncio.get_running_loop().set_default_executor(executor)
        worker = Worker(app, dsn, options)
        worker.handle_signals(supervised=lifeline is not None)
        if lifeline is not None:
            loop = asyncio.get_running_loop()

            def orphaned() -> None:
                loop.remove_reader(lifeline)
                logger.error("the supervisor is gone; stopping")
                worker.stop_once()

            loop.add_reader(lifeline, orphaned)
        # What is loaded by now stays; looking through it again and again for garbage took a tenth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        try:
            return await worker.run()
        finally:
            is_stuck = await _is_anything_left(executor)

    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        return runner.run(main())
    finally:
        # It would wait for what does not end.
        if not is_stuck:
            runner.close()


async def _is_anything_left(executor: ThreadPoolExecutor) -> bool:
    """Tell tasks and threads to end, as a loop does that is closed, and whether some do not: handlers that swallow
    CancelledError, calls of asyncio.to_thread that do not come back."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, others = await asyncio.wait(others, timeout=UNWIND)
    executor.shutdown(wait=False, cancel_futures=True)
    ends = time.monotonic() + UNWIND
    while _helpers() and time.monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if others or _helpers():
        logger.warning("handlers did not end and are cut off tasks=%d threads=%d", len(others), len(_helpers()))
        return True
    return False


def _helpers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(HELPER)]


def leave(code: int) -> NoReturn:
    """End the process with this code, also when the interpreter would wait for a thread that handlers left behind."""
    if _helpers():
        exit_at_once(code)
    sys.exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
