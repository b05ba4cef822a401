"""pyclient.testing, used as an application would."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyclient import Almanac, JobContext, database
from pyclient.testing import TestAlmanac
from tests import servers

pytest_plugins = ["pyclient.testing.plugin"]


@pytest.fixture(scope="session")
def almanac_server(server: servers.Server) -> str:
    return server.dsn


@pytest.fixture
def app() -> Almanac:
    app = Almanac()

    @app.schedule("0 9 * * *", timezone="Europe/Brussels", catch_up="all")
    @app.job("remind", max_attempts=2, base_delay=60)
    async def remind(ctx: JobContext, payload: dict[str, Any]) -> dict[str, Any]:
        if payload.get("fail") and ctx.attempt == 1:
            raise ValueError("not yet")
        if ctx.tick_at is not None:
            await app.enqueue_async("mail", {"about": ctx.tick_at.isoformat(), "to": {"name": "a", "age": 7}})
        return {"late": ctx.lateness.total_seconds()}

    @app.job("mail")
    def mail(payload: dict[str, Any]) -> None: ...

    return app


def test_a_day_of_outage_is_made_up_for(almanac: TestAlmanac, app):
    almanac.clock.set("2026-06-01 08:00 Europe/Brussels")
    almanac.use(app)
    almanac.clock.jump("3 days")
    assert [job.tick_at.hour for job in almanac.jobs("remind") if job.tick_at] == [7, 7, 7]
    assert all(job.caught_up for job in almanac.jobs("remind")[:2])
    ran = almanac.run_due()
    assert [job.state for job in ran] == ["completed"] * 6
    assert len(almanac.jobs("mail", state="completed")) == 3


def test_time_that_passes_ticks_at_the_moment_itself(almanac: TestAlmanac, app):
    almanac.clock.set("2026-06-01 08:00 Europe/Brussels")
    almanac.use(app)
    almanac.clock.advance("2 days")
    assert almanac.clock.now == datetime(2026, 6, 3, 6, 0, tzinfo=UTC)
    found = almanac.jobs("remind")
    assert [job.due_at for job in found] == [datetime(2026, 6, day, 7, 0, tzinfo=UTC) for day in (1, 2)]
    assert not any(job.caught_up for job in found)


def test_what_waits_can_be_asked_for(almanac: TestAlmanac, app):
    almanac.use(app)
    tomorrow = almanac.clock.now + timedelta(days=1)
    app.enqueue("mail", {"to": {"name": "a", "age": 7}, "n": 1}, due_at=tomorrow)
    assert almanac.assert_enqueued("mail", {"to": {"name": "a"}}, due_at=tomorrow, count=1).payload["n"] == 1
    almanac.assert_not_enqueued("mail", {"to": {"name": "b"}})
    with pytest.raises(AssertionError, match="0 jobs mail wait with"):
        almanac.assert_enqueued("mail", {"to": {"name": "b"}})
    with pytest.raises(AssertionError, match="there are 1 jobs"):
        almanac.assert_not_enqueued("mail")
    assert almanac.run_due() == []


def test_a_failed_attempt_is_repeated_when_its_time_has_come(almanac: TestAlmanac, app):
    almanac.use(app)
    app.enqueue("remind", {"fail": True})
    (job,) = almanac.run_due()
    assert (job.state, (job.last_error or "").splitlines()[0]) == ("retrying", "ValueError: not yet")
    assert almanac.run_due() == []
    almanac.clock.advance("61 seconds")
    (job,) = almanac.run_due()
    assert (job.state, job.attempt, job.result) == ("completed", 2, {"late": 1.0})


def test_the_app_is_given_back_as_it_was(almanac: TestAlmanac, app):
    almanac.use(app)
    assert app.dsn == almanac.dsn
    almanac.close()
    assert app._dsn is None


def test_apps_inside_the_app_come_here_too_and_all_go_back_to_where_they_were(almanac_server, almanac_template):
    """The app of a part, included: what it enqueues in a test is not to reach the database it works with."""
    part, whole = Almanac("postgresql://elsewhere"), Almanac()
    part.job("part")(lambda payload: None)
    whole.include(part)
    with database.connect(almanac_server) as conn:
        database.clone_database(conn, "almanac_test_parts", almanac_template)
        made = TestAlmanac(database.dsn_of(almanac_server, "almanac_test_parts"))
        try:
            made.use(whole)
            made.use(part, whole)
            part.enqueue("part", {})
            assert [job.state for job in made.run_due()] == ["completed"]
        finally:
            made.close()
            database.drop_database(conn, "almanac_test_parts")
    assert (part._dsn, whole._dsn) == ("postgresql://elsewhere", None)


def test_none_can_be_asked_for(almanac: TestAlmanac, app):
    almanac.use(app)
    almanac.assert_enqueued("mail", count=0)
    app.enqueue("mail", {})
    with pytest.raises(AssertionError, match="1 jobs mail wait with None, not 0"):
        almanac.assert_enqueued("mail", count=0)


async def _enqueue_here_and_there(dsns: list[str]) -> list[int]:
    app, found = Almanac(), []
    app.job("mail")(lambda: None)
    for dsn in dsns:
        made = TestAlmanac(dsn)
        made.use(app)
        await app.enqueue_async("mail")
        found.append(len(made.jobs("mail")))
        made.close()
    await app.close_async()
    return found


def test_tests_that_share_an_event_loop_do_not_share_a_database(almanac_server, almanac_template):
    names = ["almanac_test_one", "almanac_test_other"]
    with database.connect(almanac_server) as conn:
        for name in names:
            database.clone_database(conn, name, almanac_template)
        try:
            dsns = [database.dsn_of(almanac_server, name) for name in names]
            assert asyncio.run(_enqueue_here_and_there(dsns)) == [1, 1]
        finally:
            for name in names:
                database.drop_database(conn, name)
