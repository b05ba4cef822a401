"""44 doze: a worker that naps is rung for, and one that naps again and again does not write each time."""

from datetime import timedelta

import pytest

NAP = timedelta(seconds=5)


def doze(jobs, worker="w"):
    jobs.doze(queue="q", worker=worker, at_most=NAP)
    return jobs.one("select sleeps_until from almanac.sleeper where queue = 'q' and worker = %s", worker)


def test_the_mark_outlasts_every_nap(jobs, clock):
    jobs.put()
    for _ in range(30):
        assert doze(jobs) >= clock.now() + NAP
        clock.advance(seconds=1.7)


@pytest.mark.parametrize("later, writes", [(0, False), (4, False), (6, True), (-60, True)])
def test_a_mark_is_written_again_only_when_it_would_not_last(jobs, clock, later, writes):
    jobs.put()
    before = doze(jobs)
    clock.advance(seconds=later)
    after = doze(jobs)
    assert (after != before) == writes
    assert after == (clock.now() + 2 * NAP if writes else before)


def test_workers_have_marks_of_their_own(jobs, clock):
    jobs.put()
    first = doze(jobs, "one")
    clock.advance(seconds=2)
    assert doze(jobs, "two") > first
