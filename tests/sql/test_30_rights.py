"""30 rights: once a queue has a grant, only those roles may act on it, whatever else they hold.

The roles here are real ones without superuser; they act through `set role`, as behind a pool, and as logins.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.jobs import Jobs, held, refused

RIGHTS = ("produce", "work", "operate")


@pytest.fixture(scope="session")
def roles(maintenance: Any, worker_id: str) -> Iterator[dict[str, str]]:
    """Logins with each role of the product, and a team they are members of or not."""
    prefix = f"test_{worker_id}_"
    names = {name: f"{prefix}{name} it's" for name in ("team", "member", "stranger", "both")}
    for name in reversed(names.values()):
        maintenance.execute(f'drop role if exists "{name}"')
    maintenance.execute(f'create role "{names["team"]}" nologin')
    for name in ("member", "stranger", "both"):
        maintenance.execute(f'create role "{names[name]}" login')
        for granted in ("producer", "worker", "operator", "observer"):
            maintenance.execute(f'grant almanac_{granted} to "{names[name]}"')
    maintenance.execute(f'grant "{names["team"]}" to "{names["member"]}"')
    maintenance.execute(f'grant "{names["stranger"]}", "{names["member"]}" to "{names["both"]}"')
    yield names
    for name in reversed(names.values()):
        maintenance.execute(f'drop role if exists "{name}"')


@pytest.fixture
def login(dsn: str, roles: dict[str, str]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda name: Jobs(stack.enter_context(psycopg.connect(dsn, user=roles[name], autocommit=True)))


def acts(jobs: Jobs, caller: Jobs) -> dict[str, list[Any]]:
    """Every way to act on the queue, by the right it needs; each works when allowed."""
    running, waiting, dead = jobs.running(), jobs.add(), jobs.dead()
    other, third, fourth = jobs.running(), jobs.running(), jobs.running()
    fifth = jobs.running()
    waiting2 = jobs.add()
    jobs.add(dedup_key="taken")
    later, later2 = (jobs.add(due_at=jobs.one("select almanac.clock() + interval '1 hour'")) for _ in range(2))
    return {
        "produce": [
            lambda: caller.add(),
            lambda: caller.enqueue_many(queue="q", job_type="t", payloads=[{}]),
            lambda: caller.cancel(queue="q", job_id=waiting),
            lambda: caller.redrive(queue="q", job_id=dead.job_id),
            lambda: caller.job(queue="q", job_id=running.job_id),
            lambda: caller.make_due(queue="q", job_id=later),
            lambda: caller.add(dedup_key="taken"),
        ],
        "work": [
            lambda: caller.claim(),
            lambda: caller.extend_lease(**held(running)),
            lambda: caller.extend_leases(queue="q", job_ids=[], lease_tokens=[]),
            lambda: caller.complete(**held(running)),
            lambda: caller.complete_many(queue="q", job_ids=[], lease_tokens=[]),
            lambda: caller.fail_with_backoff(**held(other), error="x"),
            lambda: caller.release(**held(third)),
            lambda: caller.snooze(**held(fourth), until=jobs.one("select now()")),
            lambda: caller.doze(queue="q", worker="w"),
            lambda: caller.wake(queue="q", worker="w"),
            lambda: caller.put_job_type(queue="q", job_type="t"),
            lambda: caller.job(queue="q", job_id=running.job_id),
            lambda: caller.count_due(queue="q"),
        ],
        "operate": [
            lambda: caller.pause_queue(queue="q"),
            lambda: caller.resume_queue(queue="q"),
            lambda: caller.cancel(queue="q", job_id=waiting2),
            lambda: caller.job(queue="q", job_id=running.job_id),
            lambda: caller.count_due(queue="q"),
            lambda: caller.make_due(queue="q", job_id=later2),
            lambda: caller.end_lease(queue="q", job_id=fifth.job_id),
        ],
    }  # fmt: skip


SHARED = {("produce", 2), ("produce", 3), ("produce", 4), ("produce", 5), ("work", 10), ("work", 11), ("work", 12),
          ("operate", 2), ("operate", 3), ("operate", 4), ("operate", 5)}  # fmt: skip


def test_a_queue_without_grants_is_open_to_whoever_may_call(jobs, login):
    jobs.put()
    caller = login("stranger")
    for calls in acts(jobs, caller).values():
        for call in calls:
            call()


@pytest.mark.parametrize("may", RIGHTS)
def test_a_grant_is_for_one_right_and_for_members(jobs, login, roles, may):
    jobs.put()
    of_stranger, of_member = acts(jobs, login("stranger")), acts(jobs, login("member"))
    jobs.grant_queue(queue="q", role=roles["team"], may=may)
    for call in itertools.chain(*of_stranger.values()):
        with refused("PA004"):
            call()
    for right, calls in of_member.items():
        for n, call in enumerate(calls):
            if right == may:
                call()
            elif (right, n) not in SHARED:
                with refused("PA004"):
                    call()


def test_the_caller_is_the_role_that_was_set_not_the_login(jobs, login, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    pool = login("both")
    pool.add()
    pool.sql(f'set role "{roles["stranger"]}"')
    with refused("PA004"):
        pool.add()
    pool.sql(f'set role "{roles["member"]}"')
    job_id = pool.add()
    assert pool.find(job_id).created_by == roles["member"]
    pool.sql("reset role")
    assert pool.find(pool.add()).created_by == roles["both"]


def test_set_local_role_ends_with_the_transaction(jobs, login, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["member"], may="produce")
    pool = login("both")
    with pool.conn.transaction():
        pool.sql(f'set local role "{roles["stranger"]}"')
        with refused("PA004"), pool.conn.transaction():
            pool.add()
    pool.add()


def test_inside_another_security_definer_function_the_caller_is_still_the_session(jobs, own_database, login, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    jobs.sql("""
        create function public.on_behalf() returns void language sql security definer
        as $$ select almanac.enqueue('q', 't') $$""")
    login("member").sql("select public.on_behalf()")
    with refused("PA004"):
        login("stranger").sql("select public.on_behalf()")


def test_one_who_makes_the_queue_does_not_lock_out_the_superuser(jobs, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    jobs.add()


def test_a_restricted_queue_is_set_only_by_those_who_operate_it(jobs, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="operate")
    jobs.sql("set role almanac_admin")
    with refused("PA004"):
        jobs.put(max_running=1)
    jobs.grant_queue(queue="q", role="almanac_admin", may="operate")
    jobs.put(max_running=1)
    jobs.sql("reset role")


def test_a_revoked_right_is_gone_and_the_queue_stays_closed_until_opened(jobs, login, roles):
    jobs.put()
    member, stranger = login("member"), login("stranger")
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    member.add()
    assert jobs.revoke_queue(queue="q", role=roles["team"], may="produce")[0].revoke_queue
    assert not jobs.revoke_queue(queue="q", role=roles["team"], may="produce")[0].revoke_queue
    for caller in (member, stranger):
        with refused("PA004"):
            caller.add()
    jobs.open_queue(queue="q", reason="no secrets any more")
    for caller in (member, stranger):
        caller.add()
    log = jobs.sql(
        "select action, reason from almanac.audit_log where action like '%%queue' and action <> 'put_queue' order by at"
    )
    assert [entry.action for entry in log] == ["grant_queue", "revoke_queue", "open_queue"]


def test_a_queue_that_does_not_exist_cannot_be_opened(jobs):
    with refused("PA001"):
        jobs.open_queue(queue="nope")
    with refused("PA001"):
        jobs.open_queue(queue=None)
    jobs.put()
    jobs.open_queue(queue="q")
    assert jobs.one("select count(*) from almanac.audit where action = 'open_queue'") == 0, "it was open"


def test_a_role_that_was_dropped_gives_no_right_and_no_error(jobs, login, roles, maintenance, worker_id):
    jobs.put()
    name = f"test_{worker_id}_gone"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name}")
    jobs.grant_queue(queue="q", role=name, may="produce")
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    maintenance.execute(f"drop role {name}")
    login("member").add()
    with refused("PA004"):
        login("stranger").add()


def test_what_cannot_be_granted_is_refused(jobs, roles):
    jobs.put()
    with refused("42704"):
        jobs.grant_queue(queue="q", role="nobody; drop table", may="produce")
    with refused("42704"):
        jobs.grant_queue(queue="q", role=None, may="produce")
    with refused("22023"):
        jobs.grant_queue(queue="q", role=roles["team"], may="everything")
    with refused("22023"):
        jobs.grant_queue(queue="q", role=roles["team"], may=None)
    with refused("PA001"):
        jobs.grant_queue(queue="unknown", role=roles["team"], may="work")
    jobs.add()


def test_the_refusal_names_the_line_that_allows_it(jobs, login, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    stranger = login("stranger")
    with refused("PA004") as caught:
        stranger.add()
    jobs.sql(caught.value.diag.message_hint.split(": ", 1)[1])
    stranger.add()


def test_the_audit_names_the_caller_and_not_the_owner(jobs, login, roles):
    jobs.put()
    operator = login("both")
    operator.pause_queue(queue="q", reason="x")
    operator.sql(f'set role "{roles["member"]}"')
    operator.resume_queue(queue="q")
    actors = jobs.sql("select actor from almanac.audit_log where action in ('pause_queue', 'resume_queue') order by at")
    assert {row.actor for row in actors} == {roles["both"], roles["member"]}


# ── a grant means a role, not a name ────────────────────────────────────────────────────────────────────────────────


def test_a_role_that_takes_the_name_of_a_dropped_one_has_no_right(jobs, own_database, dsn, maintenance, worker_id):
    jobs.put()
    name = f"test_{worker_id}_reborn"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login in role almanac_worker, almanac_producer")
    jobs.grant_queue(queue="q", role=name, may="work")
    jobs.grant_queue(queue="q", role=name, may="produce")
    jobs.grant_queue(queue="q", role="almanac_admin", may="produce")
    job_id = jobs.add()
    maintenance.execute(f"drop role {name}")
    maintenance.execute(f"create role {name} login in role almanac_worker, almanac_producer")
    try:
        with psycopg.connect(dsn, user=name, autocommit=True) as conn:
            again = Jobs(conn)
            for call in (again.claim, again.add, lambda: again.job(queue="q", job_id=job_id)):
                with refused("PA004"):
                    call()
            # Some grants still mean the roles they meant: this is no restore, and a name alone gets nothing.
            assert jobs.one("select almanac._bind_grants()") == [name]
            with refused("PA004"):
                again.claim()
            jobs.grant_queue(queue="q", role=name, may="work")
            assert len(again.claim()) == 1
            with refused("PA004"):
                again.add()
            jobs.grant_queue(queue="q", role=name, may="produce")
            again.add()
            assert jobs.one("select almanac._bind_grants()") == []
    finally:
        maintenance.execute(f"drop role {name}")


def test_on_another_server_grants_mean_the_roles_of_these_names(jobs, login, roles):
    jobs.put()
    jobs.grant_queue(queue="q", role=roles["team"], may="produce")
    jobs.grant_queue(queue="q", role=roles["stranger"], may="work")
    # As restored there: other oids, and one of the names is not known.
    jobs.sql("update almanac.queue_grant set role_oid = role_oid::bigint + 100000")
    jobs.sql("update almanac.queue_grant set role = 'left behind' where may = 'work'")
    with refused("PA004"):
        login("member").add()
    assert jobs.one("select almanac._bind_grants()") == ["left behind"]
    login("member").add()
    with refused("PA004"):
        login("stranger").claim()
