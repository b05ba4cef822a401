-- 16 types: the rows that functions return. Callers name columns, so new ones go to the end.

create type almanac.enqueued_job as (queue text, job_id bigint, created boolean);
comment on type almanac.enqueued_job is 'Which job stands for the call; created is false if a dedup_key found one.';

create type almanac.claimed_job as (
    queue            text,
    job_id           bigint,
    job_type         text,
    payload          jsonb,
    attempt          integer,
    max_attempts     integer,
    due_at           timestamptz,
    lateness         interval,
    lease_token      bigint,
    lease_expires_at timestamptz,
    idempotency_key  text,
    attempt_key      text,
    schedule         text,
    tick_at          timestamptz,
    caught_up        boolean,
    priority         smallint,
    concurrency_key  text,
    headers          jsonb,
    created_at       timestamptz
);
comment on type almanac.claimed_job is 'Everything a handler needs.';

create type almanac.extended_lease as (
    queue text, job_id bigint, lease_token bigint, lease_expires_at timestamptz, cancel_requested_at timestamptz);
comment on type almanac.extended_lease is 'A lease that goes on; cancel_requested_at tells the worker to let go.';

create type almanac.failed_job as (state text, due_at timestamptz, attempt integer);
comment on type almanac.failed_job is 'What a failure led to: retrying at due_at, dead, or cancelled.';

create type almanac.found_job as (
    queue               text,
    job_id              bigint,
    job_type            text,
    state               text,
    priority            smallint,
    due_at              timestamptz,
    payload             jsonb,
    attempt             integer,
    max_attempts        integer,
    dedup_key           text,
    concurrency_key     text,
    idempotency_key     text,
    schedule            text,
    tick_at             timestamptz,
    caught_up           boolean,
    leased_by           text,
    claimed_at          timestamptz,
    lease_expires_at    timestamptz,
    cancel_requested_at timestamptz,
    last_error          text,
    result              jsonb,
    external_id         text,
    created_at          timestamptz,
    created_by          text,
    finished_at         timestamptz,
    headers             jsonb
);
comment on type almanac.found_job is 'A job wherever it is: live, or in history.';

-- A session's own note of how far into each priority level it has claimed. Kept in a setting of the session, not in a
-- table: a row that every claim updates would itself become the bloat that the note is there to avoid.
create type almanac.claim_memory as (
    queue            text,
    priorities       smallint[],
    due_at           timestamptz[],
    id               bigint[],
    backdated        bigint,
    looked_back_at   timestamptz,
    look_back_cost   interval,
    came_short       boolean
);
comment on type almanac.claim_memory is 'Where the last claim of this session stopped, per priority.';

create type almanac.metric as (metric text, queue text, value double precision);
comment on type almanac.metric is 'One figure for a monitoring system; queue is null for those of the whole database.';
comment on column almanac.metric.metric is 'What is measured, with its unit in the name.';
comment on column almanac.metric.queue is 'The queue it belongs to, if one.';
comment on column almanac.metric.value is 'The figure.';
