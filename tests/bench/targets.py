"""What the project promises about its speed, as ratios of figures of one run."""

import statistics
from dataclasses import dataclass
from typing import Any

from tests.bench.harness import Bench, Measurement

Figure = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Target:
    says: str
    of: Figure
    to: Figure | None
    bound: float
    #: Bare statements that do the same and enforce nothing.
    bare: Figure | None = None
    #: The same rows by functions that hold one statement each: they look nothing up, check nothing and compute nothing.
    least: Figure | None = None
    #: Whether the ratio has to stay below the bound rather than above it.
    at_most: bool = False


def peer(metric: str, system: str, **described: str) -> Figure:
    return metric, {"system": system, **described}


#: Compared is with the ceiling as it is: one statement after the other, each a transaction.
BATCH: dict[str, Any] = {"batch": 100, "connections": 1, "scenario": "claim", "chained": False}
DRAIN = ("worker_drain_per_s", {"processes": 1, "future": 0})
TARGETS = [
    *[
        Target(
            f"claim + complete, batch 100, one connection{', chained' if chained else ''}, to the bare ceiling",
            ("claim_complete_per_s", {**BATCH, "chained": chained}), ("ceiling_claim_delete_per_s", BATCH), 0.75,
            bare=("same_rows_claim_complete_per_s", {**BATCH, "chained": chained}),
            least=("least_function_claim_complete_per_s", {**BATCH, "chained": chained}),
        )
        for chained in (False, True)
    ],
    Target("worker drain to graphile-worker", DRAIN, peer("peer_drain_per_s", "graphile-worker"), 1.1),
    Target("worker drain to pg-boss", DRAIN, peer("peer_drain_per_s", "pg-boss"), 1.0),
    Target("worker drain to PgQueuer", DRAIN, peer("peer_drain_per_s", "PgQueuer"), 2.0),
    Target(
        "worker drain beside 1,000,000 future jobs to without",
        ("worker_drain_per_s", {"processes": 1, "future": 1_000_000}), DRAIN, 0.9,
    ),
    Target(
        "worker drain with an old snapshot, last to first quarter",
        ("worker_drain_snapshot_last_to_first", {}), None, 0.8,
    ),
    Target(
        "bulk enqueue to graphile-worker's addJobs",
        ("enqueue_bulk_per_s", {"batch": 1000, "listening": False}),
        peer("peer_enqueue_bulk_per_s", "graphile-worker"), 2.0,
    ),
    Target(
        "single enqueue, a worker listening, 16 connections, to a bare INSERT",
        ("enqueue_single_per_s", {"listening": True}), ("ceiling_insert_per_s", {"consumed": False}), 0.9,
        bare=("ceiling_insert_per_s", {"consumed": True}), least=("least_function_enqueue_per_s", {"consumed": True}),
    ),
    *[
        Target(
            f"pick-up {part} to graphile-worker's, whose jobs are added by {by}",
            (f"pickup_ms_{part}", {}), peer(f"peer_pickup_ms_{part}", "graphile-worker", added_by=by), 1.0,
            at_most=True,
        )
        for by in ("psycopg", "its client") for part in ("p50", "p99")
    ],
    Target(
        "schedule claims, 50 connections, to the bare ceiling by name",
        ("schedule_claims_per_s", {}), ("ceiling_schedule_claims_per_s", {"claimed": "by name"}), 0.8,
        bare=("same_rows_schedule_claims_per_s", {}), least=("least_function_schedule_claims_per_s", {}),
    ),
    Target(
        "schedule claims, 50 connections, to the bare ceiling of whichever is due",
        ("schedule_claims_per_s", {}), ("ceiling_schedule_claims_per_s", {"claimed": "first due"}), 0.8,
        bare=("same_rows_schedule_claims_per_s", {}), least=("least_function_schedule_claims_per_s", {}),
    ),
    Target("schedule claims, p99 in ms", ("schedule_claim_ms_p99", {}), None, 100.0, at_most=True),
    Target("tick fan-out, schedules a second", ("tick_fanout_per_s", {}), None, 10_000.0),
    Target("soak, size at the end to early on", ("soak_size_ratio", {}), None, 1.5, at_most=True),
]  # fmt: skip


def side_by_side(of: Measurement, to: Measurement) -> str:
    """The median of the rounds' ratios. A machine that is slow for a minute is slow for both figures of a round; the
    ratio of two medians may compare a slow minute of one with a quick minute of the other. It does not decide."""
    if len(of["values"]) != len(to["values"]):
        return ""
    ratios: list[float] = [a / b for a, b in zip(of["values"], to["values"], strict=True)]
    return f"   side by side {statistics.median(ratios):,.2f}"


def table(bench: Bench) -> str:
    """The targets whose figures this run has."""
    lines = []
    for target in TARGETS:
        of = bench.find(target.of[0], **target.of[1])
        to = bench.find(target.to[0], **target.to[1]) if target.to else None
        if of is None or (target.to and to is None):
            continue
        ratio = of["value"] / (to["value"] if to else 1)
        is_reached = ratio <= target.bound if target.at_most else ratio >= target.bound
        figures = f"{of['value']:,} : {to['value']:,}{side_by_side(of, to)}" if to else f"{of['value']:,}"
        for says, figure in (("bare statements", target.bare), ("least functions", target.least)):
            beside = bench.find(figure[0], **figure[1]) if figure else None
            if to and beside:
                figures += f"   {says} {beside['value'] / to['value']:,.2f}"
        bound = f"{'≤' if target.at_most else '≥'} {target.bound:,}"
        shown = f"{ratio:,.2f}" if ratio < 1000 else f"{ratio:,.0f}"
        lines.append(f"{'ok ' if is_reached else 'NOT'}  {target.says:72}  {shown:>9}  {bound:>9}   {figures}")
    return "\n".join(lines)
