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
