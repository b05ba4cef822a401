"""90 grants: for each role every function and every relation is tried, and exactly the granted ones work.

Tried for real, as logins without superuser, each call in a transaction that is rolled back. Arguments are nulls: a call
that is allowed gets as far as complaining about them; one that is not ends with insufficient_privilege.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.conftest import TEMPLATE
from tests.jobs import Jobs, held

ROLES = ("almanac_producer", "almanac_worker", "almanac_operator", "almanac_observer", "almanac_admin")
NOBODY = "nobody"
REFUSED = "42501"

# ── what each role may do ───────────────────────────────────────────────────────────────────────────────────────────

EVERYBODY = {
    "clock", "attempt_key", "parse_cron", "next_run", "next_runs", "previous_run", "describe_cron", "preview_cron",
    "revision", "installed_version", "local_time",
    "held",
}  # fmt: skip
LOOKING = {"explain_tick", "health", "alerts", "metrics"}
PRODUCER = {"enqueue", "enqueue_many", "cancel", "redrive", "make_due", "job", "put_schedule"}
WORKER = {
    "claim_due", "extend_lease", "extend_leases", "release", "snooze", "complete", "complete_many",
    "fail_with_backoff", "cancel", "job", "doze", "wake", "count_due", "report_worker", "retire_worker",
    "put_job_type", "reclaim_expired", "put_schedule", "advance_schedule", "tick", "tick_if_stale",
}  # fmt: skip
OPERATOR = {
    "pause_queue", "resume_queue", "cancel", "redrive", "make_due", "job", "count_due", "reclaim_expired", "end_lease",
    "put_schedule", "put_schedule_template", "revert_schedule", "pause_schedule", "resume_schedule",
    "trigger_schedule", "reschedule",
    "backfill_schedule", "drop_schedule", "advance_schedule", "tick", "start_ticking", "stop_ticking", "hold",
    "end_hold",
}  # fmt: skip
ADMIN = {"put_queue", "drop_queue", "put_job_type", "grant_queue", "revoke_queue", "open_queue", "adopt_copy"}

FUNCTIONS = {
    "almanac_producer": EVERYBODY | PRODUCER,
    "almanac_worker": EVERYBODY | WORKER,
    "almanac_operator": EVERYBODY | LOOKING | OPERATOR,
    "almanac_observer": EVERYBODY | LOOKING,
    "almanac_admin": EVERYBODY | LOOKING | PRODUCER | WORKER | OPERATOR | ADMIN,
    NOBODY: set(),
}
VIEWS = {
    "queue_overview", "job_overview", "late_job", "running_job", "stuck_job", "dead_job", "worker_overview",
    "attempt_log", "audit_log", "schedule_overview", "upcoming_tick", "tick_log", "schedule_history",
    "schedule_template_overview",
}  # fmt: skip
READABLE = {
    "almanac_producer": set(), "almanac_worker": set(), "almanac_operator": VIEWS, "almanac_observer": VIEWS,
    "almanac_admin": VIEWS, NOBODY: set(),
}  # fmt: skip


OWNER = "owner"


@pytest.fixture(scope="module")
def logins(clone: Any, maintenance: Any, worker_id: str) -> Iterator[dict[str, Jobs]]:
    """A session for each role, as a login that holds nothing else, and the owner's, in a database of their own."""
    names = {role: f"test_{worker_id}_only_{role}" for role in (*ROLES, NOBODY)}
    for role, name in names.items():
        maintenance.execute(f"drop role if exists {name}")
        maintenance.execute(f"create role {name} login" + (f" in role {role}" if role != NOBODY else ""))
    with clone(TEMPLATE) as dsn, contextlib.ExitStack() as stack:
        # Something in every view: a function in a view is only called where there is a row.
        admin = Jobs(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        admin.put()
        admin.dead()
        admin.report_worker(worker="w", host="h", pid=1, version="1", queues=["q"], concurrency=1, running=0)
        admin.put_schedule(queue="q", name="s", cron="* * * * *", job_type="t")
        admin.put_schedule_template(name="nightly", cron="0 3 * * *")
        admin.sql("update test_clock.setting set \"offset\" = '10 minutes'")
        admin.tick()
        admin.running(lease=timedelta(seconds=1))
        admin.add()
        admin.sql("update test_clock.setting set \"offset\" = '20 minutes'")
        for view in VIEWS:
            assert admin.one(f"select count(*) > 0 from almanac.{view}"), view
        yield {OWNER: admin} | {
            role: Jobs(stack.enter_context(psycopg.connect(dsn, user=name, autocommit=True)))
            for role, name in names.items()
        }
    for name in names.values():
        maintenance.execute(f"drop role {name}")


def outcome(caller: Jobs, statement: str) -> str:
    """The SQLSTATE, or "" where it works. Never committed."""
    try:
        with caller.conn.transaction(force_rollback=True):
            caller.conn.execute("set local statement_timeout = '20s'")
            caller.conn.execute(statement.encode())
    except psycopg.Error as error:
        return error.sqlstate or repr(error)
    return ""


@pytest.mark.parametrize("role", [*ROLES, NOBODY])
def test_exactly_the_granted_functions_can_be_called(logins, role):
    # From a subquery that cannot be folded away: a strict function of constant nulls is not even looked at.
    functions = logins[OWNER].sql("""
        select p.proname as name,
               case when p.prokind = 'p' then 'call almanac.' || p.proname || '()'
                    else 'select almanac.' || quote_ident(p.proname) || '(' || coalesce(a.names, '') || ') from (select'
                         || coalesce(' ' || a.nulls, ' 1') || ' offset 0) nulls' end as call
          from pg_proc p
          left join lateral (
            select string_agg(case when p.provariadic <> 0 and n = p.pronargs then 'variadic ' else '' end
                              || 'nulls.a' || n, ', ' order by n) as names,
                   string_agg('null::' || format_type(t, null) || ' as a' || n, ', ' order by n) as nulls
              from unnest(p.proargtypes::oid[]) with ordinality as arguments (t, n)) a on true
         where p.pronamespace = 'almanac'::regnamespace and p.prorettype is distinct from 'trigger'::regtype
         order by 1""")
    assert len(functions) > 60
    assert {function.name for function in functions} >= FUNCTIONS[role], "the list here names what does not exist"
    allowed = {function.name for function in functions if outcome(logins[role], function.call) != REFUSED}
    assert allowed == FUNCTIONS[role]


@pytest.mark.parametrize("role", [*ROLES, NOBODY])
def test_exactly_the_granted_views_can_be_read_and_nothing_can_be_written(logins, role):
    relations = logins[OWNER].sql("""
        select c.relname as name, c.relkind::text as kind,
               (select quote_ident((array_agg(column_name order by is_updatable desc, column_name))[1])
                  from information_schema.columns
                 where table_schema = 'almanac' and table_name = c.relname and is_identity = 'NO') as a_column
          from pg_class c
         where c.relnamespace = 'almanac'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
         order by 1""")
    assert len(relations) > 25
    caller = logins[role]
    readable = {r.name for r in relations if outcome(caller, f'table almanac."{r.name}"') != REFUSED}
    assert readable == READABLE[role]
    written = {
        statement
        for r in relations
        for statement in (
            [f"select nextval('almanac.{r.name}')", f"select setval('almanac.{r.name}', 1)"]
            if r.kind == "S"
            else [
                f'insert into almanac."{r.name}" default values',
                f'update almanac."{r.name}" set {r.a_column} = null',
                f'delete from almanac."{r.name}"',
                f'truncate almanac."{r.name}"',
                f'lock table almanac."{r.name}" in access exclusive mode',
                f'create index on almanac."{r.name}" ({r.a_column})',
            ]
        )
        # A view that joins cannot be written, truncated or indexed by anybody.
        if outcome(caller, statement) not in (REFUSED, "42809", "55000")
    }
    assert written == set()


@pytest.mark.parametrize("role", [*ROLES, NOBODY])
def test_nobody_can_put_things_into_the_schema_or_change_what_is_there(logins, role):
    for statement in (
        "create table almanac.mine ()",
        "create function almanac.mine() returns int language sql return 1",
        "create or replace function almanac.clock() returns timestamptz language sql return now()",
        "alter function almanac.clock() owner to current_user",
        "drop function almanac.attempt_key(bigint, integer, bigint)",
        "alter table almanac.job disable trigger all",
        "drop view almanac.audit_log",
        "drop schema almanac cascade",
        "grant almanac_admin to current_user",
    ):
        assert outcome(logins[role], statement) in (REFUSED, "3F000"), statement


def test_what_public_has_is_nothing(jobs):
    assert (
        jobs.sql("""
        select 'function ' || p.oid::regprocedure as what from pg_proc p
         where p.pronamespace = 'almanac'::regnamespace and has_function_privilege('public', p.oid, 'execute')
        union all
        select 'relation ' || c.oid::regclass from pg_class c
         where c.relnamespace = 'almanac'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f')
           and has_table_privilege('public', c.oid, 'select, insert, update, delete, truncate')
        union all
        select 'schema' where has_schema_privilege('public', 'almanac', 'usage, create')""")
        == []
    )


# ── set role ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_behind_a_pool_the_role_that_was_set_decides(jobs, dsn, maintenance, worker_id):
    name = f"test_{worker_id}_pool"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login noinherit in role {', '.join(ROLES)}")
    try:
        jobs.put()
        with psycopg.connect(dsn, user=name, autocommit=True) as conn:
            pool = Jobs(conn)
            calls = {
                "enqueue": "select almanac.enqueue('q', 't')",
                "claim_due": "select almanac.claim_due('q', 'w')",
                "pause_queue": "select almanac.pause_queue('q')",
                "put_queue": "select almanac.put_queue('q')",
                "health": "select almanac.health()",
            }
            assert {call for call, text in calls.items() if outcome(pool, text) != REFUSED} == set()
            for role in ROLES:
                pool.sql(f"set role {role}")
                allowed = {call for call, text in calls.items() if outcome(pool, text) != REFUSED}
                assert allowed == FUNCTIONS[role] & set(calls)
            pool.sql("set role almanac_producer")
            job_id = pool.add()
            assert jobs.find(job_id).created_by == "almanac_producer"
    finally:
        maintenance.execute(f"drop role {name}")


# ── what a caller plants ────────────────────────────────────────────────────────────────────────────────────────────

TRAPS = """
create function evil.trap() returns void language plpgsql as $$
begin raise exception 'trapped as %', current_user; end $$;
create function evil.eq(text, text) returns boolean language plpgsql as
    $$ begin perform evil.trap(); return true; end $$;
create operator evil.= (leftarg = text, rightarg = text, function = evil.eq);
create operator evil.<> (leftarg = text, rightarg = text, function = evil.eq);
create operator evil.~ (leftarg = text, rightarg = text, function = evil.eq);
create operator evil.!~ (leftarg = text, rightarg = text, function = evil.eq);
create function evil.eq(bigint, bigint) returns boolean language plpgsql as
    $$ begin perform evil.trap(); return true; end $$;
create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.eq);
create operator evil.<> (leftarg = bigint, rightarg = bigint, function = evil.eq);
create function evil.eq(timestamptz, timestamptz) returns boolean language plpgsql as
    $$ begin perform evil.trap(); return true; end $$;
create operator evil.<= (leftarg = timestamptz, rightarg = timestamptz, function = evil.eq);
create operator evil.> (leftarg = timestamptz, rightarg = timestamptz, function = evil.eq);
create function evil.cat(text, text) returns text language plpgsql as $$ begin perform evil.trap(); end $$;
create operator evil.|| (leftarg = text, rightarg = text, function = evil.cat);
create function evil.length(text) returns integer language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.jsonb_typeof(jsonb) returns text language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.now() returns timestamptz language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.clock_timestamp() returns timestamptz language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.clock() returns timestamptz language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.random() returns double precision language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.pg_notify(text, text) returns void language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.current_setting(text) returns text language plpgsql as $$ begin perform evil.trap(); end $$;
create function evil.pg_has_role(text, text, text) returns boolean language plpgsql as
    $$ begin perform evil.trap(); end $$;
create function evil.to_regrole(text) returns regrole language plpgsql as $$ begin perform evil.trap(); end $$;
"""

# A caller's own temporary schema comes before pg_catalog wherever it is not named in the path: a type of an everyday
# name there would be the type of a variable, and its check would be run by the owner.
TEMPORARY_TRAPS = """
create function pg_temp.is_trap() returns boolean language plpgsql as $$
begin
    if current_user <> session_user then raise exception 'trapped as %', current_user; end if;
    return true;
end $$;
do $$
declare
    v_type  name;
    v_table name;
begin
    for v_type in select typname from pg_catalog.pg_type
                   where typnamespace = 'pg_catalog'::regnamespace and typtype = 'b' and typelem = 0 loop
        execute pg_catalog.format('create domain pg_temp.%I as pg_catalog.%I check (pg_temp.is_trap())',
                                  v_type, v_type);
    end loop;
    for v_table in select relname from pg_catalog.pg_class
                    where relnamespace = 'pg_catalog'::regnamespace and relkind in ('r', 'v') loop
        execute pg_catalog.format('create temporary table %I (trap integer)', v_table);
    end loop;
end $$;
"""


def test_what_a_caller_plants_in_its_search_path_is_never_run(jobs, own_database, dsn, maintenance, worker_id, clock):
    name = f"test_{worker_id}_planter"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login in role almanac_admin, almanac_operator")
    try:
        jobs.sql(f"create schema evil authorization {name}")
        jobs.sql(f"grant temporary on database {jobs.conn.info.dbname} to {name}")
        with psycopg.connect(dsn, user=name, autocommit=True) as conn:
            caller = Jobs(conn)
            conn.execute(TRAPS.encode())
            tables = jobs.sql(
                "select relname from pg_class where relnamespace = 'almanac'::regnamespace and relkind in ('r', 'p')"
            )
            for table in tables:
                caller.sql(f'create temporary table "{table.relname}" (trap text)')
            caller.sql("create temporary sequence job_id_seq")
            conn.execute(TEMPORARY_TRAPS.encode())
            caller.sql("set search_path = evil, pg_temp, pg_catalog, almanac")
            with pytest.raises(psycopg.Error, match="trapped as"):
                caller.sql("select 'a'::text = 'b'::text")

            caller.put_queue(queue="q", max_running=5, rate_limit=100, rate_interval="1 minute")
            caller.put_job_type(queue="q", job_type="t", lease="1 minute")
            caller.grant_queue(queue="q", role=name, may="produce")
            caller.grant_queue(queue="q", role=name, may="work")
            caller.grant_queue(queue="q", role=name, may="operate")
            caller.doze(queue="q", worker="sleeper")
            caller.enqueue_many(
                queue="q", job_type="t", payloads=[{}] * 4, dedup_keys=list("abcd"), concurrency_keys=list("kkll")
            )
            caller.enqueue(queue="q", job_type="t", dedup_key="a", dedup_for="1 hour", headers={})
            first, second = caller.claim(batch_size=4)
            caller.extend_lease(**held(first))
            caller.complete(**held(first), result={})
            caller.fail_with_backoff(**held(second), error="x", permanent=True)
            caller.redrive(queue="q", job_id=second.job_id)
            clock.advance(seconds=1)
            third, fourth = caller.claim(batch_size=4)
            caller.release(**held(third))
            caller.cancel(queue="q", job_id=fourth.job_id)
            caller.snooze(**held(fourth), until=clock.now())
            assert caller.find(fourth.job_id).state == "cancelled"
            caller.pause_queue(queue="q")
            caller.resume_queue(queue="q")
            caller.reclaim_expired()
            caller.wake(queue="q", worker="sleeper")
            caller.report_worker(worker="w", host="h", pid=1, version="1", queues=["q"], concurrency=1, running=0)
            caller.retire_worker(worker="w")
            caller.put_schedule(queue="q", name="s", cron="* * * * *", job_type="t")
            caller.tick()
            caller.health()
            caller.alerts()
            for view in VIEWS:
                caller.conn.execute(f"select count(*) from (table almanac.{view}) v".encode())
            caller.revoke_queue(queue="q", role=name, may="work")
            caller.open_queue(queue="q")
            for table in tables:
                count = caller.conn.execute(f'select count(*) from pg_temp."{table.relname}"'.encode()).fetchone()
                assert count == (0,)
    finally:
        jobs.sql("drop schema if exists evil cascade")
        jobs.sql(f"drop owned by {name}")
        maintenance.execute(f"drop role {name}")


def test_every_function_that_runs_as_its_owner_has_a_pinned_search_path(jobs):
    open_ones = jobs.sql("""
        select p.oid::regprocedure::text as name from pg_proc p
         where p.pronamespace = 'almanac'::regnamespace and p.prosecdef
           and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)""")
    assert open_ones == []
