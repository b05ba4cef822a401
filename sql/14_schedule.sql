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
