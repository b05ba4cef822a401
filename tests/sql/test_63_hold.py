"""63 hold: one word stops claims and ticks everywhere; a copy holds itself until it is adopted."""

import contextlib
from datetime import timedelta

import psycopg
import pytest

from tests.jobs import Blocked, Jobs, held, refused
from tests.sql.test_33_schedules import put
from tests.sql.test_70_advance_schedule import MINUTELY, now

__all__ = ["now"]


@contextlib.contextmanager
def told(jobs):
    """What the block is told in notices of the hold."""
    notices = []

    def hear(diag):
        if diag.sqlstate == "PA014":
            notices.append(f"{diag.severity_nonlocalized}: {diag.message_primary}")

    jobs.conn.add_notice_handler(hear)
    yield notices
    jobs.conn.remove_notice_handler(hear)


def check(jobs, name):
    (found,) = [row for row in jobs.health() if row.name == name]
    return found


# ── hold ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("settings", [{}, {"max_running": 5}, {"rate_limit": 9, "rate_interval": "1 s"}], ids=str)
def test_nothing_is_claimed_and_nothing_ticks_while_it_is_held(jobs, session, now, settings):
    jobs.put(**settings)
    put(jobs, cron=MINUTELY, queue="q")
    running = jobs.running(lease=timedelta(seconds=5))
    other = session()
    assert other.claim() == []
    assert "held" in jobs.one("select almanac.hold('a customer was called twice')")
    assert "already" in jobs.one("select almanac.hold('again')")
    job_id = jobs.add()
    now.advance(minutes=5)
    for caller in (jobs, other):
        with told(caller) as notices:
            assert caller.claim(batch_size=10) == []
            assert caller.tick()[0].fired == 0
            assert caller.tick_if_stale(worker="w")[0].tick_if_stale is False
            assert caller.advance_schedule(queue="q", name="daily") == []
            assert caller.doze(queue="q", worker="w")[0].doze is None
        assert len(notices) == 4
        assert set(notices) == {notices[0]}
        assert "(a customer was called twice): nothing is claimed and nothing ticks" in notices[0]
        assert notices[0].startswith("NOTICE: held since")
        assert notices[0].endswith("; select almanac.end_hold();")
        assert notices[0] == f"NOTICE: {caller.one('select almanac.held()')}"
    jobs.put("made meanwhile")
    jobs.add("made meanwhile")
    assert jobs.claim("made meanwhile") == []
    found = check(jobs, "hold")
    assert (found.status, "customer was called twice" in found.message) == ("critical", True)
    assert jobs.one("select count(*) from almanac.queue_overview") == 3
    with pytest.raises(psycopg.Error, match="not held"):
        jobs.complete(**held(running))  # it ended long ago
    assert jobs.one("select almanac.end_hold('it was a rumour')") == "work goes on"
    assert jobs.one("select almanac.end_hold()") == "nothing was held"
    assert check(jobs, "hold").status == "ok"
    with told(jobs) as notices:
        assert jobs.tick()[0].fired > 0
        assert job_id in jobs.claim_ids()
        assert len(jobs.claim("made meanwhile")) == 1
    assert notices == []
    log = jobs.sql("select action, reason from almanac.audit_log where action ~ 'hold' order by at, action desc")
    assert [tuple(row) for row in log] == [
        ("hold", "a customer was called twice"),
        ("end_hold", "it was a rumour"),
    ]


def test_what_runs_may_end_while_it_is_held(jobs, now):
    jobs.put()
    done, failed = jobs.running(), jobs.running()
    jobs.hold(reason=None)
    jobs.extend_lease(**held(done))
    jobs.complete(**held(done))
    jobs.fail_with_backoff(**held(failed), error="x")
    assert (jobs.state(done.job_id), jobs.state(failed.job_id)) == ("completed", "retrying")


def test_those_who_sleep_are_woken_when_it_ends(jobs, connect, now):
    jobs.put()
    jobs.hold()
    listener = connect()
    listener.execute("listen almanac")
    jobs.doze(queue="q", worker="w")
    jobs.end_hold()
    assert "q" in [notice.payload for notice in listener.notifies(timeout=5, stop_after=1)]


def test_a_queue_that_is_not_committed_yet_is_held_too(jobs, session, now):
    other = session()
    other.sql("begin")
    other.put("new")
    other.add("new")
    with Blocked(session().conn, jobs.conn, jobs.hold) as holding:
        other.sql("commit")
    holding.value()
    assert jobs.claim("new") == []


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def copied(jobs, own_database, dsn, maintenance, worker_id, now):
    """`copied()`: another session in a clone of the test's database, which was made behind its back."""
    name = f"copy_{worker_id}"
    with contextlib.ExitStack() as stack:

        def copied() -> Jobs:
            jobs.conn.execute("checkpoint")
            original = jobs.conn.info.dbname
            jobs.conn.close()
            now.conn.close()
            maintenance.execute(f"drop database if exists {name} with (force)")
            maintenance.execute(f"create database {name} template {original}")
            stack.callback(maintenance.execute, f"drop database if exists {name} with (force)")
            conn = stack.enter_context(
                psycopg.connect(psycopg.conninfo.make_conninfo(dsn, dbname=name), autocommit=True)
            )
            return Jobs(conn)

        yield copied


