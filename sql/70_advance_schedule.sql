-- 70 _backlog_from: after downtime, the first tick of the backlog that is made up; infinity: none is.
-- Calls: _previous_run.
create or replace function almanac._backlog_from(schedule almanac.schedule, until timestamptz)
    returns timestamptz
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_oldest timestamptz := coalesce(until - schedule.max_age, '-infinity');
    v_tick   timestamptz := least(until, schedule.ends_at) + interval '1 microsecond';
    v_runs   integer := case when schedule.catch_up = 'latest' then 1 else schedule.max_runs end;
begin
    if schedule.catch_up = 'none' then
        return 'infinity';
    elsif schedule.cron is null or v_runs is null then
        return v_oldest;
    end if;
    for v_run in 1 .. v_runs loop
        v_tick := almanac._previous_run(schedule.rule, schedule.timezone, v_tick, schedule.dst_gap,
                                        schedule.dst_overlap, schedule.starts_at);
        exit when v_tick is null or v_tick <= schedule.decided_until;
    end loop;
    -- The newest one is too old: nothing of the backlog is made up.
    return case when schedule.catch_up = 'latest' and v_tick < v_oldest then 'infinity'
                else greatest(v_tick, v_oldest) end;
end;
$$;
comment on function almanac._backlog_from(almanac.schedule, timestamptz) is
    'Where in a backlog catch-up begins, by catch_up, max_age and max_runs.';

-- 70 _lock_live: locks the live jobs of those of the given schedules that may cancel them. SKIP LOCKED: one held job
-- would stop every schedule that is due. Returns the schedules whose jobs could not be had; the next tick decides them.
-- Reads: schedule, job.
create or replace function almanac._lock_live(rows tid[])
    returns tid[]
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    return array(
        with live as materialized (
            select s.ctid as row_id, job.queue, job.id
              from almanac.schedule s
              join almanac.job on job.queue = s.queue and job.schedule = s.name
             where s.ctid = any (_lock_live.rows) and s.overlap = 'cancel_running'
        ), locked as materialized (
            select job.queue, job.id
              from almanac.schedule s
              join almanac.job on job.queue = s.queue and job.schedule = s.name
             where s.ctid = any (_lock_live.rows) and s.overlap = 'cancel_running'
               for update of job skip locked
        )
        select distinct live.row_id from live
         where (live.queue, live.id) not in (select locked.queue, locked.id from locked));
end;
$$;
comment on function almanac._lock_live(tid[]) is
    'Lock the jobs that advancing these schedules may cancel; returns the schedules whose jobs somebody else holds.';

