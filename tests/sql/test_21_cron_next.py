"""21 next_run and its relatives: equal to a brute-force oracle everywhere, and on the days the clocks change too."""

import calendar
import csv
import itertools
import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import psycopg
import pytest
from croniter import croniter
from cronsim import CronSim

from pyclient.errors import CronRefused
from tests import cron_oracle as oracle
from tests.conftest import Db

# Gaps of 15, 30 and 60 minutes, of 2 and 24 hours; changes at midnight, at 00:01, in the middle of a month; negative
# summer time; changes for good; two names that PostgreSQL would read as abbreviations.
ZONES = [
    *("America/New_York", "Europe/Berlin", "Europe/Dublin", "Europe/London", "Australia/Lord_Howe", "Pacific/Apia"),
    *("America/Sao_Paulo", "Africa/Cairo", "America/St_Johns", "Antarctica/Troll", "Pacific/Chatham", "Asia/Gaza"),
    *("Africa/Casablanca", "America/Caracas", "Asia/Pyongyang", "America/Havana", "Asia/Tehran", "Europe/Moscow"),
    *("Antarctica/Casey", "CET", "EET"),
]
with (Path(__file__).parents[1] / "cron_cases.tsv").open(encoding="utf-8") as file:
    CASES = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
MANY = """
    select array_agg(almanac._next_run(rule, zone, at, gap, overlap, 'epoch') order by place),
           array_agg(almanac._previous_run(rule, zone, at, gap, overlap, 'epoch') order by place)
      from (select almanac.parse_cron(%s) as rule, %s::text as zone offset 0) as given,
           unnest(%s::timestamptz[], %s::text[], %s::text[]) with ordinality as ask (at, gap, overlap, place)
"""


@pytest.fixture(scope="module")
def dsn(clone):
    """One database for all tests of this file: they only ask."""
    with clone("almanac_live_template") as dsn:
        yield dsn


@pytest.fixture(scope="module")
def db(dsn):
    with psycopg.connect(dsn, autocommit=True, options="-c timezone=UTC") as conn:
        yield Db(conn)


@pytest.fixture
def full(request) -> bool:
    return bool(request.config.getoption("--full"))


def run(db: Db, expression: str, zone: str, after: datetime, *choice: str) -> datetime | None:
    """next_run, or None where the rule is refused because no date is possible."""
    query = f"select almanac.next_run(%s, %s, %s{', %s' * len(choice)})"
    try:
        return db.one(query, expression, zone, after, *choice)  # type: ignore[no-any-return]
    except psycopg.Error as error:
        if error.sqlstate == "PA007" and "no possible date" in str(error):
            return None
        raise


def valid_expression(rng: random.Random, **how: float) -> str:
    while True:
        expression = oracle.random_expression(rng, **how)
        if oracle.has_a_date(expression):
            return expression


def near(rng: random.Random, change: datetime) -> datetime:
    """An instant close to a change of the clocks: somewhere in the nights around it, or at a telling distance."""
    if rng.random() < 0.25:
        return change + timedelta(minutes=rng.choice([-1440, -120, -60, -30, -1, 0, 1, 30, 60, 120, 1440]))
    seconds = rng.choice([7200, 108_000])
    return change + timedelta(microseconds=rng.randrange(-seconds * 10**6, seconds * 10**6))


def agreed_changes(db: Db, zone: str) -> list[datetime]:
    """The changes that Python's zone database and the server's both have: their releases may differ."""
    tz = ZoneInfo(zone)
    found = [at + step for at in oracle.changes(zone) for step in (-oracle.SECOND, timedelta(0))]
    shown = db.one(
        "select array_agg(at at time zone almanac._zone(%s) order by n) "
        "from unnest(%s::timestamptz[]) with ordinality as t (at, n)",
        zone,
        found,
    )
    same = [at.astimezone(tz).replace(tzinfo=None) == there for at, there in zip(found, shown, strict=True)]
    return [at for at, before, after in zip(found[1::2], same[::2], same[1::2], strict=True) if before and after]