@pytest.mark.parametrize("first", ["claim", "tick", "tick_if_stale", "advance_schedule"])
def test_a_clone_holds_itself_whatever_it_is_asked_first(jobs, copied, now, first):
    jobs.put(max_running=5)
    put(jobs, cron=MINUTELY, queue="q")
    jobs.add()
    now.advance(minutes=5)
    copy = copied()
    with told(copy) as notices:
        getattr(copy, first)(
            **{
                "claim": {},
                "tick": {},
                "tick_if_stale": {"worker": "w"},
                "advance_schedule": {"queue": "q", "name": "daily"},
            }[first]
        )
    assert "by copy (this database is a copy of another one)" in notices[0]
    assert "adopt_copy" in notices[0]
    assert copy.one("select count(*) from almanac.job where state = 'running'") == 0
    assert copy.one("select count(*) from almanac.tick") == 0
    assert [alert.alert for alert in copy.alerts() if "adopt_copy" in alert.message] == ["hold"]
    copy.add()  # enqueue goes on
    with refused("PA014"):
        copy.end_hold()


@pytest.mark.parametrize("keep_keys", [True, False])
def test_an_adopted_copy_repeats_nothing_that_ended_and_retries_what_ran(jobs, copied, now, keep_keys):
    jobs.put(max_attempts=2)
    put(jobs, "s", cron=MINUTELY, queue="q")
    ended, ran, dying = jobs.running(), jobs.running(), jobs.running(max_attempts=1)
    jobs.complete(**held(ended))
    now.advance(minutes=1)
    jobs.tick()
    waiting = jobs.add(idempotency_key="my own")
    plain = jobs.add()
    keys = dict(jobs.sql("select id, idempotency_key from almanac.job where schedule is not null"))
    before = {job_id: jobs.find(job_id).idempotency_key for job_id in (*keys, waiting, plain, ran.job_id)}
    copy = copied()
    assert copy.claim(batch_size=10) == []
    copy.sql("select setval(s, 1, false) from unnest(array['job_id_seq', 'claim_id_seq', 'audit_id_seq']) n, "
             "lateral (select ('almanac.' || n)::regclass as s) x")  # fmt: skip
    assert check(copy, "numbers").status == "critical"
    said = copy.one("select almanac.adopt_copy(%s, 'the other one burnt')", keep_keys)
    assert "2 running jobs are retried" in said
    assert check(copy, "numbers").status == check(copy, "hold").status == "ok"
    for lost in (ran, dying):
        with refused("PA002"):
            copy.complete(**held(lost))
    assert copy.complete_many(queue="q", job_ids=[ended.job_id], lease_tokens=[ended.lease_token])
    assert (copy.state(ran.job_id), copy.state(dying.job_id)) == ("retrying", "dead")
    assert copy.add() > max(*keys, waiting, plain)
    copy.sql('update test_clock.setting set "offset" = "offset" + \'1 hour\'')
    claimed = {job.job_id: job for job in copy.claim(batch_size=100)}
    assert ended.job_id not in claimed
    assert claimed[ran.job_id].lease_token > ran.lease_token
    for job_id, key in before.items():
        assert (claimed[job_id].idempotency_key == key) is (keep_keys or key == "my own"), key
        assert copy.find(job_id).idempotency_key == claimed[job_id].idempotency_key
    copy.sql("select almanac.tick()")
    assert copy.one("select count(*) = count(distinct (tick_at)) from almanac.tick")
    with refused("PA014"):
        copy.adopt_copy(keep_keys=keep_keys)


def test_a_snapshot_that_was_held_by_hand_can_be_given_a_life_of_its_own(jobs, now):
    jobs.put()
    with refused("PA014"):
        jobs.adopt_copy(keep_keys=False)
    with refused("22004"):
        jobs.adopt_copy(keep_keys=None)
    prefix = jobs.one("select key_prefix from almanac.queue where queue = 'q'")
    jobs.hold(reason="copy")
    jobs.adopt_copy(keep_keys=False)
    assert jobs.one("select key_prefix from almanac.queue where queue = 'q'") != prefix
    jobs.add()
    assert len(jobs.claim()) == 1


def test_an_upgrade_of_the_server_is_no_copy_and_is_noticed(jobs, session, now):
    jobs.put()
    jobs.sql("update almanac.installation set home[3] = '1', home[4] = '14'")
    other = session()
    other.add()
    assert len(other.claim()) == 1
    assert jobs.one("select home = almanac._here() from almanac.installation")
    # From then on another identifier is another server.
    jobs.sql("update almanac.installation set home[3] = '1'")
    assert session().claim() == []


def test_the_name_of_a_role_does_not_make_a_copy(jobs, own_database, maintenance, now):
    jobs.put()
    jobs.sql("create role copy in role almanac_operator")
    try:
        jobs.sql("set role copy")
        assert jobs.one("select almanac.hold('by one who is called so')").endswith("select almanac.end_hold();")
        assert jobs.one("select almanac.end_hold()") == "work goes on"
    finally:
        jobs.sql("reset role")
        maintenance.execute("drop role copy")


def test_a_copy_of_what_was_held_by_hand_says_that_it_is_a_copy(jobs, copied, now):
    jobs.hold(reason="a snapshot is taken")
    copy = copied()
    assert "adopt_copy" in copy.one("select almanac.held()")
    with refused("PA014") as caught:
        copy.end_hold()
    assert "adopt_copy" in caught.value.diag.message_hint


def test_a_hold_that_ends_while_it_is_being_said_is_no_error(jobs, now):
    with told(jobs) as notices:
        jobs.sql("select almanac._say_hold()")
    assert notices == ["NOTICE: the hold has just ended: ask again"]


def test_a_session_asks_once(jobs, session, now):
    jobs.put()
    other = session()
    other.claim()
    assert other.one("select current_setting('almanac.at_home')") == "yes"
    jobs.sql("update almanac.installation set home[1] = '1'")
    other.add()
    assert len(other.claim()) == 1, "no session outlives the identity of its database"
    assert session().claim() == []
    jobs.sql("select almanac._note_home()")
