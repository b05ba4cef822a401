"""make bench [ONLY=claim] [SOAK=1], make bench-peers: a JSON object a line, a table, and the ratios promised."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable

from tests.bench import growth, harness, jobs, ladder, peers, schedules, soak, targets, workers
from tests.bench.harness import Bench, Leg

Scenario = Callable[[Bench], Iterable[Leg]]
SCENARIOS: dict[str, Scenario] = {
    "claim": jobs.claim,
    "grown": jobs.grown,
    "snapshot": jobs.snapshot,
    "limits": jobs.limits,
    "enqueue": jobs.enqueue,
    "drain": workers.drains,
    "pickup": workers.pickups,
    "cron": workers.cron_next,
    "schedules": schedules.run,
    "soak": soak.soak,
}
#: Only when asked for by name: the curves and the ladder of docs/performance.md take some minutes of their own.
LONG: dict[str, Scenario] = {"growth": growth.growth, "ladder": ladder.ladder}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default="", help="scenarios, comma-separated: " + ", ".join(SCENARIOS | LONG))
    parser.add_argument("--peers", action="store_true", help="other job queues beside it, installed on demand")
    parser.add_argument("--soak", action="store_true", help="ten minutes of soak rather than a short one")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    scenarios = {"peers": peers.peers} if arguments.peers else SCENARIOS
    wanted = [name for name in arguments.only.split(",") if name] or list(scenarios)
    scenarios = scenarios | LONG
    if unknown := set(wanted) - set(scenarios):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(scenarios)}")
    # As Ctrl-C: the server has to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    with harness.started(rounds=arguments.rounds, soak_seconds=600.0 if arguments.soak else 45.0) as bench:
        harness.describe(bench)
        for name in wanted:
            bench.run(name, scenarios[name](bench))
    print("\n" + harness.table(bench.results))
    print("\n" + targets.table(bench))
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
