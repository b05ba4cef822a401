-- 81 health: is everything moving? One row for each thing that was looked at; status is ok, warning or critical.
-- Reads: alert, audit, claim, heartbeat, queue, job, running_job, job_history, schedule, worker. Calls: clock, held,
-- _holder, _pg_cron_state.
create or replace function almanac.health()
    returns setof almanac.health_check
    language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
declare
    v_now     timestamptz := almanac.clock();
    v_beat    almanac.heartbeat;
    v_age     double precision;
    v_cron    almanac.pg_cron_state := almanac._pg_cron_state();
    v_silent  double precision;
    v_failed  text;
    v_due     timestamptz;
    v_queue   text;
    v_count   bigint;
    v_names   text;
begin
    v_names := almanac.held();
    return next row ('hold', case when v_names is null then 'ok' else 'critical' end,
        coalesce(v_names, 'nothing is held'),
        case when v_names is not null then 'The message says how it goes on; docs/operations.md says more.' end,
        null)::almanac.health_check;

    select string_agg(s.name, ', ') into v_names
      from (values
        ('job', pg_sequence_last_value('almanac.job_id_seq'),
         (select max(j.id) from almanac.queue q cross join lateral (
            select job.id from almanac.job where job.queue = q.queue order by job.id desc limit 1) j)),
        ('claim', pg_sequence_last_value('almanac.claim_id_seq'),
         (select max(c.id) from almanac.queue q cross join lateral (
            select claim.id from almanac.claim where claim.queue = q.queue order by claim.id desc limit 1) c)),
        ('audit', pg_sequence_last_value('almanac.audit_id_seq'), (select max(a.id) from almanac.audit a))
      ) as s (name, last_number, largest)
     where s.largest > coalesce(s.last_number, 0);
    return next row ('numbers', case when v_names is null then 'ok' else 'critical' end,
        coalesce('numbers in use are given again: ' || v_names, 'new jobs get new numbers'),
        case when v_names is not null then 'A replica has no sequences: select almanac.hold(''numbers''); and '
                                           'select almanac.adopt_copy(keep_keys => true);' end,
        null)::almanac.health_check;

    select * into v_beat from almanac.heartbeat h
     where h.source in ('pg_cron', 'worker', 'manual')
       and (h.source <> 'pg_cron' or h.ticked_by <> 'start_ticking')
     -- A beat from the future was written before the clock stepped back.
     order by h.ticked_at <= v_now desc, h.ticked_at desc limit 1;
    v_age := extract(epoch from v_now - v_beat.ticked_at);
    select '; ' || a.message into v_failed from almanac.alert a
     where a.alert = 'tick_failed' and a.cleared_at is null and a.seen_at > coalesce(v_beat.ticked_at, '-infinity')
     order by a.seen_at desc limit 1;
    return next row ('heartbeat',
        case when v_age is null or v_age > 120 or v_failed is not null then 'critical'
             when v_age > 10 or v_age < 0 then 'warning' else 'ok' end,
        case when v_age is null then 'no tick has ever succeeded'
             when v_age < 0 then format('the last tick, by %s, is dated %s from now: the clock stepped back',
                                        v_beat.ticked_by, v_beat.ticked_at - v_now)
             else format('ticked %s s ago by %s (%s)', round(v_age::numeric, 1), v_beat.ticked_by, v_beat.source) end
        || coalesce(v_failed, ''),
        case when v_failed is not null then 'Take out of the way what it names; the next tick tries again.'
             when v_age between 0 and 10 then null
             else 'Start pg_cron with select almanac.start_ticking(); or a worker; or call select almanac.tick();' end,
        v_age)::almanac.health_check;

    -- With pg_cron 1.4 the first tick comes with the next full minute.
    select extract(epoch from v_now - h.ticked_at) into v_silent from almanac.heartbeat h
     where h.source = 'pg_cron' and h.ticked_at < v_now - interval '90 seconds';
    return next row ('pg_cron',
        case when v_silent is not null or not v_cron.active or v_cron.last_status = 'failed' then 'warning'
             else 'ok' end,
        concat_ws(', ',
            case when not v_cron.loaded then 'not loaded; workers or others tick'
                 when v_cron.missing is not null then 'is loaded, and the owner of pg_almanac may not look at it'
                 when v_cron.version is null and v_cron.database = current_database()
                 then 'is loaded and not created; workers or others tick'
                 when v_cron.version is null then format('lives in database %s', v_cron.database)
                 when v_cron.job_id is null then 'is there and has no job named almanac; workers or others tick'
                 else format('version %s, job %s is %s, last run %s: %s', v_cron.version, v_cron.job_id,
                             case when v_cron.active then 'active' else 'switched off' end,
                             coalesce(v_cron.last_run_at::text, 'never'), coalesce(v_cron.last_status, 'none')) end,
            'has not ticked for ' || round(v_silent) || ' s'),
        case when v_cron.missing is not null then 'Let an administrator run: ' || v_cron.missing
             when not v_cron.active then 'select almanac.start_ticking();'
             when v_cron.last_status = 'failed' then 'See return_message in cron.job_run_details.'
             when v_silent is not null and v_cron.job_id is not null then
                 'Other jobs may hold all of its cron.max_running_jobs: see cron.job_run_details where status is '
                 'running. If not: select almanac.start_ticking(); lets it read its jobs again. If it is silent for '
                 'another minute: select pg_reload_conf(); and if that does not help, its launcher was ended. Since '
                 '1.6.1 it comes back by itself; before that a restart of the server brings it back.'
             when v_silent is not null then
                 'It used to tick: select almanac.start_ticking(); lets it, or says what is missing; '
                 'select almanac.stop_ticking(); if it is not to tick any more.' end,
        null)::almanac.health_check;

    select extract(epoch from v_now - h.ticked_at) into v_age from almanac.heartbeat h where h.source = 'housekeeper';
    return next row ('housekeeping',
        case when v_age between 0 and 600 or v_age is null and v_beat.source is null then 'ok' else 'warning' end,
        coalesce(format('partitions, retention and zones were looked after %s s ago', round(v_age::numeric)),
                 'partitions, retention and zones were never looked after'),
        case when v_age not between 0 and 600 then
                 'Each tick does it once a minute, so ticks fail, or none comes: select almanac.tick();' end,
        v_age)::almanac.health_check;

    select min(s.look_at), count(*) into v_due, v_count
      from (select look_at from almanac.schedule where look_at <= v_now - interval '1 minute'
             order by look_at limit 1000) s;
    return next row ('late_schedules',
        case when v_count = 0 then 'ok' when v_now - v_due > interval '10 minutes' then 'critical' else 'warning' end,
        case when v_count = 0 then 'every due tick is decided'
             else format('%s schedules are due for more than a minute, the oldest since %s',
                         case when v_count = 1000 then '1000 or more' else v_count::text end, v_due) end,
        case when v_count > 0 then 'select almanac.tick(); and see why nobody does.' end,
        coalesce(extract(epoch from v_now - v_due), 0))::almanac.health_check;

    select oldest.due_at, oldest.queue into v_due, v_queue
      from (select q.queue, level.due_at
              from almanac.queue q
             cross join lateral unnest(q.priorities) as p (priority)
             cross join lateral (
                select job.due_at from almanac.job
                 where job.queue = q.queue and job.state in ('scheduled', 'retrying')
                   and job.parked_at is null and job.counted_at is null
                   and job.priority = p.priority and job.due_at <= v_now
                 order by job.due_at limit 1) level
             where q.paused_at is null or q.paused_until <= v_now) oldest
     order by oldest.due_at limit 1;
    v_age := coalesce(extract(epoch from v_now - v_due), 0);
    return next row ('oldest_due_job',
        case when v_age > 3600 then 'critical' when v_age > 60 then 'warning' else 'ok' end,
        case when v_due is null then 'nothing that is due waits'
             else format('a job of queue %s waits since %s', v_queue, v_due) end,
        case when v_age > 60
             then 'Is a worker running for that queue? See almanac.late_job, almanac.worker_overview.' end,
        v_age)::almanac.health_check;

    select count(*), string_agg(distinct format('select pg_terminate_backend(%s);', e.pid), ' ')
      into v_count, v_names
      from (select almanac._holder(running.queue, running.job_id) as pid from almanac.running_job as running
             where running.lease_expires_at < v_now - interval '10 seconds' limit 1000) e;
    return next row ('expired_leases', case when v_count = 0 then 'ok' else 'warning' end,
        format('%s running jobs whose lease has expired', v_count),
        case when v_names is not null then 'Silent sessions hold them. They end by themselves, or now: ' || v_names
             when v_count > 0 then 'The next tick gives them to another worker; see almanac.stuck_job.' end,
        v_count)::almanac.health_check;

    select count(*) into v_count
      from (select from almanac.queue q join almanac.job_history h on h.queue = q.queue
             where h.state = 'dead' and h.redriven_at is null limit 10000) dead;
    return next row ('dead_jobs', case when v_count = 0 then 'ok' else 'warning' end,
        format('%s dead jobs', case when v_count = 10000 then '10000 or more' else v_count::text end),
        case when v_count > 0 then 'See almanac.dead_job; each row has the line that brings the job back.' end,
        v_count)::almanac.health_check;

    select count(*), string_agg(p.queue, ', ' order by p.queue) into v_count, v_names
      from (select q.queue from almanac.queue q
             where q.paused_at is not null and coalesce(q.paused_until, 'infinity') > v_now limit 20) p;
    return next row ('paused_queues', case when v_count = 0 then 'ok' else 'warning' end,
        case when v_count = 0 then 'no queue is paused' else 'paused: ' || v_names end,
        case when v_count > 0 then 'select almanac.resume_queue(...) when the reason is gone.' end,
        v_count)::almanac.health_check;

    select count(*), string_agg(p.name, ', ' order by p.name) into v_count, v_names
      from (select s.name from almanac.schedule s
             where s.paused_at is not null and s.error is null and coalesce(s.paused_until, 'infinity') > v_now
             limit 20) p;
    return next row ('paused_schedules', case when v_count = 0 then 'ok' else 'warning' end,
        case when v_count = 0 then 'no schedule is paused' else 'paused: ' || v_names end,
        case when v_count > 0 then 'select almanac.resume_schedule(...) when the reason is gone.' end,
        v_count)::almanac.health_check;

    select count(*), string_agg(p.name, ', ' order by p.name) into v_count, v_names
      from (select s.name from almanac.schedule s where s.paused_at is not null and s.error is not null limit 20) p;
    return next row ('broken_schedules', case when v_count = 0 then 'ok' else 'critical' end,
        case when v_count = 0 then 'no schedule is broken' else 'set aside with an error: ' || v_names end,
        case when v_count > 0 then 'See error in almanac.schedule_overview; correct them with put_schedule.' end,
        v_count)::almanac.health_check;

    select count(*) into v_count from almanac.worker w where w.last_seen_at > v_now - interval '1 minute';
    return next row ('workers', 'ok', format('%s workers reported within a minute', v_count), null,
        v_count)::almanac.health_check;
end;
$$;
comment on function almanac.health() is 'Whether everything moves, one row for each thing looked at.';

-- 81 alerts: what somebody should look at now: what was raised and not cleared, and whatever health finds wrong.
-- Reads: alert. Calls: clock, health.
create or replace function almanac.alerts()
    returns setof almanac.alert
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
    return query
        select a.* from almanac.alert a where a.cleared_at is null
        union all
        select h.name, '', h.status, h.message, coalesce(h.hint, 'See select * from almanac.health();'),
               almanac.clock(), almanac.clock(), 1::bigint, null::timestamptz
          from almanac.health() h
         where h.status <> 'ok'
         order by 3, 6;
end;
$$;
comment on function almanac.alerts() is 'Alerts that stand, and every finding of health() that is not ok.';
