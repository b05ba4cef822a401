"""21 describe_cron and preview_cron: what a person reads before trusting a rule."""

import random
from datetime import UTC, datetime

import psycopg
import pytest

from pyclient.errors import CronRefused, TimeZoneRefused
from tests import cron_oracle as oracle
from tests.conftest import Db

SENTENCES = [
    ("0 9 * * 1-5", "At 09:00 on Monday to Friday"),
    ("30 2 * * *", "At 02:30 every day"),
    ("30 0 9 * * *", "At 09:00:30 every day"),
    ("0 9,13,17 * * *", "At 09:00, 13:00 and 17:00 every day"),
    ("*/15 2 * * *", "At 02:00, 02:15, 02:30 and 02:45 every day"),
    ("* * * * * *", "Every second"),
    ("* * * * *", "Every minute"),
    ("*/5 * * * *", "Every 5 minutes"),
    ("*/7 * * * *", "At minute 0 to 56 in steps of 7 of every hour"),
    ("*/15 9-17 * * 1-5", "Every 15 minutes from 09:00 to 17:59 on Monday to Friday"),
    ("0 * * * *", "At minute 0 of every hour"),
    ("0 */2 * * *", "At minute 0 of hour 00 to 22 in steps of 2 every day"),
    ("5,7,9,22 3-7,9 * * *", "At minute 5, 7, 9 and 22 of hour 03 to 07 and 09 every day"),
    ("*/10 * * * * *", "At second 0 to 50 in steps of 10 of every minute"),
    ("* 5 * * * *", "Every second of minute 5 of every hour"),
    ("0 0 1 * *", "At 00:00 on day 1 of the month"),
    ("0 0 1,15 * *", "At 00:00 on day 1 and 15 of the month"),
    ("0 0 L * *", "At 00:00 on the last day of the month"),
    ("0 0 L-1 * *", "At 00:00 on the day before the last of the month"),
    ("0 0 L-3 * *", "At 00:00 on 3 days before the last of the month"),
    ("0 0 LW * *", "At 00:00 on the last weekday of the month"),
    ("0 0 15W * *", "At 00:00 on the weekday nearest to day 15 of the month"),
    ("0 0 * * MON#1", "At 00:00 on the first Monday of the month"),
    ("0 0 * * 5L", "At 00:00 on the last Friday of the month"),
    ("0 0 13 * FRI", "At 00:00 on day 13 of the month, and also on Friday"),
    ("0 0 */2 * MON", "At 00:00 on day 1 to 31 in steps of 2 of the month, but only if it is a Monday"),
    ("0 0 */2 * MON,FRI", "At 00:00 on day 1 to 31 in steps of 2 of the month, but only if it is a Monday or Friday"),
    ("0 0 15 * 0-7", "At 00:00 every day"),
    ("0 0 * * FRI-SUN", "At 00:00 on Friday to Sunday"),
    ("0 0 * 1-3,7 *", "At 00:00 every day in January to March and July"),
    ("@yearly", "At 00:00 on day 1 of the month in January"),
    ("@every 1h30m10.5s", "Every 1 hour, 30 minutes and 10.5 seconds of elapsed time"),
    ("@every 48h", "Every 48 hours of elapsed time"),
]


@pytest.fixture(scope="module")
def db(clone):
    """One database for all tests of this file: they only ask."""
    with (
        clone("almanac_live_template") as dsn,
        psycopg.connect(dsn, autocommit=True, options="-c timezone=UTC") as conn,
    ):
        yield Db(conn)


@pytest.mark.parametrize(("expression", "sentence"), SENTENCES)
def test_an_expression_reads_as_a_sentence(db, expression, sentence):
    assert db.describe_cron(cron=expression) == sentence


def test_every_valid_expression_has_a_sentence_and_other_days_have_other_sentences(db):
    """Two rules with one sentence must be one rule, as far as their masks tell."""
    rng = random.Random(11)
    texts = [text for text in (oracle.random_expression(rng) for _ in range(800)) if oracle.has_a_date(text)]
    rows = db.sql(
        """select describe_cron, count(distinct shape), min(cron) from (
               select almanac.describe_cron(cron), cron,
                      ((r).second_mask, (r).minute_mask, (r).hour_mask, (r).month_mask,
                       (select array_agg(almanac._month_days(r, dow, length) order by dow, length)
                          from generate_series(0, 6) as dow, generate_series(28, 31) as length))::text as shape
                 from unnest(%s::text[]) as cron, almanac.parse_cron(cron) as r) as described
            group by describe_cron having describe_cron is null or count(distinct shape) > 1""",
        texts,
    )
    assert rows == []