-- 70 _cancel_live: makes room for a new job of the schedule: waiting ones are cancelled, running ones asked to let go.
-- Reads: job. Writes: job. Calls: clock, _finish.
create or replace function almanac._cancel_live(schedule almanac.schedule, reason text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_running bigint[];
    v_ids     bigint[];
    v_tokens  bigint[];
begin
    select array_agg(live.id) filter (where live.state = 'running'),
           array_agg(live.id) filter (where live.state <> 'running'),
           array_agg(live.lease_token) filter (where live.state <> 'running')
      into v_running, v_ids, v_tokens
      from (select job.id, job.state, job.lease_token from almanac.job
             where job.queue = schedule.queue and job.schedule = schedule.name
             order by job.id
               for update) live;
    if v_running is not null then
        update almanac.job
           set cancel_requested_at = almanac.clock(), cancel_requested_by = 'tick', cancel_reason = _cancel_live.reason
         where job.queue = schedule.queue and job.id = any (v_running) and job.cancel_requested_at is null;
    end if;
    if v_ids is not null then
        perform almanac._finish(schedule.queue, v_ids, v_tokens, 'cancelled', false, ended_by => 'tick',
                                end_reason => _cancel_live.reason);
    end if;
end;
$$;
comment on function almanac._cancel_live(almanac.schedule, text) is 'Cancel the live jobs of a schedule.';

-- 70 _decide_ticks: everything due of one schedule, tick by tick, with all policies. The caller has locked the row.
-- For one tick, in this order: moved away, paused, too old to be made up, gate, overlap, and else it fires.
-- Reads: job, job_history, tick. Writes: schedule. Calls: clock, _audit, _backlog_from, _cancel_live, _fire_ticks,
-- _grace, _jitter_of, _record_ticks, _tick_after, _zone.
create or replace function almanac._decide_ticks(schedule almanac.schedule, ticked_by text, room integer)
    returns setof almanac.tick
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now       timestamptz := almanac.clock();
    s           almanac.schedule := _decide_ticks.schedule;
    v_natural   timestamptz;
    v_tick      timestamptz;
    v_moved     boolean;
    v_late      boolean;
    v_decision  text;
    v_reason    text;
    v_due_at    timestamptz;
    v_gate_open boolean;
    v_live      bigint;
    v_limit     integer;
    v_fired     integer := 0;
    v_unsure    timestamptz[] := '{}';
    v_last      integer;
    v_look_at   timestamptz;
    v_ticks     timestamptz[] := '{}';
    v_decisions text[] := '{}';
    v_reasons   text[] := '{}';
    v_jobs      bigint[] := '{}';
    v_dues      timestamptz[] := '{}';
    v_lates     boolean[] := '{}';
    v_recorded  almanac.tick[];
begin
    if s.paused_until <= v_now then
        perform almanac._audit('pause_ended', s.queue, s.name, s.pause_reason,
                               jsonb_build_object('paused_at', s.paused_at, 'paused_until', s.paused_until), null);
        s.skip_until := s.paused_until - interval '1 microsecond';
        s.paused_at := null;
        s.paused_by := null;
        s.pause_reason := null;
        s.paused_until := null;
    end if;
    v_natural := almanac._tick_after(s, s.decided_until);
    loop
        v_moved := s.moved_to is not null and (v_natural is null or s.moved_to <= v_natural);
        v_tick := case when v_moved then s.moved_to else v_natural end;
        exit when v_tick is null or v_tick > v_now or cardinality(v_ticks) >= _decide_ticks.room;
        v_reason := null;
        v_late := false;
        v_due_at := v_tick + almanac._jitter_of(s.queue, s.name, s.jitter);
        if not v_moved and v_tick < s.moved_to then
            v_decision := 'coalesced';
            v_reason := format('the schedule was moved to %s', s.moved_to);
        elsif s.paused_at is not null or v_tick <= s.skip_until then
            v_decision := 'skipped_paused';
            v_reason := s.pause_reason;
        else
            v_decision := 'fired';
            -- One tick far behind its time means that nobody ticked: all that is due by now is the backlog. Unless it
            -- was to be looked at only now, because the one before it waited for the gate.
            if not v_moved and v_tick is distinct from s.gate_waiting_at
               and v_now - greatest(v_tick, s.look_at) > almanac._grace()
               and coalesce(s.backlog_until < v_tick, true) then
                s.backlog_until := v_now;
                s.backlog_from := almanac._backlog_from(s, v_now);
            end if;
            v_late := not v_moved and v_tick is distinct from s.gate_waiting_at
                      and coalesce(v_tick <= s.backlog_until, false);
            if v_late and v_tick < s.backlog_from then
                v_decision := case when s.catch_up = 'latest' and s.backlog_from < 'infinity' then 'coalesced'
                                   else 'skipped_catchup' end;
                v_reason := case
                    when s.catch_up = 'none' then 'catch_up is none'
                    when v_decision = 'coalesced' then 'catch_up is latest'
                    when v_tick < s.backlog_until - s.max_age then format('older than max_age %s', s.max_age)
                    else format('over max_runs %s', s.max_runs) end;
            end if;
        end if;
        if v_decision = 'fired' and s.after_schedule is not null then
            v_gate_open := coalesce(v_gate_open, exists (
                select from almanac.job_history h
                 where h.queue = s.queue and h.schedule = s.after_schedule and h.state = 'completed'
                   and h.finished_at >= v_now - s.within));
            if not v_gate_open then
                if s.gate_closed = 'wait' and v_now < v_tick + s.gate_wait then
                    s.gate_waiting_at := v_tick;
                    v_look_at := least(v_now + interval '5 seconds', v_tick + s.gate_wait);
                    exit;
                end if;
                v_decision := 'skipped_gate';
                v_reason := format('%s has not succeeded within %s', s.after_schedule, s.within);
            end if;
        end if;
        if v_decision = 'fired' and (s.overlap in ('skip', 'queue_one') or s.max_running is not null) then
            v_live := coalesce(v_live, (select count(*) from almanac.job
                                         where job.queue = s.queue and job.schedule = s.name));
            v_limit := case s.overlap when 'queue_one' then 2 else coalesce(s.max_running, 1) end;
            if s.overlap <> 'cancel_running' and v_unsure <> '{}' and v_live + v_fired >= v_limit then
                -- Those that were made up before are in the ledger, make no job, and have theirs among the live ones.
                v_fired := v_fired - (select count(*) from almanac.tick t
                                       where t.queue = s.queue and t.schedule = s.name and t.tick_at = any (v_unsure));
                v_unsure := '{}';
            end if;
            if s.overlap <> 'cancel_running' and v_live + v_fired >= v_limit then
                v_decision := 'skipped_overlap';
                v_reason := 'earlier jobs of it live';
            end if;
        end if;
        if v_decision = 'fired' then
            if s.overlap = 'cancel_running' and v_last is not null then
                v_decisions[v_last] := 'coalesced';
                v_reasons[v_last] := 'the next tick was due as well';
                v_jobs[v_last] := null;
                v_fired := v_fired - 1;
            end if;
            if v_late and s.pace is not null then
                s.paced_until := greatest(v_now, s.paced_until + interval '1 minute' / s.pace);
                v_due_at := greatest(v_due_at, s.paced_until);
            end if;
            v_fired := v_fired + 1;
            v_unsure := v_unsure || v_tick;
            v_last := cardinality(v_ticks) + 1;
        end if;
        v_ticks := v_ticks || v_tick;
        v_decisions := v_decisions || v_decision;
        v_reasons := v_reasons || v_reason;
        v_jobs := v_jobs || case when v_decision = 'fired' then nextval('almanac.job_id_seq') end;
        v_dues := v_dues || v_due_at;
        v_lates := v_lates || v_late;
        if v_moved then
            s.moved_to := null;
        end if;
        if not v_moved or v_tick = v_natural then
            s.decided_until := v_tick;
            v_natural := almanac._tick_after(s, v_tick);
        end if;
        if s.gate_waiting_at <= v_tick then
            s.gate_waiting_at := null;
        end if;
        exit when s.fires + v_fired >= s.max_fires;
    end loop;

    select array_agg(r) into v_recorded
      from almanac._record_ticks(s, v_ticks, v_decisions, v_reasons, v_jobs, v_lates, _decide_ticks.ticked_by) r;
    -- What the ledger had already is not fired again, and takes nobody's place.
    if s.overlap = 'cancel_running' and exists (select from unnest(v_recorded) r where r.job_id is not null) then
        perform almanac._cancel_live(s, format('the tick of %s took its place', v_ticks[v_last]));
    end if;
    perform almanac._fire_ticks(s, array_agg(d.tick_at), array_agg(r.job_id), array_agg(d.due_at), array_agg(d.late))
       from unnest(v_recorded) r
       join unnest(v_ticks, v_dues, v_lates) as d (tick_at, due_at, late) on d.tick_at = r.tick_at
      where r.job_id is not null
     having count(*) > 0;
    select s.fires + count(r.job_id) into s.fires from unnest(v_recorded) r;

    s.next_due_at := case when s.fires >= s.max_fires then null else coalesce(s.moved_to, v_natural) end;
    if v_natural > s.backlog_until then
        s.backlog_until := null;
        s.backlog_from := null;
    end if;
    if v_natural > s.skip_until then
        s.skip_until := null;
    end if;
    update almanac.schedule u
       set next_due_at = s.next_due_at,
           look_at = case when s.next_due_at is not null then greatest(s.next_due_at, v_look_at) end,
           decided_until = s.decided_until, decided_local = s.decided_until at time zone almanac._zone(s.timezone),
           moved_to = s.moved_to, gate_waiting_at = s.gate_waiting_at, backlog_until = s.backlog_until,
           backlog_from = s.backlog_from, paced_until = s.paced_until, skip_until = s.skip_until, fires = s.fires,
           paused_at = s.paused_at, paused_by = s.paused_by, pause_reason = s.pause_reason,
           paused_until = s.paused_until
     where u.queue = s.queue and u.name = s.name;
    return query select * from unnest(v_recorded);
end;
$$;
comment on function almanac._decide_ticks(almanac.schedule, text, integer) is
    'Decide the due ticks of one locked schedule, at most room of them; returns what was written down.';

-- 70 _advance_rows: the usual case for any number of schedules in one statement: one tick is due, on time, and nothing
-- but a pause or a limit on live jobs stands against it. Rows that are not so are left as they are, for _decide_ticks.
-- The caller has locked the rows. Nested loops throughout: by row, by key, whatever the statistics say.
-- Reads: job, queue, job_type. Writes: schedule, job, tick. Calls: clock, _caller, _grace, _jitter_of, _next_run,
-- _tick_key, _zone.
create or replace function almanac._advance_rows(rows tid[], ticked_by text)
    returns setof almanac.tick
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_now timestamptz := almanac.clock();
begin
    return query
        with due as materialized (
            select s.ctid as row_id, s.fires, s.max_fires, s.ends_at, s.cron is null as is_once,
                   case when s.cron is not null
                        then almanac._next_run(s.rule, s.timezone, s.next_due_at, s.dst_gap, s.dst_overlap, s.starts_at)
                        end as following,
                   case when s.paused_at is not null then 'skipped_paused'
                        when (s.overlap = 'skip' or s.max_running is not null)
                             and (select count(*) from almanac.job
                                   where job.queue = s.queue and job.schedule = s.name) >= coalesce(s.max_running, 1)
                            then 'skipped_overlap'
                        else 'fired' end as decision
              from almanac.schedule s
             where s.ctid = any (_advance_rows.rows)
               and s.next_due_at <= v_now and s.next_due_at >= v_now - almanac._grace()
               and s.overlap in ('allow', 'skip') and s.after_schedule is null and s.paused_until is null
               and s.moved_to is null and s.backlog_until is null and s.skip_until is null
        ), decided as materialized (
            select due.row_id, due.decision,
                   case when due.fires + 1 >= due.max_fires and due.decision = 'fired'
                             or due.following > due.ends_at then null else due.following end as next_due_at,
                   case when due.decision = 'fired' then nextval('almanac.job_id_seq') end as job_id
              from due
             where due.following > v_now or due.is_once
        ), advanced as (
            update almanac.schedule s
               set next_due_at = decided.next_due_at, look_at = decided.next_due_at, decided_until = s.next_due_at,
                   decided_local = s.next_due_at at time zone almanac._zone(s.timezone),
                   fires = s.fires + (decided.job_id is not null)::integer
              from decided
             where s.ctid = decided.row_id
            returning s.*, decided.decision, decided.job_id
        ), made as (
            insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, lease,
                                     concurrency_key, idempotency_key, headers, schedule, tick_at, created_at,
                                     created_by)
            select a.queue, a.job_id, a.job_type, a.priority,
                   a.decided_until + almanac._jitter_of(a.queue, a.name, a.jitter), a.payload,
                   coalesce(a.max_attempts, job_type.max_attempts, queue.max_attempts), job_type.lease,
                   a.concurrency_key,
                   almanac._tick_key(queue.key_prefix, a.name, a.decided_until, false),
                   a.headers, a.name, a.decided_until, v_now, almanac._caller()
              from advanced a
              join almanac.queue on queue.queue = a.queue
              left join almanac.job_type on job_type.queue = a.queue and job_type.job_type = a.job_type
             where a.job_id is not null
        )
        -- No "on conflict" here: a tick that is in the ledger already is none of the usual case.
        insert into almanac.tick as t (queue, schedule, tick_at, decision, reason, job_id, decided_at, lateness,
                                       ticked_by)
        select a.queue, a.name, a.decided_until, a.decision,
               case a.decision when 'skipped_paused' then a.pause_reason
                               when 'skipped_overlap' then 'earlier jobs of it live' end,
               a.job_id, v_now, v_now - a.decided_until, _advance_rows.ticked_by
          from advanced a
        returning t.*;
