"""What a next run costs: cron_next_us_p50 for the rules everybody writes, cron_next_us_max for the worst there are.

Timed inside the server, call by call, so that no round trip is in the figures. `form` tells the two ways to ask:
`parsed` is what a tick does with the rule stored beside its schedule, `text` is next_run() with everything it checks.
"""

from collections.abc import Iterator
from typing import Any

import psycopg

COMMON = ["*/5 * * * *", "0 9 * * 1-5", "0 0 1 * *"]
RARE = [
    ("0 0 29 2 *", "2024-03-01T00:00Z"),
    ("0 0 29 2 *", "2096-03-01T00:00Z"),
    ("0 0 * 2 MON#5", "2072-03-01T00:00Z"),
    ("0 0 L * *", "2024-03-01T00:00Z"),
    ("0 0 L-30 * *", "2024-03-02T00:00Z"),
    ("0 0 LW * *", "2024-03-01T00:00Z"),
    ("0 9 15W * *", "2024-03-16T00:00Z"),
    ("0 0 * * 5L", "2024-03-30T00:00Z"),
    ("0 0 * * 1#5", "2024-03-01T00:00Z"),
    ("0 0 LW,15W,L-3 * 5L,1#5", "2024-03-01T00:00Z"),
    ("59 59 23 31 12 ?", "2024-01-01T00:00Z"),
    ("*/7 * * * * *", "2024-03-10T06:59:50Z"),
    ("30 2 * * *", "2024-03-10T05:00Z"),
    ("30 1 * * *", "2024-11-03T05:40Z"),
    ("30 2 L 3 *", "2024-04-01T00:00Z"),
    ("@every 1h30m", "2024-03-10T06:00Z"),
    # In New York nothing but gaps: for twenty years, until the law changes, and for all fifty, to be refused then.
    ("*/10 2 * 4 SUN#1", "1987-01-01T00:00Z"),
    ("*/10 2 * 3 SUN#2", "2024-01-01T00:00Z"),
    # What an exporter writes: every value by itself.
    (
        " ".join(",".join(map(str, values)) for values in (range(60), range(24), range(1, 32))) + " * 5L",
        "2024-03-30T00:00Z",
    ),
]
# With clocks that change; the nights in RARE are its own.
ZONE = "America/New_York"

TIMED = """
create or replace function pg_temp.time_cron(cron text, zone text, start timestamptz, step interval, calls integer)
    returns table (form text, us float8)
    language plpgsql
as $$
declare
    v_rule    almanac.cron_rule := almanac.parse_cron(cron);
    v_after   timestamptz;
    v_run     timestamptz;
    v_started timestamptz;
begin
    for v_call in -20 .. calls - 1 loop
        v_after := start + greatest(v_call, 0) * step;

        v_started := clock_timestamp();
        v_run := almanac._next_run(v_rule, zone, v_after, 'after', 'first', null);
        us := extract(epoch from clock_timestamp() - v_started) * 1000000;
        form := 'parsed';
        if v_call >= 0 then
            return next;
        end if;

        begin
            v_started := clock_timestamp();
            v_run := almanac.next_run(cron, zone, v_after);
            us := extract(epoch from clock_timestamp() - v_started) * 1000000;
        exception when sqlstate 'PA007' then
            us := extract(epoch from clock_timestamp() - v_started) * 1000000;
        end;
        form := 'text';
        if v_call >= 0 then
            return next;
        end if;
    end loop;
end;
$$
"""
MEDIANS = """
select form, percentile_cont(0.5) within group (order by us)
  from pg_temp.time_cron(%s, %s, %s::timestamptz, %s::interval, %s) group by form
"""


def run(conn: psycopg.Connection[Any], *, calls: int = 2000) -> Iterator[dict[str, Any]]:
    """The two metrics for each form, each the worst of the medians of its rules; then every rule by itself.

    Common rules are asked all over a year, the others again and again where they are at their worst.
    """
    conn.execute(TIMED)
    worst: dict[tuple[str, str], tuple[float, str, str]] = {}
    each = []
    asked = [(rule, "2024-01-01T00:00Z", "15793 seconds", "cron_next_us_p50") for rule in COMMON]
    asked += [(rule, after, "0.01 seconds", "cron_next_us_max") for rule, after in RARE]
    for rule, after, step, metric in asked:
        for zone in ("UTC", ZONE):
            for form, us in conn.execute(MEDIANS, [rule, zone, after, step, calls]).fetchall():
                shown = rule if len(rule) < 40 else rule[:30] + "..."
                each.append({"metric": "cron_next_us", "value": us, "form": form, "cron": shown, "timezone": zone})
                for name in {metric, "cron_next_us_max"}:
                    worst[name, form] = max(worst.get((name, form), (0.0, "", "")), (us, shown, zone))
    for (name, form), (us, rule, zone) in sorted(worst.items()):
        yield {"metric": name, "value": us, "unit": "us", "form": form, "cron": rule, "timezone": zone}
    for row in each:
        yield row | {"unit": "us"}
