"""pg_cron 1.6 in our image: ticks every second; a worker takes over when it stops, and stands back when it returns."""

import itertools
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pyclient.migrate import migrate
from tests import containers, servers
from tests.jobs import Jobs
from tests.pg_cron import Launcher, forget_jobs
from tests.workers import process, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.pg_cron, pytest.mark.slow, pytest.mark.timeout(600)]

HANDLER = """
@app.job("beat")
def beat(payload):
    pass
"""


@pytest.fixture(scope="module")
def image_dsn(used_servers: set[str]) -> Iterator[str]:
    if not servers.docker_answers():
        pytest.skip("no Docker engine answers")
    with containers.postgres({}, database="almanac") as dsn:
        version = servers.wait_until_ready(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            row = conn.execute("select extversion from pg_extension where extname = 'pg_cron'").fetchone()
            assert row is not None
            used_servers.add(f"PostgreSQL {version} (Docker, docker/postgres.Dockerfile) with pg_cron {row[0]}")
        yield dsn


@pytest.fixture
def jobs(image_dsn: str) -> Iterator[Jobs]:
    with psycopg.connect(image_dsn, autocommit=True) as conn:
        conn.execute("drop schema if exists almanac cascade")
        migrate(image_dsn)
        Launcher(conn).catch_up()
        yield Jobs(conn)
        forget_jobs(conn)


def test_a_worker_takes_over_from_pg_cron_and_nothing_fires_twice(jobs: Jobs, image_dsn: str, tmp_path: Path) -> None:
    def ticks_by(who: str) -> int:
        return int(jobs.one("select count(*) from almanac.tick where ticked_by like %s", who))

    def ticker() -> Any:
        return jobs.one(
            "select source from almanac.heartbeat where source <> 'housekeeper' order by ticked_at desc limit 1"
        )

    def silent() -> bool:
        return any(alert.alert == "ticker_silent" for alert in jobs.alerts())

    assert jobs.one("select almanac.start_ticking()") == "pg_cron 1.6 ticks every second"
    jobs.sql("select almanac.put_schedule('default', 'often', '@every 5s', 'beat', catch_up => 'all')")
    wait_until(lambda: ticks_by("pg_cron") >= 2, 30)
    assert jobs.one("select count(*) from almanac.job") == ticks_by("%"), "no worker: they wait"
    assert jobs.one("select max(lateness) < '2 seconds' from almanac.tick")

    with process(tmp_path, image_dsn, HANDLER):
        wait_until(lambda: jobs.one("select count(*) from almanac.job_history where state = 'completed'") >= 3, 30)
        assert ticks_by("%") == ticks_by("pg_cron"), "the worker stands back"
        assert not silent()

        jobs.sql("update cron.job set active = false")
        wait_until(lambda: ticker() == "worker", 5)
        assert silent()
        taken_over = ticks_by("%")
        wait_until(lambda: ticks_by("%") >= taken_over + 2, 20)
        assert jobs.one("select max(lateness) < '5 seconds' from almanac.tick")
        assert ticks_by("%") - ticks_by("pg_cron") >= 2

        jobs.sql("select almanac.start_ticking()")
        wait_until(lambda: not silent(), 10)
        before = ticks_by("pg_cron")
        wait_until(lambda: ticks_by("pg_cron") >= before + 2, 20)
        jobs.sql("select almanac.pause_schedule('often', 'enough')")
        wait_until(lambda: not jobs.one("select count(*) from almanac.job"), 20)

    ticks = [row.tick_at for row in jobs.sql("select tick_at from almanac.tick where decision = 'fired' order by 1")]
    assert {(b - a).total_seconds() for a, b in itertools.pairwise(ticks)} == {5.0}, "none lost, none twice"
    ran = jobs.sql("select tick_at, state, attempt from almanac.job_history order by tick_at")
    assert [tuple(row) for row in ran] == [(tick, "completed", 1) for tick in ticks]


def test_a_start_that_pg_cron_missed_is_heard_when_it_is_started_again(jobs: Jobs, image_dsn: str) -> None:
    port = conninfo_to_dict(image_dsn)["port"]
    listed = subprocess.run(
        ["docker", "ps", "--quiet", "--filter", f"publish={port}"], capture_output=True, text=True, check=True
    )

    def send(pid: int, number: signal.Signals) -> None:
        command = ["docker", "exec", listed.stdout.strip(), "bash", "-c", f"kill -{number.value} {pid}"]
        subprocess.run(command, check=True)

    launcher = Launcher(jobs.conn, send)
    with launcher.reads_its_jobs(expected=False), launcher.deaf():
        jobs.sql("select almanac.start_ticking()")
    with launcher.reads_its_jobs():
        jobs.sql("select almanac.start_ticking()")
