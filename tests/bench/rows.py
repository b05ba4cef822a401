"""What `make ab` compares: for each row the data that it works on, and its calls.

Both states get the same SQL. Where a signature changes, name the arguments that both have, or give the row a variant.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.bench import jobs, worker
from tests.bench.harness import Connection

#: Schedules that are due at once.
DUE = 1_000
WORKER_JOBS = 30_000

#: A copy of a database holds itself, in states that know what a copy is. These work as if they had been made there.
NO_COPY = """
do $$
begin
    if to_regprocedure('almanac._note_home()') is not null then
        perform almanac._note_home();
    end if;
end;
$$
"""
ENQUEUE = "select count(*) from almanac.enqueue('default', 'noop', '{}')"
ENQUEUE_MANY = "select count(*) from almanac.enqueue_many('default', 'noop', array_fill('{}'::jsonb, array[100]))"
DOZE = "select count(almanac.doze('default', 'bench'))"
TICK = "select schedules - broken from almanac.tick()"
ADVANCE = "select count(job_id) from almanac.advance_schedule('default', %s)"

WITH_LIMITS = "select almanac.put_queue('default', max_running => 1000000)"
ONE_KEYED = """
select almanac.enqueue('default', 'noop', '{}', concurrency_key => 'k', due_at => clock_timestamp() + interval '1 year')
"""
TOMORROW = """
select count(*) from almanac.enqueue_many('default', 'noop', array_fill('{}'::jsonb, array[100]),
                                          due_at => clock_timestamp() + interval '1 day')
"""
#: Of the daily ones hardly one becomes due by itself while it is measured, of the others none.
SCHEDULES = """
select count(almanac.put_schedule(queue => 'default', name => 's' || n, job_type => 'noop',
                                  cron => format('%s %s {days}', n % 60, n / 60 % 24)))
  from generate_series(0, {count} - 1) n;
"""
PLAIN = SCHEDULES.format(days="* * *", count=DUE)
WAITING = SCHEDULES.format(days="29 2 *", count=10_000)
#: No moment twice: the ledger would have it already, and that is not the usual tick.
PLAIN_AGAIN = """
update almanac.schedule set next_due_at = due.at, look_at = due.at, decided_until = due.at - interval '1 second'
  from (select clock_timestamp() as at) due
 where look_at > due.at
"""
#: Ten kinds, a tenth of the schedules each. All are due at each full minute, by rules that are written differently.
MIXED = f"""
select count(almanac.put_schedule(
           queue => 'default', name => kind || '/' || n, job_type => 'noop',
           cron => case n % 3 when 0 then '* * * * *' when 1 then '@every 1m' else '0-59 * * * *' end,
           starts_at => '2020-01-01 00:00+00', timezone => case n % 2 when 0 then 'UTC' else 'Europe/Berlin' end,
           jitter => case kind when 'bounded' then interval '10 seconds' end,
           overlap => case when kind in ('skip', 'queue_one', 'cancel_running') then kind end,
           max_running => case kind when 'bounded' then 1000000 end,
           max_fires => case kind when 'bounded' then 1000000 end,
           ends_at => case kind when 'bounded' then timestamptz '2999-01-01 00:00+00' end,
           catch_up => case kind when 'late' then 'all' end,
           max_age => case kind when 'late' then interval '3 minutes' end,
           max_runs => case kind when 'late' then 2 end,
           after_schedule => case kind when 'open' then 'plain/0' when 'closed' then 'skip/0'
                                       when 'waiting' then 'skip/0' end,
           within => case when kind in ('open', 'closed', 'waiting') then interval '1 day' end,
           gate_wait => case kind when 'waiting' then interval '1 hour' end))
  from unnest(array['plain', 'paused', 'skip', 'queue_one', 'cancel_running', 'bounded', 'late', 'open', 'closed',
                    'waiting']) kind, generate_series(0, {DUE} / 10 - 1) n;

