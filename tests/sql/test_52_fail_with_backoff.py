"""52 fail_with_backoff: retried later, or dead when no attempt is left. A failure can always be recorded."""

from datetime import timedelta

import pytest

from tests.jobs import held, refused

MINUTE = timedelta(minutes=1)


def test_delays_double_from_the_default_of_a_minute_until_dead(jobs, clock):
    jobs.put()
    job_id = jobs.add()
    for attempt in range(1, 6):
        job = jobs.claim_one()
        assert (job.attempt, job.max_attempts) == (attempt, 5)
        answer = jobs.fail_with_backoff(**held(job), error=f"failure {attempt}")[0]
        if attempt < 5:
            delay = MINUTE * 2 ** (attempt - 1)
            assert (answer.state, answer.due_at, answer.attempt) == ("retrying", clock.now() + delay, attempt)
            found = jobs.find(job_id)
            assert (found.state, found.attempt, found.last_error) == ("retrying", attempt, f"failure {attempt}")
            clock.advance(seconds=delay.total_seconds() - 0.001)
            assert jobs.claim() == []
            clock.advance(seconds=0.001)
    assert (answer.state, answer.due_at, answer.attempt) == ("dead", None, 5)
    dead = jobs.one("select * from almanac.dead_job")
    assert (dead.job_id, dead.attempt, dead.error) == (job_id, 5, "failure 5")
    assert dead.end_reason == "attempt 5 of 5 failed"
    assert jobs.attempts(job_id) == [(n, "failed") for n in range(1, 6)]
    assert jobs.claim() == []


def test_a_permanent_failure_is_dead_at_once(jobs):
    jobs.put()
    job = jobs.running()
    answer = jobs.fail_with_backoff(**held(job), error="no such customer", permanent=True)[0]
    assert (answer.state, answer.attempt) == ("dead", 1)
    assert jobs.one("select end_reason from almanac.dead_job") == "permanent failure"


@pytest.mark.parametrize("permanent", [False, None])
def test_retry_after_replaces_the_backoff_but_adds_no_attempt(jobs, clock, permanent):
    jobs.put(max_attempts=2, max_delay="1 hour")
    job = jobs.running()
    answer = jobs.fail_with_backoff(**held(job), error="x", permanent=permanent, retry_after=timedelta(hours=9))[0]
    assert answer.due_at == clock.now() + timedelta(hours=9)
    clock.advance(hours=9)
    answer = jobs.fail_with_backoff(**held(jobs.claim_one()), error="x", retry_after=MINUTE)[0]
    assert answer.state == "dead"


@pytest.mark.parametrize("retry_after", ["-1 s", "4000 days"])
def test_a_retry_after_that_makes_no_sense_is_refused(jobs, retry_after):
    jobs.put()
    job = jobs.running()
    with refused("22023"):
        jobs.fail_with_backoff(**held(job), error="x", retry_after=retry_after)
    assert jobs.state(job.job_id) == "running"


def test_delays_stop_at_the_cap_and_jitter_adds_up_to_its_fraction(jobs, clock):
    jobs.put(base_delay="10 s", max_delay="15 s", jitter=0.5, max_attempts=1000)
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 60)
    delays: list[list[float]] = []
    for _ in range(2):
        delays.append(
            [
                (jobs.fail_with_backoff(**held(job), error="x")[0].due_at - clock.now()).total_seconds()
                for job in jobs.claim(batch_size=60)
            ]
        )
        clock.advance(minutes=1)
    assert all(10 <= delay <= 15 for delay in delays[0])
    assert all(15 <= delay <= 22.5 for delay in delays[1])
    assert max(delays[0]) - min(delays[0]) > 2


def test_delays_of_a_type_override_those_of_the_queue_and_those_of_a_job_both(jobs, clock):
    jobs.put(base_delay="1 s", max_delay="1 s", jitter=1)
    jobs.put_job_type(queue="q", job_type="typed", base_delay="10 s", max_delay="20 s", jitter=0)
    given = {"base_delay": "100 s", "max_delay": "150 s"}

    def delays(**arguments):
        job = jobs.running(**arguments)
        for _ in range(2):
            due_at = jobs.fail_with_backoff(**held(job), error="x")[0].due_at
            yield (due_at - clock.now()).total_seconds()
            clock.freeze(due_at)
            job = jobs.claim_one()
        jobs.complete(**held(job))

    assert list(delays(job_type="typed")) == [10, 20], "and no jitter"
    assert list(delays(job_type="typed", **given)) == [100, 150]
    assert all(100 <= delay <= 300 for delay in delays(**given))
    assert all(1 <= delay <= 2 for delay in delays())


