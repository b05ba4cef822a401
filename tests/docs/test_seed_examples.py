"""The examples do what they say, in a day or a year of the test's clock."""

import importlib.util
import re
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from pyclient.errors import PayloadRefused
from pyclient.testing import TestAlmanac
from pyclient.worker import process
from tests import servers

pytest_plugins = ["pyclient.testing.plugin"]
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="session")
def almanac_server(server: servers.Server) -> str:
    return server.dsn


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_reminder_call_is_retried_with_the_same_key_and_made_once(
    almanac: TestAlmanac, example, monkeypatch: pytest.MonkeyPatch
):
    calls: dict[str, int] = {}
    lost: list[str] = []

    def receive(request: httpx.Request) -> httpx.Response:
        key = request.headers["idempotency-key"]
        calls.setdefault(key, len(calls) + 1)
        if not lost:
            lost.append(key)
            # Made, but the answer does not arrive: what a key is for.
            raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(200, json={"id": f"call-{calls[key]}"})

    monkeypatch.setattr(process._Services, "http_transport_async", lambda self: httpx.MockTransport(receive))
    module = example("reminder_calls")
    almanac.use(module.app)
    module.remind("+32 2 555 01 23", "It is time.", almanac.clock.now + timedelta(hours=1))
    assert almanac.run_due() == []
    almanac.clock.advance("1 hour")
    (job,) = almanac.run_due()
    assert job.state == "retrying"
    assert job.due_at - almanac.clock.now == timedelta(seconds=60)
    almanac.clock.advance("1 minute")
    (job,) = almanac.run_due()
    assert (job.state, job.result) == ("completed", {"call": "call-1"})
    assert len(calls) == 1


def test_tasks_due_within_a_day_are_reminded_of_once(almanac: TestAlmanac, example):
    module = example("due_soon")
    almanac.clock.set("2026-06-01 08:30 UTC")
    almanac.use(module.app)
    almanac.conn.execute(
        "create table task (id bigint primary key, title text, due_at timestamptz, reminded_at timestamptz)"
    )
    almanac.conn.execute("create table audit (task_id bigint, action text, at timestamptz default now())")
    almanac.conn.execute(
        "insert into task values (1, 'soon', '2026-06-01 20:00+00'), (2, 'later', '2026-06-09 20:00+00')"
    )
    for _ in range(3):
        almanac.clock.advance("1 hour")
        almanac.run_due()
    assert [job.payload for job in almanac.jobs("send_reminder", state="completed")] == [{"task": 1, "title": "soon"}]
    assert almanac.conn.execute("select task_id, action from audit").fetchall() == [(1, "reminder_sent")]
    assert [job.result for job in almanac.jobs("find_due_tasks")] == [{"reminded": n} for n in (1, 0, 0)]


def test_digests_are_not_repeated_for_hours_that_are_over(almanac: TestAlmanac, example):
    module = example("digests")
    almanac.clock.set("2026-06-01 08:30 Europe/Brussels")
    almanac.use(module.app)
    almanac.clock.jump("24 hours")
    (job,) = [job for job in almanac.run_due() if job.job_type == "digest"]
    assert job.result["hour"] == datetime(2026, 6, 2, 6, 0, tzinfo=UTC).isoformat()
    assert re.fullmatch("default-[0-9a-f]{12}:hourly digest:1780380000", job.result["key"])


def test_a_summary_is_made_once_for_a_user_and_a_day(almanac: TestAlmanac, example):
    module = example("daily_summary")
    almanac.use(module.app)
    assert module.summarise("ada", date(2026, 6, 1))
    assert not module.summarise("ada", date(2026, 6, 1))
    assert module.summarise("bob", date(2026, 6, 1))
    almanac.run_due()
    assert not module.summarise("ada", date(2026, 6, 1)), "also after it was made"
    assert module.sent == ["ada", "bob"]
    with pytest.raises(PayloadRefused, match="day: Field required"):
        module.app.enqueue("daily_summary", {"user": "eve"})
    # SQL does not know the model.
    queue = module.app.jobs["daily_summary"].queue
    made = "select job_id from almanac.enqueue(%s, 'daily_summary', '{\"user\": \"eve\"}')"
    broken = almanac.conn.execute(made, [queue]).fetchone()
    (job,) = almanac.run_due()
    assert ((job.job_id,), job.state) == (broken, "dead")
    assert job.last_error == "payload does not fit Summary: day: Field required"


def test_birthdays_missed_in_a_day_of_outage_are_all_greeted_once(almanac: TestAlmanac, example):
    module = example("birthdays")
    almanac.clock.set("2026-02-28 00:00 UTC")
    almanac.use(module.app)
    almanac.conn.execute("create table person (id bigint primary key, name text, born date, timezone text)")
    almanac.conn.execute("create table greeting (person_id bigint, year int, primary key (person_id, year))")
    people: list[tuple[Any, ...]] = [
        (1, "Ada", date(1990, 2, 28), "Asia/Tokyo"),
        (2, "Bob", date(1992, 2, 29), "Europe/Brussels"),
        (3, "Eve", date(1990, 3, 1), "America/New_York"),
        (4, "Joe", date(1990, 7, 1), "UTC"),
    ]
    for person in people:
        almanac.conn.execute("insert into person values (%s, %s, %s, %s)", person)
        module.plan(almanac.conn, person[0], 2026)
    almanac.clock.jump("2 days")
    almanac.run_due()
    almanac.run_due()
    greeted = almanac.conn.execute("select person_id, year from greeting order by 1").fetchall()
    assert greeted == [(1, 2026), (2, 2026), (3, 2026)]
    waiting = {(job.payload["person"], job.payload["year"]): job.due_at for job in almanac.jobs(state="scheduled")}
    assert set(waiting) == {(1, 2027), (2, 2027), (3, 2027), (4, 2026)}
    assert waiting[1, 2027] == datetime(2027, 2, 28, 0, 0, tzinfo=UTC)
