"""Ticks in many sessions at once, with sessions killed: each tick is decided once, and none is lost."""

import itertools
import random
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.jobs import Blocked, Jobs, refused

SCHEDULES = 1000


def make_schedules(conn: psycopg.Connection[Any], count: int = SCHEDULES, cron: str = "* * * * *") -> None:
    """As put_schedule makes them, but all at once, and due a little while ago."""
    conn.execute("select almanac.put_schedule('default', '0', %s, 'race', catch_up => 'all')", [cron])
    conn.execute(
        """update almanac.schedule set decided_until = date_trunc('minute', almanac.clock()) - interval '1 second',
                  next_due_at = date_trunc('minute', almanac.clock()),
                  look_at = date_trunc('minute', almanac.clock())"""
    )
    columns = ", ".join(
        row[0]
        for row in conn.execute(
            """select quote_ident(attname) from pg_attribute
                where attrelid = 'almanac.schedule'::regclass and attnum > 0 and attname <> 'name'"""
        )
    )
    conn.execute(
        f"insert into almanac.schedule (name, {columns}) select n::text, {columns} from almanac.schedule,"
        f" generate_series(1, {count - 1}) n".encode()
    )


def check(conn: psycopg.Connection[Any], expected: int) -> None:
    (row,) = conn.execute(
        """select (select count(*) from almanac.tick) as ticks,
                  (select count(*) from almanac.job) as jobs,
                  (select count(distinct (schedule, tick_at)) from almanac.job) as distinct_jobs,
                  (select count(*) from almanac.tick t join almanac.job j
                       on j.queue = t.queue and j.id = t.job_id and j.schedule = t.schedule
                      and j.tick_at = t.tick_at) as matched,
                  (select count(*) from almanac.schedule where next_due_at <= almanac.clock()) as due,
                  (select sum(fires) from almanac.schedule) as fires"""
    ).fetchall()
    assert row == (expected, expected, expected, expected, 0, expected)


def in_threads(count: int, run: Callable[[int], None]) -> list[BaseException]:
    failures: list[BaseException] = []

    def guarded(n: int) -> None:
        try:
            run(n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=[n]) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return failures


def test_ten_sessions_tick_at_once(conn, clock, connect):
    make_schedules(conn)
    sessions = [connect() for _ in range(10)]
    barrier = threading.Barrier(10)

    def tick(n: int) -> None:
        barrier.wait()
        for _ in range(200):
            row = sessions[n].execute("select schedules, more from almanac.tick(37)").fetchone()
            if row and not row[0]:
                return

    assert in_threads(10, tick) == []
    # What a session found locked, another one was deciding.
    assert Jobs(conn).tick(batch_size=2000)[0].schedules == 0
    check(conn, SCHEDULES)


def test_ten_sessions_advance_one_at_a_time(conn, clock, connect):
    make_schedules(conn, 200)
    sessions = [connect() for _ in range(10)]
    decided: list[int] = []

    def advance(n: int) -> None:
        names = [str(name) for name in range(200)]
        random.Random(n).shuffle(names)
        for name in names:
            decided.extend(
                1 for _ in sessions[n].execute("select from almanac.advance_schedule('default', %s)", [name])
            )

    assert in_threads(10, advance) == []
    assert len(decided) == 200
    check(conn, 200)


@pytest.mark.parametrize("seed", range(2))
def test_sessions_are_killed_while_they_tick(conn, clock, dsn, seed):
    """Killed after statements that did half of the work, before they could commit, and at any other moment."""
    make_schedules(conn)
    chance = random.Random(seed)
    stop = threading.Event()
    pids: dict[int, int] = {}
    killed = 0

    def tick(n: int) -> None:
        while not stop.is_set():
            try:
                with psycopg.connect(dsn) as session:
                    pids[n] = session.info.backend_pid
                    while not stop.is_set():
                        row = session.execute("select schedules from almanac.tick(11)").fetchone()
                        # Sometimes the whole of it is done and only the commit is missing.
                        if row and row[0] and random.random() < 0.3:
                            time.sleep(0.01)
                        session.commit()
                        if row and not row[0]:
                            return
            except psycopg.OperationalError:
                continue

    ticking = threading.Thread(target=lambda: in_threads(10, tick))
    ticking.start()
    deadline = time.monotonic() + 60
    while ticking.is_alive() and time.monotonic() < deadline:
        time.sleep(chance.uniform(0.005, 0.03))
        if pids:
            row = conn.execute("select pg_terminate_backend(%s)", [chance.choice(list(pids.values()))]).fetchone()
            killed += bool(row and row[0])
    stop.set()
    ticking.join(30)
    assert killed, "nobody was killed: the test shows nothing"
    Jobs(conn).tick(batch_size=2000)
    check(conn, SCHEDULES)


