"""Many sessions and processes at once, some of them killed. What happened is counted outside the database too.

Each test prints its seed; ALMANAC_TEST_SEED repeats one.
"""

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.jobs import Jobs, held


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_fifty_connections_claim_ten_thousand_jobs_each_exactly_once(live_jobs, live_dsn):
    total = 10_000
    live_jobs.put(lease="1 hour")
    live_jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * total)
    claimed: list[int] = []
    sizes = [1, 7, 20, 50, 100]

    def work(n: int) -> None:
        with psycopg.connect(live_dsn, autocommit=True) as conn:
            mine = Jobs(conn)
            empty = 0
            # Two empty answers in a row: what others had locked has been claimed by then.
            while empty < 2:
                batch = mine.claim_ids(batch_size=sizes[n % len(sizes)], worker=f"w{n}")
                claimed.extend(batch)
                empty = 0 if batch else empty + 1

    run([threading.Thread(target=work, args=[n]) for n in range(50)])
    claimed.extend(live_jobs.claim_ids(batch_size=10_000))
    assert len(claimed) == total
    assert len(set(claimed)) == total
    rows = live_jobs.sql("select attempt, count(*) as n from almanac.job where state = 'running' group by 1")
    assert rows == [(1, total)]


# ── crashes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def crashing_worker(dsn: str, number: int, seed: str, ledger: str) -> None:
    """Claims and ends jobs until it is killed. Writes down what the database has confirmed, after it did."""
    rng = random.Random(seed)
    with Path(ledger).open("a", buffering=1) as book:
        while True:
            try:
                with psycopg.connect(dsn, autocommit=True, application_name=f"crowd {number}") as conn:
                    work_until_disconnected(Jobs(conn), number, rng, book)
            except psycopg.OperationalError:
                time.sleep(0.02)