end;
$$;
comment on function almanac._advance_rows(tid[], text) is
    'Decide the one due tick of each of the given schedules, where nothing is out of the ordinary.';

-- 70 _quarantine: a schedule that cannot be advanced is set aside with its error, so that the others go on.
-- Writes: schedule. Calls: clock, _audit, _raise_alert.
create or replace function almanac._quarantine(schedule almanac.schedule, error text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    update almanac.schedule s
       set paused_at = coalesce(s.paused_at, almanac.clock()), paused_by = coalesce(s.paused_by, 'tick'),
           pause_reason = coalesce(s.pause_reason, 'it could not be advanced'), paused_until = null,
           error = left(_quarantine.error, 2000), look_at = null
     where s.queue = schedule.queue and s.name = schedule.name;
    perform almanac._audit('quarantine', schedule.queue, schedule.name, left(_quarantine.error, 2000), null, null);
    perform almanac._raise_alert('schedule_broken', schedule.queue || '/' || schedule.name, 'critical',
        format('schedule %s of queue %s was paused: %s', schedule.name, schedule.queue, left(_quarantine.error, 500)),
        format('Correct it with put_schedule, or try again with select almanac.resume_schedule(%L, queue => %L);',
               schedule.name, schedule.queue));
end;
$$;
comment on function almanac._quarantine(almanac.schedule, text) is 'Pause a schedule that raises, with its error.';

-- 70 _is_passing: whether an error says something about the moment (a lock, a shutdown, no space) and not about the
-- schedule: then nobody is to blame and the next tick tries again.
create or replace function almanac._is_passing(code text)
    returns boolean
    language sql immutable parallel safe
    return left(_is_passing.code, 2) in ('25', '40', '53', '55', '57', '58');
comment on function almanac._is_passing(text) is 'Whether an SQLSTATE is no fault of the data it occurred with.';

-- 70 _decide_one: one locked schedule with all policies; if that raises, it is set aside with its error.
-- Reads: schedule. Calls: _caller, _decide_ticks, _is_passing, _quarantine.
create or replace function almanac._decide_one(queue text, name text)
    returns setof almanac.tick
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    s almanac.schedule;
begin
    select * into s from almanac.schedule
     where schedule.queue = _decide_one.queue and schedule.name = _decide_one.name;
    return query select * from almanac._decide_ticks(s, almanac._caller(), 10000);
exception
    when others then
        if almanac._is_passing(sqlstate) then
            raise;
        end if;
        perform almanac._quarantine(s, sqlerrm);
end;
$$;
comment on function almanac._decide_one(text, text) is
    'Decide the due ticks of one locked schedule, whatever stands in it; pause it with its error if that raises.';

-- 70 advance_schedule: decide what is due of one schedule. Nothing comes back if nothing is due, or if somebody else
-- is deciding it at this moment. The usual tick is written out here rather than left to _advance_rows: four short
-- statements cost half of one that could do any number.
-- Reads: schedule, queue, job_type, sleeper. Writes: schedule, job, tick. Calls: clock, _caller, _decide_one, _grace,
-- _jitter_of, _know_home, _next_run, _open_queue, _ring, _say_hold, _tick_key, _zone.
create or replace function almanac.advance_schedule(queue text, name text)
    returns setof almanac.tick
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now  timestamptz := almanac.clock();
    v_due  record;
    v_next timestamptz;
    v_tick almanac.tick;
begin
    if current_setting('almanac.at_home', true) is distinct from 'yes' then
        perform almanac._know_home();
    end if;
    select s.ctid as row_id, s.next_due_at as tick_at, s.rule, s.timezone, s.dst_gap, s.dst_overlap, s.starts_at,
           s.next_due_at + almanac._jitter_of(s.queue, s.name, s.jitter) as due_at, s.job_type, s.priority, s.payload,
           s.concurrency_key, s.headers, coalesce(s.max_attempts, t.max_attempts, q.max_attempts) as max_attempts,
           t.lease, q.restricted_at, q.held_at, q.key_prefix,
           s.cron is not null and s.overlap = 'allow' and s.next_due_at >= v_now - almanac._grace()
               and num_nonnulls(s.max_running, s.after_schedule, s.max_fires, s.ends_at, s.paused_at, s.moved_to,
                                s.backlog_until, s.skip_until) = 0 as is_usual,
           exists (select from almanac.sleeper where sleeper.queue = s.queue) as is_awaited
      into v_due
      from almanac.schedule s
      join almanac.queue q on q.queue = s.queue
      left join almanac.job_type t on t.queue = s.queue and t.job_type = s.job_type
     where s.queue = advance_schedule.queue and s.name = advance_schedule.name and s.look_at <= v_now
       for update of s skip locked;
    if v_due.row_id is null or v_due.restricted_at is not null then
        perform almanac._open_queue(advance_schedule.queue, 'work', 'operate');
        if not exists (select from almanac.schedule
                        where schedule.queue = advance_schedule.queue and schedule.name = advance_schedule.name) then
            raise exception using errcode = 'PA006',
                message = format('schedule %s does not exist in queue %s',
                                 coalesce(quote_literal(advance_schedule.name), 'null'), advance_schedule.queue),
                detail  = 'Nothing was changed.',
                hint    = 'See select queue, name from almanac.schedule_overview;';
        end if;
        if v_due.row_id is null then
            return;
        end if;
    end if;
    if v_due.held_at is not null then
        perform almanac._say_hold();
        return;
    end if;
    if v_due.is_usual then
        begin
            v_next := almanac._next_run(v_due.rule, v_due.timezone, v_due.tick_at, v_due.dst_gap, v_due.dst_overlap,
                                        v_due.starts_at);
            if v_next > v_now then
                insert into almanac.tick (queue, schedule, tick_at, decision, job_id, decided_at, lateness, ticked_by)
                values (advance_schedule.queue, advance_schedule.name, v_due.tick_at, 'fired',
                        nextval('almanac.job_id_seq'), v_now, v_now - v_due.tick_at, almanac._caller())
                returning * into v_tick;
            end if;
        exception
            -- A tick that the ledger has already, or something to be set aside for: _decide_one meets it again.
            when others then v_next := null;
        end;
    end if;
    if v_tick.job_id is null then
        return query select * from almanac._decide_one(advance_schedule.queue, advance_schedule.name);
        return;
    end if;
    update almanac.schedule
       set next_due_at = v_next, look_at = v_next, decided_until = v_due.tick_at,
           decided_local = v_due.tick_at at time zone almanac._zone(v_due.timezone), fires = schedule.fires + 1
     where schedule.ctid = v_due.row_id;
    insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, lease, concurrency_key,
                             idempotency_key, headers, schedule, tick_at, created_at, created_by)
    values (advance_schedule.queue, v_tick.job_id, v_due.job_type, v_due.priority, v_due.due_at, v_due.payload,
            v_due.max_attempts, v_due.lease, v_due.concurrency_key,
            almanac._tick_key(v_due.key_prefix, advance_schedule.name, v_due.tick_at, false),
            v_due.headers, advance_schedule.name, v_due.tick_at, v_now, v_tick.ticked_by);
    perform nextval('almanac.backdated_job_seq');
    if v_due.is_awaited then
        perform almanac._ring(advance_schedule.queue, v_now);
    end if;
    return next v_tick;
