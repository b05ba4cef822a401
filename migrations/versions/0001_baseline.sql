-- squawk-ignore-file require-concurrent-index-creation, require-lock-timeout, adding-required-field, ban-create-domain-with-constraint

-- from 10_queue.sql
-- 10 queue: the unit of isolation, of rights and of scale-out. Every table that holds work starts its key with it.
-- Text in keys is collate "C". A language's order comes from the operating system and changes with its versions: a
-- unique index from before such a change could let a tick or a key in a second time.

create table almanac.queue (
    queue               text collate "C" not null,
    lease               interval not null default '5 minutes',
    max_attempts        integer not null default 5,
    base_delay          interval not null default '60 seconds',
    max_delay           interval not null default '1 day',
    jitter              double precision not null default 0,
    retention           interval not null default '30 days',
    max_running         integer,
    max_running_per_key integer not null default 1,
    rate_limit          integer,
    rate_interval       interval,
    max_payload_bytes   integer not null default 1048576,
    key_prefix          text collate "C" not null,
    priorities          smallint[] not null default '{0}',
    keyed_at            timestamptz,
    restricted_at       timestamptz,
    held_at             timestamptz,
    paused_at           timestamptz,
    paused_by           text,
    pause_reason        text,
    paused_until        timestamptz,
    created_at          timestamptz not null,
    created_by          text not null,
    constraint queue_pkey primary key (queue),
    constraint queue_name_is_readable check (queue ~ E'\\S' and length(queue) <= 200),
    constraint queue_lease_is_sane check (lease >= interval '1 second' and lease <= interval '30 days'),
    constraint queue_max_attempts_is_positive check (max_attempts between 1 and 1000000),
    constraint queue_delays_are_sane check (
        base_delay >= interval '0' and max_delay >= base_delay and max_delay <= interval '3650 days'),
    constraint queue_jitter_is_a_fraction check (jitter between 0 and 1),
    constraint queue_retention_is_sane check (retention >= interval '1 hour' and retention <= interval '36500 days'),
    constraint queue_max_running_is_positive check (max_running > 0),
    constraint queue_max_running_per_key_is_positive check (max_running_per_key > 0),
    constraint queue_rate_is_whole check (
        (rate_limit is null) = (rate_interval is null) and rate_limit > 0
        and rate_interval between interval '1 millisecond' and interval '366 days'),
    constraint queue_max_payload_bytes_is_sane check (max_payload_bytes between 2 and 104857600),
    constraint queue_pause_is_whole check (
        (paused_at is null) = (paused_by is null)
        and (paused_at is not null or (pause_reason is null and paused_until is null)))
);
comment on table almanac.queue is 'A named line of work with its defaults and limits.';
comment on column almanac.queue.queue is 'Any text of up to 200 characters that is not blank.';
comment on column almanac.queue.lease is 'How long a claim lasts unless the job or the caller says otherwise.';
comment on column almanac.queue.max_attempts is 'Attempts a job gets unless its type or the job says otherwise.';
comment on column almanac.queue.base_delay is 'Delay before the second attempt; doubles with each further one.';
comment on column almanac.queue.max_delay is 'Where doubling stops.';
comment on column almanac.queue.jitter is 'Up to this fraction of the delay is added at random.';
comment on column almanac.queue.retention is 'How long finished jobs, attempts and ticks are kept.';
comment on column almanac.queue.max_running is 'Most jobs running at once over the whole fleet; null: no limit.';
comment on column almanac.queue.max_running_per_key is 'Most jobs running at once with the same concurrency_key.';
comment on column almanac.queue.rate_limit is
    'Most claims per rate_interval (token bucket of this size); null: no limit.';
comment on column almanac.queue.rate_interval is 'The time in which rate_limit tokens flow back.';
comment on column almanac.queue.max_payload_bytes is 'Larger payloads, headers included, are refused.';
comment on column almanac.queue.key_prefix is
    'What the idempotency keys of its jobs begin with: its name and a random part. It moves with the queue.';
comment on column almanac.queue.priorities is 'Priorities ever used here, highest first: the levels a claim looks at.';
comment on column almanac.queue.keyed_at is 'When a concurrency_key was first used here; claims then check keys.';
comment on column almanac.queue.restricted_at is 'When the first grant was made; since then only grantees may act.';
comment on column almanac.queue.held_at is 'As in installation; here too, because a claim reads its queue anyway.';
comment on column almanac.queue.paused_at is 'Since when nothing is claimed.';
comment on column almanac.queue.paused_by is 'Who paused it.';
comment on column almanac.queue.pause_reason is 'Why, in the words of whoever paused it.';
comment on column almanac.queue.paused_until is 'When the pause ends by itself; null: when somebody resumes it.';
comment on column almanac.queue.created_at is 'When the queue was made.';
comment on column almanac.queue.created_by is 'Who made it.';

comment on constraint queue_lease_is_sane on almanac.queue is 'lease is 1 second to 30 days.';
comment on constraint queue_max_attempts_is_positive on almanac.queue is 'max_attempts is 1 to 1000000.';
comment on constraint queue_delays_are_sane on almanac.queue is
    'base_delay is 0 to max_delay, max_delay is base_delay to 3650 days.';
comment on constraint queue_jitter_is_a_fraction on almanac.queue is 'jitter is a fraction from 0 to 1.';
comment on constraint queue_retention_is_sane on almanac.queue is 'retention is 1 hour to 36500 days.';
comment on constraint queue_max_running_is_positive on almanac.queue is 'max_running is at least 1.';
comment on constraint queue_max_running_per_key_is_positive on almanac.queue is 'max_running_per_key is at least 1.';
comment on constraint queue_rate_is_whole on almanac.queue is
    'rate_limit and rate_interval go together: at least 1 job in 1 millisecond to 366 days.';
comment on constraint queue_max_payload_bytes_is_sane on almanac.queue is 'max_payload_bytes is 2 to 104857600.';

