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
