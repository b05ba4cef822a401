-- 31 put_queue: make a queue, or change what is given and leave the rest. Null means "as it is"; a limit is lifted
-- by naming it in unset, because null cannot say both.
-- Reads: installation, queue, schedule. Writes: queue, queue_turn, job. Calls: clock, _caller, _check_name, _authorize,
-- _audit, _new_key_prefix.
create or replace function almanac.put_queue(
    queue text,
    lease interval default null,
    max_attempts integer default null,
    base_delay interval default null,
    max_delay interval default null,
    jitter double precision default null,
    retention interval default null,
    max_running integer default null,
    max_running_per_key integer default null,
    rate_limit integer default null,
    rate_interval interval default null,
    max_payload_bytes integer default null,
    unset text[] default '{}')
    returns almanac.queue
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_now        timestamptz := almanac.clock();
    v_before     almanac.queue;
    v_after      almanac.queue;
    v_constraint name;
    v_gate       record;
begin
    perform almanac._check_name('a queue', put_queue.queue, 200);
    if not coalesce(put_queue.unset, '{}') <@ array['max_running', 'rate_limit'] then
        raise exception using errcode = '22023',
            message = format('cannot unset %s', put_queue.unset),
            hint    = 'Only max_running and rate_limit can be lifted; everything else has a value.';
    end if;
    loop
        select * into v_before from almanac.queue where queue.queue = put_queue.queue for update;
        exit when found;
        -- Locked, because hold would not see a queue that is not committed yet.
        insert into almanac.queue (queue, key_prefix, held_at, created_at, created_by)
        values (put_queue.queue, almanac._new_key_prefix(put_queue.queue),
                (select i.held_at from almanac.installation i for share), v_now, almanac._caller())
        on conflict on constraint queue_pkey do nothing;
        exit when found;
    end loop;
    if v_before.restricted_at is not null then
        perform almanac._authorize(put_queue.queue, 'operate');
    end if;
    if put_queue.retention < v_before.retention then
        select s.name, s.within into v_gate from almanac.schedule s
         where s.queue = put_queue.queue and s.within > put_queue.retention
         order by s.within desc limit 1;
        if found then
            raise exception using errcode = 'PA009',
                message = 'retention is shorter than a gate looks back into history',
                detail  = format('retention is %s, and schedule %s has within %s.', put_queue.retention,
                                 quote_literal(v_gate.name), v_gate.within),
                hint    = format('Keep at least %s, or shorten the gate first with put_schedule.', v_gate.within);
        end if;
    end if;
    update almanac.queue
       set lease = coalesce(put_queue.lease, queue.lease),
           max_attempts = coalesce(put_queue.max_attempts, queue.max_attempts),
           base_delay = coalesce(put_queue.base_delay, queue.base_delay),
           max_delay = coalesce(put_queue.max_delay, queue.max_delay),
           jitter = coalesce(put_queue.jitter, queue.jitter),
           retention = coalesce(put_queue.retention, queue.retention),
           max_running = case when 'max_running' = any (put_queue.unset) then null
                              else coalesce(put_queue.max_running, queue.max_running) end,
           max_running_per_key = coalesce(put_queue.max_running_per_key, queue.max_running_per_key),
           rate_limit = case when 'rate_limit' = any (put_queue.unset) then null
                             else coalesce(put_queue.rate_limit, queue.rate_limit) end,
           rate_interval = case when 'rate_limit' = any (put_queue.unset) then null
                                else coalesce(put_queue.rate_interval, queue.rate_interval) end,
           max_payload_bytes = coalesce(put_queue.max_payload_bytes, queue.max_payload_bytes)
     where queue.queue = put_queue.queue
    returning * into v_after;
    if v_before.queue is null or row (v_after.rate_limit, v_after.rate_interval)
                                 is distinct from row (v_before.rate_limit, v_before.rate_interval) then
        insert into almanac.queue_turn (queue, tokens, refilled_at)
        values (put_queue.queue, v_after.rate_limit, case when v_after.rate_limit is not null then v_now end)
        on conflict on constraint queue_turn_pkey do update
           set tokens = excluded.tokens, refilled_at = excluded.refilled_at;
    end if;
    if v_after.max_running_per_key > v_before.max_running_per_key then
        -- Waits for nobody, and so with nobody in a circle; whoever holds one is about to end it or bring it back.
        update almanac.job set parked_at = null
         where job.ctid = any (array(
            select job.ctid from almanac.job
             where job.queue = put_queue.queue and job.parked_at is not null
               for update skip locked));
    end if;
    if v_after is distinct from v_before then
        perform almanac._audit('put_queue', put_queue.queue, null, null,
                               case when v_before.queue is not null then to_jsonb(v_before) end, to_jsonb(v_after));
    end if;
    return v_after;
exception
    when check_violation then
        get stacked diagnostics v_constraint = constraint_name;
        raise exception using errcode = '22023',
            message = format('queue %s cannot be set so', put_queue.queue),
            detail  = (select obj_description(c.oid, 'pg_constraint') from pg_constraint c
                        where c.conname = v_constraint and c.connamespace = 'almanac'::regnamespace),
            hint    = 'Correct it and call again. Nothing was changed.';