def test_declaring_from_ten_processes_at_once_makes_one_schedule(conn, clock, connect):
    sessions = [connect() for _ in range(10)]
    barrier = threading.Barrier(10)

    def declare(n: int) -> None:
        for release in range(5):
            barrier.wait()
            sessions[n].execute(
                "select almanac.put_schedule('default', 'app', '0 9 * * *', 'x', payload => %s::jsonb)",
                [f'{{"release": {release}}}'],
            )

    assert in_threads(10, declare) == []
    rows = conn.execute(
        "select after->'payload'->>'release' from almanac.schedule_revision order by revision"
    ).fetchall()
    assert [release for (release,) in rows] == ["0", "1", "2", "3", "4"]


def test_a_schedule_that_is_declared_while_it_is_dropped_is_made_anew(conn, clock, connect):
    declare = "select revision, created from almanac.put_schedule('default', 'app', '0 9 * * *', 'x')"
    conn.execute(declare)
    dropping, declaring = connect(autocommit=False), connect()
    dropping.execute("select almanac.drop_schedule('app')")
    with Blocked(conn, declaring, lambda: declaring.execute(declare).fetchone()) as declared:
        dropping.commit()
    assert declared.value() == (3, True)
    assert conn.execute("select revision from almanac.schedule").fetchall() == [(3,)]
    actions = conn.execute("select action from almanac.schedule_revision order by revision").fetchall()
    assert [action for (action,) in actions] == ["put_schedule", "drop_schedule", "put_schedule"]


def test_two_changes_hand_on_the_tick_that_comes_due_while_one_waits_for_the_other(conn, clock, connect):
    clock.freeze("2026-03-10 12:00:50Z")
    change = "select from almanac.put_schedule('default', 'app', %s, 'x')"
    conn.execute(change, ["* * * * *"])
    first, second = connect(autocommit=False), connect()
    first.execute("select from almanac.schedule where name = 'app' for update")
    with Blocked(conn, second, lambda: second.execute(change, ["30 * * * *"])):
        clock.freeze("2026-03-10 12:01:10Z")
        first.execute(change, ["15 * * * *"])
        first.commit()
    assert Jobs(conn).tick()[0].fired == 1
    assert conn.execute("select tick_at = '2026-03-10 12:01Z', decision from almanac.tick").fetchall() == [
        (True, "fired")
    ]


GATE = "select from almanac.put_schedule('default', 'b', '0 9 * * *', 'x', after_schedule => 'a', within => '7 days')"
KEEP_LESS = "select from almanac.put_queue('default', retention => '6 days')"


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize(("first", "second"), [(GATE, KEEP_LESS), (KEEP_LESS, GATE)], ids=["gate first", "less first"])
def test_of_a_gate_and_a_retention_it_looks_beyond_the_second_is_refused(conn, connect, first, second, ending):
    a, b = connect(autocommit=False), connect()
    a.execute(first)
    with Blocked(conn, b, lambda: b.execute(second)) as waiting:
        a.execute(ending)
    if ending == "commit":
        with refused("PA009"):
            waiting.value()
    else:
        waiting.value()


def test_schedules_of_one_queue_are_declared_side_by_side(conn, connect):
    a, b = connect(autocommit=False), connect(autocommit=False)
    declare = "select from almanac.put_schedule('default', %s, '0 9 * * *', 'x', priority => %s)"
    b.execute("set local statement_timeout = '10s'")
    a.execute(declare, ["a", 0])
    b.execute(declare, ["b", 0])
    # The first of a new priority changes the row of the queue, which both have locked.
    a.execute(declare, ["c", 1])
    with Blocked(conn, b, lambda: b.execute(declare, ["d", 2])) as waiting:
        a.commit()
    waiting.value()
    b.commit()
    assert conn.execute("select priorities from almanac.queue").fetchone() == ([2, 1, 0],)


