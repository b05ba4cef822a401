-- 80 views: what an operator looks at. security_barrier is not needed: observers may see every row.

-- Found without reading the jobs that wait: those that are counted, and those listed in claims.
create or replace view almanac.running_job as
with running as not materialized (
    select job.* from almanac.job where job.counted_at is not null
     union all
    select job.*
      from (select distinct claim.queue, listed.job_id
              from almanac.claim cross join lateral unnest(claim.job_ids) as listed (job_id)) claimed
      join almanac.job on job.queue = claimed.queue and job.id = claimed.job_id
     where job.state = 'running' and job.counted_at is null)
select running.queue, running.id as job_id, running.job_type, running.leased_by, running.claimed_at,
       almanac.clock() - running.claimed_at as runs_for, running.lease_expires_at, running.cancel_requested_at,
       running.attempt, running.max_attempts,
       almanac.attempt_key(running.id, running.attempt, running.lease_token) as attempt_key,
       running.payload::jsonb as payload, running.schedule, running.tick_at
  from running;
comment on view almanac.running_job is
    'What runs now: who has it, since when, and until when unless the lease is extended.';

create or replace view almanac.queue_overview as
select queue.queue,
       counts.scheduled, counts.due, counts.running, counts.retrying, counts.parked, counts.oldest_due_at,
       greatest(almanac.clock() - counts.oldest_due_at, interval '0') as lateness,
       (select count(*) from almanac.job_history h
         where h.queue = queue.queue and h.state = 'dead' and h.redriven_at is null) as dead,
       queue.paused_at is not null and coalesce(queue.paused_until, 'infinity') > almanac.clock() as paused,
       queue.pause_reason, queue.paused_by, queue.paused_until,
       queue.max_running, queue.rate_limit, queue.rate_interval, queue.restricted_at is not null as restricted
  from almanac.queue
  left join lateral (
    select count(*) filter (where job.state = 'scheduled') as scheduled,
           count(*) filter (where job.state in ('scheduled', 'retrying') and job.due_at <= almanac.clock()) as due,
           count(*) filter (where job.state = 'running') as running,
           count(*) filter (where job.state = 'retrying') as retrying,
           count(*) filter (where job.parked_at is not null) as parked,
           min(job.due_at) filter (where job.state in ('scheduled', 'retrying') and job.parked_at is null
                                     and job.due_at <= almanac.clock()) as oldest_due_at
      from almanac.job where job.queue = queue.queue) counts on true;
comment on view almanac.queue_overview is 'One row per queue: what waits, what runs, what is dead, how late it is.';

-- The states of history are named so that the planner leaves history alone where somebody asks for what runs or waits.
create or replace view almanac.job_overview as
select j.queue, j.id as job_id, j.job_type, j.state::text as state, j.due_at, j.attempt, j.max_attempts, j.leased_by,
       j.claimed_at, j.lease_expires_at, j.cancel_requested_at, j.last_error, j.payload::jsonb as payload,
       null::jsonb as result, null::text as external_id, j.schedule, j.tick_at, j.priority, j.dedup_key,
       j.concurrency_key::text as concurrency_key, j.created_at, j.created_by, null::timestamptz as finished_at
  from almanac.job j
 union all
select h.queue, h.id, h.job_type, h.state::text, h.due_at, h.attempt, h.max_attempts, h.leased_by, h.claimed_at,
       null, null, h.error, h.payload, h.result, h.external_id, h.schedule, h.tick_at, h.priority, h.dedup_key,
       h.concurrency_key, h.created_at, h.created_by, h.finished_at
  from almanac.job_history h
 where h.state::text in ('completed', 'dead', 'cancelled') and h.redriven_at is null;
comment on view almanac.job_overview is
    'Every job, live or finished, once: what waits, what runs, what became of it, within retention.';