-- Apart from the queue's own row, so that a claim in an open transaction does not hold up pause_queue.
create table almanac.queue_turn (
    queue       text collate "C" not null,
    tokens      double precision,
    refilled_at timestamptz,
    constraint queue_turn_pkey primary key (queue),
    constraint queue_turn_bucket_is_whole check ((tokens is null) = (refilled_at is null) and tokens >= 0)
) with (fillfactor = 50);
comment on table almanac.queue_turn is
    'One row for each queue. Its lock is the turn of a claim within limits; a rate limit keeps its token bucket here.';
comment on column almanac.queue_turn.queue is 'Whose turn.';
comment on column almanac.queue_turn.tokens is 'Claims that may still be made, as of refilled_at; null: no rate limit.';
comment on column almanac.queue_turn.refilled_at is 'When tokens was last computed.';

create table almanac.queue_grant (
    queue      text collate "C" not null,
    role       text collate "C" not null,
    role_oid   oid not null,
    may        text collate "C" not null,
    granted_at timestamptz not null,
    granted_by text not null,
    constraint queue_grant_pkey primary key (queue, role, may),
    constraint queue_grant_right_is_known check (may in ('produce', 'work', 'operate'))
);
comment on table almanac.queue_grant is
    'Who may act on a restricted queue. A queue without a row here is open to every role that may call the function.';
comment on column almanac.queue_grant.queue is 'The queue.';
comment on column almanac.queue_grant.role is 'A database role; its members are covered.';
comment on column almanac.queue_grant.role_oid is
    'The same role. Both must match: a role that takes the name of a dropped one has no right.';
comment on column almanac.queue_grant.may is 'produce, work or operate.';
comment on column almanac.queue_grant.granted_at is 'When it was granted.';
comment on column almanac.queue_grant.granted_by is 'Who granted it.';

create table almanac.job_type (
    queue        text collate "C" not null,
    job_type     text collate "C" not null,
    lease        interval,
    max_attempts integer,
    base_delay   interval,
    max_delay    interval,
    jitter       double precision,
    schema       jsonb,
    description  text,
    changed_at   timestamptz not null,
    changed_by   text not null,
    constraint job_type_pkey primary key (queue, job_type),
    constraint job_type_name_is_readable check (job_type ~ E'\\S' and length(job_type) <= 200),
    constraint job_type_lease_is_sane check (lease >= interval '1 second' and lease <= interval '30 days'),
    constraint job_type_max_attempts_is_positive check (max_attempts between 1 and 1000000),
    constraint job_type_delays_are_sane check (
        base_delay >= interval '0' and base_delay <= interval '3650 days'
        and max_delay >= interval '0' and max_delay <= interval '3650 days' and base_delay <= max_delay),
    constraint job_type_jitter_is_a_fraction check (jitter between 0 and 1)
);
comment on table almanac.job_type is
    'Optional: what differs for one type of job, and what its payload looks like. Others use the queue''s defaults.';
comment on column almanac.job_type.queue is 'The queue.';
comment on column almanac.job_type.job_type is 'What workers dispatch on.';
comment on column almanac.job_type.lease is 'Overrides the queue''s lease for jobs enqueued from now on.';
comment on column almanac.job_type.max_attempts is 'Overrides the queue''s max_attempts for jobs enqueued from now on.';
comment on column almanac.job_type.base_delay is 'Overrides the queue''s base_delay.';
comment on column almanac.job_type.max_delay is 'Overrides the queue''s max_delay.';
comment on column almanac.job_type.jitter is 'Overrides the queue''s jitter.';
comment on column almanac.job_type.schema is 'JSON schema of the payload, published by the client for people to read.';
comment on column almanac.job_type.description is 'What the job does, for people.';
comment on column almanac.job_type.changed_at is 'When it was last changed.';
comment on column almanac.job_type.changed_by is 'Who changed it.';
comment on constraint job_type_lease_is_sane on almanac.job_type is 'lease is 1 second to 30 days.';
comment on constraint job_type_max_attempts_is_positive on almanac.job_type is 'max_attempts is 1 to 1000000.';
comment on constraint job_type_delays_are_sane on almanac.job_type is
    'base_delay is 0 to max_delay, max_delay is base_delay to 3650 days.';
comment on constraint job_type_jitter_is_a_fraction on almanac.job_type is 'jitter is a fraction from 0 to 1.';

-- from 11_job.sql
-- 11 job: live work only. A finished job leaves this table for job_history in the transaction that finishes it.

-- Checks of one column are domains: checked when a value is given, read from the catalog once a session. Checks of a
-- table are parsed by each statement that writes, and asked again by each UPDATE: a claim would read every payload.
create domain almanac.job_payload as jsonb
    constraint job_payload_is_object_or_array check (jsonb_typeof(value) in ('object', 'array'));
comment on domain almanac.job_payload is 'What a job can be given: a JSON object or array.';
create domain almanac.live_state as text collate "C"
    constraint live_state_is_known check (value in ('blocked', 'scheduled', 'running', 'retrying'));
comment on domain almanac.live_state is 'State of a job that is not finished.';
-- Longer, and with four bytes to a character, it would not fit into job_unpark_idx beside queue and job_type.
create domain almanac.concurrency_key as text collate "C"
    constraint concurrency_key_is_readable check (value ~ E'\\S' and length(value) <= 200);
comment on domain almanac.concurrency_key is 'Jobs with the same one run so many at a time.';

