"""Small rounds that nothing waits for: showing the worker to operators, ticking when nobody else does. In a thread with
a connection of its own, because a tick can take long, and leases run out meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable

from pyclient import database, errors
from pyclient.worker.link import State, ThreadLink

logger = logging.getLogger("pyclient.worker")

REPORT_EVERY = 10.0
TICK_EVERY = 1.0


class Rounds(threading.Thread):
    def __init__(
        self,
        dsn: str,
        state: State,
        report: Callable[[database.Connection], None],
        tick: Callable[[database.Connection], object],
    ) -> None:
        super().__init__(name="rounds", daemon=True)
        self.link = ThreadLink("rounds", dsn, state)
        self.report = report
        self.tick = tick
        self._ended = threading.Event()
        self._reported: float | None = None
        #: When the last round began. Long ago: a call does not come back.
        self.turned = time.monotonic()

    def stop(self) -> None:
        self.abandon()
        self.join(timeout=5)

    def abandon(self) -> None:
        """Another one takes over; this one ends when its call comes back, if it does."""
        self._ended.set()

    def run(self) -> None:
        while True:
            now = self.turned = time.monotonic()
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