# ── what it must say ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES, ids=[f"{n}: {case['why'].split('[')[0]}" for n, case in enumerate(CASES, 2)])
def test_the_collected_cases(db, case):
    query = "select almanac.next_run(%s, %s, %s::timestamptz) at time zone 'UTC'"
    given = case["expr"], case["tz"], case["after_utc"]
    if case["next_utc"] == "ERROR":
        with pytest.raises(psycopg.Error) as refused:
            db.one(query, *given)
        assert refused.value.sqlstate == ("PA008" if case["why"].startswith("zone-invalid") else "PA007")
    else:
        assert db.one(query, *given).isoformat() + "Z" == case["next_utc"]


@pytest.mark.timeout(900)
def test_in_utc_it_equals_the_oracle_and_the_libraries_where_they_are_right(db, full):
    rng = random.Random(4)
    compared = {"oracle": 0, "croniter": 0, "cronsim": 0}
    for _ in range(20_000 if full else 1_000):
        expression = oracle.random_expression(rng)
        after = datetime(1990, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(110 * 365 * 86_400 * 10**6))
        got = run(db, expression, "UTC", after)
        possible = oracle.has_a_date(expression)
        want = oracle.next_run(expression, "UTC", after, reach=timedelta(0)) if possible else None
        assert got == want, (expression, after)
        compared["oracle"] += 1
        if got is not None and oracle.croniter_is_right(expression):
            there = croniter(expression, after, max_years_between_matches=50).get_next(datetime)
            assert got == there, ("croniter", expression, after)
            compared["croniter"] += 1
        if got is not None and oracle.cronsim_is_right(expression):
            assert got == next(CronSim(expression.upper(), after)), ("cronsim", expression, after)
            compared["cronsim"] += 1
    assert min(compared.values()) > compared["oracle"] / 10, compared


def test_every_day_modifier_selects_the_days_of_the_oracle_in_every_kind_of_month(db):
    """28 to 31 days, the 1st on each weekday: there is no other month."""
    months = {
        (oracle.weekday(first), calendar.monthrange(first.year, first.month)[1]): first
        for first in (date(year, month, 1) for year in range(2000, 2028) for month in range(1, 13))
    }
    assert len(months) == 28
    doms = [*(f"{n}W" for n in range(1, 32)), "L", *(f"L-{n}" for n in range(1, 31)), "LW"]
    dows = [*(f"{n}#{k}" for n in range(8) for k in range(1, 6)), *(f"{n}L" for n in range(8))]
    for expression in [*(f"0 0 {dom} * *" for dom in doms), *(f"0 0 * * {dow}" for dow in dows)]:
        got = db.one(
            "select array_agg(almanac._month_days(rule, dow, length) order by n) "
            "from almanac.parse_cron(%s) as rule, unnest(%s::int[], %s::int[]) with ordinality as m (dow, length, n)",
            expression,
            [dow for dow, _ in months],
            [length for _, length in months],
        )
        rule = oracle.Rule(expression)
        for ((_, length), first), days in zip(months.items(), got, strict=True):
            want = sum(1 << day for day in range(1, length + 1) if rule.on(first.replace(day=day)))
            assert days == want, (expression, first)


def test_plain_rules_alone_take_the_short_way_to_the_days_of_a_month_and_it_leads_there(db):
    doms = ("*", "?", "1", "31", "*/2", "1-15", "15W", "L", "L-3", "LW", "1,15W", "1,L")
    dows = ("*", "?", "MON", "1-5", "0,6", "5#5", "5L", "1,5#5", "1,5L")
    for dom, dow in itertools.product(doms, dows):
        ((is_plain, is_same),) = db.sql(
            """select almanac._has_plain_days(rule),
                      bool_and(almanac._plain_days(rule, dow, length) = almanac._month_days(rule, dow, length))
                 from almanac.parse_cron(%s) as rule, generate_series(0, 6) as dow, generate_series(28, 31) as length
                group by 1""",
            f"0 0 {dom} * {dow}",
        )
        assert is_plain == (not {"L", "W", "#"} & {*dom, *dow}), (dom, dow)
        assert is_same or not is_plain, (dom, dow)


def test_the_two_oracles_agree(db):
    """The one that keeps minutes in integers, and the one that asks each label for its instants."""
    rng = random.Random(5)
    for zone in ("Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"):
        for change in rng.sample(oracle.changes(zone), 4):
            night = oracle.Night(zone, change)
            for _ in range(6):
                expression, after = valid_expression(rng, seconds=0, days=0.9), near(rng, change)
                for choice, runs in night.runs(oracle.Rule(expression)).items():
                    want = night.next_run(runs, after)
                    if want is not None:
                        assert oracle.next_run(expression, zone, after, *choice) == want


