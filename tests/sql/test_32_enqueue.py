"""32 enqueue: a job comes to be in the caller's transaction, at most once per dedup_key."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.types.json import Json, Jsonb

from tests.jobs import held, refused


def test_a_rolled_back_transaction_leaves_no_job_and_no_key(jobs):
    jobs.put()
    with jobs.conn.transaction(force_rollback=True):
        jobs.add(dedup_key="k", concurrency_key="c", priority=7)
    assert jobs.sql("select 1 from almanac.job") == []
    assert jobs.enqueue(queue="q", job_type="t", dedup_key="k", priority=7)[0].created
    assert len(jobs.claim()) == 1


def test_a_job_is_due_now_unless_said_otherwise(jobs, clock):
    jobs.put()
    job = jobs.find(jobs.add())
    assert (job.state, job.due_at, job.attempt, job.priority, job.payload) == ("scheduled", clock.now(), 0, 0, {})
    assert job.created_at == clock.now()
    assert job.created_by == jobs.one("select session_user::text")


def test_everything_that_was_given_reaches_the_handler(jobs, clock):
    jobs.put()
    due_at = clock.now() - timedelta(minutes=3)
    job_id = jobs.add(
        job_type="send", payload={"to": "ü"}, due_at=due_at, priority=-5, concurrency_key="c", idempotency_key="i",
        max_attempts=7, headers={"trace": "1"},
    )  # fmt: skip
    claimed = jobs.claim_one(lease=timedelta(minutes=2))
    assert claimed.job_id == job_id
    assert (claimed.job_type, claimed.payload, claimed.headers) == ("send", {"to": "ü"}, {"trace": "1"})
    assert (claimed.attempt, claimed.max_attempts, claimed.priority) == (1, 7, -5)
    assert (claimed.due_at, claimed.lateness) == (due_at, timedelta(minutes=3))
    assert (claimed.concurrency_key, claimed.idempotency_key) == ("c", "i")
    assert claimed.lease_expires_at == clock.now() + timedelta(minutes=2)
    assert claimed.attempt_key == f"{job_id}-1-{claimed.lease_token & 0xFFFFFFFF:08x}"


# ── payload ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "payload",
    [{}, [], {"a": None}, [1, 2], {"n": 10**300}, {"deep": [[[[[[{}]]]]]]}, {"e": "\u2028 \ud7ff 🐘 \\u0001 ' %s"}],
    ids=ascii,
)
def test_a_payload_comes_back_as_it_was(jobs, payload):
    jobs.put()
    jobs.add(payload=payload)
    assert jobs.claim_one().payload == payload


@pytest.mark.parametrize("payload", ["'1'", "'\"text\"'", "'null'", "'true'", "null"])
def test_a_payload_that_is_neither_object_nor_array_is_refused(jobs, payload):
    jobs.put()
    with refused("PA005"):
        jobs.sql(f"select almanac.enqueue('q', 't', {payload}::jsonb)")
    with refused("PA005"):
        jobs.sql(f"select almanac.enqueue_many('q', 't', array['{{}}'::jsonb, {payload}::jsonb])")
    assert jobs.sql("select 1 from almanac.job") == []


@pytest.mark.parametrize("headers", [[], "text", 1, {"x": "y" * 2000}], ids=lambda headers: str(headers)[:10])
def test_headers_are_an_object_that_fits_with_the_payload(jobs, headers):
    jobs.put(max_payload_bytes=2048)
    for call in (
        lambda: jobs.enqueue(queue="q", job_type="t", payload={"a": "b" * 500}, headers=headers),
        lambda: jobs.enqueue_many(queue="q", job_type="t", payloads=[{"a": "b" * 500}], headers=headers),
        lambda: jobs.put_schedule(
            queue="q", name="s", cron="@hourly", job_type="t", payload={"a": "b" * 500}, headers=headers
        ),
    ):
        with refused("PA005"):
            call()
    jobs.enqueue(queue="q", job_type="t", payload={"a": "b" * 500}, headers={"x": "y" * 1000})


def test_a_nul_in_a_payload_is_refused_by_jsonb_itself(jobs):
    jobs.put()
    with pytest.raises(psycopg.Error):
        jobs.conn.execute("select almanac.enqueue('q', 't', %s::jsonb)", [Json({"a": "\0"})])


def test_a_payload_beyond_a_megabyte_is_refused_unless_the_limit_is_raised(jobs):
    jobs.put()
    megabyte = {"a": "x" * 1024 * 1024}
    jobs.add(payload={"a": "x" * 1_000_000})
    with refused("PA005") as caught:
        jobs.add(payload=megabyte)
    assert "max_payload_bytes" in caught.value.diag.message_hint
    with refused("PA005"):
        jobs.enqueue_many(queue="q", job_type="t", payloads=[{}, megabyte])
    jobs.put(max_payload_bytes=11_000_000)
    ten = {"a": "x" * 10_000_000}
    job_id = jobs.add(payload=ten)
    claimed = {c.job_id: c for c in jobs.claim(batch_size=10)}
    assert claimed[job_id].payload == ten
    jobs.complete(**held(claimed[job_id]), result=ten)
    assert jobs.find(job_id).result == ten


def test_a_payload_that_a_table_holds_compressed_is_measured_in_full(jobs, own_database):
    jobs.put(max_payload_bytes=10_000)
    jobs.sql("create table source (payload jsonb)")
    jobs.conn.execute("insert into source values (%s)", [Jsonb({"a": "x" * 40_000})])
    assert jobs.one("select pg_column_size(payload) from source") < 10_000
    with refused("PA005"):
        jobs.sql("select almanac.enqueue('q', 't', payload) from source")
    with refused("PA005"):
        jobs.sql("select almanac.enqueue_many('q', 't', array_agg(payload)) from source")


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "arguments",
    [
        {"due_at": "infinity"}, {"due_at": "-infinity"}, {"priority": None}, {"priority": 32768}, {"priority": -32769},
        {"dedup_key": "k", "dedup_for": "0"}, {"dedup_key": "k", "dedup_for": "-1 s"}, {"max_attempts": 0},
        {"dedup_key": "k", "dedup_for": "300000 years"},
        {"max_attempts": -1}, {"max_attempts": 2**31 - 1}, {"base_delay": "-1 s"}, {"max_delay": "4000 days"},
        {"dedup_key": ""}, {"dedup_key": " "}, {"dedup_key": "x" * 401}, {"concurrency_key": ""},
        {"concurrency_key": "x" * 201}, {"dedup_for": "1 hour"}, {"idempotency_key": ""},
        {"idempotency_key": "x" * 129}, {"idempotency_key": " x"}, {"idempotency_key": "x\n"},
        {"idempotency_key": "n° 7"},
    ],
    ids=lambda arguments: str(arguments)[:40],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_refused(jobs, arguments):
    jobs.put()
    with refused("22023"):
        jobs.enqueue(queue="q", job_type="t", **arguments)
    many = {
        name + "s" if name.endswith("_key") else name: [value] if name.endswith("_key") else value
        for name, value in arguments.items()
    }
    with refused("22023"):
        jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], **many)
    assert jobs.sql("select 1 from almanac.job") == []
    assert jobs.sql("select 1 from almanac.dedup") == []


@pytest.mark.parametrize("due_at", ["4713-01-01 00:00:00 BC", "1970-01-01", "9999-12-31", "290000-01-01"])
def test_a_due_time_however_far_disturbs_nobody(jobs, due_at):
    jobs.put()
    odd = jobs.one("select (almanac.enqueue('q', 't', due_at => %s::timestamptz)).job_id", due_at)
    usual = jobs.add()
    assert jobs.sql("select job_id from almanac.claim_due('q', 'w', 10)") == (
        [(odd,), (usual,)] if due_at < "2000" or due_at.endswith("BC") else [(usual,)]
    )


def test_the_longest_keys_fit_into_every_index(jobs):
    queue, key = "🐘" * 200, "🦣" * 200
    jobs.put(queue)
    first = jobs.add(queue, "🦏" * 200, concurrency_key=key, dedup_key="🦛" * 400)
    second = jobs.add(queue, "🦏" * 200, concurrency_key=key)
    assert jobs.claim_ids(queue) == [first]
    assert jobs.parked() == [second]


# ── enqueue_many ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_payloads_are_one_statement(jobs):
    jobs.put()
    made = jobs.enqueue_many(queue="q", job_type="t", payloads=[{"n": n} for n in range(10_000)])
    assert all(row.created for row in made)
    stored = {row.id: row.n for row in jobs.sql("select id, (payload ->> 'n')::int as n from almanac.job")}
    assert [stored[row.job_id] for row in made] == list(range(10_000))


def test_many_answers_in_the_order_of_payloads_and_names_who_has_a_key(jobs):
    jobs.put()
    taken = jobs.add(dedup_key="b")
    made = jobs.enqueue_many(
        queue="q", job_type="t", payloads=[{"n": n} for n in range(6)], dedup_keys=["z", "b", None, "a", "z", None],
        concurrency_keys=[None, "c", None, "c", None, "c"], idempotency_keys=[None, None, "i", None, None, None],
    )  # fmt: skip
    assert [row.created for row in made] == [True, False, True, True, False, True]
    assert made[1].job_id == taken
    assert made[4].job_id == made[0].job_id
    rows = {row.id: row for row in jobs.sql("select * from almanac.job")}
    assert len(rows) == 5
    assert [rows[made[n].job_id].payload["n"] for n in (0, 2, 3, 5)] == [0, 2, 3, 5]
    assert [rows[made[n].job_id].concurrency_key for n in (0, 2, 3, 5)] == [None, None, "c", "c"]
    assert rows[made[2].job_id].idempotency_key == "i"


def test_many_take_an_array_of_any_shape(jobs):
    jobs.put()
    payloads = """array[array['{"n": 1}', '{"n": 2}'], array['{"n": 3}', '{"n": 4}']]::jsonb[]"""
    made = jobs.sql(f"select * from almanac.enqueue_many('q', 't', {payloads}, dedup_keys => '{{a,b,c,a}}')")
    assert [job.created for job in made] == [True, True, True, False]
    assert [jobs.row(job.job_id).payload["n"] for job in made] == [1, 2, 3, 1]
    keys = "concurrency_keys => '{{null,k},{k,null}}', idempotency_keys => '{{i,null},{null,null}}'"
    made = jobs.sql(f"select * from almanac.enqueue_many('q', 't', {payloads}, {keys})")
    rows = [jobs.row(job.job_id) for job in made]
    assert [(row.payload["n"], row.concurrency_key) for row in rows] == [(1, None), (2, "k"), (3, "k"), (4, None)]
    assert rows[0].idempotency_key == "i"
    assert len(jobs.claim(batch_size=10)) == 6, "one of the two with a key"


def test_only_keys_that_are_given_make_a_queue_keyed(jobs):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}, {}], concurrency_keys=[None, None])
    assert jobs.one("select keyed_at from almanac.queue where queue = 'q'") is None


def test_many_of_nothing_is_nothing(jobs):
    jobs.put()
    assert jobs.enqueue_many(queue="q", job_type="t", payloads=[]) == []


@pytest.mark.parametrize("keys", [{"dedup_keys": ["a"]}, {"concurrency_keys": ["a"] * 3}, {"idempotency_keys": []}])
def test_arrays_of_different_length_are_refused(jobs, keys):
    jobs.put()
    with refused("22023"):
        jobs.enqueue_many(queue="q", job_type="t", payloads=[{}, {}], **keys)
    with refused("22023"):
        jobs.enqueue_many(queue="q", job_type="t", payloads=None)


# ── dedup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def enqueue(jobs, **arguments):
    made = jobs.enqueue(queue="q", job_type="t", dedup_key="k", **arguments)[0]
    return made.job_id, made.created


def test_one_live_job_per_key_in_every_live_state(jobs, clock):
    jobs.put()
    first, created = enqueue(jobs)
    assert created
    assert enqueue(jobs) == (first, False)
    claimed = jobs.claim_one()
    assert enqueue(jobs) == (first, False)
    jobs.fail_with_backoff(**held(claimed), error="x")
    assert enqueue(jobs) == (first, False)
    clock.advance(minutes=1)
    claimed = jobs.claim_one()
    jobs.release(**held(claimed))
    assert enqueue(jobs) == (first, False)
    assert jobs.one("select count(*) from almanac.job") == 1


@pytest.mark.parametrize("end", ["completed", "dead", "cancelled while waiting", "cancelled while running", "lost"])
def test_the_key_of_a_job_that_ended_is_free_again(jobs, clock, end):
    jobs.put(max_attempts=1)
    first, _ = enqueue(jobs)
    if end == "cancelled while waiting":
        jobs.cancel(queue="q", job_id=first)
    else:
        claimed = jobs.claim_one()
    if end == "completed":
        jobs.complete(**held(claimed))
    elif end == "dead":
        jobs.fail_with_backoff(**held(claimed), error="x")
    elif end == "cancelled while running":
        jobs.cancel(queue="q", job_id=first)
        assert enqueue(jobs) == (first, False)
        jobs.release(**held(claimed))
    elif end == "lost":
        clock.advance(hours=1)
        assert enqueue(jobs) == (first, False)
        jobs.reclaim_expired(queue="q")
    second, created = enqueue(jobs)
    assert created
    assert second != first


def test_a_window_slides_over_midnight(jobs, clock):
    jobs.put()
    clock.freeze(datetime(2026, 3, 31, 23, 59, 59, 500000, tzinfo=UTC))
    first, _ = enqueue(jobs, dedup_for=timedelta(days=1))
    clock.advance(seconds=1)
    assert enqueue(jobs, dedup_for=timedelta(days=1)) == (first, False)


@pytest.mark.parametrize("end", ["completed", "dead", "live"])
@pytest.mark.parametrize("by", ["enqueue", "enqueue_many"])
def test_a_window_is_held_whatever_became_of_the_job_and_then_free(jobs, clock, end, by):
    jobs.put(lease="2 hours")
    if by == "enqueue":
        first, _ = enqueue(jobs, dedup_for=timedelta(minutes=10))
    else:
        (made,) = jobs.enqueue_many(queue="q", job_type="t", payloads=[{}], dedup_keys=["k"], dedup_for="10 minutes")
        first = made.job_id
    if end != "live":
        claimed = jobs.claim_one()
        if end == "completed":
            jobs.complete(**held(claimed))
        else:
            jobs.fail_with_backoff(**held(claimed), error="x", permanent=True)
    clock.advance(minutes=10, microseconds=-1)
    assert enqueue(jobs, dedup_for=timedelta(minutes=10)) == (first, False)
    assert enqueue(jobs) == (first, False)
    clock.advance(microseconds=1)
    second, created = enqueue(jobs, dedup_for=timedelta(minutes=10))
    assert created
    clock.advance(minutes=9)
    assert enqueue(jobs, dedup_for=timedelta(minutes=10)) == (second, False)


def test_the_window_of_a_cancelled_job_is_free_at_once(jobs):
    jobs.put()
    first, _ = enqueue(jobs, dedup_for=timedelta(days=1))
    jobs.cancel(queue="q", job_id=first)
    assert enqueue(jobs, dedup_for=timedelta(days=1))[1]


def test_a_window_is_held_though_history_has_dropped_the_job(jobs, clock):
    jobs.put(retention="1 hour")
    first, _ = enqueue(jobs, dedup_for=timedelta(days=10))
    jobs.complete(**held(jobs.claim_one()))
    clock.advance(hours=2)
    assert enqueue(jobs, dedup_for=timedelta(days=10)) == (first, False)
    jobs.sql("select almanac._prune()")
    assert jobs.find(first) is None
    assert enqueue(jobs, dedup_for=timedelta(days=10)) == (first, False)
    clock.advance(days=10)
    second, created = enqueue(jobs, dedup_for=timedelta(days=10))
    assert created
    assert enqueue(jobs) == (second, False)


def test_a_window_that_passed_is_pruned_and_one_that_has_not_is_kept(jobs, clock):
    jobs.put()
    jobs.enqueue_many(queue="q", job_type="t", payloads=[{}, {}], dedup_keys=["a", "b"], dedup_for="1 hour")
    jobs.add(dedup_key="c")
    jobs.add(dedup_key="d", dedup_for="3 hours")
    clock.advance(hours=2)
    jobs.sql("select almanac._prune()")
    assert [row.dedup_key for row in jobs.sql("select dedup_key from almanac.dedup order by 1")] == ["c", "d"]


def test_the_same_key_in_another_queue_is_another_key(jobs):
    jobs.put()
    jobs.put("other")
    enqueue(jobs)
    assert jobs.enqueue(queue="other", job_type="t", dedup_key="k")[0].created


def test_keys_differ_by_case_and_accent_and_space(jobs):
    jobs.put()
    keys = ["key", "Key", "key ", "kéy", "ke\u0301y"]
    made = jobs.enqueue_many(queue="q", job_type="t", payloads=[{}] * 5, dedup_keys=keys)
    assert all(row.created for row in made)


def test_the_constraint_holds_against_a_direct_insert(jobs):
    jobs.put()
    enqueue(jobs)
    with pytest.raises(psycopg.errors.UniqueViolation):
        jobs.sql("insert into almanac.dedup (queue, dedup_key, job_id) values ('q', 'k', 99)")


def test_a_session_may_give_a_backslash_its_old_meaning(jobs, session):
    caller = session()
    caller.sql("set standard_conforming_strings = off")
    caller.sql("set escape_string_warning = off")
    jobs.put()
    made = caller.enqueue_many(queue="q", job_type="mail", payloads=[{}], dedup_keys=["key"], concurrency_keys=["key"])
    assert made[0].created
    assert caller.claim_ids(worker="worker") == [made[0].job_id]
    with refused("22023"):
        caller.add(job_type=" ")


# ── the bell ────────────────────────────────────────────────────────────────────────────────────────────────────────


def notified(listener):
    return [note.payload for note in listener.notifies(timeout=0.3, stop_after=1)]


def test_a_sleeper_is_woken_when_a_job_becomes_due_and_nothing_is_sent_when_nobody_sleeps(jobs, connect, clock):
    jobs.put()
    listener = connect()
    listener.execute("listen almanac")
    jobs.add()
    assert notified(listener) == []
    jobs.doze(queue="q", worker="w", at_most="1 minute")
    jobs.add(due_at=clock.now() + timedelta(minutes=2))
    assert notified(listener) == []
    jobs.add(due_at=clock.now() + timedelta(seconds=30))
    assert notified(listener) == ["q"]
    jobs.wake(queue="q", worker="w")
    jobs.add()
    assert notified(listener) == []


def test_a_sleeper_is_woken_when_a_queue_is_resumed(jobs, connect, clock):
    jobs.put()
    jobs.add()
    jobs.pause_queue(queue="q")
    listener = connect()
    listener.execute("listen almanac")
    assert jobs.doze(queue="q", worker="w", at_most="1 hour")[0].doze is None
    jobs.resume_queue(queue="q")
    assert notified(listener) == ["q"]


@pytest.mark.parametrize("ending", ["completed", "retrying", "dead", "lost", "cancelled", "released"])
def test_a_sleeper_is_woken_when_a_place_becomes_free(jobs, connect, clock, ending):
    jobs.put(max_running=1)
    running = jobs.running(max_attempts=1 if ending == "lost" else 2)
    jobs.add()
    listener = connect()
    listener.execute("listen almanac")
    jobs.doze(queue="q", worker="w", at_most="1 hour")
    if ending == "completed":
        jobs.complete(**held(running))
    elif ending in ("retrying", "dead"):
        jobs.fail_with_backoff(**held(running), error="x", permanent=ending == "dead", retry_after="1 day")
    elif ending == "lost":
        clock.advance(minutes=6)
        jobs.reclaim_expired()
    else:
        if ending == "cancelled":
            jobs.cancel(queue="q", job_id=running.job_id)
            assert notified(listener) == []
        jobs.release(**held(running))
    assert notified(listener) == ["q"]
