-- 82 schedule views: what an operator looks at before touching a schedule.

create or replace view almanac.schedule_overview as
select s.queue, s.name, s.kind, s.job_type, s.cron, s.at, s.timezone, s.next_due_at,
       almanac.local_time(s.timezone, s.next_due_at) as next_local,
       case when s.error is not null then 'broken'
            when s.paused_at is not null and coalesce(s.paused_until, 'infinity') > almanac.clock() then 'paused'
            when s.next_due_at is null then 'finished'
            when s.gate_waiting_at is not null then 'waiting for its gate'
            when s.backlog_until is not null then 'catching up'
            else 'active' end as status,
       s.paused_at, s.paused_by, s.pause_reason, s.paused_until, s.error,
       last_tick.tick_at as last_tick_at, last_tick.decision as last_decision, last_tick.job_id as last_job_id,
       last_tick.lateness as last_lateness, last_tick.ticked_by as last_ticked_by,
       (select count(*) from almanac.job where job.queue = s.queue and job.schedule = s.name) as live_jobs,
       s.fires, s.max_fires, s.overlap, s.max_running, s.catch_up, s.max_age, s.max_runs, s.pace, s.jitter,
       s.after_schedule, s.within, s.gate_closed, s.gate_wait, s.starts_at, s.ends_at, s.priority, s.payload,
       s.template, s.description, s.revision, s.created_at, s.created_by, s.changed_at, s.changed_by
  from almanac.schedule s
  left join lateral (
    select t.* from almanac.tick t
     where t.queue = s.queue and t.schedule = s.name
     order by t.tick_at desc limit 1) last_tick on true;
comment on view almanac.schedule_overview is
    'One row per schedule: its rule, what comes next, what came last, its state.';

create or replace view almanac.upcoming_tick as
select s.queue, s.name as schedule, s.next_due_at as tick_at, s.next_due_at - almanac.clock() as due_in,
       almanac.local_time(s.timezone, s.next_due_at) as local_time, s.timezone, s.job_type,
       s.paused_at is null or coalesce(s.paused_until <= s.next_due_at, false) as will_fire
  from almanac.schedule s
 where s.look_at is not null;
comment on view almanac.upcoming_tick is 'The next tick of every schedule; order by tick_at.';

create or replace view almanac.tick_log as
select t.queue, t.schedule, t.tick_at, t.decision, t.reason, t.job_id, t.caught_up, t.decided_at, t.lateness,
       t.ticked_by
  from almanac.tick t;
comment on view almanac.tick_log is 'The ledger: what was decided about each tick, within retention.';

create or replace view almanac.schedule_history as
select r.queue, r.schedule, r.revision, r.action, r.changed_at, r.changed_by, r.before, r.after
  from almanac.schedule_revision r;
comment on view almanac.schedule_history is
    'Every definition that schedules have had; revert_schedule goes back to one.';

create or replace view almanac.schedule_template_overview as
select t.template, t.cron, t.timezone, t.dst_gap, t.dst_overlap, t.jitter, t.overlap, t.max_running, t.catch_up,
       t.max_age, t.max_runs, t.pace, t.description, t.changed_at, t.changed_by
  from almanac.schedule_template t;
comment on view almanac.schedule_template_overview is 'Templates that put_schedule(template => ...) takes.';
