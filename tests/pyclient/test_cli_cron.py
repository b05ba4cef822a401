"""cron check, next, describe: what the database says, and where croniter would say otherwise."""

from datetime import UTC

import pytest

from tests.pyclient.test_cli import in_process


@pytest.fixture
def cron(live_dsn):
    """`cron("check", "0 9 * * *")`: exit code, output, errors."""

    def cron(*arguments: str) -> tuple[int, str, str]:
        done = in_process("--dsn", live_dsn, "cron", *arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    return cron


def test_describe_prints_the_sentence_of_the_database(cron, live_db):
    for expression in ("0 9 * * 1-5", "@every 90s", "0 0 L 2 *"):
        assert cron("describe", expression) == (0, live_db.describe_cron(cron=expression) + "\n", "")


def test_next_prints_the_runs_of_the_database(cron, live_db):
    _, printed, _ = cron("next", "0 */6 * * *", "-z", "Asia/Kolkata", "-n", "4", "--after", "2024-06-01T00:00:00")
    runs = live_db.next_runs(cron="0 */6 * * *", timezone="Asia/Kolkata", after="2024-06-01T00:00Z", count=4)
    assert [line.split()[4] for line in printed.splitlines()[:4]] == [
        f"{run.astimezone(UTC):%Y-%m-%dT%H:%M:%S}Z" for run in runs
    ]
    assert printed.splitlines()[0].startswith("Sat 2024-06-01 06:00:00 +05:30  2024-06-01T00:30:00Z")
    assert "croniter alone would agree" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["30 1 * * *", "-z", "America/New_York", "--after", "2024-11-02"], "would run at 2024-11-03T06:30:00Z"),
        (["0 */2 * * *", "-z", "America/New_York", "--after", "2024-03-10"], "would run at 2024-03-10T07:00:00Z"),
        (["10-10 * * * *", "--after", "2024-01-01"], "would run at 2024-01-01T00:11:00Z"),
        (["0 0 */2 * MON", "--after", "2024-06-02"], "would run at 2024-06-05T00:00:00Z"),
        (["0 0 L-2 * *"], "would refuse it"),
        (["@every 90s"], "would refuse it"),
    ],
)
def test_next_says_where_croniter_would_disagree(cron, arguments, said):
    code, printed, _ = cron("next", *arguments)
    assert code == 0
    assert printed.splitlines()[-1].startswith("croniter alone would")
    assert said in printed.splitlines()[-1]


def test_next_notes_what_the_clocks_do(cron):
    _, printed, _ = cron("next", "30 2 * * *", "-z", "Europe/Berlin", "-n", "2", "--after", "2024-03-30T12:00")
    assert "02:30 does not exist and runs at the first instant after the gap" in printed.splitlines()[0]
    assert "does not exist" not in printed.splitlines()[1]
    _, printed, _ = cron(
        *("next", "30 2 * * *", "-z", "Europe/Berlin", "-n", "1", "--after", "2024-03-30T12:00", "--dst-gap", "skip")
    )
    assert printed.startswith("Mon 2024-04-01 02:30:00 +02:00")


def test_next_takes_an_instant_as_it_prints_one(cron):
    printed = {
        cron("next", "0 0 L * *", "-n", "1", "--after", instant)[1]
        for instant in ("2024-02-29T00:00:00Z", "2024-02-29T00:00Z", "2024-02-29 00:00", "2024-02-29")
    }
    assert len(printed) == 1
    assert printed.pop().startswith("Sun 2024-03-31 00:00:00 +00:00  2024-03-31T00:00:00Z")


def test_check_tells_the_kind_and_finds_the_nights_within_a_year(cron):
    code, printed, _ = cron("check", "30 1 * * *", "-z", "America/New_York")
    assert code == 0
    assert "valid: At 01:30 every day" in printed
    assert "kind:  fixed" in printed
    assert "01:30 comes twice" in printed
    assert "croniter alone would run at" in printed
    _, printed, _ = cron(
        *("check", "30 2 * * *", "-z", "America/New_York", "--dst-gap", "skip", "--dst-overlap", "both")
    )
    assert "leave out is skipped, one that they show twice runs both times" in printed
    _, printed, _ = cron("check", "*/5 * * * *")
    assert "kind:  wildcard" in printed
    assert "croniter alone would agree" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "61 * * * *"], 'cron field "minute" refuses "61"'),
        (["describe", "0 0 30 2 *"], "no possible date"),
        (["next", "0 9 * * *", "-z", "PST"], 'time zone "PST" is not known'),
        (["next", "0 9 * * *", "--after", "0001-01-01"], "instant is out of range"),
    ],
)
def test_what_the_database_refuses_is_an_error_of_the_command(cron, arguments, said):
    code, printed, error = cron(*arguments)
    assert code == 2
    assert printed == ""
    assert said in error


def test_a_database_without_pg_almanac_is_one_line(empty_dsn):
    done = in_process("--dsn", empty_dsn, "cron", "describe", "* * * * *")
    assert done.exit_code == 2
    assert "pyclient migrate" in done.stderr
    assert done.stderr.count("\n") == 1


def test_runs_beyond_what_can_be_shown_are_no_traceback(cron):
    code, _, said = cron("next", "0 0 29 2 *", "--after", "9990-12-31T00:00Z", "-n", "5")
    assert (code, "Error: " in said) == (2, True)
