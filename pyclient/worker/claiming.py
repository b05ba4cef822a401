"""What to claim, when to sleep and when to wake.

Each queue is a feed. A feed that gave less than was asked for is looked at again after a few milliseconds, or a few
times as long as the look took: where the database has much to do it is left to do it, and jobs come in larger batches
instead. One that stays empty for about 20 ms is put to sleep: `doze` marks this worker as a sleeper, so that enqueue
rings, and says when the next job is due. The mark stays while wake-ups are isolated. It is taken back once there is
always something to do: every ring takes a database-wide lock at commit.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from pyclient import database, errors
from pyclient.context import Claim, JobContext, Services
from pyclient.observe.metrics import Metrics
from pyclient.worker.link import Link, State
from pyclient.worker.options import Options
from pyclient.worker.running import Slots

logger = logging.getLogger("pyclient.worker")

# Between two looks at a queue that has run empty, before the worker says that it sleeps.
PAUSES = (0.002, 0.004, 0.006, 0.008)
# As many times as long as a look that brought less than was asked for, up to so many seconds, passes until the next.
REST, LONGEST_REST = 4, 0.03
# So long always busy, and nobody needs to ring.
ALWAYS_BUSY = 0.1
# What claim_due takes for a batch; a worker with more room asks again.
LARGEST = 10_000
# The pace of the handlers is taken over this time, and as much is fetched ahead.
WINDOW = 0.1


class Feed:
    """One queue as this worker sees it. Times are monotonic."""

    def __init__(self, queue: str, weight: float, arguments: database.ClaimArguments) -> None:
        self.queue = queue
        self.weight = weight
        self.arguments = arguments
        #: Not worth a look before this.
        self.idle_until = 0.0
        self.looks = 0
        #: Jobs served, divided by the weight: equal for all while all have work.
        self.served = 0.0
        self.marked_until = 0.0
        self.awake_since: float | None = None
        self.trouble: str | None = None
        #: For --burst: found empty, and whether a job that this worker held may have kept another from being found.
        self.is_empty = False
        self.is_in_doubt = False

    def ring(self) -> None:
        self.idle_until = 0.0
        self.looks = 0


class Sent(NamedTuple):
    """A claim that is under way."""

    feed: Feed
    size: int
    conn: database.AsyncConnection
    at: float


def shares(feeds: Sequence[Feed], room: int) -> list[tuple[Feed, int]]:
    """How many jobs to ask of each: by weight, and what does not divide goes to those that were served least."""
    if len(feeds) == 1:
        feeds[0].served = 0.0
        return [(feeds[0], room)]
    least = min(feed.served for feed in feeds)
    weights = sum(feed.weight for feed in feeds)
    by_need = sorted(feeds, key=lambda feed: feed.served)
    sizes = {feed: int(room * feed.weight / weights) for feed in by_need}
    for feed in by_need[: room - sum(sizes.values())]:
        sizes[feed] += 1
    for feed in by_need:
        # Nobody saves up a claim on the future by having been empty.
        feed.served = max(0.0, min(feed.served - least, room / feed.weight))
    return [(feed, size) for feed, size in sizes.items() if size]


class Fetcher:
    def __init__(
        self,
        options: Options,
        worker: str,
        services: Services,
        link: Link,
        slots: Slots,
        held: set[JobContext],
        metrics: Metrics,
        state: State,
        is_heard: Callable[[], bool],
    ) -> None:
        self.options = options
        self.worker = worker
        self.services = services
        self.link = link
        self.slots = slots
        self.held = held
        self.metrics = metrics
        self.state = state
        #: Whether notifications arrive.
        self.is_heard = is_heard
        self.feeds = [
            Feed(queue, weight, database.claim_arguments(queue, worker, options.lease, sorted(slots.jobs)))
            for queue, weight in options.queues.items()
        ]
        self.stopping = False
        self._waiting: asyncio.Future[None] | None = None
        #: Whether it waits for nothing but a ring or the time, and the link is free.
        self._asleep = False
        #: A claim that is under way, whose answer comes before anything else on the link.
        self._sent: Sent | None = None
        self._ahead = 0
        self._finished = 0
        self._window_began = time.monotonic()
        self._window_finished = 0
        slots.on_room = self.poke

    # ── signals from outside ────────────────────────────────────────────────────────────────────────────────────────

    def ring(self, queues: Sequence[str] | None) -> None:
        """Somebody enqueued in these queues; None: who knows."""
        rung = [feed for feed in self.feeds if queues is None or feed.queue in queues]
        for feed in rung:
            feed.ring()
        if self._asleep and len(rung) == 1:
            self._claim_at_once(rung[0])
        self.poke()

    def _claim_at_once(self, feed: Feed) -> None:
        """The database can look while this process wakes up."""
        conn, room = self.link.conn, self._room()
        if conn is None or room <= 0 or self.stopping:
            return
        # If it cannot be sent, the claim that follows finds out why.
        with contextlib.suppress(database.DatabaseError):
            sent = Sent(feed, room, conn, time.monotonic())
            database.send_claim(conn, feed.arguments, room)
            self._asleep, self._sent = False, sent

    def stop(self) -> None:
        self.stopping = True
        self.poke()

    def poke(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Until `stop`, or with --burst until nothing is due and everything is done."""
        while not self.stopping or self._sent is not None:
            if self._sent is not None:
                sent, self._sent = self._sent, None
                sent.feed.served += await self._look(sent.feed, sent.size, sent) / sent.feed.weight
                continue
            room = self._room()
            if room <= 0:
                await self._wait(None)
                continue
            now = time.monotonic()
            if self.options.burst:
                if not (ready := self._not_empty()):
                    if self.held:
                        await self._wait(PAUSES[-1])
                        continue
                    if not (ready := [feed for feed in self.feeds if feed.is_in_doubt]):
                        return
            else:
                ready = [feed for feed in self.feeds if feed.idle_until <= now]
            if not ready:
                self._asleep = True
                await self._wait(min(feed.idle_until for feed in self.feeds) - now)
                self._asleep = False
                continue
            for feed, size in shares(ready, room):
                if self.stopping:
                    break
                feed.served += await self._look(feed, size) / feed.weight

    def _not_empty(self) -> list[Feed]:
        """For --burst: the feeds that have not been found empty since a handler last ended; it may have enqueued."""
        if self.slots.finished != self._finished:
            self._finished = self.slots.finished
            for feed in self.feeds:
                feed.is_empty = False
        return [feed for feed in self.feeds if not feed.is_empty]

    async def _wait(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = None if seconds is None else loop.call_later(max(seconds, 0.0), self.poke)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _room(self) -> int:
        """How many jobs to ask for: the free slots, and what the handlers finish in a short while. As much again may
        wait in the buffer meanwhile, so that handlers have work while a claim is under way; nothing is asked for
        while more than that waits, so that claims are few and large."""
        slots = self.slots
        now = time.monotonic()
        passed = now - self._window_began
        if passed >= WINDOW:
            pace = (slots.finished - self._window_finished) * WINDOW / passed
            self._ahead = min(int(pace), self.options.prefetch)
            self._window_began, self._window_finished = now, slots.finished
        else:
            # Early in a burst the window is not over; what was finished in it so far is a lower bound.
            self._ahead = min(max(self._ahead, slots.finished - self._window_finished), self.options.prefetch)
        waiting = len(slots.buffer)
        slots.low = self._ahead
        room = min(LARGEST, slots.size + self._ahead, slots.size + 2 * self._ahead - slots.busy - waiting)
        return 0 if waiting > slots.low else room

    async def _look(self, feed: Feed, size: int, sent: Sent | None = None) -> int:
        try:
            began = time.monotonic()
            feed.is_in_doubt = bool(self.held)
            claimed = await self._claim(feed, size, sent)
            self._settle(feed, claimed, size, began)
            if claimed == 0 and feed.looks > len(PAUSES) and not self.stopping and not self.options.burst:
                await self._doze(feed, size)
            elif feed.marked_until and feed.awake_since and time.monotonic() - feed.awake_since > ALWAYS_BUSY:
                feed.marked_until = 0.0
                await self.link.call(
                    lambda conn: database.wake(conn, queue=feed.queue, worker=self.worker), until=self._stopped
                )
        except (errors.AlmanacError, database.DatabaseError) as error:
            # Not for the whole worker to die of: the queue is gone, or the right to it.
            if not self.stopping:
                self._trouble(feed, error)
            return 0
        if feed.trouble is not None:
            logger.warning("queue can be claimed from again queue=%s", feed.queue)
            feed.trouble = None
        return claimed

    def _trouble(self, feed: Feed, error: Exception) -> None:
        reason = " ".join(str(error).split())
        if feed.trouble != reason:
            logger.error("cannot claim queue=%s error=%r", feed.queue, reason)
            feed.trouble = reason
        feed.idle_until = time.monotonic() + self.options.poll
        feed.is_empty = True

    def _stopped(self) -> bool:
        return self.stopping

    async def _claim(self, feed: Feed, size: int, sent: Sent | None = None) -> int:
        sent_at = 0.0

        async def ask(conn: database.AsyncConnection) -> database.ClaimedRows:
            # Here, because the link may have tried for longer than a lease lasts.
            nonlocal sent, sent_at
            if sent is not None and sent.conn is conn:
                sent_at, sent = sent.at, None
            else:
                sent_at = time.monotonic()
                database.send_claim(conn, feed.arguments, size)
            return await database.claimed_rows(conn)

        rows, claimed_at = await self.link.call(ask, until=self._stopped)
        if not rows:
            return 0
        took = time.monotonic() - sent_at
        claim = Claim(self.services, feed.queue, claimed_at, sent_at)
        jobs = [JobContext(claim, row) for row in rows]
        self.held.update(jobs)
        self.slots.add(jobs)
        if len(rows) < size:
            # There is time: the handlers begin before the books are kept.
            await asyncio.sleep(0)
        metrics, due_at = self.metrics, database.Claimed.DUE_AT
        metrics.claimed += len(rows)
        metrics.claim_seconds.observe(took)
        metrics.lateness_seconds.observe_all([(claimed_at - row[due_at]) / 1e6 for row in rows])
        return len(rows)

    def _settle(self, feed: Feed, claimed: int, size: int, began: float) -> None:
        now = time.monotonic()
        if claimed:
            feed.looks = 0
            if feed.awake_since is None:
                feed.awake_since = now
            if claimed >= size:
                feed.idle_until = 0.0
                return
        if self.options.burst:
            feed.is_empty = not claimed
            return
        if not self.is_heard():
            feed.idle_until = now + self._growing(feed.looks)
        else:
            rest = min(REST * (now - began), LONGEST_REST) if claimed else 0.0
            feed.idle_until = now + max(PAUSES[min(feed.looks, len(PAUSES) - 1)], rest)
        feed.looks += 1

    def _growing(self, looks: int) -> float:
        """The pause after so many looks in vain, where nobody rings for what is waited for."""
        return min(self.options.poll_without_listen, PAUSES[0] * 2.0 ** min(looks, 20))

    async def _doze(self, feed: Feed, size: int) -> None:
        feed.awake_since = None
        if not self.is_heard():
            return
        queue, poll = feed.queue, self.options.poll
        began = time.monotonic()
        feed.idle_until = began + poll
        due_in = await self.link.call(
            lambda conn: database.doze_for(conn, queue, self.worker, timedelta(seconds=poll), self.slots.jobs),
            until=self._stopped,
        )
        now = time.monotonic()
        feed.marked_until = began + poll
        # What was committed before the mark could be seen did not ring.
        if await self._claim(feed, size):
            feed.awake_since = now
            feed.ring()
        elif due_in is not None:
            # What is due and was not found, somebody has locked, or it lies behind much of other types.
            pause = max(due_in, PAUSES[0]) if due_in > 0 else self._growing(feed.looks - len(PAUSES))
            feed.idle_until = min(feed.idle_until, now + pause)
        # A ring that came during the two calls has set idle_until to 0 before; it is looked at again then.
