"""Numbers. Always counted, because counting is cheap; shown by --metrics-port (extra `metrics`)."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts, total = self.bounds, self.counts, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total


class Metrics:
    """What a worker process has done. Written by its event loop, read by anybody."""

    def __init__(self) -> None:
        self.claimed = 0
        self.completed = 0
        self.failed = 0
        self.retried = 0
        self.dead = 0
        self.released = 0
        self.lost = 0
        self.claim_seconds = Histogram()
        self.handler_seconds = Histogram()
        self.lateness_seconds = Histogram()
