"""Small rounds that nothing waits for: showing the worker to operators, ticking when nobody else does. In a thread with
a connection of its own, because a tick can take long, and leases run out meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable

import psycopg

from pyclient import database, errors
from pyclient.worker.link import State, ThreadLink, passes

logger = logging.getLogger("pyclient.worker")

REPORT_EVERY = 10.0
TICK_EVERY = 1.0
# A tick that goes on failing is said again.
REMIND_EVERY = 60.0


class Rounds(threading.Thread):
    def __init__(
        self,
        dsn: str,
        state: State,
        report: Callable[[database.Connection], None],
        tick: Callable[[database.Connection], object],
    ) -> None:
        super().__init__(name="rounds", daemon=True)
        self.link = ThreadLink("rounds", dsn, state, may_take_long=True)
        self.report = report
        self.tick = tick
        self._ended = threading.Event()
        self._reported: float | None = None

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=5)

    def run(self) -> None:
        while True:
            now = time.monotonic()
            if self._reported is None or now - self._reported >= REPORT_EVERY:
                self._reported = now
                self._quietly(self.report)
            self._quietly(self.tick)
            if self._ended.wait(TICK_EVERY):
                break
        self.link.drop()

    def _quietly(self, operation: Callable[[database.Connection], object]) -> None:
        """Nothing depends on it: try again next time."""
        try:
            self.link.call(operation)
        except (errors.AlmanacError, database.DatabaseError) as error:
            logger.debug("round failed: %s", error)
        except Exception:
            logger.exception("round failed")


class Ticks:
    """Ticks if nobody else does, and says when that fails. The function catches most failures and warns of them."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._failing: tuple[str | None, str | None] | None = None
        self._failed_at = self._said_at = 0.0

    def __call__(self, conn: database.Connection) -> None:
        heard = []

        def hear(diag: psycopg.errors.Diagnostic) -> None:
            if diag.severity_nonlocalized == "WARNING":
                heard.append(((diag.message_primary or "").removeprefix("tick failed: "), diag.sqlstate))

        conn.add_notice_handler(hear)
        ticked = False
        try:
            ticked = database.tick_if_stale(conn, worker=self.worker)
        except database.DatabaseError as error:
            if passes(error):
                raise
            heard.append((error.diag.message_primary or str(error), error.sqlstate))
        finally:
            conn.remove_notice_handler(hear)
        now = time.monotonic()
        if heard:
            self._failed_at = now
            if self._failing != heard[-1] or now - self._said_at >= REMIND_EVERY:
                self._failing, self._said_at = heard[-1], now
                logger.warning("tick failed", extra={"error": heard[-1][0], "sqlstate": heard[-1][1]})
        # Without an answer of its own this worker may just have left the tick to another one, which fails.
        elif self._failing and (ticked or now - self._failed_at >= REMIND_EVERY):
            self._failing = None
            logger.info("ticks work again")
