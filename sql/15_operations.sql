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