select count(almanac.pause_schedule(name)) from almanac.schedule where name like 'paused/%';
-- What the open gate asks for.
select almanac.trigger_schedule('plain/0');
with claimed as materialized (select * from almanac.claim_due('default', 'bench'))
select almanac.complete('default', job_id, lease_token) from claimed;
"""
#: The full minute that has just passed once more, and for the late ones the four before it.
MIXED_AGAIN = """
delete from almanac.tick;
update almanac.schedule
   set next_due_at = due.at, look_at = due.at, decided_until = due.at - interval '1 minute'
  from (values (true, interval '4 minutes'), (false, interval '0')) late (is_so, by),
       lateral (select date_trunc('minute', clock_timestamp()) - late.by as at) due
 where late.is_so = (name like 'late/%')
"""


@dataclass(frozen=True)
class Row:
    unit: str
    #: Makes one call with each `next`, and yields how many units that was.
    calls: Callable[[Connection], Iterator[int]]
    #: What any number of calls needs to find.
    prepare: str = ""
    #: What so many calls use up.
    fill: Callable[[Connection, int], None] | None = None
    #: Brings back what a slice has used up, by a connection that is not measured.
    refill: Callable[[Connection], None] | None = None
    #: How many calls may follow each other before a refill.
    calls_a_slice: int | None = None
    #: Slices before it counts: plans are made by then, and the tick has kept house.
    warm: int = 3
    #: What counts is the CPU of a worker, not of the backend that the calls are made on.
    by_worker: bool = False


def repeated(statement: str, answer: int, units: int, conn: Connection) -> Iterator[int]:
    cursor = conn.cursor(binary=True)
    while True:
        row = cursor.execute(statement.encode(), prepare=True).fetchone()
        assert row == (answer,), f"{row} instead of {answer}: {statement}"
        yield units


def called(unit: str, statement: str, answer: int = 1, units: int = 1, **options: Any) -> Row:
    return Row(unit, functools.partial(repeated, statement, answer, units), **options)


def advanced(conn: Connection) -> Iterator[int]:
    cursor = conn.cursor(binary=True)
    for n in itertools.cycle(range(DUE)):
        row = cursor.execute(ADVANCE, [f"s{n}"], prepare=True).fetchone()
        assert row == (1,), f"{row}: s{n} was not due"
        yield 1


def claimed(batch: int, prepare: str = "") -> Row:
    def fill(conn: Connection, calls: int) -> None:
        """One batch more than there are calls: each ends a batch and claims the next."""
        jobs.fill(conn, batch * (calls + 1))

    return Row("us a job", functools.partial(jobs.batches, jobs.OURS, batch, False), prepare, fill)


def worked_off(conn: Connection) -> Iterator[int]:
    """Enqueued at once, in one transaction, and left to the worker that waits for them."""
    while True:
        with conn.transaction():
            jobs.fill(conn, WORKER_JOBS)
        worker.wait_until(lambda: not conn.execute(worker.UNFINISHED).rowcount)
        yield WORKER_JOBS


def plain_again(conn: Connection) -> None:
    conn.execute(PLAIN_AGAIN)


def mixed_again(conn: Connection) -> None:
    """At a full minute everything becomes due once more: not between this and the call."""
    (second,) = conn.execute("select extract(second from clock_timestamp())::float8").fetchone() or (0.0,)
    if second > 58:
        time.sleep(60 - second)
    conn.execute(MIXED_AGAIN)


ROWS = {
    "enqueue": called("us a job", ENQUEUE),
    "enqueue_many": called("us a job", ENQUEUE_MANY, 100, 100),
    **{
        f"claim{beside}_{batch}": claimed(batch, prepare)
        for beside, prepare in (("", ""), ("_limits", WITH_LIMITS), ("_keyed", ONE_KEYED))
        for batch in (1, 10, 100)
    },
    "doze": called("us a call", DOZE, prepare=TOMORROW),
    "tick_idle": called("us a call", TICK, 0, prepare=WAITING),
    "tick_plain": called("us a schedule", TICK, DUE, DUE, prepare=PLAIN, refill=plain_again, calls_a_slice=1),
    "tick_mixed": called("us a schedule", TICK, DUE, DUE, prepare=MIXED, refill=mixed_again, calls_a_slice=1),
    "advance_schedule": Row("us a call", advanced, PLAIN, refill=plain_again, calls_a_slice=DUE),
    "worker": Row("us a job", worked_off, warm=1, by_worker=True),
}
