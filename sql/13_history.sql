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
