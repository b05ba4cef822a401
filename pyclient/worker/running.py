"""Handlers run in slots. A slot is a task that takes one job after the other, so that a handler which does not wait
costs no task of its own; `concurrency` is the number of slots."""

import asyncio
import contextvars
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pyclient import outcomes
from pyclient.app import Job
from pyclient.context import JobContext
from pyclient.database import Claimed, json_value
from pyclient.observe.metrics import Metrics
from pyclient.payload import clean, to_result
from pyclient.worker.reporting import CancelledByHandler, Failed, Outbox, Released, Snoozed
from pyclient.worker.threads import Threads

logger = logging.getLogger("pyclient.worker")

# After so many jobs in a row that never waited, the others (claims, reports, signals) get a turn.
TURN = 100

# So long a handler that was ended may take to clean up. One that goes on is left behind.
STUBBORN = 5.0

TIMED_OUT, CANCELLED, LOST, STOPPING, LEFT = "timed out", "cancelled", "lost", "stopping", "left"

# Frames of this package say nothing about what went wrong in a handler; those of its own handlers do.
_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(str(_PACKAGE / name) for name in ("worker", "app.py", "payload.py", "context.py", "database"))

Around = Callable[[JobContext], Any]


class Slots:
    """The buffer of claimed jobs and the slots that empty it."""

    def __init__(
        self,
        size: int,
        jobs: Mapping[str, Job],
        outbox: Outbox,
        held: set[JobContext],
        metrics: Metrics,
        around: list[Around],
    ) -> None:
        self.size = size
        self.jobs = jobs
        self.outbox = outbox
        self.held = held
        self.metrics = metrics
        #: Context managers entered around each handler: traces, error reports.
        self.around = around
        self.buffer: deque[JobContext] = deque()
        #: What context variables are set to where a handler begins.
        self.context = contextvars.copy_context()
        self.threads = Threads()
        #: Those whose handler did not end when it was told to; others have taken their places.
        self.left: list[Slot] = []
        self.busy = 0
        self.finished = 0
        self.slots: list[Slot] = []
        self.idle: list[asyncio.Future[None]] = []
        #: Set by whoever claims: called when a job has ended or the buffer runs low.
        self.on_room: Callable[[], None] | None = None
        self.low = 0
        self.closing = False

    def add(self, jobs: list[JobContext]) -> None:
        self.buffer.extend(jobs)
        wanted = len(self.buffer)
        while wanted and self.idle:
            future = self.idle.pop()
            if not future.done():
                future.set_result(None)
                wanted -= 1
        while wanted and len(self.slots) < self.size:
            slot = Slot(self)
            slot.task = asyncio.create_task(slot.run(), context=self.context.copy())
            slot.task.add_done_callback(slot.ended)
            self.slots.append(slot)
            wanted -= 1

    def running(self) -> list[JobContext]:
        return [slot.job for slot in self.slots if slot.job is not None]

    @property
    def abandoned(self) -> int:
        """Handlers that go on though nobody waits for them any more."""
        return len(self.left) + self.threads.abandoned

    def sweep(self, now: float) -> None:
        """End what has run out of time, and leave behind what does not end."""
        for slot in self.slots.copy():
            if slot.deadline is not None and now >= slot.deadline and slot.job is not None:
                if slot.why is TIMED_OUT or slot.why is LOST:
                    slot.leave()
                else:
                    slot.end(TIMED_OUT)

    def leave(self) -> None:
        """Leave every handler behind that still runs."""
        for slot in self.slots.copy():
            if slot.job is not None:
                slot.leave()

    def end(self, job: JobContext, why: str) -> None:
        """End the handler of a job, if it has one; a job that has not started is not started."""
        for slot in self.slots:
            if slot.job is job:
                slot.end(why)
                return
        try:
            self.buffer.remove(job)
        except ValueError:
            return
        if why == LOST:
            self.held.discard(job)
        else:
            self.outbox.add(Released(job, why))

    def close(self) -> None:
        self.closing = True
        for slot in (*self.slots, *self.left):
            slot.task.cancel()


