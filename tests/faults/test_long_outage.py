"""The server was down for forty days: what is made up is what each policy says, in bounded pieces, all alike."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.jobs import Jobs
from tests.sql.test_33_schedules import put

DOWN, BACK = datetime(2026, 3, 10, 12, 0, 30, tzinfo=UTC), datetime(2026, 4, 19, 12, 0, 30, tzinfo=UTC)
BATCH, STEP = 2000, timedelta(seconds=0.5)
NEW = "*/5 * * * * *"
RULES = {"minutely": "* * * * *", "hourly": "0 * * * *", "daily": "@daily"}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"catch_up": "none"},
    "latest": {"catch_up": "latest"},
    "all": {"catch_up": "all"},
    "latest, young": {"catch_up": "latest", "max_age": "10 seconds"},
    "all, young": {"catch_up": "all", "max_age": "3 days"},
    "all, few": {"catch_up": "all", "max_runs": 30},
    "all, paced": {"catch_up": "all", "pace": 60},
}


def promised(policy: str, backlog: list[datetime]) -> list[str]:
    """What docs/schedules.md says about each tick of a backlog."""
    newest, older = backlog[-1], len(backlog) - 1
    match policy:
        case "none":
            return ["skipped_catchup"] * len(backlog)
        case "latest":
            return ["coalesced"] * older + ["fired"]
        case "latest, young":
            assert BACK - newest > timedelta(seconds=10)
            return ["skipped_catchup"] * len(backlog)
        case "all, young":
            return ["fired" if BACK - tick <= timedelta(days=3) else "skipped_catchup" for tick in backlog]
        case "all, few":
            return ["skipped_catchup"] * (len(backlog) - 30) + ["fired"] * 30
        case _:
            return ["fired"] * len(backlog)


def decided(jobs: Jobs, name: str) -> list[tuple[datetime, str]]:
    rows = jobs.sql("select tick_at, decision from almanac.tick where schedule = %s order by tick_at", name)
    return [(row.tick_at, row.decision) for row in rows]


def undecided(jobs: Jobs) -> dict[str, datetime]:
    """The schedules that have something to make up, and from when on."""
    rows = jobs.sql("select name, next_due_at from almanac.schedule where next_due_at <= %s", BACK)
    return {row.name: row.next_due_at for row in rows}


def moments(jobs: Jobs, cron: str, after: datetime, until: datetime) -> list[datetime]:
    found = [after]
    while found[-1] <= until:
        found += [row.r for row in jobs.sql("select r from almanac.next_runs(%s, 'UTC', %s, 10000) r", cron, found[-1])]
    return [moment for moment in found[1:] if moment <= until]


@pytest.mark.timeout(300)
def test_forty_days_are_made_up_as_each_policy_says(request, conn, clock, connect):
    jobs = Jobs(conn)
    clock.freeze(DOWN)
    for (policy, options), (rule, cron) in itertools.product(POLICIES.items(), RULES.items()):
        # Each minutely one is as much as everything else together.
        if rule != "minutely" or len(options) == 1 or request.config.getoption("--full"):
            put(jobs, f"{policy}: {rule}", cron=cron, **options)
    jobs.tick()
    clock.freeze(BACK)
    put(jobs, "new", cron=NEW, catch_up="none")

    reports, behind = 0, undecided(jobs)
    with connect(autocommit=False) as session:
        while True:
            # What one that is killed did not commit is simply done by the next one.
            reports += 1
            if reports % 10 == 0:
                Jobs(session).tick(batch_size=BATCH)
                session.rollback()
            (report,) = jobs.tick(batch_size=BATCH)
            assert report.fired + report.skipped <= BATCH
            waiting = undecided(jobs)
            served = {name for name, due in behind.items() if waiting.get(name) != due}
            passed_over = [due for name, due in behind.items() if name not in served]
            assert served, "it goes on"
            assert max(behind[name] for name in served) <= min(passed_over, default=BACK), "the oldest first"
            behind = waiting
            if not behind:
                break
            assert report.more
            # Not so far that what comes due meanwhile would be late.
            clock.advance(seconds=STEP.total_seconds())
    assert reports > 20, "it was a matter of several ticks"
    jobs.tick()
    now = clock.now()
    assert now - BACK < timedelta(minutes=2)

    chains = {rule: moments(jobs, cron, DOWN, now) for rule, cron in RULES.items()}
    for (name,) in jobs.sql("select name from almanac.schedule where name <> 'new'"):
        policy, _, rule = name.partition(": ")
        backlog = [tick for tick in chains[rule] if tick <= BACK]
        since = [(tick, "fired") for tick in chains[rule][len(backlog) :]]
        assert decided(jobs, name) == list(zip(backlog, promised(policy, backlog), strict=True)) + since, name
    assert decided(jobs, "new") == [(tick, "fired") for tick in moments(jobs, NEW, BACK, now)]
    assert jobs.one("select max(lateness) from almanac.tick where schedule = 'new'") <= STEP, "nobody makes it wait"

    # As many jobs as ticks that fired, each with its own; those of a pace one after the other.
    assert not jobs.sql(
        """select t.*, j.id from (select * from almanac.tick where decision = 'fired') t
             full join almanac.job j on j.id = t.job_id and j.schedule = t.schedule and j.tick_at = t.tick_at
            where t.job_id is null or j.id is null"""
    )
    for rule in RULES:
        dues = jobs.sql(
            "select due_at from almanac.job where schedule = %s and caught_up order by tick_at", f"all, paced: {rule}"
        )
        assert all(b.due_at - a.due_at >= timedelta(seconds=1) for a, b in itertools.pairwise(dues))


def test_more_schedules_than_a_tick_takes_do_not_make_the_others_late(conn, clock):
    jobs, batch = Jobs(conn), 20
    clock.freeze(DOWN)
    for n in range(2 * batch):
        put(jobs, f"behind {n}", cron=RULES["minutely"])
    jobs.tick()
    clock.advance(hours=3)
    put(jobs, "new", cron=NEW, catch_up="none")
    for ring in range(1, 6):
        clock.advance(seconds=5)
        (report,) = jobs.tick(batch_size=batch)
        assert report.more
        assert report.fired + report.skipped == batch, "and the backlog is worked off as well"
        assert [decision for _, decision in decided(jobs, "new")] == ["fired"] * ring
