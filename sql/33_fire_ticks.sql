-- 33 _grace: a tick that is decided within this time of its moment is on time. Wide enough for a ticker that runs once
-- a minute and is held up; beyond it there was downtime, and the schedule's catch_up decides.
create or replace function almanac._grace()
    returns interval
    language sql immutable parallel safe
    return interval '2 minutes';
comment on function almanac._grace() is 'How late a tick may be decided and still count as on time.';

-- 33 _jitter_of: the same name always waits the same time, so that a schedule keeps its rhythm and a thousand of them
-- spread out.
create or replace function almanac._jitter_of(queue text, name text, jitter interval)
    returns interval
    language sql immutable parallel safe
    return case when _jitter_of.jitter = interval '0' then interval '0'
                else _jitter_of.jitter * ((hashtextextended(_jitter_of.name, hashtextextended(_jitter_of.queue, 0))
                                           & 1048575) / 1048576.0::float8) end;
comment on function almanac._jitter_of(text, text, interval) is 'A fixed part of jitter for each queue and name.';

-- 33 _tick_after: the first tick of a schedule strictly after a moment, within starts_at and ends_at; null if none.
-- A rule always has a next run; one that has none is damaged, and must not look like a schedule that has ended.
-- Calls: _next_run, _refuse_no_run.
create or replace function almanac._tick_after(schedule almanac.schedule, after timestamptz)
    returns timestamptz
    language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    v_tick timestamptz;
begin
    if schedule.cron is null then
        v_tick := case when schedule.at > after then schedule.at end;
    else
        v_tick := almanac._next_run(schedule.rule, schedule.timezone,
                                    greatest(after, schedule.starts_at - interval '1 microsecond'),
                                    schedule.dst_gap, schedule.dst_overlap, schedule.starts_at);
        if v_tick is null then
            perform almanac._refuse_no_run(schedule.cron, schedule.timezone);
        end if;
    end if;
    return case when schedule.ends_at is null or v_tick <= schedule.ends_at then v_tick end;
end;
$$;
comment on function almanac._tick_after(almanac.schedule, timestamptz) is
    'The next tick of a schedule after a moment, or null if there is none.';

-- 33 local_time: what a clock in a zone shows, or null where the zone is not known any more or its clock cannot show
-- that: a view must not fail over one row. As its owner, because in a view a function is called by whoever reads it.
-- Calls: _zone.
create or replace function almanac.local_time(timezone text, at timestamptz)
    returns timestamp
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
begin
    return at at time zone almanac._zone(timezone);
exception
    when invalid_parameter_value or datetime_field_overflow then
        return null;
end;
$$;
comment on function almanac.local_time(text, timestamptz) is 'Local time in a zone; null if there is none.';

-- 33 _fire_ticks: (nothing) -> scheduled, one job for each tick. The caller has recorded the ticks.
-- Reads: queue, job_type. Writes: job. Calls: clock, _caller, _ring, _tick_key.
create or replace function almanac._fire_ticks(
    schedule almanac.schedule, ticks timestamptz[], job_ids bigint[], due_at timestamptz[], caught_up boolean[],
    triggered boolean default false)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now timestamptz := almanac.clock();
begin
    insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, lease, concurrency_key,
                             idempotency_key, headers, schedule, tick_at, caught_up, created_at, created_by)
    select schedule.queue, fired.job_id, schedule.job_type, schedule.priority, fired.due_at, schedule.payload,
           coalesce(schedule.max_attempts, job_type.max_attempts, queue.max_attempts), job_type.lease,
           schedule.concurrency_key,
           almanac._tick_key(queue.key_prefix, schedule.name, fired.tick_at, _fire_ticks.triggered),
           schedule.headers, schedule.name, fired.tick_at, fired.caught_up, v_now, almanac._caller()
      from unnest(ticks, job_ids, _fire_ticks.due_at, _fire_ticks.caught_up)
           as fired (tick_at, job_id, due_at, caught_up)
      join almanac.queue on queue.queue = schedule.queue
      left join almanac.job_type on job_type.queue = schedule.queue and job_type.job_type = schedule.job_type
     where fired.job_id is not null;
    if found then
        -- Most of them lie in the past by a moment: claims must look back.
        perform nextval('almanac.backdated_job_seq');
        perform almanac._ring(schedule.queue, v_now);
    end if;
end;
$$;
comment on function almanac._fire_ticks(almanac.schedule, timestamptz[], bigint[], timestamptz[], boolean[], boolean) is
    'Make the jobs of ticks that were decided to fire.';

-- 33 _record_ticks: writes decisions into the ledger. A tick that is there already keeps its decision and is not
-- returned, so whoever fires does so only for what comes back.
-- Writes: tick. Calls: clock.
create or replace function almanac._record_ticks(
    schedule almanac.schedule, ticks timestamptz[], decisions text[], reasons text[], job_ids bigint[],
    caught_up boolean[], ticked_by text)
    returns setof almanac.tick
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := almanac.clock();
begin
    return query
        insert into almanac.tick as t (queue, schedule, tick_at, decision, reason, job_id, caught_up, decided_at,
                                       lateness, ticked_by)
        select schedule.queue, schedule.name, d.tick_at, d.decision, d.reason, d.job_id, d.caught_up, v_now,
               v_now - d.tick_at, _record_ticks.ticked_by
          from unnest(ticks, decisions, reasons, job_ids, _record_ticks.caught_up)
               as d (tick_at, decision, reason, job_id, caught_up)
        on conflict on constraint tick_pkey do nothing
        returning t.*;
end;
$$;
comment on function almanac._record_ticks(almanac.schedule, timestamptz[], text[], text[], bigint[], boolean[], text) is
    'Write decisions that are not written yet; returns those that were.';