class Slot:
    task: "asyncio.Task[None]"

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.job: JobContext | None = None
        self.definition: Job | None = None
        self.deadline: float | None = None
        self.why: str | None = None

    async def run(self) -> None:
        slots, buffer, outbox = self.slots, self.slots.buffer, self.slots.outbox
        jobs, held, observe = slots.jobs, slots.held, slots.metrics.handler_seconds.observe
        is_logged = logger.isEnabledFor(logging.INFO)
        plain = not slots.around
        monotonic, popleft, context = time.monotonic, buffer.popleft, contextvars.copy_context
        fresh, turn = context(), 0
        # What a handler set for itself, such as fields of its log lines, is not for the next one: a slot whose context
        # was changed ends, and another takes its place. A copy shares what it copies, so the comparison costs nothing.
        while context() == fresh:
            if not buffer:
                turn = 0
                outbox.poke()
                if slots.on_room is not None:
                    slots.on_room()
                future = asyncio.get_running_loop().create_future()
                slots.idle.append(future)
                await future
                continue
            job = popleft()
            if job.lost:
                held.discard(job)
                continue
            if len(buffer) <= slots.low and slots.on_room is not None:
                slots.on_room()
            row = job._row
            definition = jobs[row[Claimed.JOB_TYPE]]
            self.job = job
            started = job._started = monotonic()
            if definition.timeout is not None:
                self.deadline = started + definition.timeout
            slots.busy += 1
            if is_logged:
                logger.info("processing job", extra={"job": job})
            try:
                value = json_value(row[Claimed.PAYLOAD])
                if definition.read is not None:
                    value = definition.read(value)
                if plain and definition.is_async:
                    result = await definition.call(job, value)
                else:
                    result = await self._observed(definition, job, value)
                text = None if result is None else to_result(result)
            except BaseException as error:
                self._ended_badly(job, definition, error)
            else:
                if job.completed:
                    self._completed_itself(job, result)
                elif self.why is LOST:
                    held.discard(job)
                elif self.why is not LEFT:
                    outbox.done[job._claim.queue].append((job, text))
                    if outbox.hungry:
                        outbox.poke()
                if is_logged and self.why is not LEFT:
                    logger.info("job done", extra={"job": job})
            if self.why is LEFT:
                return
            self.job = None
            self.deadline = None
            slots.busy -= 1
            slots.finished += 1
            observe(monotonic() - started)
            if self.why is not None:
                self._forget_cancellation()
            elif slots.closing:
                return
            if len(buffer) <= slots.low and slots.on_room is not None:
                slots.on_room()
            turn += 1
            if turn >= TURN:
                turn = 0
                outbox.poke_if_full()
                await asyncio.sleep(0)
        outbox.poke()

    def ended(self, task: "asyncio.Task[None]") -> None:
        """The worker closes, or a handler cancelled its task or left variables behind: another slot takes the place."""
        slots = self.slots
        if not task.cancelled() and task.exception() is not None:
            logger.error("a slot failed", exc_info=task.exception())
        if self.why is LEFT:
            slots.left.remove(self)
            logger.info("handler that was left behind has ended", extra={"job": self.job})
            return
        slots.slots.remove(self)
        if self.job is not None:
            slots.busy -= 1
            slots.outbox.add(Failed(self.job, "the handler left its task in a state that cannot go on"))
        if slots.buffer and not slots.closing:
            slots.add([])

    async def _observed(self, definition: Job, job: JobContext, value: Any) -> Any:
        with _entered(self.slots.around, job):
            if definition.is_async:
                return await definition.call(job, value)
            job.watch()
            result = await self.slots.threads.call(partial(definition.call, job, value))
            # A plain function may hand back an awaitable (a decorator that hides a coroutine function).
            return await result if asyncio.iscoroutine(result) else result

    def end(self, why: str) -> None:
        """Called by the loop while the handler waits: an async one is cancelled, a sync one told and left behind.

        One that goes on after somebody cancelled its job still has its time-out, and can lose its lease.
        """
        if self.job is None or not (self.why is None or (self.why is CANCELLED and why in (TIMED_OUT, LOST))):
            return
        self.why = why
        if why is not CANCELLED:
            self.deadline = time.monotonic() + STUBBORN
        self.job.cancel()
        self.task.cancel()

    def leave(self) -> None:
        """The handler did not end when it was told to. What became of its attempt is reported now, so its lease is not
        extended any more; what it comes to later is not. Another slot takes the place."""
        slots, job, why = self.slots, self.job, self.why
        assert job is not None
        if not job.completed:
            logger.warning(
                "handler goes on though it was ended why=%r; what it returns is discarded. Let CancelledError pass, "
                "or raise it again after cleaning up",
                why,
                extra={"job": job},
            )
        self._ended_badly(job, slots.jobs[job.job_type], None)
        self.why, self.deadline = LEFT, None
        slots.slots.remove(self)
        slots.left.append(self)
        slots.busy -= 1
        slots.finished += 1
        if slots.buffer and not slots.closing:
            slots.add([])
        if slots.on_room is not None:
            slots.on_room()

    def _forget_cancellation(self) -> None:
        """The cancellation was meant for the handler; the slot goes on."""
        self.why = None
        while self.task.uncancel() > 0:
            pass

    def _completed_itself(self, job: JobContext, result: Any) -> None:
        self.slots.held.discard(job)
        self.slots.metrics.completed += 1
        if result is not None:
            logger.warning(
                "what the handler returned is not stored: the job was completed in its transaction; "
                "set ctx.result inside the transaction instead",
                extra={"job": job},
            )

    def _ended_badly(self, job: JobContext, definition: Job, error: BaseException | None) -> None:
        """Without an error: it has not ended, and nobody waits for it any more."""
        slots, add = self.slots, self.slots.outbox.add
        if self.why is LEFT:
            return
        if job.completed:
            slots.held.discard(job)
            slots.metrics.completed += 1
            if error is not None:
                logger.error("handler raised after its job was completed error=%r", error, extra={"job": job})
        elif self.why is LOST:
            slots.held.discard(job)
            slots.metrics.lost += 1
            logger.warning("lease lost, handler ended", extra={"job": job})
        elif self.why is TIMED_OUT:
            where = f"and goes on in\n{_whereabouts(self.task)}" if error is None else _where(error)
            add(Failed(job, clean(f"timed out after {definition.timeout:g} s\n{where}")))
        elif self.why is CANCELLED:
            add(Released(job, "cancelled while it ran"))
        elif self.why is STOPPING or error is None:
            add(Released(job, "the worker stopped"))
        elif isinstance(error, outcomes.PermanentError):
            add(Failed(job, clean(_text(error)), permanent=True))
        elif isinstance(error, outcomes.RetryAfter):
            add(Failed(job, clean(_text(error)), retry_after=error.delay))
        elif isinstance(error, outcomes.Snooze):
            add(Snoozed(job, error.until, clean(str(error))))
        elif isinstance(error, outcomes.Cancelled):
            add(CancelledByHandler(job, clean(str(error) or "cancelled by the handler")))
        else:
            add(Failed(job, clean(_text(error))))