def work_until_disconnected(mine: Jobs, number: int, rng: random.Random, book: Any) -> None:
    while True:
        batch = mine.claim(batch_size=rng.choice([1, 3, 10]), worker=f"w{number}", lease=timedelta(seconds=1))
        for job in batch:
            book.write(f"claimed {job.job_id} {job.attempt} {job.lease_token}\n")
        if not batch:
            time.sleep(0.02)
        rng.shuffle(batch)
        time.sleep(rng.random() * 0.02)
        while batch:
            some, batch = batch[:3], batch[3:]
            try:
                act = rng.random()
                if act < 0.3:
                    done = mine.complete_many(
                        queue="q", job_ids=[j.job_id for j in some], lease_tokens=[j.lease_token for j in some]
                    )
                    for row in done:
                        token = next(j.lease_token for j in some if j.job_id == row[0])
                        book.write(f"completed {row[0]} {token}\n")
                    continue
                for job in some:
                    if act < 0.7:
                        mine.complete(**held(job))
                        book.write(f"completed {job.job_id} {job.lease_token}\n")
                    elif act < 0.85:
                        mine.fail_with_backoff(**held(job), error="x", retry_after=timedelta(0))
                        book.write(f"failed {job.job_id} {job.lease_token}\n")
                    else:
                        mine.release(**held(job))
                        book.write(f"released {job.job_id} {job.lease_token}\n")
            except psycopg.Error as error:
                if error.sqlstate != "PA002":
                    raise


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_crashes_at_random_moments_lose_no_job_and_complete_none_twice(request, live_jobs, live_dsn, seed, tmp_path):
    full = request.config.getoption("--full")
    total, seconds = (20_000, 120) if full else (1500, 10)
    rng = random.Random(seed)
    jobs = live_jobs
    jobs.put(max_attempts=100_000, base_delay="0")
    made = {
        row.job_id
        for row in jobs.enqueue_many(
            queue="q", job_type="t", payloads=[{}] * total,
            concurrency_keys=[f"k{n % 40}" if n % 3 == 0 else None for n in range(total)],
        )
    }  # fmt: skip
    # A process must live long enough to do something: from a server that has imported everything, it starts at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.races.test_job_crowd"])
    ledgers = [tmp_path / f"ledger{n}" for n in range(8)]
    lives = Counter[int]()

    def start(n: int) -> Any:
        lives[n] += 1
        process = context.Process(
            target=crashing_worker, args=[live_dsn, n, f"{seed}-{n}-{lives[n]}", str(ledgers[n])], daemon=True
        )
        process.start()
        return process

    processes = [start(n) for n in range(8)]
    kills = terminations = 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline or jobs.one("select count(*) from almanac.job"):
            assert time.monotonic() < deadline + 120, f"seed {seed}: not drained"
            time.sleep(0.05 + rng.random() * 0.3)
            victim = rng.randrange(8)
            if time.monotonic() < deadline:
                if rng.random() < 0.5:
                    os.kill(processes[victim].pid, signal.SIGKILL)
                    processes[victim].join()
                    processes[victim] = start(victim)
                    kills += 1
                else:
                    terminations += len(
                        jobs.sql(
                            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
                            " and datname = current_database()", f"crowd {victim}",
                        )
                    )  # fmt: skip
            jobs.reclaim_expired()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert kills > 5
    assert terminations > 5

    # None lost, none completed twice.
    ended = Counter(row.id for row in jobs.sql("select id from almanac.job_history where state = 'completed'"))
    assert set(ended) == made
    assert set(ended.values()) == {1}
    # What a worker was told stands in the tables.
    log = jobs.sql("select job_id, attempt, outcome, attempt_key, finished_at, claimed_at from almanac.attempt_log")
    outcomes = {(row.job_id, row.attempt_key.rsplit("-", 1)[1]): row.outcome for row in log}
    told = Counter[str]()
    for line in "".join(ledger.read_text() for ledger in ledgers).splitlines():
        what, job_id, *rest = line.split(" ")
        # A line that was cut off by the kill has no end.
        if not rest or not rest[-1].isdigit() or len(rest) != (2 if what == "claimed" else 1):
            continue
        suffix = f"{int(rest[-1]) & 0xFFFFFFFF:08x}"
        if (int(job_id), suffix) not in outcomes:
            assert len(rest[-1]) < 7, f"seed {seed}: {line} is not in attempt_log"
            continue
        told[what] += 1
        if what != "claimed":
            assert outcomes[int(job_id), suffix] == what, f"seed {seed}: {line}"
    # Every attempt accounted for: numbers without gaps, each ended once, the last one completed.
    by_job: dict[int, list[Any]] = {}
    for row in log:
        by_job.setdefault(row.job_id, []).append(row)
    for rows in by_job.values():
        job_id = rows[0].job_id
        rows.sort(key=lambda row: (row.claimed_at, row.finished_at))
        number = 0
        for row in rows:
            assert row.attempt == number + 1, f"seed {seed}: job {job_id}: {rows}"
            number = row.attempt - (row.outcome == "released")
        assert [row.outcome for row in rows].count("completed") == 1
        assert rows[-1].outcome == "completed"
        for earlier, later in itertools.pairwise(rows):
            assert earlier.finished_at <= later.claimed_at, f"seed {seed}: job {job_id} ran twice at once"
    lost = sum(row.outcome == "lost" for row in log)
    print(f"{kills} kills, {terminations} terminations, {len(log)} attempts, {lost} lost, told {dict(told)}")
    assert lost > 0
    assert told["completed"] > total / 2


# ── deadlocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mixed_batches_on_overlapping_jobs_do_not_deadlock(request, live_jobs, live_dsn, seed):
    """Sixteen sessions act on each other's leases, keys and dead jobs, in batches of random order."""
    seconds = 300 if request.config.getoption("--full") else 20
    jobs = live_jobs
    jobs.put(base_delay="0", max_attempts=3, lease="1 second", max_running_per_key=2)
    leases: list[Any] = []
    errors: list[BaseException] = []
    counts = Counter[str]()
    lock = threading.Lock()
    deadline = time.monotonic() + seconds

    def enqueue(mine: Jobs, rng: random.Random) -> None:
        size = rng.choice([1, 20, 60])
        mine.enqueue_many(
            queue="q", job_type=rng.choice("xy"), payloads=[{}] * size, priority=rng.choice([0, 5]),
            dedup_keys=[rng.choice([None, f"d{rng.randrange(60)}"]) for _ in range(size)],
            dedup_for=rng.choice([None, timedelta(milliseconds=50)]),
            concurrency_keys=[rng.choice([None, f"k{rng.randrange(8)}"]) for _ in range(size)],
        )  # fmt: skip

    def claim(mine: Jobs, rng: random.Random) -> None:
        batch = mine.claim(batch_size=rng.choice([1, 10, 50]), lease=timedelta(seconds=rng.choice([1, 5])))
        with lock:
            leases.extend(batch)
            del leases[:-400]

    def some(rng: random.Random, size: int) -> list[Any]:
        with lock:
            return rng.sample(leases, min(size, len(leases)))

    def batch(name: str) -> Any:
        def call(mine: Jobs, rng: random.Random) -> None:
            several = some(rng, 40)
            getattr(mine, name)(
                queue="q", job_ids=[job.job_id for job in several], lease_tokens=[job.lease_token for job in several]
            )

        return call

    complete = batch("complete_many")

    def chain(mine: Jobs, rng: random.Random) -> None:
        """As a worker may that ends a batch and claims the next in one transaction."""
        with mine.conn.transaction():
            complete(mine, rng)
            claim(mine, rng)

    def single(call: Any) -> Any:
        def calls(mine: Jobs, rng: random.Random) -> None:
            for job in some(rng, 10):
                try:
                    call(mine, job)
                except psycopg.Error as error:
                    # Somebody else was faster: most of the leases are.
                    if error.sqlstate not in ("PA002", "PA003"):
                        raise

        return calls

    acts = {
        "enqueue": enqueue,
        "claim": claim,
        "claim again": claim,
        "extend": batch("extend_leases"),
        "complete": complete,
        "chain": chain,
        "fail": single(lambda mine, job: mine.fail_with_backoff(**held(job), error="x")),
        "die": single(lambda mine, job: mine.fail_with_backoff(**held(job), error="x", permanent=True)),
        "release": single(lambda mine, job: mine.release(**held(job))),
        "cancel": single(lambda mine, job: mine.cancel(queue="q", job_id=job.job_id)),
        "redrive": lambda mine, rng: mine.redrive(queue="q", batch_size=rng.choice([1, 100])),
        "reclaim": lambda mine, rng: mine.reclaim_expired(batch_size=rng.choice([5, 1000])),
        "prune": lambda mine, rng: mine.sql("select almanac._prune()"),
        "put": lambda mine, rng: mine.put(max_running_per_key=rng.choice([1, 2, 3])),
    }

    def work(n: int) -> None:
        rng = random.Random(f"{seed}-{n}")
        with psycopg.connect(live_dsn, autocommit=True, options="-c deadlock_timeout=50ms") as conn:
            mine = Jobs(conn)
            while time.monotonic() < deadline and not errors:
                name = rng.choice(list(acts))
                try:
                    acts[name](mine, rng)
                    counts[name] += 1
                except psycopg.Error as error:
                    errors.append(error)
                    raise

    run([threading.Thread(target=work, args=[n]) for n in range(16)])
    print(f"seed {seed}: {sum(counts.values())} calls: {dict(counts)}")
    assert errors == []
    jobs.sql("select pg_stat_force_next_flush()")
    assert jobs.one("select deadlocks from pg_stat_database where datname = current_database()") == 0
    assert min(counts.values()) > 0
    assert len(counts) == len(acts)
    assert jobs.unwatched() == [], f"seed {seed}"
    # Nobody was forgotten: when the last leases have ended, what is left can be worked off.
    time.sleep(5.5)
    while jobs.reclaim_expired()[0].reclaim_expired:
        pass
    assert jobs.forgotten() == [], f"seed {seed}"
    jobs.put(max_running_per_key=50, max_attempts=100_000)
    moved = time.monotonic()
    while jobs.one("select count(*) from almanac.job"):
        several = jobs.claim(batch_size=1000)
        jobs.complete_many(
            queue="q", job_ids=[job.job_id for job in several], lease_tokens=[job.lease_token for job in several]
        )
        if several:
            moved = time.monotonic()
        else:
            assert time.monotonic() < moved + 20, f"seed {seed}: {jobs.sql('select * from almanac.job limit 20')}"
            jobs.reclaim_expired()
            time.sleep(0.05)
