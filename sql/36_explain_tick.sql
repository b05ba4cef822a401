-- 36 explain_tick: why did it run, or not? Answers for any moment, also one that is no tick, in a sentence.
-- Reads: queue, tick, schedule, schedule_revision. Calls: clock, _calendar_holds, _find_schedule, local_time,
-- _previous_run, _tick_after.
create or replace function almanac.explain_tick(name text, at timestamptz, queue text default null)
    returns almanac.explained_tick
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
declare
    v_now      timestamptz := almanac.clock();
    v_schedule almanac.schedule;
    v_gone     almanac.schedule_revision;
    v_tick     almanac.tick;
    v_is_tick  boolean;
    v_next     timestamptz;
    v_previous timestamptz;
    v_before   text;
    v_why      text;
    v_decision text;
begin
    if almanac._calendar_holds(explain_tick.at) is not true then
        raise exception using errcode = case when explain_tick.at is null then '22004' else '22023' end,
            message = 'at must be a time of the years 1 to 9999',
            detail  = format('It is %s.', coalesce(explain_tick.at::text, 'null')),
            hint    = 'Give the moment at which you expected the schedule to run.';
    end if;
    begin
        v_schedule := almanac._find_schedule(explain_tick.name, explain_tick.queue, lock => false);
    exception
        when sqlstate 'PA006' then
            select r.* into v_gone
              from almanac.queue q
              join almanac.schedule_revision r on r.queue = q.queue and r.schedule = explain_tick.name
             where (explain_tick.queue is null or q.queue = explain_tick.queue) and r.after is null
               and not exists (select from almanac.schedule s where s.name = explain_tick.name
                                  and (explain_tick.queue is null or s.queue = explain_tick.queue))
             order by r.changed_at desc limit 1;
            if not found then
                raise;
            end if;
            v_schedule.queue := v_gone.queue;
            v_schedule.name := v_gone.schedule;
    end;
    select * into v_tick from almanac.tick t
     where t.queue = v_schedule.queue and t.schedule = v_schedule.name and t.tick_at = explain_tick.at;
    if found then
        v_decision := v_tick.decision;
        v_is_tick := v_tick.decision <> 'triggered';
        v_why := case v_tick.decision
            when 'fired' then format('It fired as job %s, decided %s after its time by %s%s.', v_tick.job_id,
                                     v_tick.lateness, v_tick.ticked_by,
                                     case when v_tick.caught_up then ', made up after downtime' else '' end)
            when 'backfilled' then format('It was made up as job %s at %s by %s (%s).', v_tick.job_id,
                                          v_tick.decided_at, v_tick.ticked_by, v_tick.reason)
            when 'triggered' then format('It is no tick of the rule: %s made job %s at that moment by hand%s.',
                                         v_tick.ticked_by, v_tick.job_id, coalesce(' (' || v_tick.reason || ')', ''))
            when 'coalesced' then format('It did not fire because a later tick stood for it: %s.', v_tick.reason)
            when 'skipped_paused' then format('It did not fire because the schedule was paused%s.',
                                              coalesce(' (' || v_tick.reason || ')', ''))
            when 'skipped_overlap' then format('It did not fire because of its overlap policy: %s.', v_tick.reason)
            when 'skipped_gate' then format('It did not fire because its gate was closed: %s.', v_tick.reason)
            when 'skipped_catchup' then format('It was missed and not made up: %s.', v_tick.reason)
        end;
    elsif v_gone.schedule is not null then
        v_is_tick := false;
        v_why := format('Nothing was decided about that moment, and the schedule was dropped at %s by %s.',
                        v_gone.changed_at, v_gone.changed_by);
    elsif v_schedule.error is not null then
        -- What stopped the tick would stop this too, so the rule is not asked whether it has that moment.
        v_why := format('Nothing was decided about that moment: the schedule was set aside at %s because of an error: '
                        '%s.', v_schedule.paused_at, v_schedule.error);
    else
        v_next := almanac._tick_after(v_schedule, explain_tick.at);
        v_is_tick := coalesce(almanac._tick_after(v_schedule, explain_tick.at - interval '1 microsecond')
                              = explain_tick.at, false) or coalesce(v_schedule.moved_to = explain_tick.at, false);
        if not v_is_tick then
            if v_schedule.cron is not null then
                v_previous := almanac._previous_run(v_schedule.rule, v_schedule.timezone, explain_tick.at,
                                                    v_schedule.dst_gap, v_schedule.dst_overlap, v_schedule.starts_at);
                -- Whoever asks why it did not run rarely knows the second at which it should have.
                select format(' (%s%s)', t.decision, ', job ' || t.job_id) into v_before
                  from almanac.tick t
                 where t.queue = v_schedule.queue and t.schedule = v_schedule.name and t.tick_at = v_previous;
            end if;
            v_why := case
                when explain_tick.at < v_schedule.starts_at
                    then format('The schedule starts at %s.', v_schedule.starts_at)
                when explain_tick.at > v_schedule.ends_at then format('The schedule ended at %s.', v_schedule.ends_at)
                when v_schedule.cron is null then format('The schedule runs once, at %s.', v_schedule.at)
                else format('That moment (%s in %s) is no tick of "%s"; before it is %s%s, after it %s.',
                            almanac.local_time(v_schedule.timezone, explain_tick.at), v_schedule.timezone,
                            v_schedule.cron, coalesce(v_previous::text, 'none'), v_before,
                            coalesce(v_next::text, 'none')) end;
        else
            v_why := case
                when explain_tick.at > v_schedule.decided_until and v_schedule.moved_to > explain_tick.at
                    then format('It will not fire: the schedule was moved to %s.', v_schedule.moved_to)
                when explain_tick.at > v_now and v_schedule.paused_at is not null
                     and coalesce(v_schedule.paused_until > explain_tick.at, true)
                    then format('It will not fire unless the schedule is resumed: %s paused it at %s%s.',
                                v_schedule.paused_by, v_schedule.paused_at,
                                coalesce(' (' || v_schedule.pause_reason || ')', ''))
                when explain_tick.at > v_schedule.decided_until and v_schedule.next_due_at is null
                    then format('It will not fire: the schedule has fired %s times and is finished.', v_schedule.fires)
                when explain_tick.at > v_now then format('It is due in %s.', explain_tick.at - v_now)
                when explain_tick.at = v_schedule.gate_waiting_at
                    then format('It waits for %s to succeed, until %s at most.', v_schedule.after_schedule,
                                explain_tick.at + v_schedule.gate_wait)
                when explain_tick.at > v_schedule.decided_until or explain_tick.at = v_schedule.moved_to
                    then 'It is due and not decided yet: nobody has ticked since. See select * from almanac.health();'
                when explain_tick.at < v_schedule.created_at
                    then format('The schedule was made after it, at %s.', v_schedule.created_at)
                when explain_tick.at < v_now - (select q.retention from almanac.queue q
                                                 where q.queue = v_schedule.queue)
                    then 'The ledger is not kept that long: see the queue''s retention.'
                else format('It was no tick at that time: the definition was changed at %s by %s.',
                            v_schedule.changed_at, v_schedule.changed_by) end;
        end if;
    end if;
    return row (v_schedule.queue, v_schedule.name, explain_tick.at, v_is_tick, v_decision, v_tick.job_id,
                v_why)::almanac.explained_tick;
end;
$$;
comment on function almanac.explain_tick(text, timestamptz, text) is
    'What was or will be decided about a moment of a schedule, and why, in a sentence.';
