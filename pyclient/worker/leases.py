"""Keeps leases alive from a thread with a connection of its own, so that a handler which blocks the event loop neither
loses the leases of all others nor goes unnoticed.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from pyclient import database, errors
from pyclient.context import JobContext
from pyclient.worker.link import State, ThreadLink

logger = logging.getLogger("pyclient.worker")

# Often enough that a cancelled job hears of it soon, however long its lease.
EXTEND_EVERY = 5.0
ROUND = 0.25
# No lease is given for less than a second; what is left of one can be next to nothing.
SHORTEST_ROUND = 0.02
# There may be no lease to extend for hours: a connection that broke must not be found out by the first one, nor a
# database be called lost because nobody has asked it since.
CHECK_EVERY = 1.0
# A loop that has not turned for so long is worth a line in the log.
BLOCKED = 2.0


class Keeper(threading.Thread):
    def __init__(
        self,
        dsn: str,
        state: State,
        held: set[JobContext],
        lease: timedelta | None,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Sequence[JobContext]], None],
        on_cancel: Callable[[Sequence[JobContext]], None],
        is_blocking: Callable[[], JobContext | None],
        give_up: Callable[[JobContext, float, database.Connection | None], None],
    ) -> None:
        super().__init__(name="leases", daemon=True)
        self.link = ThreadLink("leases", dsn, state)
        self.held = held
        self.lease = lease
        self.loop = loop
        self.on_lost = on_lost
        self.on_cancel = on_cancel
        self.is_blocking = is_blocking
        self.give_up = give_up
        self.beat = time.monotonic()
        #: When the last round began. Long ago: a call waits for a server that is silent.
        self.turned = time.monotonic()
        self._ended = threading.Event()
        self._checked = 0.0
        self._complained = False

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=5)

    def run(self) -> None:
        pause = ROUND
        while not self._ended.wait(pause):
            try:
                pause = self._round()
            except Exception:
                # This thread must not die: without it every lease runs out.
                logger.exception("round of the lease keeper failed")
        self.link.drop()

    def _round(self) -> float:
        now = self.turned = time.monotonic()
        due: defaultdict[str, list[JobContext]] = defaultdict(list)
        shortest = 4 * ROUND
        gone = []
        for job in self.held.copy():
            confirmed, lasts = job.lease()
            shortest = min(shortest, lasts)
            if now >= confirmed + lasts:
                if not job.lost:
                    gone.append(job)
            elif now - confirmed >= min(EXTEND_EVERY, lasts / 3):
                due[job.queue].append(job)
        if gone:
            self._lose(gone)
        for queue, jobs in due.items():
            self._extend(queue, jobs)
        if now - self._checked >= CHECK_EVERY:
            self._checked = now
            self.link.call(database.check)
        self._watch(now)
        return max(shortest / 4, SHORTEST_ROUND)

    def lose_expired(self, now: float) -> None:
        """Called by the event loop while a call of this thread does not come back."""
        gone = [job for job in self.held.copy() if not job.lost and now >= sum(job.lease())]
        if gone:
            self._lose(gone)

    def _extend(self, queue: str, jobs: Sequence[JobContext]) -> None:
        sent_at = time.monotonic()
        pairs = [(job.job_id, job.lease_token) for job in jobs]
        try:
            answer = self.link.call(lambda conn: database.extend_rows(conn, queue, pairs, self.lease))
        except (errors.AlmanacError, database.DatabaseError) as error:
            logger.warning("leases cannot be extended queue=%s error=%r", queue, str(error))
            return
        if answer is None:
            return
        extended = {(job_id, token): (lasts, cancel) for job_id, token, lasts, cancel in answer}
        lost, cancelled = [], []
        for job in jobs:
            found = extended.get((job.job_id, job.lease_token))
            if found is None:
                # Reported in the meantime is the usual reason; then it is not held any more.
                if job in self.held:
                    lost.append(job)
                continue
            job.extended(sent_at, found[0])
            if found[1]:
                cancelled.append(job)
        if cancelled:
            self.loop.call_soon_threadsafe(self.on_cancel, cancelled)
        if lost:
            self._lose(lost)

    def _lose(self, jobs: Sequence[JobContext]) -> None:
        for job in jobs:
            job.lost = True
            job.cancel()
        self.loop.call_soon_threadsafe(self.on_lost, jobs)

    # ── a blocked loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, now: float) -> None:
        blocked = now - self.beat
        if blocked < BLOCKED:
            self._complained = False
            return
        job = self.is_blocking()
        if not self._complained:
            self._complained = True
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
            logger.warning(
                "event loop blocked for=%.1fs; a handler that waits without await belongs in a plain def\n%s",
                blocked,
                where,
                extra={"job": job} if job else None,
            )
        if job is not None:
            self.give_up(job, blocked, self.link.conn)


def exit_at_once(code: int) -> NoReturn:
    """Without waiting for a loop that does not turn or a thread that does not end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
