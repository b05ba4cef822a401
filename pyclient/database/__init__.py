"""The calls. The only package with SQL in it.

Each call is written once, as a signature: its name and arguments are those of the function in the schema `almanac`,
its return annotation says what comes back. `@call` turns it into something that runs on a sync or an async
connection:

    job = database.enqueue(conn, queue="mail", job_type="send", payload={"to": "a@example.org"})
    jobs = await database.claim_due(aconn, queue="mail", worker="w1", batch_size=10)

An argument that is not given is not sent, so the default is the one the database has.
"""

from pyclient.database.calling import (
    OMIT,
    AsyncConnection,
    Call,
    Connection,
    DatabaseError,
    JsonText,
    call_sql,
    translated,
)
from pyclient.database.calls import (
    ClaimedJob,
    EnqueuedJob,
    FailedJob,
    PreviewedRun,
    cancel,
    claim_due,
    complete,
    complete_many,
    count_due,
    describe_cron,
    doze,
    enqueue,
    enqueue_many,
    fail_with_backoff,
    held,
    next_runs,
    preview_cron,
    put_job_type,
    put_schedule,
    reclaim_expired,
    redrive,
    release,
    report_worker,
    retire_worker,
    snooze,
    start_ticking,
    tick_if_stale,
    wake,
)
from pyclient.database.connecting import (
    AsyncPool,
    Pool,
    answered,
    check,
    connect,
    connect_async,
    connect_worker,
    connect_worker_async,
    lend,
    lend_async,
    pool,
    pool_async,
)
from pyclient.database.installing import (
    bind_grants,
    create_database_if_missing,
    drop_all_except,
    install_errors,
    installed,
    note_version,
    replace_all,
    run_script,
    trust_the_catalog_only,
)
from pyclient.database.rehearsing import (
    SeenJob,
    all_jobs,
    clone_database,
    drop_database,
    dsn_of,
    install_test_clock,
    next_tick_before,
    no_copy,
    set_test_clock,
    tick_until_done,
)
from pyclient.database.working import (
    ClaimArguments,
    Claimed,
    ClaimedRows,
    cancel_held,
    claim_arguments,
    claimed_rows,
    complete_rows,
    doze_for,
    extend_rows,
    fail_rows,
    for_claims,
    for_reports,
    instant,
    json_value,
    listen,
    put_queue_if_missing,
    release_rows,
    rung,
    send_claim,
)

__all__ = [
    "OMIT", "AsyncConnection", "AsyncPool", "Call", "ClaimArguments", "Claimed", "ClaimedJob", "ClaimedRows",
    "Connection", "DatabaseError", "EnqueuedJob", "FailedJob", "JsonText", "Pool", "PreviewedRun", "SeenJob",
    "all_jobs", "answered", "bind_grants", "call_sql", "cancel", "cancel_held", "check", "claim_arguments",
    "claim_due", "claimed_rows", "clone_database", "complete", "complete_many", "complete_rows",
    "connect", "connect_async", "connect_worker", "connect_worker_async", "count_due", "create_database_if_missing",
    "describe_cron", "doze", "doze_for", "drop_all_except", "drop_database", "dsn_of", "enqueue", "enqueue_many",
    "extend_rows", "fail_rows", "fail_with_backoff", "for_claims", "for_reports", "held", "install_errors",
    "install_test_clock", "installed", "instant", "json_value", "lend", "lend_async", "listen", "next_runs",
    "next_tick_before", "no_copy", "note_version", "pool", "pool_async", "preview_cron", "put_job_type",
    "put_queue_if_missing", "put_schedule", "reclaim_expired", "redrive", "release", "release_rows", "replace_all",
    "report_worker", "retire_worker", "run_script", "rung", "send_claim", "set_test_clock", "snooze", "start_ticking",
    "tick_if_stale", "tick_until_done", "translated", "trust_the_catalog_only", "wake",
]  # fmt: skip