def test_a_locked_schedule_holds_up_nobody_and_fires_later_once(conn, clock, connect):
    make_schedules(conn, 20)
    holder = connect(autocommit=False)
    holder.execute("select from almanac.schedule where name = '7' for update")
    assert Jobs(conn).tick()[0].fired == 19
    holder.rollback()
    assert Jobs(conn).tick()[0].fired == 1
    check(conn, 20)


def test_a_statement_timeout_leaves_everything_for_the_next_tick(conn, clock, connect):
    make_schedules(conn)
    session = connect()
    for timeout in range(2, 60, 7):
        session.execute(f"set statement_timeout = '{timeout}ms'".encode())
        try:
            session.execute("select almanac.tick(2000)")
        except psycopg.errors.QueryCanceled:
            continue
        break
    assert conn.execute("select count(*) from almanac.schedule where error is not null").fetchone() == (0,)
    session.execute("set statement_timeout = 0")
    session.execute("select almanac.tick(2000)")
    check(conn, SCHEDULES)


def test_a_lock_that_is_not_had_in_time_is_no_fault_of_a_schedule(conn, clock, connect):
    Jobs(conn).tick()  # keeps house, which is not what is to be held up
    make_schedules(conn, 20)
    holder, session = connect(autocommit=False), connect()
    holder.execute("lock table almanac.tick in access exclusive mode")
    session.execute("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        session.execute("select almanac.tick(2000)")
    holder.rollback()
    assert conn.execute("select count(*) from almanac.schedule where error is not null").fetchone() == (0,)
    session.execute("select almanac.tick(2000)")
    check(conn, 20)


# ── a tick that is not done when the next one is rung ───────────────────────────────────────────────────────────────


def test_rings_during_a_long_tick_cost_little_and_wait_for_nobody(conn, clock, connect):
    clock.freeze("2026-03-10 12:00:10Z")
    Jobs(conn).tick()  # keeps house
    make_schedules(conn, 3000)
    long, ringing = connect(autocommit=False), connect(options="-c lock_timeout=1s")
    began = time.perf_counter()
    assert Jobs(long).tick(batch_size=3000)[0].fired == 3000
    took, rings = time.perf_counter() - began, []
    for _ in range(5):
        began = time.perf_counter()
        (report,) = Jobs(ringing).tick()
        rings.append(time.perf_counter() - began)
        assert (report.schedules, report.fired, report.more) == (0, 0, False)
    assert min(rings) < took / 3, "there is nothing to do, and that is what it costs"
    conn.execute("select almanac.put_schedule('default', 'newcomer', '*/5 * * * * *', 'race')")
    clock.advance(seconds=5)
    assert Jobs(ringing).tick()[0].fired == 1, "due meanwhile, and decided meanwhile"
    long.commit()
    assert Jobs(ringing).tick()[0].schedules == 0
    check(conn, 3001)


def test_a_schedule_that_comes_due_behind_hundreds_has_its_turn(conn, clock, connect):
    """Rung every three seconds, three ticks at a time are under way, and the others are due again before all were."""
    schedules, batch = 600, 20
    clock.freeze("2026-03-10 12:00:10Z")
    Jobs(conn).tick()  # keeps house
    make_schedules(conn, schedules)
    conn.execute("select almanac.put_schedule('default', 'newcomer', '12 * * * * *', 'race', catch_up => 'all')")
    callers = [connect(autocommit=False) for _ in range(3)]
    fired = 0
    newcomer = "select from almanac.tick where schedule = 'newcomer'"
    for ring in itertools.count():
        caller = callers[ring % len(callers)]
        caller.commit()
        if conn.execute(newcomer).rowcount:
            break
        # Those that were due before it are decided first, some of them with a second tick, and none has another turn.
        assert ring <= 2 * schedules / batch + len(callers)
        fired += Jobs(caller).tick(batch_size=batch)[0].fired
        clock.advance(seconds=3)
    assert ring > 60 / 3, "they were due again before it had its turn"
    for caller in callers:
        caller.commit()
    while (report := Jobs(conn).tick(batch_size=batch)[0]).schedules:
        fired += report.fired
    per_schedule = conn.execute(
        "select count(*), min(tick_at) = '2026-03-10 12:00Z' from almanac.tick where schedule <> 'newcomer'"
        " group by schedule"
    ).fetchall()
    minutes = 1 + (clock.now() - datetime(2026, 3, 10, 12, tzinfo=UTC)) // timedelta(minutes=1)
    assert per_schedule == [(minutes, True)] * schedules
    check(conn, fired)


# ── ticks, operators and workers, all at once ───────────────────────────────────────────────────────────────────────

# Which of the two a tick is of can be seen by it, so that the ledger shows where one definition took the other's place.
RULES = {"even": "*/2 * * * * *", "odd": "1-59/2 * * * * *"}
STEADY = {
    "alone": "",
    "with max_running": "max_running => 3",
    "skip": "overlap => 'skip'",
    "queue_one": "overlap => 'queue_one'",
    **{f"cancel_running {n}": "overlap => 'cancel_running'" for n in range(10)},
    "gated": "after_schedule => 'alone', within => '1 hour'",
    "in a zone": "timezone => 'Europe/Berlin'",
}
CHURNED = [f"churned {n}" for n in range(6)]


def put(jobs: Jobs, name: str, rule: str, options: str = "") -> None:
    jobs.sql(
        f"select almanac.put_schedule('default', %s, %s, 'race', catch_up => 'all'{options and ', ' + options})",
        name, RULES[rule],
    )  # fmt: skip


def operate(jobs: Jobs, chance: random.Random) -> str:
    """Something that an operator, or a program that declares its schedules, does to one of those that change."""
    name = chance.choice(CHURNED)
    act = chance.choices(["put", "pause", "resume", "trigger", "drop"], [4, 2, 3, 2, 1])[0]
    if act == "put":
        put(jobs, name, chance.choice(list(RULES)))
    elif act == "resume":
        jobs.resume_schedule(name=name, catch_up=chance.random() < 0.5)
    else:
        getattr(jobs, f"{act}_schedule")(name=name)
    return act


def work(jobs: Jobs, chance: random.Random) -> str:
    batch = jobs.claim("default", chance.choice([1, 20]))
    time.sleep(chance.choice([0, 0.05]))  # so that some still run when the next tick comes
    chance.shuffle(batch)
    jobs.complete_many(
        queue="default", job_ids=[job.job_id for job in batch], lease_tokens=[job.lease_token for job in batch]
    )
    return "work"


@pytest.mark.timeout(600)
def test_eight_sessions_tick_while_schedules_come_change_and_go(request, conn, clock, dsn, seed):
    seconds = 300 if request.config.getoption("--full") else 5
    jobs, chance, began = Jobs(conn), random.Random(seed), clock.now()
    for name, options in STEADY.items():
        put(jobs, name, "even", options)
    stop = threading.Event()
    acts: Counter[str] = Counter()
    fired: list[int] = []

    def tick(mine: Jobs, chance: random.Random) -> str:
        fired.append(mine.tick(batch_size=chance.choice([2, 5, 2000]))[0].fired)
        return "tick"

    roles = [tick] * 8 + [operate] * 4 + [work] * 2

    def play(n: int) -> None:
        mine = random.Random(f"{seed}-{n}")
        with psycopg.connect(dsn, autocommit=True, options="-c deadlock_timeout=20ms") as session:
            while not stop.is_set():
                try:
                    acts[roles[n](Jobs(session), mine)] += 1
                except psycopg.Error as error:
                    stopping = error.sqlstate == "PA006" and roles[n] is operate  # somebody else has dropped it
                    if not stopping:
                        stop.set()
                        raise

    failures: list[BaseException] = []
    playing = threading.Thread(target=lambda: failures.extend(in_threads(len(roles), play)))
    playing.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.wait(0.03):
        clock.advance(seconds=chance.choice([0.5, 1, 1, 3]))
    stop.set()
    playing.join()
    assert failures == [], f"{dict(acts)}"
    jobs.sql("select pg_stat_force_next_flush()")
    assert jobs.one("select deadlocks from pg_stat_database where datname = current_database()") == 0
    assert min(acts[act] for act in ("tick", "work", "put", "pause", "resume", "trigger", "drop")) > 0, acts

    while (report := jobs.tick()[0]).schedules:
        fired.append(report.fired)
    chains = Chains(jobs, began)
    for name in STEADY:
        assert ledger(jobs, name) == chains.between(RULES["even"], began, chains.now), name
    for name in CHURNED:
        check_changes(jobs, name, chains)
    check_jobs(jobs, sum(fired))


def ledger(jobs: Jobs, name: str) -> list[datetime]:
    rows = jobs.sql("select tick_at from almanac.tick where schedule = %s and decision <> 'triggered' order by 1", name)
    return [row.tick_at for row in rows]


class Chains:
    """Every moment of the rules, as next_runs has them, from a time until now."""

    def __init__(self, jobs: Jobs, since: datetime) -> None:
        self.now: datetime = jobs.one("select almanac.clock()")
        self.moments: dict[str, list[datetime]] = {}
        for cron in RULES.values():
            found = [since]
            while found[-1] <= self.now:
                batch = "select r from almanac.next_runs(%s, 'UTC', %s, 1000) r"
                found += [row.r for row in jobs.sql(batch, cron, found[-1])]
            self.moments[cron] = found[1:]

    def between(self, cron: str, after: datetime, until: datetime) -> list[datetime]:
        moments = self.moments[cron]
        return moments[bisect_right(moments, after) : bisect_right(moments, until)]


def check_changes(jobs: Jobs, name: str, chains: Chains) -> None:
    """Each definition decided every moment of its rule while it held, and none fired while it was paused.

    A change that waits for a tick says when it was asked for (changed_at) and when it could be made (the audit's time);
    what lies between may be of the old definition or of the new one.
    """
    acts = jobs.sql("select action, at from almanac.audit where subject = %s order by id", name)
    made = [act.at for act in acts if act.action in ("put_schedule", "drop_schedule")]
    asked = jobs.sql(
        """select changed_at, after->>'cron' as cron from almanac.schedule_revision
            where schedule = %s order by revision""",
        name,
    )
    assert len(made) == len(asked) > 1
    decided, explained = set(ledger(jobs, name)), set()
    following = [*(change.changed_at for change in asked[1:]), chains.now]
    for change, since, asked_until, until in zip(asked, made, following, [*made[1:], chains.now], strict=True):
        if change.cron is not None:
            missing = set(chains.between(change.cron, since, asked_until)) - decided
            assert not missing, f"{name}: of {change} are missing {missing}"
            explained |= set(chains.between(change.cron, change.changed_at, until))
    assert decided <= explained
    paused = None
    for act in acts:
        if act.action == "pause_schedule":
            paused = paused or act.at
        elif paused and act.action in ("resume_schedule", "drop_schedule"):
            assert not jobs.sql(
                """select * from almanac.tick where schedule = %s and decision = 'fired'
                      and decided_at > %s and decided_at < %s""",
                name, paused, act.at,
            )  # fmt: skip
            paused = None


def check_jobs(jobs: Jobs, fired: int) -> None:
    """One job for each tick that has one, no other job, and as many as were confirmed to those who ticked."""
    columns = "select id, schedule, tick_at from almanac"
    made = f"({columns}.job union all {columns}.job_history)"
    assert not jobs.sql(
        f"""select t.*, j.id from (select * from almanac.tick where job_id is not null) t
              full join {made} j on j.id = t.job_id and j.schedule = t.schedule and j.tick_at = t.tick_at
             where t.job_id is null or j.id is null"""
    )
    assert jobs.one(f"select count(*) = count(distinct (schedule, tick_at)) from {made} j")
    assert jobs.one("select count(*) from almanac.tick where decision = 'fired'") == fired
    assert jobs.sql("select name, error from almanac.schedule where error is not null") == []
