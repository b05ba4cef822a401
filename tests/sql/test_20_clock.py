"""20 clock: the database's clock is the only clock, and tests can move it."""

from datetime import timedelta


def test_the_clock_stands_still_until_it_is_moved(db, clock, connect):
    before = db.clock()[0].clock
    assert db.clock()[0].clock == before
    clock.advance(minutes=5)
    assert connect().execute("select almanac.clock()").fetchone() == (before + timedelta(minutes=5),)


def test_the_clock_runs_in_production(live_db):
    drift = live_db.one("select clock_timestamp() - almanac.clock()")
    assert abs(drift) < timedelta(seconds=5)