@pytest.mark.parametrize(
    ("base", "cap"),
    [
        ("60 s", "1 day"), ("0", "0"), ("0", "1 day"), ("1 microsecond", "3650 days"), ("3650 days", "3650 days"),
        ("1 s", "1 s"), ("1 month", "3650 days"), ("1 year 2 mons 3 days 04:05:06.789", "3650 days"),
        ("1 hour", "1 minute"),
    ],
)  # fmt: skip
def test_backoff_of_any_attempt_is_monotone_up_to_the_cap(jobs, base, cap):
    wrong = jobs.sql(
        """
        select * from (
            select attempt, delay, lag(delay) over (order by attempt) as before, cap
              from generate_series(1, 100000) as attempt,
                   lateral (select almanac._backoff(attempt, %s::interval, %s::interval) as delay) d,
                   lateral (select make_interval(secs => extract(epoch from %s::interval)) as cap) c) all_of_them
         where delay is null or delay < interval '0' or delay > cap or delay < before
            or (attempt > 80 and delay <> cap and %s::interval <> '0')
            or clock_timestamp() + delay is null
         limit 5
        """,
        base, cap, cap, base,
    )  # fmt: skip
    assert wrong == []
    first = jobs.one(
        "select extract(epoch from almanac._backoff(1, %s, %s)) = least(extract(epoch from %s::interval),"
        " extract(epoch from %s::interval))", base, cap, base, cap,
    )  # fmt: skip
    assert first


@pytest.mark.parametrize("attempt", [None, -(2**31), -1, 0, 1])
def test_backoff_of_an_odd_attempt_is_the_first_delay(jobs, attempt):
    assert jobs.one("select almanac._backoff(%s, '60 s', '1 day')", attempt) == MINUTE


def test_backoff_of_the_last_integer_is_the_cap(jobs):
    assert jobs.one("select almanac._backoff(2147483647, '60 s', '1 day')") == timedelta(days=1)


def test_attempt_number_100000_can_fail_too(jobs, clock):
    jobs.put(max_attempts=1_000_000, max_delay="3650 days", base_delay="3650 days", jitter=1)
    job = jobs.running()
    jobs.sql("update almanac.job set attempt = 100000")
    answer = jobs.fail_with_backoff(**held(job), error="x")[0]
    assert answer.state == "retrying"
    assert timedelta(days=3650) <= answer.due_at - clock.now() <= timedelta(days=7300)


@pytest.mark.parametrize(
    "error",
    [
        None,
        "",
        " ",
        "it's\n\ttwo lines",
        "% %s %I $1 {0} \\x00 \\u0000",
        "🐘" * 30_000,
        "x" * 5_000_000,
        "\x01\x7f",
    ],
    ids=lambda error: ascii(error)[:30],
)
def test_any_error_text_can_be_recorded(jobs, clock, error):
    jobs.put(max_attempts=2)
    job = jobs.running()
    assert jobs.fail_with_backoff(**held(job), error=error)[0].state == "retrying"
    kept = jobs.find(job.job_id).last_error
    assert kept == ("no error was given" if error is None else error[:20_000])
    clock.advance(hours=1)
    assert jobs.fail_with_backoff(**held(jobs.claim_one()), error=error)[0].state == "dead"
    assert jobs.one("select error from almanac.dead_job") == kept


@pytest.mark.parametrize(("minutes", "offset"), [(0, 1), (5, 0)], ids=["not the holder", "too late"])
def test_only_the_holder_of_a_live_lease_may_fail(jobs, clock, minutes, offset):
    jobs.put()
    job = jobs.running(lease=5 * MINUTE)
    before = jobs.row(job.job_id)
    clock.advance(minutes=minutes)
    with refused("PA002"):
        jobs.fail_with_backoff(queue="q", job_id=job.job_id, lease_token=job.lease_token + offset, error="x")
    assert jobs.row(job.job_id) == before
    assert jobs.sql("select 1 from almanac.attempt") == []


def test_failing_twice_counts_once(jobs):
    jobs.put()
    job = jobs.running()
    jobs.fail_with_backoff(**held(job), error="x")
    with refused("PA002"):
        jobs.fail_with_backoff(**held(job), error="x")
    assert jobs.attempts(job.job_id) == [(1, "failed")]