end;
$$;
comment on function almanac.put_queue(text, interval, integer, interval, interval, double precision, interval, integer,
    integer, integer, interval, integer, text[]) is
    'Make a queue or change the given settings of it; unset => array[''max_running'', ''rate_limit''] lifts a limit.';

-- 31 drop_queue: for a queue made by mistake or not wanted any more, once nothing lives in it; its history stays for
-- the longest retention. Takes ACCESS EXCLUSIVE on queue, so that no job is being made; lock_timeout and an idle limit
-- keep others from waiting long. Needs read committed, to see all there is by then.
-- Reads: job, schedule. Writes: queue, queue_turn, queue_grant, job_type, dedup, sleeper, claim. Calls: _audit,
-- _open_queue.
create or replace function almanac.drop_queue(queue text, reason text default null)
    returns void
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set lock_timeout = '500ms'
as $$
declare
    v_queue almanac.queue;
    v_why   text;
    v_hint  text;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception using errcode = '25000',
            message = 'a queue can only be dropped at isolation level read committed',
            detail  = format('The level is %s.', current_setting('transaction_isolation')),
            hint    = 'Begin with: begin isolation level read committed; or set default_transaction_isolation.';
    end if;
    perform set_config('idle_in_transaction_session_timeout', '2s', true)
      where current_setting('idle_in_transaction_session_timeout')::interval not between '1 ms' and '2 s';
    begin
        lock table almanac.queue in access exclusive mode;
    exception
        when lock_not_available then
            v_why := 'A transaction that has not ended yet has used this queue or another one.';
            v_hint := 'Try again; pg_stat_activity shows transactions that stay open.';
    end;
    v_queue := almanac._open_queue(drop_queue.queue, 'operate');
    if v_queue.queue = 'default' then
        v_why := 'It is part of the installation, and the next migration would make it again.';
        v_hint := 'Leave it empty, or pause it: select almanac.pause_queue(''default'');';
    elsif v_why is null and exists (select from almanac.job where job.queue = drop_queue.queue) then
        v_why := format('Live jobs in it: %s.', (select count(*) from almanac.job where job.queue = drop_queue.queue));
        v_hint := format('Let workers finish them, or cancel them: select almanac.cancel(queue, job_id) from '
                         'almanac.job_overview where queue = %L and finished_at is null;', drop_queue.queue);
    elsif v_why is null then
        select format('It has schedules: %s.', string_agg(quote_literal(s.name), ', ' order by s.name)),
               format('Drop them first: select almanac.drop_schedule(name, queue => queue) from '
                      'almanac.schedule_overview where queue = %L;', drop_queue.queue)
          into v_why, v_hint
          from (select schedule.name from almanac.schedule where schedule.queue = drop_queue.queue
                 order by schedule.name limit 10) s
        having count(*) > 0;
    end if;
    if v_why is not null then
        raise exception using errcode = 'PA013',
            message = format('queue %s cannot be dropped', quote_literal(drop_queue.queue)),
            detail  = v_why,
            hint    = v_hint;
    end if;
    delete from almanac.queue where queue.queue = drop_queue.queue;
    delete from almanac.queue_turn where queue_turn.queue = drop_queue.queue;
    delete from almanac.queue_grant where queue_grant.queue = drop_queue.queue;
    delete from almanac.job_type where job_type.queue = drop_queue.queue;
    delete from almanac.dedup where dedup.queue = drop_queue.queue;
    delete from almanac.sleeper where sleeper.queue = drop_queue.queue;
    -- Of jobs that have ended.
    delete from almanac.claim where claim.queue = drop_queue.queue;
    perform almanac._audit('drop_queue', drop_queue.queue, null, drop_queue.reason, to_jsonb(v_queue), null);
end;
$$;
comment on function almanac.drop_queue(text, text) is
    'Drop a queue in which nothing lives, with its types and rights; history stays. Raises PA013 while it is in use.';

-- 31 pause_queue: nothing is claimed from the queue until it is resumed or the time has come. What runs goes on.
-- Writes: queue. Calls: clock, _caller, _open_queue, _audit.
create or replace function almanac.pause_queue(queue text, reason text default null, until timestamptz default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_now   timestamptz := almanac.clock();
    v_queue almanac.queue := almanac._open_queue(pause_queue.queue, 'operate');
begin
    pause_queue.until := nullif(pause_queue.until, 'infinity');
    if pause_queue.until <= v_now then
        raise exception using errcode = '22023',
            message = 'until lies in the past',
            detail  = format('It is %s, and now is %s.', pause_queue.until, v_now),
            hint    = 'Leave until out to pause without an end.';
    end if;
    update almanac.queue
       set paused_at = v_now, paused_by = almanac._caller(),
           pause_reason = pause_queue.reason, paused_until = pause_queue.until
     where queue.queue = pause_queue.queue;
    perform almanac._audit('pause_queue', pause_queue.queue, null, pause_queue.reason,
        jsonb_build_object('paused_at', v_queue.paused_at, 'paused_until', v_queue.paused_until),
        jsonb_build_object('paused_at', v_now, 'paused_until', pause_queue.until));
end;
$$;
comment on function almanac.pause_queue(text, text, timestamptz) is 'Stop claims from a queue; running jobs go on.';

-- 31 _ring: wakes workers that sleep past the time a job is due. Every NOTIFY takes a database-wide lock at commit, so
-- nothing is sent when nobody sleeps; a bell that is lost costs the sleeper's polling interval.
-- Reads: sleeper.
create or replace function almanac._ring(queue text, due_at timestamptz)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from almanac.sleeper
                where sleeper.queue = _ring.queue and sleeper.sleeps_until > _ring.due_at) then
        perform pg_notify('almanac', _ring.queue);
    end if;
