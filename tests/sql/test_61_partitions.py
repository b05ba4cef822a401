"""61 partitions: a day each, made ahead of time, dropped whole."""

from datetime import timedelta

import pytest

from tests.jobs import Blocked, held

TABLES = ("attempt", "job_history", "tick")


def days(jobs, table):
    """The days that have a partition, as YYYYMMDD."""
    rows = jobs.sql(
        """select right(child.relname, 8) as day from pg_inherits join pg_class child on child.oid = inhrelid
            where inhparent = %s::regclass and child.relname !~ 'default$' order by 1""",
        f"almanac.{table}",
    )
    return [row.day for row in rows]


def keep(jobs):
    return jobs.one("select almanac._keep_partitions()")


@pytest.fixture
def today(jobs, own_database, clock):
    """A day far from the one on which the template was made, with its partitions."""
    clock.freeze("2031-05-10 23:59:59.9+00")
    keep(jobs)
    return clock


def test_today_and_three_days_ahead_have_one_each(jobs, today):
    for table in TABLES:
        assert days(jobs, table)[-4:] == ["20310510", "20310511", "20310512", "20310513"]
    assert keep(jobs) == {"added": 0, "dropped": 0, "waiting": []}


def test_the_day_is_that_of_utc_whatever_the_session_says(jobs, today):
    jobs.sql("set timezone = 'Pacific/Kiritimati'")
    assert keep(jobs)["added"] == 0
    today.advance(seconds=1)
    assert keep(jobs)["added"] == len(TABLES)
    jobs.sql("reset timezone")


def test_a_row_is_in_the_partition_of_its_day(jobs, today):
    jobs.put()
    for expected in ("20310510", "20310511"):
        job = jobs.running()
        jobs.complete(**held(job))
        where = jobs.one("select tableoid::regclass::text from almanac.job_history where id = %s", job.job_id)
        assert where == f"almanac_days.job_history_{expected}"
        today.advance(milliseconds=200)


def test_rows_of_a_day_without_partition_are_kept_and_moved_into_it(jobs, today):
    jobs.put()
    today.advance(days=20)
    finished, failed = jobs.running(), jobs.running()
    jobs.complete(**held(finished), result={"kept": True})
    jobs.fail_with_backoff(**held(failed), error="no")
    for table, column, job in (("job_history", "id", finished), ("attempt", "job_id", failed)):
        where = f"select tableoid::regclass::text from almanac.{table} where {column} = %s"
        assert jobs.one(where, job.job_id) == f"almanac_days.{table}_default"
    keep(jobs)
    for table, column, job in (("job_history", "id", finished), ("attempt", "job_id", failed)):
        where = f"select tableoid::regclass::text from almanac.{table} where {column} = %s"
        assert jobs.one(where, job.job_id) == f"almanac_days.{table}_20310530"
    assert jobs.find(finished.job_id).result == {"kept": True}


def test_a_row_that_comes_while_its_partition_is_made_is_moved_too(jobs, session, today):
    """After a long outage jobs are finished before anybody has ticked, and while somebody does."""
    jobs.put()
    today.advance(days=20)
    before, meanwhile = jobs.running(), jobs.running()
    jobs.complete(**held(before))
    a, b = session(), session()
    a.sql("begin")
    a.complete(**held(meanwhile))
    add = "select almanac._add_partition('job_history', '20310530')"
    with Blocked(jobs.conn, b.conn, lambda: b.one(add)) as adding:
        a.sql("commit")
    assert adding.value()
    where = {row.place for row in jobs.sql("select tableoid::regclass::text as place from almanac.job_history")}
    assert where == {"almanac_days.job_history_20310530"}


def test_two_that_make_the_same_partitions_do_not_fail_over_it(jobs, session, today):
    """A migration makes them, and somebody ticks."""
    a, b = session(), session()
    today.advance(days=20)
    a.sql("begin")
    keep(a)
    with Blocked(jobs.conn, b.conn, lambda: keep(b)) as second:
        a.sql("commit")
    assert second.value()["dropped"] == 0
    assert keep(jobs) == {"added": 0, "dropped": 0, "waiting": []}


def test_a_partition_is_of_its_day_however_the_session_writes_dates(jobs, today):
    jobs.sql("set datestyle = 'SQL, DMY'")
    jobs.sql("set timezone = 'Asia/Kolkata'")
    today.advance(days=20)
    keep(jobs)
    jobs.sql("reset timezone")
    jobs.sql("reset datestyle")
    bounds = jobs.one("""select pg_get_expr(relpartbound, oid) from pg_class
                          where oid = 'almanac_days.tick_20310530'::regclass""")
    assert bounds == "FOR VALUES FROM ('2031-05-30 00:00:00+00') TO ('2031-05-31 00:00:00+00')"


def test_a_day_is_dropped_when_the_longest_keeping_queue_has_no_use_for_it(jobs, today):
    jobs.put("short", retention=timedelta(days=1))
    jobs.put("long", retention=timedelta(days=45))
    job = jobs.running("long")
    jobs.complete(**held(job))
    # The day ends a tenth of a second later; 45 days on, all of it has been kept long enough.
    today.advance(days=45)
    keep(jobs)
    assert "20310510" in days(jobs, "job_history")
    today.advance(milliseconds=100)
    assert keep(jobs)["dropped"] == len(TABLES)
    assert "20310510" not in days(jobs, "job_history")
    assert jobs.find(job.job_id, "long") is None


def test_a_partition_has_the_keys_and_checks_of_its_table(jobs, today):
    described = """
        select array(select pg_get_constraintdef(oid) from pg_constraint where conrelid = %s::regclass order by 1),
               (select count(*) from pg_index where indrelid = %s::regclass)"""
    for table in TABLES:
        parent, child = f"almanac.{table}", f"almanac_days.{table}_20310510"
        assert tuple(jobs.one(described, child, child)) == tuple(jobs.one(described, parent, parent))
