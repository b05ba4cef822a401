"""For the tests of an application: a database of its own, a clock that obeys, jobs run in place.

    # conftest.py
    pytest_plugins = ["pyclient.testing.plugin"]

    # test_reminders.py
    def test_a_day_without_workers_is_made_up_for(almanac):
        almanac.use(app)
        almanac.clock.jump("24 hours")
        almanac.run_due()
        assert almanac.jobs("remind", state="completed")

Each test gets a fresh database, on the server of ALMANAC_TEST_DSN or on an embedded one.
"""

import asyncio
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, cast

from pyclient import database
from pyclient.app import Almanac
from pyclient.database import SeenJob
from pyclient.payload import to_payload
from pyclient.worker import Options, Worker

__all__ = ["Clock", "SeenJob", "TestAlmanac"]


class Clock:
    """The time of the test's database. It stands still until it is told otherwise."""

    def __init__(self, conn: database.Connection) -> None:
        self._conn = conn

    @property
    def now(self) -> datetime:
        return database.set_test_clock(self._conn)

    def set(self, to: datetime | str) -> datetime:
        """`set("2026-03-29 01:59 Europe/Brussels")`; nothing ticks on the way."""
        return database.set_test_clock(self._conn, to=to)

    def advance(self, by: timedelta | str) -> datetime:
        """Time passes and somebody ticks: each schedule is decided at the very moment it is due, in order."""
        start = self.now
        target = database.set_test_clock(self._conn, by=by)
        database.set_test_clock(self._conn, to=start)
        while (moment := database.next_tick_before(self._conn, target)) is not None:
            before = self.now
            database.set_test_clock(self._conn, to=max(moment, before))
            database.tick_until_done(self._conn)
            if moment <= before and database.next_tick_before(self._conn, target) == moment:
                break
        database.set_test_clock(self._conn, to=target)
        database.tick_until_done(self._conn)
        return target

    def jump(self, by: timedelta | str) -> datetime:
        """Time passes and nobody ticks: an outage. Afterwards everything missed is decided at once."""
        now = database.set_test_clock(self._conn, by=by)
        database.tick_until_done(self._conn)
        return now


class TestAlmanac:
    """pg_almanac in a database that is there for one test."""

    __test__ = False

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.conn = database.connect(dsn)
        self.clock = Clock(self.conn)
        self._app = Almanac(dsn)
        self._bound: list[tuple[Almanac, str | None]] = []

    def use(self, *apps: Almanac) -> None:
        """Run these apps here: their jobs and schedules are declared, and what they enqueue comes to this database."""
        for app in apps:
            self._bind(app)
        self._app.include(*apps)
        self._app.declare(self.conn)

    def _bind(self, app: Almanac) -> None:
        if any(bound is app for bound, _ in self._bound):
            return
        self._bound.append((app, app._dsn))
        app._dsn = self.dsn
        app.close()
        for other in app._included:
            self._bind(other)

    def run_due(self, *, concurrency: int = 10) -> list[SeenJob]:
        """Run everything that is due, in this process, also what handlers enqueue meanwhile; returns what has run."""
        before = {(job.queue, job.job_id): job for job in self.jobs()}
        queues = dict.fromkeys(self._app.queues() or ["default"], 1.0)
        worker = Worker(self._app, self.dsn, Options(queues=queues, concurrency=concurrency, burst=True, ticks=False))
        outcome: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(worker.run())
            except BaseException as error:
                outcome.append(error)

        # A thread, because the test may be inside an event loop of its own.
        thread = threading.Thread(target=run, name="run_due")
        thread.start()
        thread.join()
        if outcome:
            raise outcome[0]
        return [job for job in self.jobs() if before.get((job.queue, job.job_id)) != job and job.state != "scheduled"]

    def jobs(self, job_type: str | None = None, *, state: str | None = None, queue: str | None = None) -> list[SeenJob]:
        """Jobs wherever they are, oldest first."""
        return [
            job
            for job in database.all_jobs(self.conn)
            if job_type in (None, job.job_type) and state in (None, job.state) and queue in (None, job.queue)
        ]

    def assert_enqueued(
        self,
        job_type: str,
        payload: Any = None,
        *,
        queue: str | None = None,
        due_at: datetime | None = None,
        count: int | None = None,
    ) -> SeenJob:
        """That such a job waits; `payload` names what must be in it. Returns the first of them (None with count=0)."""
        wanted = None if payload is None else to_payload(payload)
        waiting = [job for job in self.jobs(job_type, queue=queue) if job.state in ("scheduled", "retrying", "blocked")]
        found = [job for job in waiting if _contains(job.payload, wanted) and due_at in (None, job.due_at)]
        if (count is None and not found) or (count is not None and len(found) != count):
            expected = "at least 1" if count is None else count
            listed = "\n".join(f"  {job.job_type} {job.payload} due {job.due_at}" for job in self.jobs()) or "  none"
            raise AssertionError(
                f"{len(found)} jobs {job_type} wait with {wanted}, not {expected}; jobs are:\n{listed}"
            )
        return cast(SeenJob, found[0] if found else None)

    def assert_not_enqueued(self, job_type: str, payload: Any = None, *, queue: str | None = None) -> None:
        wanted = None if payload is None else to_payload(payload)
        found = [job for job in self.jobs(job_type, queue=queue) if _contains(job.payload, wanted)]
        if found:
            raise AssertionError(f"there are {len(found)} jobs {job_type} with {wanted}: {found}")

    def close(self) -> None:
        for app, dsn in self._bound:
            app.close()
            app._dsn = dsn
        self._app.close()
        self.conn.close()


def _contains(payload: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    if isinstance(payload, Mapping) and isinstance(wanted, Mapping):
        return all(name in payload and _contains(payload[name], value) for name, value in wanted.items())
    return bool(payload == wanted)