@pytest.mark.timeout(600)
def test_with_seconds_it_equals_the_oracle_near_changes(db, full):
    rng = random.Random(6)
    for _ in range(600 if full else 60):
        zone = rng.choice(ZONES)
        expression = valid_expression(rng, seconds=1, days=0.8)
        if len(oracle.Rule(expression).times) > 2_000:
            continue
        after, choice = near(rng, rng.choice(agreed_changes(db, zone))), rng.choice(oracle.CHOICES)
        assert run(db, expression, zone, after, *choice) == oracle.next_run(expression, zone, after, *choice)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("zone", ZONES)
def test_around_changes_of_the_clocks_it_equals_the_oracle_under_every_choice(db, full, zone):
    rng = random.Random(f"7 {zone}")
    changes = agreed_changes(db, zone)
    assert changes
    nights = [oracle.Night(zone, at) for at in (changes if full else rng.sample(changes, min(4, len(changes))))]
    for _ in range(2_000 if full else 40):
        if rng.random() < 0.5:
            rule = oracle.Rule(valid_expression(rng, seconds=0, days=0.7))
        else:
            rule = oracle.Rule(oracle.night_expression(rng, zone, rng.choice(nights).change))
        asked: list[tuple[oracle.Night, datetime, tuple[str, str], int]] = []
        for night in nights:
            at, runs = near(rng, night.change), night.runs(rule)
            choices = oracle.CHOICES if not rule.wildcard else [rng.choice(oracle.CHOICES)]
            asked += [(night, at, choice, runs[choice]) for choice in choices]
        given = [
            [at for _, at, _, _ in asked],
            [gap for _, _, (gap, _), _ in asked],
            [two for _, _, (_, two), _ in asked],
        ]
        following, preceding = db.conn.execute(MANY, [rule.text, zone, *given]).fetchone()
        for (night, at, choice, minutes), after, before in zip(asked, following, preceding, strict=True):
            case = (rule.text, zone, at, choice)
            # Where these days hold no run, the answer lies outside of them.
            want = night.next_run(minutes, at)
            assert after == want if want else after is None or after >= night.end, (case, "next")
            want = night.previous_run(minutes, at)
            assert before == want if want else before is None or before < night.start, (case, "previous")


# ── what must hold whatever it says ─────────────────────────────────────────────────────────────────────────────────


def test_next_runs_increase_and_are_the_chain_of_next_run(db, full):
    rng = random.Random(8)
    for _ in range(400 if full else 60):
        zone, choice = rng.choice(ZONES), rng.choice(oracle.CHOICES)
        expression, after = valid_expression(rng), near(rng, rng.choice(oracle.changes(zone)))
        runs = db.next_runs(
            cron=expression, timezone=zone, after=after, count=30, dst_gap=choice[0], dst_overlap=choice[1]
        )
        assert all(early < late for early, late in itertools.pairwise([after, *runs])), (
            expression,
            zone,
            after,
            choice,
        )
        assert run(db, expression, zone, runs[3], *choice) == runs[4]


def test_previous_and_next_run_enclose_every_instant(db, full):
    rng = random.Random(9)
    for _ in range(2_000 if full else 200):
        zone, (gap, overlap) = rng.choice(ZONES), rng.choice(oracle.CHOICES)
        expression, at = valid_expression(rng), near(rng, rng.choice(oracle.changes(zone)))
        following, back, forth = db.one(
            """select n, almanac.previous_run(c, z, n, g, o),
                      almanac.next_run(c, z, almanac.previous_run(c, z, n, g, o), g, o)
                 from (select %s::text, %s::text, %s::timestamptz, %s::text, %s::text offset 0)
                      as given (c, z, t, g, o),
                      almanac.next_run(c, z, t, g, o) as n""",
            expression, zone, at, gap, overlap,
        )  # fmt: skip
        assert back <= at < following, (expression, zone, at, gap, overlap)
        assert forth == following, (expression, zone, at, gap, overlap)