-- Fixed-width columns come first: PostgreSQL finds those before the first text or null without walking the row.
create table almanac.job (
    id                  bigint generated by default as identity,
    due_at              timestamptz not null,
    lease_token         bigint not null default 0,
    created_at          timestamptz not null,
    attempt             integer not null default 0,
    max_attempts        integer not null,
    priority            smallint not null default 0,
    caught_up           boolean not null default false,
    queue               text collate "C" not null,
    state               almanac.live_state not null default 'scheduled',
    job_type            text collate "C" not null,
    created_by          text collate "C" not null,
    payload             almanac.job_payload not null default '{}',
    leased_by           text collate "C",
    claimed_at          timestamptz,
    lease_expires_at    timestamptz,
    parked_at           timestamptz,
    counted_at          timestamptz,
    cancel_requested_at timestamptz,
    base_delay          interval,
    max_delay           interval,
    lease               interval,
    tick_at             timestamptz,
    schedule            text collate "C",
    dedup_key           text collate "C",
    concurrency_key     almanac.concurrency_key,
    idempotency_key     text collate "C",
    headers             jsonb,
    cancel_requested_by text collate "C",
    cancel_reason       text,
    last_error          text,
    constraint job_pkey primary key (queue, id),
    constraint job_lease_only_while_running check (
        case when state = 'running'
             then num_nulls(leased_by, claimed_at, lease_expires_at, nullif(lease_token, 0), nullif(attempt, 0)) = 0
                  and parked_at is null
             else num_nonnulls(leased_by, claimed_at, lease_expires_at, counted_at, cancel_requested_at) = 0 end),
    constraint job_attempt_within_max check (attempt >= 0 and greatest(attempt, 1) <= max_attempts),
    constraint job_due_at_is_finite check (isfinite(due_at))
) with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.2);
-- In a queue without limits, to claim a job changes no column that an index of this table knows, state least of all,
-- and finds room for the new version in the same page, which is filled to less than half for that: so no index gets an
-- entry (a heap-only update). To extend a lease likewise, in any queue.

-- A claim reads each priority level from its oldest due entry on; jobs of the future lie behind the ones that are due.
-- Those that run stay in it until they end, and claims pass over them.
create index job_claim_due_idx on almanac.job (queue, priority, due_at, id)
    where parked_at is null and counted_at is null;
-- How many run, and how many of a key, where that is limited, and whose lease may have ended there. What runs in a
-- queue without limits is in claim instead.
create index job_counted_idx on almanac.job (queue, concurrency_key, id) where counted_at is not null;
-- By type, because a freed place is offered to the first parked job of each: workers may be for some types only.
create index job_unpark_idx on almanac.job (queue, concurrency_key, job_type, priority desc, due_at, id)
    where parked_at is not null;
create index job_schedule_idx on almanac.job (queue, schedule) where schedule is not null;

comment on table almanac.job is 'Live jobs: waiting, running or to be retried.';
comment on column almanac.job.queue is 'The queue it belongs to.';
comment on column almanac.job.id is 'Identifies the job within its queue, over all its lives.';
comment on column almanac.job.job_type is 'What workers dispatch on.';
comment on column almanac.job.state is 'blocked, scheduled, running or retrying; the other states live in job_history.';
comment on column almanac.job.priority is 'Higher is claimed first.';
comment on column almanac.job.due_at is 'Not claimed earlier than this.';
comment on column almanac.job.payload is 'What the handler gets.';
comment on column almanac.job.attempt is 'Attempts consumed, the running one included.';
comment on column almanac.job.max_attempts is 'When attempt reaches this, the next failure is final.';
comment on column almanac.job.base_delay is 'Overrides the type''s and the queue''s.';
comment on column almanac.job.max_delay is 'Overrides the type''s and the queue''s.';
comment on column almanac.job.lease is 'Overrides the queue''s lease; from the job type when enqueued.';
comment on column almanac.job.dedup_key is 'While held (see dedup), no second job is made with this key.';
comment on column almanac.job.concurrency_key is 'At most queue.max_running_per_key jobs with this key run at once.';
comment on column almanac.job.idempotency_key is
    'Names the effect towards the outside; null: derived from queue, id and created_at.';
comment on column almanac.job.headers is 'What the enqueuer passes along beside the payload, such as a trace context.';
comment on column almanac.job.schedule is 'The schedule that made it, if one did.';
comment on column almanac.job.tick_at is 'The tick of that schedule it stands for.';
comment on column almanac.job.caught_up is 'True when the tick was decided late, after downtime or by backfill.';
comment on column almanac.job.lease_token is 'The last token issued; grows with every claim, also over lives.';
comment on column almanac.job.leased_by is 'The worker that holds the lease.';
comment on column almanac.job.claimed_at is 'When the running attempt was claimed.';
comment on column almanac.job.lease_expires_at is 'When the lease ends unless it is extended.';
comment on column almanac.job.parked_at is
    'Set aside by a claim because its concurrency_key was busy; cleared when the key is free.';
comment on column almanac.job.counted_at is
    'Set while it runs, if it was claimed within limits: it is counted towards max_running and its concurrency_key.';
comment on column almanac.job.cancel_requested_at is 'The worker is told at its next extend_lease.';
comment on column almanac.job.cancel_requested_by is 'Who asked for it.';
comment on column almanac.job.cancel_reason is 'Why.';
comment on column almanac.job.last_error is 'Error of the latest failed or lost attempt.';
comment on column almanac.job.created_at is 'When it was enqueued.';
comment on column almanac.job.created_by is 'Who enqueued it.';

-- Not tied to a transaction and never bloated, unlike a row: a claim only compares it with what it saw last time.
create sequence almanac.backdated_job_seq;
comment on sequence almanac.backdated_job_seq is
    'Drawn from whenever a job becomes claimable with a due_at in the past, so that claims look back to the start.';