def _text(error: BaseException) -> str:
    """First the error in one line, then where it came from."""
    try:
        if isinstance(error, outcomes.PermanentError | outcomes.RetryAfter):
            summary = str(error) or type(error).__name__
        else:
            summary = "".join(traceback.format_exception_only(error)).strip()
        frames = _where(error)
    except Exception:  # an exception whose __str__ raises
        return type(error).__name__
    return f"{summary}\n{frames}" if frames else summary


def _where(error: BaseException) -> str:
    """The handler's part of the traceback, and what caused the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    text = "".join(traceback.format_list(frames))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        text += "caused by " + "".join(traceback.format_exception(cause))
    return text.rstrip()


def _whereabouts(task: "asyncio.Task[None]") -> str:
    """The handler's part of what a task waits in."""
    frames = []
    waits_in: Any = task.get_coro()
    while (frame := getattr(waits_in, "cr_frame", None)) is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            frames.append((frame, frame.f_lineno))
        waits_in = getattr(waits_in, "cr_await", None)
    return "".join(traceback.StackSummary.extract(iter(frames)).format()).rstrip()


class _entered:  # noqa: N801
    """The context managers of `around`, entered in order and left in reverse, errors seen by each."""

    __slots__ = ("around", "job", "stack")

    def __init__(self, around: list[Around], job: JobContext) -> None:
        self.around = around
        self.job = job

    def __enter__(self) -> None:
        from contextlib import ExitStack

        self.stack = ExitStack()
        for one in self.around:
            self.stack.enter_context(one(self.job))

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


async def drain(slots: Slots, until: Callable[[], float]) -> None:
    """Wait until no handler runs, or until that moment, which a second signal can bring nearer."""
    while slots.busy and time.monotonic() < until():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