SESSIONS = [
    "set timezone = 'America/New_York'",
    "set timezone = 'Pacific/Apia'",
    "set timezone = 'Asia/Kathmandu'; set datestyle = 'German'",
    "set datestyle = 'SQL, DMY'; set intervalstyle = 'iso_8601'",
    "set datestyle = 'Postgres, MDY'; set intervalstyle = 'sql_standard'",
    "set intervalstyle = 'postgres_verbose'; set lc_time = 'C'; set lc_numeric = 'C'; set lc_messages = 'C'",
    "set timezone_abbreviations = 'Australia'; set timezone = 'Australia/Sydney'",
    "set timezone_abbreviations = 'India'; set extra_float_digits = -15; set search_path = 'pg_temp'",
    "set standard_conforming_strings = off; set escape_string_warning = off",
]


@pytest.mark.parametrize("settings", SESSIONS)
def test_the_session_has_no_say(connect, settings):
    rng = random.Random(10)
    asked = []
    for zone in [*ZONES, "EST", "HST", "UTC", "Asia/Tokyo"]:
        changes = oracle.changes(zone) or [datetime(2020, 3, 1, tzinfo=UTC)]
        asked += [
            (valid_expression(rng), zone, rng.choice(changes).isoformat(), *rng.choice(oracle.CHOICES)) for _ in "ab"
        ]
    asked += [("@every 36h30m", "UTC", "2024-03-10T06:59:59.5Z", "after", "first")]
    answers = []
    for setting in ("set timezone = 'UTC'", settings):
        conn = connect()
        conn.execute(setting)
        answers.append(
            [
                conn.execute(
                    """select extract(epoch from almanac.next_run(c, z, t::timestamptz, g, o)),
                              extract(epoch from almanac.previous_run(c, z, t::timestamptz, g, o)),
                              almanac.describe_cron(c),
                              (select array_agg((extract(epoch from p.run_at), to_char(p.local_time, 'YYYYMMDDHH24MI'),
                                                 p.utc_offset, p.note)::text)
                                 from almanac.preview_cron(c, z, 2, t::timestamptz, g, o) as p)
                         from (select %s::text, %s::text, %s::text, %s::text, %s::text) as given (c, z, t, g, o)""",
                    row,
                ).fetchone()
                for row in asked
            ]
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("zone", ["CET", "MET", "EET", "WET", "EST", "MST", "HST"])
def test_a_zone_with_the_name_of_an_abbreviation_is_the_zone(db, zone):
    """PostgreSQL's own CET has no summer time."""
    for month in (1, 7):
        got = run(db, "0 9 * * *", zone, datetime(2024, month, 1, tzinfo=UTC))
        assert got is not None
        assert got.astimezone(ZoneInfo(zone)).strftime("%H:%M") == "09:00"


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_three_arguments_will_do(db):
    assert db.one("select almanac.next_run('0 9 * * *', 'Europe/Paris', now()) > now()")


@pytest.mark.parametrize("function", ["next_run", "previous_run", "next_runs"])
@pytest.mark.parametrize("missing", range(5))
def test_null_in_null_out(db, function, missing):
    given: list[object] = ["0 9 * * *", "UTC", datetime(2024, 1, 1, tzinfo=UTC), "after", "first"]
    given[missing] = None
    named = "dst_gap => %s, dst_overlap => %s"
    rows = db.sql(f"select almanac.{function}(%s::text, %s::text, %s::timestamptz, {named})", *given)
    assert [row for row in rows if row[0] is not None] == []


@pytest.mark.parametrize(
    "arguments",
    [
        "'infinity'",
        "'-infinity'",
        "'0001-01-01 00:00Z'",
        "'4713-01-02 00:00Z BC'",
        "'10000-01-01 00:00Z'",
        "'294276-12-31 00:00Z'",
        "now(), dst_gap => 'later'",
        "now(), dst_gap => ''",
        "now(), dst_overlap => 'AFTER'",
        "now(), anchor => 'infinity'",
        "now(), count => 0",
        "now(), count => -1",
        "now(), count => 10001",
    ],
)
def test_arguments_out_of_bounds_are_refused_with_a_hint(db, arguments):
    for function in ["next_runs"] if "count" in arguments else ["next_run", "previous_run", "next_runs"]:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
            db.sql(f"select almanac.{function}('0 9 * * *', 'Europe/Paris', {arguments})")
        assert refused.value.diag.message_hint
        assert refused.value.diag.message_detail


def test_the_ends_of_the_calendar_are_within_it(db):
    for zone in ("UTC", "Asia/Tokyo", "America/New_York"):
        for at in ("0001-01-02 00:00Z", "9999-12-30 23:59Z"):
            assert db.one(f"select almanac.next_run('* * * * *', '{zone}', '{at}') > '{at}'")
            assert db.one(f"select almanac.previous_run('* * * * *', '{zone}', '{at}') < '{at}'")


def test_what_the_clocks_always_leave_out_is_refused(db):
    """The second Sunday of March has no 02:30 in New York: nothing to run for a wildcard, or if gaps are skipped."""
    for expression, gap in (("30 2 * 3 SUN#2", "skip"), ("*/10 2 * 3 SUN#2", "after")):
        with pytest.raises(CronRefused, match="within 50 years"):
            db.next_run(cron=expression, timezone="America/New_York", after="2024-01-01T00:00Z", dst_gap=gap)
    run_at = db.one("select almanac.next_run('30 2 * 3 SUN#2', 'America/New_York', '2024-01-01T00:00Z')")
    assert run_at == datetime(2024, 3, 10, 7, tzinfo=UTC)


def test_years_of_gaps_end_where_the_law_changes(db):
    """New York: DST began on the first Sunday of April from 1987 to 2006, on the second of March since 2007."""
    years = "select almanac.{}(%s, 'America/New_York', %s::timestamptz, dst_gap => 'skip')"
    for minute in ("*/10", "0", "0-50/10"):
        following = db.one(years.format("next_run"), f"{minute} 2 * 4 SUN#1", "1987-01-01Z")
        assert following == datetime(2007, 4, 1, 6, tzinfo=UTC)
        previous = db.one(years.format("previous_run"), f"{minute} 2 * 3 SUN#2", "2024-01-01Z")
        assert previous.replace(minute=0) == datetime(2006, 3, 12, 7, tzinfo=UTC)


def test_a_day_is_not_passed_over_for_its_first_or_last_time(db):
    """Sao Paulo leaves out 00:00 to 00:59 on 4 November 2018, New York 02:00 to 02:59 on 10 March 2024."""
    following = db.one("select almanac.next_run('0 0,23 4 11 *', 'America/Sao_Paulo', '2018-06-01Z', 'skip')")
    assert following == datetime(2018, 11, 5, 1, tzinfo=UTC)
    following = db.one("select almanac.next_run('*/30 */23 4 11 *', 'America/Sao_Paulo', '2018-06-01Z')")
    assert following == datetime(2018, 11, 5, 1, tzinfo=UTC)
    previous = db.one("select almanac.previous_run('0 1,2 10 3 *', 'America/New_York', '2024-06-01Z', 'skip')")
    assert previous == datetime(2024, 3, 10, 6, tzinfo=UTC)


@pytest.mark.timeout(600)
def test_rules_aimed_at_gaps_equal_the_oracle(db, full):
    """Where gaps are left out, days that lie in one as a whole are passed over without a look at the change."""
    rng = random.Random(11)
    found = {True: 0, False: 0}
    # An answer may be decades away: both zone databases have to agree all the way.
    zones = [zone for zone in ZONES if agreed_changes(db, zone) == oracle.changes(zone)]
    for _ in range(400 if full else 40):
        zone = rng.choice(zones)
        change = rng.choice(oracle.changes(zone))
        label = (change - oracle.SECOND).astimezone(ZoneInfo(zone)).replace(tzinfo=None) + oracle.SECOND
        minute, hour = rng.choice(["*", "*/10", "30", f"{label.minute}", "0-59/15"]), rng.choice([label.hour, "*/23"])
        day, nth = oracle.weekday(label.date()), (label.day - 1) // 7 + 1
        days = rng.choice([f"* {label.month} {day}#{nth}", f"* {label.month} {day}L", f"{label.day} {label.month} *"])
        after = datetime(rng.randint(1995, 2015), rng.randint(1, 12), 1, tzinfo=UTC)
        expression = f"{minute} {hour} {days}"
        got = db.one(
            "select almanac._next_run(almanac.parse_cron(%s), %s, %s, 'skip', 'first', null)", expression, zone, after
        )
        want = oracle.next_run(expression, zone, after, "skip", "first")
        assert got == want, (expression, zone, after)
        found[want is None or want > after + timedelta(days=400)] += 1
    assert min(found.values()) > 0


# ── @every ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("every", "after", "anchor", "following", "previous"),
    [
        ("1h", "2024-01-01 00:30", "1970-01-01 00:00", "2024-01-01 01:00", "2024-01-01 00:00"),
        ("1h", "2024-01-01 01:00", "1970-01-01 00:00", "2024-01-01 02:00", "2024-01-01 00:00"),
        ("1h", "2024-01-01 00:30", "2023-06-01 00:17:03.5", "2024-01-01 01:17:03.5", "2024-01-01 00:17:03.5"),
        ("36h", "2024-03-10 06:00", "2024-03-09 05:00", "2024-03-10 17:00", "2024-03-09 05:00"),
        ("36h", "2024-03-01 06:00", "2024-03-09 05:00", "2024-03-01 17:00", "2024-02-29 05:00"),
        ("1500ms", "1969-12-31 23:59:58.2", "1970-01-01 00:00", "1969-12-31 23:59:58.5", "1969-12-31 23:59:57"),
    ],
)
def test_every_counts_elapsed_time_from_its_anchor(db, every, after, anchor, following, previous):
    after, anchor, following, previous = (
        datetime.fromisoformat(text).replace(tzinfo=UTC) for text in (after, anchor, following, previous)
    )
    # A zone makes no difference, nor the night of 10 March in this one.
    given = ["@every " + every, "America/New_York", after, anchor]
    assert db.one("select almanac.next_run(%s, %s, %s, anchor => %s)", *given) == following
    assert db.one("select almanac.previous_run(%s, %s, %s, anchor => %s)", *given) == previous


