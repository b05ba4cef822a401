"""A planted bug is noticed by the tests that guard its promise, and nothing else counts as noticed. All of them: make
breaches."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from tests import plant, servers
from tests.breaches import BREACHES, DoesNotApplyError

IN_EVERY_RUN = ["tick_twice", "stale_token", "uncounted_attempt", "window_cut_short", "right_not_asked"]
QUICK = "tests/sql/test_20_clock.py::test_the_clock_stands_still_until_it_is_moved"
FOR_LONG = "tests/faults/test_worker_dies.py::test_kill_9_at_a_hundred_random_moments"


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_a_breach_is_caught(server: servers.Server, name: str):
    outcome = plant.plant(BREACHES[name], server.dsn)
    assert outcome.unfit == []
    assert outcome.failed, f"all {len(outcome.ran)} tests passed although {BREACHES[name].bug}"


@pytest.mark.parametrize(
    "change",
    [{"function": "no_such_function"}, {"find": "no such text"}, {"occurrences": 1}, {"occurrences": 3}],
    ids=str,
)
def test_a_breach_that_plants_nothing_is_refused(change):
    with pytest.raises(DoesNotApplyError, match=r"mend tests/breaches\.py"):
        replace(BREACHES["stale_token"], **change).statement()


@pytest.mark.parametrize(
    "name, others, why",
    [
        ("own_clock", [], []),
        ("silent_loss", ["tests/sql/test_20_clock.py::test_no_such"], ["pytest ended with 4", "not run"]),
        ("repeat_refused", [FOR_LONG], ["was skipped"]),
    ],
    ids=["passed", "not there", "skipped"],
)
def test_tests_that_do_not_fail_catch_nothing(server: servers.Server, name, others, why):
    """Each with a breach that no other test here plants: runs of one breach share their databases."""
    outcome = plant.run([QUICK, *others], server.dsn, BREACHES[name])
    assert not outcome.caught
    assert len(outcome.unfit) == len(why)
    assert all(part in reason for part, reason in zip(why, sorted(outcome.unfit, reverse=True), strict=True))


@pytest.mark.parametrize(
    "result, caught",
    [
        ('<failure message="assert 2 == 1"/>', True),
        ('<failure message="psycopg.errors.UniqueViolation: duplicate key"/>', True),
        ('<failure message="psycopg.errors.InsufficientPrivilege: permission denied"/>', True),
        ('<failure message="psycopg.errors.UndefinedColumn: column does not exist"/>', False),
        ('<failure message="AssertionError: 42883: function does not exist"/>', False),
        ('<failure message="AssertionError: 42501: permission denied"/>', True),
        ('<error message="failed on setup"/>', False),
        ('<skipped message="no pg_cron"/>', False),
        ("", False),
    ],
)
def test_only_a_test_that_ran_and_failed_by_what_it_found_catches(result, caught):
    case = ET.fromstring(f'<testcase classname="tests.sql.test_x" name="test_y[z]">{result}</testcase>')
    assert plant.judge(["tests/sql/test_x.py::test_y"], [case]).caught == caught
    assert not plant.judge(["tests/sql/test_x.py::test_y", "tests/sql/test_x.py::test_z"], [case]).caught