def test_describe_refuses_as_parse_does_and_null_is_null(db):
    with pytest.raises(CronRefused):
        db.describe_cron(cron="* * *")
    assert db.one("select almanac.describe_cron(null)") is None


# ── preview ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def preview(db, cron, timezone, after, count=2, **choice):
    return db.preview_cron(
        cron=cron, timezone=timezone, count=count, after=datetime.fromisoformat(after).replace(tzinfo=UTC), **choice
    )


def test_a_preview_shows_local_time_utc_and_offset(db):
    run, _ = preview(db, "0 9 * * *", "America/St_Johns", "2024-07-01")
    assert (str(run.local_time), str(run.utc_time), run.utc_offset) == (
        "2024-07-01 09:00:00",
        "2024-07-01 11:30:00",
        "-02:30",
    )
    assert (run.rule_kind, run.note) == ("fixed", None)
    assert run.run_at == datetime(2024, 7, 1, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "kind"), [("0 */2 * * *", "wildcard"), ("0 0-23/2 * * *", "fixed"), ("@every 2h", "elapsed")]
)
def test_a_preview_tells_the_kind_of_rule(db, cron, kind):
    assert {run.rule_kind for run in preview(db, cron, "Europe/Paris", "2024-07-01", 5)} == {kind}


GAP, BACK = "2024-03-10T04:30", "2024-11-03T04:10"


@pytest.mark.parametrize(
    ("cron", "after", "choice", "notes"),
    [
        ("30 2 * * *", GAP, {}, ["02:30 does not exist and runs at the first instant after the gap", None]),
        ("30 2 * * *", GAP, {"dst_gap": "skip"}, ["02:30 does not exist and is skipped", None]),
        ("0 */2 * * *", GAP, {}, [None, "02:00 does not exist and is left out"]),
        ("30 3 * * *", GAP, {}, [None, None]),
        ("30 1 * * *", BACK, {}, ["this is the first time, the second is left out", None]),
        ("30 1 * * *", BACK, {"dst_overlap": "second"}, ["this is the second time, the first is left out", None]),
        ("30 1 * * *", BACK, {"dst_overlap": "both"}, ["this is the first time.", "this is the second time."]),
        ("30 * * * *", BACK, {}, [None, "this is the first time.", "this is the second time.", None]),
        ("30 0 * * *", BACK, {}, [None, None]),
    ],
)
def test_a_preview_notes_what_a_change_of_the_clocks_does(db, cron, after, choice, notes):
    runs = preview(db, cron, "America/New_York", after, len(notes), **choice)
    for run, note in zip(runs, notes, strict=True):
        assert run.note is None if note is None else note in str(run.note), (run, note)


def test_a_wildcard_is_told_from_its_fixed_twin(db):
    """0 */2 and 0 0-23/2 name the same hours and differ on one night: the note says so."""
    wildcard = preview(db, "0 */2 * * *", "America/New_York", "2024-03-10T05:00", 1)[0]
    fixed = preview(db, "0 0-23/2 * * *", "America/New_York", "2024-03-10T05:00", 1)[0]
    assert (wildcard.local_time.hour, fixed.local_time.hour) == (4, 3)
    assert "0-23/2 instead of */2" in str(wildcard.note)


def test_a_preview_without_an_instant_starts_now(conn, clock):
    clock.freeze("2024-02-28T23:59:30Z")
    (run,) = Db(conn).preview_cron(cron="0 0 29 2 *", count=1)
    assert run.run_at == datetime(2024, 2, 29, tzinfo=UTC)


def test_a_preview_refuses_what_next_runs_refuses(db):
    with pytest.raises(TimeZoneRefused):
        preview(db, "0 9 * * *", "Mars/Phobos5", "2024-07-01")
    with pytest.raises(CronRefused):
        preview(db, "0 9 * *", "UTC", "2024-07-01")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        preview(db, "0 9 * * *", "UTC", "2024-07-01", 0)
