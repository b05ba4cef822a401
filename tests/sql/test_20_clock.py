"""20 clock: the database's clock is the only clock, and tests can move it."""

import re
from datetime import timedelta

from tests.sql.source import without_comments, without_strings


def test_the_clock_stands_still_until_it_is_moved(db, clock, connect):
    before = db.clock()[0].clock
    assert db.clock()[0].clock == before
    clock.advance(minutes=5)
    assert connect().execute("select almanac.clock()").fetchone() == (before + timedelta(minutes=5),)


def test_nothing_else_that_is_installed_asks_the_time(jobs):
    asks = re.compile(
        r"\bnow\s*\(|\b(clock|statement|transaction)_timestamp|\btimeofday|\bcurrent_(date|time)|\blocaltime",
        re.IGNORECASE,
    )
    installed = jobs.sql("""
        select p.oid::regprocedure::text as name, p.prosrc || coalesce(pg_get_function_sqlbody(p.oid), '') as text
          from pg_proc p where p.pronamespace = 'almanac'::regnamespace and p.proname <> 'clock'
        union all
        select c.oid::regclass::text, pg_get_viewdef(c.oid)
          from pg_class c where c.relnamespace = 'almanac'::regnamespace and c.relkind = 'v'
        union all
        select d.adrelid::regclass::text, pg_get_expr(d.adbin, d.adrelid)
          from pg_attrdef d join pg_class c on c.oid = d.adrelid where c.relnamespace = 'almanac'::regnamespace""")
    assert len(installed) > 100
    assert [one.name for one in installed if asks.search(without_strings(without_comments(one.text)))] == []


def test_the_clock_runs_in_production(live_db):
    drift = live_db.one("select clock_timestamp() - almanac.clock()")
    assert abs(drift) < timedelta(seconds=5)
