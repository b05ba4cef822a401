"""The primary is gone and a standby takes over: with all that was acknowledged if it is synchronous, and otherwise
without the last moments, of which nothing may be mistaken for what comes after."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from pyclient import Almanac, embedded
from tests import servers
from tests.faults.conftest import Breakable
from tests.jobs import Jobs, held, refused
from tests.workers import in_thread, wait_until


@dataclass
class Pair:
    primary: Breakable
    standby: Breakable

    @property
    def dsn(self) -> str:
        """Of both, as an application is given it."""
        hosts, ports = zip(*(place(one) for one in (self.primary, self.standby)), strict=True)
        return f"host={','.join(hosts)} port={','.join(ports)} user=postgres dbname=work"

    def wait_until_replicated(self) -> None:
        with psycopg.connect(self.primary.dsn, autocommit=True) as conn:
            written = conn.execute("select pg_current_wal_lsn()").fetchone()
            wait_until(
                lambda: conn.execute("select from pg_stat_replication where replay_lsn >= %s::pg_lsn", written).rowcount
            )


def place(one: Breakable) -> tuple[str, str]:
    assert one.server.data_dir is not None
    return str(one.server.data_dir.parent), str(one.server.port)


@pytest.fixture
def pair(breakable: Callable[..., Breakable]) -> Iterator[Pair]:
    """A primary, and a standby that follows it."""
    primary = breakable()
    host, from_port = place(primary)
    who, home, port = embedded.account(), Path(f"{host}-standby"), servers.free_port()
    assert primary.server.bin_dir is not None
    home.mkdir(mode=0o755)
    who.own(home)
    data = home / "data"
    dsn = primary.server.dsn_of("work", host=str(home), port=str(port))
    standby = Breakable(replace(primary.server, dsn=dsn, data_dir=data, port=port), dsn)
    try:
        source = ["-U", "postgres", "-h", host, "-p", from_port]
        done = who.run([primary.server.bin_dir / "pg_basebackup", "-D", data, "-R", "-c", "fast", *source])
        assert done.returncode == 0, done.stderr
        with (data / "postgresql.conf").open("a") as conf:
            conf.write(f"port = {port}\nunix_socket_directories = '{home}'\n")
        standby.start()
        yield Pair(primary, standby)
    finally:
        with contextlib.suppress(AssertionError):
            standby.stop("immediate")
        shutil.rmtree(home, ignore_errors=True)


def test_an_asynchronous_standby_mistakes_nothing_that_was_lost_for_what_follows(pair: Pair) -> None:
    """What is acknowledged between the cut and the crash is gone: the end of a job, the claim of another, a tick, jobs
    that were made and begun."""
    with psycopg.connect(pair.primary.dsn, autocommit=True) as conn:
        old = Jobs(conn)
        old.put(lease="1 hour")
        first, second = old.add(), old.add()
        ended = old.claim_one()
        old.put_schedule(queue="q", name="s", cron="* * * * * *", job_type="tick")
        pair.wait_until_replicated()
        pair.standby.stop()

        old.complete(**held(ended))
        begun = old.claim_one()
        assert (ended.job_id, begun.job_id) == (first, second)
        tick = wait_until(lambda: old.advance_schedule(queue="q", name="s"))[0]
        fired = old.find(tick.job_id)
        old.enqueue_many(queue="q", job_type="t", payloads=[{}] * 200)
        lost = {job.job_id: job for job in old.claim(batch_size=1000, job_types=["t"])}
    pair.primary.crash()
    pair.standby.start()
    pair.standby.ctl("promote")

    with psycopg.connect(pair.standby.dsn, autocommit=True) as conn:
        new = Jobs(conn)
        # Its lease lives on here; its worker may say again what became of it.
        new.complete(**held(ended))
        assert new.state(first) == "completed"
        # Claimed by two, one of them in a past that did not happen: the other one ends it.
        again = new.claim_one(worker="w2")
        assert again.job_id == second
        assert again.lease_token != begun.lease_token
        assert again.idempotency_key == begun.idempotency_key
        with refused("PA002"):
            new.complete(**held(begun))
        new.complete(**held(again))
        # The tick is decided again, and it is the same effect.
        ticks = new.advance_schedule(queue="q", name="s")
        assert ticks[0].tick_at == tick.tick_at
        assert new.find(ticks[0].job_id).idempotency_key == fired.idempotency_key
        # Numbers come again, for other jobs: neither a lease nor a key from before may fit them.
        new.enqueue_many(queue="q", job_type="t", payloads=[{}] * 200)
        claimed = {job.job_id: job for job in new.claim(batch_size=1000, job_types=["t"])}
        numbered_again = lost.keys() & claimed.keys()
        assert numbered_again, "this shows nothing unless numbers come again"
        for job_id in numbered_again:
            assert lost[job_id].lease_token != claimed[job_id].lease_token
            assert lost[job_id].idempotency_key != claimed[job_id].idempotency_key
        tokens = [job.lease_token for job in lost.values()]
        assert new.complete_many(queue="q", job_ids=[*lost], lease_tokens=tokens) == []


def test_what_was_acknowledged_survives_a_failover_to_a_synchronous_standby(pair: Pair) -> None:
    """With a worker that knows both hosts, a producer that tries again, and a schedule that the worker has to tick."""
    pair.primary.execute("alter system set synchronous_standby_names = '*'")
    pair.primary.execute("select pg_reload_conf()")
    app = Almanac(pair.dsn)
    acknowledged: set[int] = set()
    stop = threading.Event()

    @app.schedule("* * * * * *", name="every second", catch_up="all")
    @app.job("work", base_delay=0, max_attempts=1000)
    async def work() -> None:
        await asyncio.sleep(0.002)

    def produce() -> None:
        while not stop.is_set():
            try:
                with psycopg.connect(pair.dsn, target_session_attrs="read-write", autocommit=True) as conn:
                    while not stop.wait(0.02):
                        acknowledged.update(job.job_id for job in app.enqueue_many("work", [{}] * 20, conn=conn))
            except psycopg.OperationalError:
                stop.wait(0.1)

    producer = threading.Thread(target=produce, daemon=True)
    with in_thread(app, pair.dsn, lease=timedelta(seconds=3)) as running:
        app.declare()
        producer.start()
        metrics = running.worker.metrics
        with psycopg.connect(pair.primary.dsn, autocommit=True) as conn:
            wait_until(lambda: metrics.completed > 500 and conn.execute("select from almanac.tick").rowcount > 1, 30)
        pair.primary.crash()
        pair.standby.ctl("promote")
        before, known = metrics.completed, len(acknowledged)
        wait_until(lambda: metrics.completed > before + 500 and len(acknowledged) > known + 200, 60)
        stop.set()
        producer.join(10)
        with psycopg.connect(pair.standby.dsn, autocommit=True) as conn:
            after = Jobs(conn)
            decided = after.one("select count(*) from almanac.tick")
            wait_until(lambda: after.one("select count(*) from almanac.tick") > decided + 1)
            wait_until(lambda: not after.one("select count(*) from almanac.job where schedule is null"), 60)
            ended = after.sql("select id, state from almanac.job_history")
            ticks = after.sql("select tick_at, decision from almanac.tick order by tick_at")
    app.close()
    assert acknowledged - {job.id for job in ended} == set(), "acknowledged, and lost"
    assert {job.state for job in ended} == {"completed"}
    assert len(ended) == len({job.id for job in ended}), "ended twice"
    assert {tick.decision for tick in ticks} == {"fired"}
    seconds = {(later.tick_at - earlier.tick_at).total_seconds() for earlier, later in pairwise(ticks)}
    assert seconds == {1.0}, "a tick is missing, or there twice"