create or replace view almanac.late_job as
with full_queue as materialized (
    select queue.queue
      from almanac.queue
      left join almanac.queue_turn as bucket on bucket.queue = queue.queue
     where case when queue.max_running is not null
                then (select count(*) from almanac.running_job as running where running.queue = queue.queue)
                     >= queue.max_running end
        -- As in _pick_within_limits.
        or bucket.tokens + queue.rate_limit * greatest(extract(epoch from almanac.clock() - bucket.refilled_at), 0)
                           / extract(epoch from queue.rate_interval) < 1)
select job.queue, job.id as job_id, job.job_type, job.state, job.priority, job.due_at,
       almanac.clock() - job.due_at as lateness, job.attempt, job.max_attempts, job.concurrency_key,
       case when queue.paused_at is not null and coalesce(queue.paused_until, 'infinity') > almanac.clock()
                then 'queue is paused' || coalesce(': ' || queue.pause_reason, '')
            when job.parked_at is not null then 'concurrency_key ' || job.concurrency_key || ' is busy'
            when job.queue in (select full_queue.queue from full_queue) then 'queue is at its limit'
            when exists (select from almanac.worker w
                          where job.queue = any (w.queues) and w.last_seen_at > almanac.clock() - interval '1 minute')
                then 'the workers of the queue are busy, or have no handler for its type'
            else 'no worker has reported for the queue' end as why
  from almanac.job
  join almanac.queue on queue.queue = job.queue
 where job.state in ('scheduled', 'retrying') and job.due_at < almanac.clock() - interval '1 minute';
comment on view almanac.late_job is 'Jobs due for more than a minute that nobody has claimed, and the likely reason.';

create or replace view almanac.stuck_job as
select running.queue, running.job_id, running.job_type, running.leased_by, running.claimed_at, running.lease_expires_at,
       almanac.clock() - running.lease_expires_at as expired_for, running.attempt, running.max_attempts,
       running.cancel_requested_at
  from almanac.running_job as running
 where running.lease_expires_at <= almanac.clock()
    or running.cancel_requested_at < almanac.clock() - interval '1 minute';
comment on view almanac.stuck_job is 'Running jobs whose lease has expired, or whose worker does not react to cancel.';

create or replace view almanac.dead_job as
select h.queue, h.id as job_id, h.job_type, h.attempt, h.max_attempts, h.error, h.end_reason, h.payload, h.schedule,
       h.tick_at, h.created_at, h.finished_at,
       format('select almanac.redrive(%L, %s);', h.queue, h.id) as redrive
  from almanac.job_history h
 where h.state = 'dead' and h.redriven_at is null;
comment on view almanac.dead_job is 'Dead letters: jobs that ran out of attempts, with the line that brings each back.';

create or replace view almanac.worker_overview as
select worker.worker, worker.host, worker.pid, worker.version, worker.queues, worker.concurrency, worker.running,
       worker.started_at, worker.last_seen_at, almanac.clock() - worker.last_seen_at as silent_for
  from almanac.worker;
comment on view almanac.worker_overview is 'Workers as they last reported.';

create or replace view almanac.attempt_log as
select a.queue, a.job_id, a.attempt, a.worker, a.claimed_at, a.finished_at, a.outcome, a.error,
       almanac.attempt_key(a.job_id, a.attempt, a.lease_token) as attempt_key, null::text as external_id
  from almanac.attempt a
 union all
select h.queue, h.id, h.attempt, h.leased_by, h.claimed_at, h.finished_at, 'completed', null,
       almanac.attempt_key(h.id, h.attempt, h.lease_token), h.external_id
  from almanac.job_history h
 where h.state = 'completed'
 union all
select running.queue, running.job_id, running.attempt, running.leased_by, running.claimed_at, null, null, null,
       running.attempt_key, null
  from almanac.running_job as running;
comment on view almanac.attempt_log is 'Every attempt ever made, within retention; outcome is null while it runs.';

create or replace view almanac.audit_log as
select audit.at, audit.actor, audit.action, audit.queue, audit.subject, audit.reason, audit.before, audit.after
  from almanac.audit;
comment on view almanac.audit_log is 'What operators did: who, when, why, before and after.';
