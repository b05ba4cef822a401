-- 34 pause_schedule: from now on its ticks are decided as skipped_paused, one by one as they come due. A tick that is
-- being decided at this moment is waited for; one that is due but not decided yet is skipped.
-- Writes: schedule. Calls: clock, _caller, _audit, _find_schedule.
create or replace function almanac.pause_schedule(
    name text, reason text default null, until timestamptz default null, queue text default null,
    dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule := almanac._find_schedule(pause_schedule.name, pause_schedule.queue);
    v_now      timestamptz := almanac.clock();
    -- A pause that has ended by itself is found out by the next tick only; this one does not prolong it.
    v_since    timestamptz := case when v_schedule.paused_until <= v_now then v_now
                                   else coalesce(v_schedule.paused_at, v_now) end;
begin
    pause_schedule.until := nullif(pause_schedule.until, 'infinity');
    if pause_schedule.until <= v_now then
        raise exception using errcode = '22023',
            message = 'until lies in the past',
            detail  = format('It is %s, and now is %s.', pause_schedule.until, v_now),
            hint    = 'Leave until out to pause without an end.';
    end if;
    if not pause_schedule.dry_run then
        update almanac.schedule s
           set paused_at = v_since, paused_by = almanac._caller(), pause_reason = pause_schedule.reason,
               paused_until = pause_schedule.until
         where s.queue = v_schedule.queue and s.name = v_schedule.name;
        perform almanac._audit('pause_schedule', v_schedule.queue, v_schedule.name, pause_schedule.reason,
            jsonb_build_object('paused_at', v_schedule.paused_at, 'paused_until', v_schedule.paused_until),
            jsonb_build_object('paused_at', v_since, 'paused_until', pause_schedule.until));
    end if;
    return row (v_schedule.queue, v_schedule.name, 'pause_schedule', pause_schedule.dry_run, true,
                v_schedule.next_due_at, 0, null,
                format('%s %s; the next tick, %s, %s', case when pause_schedule.dry_run then 'would be' else 'is' end,
                       coalesce('paused until ' || pause_schedule.until, 'paused until somebody resumes it'),
                       coalesce(v_schedule.next_due_at::text, 'of which there is none'),
                       case when v_schedule.next_due_at >= pause_schedule.until then 'comes after that'
                            else 'is skipped' end))::almanac.operated_schedule;
end;
$$;
comment on function almanac.pause_schedule(text, text, timestamptz, text, boolean) is
    'Skip the ticks of a schedule until it is resumed, or until a time.';

-- 34 _make_up: fires ticks that had not fired. The ledger row of a tick that was skipped says from then on that it was
-- made up, and by whom. Returns the jobs; a tick that has a job is left alone, so doing it twice does nothing.
-- Reads: tick. Writes: tick, schedule. Calls: clock, _fire_ticks, _jitter_of.
create or replace function almanac._make_up(schedule almanac.schedule, ticks timestamptz[], reason text, ticked_by text)
    returns bigint[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now   timestamptz := almanac.clock();
    v_start timestamptz := greatest(v_now, schedule.paced_until);
    v_made  timestamptz[];
    v_jobs  bigint[];
    v_dues  timestamptz[];
begin
    with made as (
        insert into almanac.tick as t (queue, schedule, tick_at, decision, reason, job_id, caught_up, decided_at,
                                       lateness, ticked_by)
        select schedule.queue, schedule.name, u.tick_at, 'backfilled', _make_up.reason,
               nextval('almanac.job_id_seq'), true, v_now, v_now - u.tick_at, _make_up.ticked_by
          from unnest(_make_up.ticks) as u (tick_at)
         order by u.tick_at
        on conflict on constraint tick_pkey do update
           set decision = excluded.decision,
               reason = concat_ws('; before that ', excluded.reason, t.decision), job_id = excluded.job_id,
               caught_up = true, decided_at = excluded.decided_at, lateness = excluded.lateness,
               ticked_by = excluded.ticked_by
         where t.job_id is null
        returning t.tick_at, t.job_id
    )
    select array_agg(made.tick_at order by made.tick_at), array_agg(made.job_id order by made.tick_at),
           array_agg(case when schedule.pace is null
                          then made.tick_at + almanac._jitter_of(schedule.queue, schedule.name, schedule.jitter)
                          else v_start + (made.n - 1) * interval '1 minute' / schedule.pace end order by made.tick_at)
      into v_made, v_jobs, v_dues
      from (select m.tick_at, m.job_id, row_number() over (order by m.tick_at) as n from made m) made;
    perform almanac._fire_ticks(schedule, v_made, v_jobs, v_dues, array_fill(true, array[cardinality(v_made)]));
    if schedule.pace is not null and v_dues is not null then
        update almanac.schedule s set paced_until = v_dues[cardinality(v_dues)]
         where s.queue = schedule.queue and s.name = schedule.name;
    end if;
    return coalesce(v_jobs, '{}');
end;
$$;
comment on function almanac._make_up(almanac.schedule, timestamptz[], text, text) is
    'Fire ticks that have no job yet; returns the jobs made.';

-- 34 resume_schedule: ticks fire again. Those that were skipped stay skipped, or with catch_up are made up as the
-- schedule's catch-up policy says. Also the way back for a schedule that the system set aside with an error.
-- Reads: tick. Writes: schedule. Calls: clock, _caller, _audit, _clear_alert, _find_schedule, _make_up, _tick_after.
create or replace function almanac.resume_schedule(
    name text, catch_up boolean default false, queue text default null, reason text default null,
    dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule := almanac._find_schedule(resume_schedule.name, resume_schedule.queue);
    v_now      timestamptz := almanac.clock();
    v_next     timestamptz;
    v_ticks    timestamptz[] := '{}';
    v_jobs     bigint[] := '{}';
begin
    if v_schedule.paused_at is null then
        return row (v_schedule.queue, v_schedule.name, 'resume_schedule', resume_schedule.dry_run, false,
                    v_schedule.next_due_at, 0, null, 'was not paused')::almanac.operated_schedule;
    end if;
    v_next := v_schedule.next_due_at;
    if v_schedule.error is not null then
        -- Raises again if what broke it is still so, and the operator sees why.
        v_next := coalesce(v_schedule.moved_to, almanac._tick_after(v_schedule, v_schedule.decided_until));
    end if;
    -- With undecided ticks from downtime inside the pause the policy is applied to those when they are decided.
    if resume_schedule.catch_up and v_schedule.catch_up <> 'none'
       and (v_schedule.catch_up = 'all' or v_next > v_now or v_next is null) then
        v_ticks := array(
            select t.tick_at from almanac.tick t
             where t.queue = v_schedule.queue and t.schedule = v_schedule.name and t.decision = 'skipped_paused'
               and t.tick_at >= v_schedule.paused_at
               and t.tick_at >= coalesce(v_now - v_schedule.max_age, '-infinity')
             order by t.tick_at desc
             limit case when v_schedule.catch_up = 'latest' then 1 else coalesce(v_schedule.max_runs, 10000) end);
    end if;
    if not resume_schedule.dry_run then
        if v_ticks <> '{}' then
            v_jobs := almanac._make_up(v_schedule, v_ticks, 'made up when it was resumed', almanac._caller());
        end if;
        update almanac.schedule s
           set paused_at = null, paused_by = null, pause_reason = null, paused_until = null, error = null,
               next_due_at = v_next, look_at = v_next,
               skip_until = case when not resume_schedule.catch_up and v_next <= v_now
                                 then least(v_now, v_schedule.paused_until - interval '1 microsecond') end
         where s.queue = v_schedule.queue and s.name = v_schedule.name;
        perform almanac._clear_alert('schedule_broken', v_schedule.queue || '/' || v_schedule.name);
        perform almanac._audit('resume_schedule', v_schedule.queue, v_schedule.name, resume_schedule.reason,
            jsonb_build_object('paused_at', v_schedule.paused_at, 'paused_until', v_schedule.paused_until,
                               'error', v_schedule.error),
            jsonb_build_object('catch_up', resume_schedule.catch_up, 'made_up', cardinality(v_jobs)));
    end if;
    return row (v_schedule.queue, v_schedule.name, 'resume_schedule', resume_schedule.dry_run, true, v_next,
                cardinality(v_ticks), v_jobs,
                format('%s resumed; %s skipped ticks %s made up; next is %s',
                       case when resume_schedule.dry_run then 'would be' else 'is' end, cardinality(v_ticks),
                       case when resume_schedule.dry_run then 'would be' else 'were' end,
                       coalesce(v_next::text, 'none')))::almanac.operated_schedule;
end;
$$;
comment on function almanac.resume_schedule(text, boolean, text, text, boolean) is
    'End the pause of a schedule; catch_up => true makes up what its policy allows of the skipped ticks.';

-- 34 trigger_schedule: one job now, whatever the policies say. next_due_at stays as it is.
-- Calls: clock, _caller, _audit, _find_schedule, _fire_ticks, _record_ticks.
create or replace function almanac.trigger_schedule(
    name text, queue text default null, reason text default null, dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule := almanac._find_schedule(trigger_schedule.name, trigger_schedule.queue);
    v_now      timestamptz := almanac.clock();
    v_job      bigint;
begin
    if not trigger_schedule.dry_run then
        v_job := nextval('almanac.job_id_seq');
        loop
            exit when exists (select from almanac._record_ticks(v_schedule, array[v_now], array['triggered'],
                                          array[trigger_schedule.reason], array[v_job], array[false],
                                          almanac._caller()));
            v_now := v_now + interval '1 microsecond';
        end loop;
        -- Its own key: it is another effect than that of the tick of the same second.
        perform almanac._fire_ticks(v_schedule, array[v_now], array[v_job], array[almanac.clock()], array[false],
                                    triggered => true);
        perform almanac._audit('trigger_schedule', v_schedule.queue, v_schedule.name, trigger_schedule.reason, null,
                               jsonb_build_object('job_id', v_job));
    end if;
    return row (v_schedule.queue, v_schedule.name, 'trigger_schedule', trigger_schedule.dry_run, true,
                v_schedule.next_due_at, 1, array_remove(array[v_job], null),
                format('%s of type %s %s', coalesce('job ' || v_job, 'a job'), v_schedule.job_type,
                       case when trigger_schedule.dry_run then 'would be made'
                            else 'was made' end))::almanac.operated_schedule;
end;
$$;
comment on function almanac.trigger_schedule(text, text, text, boolean) is
    'Make a job of a schedule now; its next tick stays where it is.';

-- 34 reschedule: the next tick comes at another time, once; after it the rule goes on. Into the past: it fires with
-- the next tick of the heartbeat. Into the future: ticks of the rule before it are merged into it.
-- Reads: tick. Writes: schedule. Calls: clock, _calendar_holds, _caller, _audit, _find_schedule, _record_ticks.
create or replace function almanac.reschedule(
    name text, at timestamptz, queue text default null, reason text default null, dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule := almanac._find_schedule(reschedule.name, reschedule.queue);
    v_decided  text;
begin
    if almanac._calendar_holds(reschedule.at) is not true then
        raise exception using errcode = '22023', message = 'at must be a time of the years 1 to 9999',
            detail = format('It is %s.', coalesce(reschedule.at::text, 'null')),
            hint   = 'Use pause_schedule to stop a schedule.';
    end if;
    -- Two ticks of one second would have one idempotency key.
    reschedule.at := date_trunc('second', reschedule.at);
    select t.decision into v_decided from almanac.tick t
     where t.queue = v_schedule.queue and t.schedule = v_schedule.name and t.tick_at = reschedule.at;
    if found then
        raise exception using errcode = 'PA009',
            message = format('the tick of %s is decided already: %s', reschedule.at, v_decided),
            detail  = 'A tick is decided once.',
            hint    = case when v_decided in ('fired', 'backfilled', 'triggered')
                           then format('For another job now: select almanac.trigger_schedule(%L);', v_schedule.name)
                           else format('To make it up: select almanac.backfill_schedule(%L, %L, %L);', v_schedule.name,
                                       reschedule.at, reschedule.at) end;
    end if;
    if not reschedule.dry_run then
        if v_schedule.moved_to <= almanac.clock() and v_schedule.moved_to <> reschedule.at then
            -- It was due outside the rule, so nothing but this would say what became of it.
            perform almanac._record_ticks(v_schedule, array[v_schedule.moved_to], array['coalesced'],
                                          array[format('the schedule was moved to %s', reschedule.at)], null,
                                          array[false], almanac._caller());
        end if;
        update almanac.schedule s
           set moved_to = reschedule.at, next_due_at = reschedule.at, look_at = reschedule.at, gate_waiting_at = null,
               -- What runs once has no rule that goes on after it; the other way, its time is merged into this one.
               decided_until = case when s.at > reschedule.at then greatest(s.decided_until, s.at)
                                    else s.decided_until end
         where s.queue = v_schedule.queue and s.name = v_schedule.name;
        perform almanac._audit('reschedule', v_schedule.queue, v_schedule.name, reschedule.reason,
                               jsonb_build_object('next_due_at', v_schedule.next_due_at),
                               jsonb_build_object('next_due_at', reschedule.at));
    end if;
    return row (v_schedule.queue, v_schedule.name, 'reschedule', reschedule.dry_run,
                v_schedule.next_due_at is distinct from reschedule.at, reschedule.at, 1, null,
                format('the next tick %s %s instead of %s',
                       case when reschedule.dry_run then 'would be' else 'is' end,
                       case when reschedule.at <= almanac.clock() then 'now' else reschedule.at::text end,
                       coalesce(v_schedule.next_due_at::text, 'never')))::almanac.operated_schedule;
end;
$$;
comment on function almanac.reschedule(text, timestamptz, text, text, boolean) is
    'Move the next tick of a schedule to another time; the rule goes on after it.';

-- 34 backfill_schedule: backfills the ticks between two times, both included, that have no job. At most 10,000 in a
-- call; another call goes on. No ledger from before the last raise of retention, nor from while the queue was dropped:
-- nothing before that.
-- Reads: audit, queue, tick. Calls: clock, _caller, _audit, _find_schedule, _make_up, _tick_after.
create or replace function almanac.backfill_schedule(
    name text, from_at timestamptz, to_at timestamptz, queue text default null, reason text default null,
    dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
declare
    c_limit    constant integer := 10000;
    v_schedule almanac.schedule := almanac._find_schedule(backfill_schedule.name, backfill_schedule.queue);
    v_now      timestamptz := almanac.clock();
    v_oldest   timestamptz := greatest(
        v_now - (select q.retention from almanac.queue q where q.queue = v_schedule.queue),
        (select max(a.at - (a.before ->> 'retention')::interval) from almanac.audit a
          where a.action = 'put_queue' and a.queue = v_schedule.queue),
        (select max(a.at) from almanac.audit a where a.action = 'drop_queue' and a.queue = v_schedule.queue));
    v_tick     timestamptz;
    v_ticks    timestamptz[] := '{}';
    v_jobs     bigint[] := '{}';
begin
    if backfill_schedule.from_at is null or backfill_schedule.to_at is null
       or not isfinite(backfill_schedule.from_at) or backfill_schedule.from_at > backfill_schedule.to_at then
        raise exception using errcode = '22023', message = 'from_at must be a time before to_at',
            detail = format('They are %s and %s.', coalesce(backfill_schedule.from_at::text, 'null'),
                            coalesce(backfill_schedule.to_at::text, 'null')),
            hint   = 'Both ends are included; to_at beyond now means now.';
    end if;
    if backfill_schedule.from_at < v_oldest then
        raise exception using errcode = 'PA009',
            message = format('cannot backfill before %s', v_oldest),
            detail  = 'Older ticks may have fired: the ledger is kept only as long as the queue''s retention.',
            hint    = 'Begin later; put_queue(..., retention => ...) keeps the ledger longer from then on.';
    end if;
    v_tick := almanac._tick_after(v_schedule, backfill_schedule.from_at - interval '1 microsecond');
    while v_tick <= least(backfill_schedule.to_at, v_now) and cardinality(v_ticks) < c_limit loop
        if not exists (select from almanac.tick t
                        where t.queue = v_schedule.queue and t.schedule = v_schedule.name and t.tick_at = v_tick
                          and t.job_id is not null) then
            v_ticks := v_ticks || v_tick;
        end if;
        v_tick := almanac._tick_after(v_schedule, v_tick);
    end loop;
    if not backfill_schedule.dry_run and v_ticks <> '{}' then
        v_jobs := almanac._make_up(v_schedule, v_ticks, coalesce(backfill_schedule.reason, 'backfilled'),
                                   almanac._caller());
        perform almanac._audit('backfill_schedule', v_schedule.queue, v_schedule.name, backfill_schedule.reason, null,
            jsonb_build_object('from_at', backfill_schedule.from_at, 'to_at', backfill_schedule.to_at,
                               'jobs', cardinality(v_jobs)));
    end if;
    return row (v_schedule.queue, v_schedule.name, 'backfill_schedule', backfill_schedule.dry_run, v_ticks <> '{}',
                v_schedule.next_due_at, cardinality(v_ticks), v_jobs,
                format('%s ticks %s%s', cardinality(v_ticks),
                       case when backfill_schedule.dry_run then 'would be made up' else 'were made up' end,
                       case when cardinality(v_ticks) >= c_limit then '; call again for the rest'
                            else '' end))::almanac.operated_schedule;
end;
$$;
comment on function almanac.backfill_schedule(text, timestamptz, timestamptz, text, text, boolean) is
    'Make up the ticks between two times that have not fired; doing it twice fires nothing twice.';

-- 34 drop_schedule: no more ticks. Its jobs go on, and its ledger, revisions and history stay.
-- Writes: schedule, schedule_revision. Calls: clock, _caller, _audit, _clear_alert, _definition, _find_schedule,
-- _settle_ticks.
create or replace function almanac.drop_schedule(
    name text, queue text default null, reason text default null, dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule := almanac._find_schedule(drop_schedule.name, drop_schedule.queue);
    v_now      timestamptz := almanac.clock();
begin
    if not drop_schedule.dry_run then
        if v_schedule.error is null then
            perform almanac._settle_ticks(v_schedule, null, v_now);
        end if;
        delete from almanac.schedule s where s.queue = v_schedule.queue and s.name = v_schedule.name;
        insert into almanac.schedule_revision (queue, schedule, revision, action, changed_at, changed_by, before, after)
        values (v_schedule.queue, v_schedule.name, v_schedule.revision + 1, 'drop_schedule', v_now, almanac._caller(),
                almanac._definition(v_schedule), null);
        perform almanac._clear_alert('schedule_broken', v_schedule.queue || '/' || v_schedule.name);
        perform almanac._audit('drop_schedule', v_schedule.queue, v_schedule.name, drop_schedule.reason,
                               almanac._definition(v_schedule), null);
    end if;
    return row (v_schedule.queue, v_schedule.name, 'drop_schedule', drop_schedule.dry_run, true, null, 0, null,
                format('%s dropped; revert_schedule(%L, %s, %L) brings it back',
                       case when drop_schedule.dry_run then 'would be' else 'is' end, v_schedule.name,
                       v_schedule.revision, v_schedule.queue))::almanac.operated_schedule;
end;
$$;
comment on function almanac.drop_schedule(text, text, text, boolean) is
    'Drop a schedule; its jobs, ledger and revisions stay.';