-- What runs in a queue without limits: a row for each call that claimed, in place of an index entry for each job. So
-- every running job is either counted or in here, which is how reclaim_expired finds it. A job may be in several rows,
-- and in one after it has ended: it is the row of the job that decides.
create table almanac.claim (
    queue   text collate "C" not null,
    id      bigint generated by default as identity,
    look_at timestamptz not null,
    job_ids bigint[] not null,
    constraint claim_pkey primary key (queue, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index claim_look_idx on almanac.claim (look_at);
comment on table almanac.claim is 'Which jobs were claimed together and may still run.';
comment on column almanac.claim.queue is 'The queue.';
comment on column almanac.claim.id is 'Tells it from others of the queue.';
comment on column almanac.claim.look_at is
    'When reclaim_expired looks at its jobs: soon after the claim, then when the first lease may have ended.';
comment on column almanac.claim.job_ids is 'The jobs.';

create table almanac.dedup (
    queue      text collate "C" not null,
    dedup_key  text collate "C" not null,
    job_id     bigint not null,
    held_until timestamptz,
    constraint dedup_pkey primary key (queue, dedup_key),
    constraint dedup_key_is_readable check (dedup_key ~ E'\\S' and length(dedup_key) <= 400)
);
-- The housekeeper drops windows that have passed.
create index dedup_prune_idx on almanac.dedup (held_until) where held_until is not null;
comment on table almanac.dedup is 'Keys that are taken. Its primary key is what keeps a second job from being made.';
comment on column almanac.dedup.queue is 'The queue.';
comment on column almanac.dedup.dedup_key is 'The key.';
comment on column almanac.dedup.job_id is 'The job that took it.';
comment on column almanac.dedup.held_until is 'End of the sliding window; null: as long as the job lives.';

create table almanac.sleeper (
    queue        text collate "C" not null,
    worker       text collate "C" not null,
    sleeps_until timestamptz not null,
    constraint sleeper_pkey primary key (queue, worker)
) with (fillfactor = 50);
comment on table almanac.sleeper is 'Workers that wait for a notification. Nothing is sent when nobody waits.';
comment on column almanac.sleeper.queue is 'The queue it waits for.';
comment on column almanac.sleeper.worker is 'The worker.';
comment on column almanac.sleeper.sleeps_until is 'Until when enqueue rings for it.';

-- from 12_cron_rule.sql
-- 12 cron_rule: a cron expression after parsing, stored with its schedule so that a tick parses nothing.
-- Bit n of a mask stands for the value n. Every mask is a bigint: no casts on the way to the next run.

create type almanac.cron_rule as (
    second_mask      bigint,
    minute_mask      bigint,
    hour_mask        bigint,
    dom_mask         bigint,
    dom_end_mask     bigint,
    dom_nearest_mask bigint,
    dom_last_weekday boolean,
    month_mask       bigint,
    dow_mask         bigint,
    dow_nth_mask     bigint,
    dow_last_mask    bigint,
    days_must_both   boolean,
    is_wildcard      boolean,
    every_us         bigint
);
comment on type almanac.cron_rule is
    'A parsed cron expression: one bit mask per field plus the day modifiers, or the period of an @every rule.';
comment on column almanac.cron_rule.second_mask is 'Seconds 0-59; only bit 0 in five-field rules.';
comment on column almanac.cron_rule.minute_mask is 'Minutes 0-59.';
comment on column almanac.cron_rule.hour_mask is 'Hours 0-23.';
comment on column almanac.cron_rule.dom_mask is 'Days of the month, bits 1-31.';
comment on column almanac.cron_rule.dom_end_mask is
    'L and L-n: bit 31 - n, so that shifting right by 31 - (length of the month) gives days of that month.';
comment on column almanac.cron_rule.dom_nearest_mask is 'nW: bit n, the weekday nearest to day n in the same month.';
comment on column almanac.cron_rule.dom_last_weekday is 'LW: the last Monday to Friday of the month.';
comment on column almanac.cron_rule.month_mask is 'Months, bits 1-12.';
comment on column almanac.cron_rule.dow_mask is 'Days of the week, bits 0 (Sunday) to 6.';
comment on column almanac.cron_rule.dow_nth_mask is 'n#k: bit 7 * (k - 1) + n, the k-th weekday n of the month.';
comment on column almanac.cron_rule.dow_last_mask is 'nL: bit n, the last weekday n of the month.';
comment on column almanac.cron_rule.days_must_both is
    'True where a day field starts with * or is ?: a day must match both day fields, otherwise either will do.';
comment on column almanac.cron_rule.is_wildcard is
    'True where the minute or the hour field starts with *: runs at every real instant whose local time matches.';
comment on column almanac.cron_rule.every_us is
    '@every: the period in microseconds of elapsed time; all masks are null then.';

-- One line of preview_cron.
create type almanac.previewed_run as (
    run_at     timestamptz,
    local_time timestamp,
    utc_time   timestamp,
    utc_offset text,
    rule_kind  text,
    note       text
);
comment on type almanac.previewed_run is
    'One run of a cron rule: when it is, what the clocks show, and what a change of the clocks does to it.';
comment on column almanac.previewed_run.run_at is 'The instant of the run.';
comment on column almanac.previewed_run.local_time is 'What a clock in the time zone of the rule shows then.';
comment on column almanac.previewed_run.utc_time is 'What a clock in UTC shows then.';
comment on column almanac.previewed_run.utc_offset is 'Local time minus UTC, as +02:00.';
comment on column almanac.previewed_run.rule_kind is
    'wildcard, fixed or elapsed: which of the three behaviours on the day the clocks change applies.';
comment on column almanac.previewed_run.note is 'Set where a gap or an overlap of local time affects this run.';

-- from 13_history.sql
-- 13 history: what became of jobs and attempts, in partitions of one day (UTC) that are dropped whole.
-- Partitions live in almanac_days. A view on one would keep it from being dropped, and no role can name one there.

create domain almanac.final_state as text collate "C"
    constraint final_state_is_known check (value in ('completed', 'dead', 'cancelled'));
comment on domain almanac.final_state is 'State of a job that is finished.';

create table almanac.job_history (
    id                  bigint not null,
    due_at              timestamptz not null,
    lease_token         bigint not null,
    created_at          timestamptz not null,
    finished_at         timestamptz not null,
    attempt             integer not null,
    max_attempts        integer not null,
    priority            smallint not null,
    caught_up           boolean not null,
    queue               text collate "C" not null,
    state               almanac.final_state not null,
    job_type            text collate "C" not null,
    created_by          text collate "C" not null,
    payload             jsonb not null,
    leased_by           text collate "C",
    claimed_at          timestamptz,
    redriven_at         timestamptz,
    base_delay          interval,
    max_delay           interval,
    lease               interval,
    tick_at             timestamptz,
    schedule            text collate "C",
    dedup_key           text collate "C",
    concurrency_key     text collate "C",
    idempotency_key     text collate "C",
    headers             jsonb,
    external_id         text,
    result              jsonb,
    error               text,
    ended_by            text,
    end_reason          text,
    constraint job_history_pkey primary key (queue, id, finished_at),
    constraint job_history_redriven_was_dead check (redriven_at is null or state = 'dead')
) partition by range (finished_at);
create table almanac_days.job_history_default partition of almanac.job_history default;
-- Dead jobs that were not redriven: the dead letters. Completed jobs, the many, are not in it.
create index job_history_dead_job_idx on almanac.job_history (queue, finished_at)
    where state = 'dead' and redriven_at is null;
create index job_history_schedule_idx on almanac.job_history (queue, schedule, tick_at) where schedule is not null;

comment on table almanac.job_history is 'Finished jobs. A redriven job has one row for each of its lives.';
comment on table almanac_days.job_history_default is
    'Catches rows of days that have no partition yet; the housekeeper moves them.';
do $$
declare
    v_column name;
begin
    for v_column in
        select attname from pg_attribute where attrelid = 'almanac.job_history'::regclass and attnum > 0
    loop
        execute format('comment on column almanac.job_history.%I is %L', v_column, 'As in job.');
    end loop;
end;
$$;
comment on column almanac.job_history.state is 'completed, dead or cancelled.';
comment on column almanac.job_history.due_at is 'When the last attempt was due.';
comment on column almanac.job_history.attempt is 'Attempts consumed in this life.';
comment on column almanac.job_history.lease_token is 'The last token issued; the one that completed a completed job.';
comment on column almanac.job_history.leased_by is 'The worker of the last attempt, if it was running when it ended.';
comment on column almanac.job_history.claimed_at is
    'When the last attempt was claimed, if it was running when it ended.';
comment on column almanac.job_history.error is 'Error of the last failed or lost attempt.';
comment on column almanac.job_history.result is 'What the handler returned.';
comment on column almanac.job_history.external_id is 'The other side''s id of the effect.';
comment on column almanac.job_history.ended_by is 'Who cancelled it.';
comment on column almanac.job_history.end_reason is 'Why it was cancelled or why no attempt was left.';
comment on column almanac.job_history.redriven_at is 'When the dead job was brought back.';
comment on column almanac.job_history.finished_at is 'When this life ended.';

create table almanac.attempt (
    queue       text collate "C" not null,
    job_id      bigint not null,
    attempt     integer not null,
    lease_token bigint not null,
    worker      text not null,
    claimed_at  timestamptz not null,
    finished_at timestamptz not null,
    outcome     text not null,
    error       text,
    constraint attempt_pkey primary key (queue, job_id, lease_token, finished_at),
    constraint attempt_outcome_is_known check (outcome in ('failed', 'lost', 'released', 'cancelled'))
) partition by range (finished_at);
create table almanac_days.attempt_default partition of almanac.attempt default;

comment on table almanac.attempt is
    'Attempts that ended other than well. A completed one is described by its row in job_history.';
comment on table almanac_days.attempt_default is
    'Catches rows of days that have no partition yet; the housekeeper moves them.';
comment on column almanac.attempt.queue is 'The queue.';
comment on column almanac.attempt.job_id is 'The job.';
comment on column almanac.attempt.attempt is 'Its number within that life of the job.';
comment on column almanac.attempt.lease_token is 'The token of the claim; the attempt_key is made from it.';
comment on column almanac.attempt.worker is 'Who held the lease.';
comment on column almanac.attempt.claimed_at is 'When it was claimed.';
comment on column almanac.attempt.finished_at is 'When it ended.';
comment on column almanac.attempt.outcome is 'failed, lost, released or cancelled.';
comment on column almanac.attempt.error is 'What went wrong.';

-- from 14_schedule.sql
-- 14 schedule: what is to happen when, and the ledger of what was decided about each moment.

create table almanac.schedule (
    queue           text collate "C" not null,
    name            text collate "C" not null,
    kind            text not null default 'job',
    job_type        text collate "C" not null,
    payload         jsonb not null default '{}',
    cron            text,
    at              timestamptz,
    rule            almanac.cron_rule,
    timezone        text collate "C" not null default 'UTC',
    dst_gap         text not null default 'after',
    dst_overlap     text not null default 'first',
    starts_at       timestamptz,
    ends_at         timestamptz,
    jitter          interval not null default '0',
    max_fires       bigint,
    overlap         text not null default 'allow',
    max_running     integer,
    catch_up        text not null default 'latest',
    max_age         interval,
    max_runs        integer,
    pace            integer,
    after_schedule  text collate "C",
    within          interval,
    gate_closed     text,
    gate_wait       interval,
    priority        smallint not null default 0,
    max_attempts    integer,
    concurrency_key text,
    headers         jsonb,
    template        text,
    description     text,
    revision        integer not null,
    next_due_at     timestamptz,
    look_at         timestamptz,
    decided_until   timestamptz not null,
    decided_local   timestamp,
    moved_to        timestamptz,
    gate_waiting_at timestamptz,
    backlog_until   timestamptz,
    backlog_from    timestamptz,
    paced_until     timestamptz,
    skip_until      timestamptz,
    fires           bigint not null default 0,
    paused_at       timestamptz,
    paused_by       text,
    pause_reason    text,
    paused_until    timestamptz,
    error           text,
    created_at      timestamptz not null,
    created_by      text not null,
    changed_at      timestamptz not null,
    changed_by      text not null,
    constraint schedule_pkey primary key (queue, name),
    -- Every check is prepared anew for each statement, and each tick is one: what a definition must fulfil is therefore
    -- asked once, when it is declared (_check_schedule). Only functions write here.
    constraint schedule_kind_is_known check (kind in ('job')),
    constraint schedule_has_cron_or_at check ((cron is null) <> (at is null)),
    constraint schedule_pause_is_whole check (
        (paused_at is null) = (paused_by is null)
        and (paused_at is not null or (pause_reason is null and paused_until is null and error is null)))
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
-- What the heartbeat reads: only what is due, however many schedules there are. Finished and broken ones are not in it.
create index schedule_tick_idx on almanac.schedule (look_at) where look_at is not null;
-- What health() counts: few at any time, and nothing a tick of the others would have to touch.
create index schedule_paused_idx on almanac.schedule (queue) where paused_at is not null;
-- Which schedules to recompute when the rules of a zone change; UTC, the many, has none.
create index schedule_zone_idx on almanac.schedule (timezone) where timezone <> 'UTC';

comment on table almanac.schedule is 'When to make which job: one row for each schedule of a queue.';
comment on column almanac.schedule.queue is 'The queue its jobs go to.';
comment on column almanac.schedule.name is
    'Any text of up to 200 characters that is not blank; unique within the queue.';
comment on column almanac.schedule.kind is 'What a tick makes: a job.';
comment on column almanac.schedule.job_type is 'What workers dispatch on.';
comment on column almanac.schedule.payload is 'What the handler gets.';
comment on column almanac.schedule.cron is 'The rule as it was written; null for a schedule that runs once.';
comment on column almanac.schedule.at is 'When to run, for a schedule that runs once.';
comment on column almanac.schedule.rule is 'The parsed rule, so that a tick parses nothing.';
comment on column almanac.schedule.timezone is 'Where the clock hangs that the rule refers to.';
comment on column almanac.schedule.dst_gap is 'after or skip: what becomes of a local time that the clocks leave out.';
comment on column almanac.schedule.dst_overlap is 'first, second or both: which of a local time that comes twice.';
comment on column almanac.schedule.starts_at is 'No tick before this; also the anchor of @every.';
comment on column almanac.schedule.ends_at is 'No tick after this.';
comment on column almanac.schedule.jitter is
    'Jobs are due up to this much after the tick, by a fixed amount for each name.';
comment on column almanac.schedule.max_fires is 'The schedule ends after so many jobs; null: never.';
comment on column almanac.schedule.overlap is
    'allow, skip, queue_one or cancel_running: what to do while earlier jobs of the schedule live.';
comment on column almanac.schedule.max_running is
    'How many of its jobs may live at once; null: any with allow, else one.';
comment on column almanac.schedule.catch_up is 'none, latest or all: which ticks are made up after downtime.';
comment on column almanac.schedule.max_age is 'Ticks older than this are not made up.';
comment on column almanac.schedule.max_runs is 'At most the newest so many ticks are made up.';
comment on column almanac.schedule.pace is 'Made-up jobs become due so many a minute; null: at once.';
comment on column almanac.schedule.after_schedule is
    'The gate: run only if this schedule of the queue succeeded lately.';
comment on column almanac.schedule.within is 'How lately.';
comment on column almanac.schedule.gate_closed is 'skip or wait: what to do otherwise.';
comment on column almanac.schedule.gate_wait is 'How long a tick waits for the gate before it is skipped.';
comment on column almanac.schedule.priority is 'Of its jobs.';
comment on column almanac.schedule.max_attempts is 'Of its jobs; null: as the job type or the queue has it.';
comment on column almanac.schedule.concurrency_key is
    'Of its jobs; set by the system where overlap allows one at a time.';
comment on column almanac.schedule.headers is 'Of its jobs.';
comment on column almanac.schedule.template is 'The template it was made from; later changes of that do not touch it.';
comment on column almanac.schedule.description is 'What it is for, in words.';
comment on column almanac.schedule.revision is 'Number of its newest row in schedule_revision.';
comment on column almanac.schedule.next_due_at is 'The tick that is decided next; null: none will come.';
comment on column almanac.schedule.look_at is
    'When the heartbeat looks: next_due_at, or later while a gate is closed; null: never.';
comment on column almanac.schedule.decided_until is
    'High-water mark: no tick of the rule up to here is decided again, whatever the clock does.';
comment on column almanac.schedule.decided_local is
    'What a clock in the zone showed at decided_until, so that a change of zone rules repeats nothing.';
comment on column almanac.schedule.moved_to is 'A tick outside the rule: where reschedule moved the next one.';
comment on column almanac.schedule.gate_waiting_at is 'The tick that waits for the gate.';
comment on column almanac.schedule.backlog_until is 'After downtime: ticks up to here are the backlog.';
comment on column almanac.schedule.backlog_from is 'Those of the backlog from here on are made up.';
comment on column almanac.schedule.paced_until is 'When the last paced job is due.';
comment on column almanac.schedule.skip_until is 'Undecided ticks up to here fell into a pause.';
comment on column almanac.schedule.fires is 'Jobs made by ticks so far.';
comment on column almanac.schedule.paused_at is 'Since when ticks are decided as skipped_paused.';
comment on column almanac.schedule.paused_by is 'Who paused it; tick: the system, because of error.';
comment on column almanac.schedule.pause_reason is 'Why, in words.';
comment on column almanac.schedule.paused_until is 'When the pause ends by itself; null: when somebody resumes it.';
comment on column almanac.schedule.error is 'Why the system paused it.';
comment on column almanac.schedule.created_at is 'When it was made.';
comment on column almanac.schedule.created_by is 'Who made it.';
comment on column almanac.schedule.changed_at is 'When its definition last changed.';
comment on column almanac.schedule.changed_by is 'Who changed it.';

create table almanac.schedule_template (
    template    text collate "C" not null,
    cron        text,
    timezone    text,
    dst_gap     text,
    dst_overlap text,
    jitter      interval,
    overlap     text,
    max_running integer,
    catch_up    text,
    max_age     interval,
    max_runs    integer,
    pace        integer,
    description text,
    changed_at  timestamptz not null,
    changed_by  text not null,
    constraint schedule_template_pkey primary key (template),
    constraint schedule_template_name_is_readable check (template ~ E'\\S' and length(template) <= 200)
);
comment on table almanac.schedule_template is
    'Usual settings under a name. Copied when a schedule is put, so a change reaches only schedules put after it.';
do $$
declare
    v_column name;
begin
    for v_column in
        select attname from pg_attribute where attrelid = 'almanac.schedule_template'::regclass and attnum > 0
    loop
        execute format('comment on column almanac.schedule_template.%I is %L', v_column,
                       'As in schedule; null: the template says nothing about it.');
    end loop;
end;
$$;
comment on column almanac.schedule_template.template is 'Its name.';
comment on column almanac.schedule_template.description is 'What it is for, in words.';
comment on column almanac.schedule_template.changed_at is 'When it was last changed.';
comment on column almanac.schedule_template.changed_by is 'Who changed it.';

create table almanac.schedule_revision (
    queue      text collate "C" not null,
    schedule   text collate "C" not null,
    revision   integer not null,
    action     text not null,
    changed_at timestamptz not null,
    changed_by text not null,
    before     jsonb,
    after      jsonb,
    constraint schedule_revision_pkey primary key (queue, schedule, revision),
    constraint schedule_revision_has_a_side check (before is not null or after is not null)
);
comment on table almanac.schedule_revision is
    'Every definition a schedule has had. Stays when the schedule is dropped.';
comment on column almanac.schedule_revision.queue is 'The queue.';
comment on column almanac.schedule_revision.schedule is 'The schedule.';
comment on column almanac.schedule_revision.revision is 'Counts up from 1, also over a drop.';
comment on column almanac.schedule_revision.action is 'put_schedule, revert_schedule or drop_schedule.';
comment on column almanac.schedule_revision.changed_at is 'When.';
comment on column almanac.schedule_revision.changed_by is 'Who.';
comment on column almanac.schedule_revision.before is 'The definition until then; null: there was none.';
comment on column almanac.schedule_revision.after is 'The definition since then; null: it was dropped.';

create domain almanac.tick_decision as text collate "C"
    constraint tick_decision_is_known check (value in (
        'fired', 'skipped_overlap', 'skipped_paused', 'skipped_catchup', 'skipped_gate', 'coalesced', 'backfilled',
        'triggered'));
comment on domain almanac.tick_decision is 'What was decided about a tick.';

create table almanac.tick (
    queue      text collate "C" not null,
    schedule   text collate "C" not null,
    tick_at    timestamptz not null,
    decision   almanac.tick_decision not null,
    reason     text,
    job_id     bigint,
    caught_up  boolean not null default false,
    decided_at timestamptz not null,
    lateness   interval not null,
    ticked_by  text not null,
    -- This key is what makes a tick fire once, whoever ticks and however often.
    constraint tick_pkey primary key (queue, schedule, tick_at),
    constraint tick_has_a_job_if_it_fired check (
        (job_id is not null) = (decision in ('fired', 'backfilled', 'triggered')))
) partition by range (tick_at);
create table almanac_days.tick_default partition of almanac.tick default;
comment on table almanac.tick is 'The ledger: for each schedule and moment exactly one row that says what was decided.';
comment on table almanac_days.tick_default is
    'Catches rows of days that have no partition yet; the housekeeper moves them.';
comment on column almanac.tick.queue is 'The queue.';
comment on column almanac.tick.schedule is 'The schedule.';
comment on column almanac.tick.tick_at is 'The moment that was decided about.';
comment on column almanac.tick.decision is
    'fired, backfilled or triggered: a job was made; skipped_overlap, _paused, _catchup, _gate or coalesced: none was.';
comment on column almanac.tick.reason is 'Why, where the decision does not say it all.';
comment on column almanac.tick.job_id is 'The job that stands for it.';
comment on column almanac.tick.caught_up is 'Whether it was decided after downtime.';
comment on column almanac.tick.decided_at is 'When it was decided.';
comment on column almanac.tick.lateness is 'decided_at minus tick_at.';
comment on column almanac.tick.ticked_by is 'Who decided: pg_cron, a worker, or the role that called.';

create table almanac.zone_watch (
    timezone   text collate "C" not null,
    offsets    text,
    looked_at  timestamptz not null,
    constraint zone_watch_pkey primary key (timezone)
);
comment on table almanac.zone_watch is
    'Zones that schedules use, and what their rules were: when they change, stored ticks are recomputed.';
comment on column almanac.zone_watch.timezone is 'The zone.';
comment on column almanac.zone_watch.offsets is
    'Digest of its offsets, hour by hour, for the day it was taken and 400 days on.';
comment on column almanac.zone_watch.looked_at is 'From when that digest is.';

-- from 15_operations.sql
-- 15 operations: what the fleet and its operators leave behind besides jobs.

create table almanac.audit (
    id     bigint generated always as identity,
    at     timestamptz not null,
    actor  text not null,
    action text not null,
    queue  text,
    subject text,
    reason text,
    before jsonb,
    after  jsonb,
    constraint audit_pkey primary key (id)
);
create index audit_retention_idx on almanac.audit (at);
comment on table almanac.audit is 'Every act of an operator: who, when, why, before and after.';
comment on column almanac.audit.id is 'Order of writing.';
comment on column almanac.audit.at is 'When.';
comment on column almanac.audit.actor is 'The caller''s role, not the owner of the function.';
comment on column almanac.audit.action is 'The function that was called.';
comment on column almanac.audit.queue is 'The queue acted on.';
comment on column almanac.audit.subject is 'The job, schedule, type or role acted on.';
comment on column almanac.audit.reason is 'Why, in the caller''s words.';
comment on column almanac.audit.before is 'What it was.';
comment on column almanac.audit.after is 'What it became.';

create table almanac.worker (
    worker       text collate "C" not null,
    host         text not null,
    pid          integer not null,
    version      text not null,
    queues       text[] not null,
    concurrency  integer not null,
    running      integer not null,
    reported_by  text collate "C" not null,
    started_at   timestamptz not null,
    last_seen_at timestamptz not null,
    constraint worker_pkey primary key (worker),
    constraint worker_name_is_readable check (worker ~ E'\\S' and length(worker) <= 200)
) with (fillfactor = 50);
comment on table almanac.worker is 'Workers as they last reported. For people only: recovery reads nothing but leases.';
comment on column almanac.worker.worker is 'Name of the process, unique per start.';
comment on column almanac.worker.host is 'Where it runs.';
comment on column almanac.worker.pid is 'Its process id there.';
comment on column almanac.worker.version is 'Version of the client.';
comment on column almanac.worker.queues is 'What it claims from.';
comment on column almanac.worker.concurrency is 'How many jobs it runs at once.';
comment on column almanac.worker.running is 'How many it was running.';
comment on column almanac.worker.reported_by is 'The role that reports it; no other may.';
comment on column almanac.worker.started_at is 'When it started.';
comment on column almanac.worker.last_seen_at is 'When it last reported.';

create table almanac.heartbeat (
    source    text collate "C" not null,
    ticked_at timestamptz not null,
    ticked_by text not null,
    constraint heartbeat_pkey primary key (source)
) with (fillfactor = 50);
comment on table almanac.heartbeat is 'When each kind of ticker last ticked.';
comment on column almanac.heartbeat.source is 'pg_cron, worker, or manual for everything else.';
comment on column almanac.heartbeat.ticked_at is 'When.';
comment on column almanac.heartbeat.ticked_by is 'Which one.';

create table almanac.alert (
    alert       text collate "C" not null,
    subject     text collate "C" not null,
    severity    text not null,
    message     text not null,
    hint        text not null,
    raised_at   timestamptz not null,
    seen_at     timestamptz not null,
    occurrences bigint not null default 1,
    cleared_at  timestamptz,
    constraint alert_pkey primary key (alert, subject),
    constraint alert_severity_is_known check (severity in ('warning', 'critical'))
);
comment on table almanac.alert is 'Conditions somebody should look at, one row each however often they recur.';
comment on column almanac.alert.alert is 'What kind of condition.';
comment on column almanac.alert.subject is 'What it concerns.';
comment on column almanac.alert.severity is 'warning or critical.';
comment on column almanac.alert.message is 'One line that states the fact.';
comment on column almanac.alert.hint is 'What to do next.';
comment on column almanac.alert.raised_at is 'Since when.';
comment on column almanac.alert.seen_at is 'When it was last noticed.';
comment on column almanac.alert.occurrences is 'How often it was noticed.';
comment on column almanac.alert.cleared_at is 'When it went away; null: still so.';

create table almanac.installation (
    only_row    boolean not null default true,
    home        text[] not null,
    held_at     timestamptz,
    held_by     text,
    hold_reason text,
    constraint installation_pkey primary key (only_row),
    constraint installation_is_one check (only_row),
    constraint installation_hold_is_whole check (
        (held_at is null) = (held_by is null) and (held_at is not null or hold_reason is null))
);
comment on table almanac.installation is
    'Where these tables live, by which a copy is told; and whether all work is held.';
comment on column almanac.installation.only_row is 'There is one row.';
comment on column almanac.installation.home is
    'Oid of the database and of this table, system identifier of the cluster, major version of PostgreSQL.';
comment on column almanac.installation.held_at is 'Since when nothing is claimed and nothing ticks.';
comment on column almanac.installation.held_by is 'Who held it; copy: it holds itself because it is one.';
comment on column almanac.installation.hold_reason is 'Why.';

-- from 16_types.sql
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

-- from 17_schedule_types.sql
-- 17 schedule types: the rows that functions on schedules return. Callers name columns, so new ones go to the end.

create type almanac.declared_schedule as (
    queue text, name text, next_due_at timestamptz, revision integer, created boolean, changed boolean);
comment on type almanac.declared_schedule is
    'What putting a schedule led to; neither created nor changed: it was declared like that before.';

create type almanac.operated_schedule as (
    queue       text,
    name        text,
    action      text,
    dry_run     boolean,
    changed     boolean,
    next_due_at timestamptz,
    ticks       integer,
    job_ids     bigint[],
    message     text
);
comment on type almanac.operated_schedule is
    'What an operator''s act on a schedule did, or with dry_run would do: ticks concerned, jobs made, a line in words.';

create type almanac.explained_tick as (
    queue       text,
    schedule    text,
    at          timestamptz,
    is_tick     boolean,
    decision    text,
    job_id      bigint,
    explanation text
);
comment on type almanac.explained_tick is 'Why a schedule did or did not run at a moment, in a sentence.';

create type almanac.tick_report as (
    ticked_at  timestamptz,
    ticked_by  text,
    schedules  integer,
    fired      integer,
    skipped    integer,
    broken     integer,
    reclaimed  integer,
    more       boolean,
    took       interval
);
comment on type almanac.tick_report is 'What one tick did; more: call again at once, something is still due.';

create type almanac.pg_cron_state as (
    loaded      boolean,
    database    text,
    version     text,
    job_id      bigint,
    active      boolean,
    last_run_at timestamptz,
    last_status text,
    missing     text
);
comment on type almanac.pg_cron_state is 'Whether pg_cron is there, and how the job that ticks is doing.';

create type almanac.health_check as (
    name    text,
    status  text,
    message text,
    hint    text,
    value   double precision
);
comment on type almanac.health_check is 'One thing that was looked at: ok, warning or critical.';

