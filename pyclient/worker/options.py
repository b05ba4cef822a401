"""What a worker was asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class Options:
    """`queues` maps names to weights: a queue with weight 4 gets four times the share of one with weight 1 while both
    have work."""

    queues: Mapping[str, float]
    concurrency: int = 50
    #: Most jobs fetched ahead of the free slots; the pace of the handlers decides how many it is.
    prefetch: int = 1000
    #: None: the lease of the job type or the queue.
    lease: timedelta | None = None
    #: How long a stopping worker waits for its handlers.
    grace: float = 25.0
    #: Longest sleep between two looks at a queue, should a notification get lost.
    poll: float = 5.0
    #: The same where there are no notifications.
    poll_without_listen: float = 0.5
    #: Tick when nobody else does.
    ticks: bool = True
    burst: bool = False
    #: Which of the supervised processes this is, from 0.
    number: int = 0
    metrics_port: int | None = None
