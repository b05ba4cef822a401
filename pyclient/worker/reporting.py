"""What became of jobs goes to the database in batches, and is kept here until the database has it.

One batch is under way at a time; what ends meanwhile is the next one. With work waiting in the buffer a batch may
gather for a few milliseconds, otherwise it leaves at once.

A transaction of somebody else's that holds one of the jobs, for as long as it likes, must not keep the others from
being reported. So a batch does not wait long for a lock: it is put aside, and there each job goes alone.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

import psycopg

from pyclient import database, errors
from pyclient.context import JobContext
from pyclient.observe.metrics import Metrics
from pyclient.payload import clean
from pyclient.worker.link import Link, passes

logger = logging.getLogger("pyclient.worker")

FULL = 500
GATHER = 0.004
LARGEST = 1000
# Characters of results in a batch: a message to the server ends the connection beyond 1 GB, and both sides hold it.
HEAVIEST = 32 * 1024 * 1024
# A jsonb has no room for more.
HEAVIEST_RESULT = 256 * 1024 * 1024
LONGEST_RETRY = timedelta(days=3650)
# So long a batch waits for a job that somebody holds; then each of them alone, and how soon those again that are held.
LOCK_PATIENCE, LOCK_PATIENCE_ASIDE = timedelta(milliseconds=200), timedelta(milliseconds=20)
AGAIN = 0.25


@dataclass(frozen=True, slots=True)
class Failed:
    job: JobContext
    error: str
    permanent: bool = False
    retry_after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Released:
    job: JobContext
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    job: JobContext
    until: datetime | timedelta
    reason: str


@dataclass(frozen=True, slots=True)
class CancelledByHandler:
    job: JobContext
    reason: str


Ending = Failed | Released | Snoozed | CancelledByHandler
T = TypeVar("T")
# What a database says that has no UTF-8: the letter is not in its encoding, or it cannot tell.
_NO_SUCH_LETTER = (psycopg.DataError, psycopg.NotSupportedError)


def in_ascii(ending: Any) -> Any:
    """The same in letters that every database has; None if it was."""
    name = "error" if isinstance(ending, Failed) else "reason"
    text = getattr(ending, name)
    if text is None or text.isascii():
        return None
    return replace(ending, **{name: text.encode("ascii", "backslashreplace").decode()})


class Held(Exception):
    """Somebody holds one of the jobs, and nothing was reported."""


class Outbox:
    def __init__(
        self,
        link: Link,
        held: set[JobContext],
        metrics: Metrics,
        is_busy: Callable[[], bool],
        aside: "Outbox | None" = None,
    ) -> None:
        self.link = link
        #: Takes what cannot be reported at once; None: this is the one that does.
        self.aside = aside
        self.largest = 1 if aside is None else LARGEST
        self.held = held
        self.metrics = metrics
        self.is_busy = is_busy
        #: Completed jobs with their results as JSON text, by queue. The slots add to it directly.
        self.done: defaultdict[str, list[tuple[JobContext, str | None]]] = defaultdict(list)
        self.endings: list[Ending] = []
        self.give_up: Callable[[], bool] | None = None
        self._under_way = False
        self._waiting: asyncio.Future[None] | None = None
        #: Nothing to report is known: the first ending has to say so.
        self.hungry = False

    @property
    def lanes(self) -> "list[Outbox]":
        return [self] if self.aside is None else [self, self.aside]

    @property
    def is_empty(self) -> bool:
        return not any(lane._under_way or lane.size() for lane in self.lanes)

    def add(self, ending: Ending) -> None:
        self.endings.append(ending)
        self.poke()

    def poke(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def poke_if_full(self) -> None:
        if self._waiting is not None and self.size() >= FULL:
            self.poke()

    def size(self) -> int:
        return sum(map(len, self.done.values())) + len(self.endings)

    async def _wait(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.poke)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as running:
            for lane in self.lanes:
                running.create_task(lane._run())

    async def _run(self) -> None:
        while True:
            if not self.size():
                self.hungry = True
                await self._wait(None)
                self.hungry = False
            if self.is_busy() and self.size() < FULL:
                await self._wait(GATHER)
            await self.flush()
            if self.aside is None:
                if not self.size():
                    await self.link.drop()
                await asyncio.sleep(AGAIN)

    async def flush(self) -> None:
        self._under_way = True
        try:
            for queue in [queue for queue, done in self.done.items() if done]:
                done, self.done[queue] = self.done[queue], []
                while done:
                    batch = self._first(done)
                    rest = done[len(batch) :]
                    try:
                        await self._complete(queue, batch)
                    except BaseException:
                        # Whatever happens to this task, a finished result is not lost.
                        ended = self._waiting_to_end()
                        self.done[queue] = [
                            one for one in done if one[0] in self.held and one[0] not in ended
                        ] + self.done[queue]
                        raise
                    done = rest
            if self.endings:
                endings, self.endings = self.endings, []
                try:
                    await self._end(endings)
                except BaseException:
                    ended = self._waiting_to_end()
                    self.endings = [
                        one for one in endings if one.job in self.held and one.job not in ended
                    ] + self.endings
                    raise
        finally:
            self._under_way = False

    def _first(self, done: list[tuple[JobContext, str | None]]) -> list[tuple[JobContext, str | None]]:
        batch = done[: self.largest]
        weight = 0
        for count, (_, result) in enumerate(batch):
            if result is not None:
                weight += len(result)
                if weight > HEAVIEST:
                    return batch[: max(count, 1)]
        return batch

    def _waiting_to_end(self) -> set[JobContext]:
        return {one.job for lane in self.lanes for one in lane.endings}

    async def _call(self, operation: Callable[[database.AsyncConnection], Awaitable[T]]) -> T:
        is_held = False

        async def unless_held(conn: database.AsyncConnection) -> T | None:
            nonlocal is_held
            try:
                is_held = False
                return await operation(conn)
            except psycopg.errors.LockNotAvailable:
                # An answer, not a failure: the link would try it again and again.
                is_held = True
                return None

        answer = await self.link.call(unless_held, until=self.give_up)
        if is_held:
            raise Held
        return cast(T, answer)

    # ── completed ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _complete(self, queue: str, batch: Sequence[tuple[JobContext, str | None]]) -> None:
        job_id, token = database.Claimed.JOB_ID, database.Claimed.LEASE_TOKEN
        rows = [(job._row[job_id], job._row[token], result, job.external_text()) for job, result in batch]
        if len(batch) == 1 and (length := len(batch[0][1] or "")) > HEAVIEST_RESULT:
            self._refuse(batch[0][0], f"it has {length} characters")
            return
        try:
            accepted = await self._call(lambda conn: database.complete_rows(conn, queue, rows))
        except Held:
            if self.aside is not None:
                self.aside.done[queue].extend(batch)
                self.aside.poke()
            else:
                self.done[queue].extend(batch)
            return
        except (errors.AlmanacError, psycopg.Error) as error:
            if passes(error):
                raise
            if len(batch) > 1:
                # One result that cannot be stored must not keep the others from being.
                for one in batch:
                    await self._complete(queue, [one])
            elif isinstance(error, psycopg.DataError | psycopg.errors.ProgramLimitExceeded):
                self._refuse(batch[0][0], str(error))
            else:
                self._unrecorded(batch[0][0], error)
            return
        jobs = [job for job, _ in batch]
        self.held.difference_update(jobs)
        if accepted is None:
            self.metrics.completed += len(jobs)
            return
        for job in jobs:
            if job.job_id in accepted:
                self.metrics.completed += 1
            else:
                self._lost(job, "completed")

    def _refuse(self, job: JobContext, why: str) -> None:
        self.endings.append(Failed(job, clean(f"the result cannot be stored: {why}"), permanent=True))

    def _lost(self, job: JobContext, what: str) -> None:
        self.held.discard(job)
        self.metrics.lost += 1
        logger.warning("lease lost, result discarded outcome=%s", what, extra={"job": job})

    def _unrecorded(self, job: JobContext, error: Exception) -> None:
        """The database will never take it, for instance because the right to the queue is gone: the lease runs out."""
        self.held.discard(job)
        logger.error("outcome cannot be recorded error=%r", str(error), extra={"job": job})

    # ── everything else ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _end(self, endings: Sequence[Ending]) -> None:
        by_kind: defaultdict[tuple[type[Any], str], list[Any]] = defaultdict(list)
        for one in endings:
            by_kind[type(one), one.job.queue].append(one)
        for (kind, queue), group in by_kind.items():
            if kind is Failed:
                await self._batch(queue, group, self._fail)
            elif kind is Released:
                await self._batch(queue, group, self._release)
            else:
                for one in group:
                    await self._one(queue, one)

    async def _batch(self, queue: str, group: list[Any], report: Callable[..., Any]) -> None:
        """All in one statement; one by one if a lease among them is lost."""
        for start in range(0, len(group), self.largest):
            part = group[start : start + self.largest]
            try:
                await report(queue, part)
            except Held:
                self._put_aside(part)
            except (errors.AlmanacError, psycopg.Error) as error:
                if passes(error):
                    raise
                if len(part) > 1:
                    for one in part:
                        await self._batch(queue, [one], report)
                elif isinstance(error, errors.LeaseLost):
                    self._lost(part[0].job, type(part[0]).__name__.lower())
                elif isinstance(error, _NO_SUCH_LETTER) and (readable := in_ascii(part[0])) is not None:
                    await self._batch(queue, [readable], report)
                else:
                    self._unrecorded(part[0].job, error)

    def _put_aside(self, endings: Sequence[Ending]) -> None:
        aside = self.aside or self
        aside.endings.extend(endings)
        aside.poke()

    async def _fail(self, queue: str, group: Sequence[Failed]) -> None:
        rows = [
            {
                "job_id": one.job.job_id,
                "lease_token": one.job.lease_token,
                "error": one.error,
                "permanent": one.permanent,
                "retry_after": None if one.retry_after is None else min(one.retry_after, LONGEST_RETRY).total_seconds(),
            }
            for one in group
        ]
        by_id = {one.job.job_id: one for one in group}
        for job_id, state, due_at in await self._call(lambda conn: database.fail_rows(conn, queue, rows)):
            one = by_id[job_id]
            self.held.discard(one.job)
            self.metrics.failed += 1
            reason = one.error.partition("\n")[0]
            if state == "retrying":
                self.metrics.retried += 1
                logger.warning(
                    "job failed, scheduling retry retry_at=%s error=%r", due_at, reason, extra={"job": one.job}
                )
            elif state == "dead":
                self.metrics.dead += 1
                logger.error("job permanently failed error=%r", reason, extra={"job": one.job})
            else:
                logger.info("job %s", state, extra={"job": one.job})

    async def _release(self, queue: str, group: Sequence[Released]) -> None:
        rows = [{"job_id": one.job.job_id, "lease_token": one.job.lease_token, "reason": one.reason} for one in group]
        await self._call(lambda conn: database.release_rows(conn, queue, rows))
        self.held.difference_update([one.job for one in group])
        self.metrics.released += len(group)

    async def _one(self, queue: str, one: Snoozed | CancelledByHandler) -> None:
        job = one.job

        async def report(conn: database.AsyncConnection) -> None:
            if isinstance(one, Snoozed):
                await database.snooze(
                    conn,
                    queue=queue,
                    job_id=job.job_id,
                    lease_token=job.lease_token,
                    until=one.until,
                    reason=one.reason,
                )
            else:
                await database.cancel_held(conn, queue, job.job_id, job.lease_token, one.reason)

        try:
            await self._call(report)
        except Held:
            self._put_aside([one])
        except errors.LeaseLost:
            self._lost(job, type(one).__name__.lower())
        except (errors.AlmanacError, psycopg.Error) as error:
            if passes(error):
                raise
            if isinstance(error, _NO_SUCH_LETTER) and (readable := in_ascii(one)) is not None:
                return await self._one(queue, readable)
            # Refused, such as a snooze of a thousand years: the attempt is recorded as failed instead.
            self.endings.append(Failed(job, clean(str(error))))
        else:
            self.held.discard(job)
            logger.info("job %s", "snoozed" if isinstance(one, Snoozed) else "cancelled", extra={"job": job})