def test_every_is_exact_to_the_microsecond_over_ten_thousand_years(db):
    off = db.one(
        """select mod((extract(epoch from run) - extract(epoch from anchor)) * 1000000, 25200000000)
             from (values (timestamptz '0001-01-02 00:00:00.000001Z')) as given (anchor),
                  almanac.next_run('@every 7h', 'UTC', '9999-12-30 23:59:59.999999Z', anchor => given.anchor) as run"""
    )
    assert off == 0


# ── cost ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize(
    ("expression", "after"),
    [
        ("*/5 * * * *", "2024-03-10 06:30Z"),
        ("0 0 29 2 *", "2024-03-01 00:00Z"),
        ("0 0 29 2 *", "2096-03-01 00:00Z"),
        ("0 0 * 2 MON#5", "2072-03-01 00:00Z"),
        ("0 0 LW,15W,L-3 * 5L,1#5", "2024-03-09 00:00Z"),
        ("30 2 * * *", "2024-03-10 05:00Z"),
        ("59 59 23 31 12 ?", "2024-01-01 00:00Z"),
    ],
)
def test_the_distance_to_the_answer_costs_next_to_nothing(db, expression, after, zone):
    """Best of many, so that a busy machine does not fail it; `make bench` has the medians."""
    best = db.one(
        """with recursive timed as materialized (
               select n, clock_timestamp() as started,
                      almanac.next_run(%s, %s, %s::timestamptz + n * interval '1 second') as run,
                      clock_timestamp() as ended
                 from generate_series(1, 60) as n)
           select min(extract(epoch from ended - started) * 1000) from timed""",
        expression, zone, after,
    )  # fmt: skip
    assert 0 < best < 1


def test_a_zone_of_megabytes_is_compared_with_none(db):
    with db.conn.transaction(force_rollback=True):
        db.conn.execute("set local statement_timeout = '3s'")  # compared with all names it took 14 to 20
        for call in (
            "next_run('@hourly', %s, 'epoch')",
            "previous_run('@hourly', %s, now())",
            "next_runs('@hourly', %s, 'epoch')",
            "preview_cron('@hourly', %s)",
            "put_schedule_template('t', timezone => %s)",
        ):
            with pytest.raises(psycopg.Error) as refused, db.conn.transaction():
                db.conn.execute(f"select almanac.{call}".encode(), ["Europe/Ber" + "l" * 10_000_000 + "in"])
            assert refused.value.sqlstate == "PA008"