end;
$$;
comment on function almanac.advance_schedule(text, text) is
    'Decide the due ticks of one schedule: ledger row, job and next_due_at in one transaction. Returns the decisions.';

-- 70 _advance_due: everything that is due, in any number of sessions at once: each takes what the others have not
-- locked, the oldest first. Set-based; only where that raises, row by row, to find the one that is to blame.
-- Reads: schedule. Calls: clock, _advance_rows, _decide_ticks, _grace, _is_passing, _lock_live, _quarantine, _ring.
create or replace function almanac._advance_due(batch_size integer, ticked_by text)
    returns almanac.tick_report
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now      timestamptz := almanac.clock();
    v_rows     tid[];
    v_present  tid[];
    v_held     tid[];
    v_schedule almanac.schedule;
    v_queues   text[];
    v_queue    text;
    v_decided  integer := 0;
    v_fired    integer := 0;
    v_room     integer;
    v_report   almanac.tick_report;
begin
    v_report.broken := 0;
    v_rows := array(select s.ctid from almanac.schedule s
                     where s.look_at <= v_now
                     order by s.look_at
                     limit _advance_due.batch_size
                       for update skip locked);
    v_report.fired := 0;
    v_report.skipped := 0;
    v_report.more := cardinality(v_rows) >= _advance_due.batch_size;
    if v_report.more and exists (select from almanac.schedule s
                                  where s.ctid = v_rows[1] and s.look_at < v_now - almanac._grace()) then
        -- More schedules than fit have a backlog, which may take hours. The rest is not to become late over it.
        v_present := array(select s.ctid from almanac.schedule s
                            where s.look_at between v_now - almanac._grace() and v_now and s.ctid <> all (v_rows)
                            order by s.look_at
                            limit greatest(_advance_due.batch_size / 10, 1)
                              for update skip locked);
        v_rows := trim_array(v_rows, cardinality(v_present)) || v_present;
    end if;
    v_report.schedules := cardinality(v_rows);
    if v_report.schedules = 0 then
        return v_report;
    end if;
    begin
        select array_agg(distinct t.queue) filter (where t.job_id is not null), count(t.job_id), count(*)
          into v_queues, v_report.fired, v_decided
          from almanac._advance_rows(v_rows, _advance_due.ticked_by) t;
    exception
        when others then
            if almanac._is_passing(sqlstate) then
                raise;
            end if;
            v_queues := null;
            v_report.fired := 0;
            v_decided := 0;
    end;
    if v_queues is not null then
        perform nextval('almanac.backdated_job_seq');
        foreach v_queue in array v_queues loop
            perform almanac._ring(v_queue, v_now);
        end loop;
    end if;
    v_report.skipped := v_decided - v_report.fired;
    if v_decided < v_report.schedules then
        v_held := almanac._lock_live(v_rows);
        -- Rows that were advanced have moved on; what is still found in its place is not decided yet.
        for v_schedule in
            select s.* from almanac.schedule s
             where s.ctid = any (v_rows) and s.ctid <> all (v_held)
             order by s.look_at
        loop
            v_room := least(_advance_due.batch_size - v_report.fired - v_report.skipped, 10000);
            if v_room <= 0 then
                v_report.more := true;
                exit;
            end if;
            begin
                select count(t.job_id), count(*) into v_fired, v_decided
                  from almanac._decide_ticks(v_schedule, _advance_due.ticked_by, v_room) t;
                v_report.fired := v_report.fired + v_fired;
                v_report.skipped := v_report.skipped + v_decided - v_fired;
                v_report.more := v_report.more or v_decided >= v_room;
            exception
                when others then
                    if almanac._is_passing(sqlstate) then
                        raise;
                    end if;
                    perform almanac._quarantine(v_schedule, sqlerrm);
                    v_report.broken := v_report.broken + 1;
            end;
        end loop;
    end if;
    return v_report;
end;
$$;
comment on function almanac._advance_due(integer, text) is
    'Decide what is due of up to batch_size schedules; reports how many fired, were skipped, or were set aside.';