end;
$$;
comment on function almanac._ring(text, timestamptz) is 'Notify channel almanac if a worker sleeps past due_at.';

-- 31 resume_queue: claims go on.
-- Writes: queue. Calls: clock, _open_queue, _audit, _ring.
create or replace function almanac.resume_queue(queue text, reason text default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue almanac.queue := almanac._open_queue(resume_queue.queue, 'operate');
begin
    if v_queue.paused_at is null then
        return;
    end if;
    update almanac.queue
       set paused_at = null, paused_by = null, pause_reason = null, paused_until = null
     where queue.queue = resume_queue.queue;
    perform almanac._audit('resume_queue', resume_queue.queue, null, resume_queue.reason,
        jsonb_build_object('paused_at', v_queue.paused_at, 'paused_until', v_queue.paused_until), null);
    perform almanac._ring(resume_queue.queue, almanac.clock());
end;
$$;
comment on function almanac.resume_queue(text, text) is 'End the pause of a queue.';

-- 31 put_job_type: what differs for one type. Declared by clients at start-up, so saying the same again does nothing.
-- Reads: job_type. Writes: job_type. Calls: clock, _caller, _check_name, _hold_queue, _audit.
create or replace function almanac.put_job_type(
    queue text,
    job_type text,
    lease interval default null,
    max_attempts integer default null,
    base_delay interval default null,
    max_delay interval default null,
    jitter double precision default null,
    schema jsonb default null,
    description text default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_before     almanac.job_type;
    v_after      almanac.job_type;
    v_constraint name;
begin
    perform almanac._hold_queue(put_job_type.queue, 'work', 'operate');
    perform almanac._check_name('a job type', put_job_type.job_type, 200);
    select * into v_before from almanac.job_type
     where job_type.queue = put_job_type.queue and job_type.job_type = put_job_type.job_type;
    insert into almanac.job_type (queue, job_type, lease, max_attempts, base_delay, max_delay, jitter, schema,
                                  description, changed_at, changed_by)
    values (put_job_type.queue, put_job_type.job_type, put_job_type.lease, put_job_type.max_attempts,
            put_job_type.base_delay, put_job_type.max_delay, put_job_type.jitter, put_job_type.schema,
            put_job_type.description, almanac.clock(), almanac._caller())
    on conflict on constraint job_type_pkey do update
       set lease = excluded.lease, max_attempts = excluded.max_attempts, base_delay = excluded.base_delay,
           max_delay = excluded.max_delay, jitter = excluded.jitter, schema = excluded.schema,
           description = excluded.description, changed_at = excluded.changed_at, changed_by = excluded.changed_by
     where (job_type.lease, job_type.max_attempts, job_type.base_delay, job_type.max_delay, job_type.jitter,
            job_type.schema, job_type.description)
           is distinct from (excluded.lease, excluded.max_attempts, excluded.base_delay, excluded.max_delay,
                             excluded.jitter, excluded.schema, excluded.description)
    returning * into v_after;
    if found then
        perform almanac._audit('put_job_type', put_job_type.queue, put_job_type.job_type, null,
                               case when v_before.queue is not null then to_jsonb(v_before) end, to_jsonb(v_after));
    end if;
exception
    when check_violation then
        get stacked diagnostics v_constraint = constraint_name;
        raise exception using errcode = '22023',
            message = format('job type %s cannot be set so', put_job_type.job_type),
            detail  = (select obj_description(c.oid, 'pg_constraint') from pg_constraint c
                        where c.conname = v_constraint and c.connamespace = 'almanac'::regnamespace),
            hint    = 'Correct it and call again. Nothing was changed.';
end;
$$;
comment on function almanac.put_job_type(
    text, text, interval, integer, interval, interval, double precision, jsonb, text) is
    'Say what differs for one type of job in a queue; declaring the same again changes nothing.';

-- The queue for those who need only one.
insert into almanac.queue (queue, key_prefix, created_at, created_by)
values ('default', almanac._new_key_prefix('default'), almanac.clock(), almanac._caller())
on conflict on constraint queue_pkey do nothing;
insert into almanac.queue_turn (queue) values ('default') on conflict on constraint queue_turn_pkey do nothing;
