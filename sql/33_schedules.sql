-- 33 _definition: what was declared about a schedule, without what became of it since.
create or replace function almanac._definition(schedule almanac.schedule)
    returns jsonb
    language sql stable set search_path = pg_catalog, pg_temp
as $$
    select jsonb_strip_nulls(to_jsonb(schedule) - array[
        'queue', 'name', 'rule', 'revision', 'next_due_at', 'look_at', 'decided_until', 'decided_local', 'moved_to',
        'gate_waiting_at', 'backlog_until', 'backlog_from', 'paced_until', 'skip_until', 'fires', 'paused_at',
        'paused_by', 'pause_reason', 'paused_until', 'error', 'created_at', 'created_by', 'changed_at', 'changed_by'])
        -- Nulls inside these two are the caller's own.
        || jsonb_build_object('payload', schedule.payload, 'headers', schedule.headers);
$$;
comment on function almanac._definition(almanac.schedule) is 'The declared part of a schedule, for revisions.';

-- 33 _clock_changes: whether the clocks of the zone will skip or repeat a local time of a fixed rule within a year.
-- Calls: _next_label, _offset_change, _utc_offset, _zone.
create or replace function almanac._clock_changes(schedule almanac.schedule, after timestamptz)
    returns text
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    c_step   constant bigint := 5 * 86400;
    v_zone   text := almanac._zone(schedule.timezone);
    v_from   bigint := floor(extract(epoch from after));
    v_change bigint;
    v_before bigint;
    v_after  bigint;
    v_label  bigint;
    v_said   text[] := '{}';
begin
    if schedule.cron is null or schedule.timezone = 'UTC' or (schedule.rule).every_us is not null
       or (schedule.rule).is_wildcard then
        return null;
    end if;
    for v_step in 0 .. 73 loop
        v_before := almanac._utc_offset(v_zone, v_from + v_step * c_step);
        v_after := almanac._utc_offset(v_zone, v_from + (v_step + 1) * c_step);
        continue when v_before = v_after;
        v_change := almanac._offset_change(v_zone, v_from + v_step * c_step, v_from + (v_step + 1) * c_step);
        v_label := almanac._next_label(schedule.rule, v_change + least(v_before, v_after));
        continue when v_label is null or v_label >= v_change + greatest(v_before, v_after);
        v_said := v_said || case when v_after > v_before
            then format('on %s the clocks skip %s: it runs %s',
                        to_char(to_timestamp(v_label) at time zone 'UTC', 'YYYY-MM-DD'),
                        to_char(to_timestamp(v_label) at time zone 'UTC', 'HH24:MI'),
                        case schedule.dst_gap when 'skip' then 'not at all that day' else 'right after the gap' end)
            else format('on %s the clocks show %s twice: it runs at %s',
                        to_char(to_timestamp(v_label) at time zone 'UTC', 'YYYY-MM-DD'),
                        to_char(to_timestamp(v_label) at time zone 'UTC', 'HH24:MI'),
                        case schedule.dst_overlap when 'both' then 'both' else 'the ' || schedule.dst_overlap end) end;
    end loop;
    return nullif(array_to_string(v_said, '; '), '');
end;
$$;
comment on function almanac._clock_changes(almanac.schedule, timestamptz) is
    'Says in words which runs of the coming year a change of the clocks affects; null: none.';

-- 33 _check_schedule: what must hold for a definition, said in words rather than by a constraint's name. Returns it
-- with the rule parsed.
-- Calls: _check_name, _check_payload, _check_timezone, _known_timezone, parse_cron.
create or replace function almanac._check_schedule(schedule almanac.schedule, max_payload_bytes integer)
    returns almanac.schedule
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_wrong text;
    v_hint  text := 'Change one of the two; docs/schedules.md shows what goes together.';
begin
    perform almanac._check_name('a schedule', schedule.name, 200);
    perform almanac._check_name('a job type', schedule.job_type, 200);
    perform almanac._check_payload(schedule.payload, schedule.headers, max_payload_bytes);
    if schedule.concurrency_key is not null then
        perform almanac._check_name('a concurrency_key', schedule.concurrency_key, 200);
    end if;
    v_wrong := case
        when not (isfinite(schedule.at) and isfinite(schedule.starts_at) and isfinite(schedule.ends_at))
             or least(schedule.at, schedule.starts_at, schedule.ends_at) < timestamptz '0001-01-02 00:00:00+00'
            then 'at, starts_at and ends_at must be finite times after the year 0'
        when schedule.kind is distinct from 'job' then 'kind must be job'
        when schedule.dst_gap not in ('after', 'skip') then 'dst_gap must be after or skip'
        when schedule.dst_overlap not in ('first', 'second', 'both') then 'dst_overlap must be first, second or both'
        when schedule.jitter not between interval '0' and interval '7 days' then 'jitter must be between 0 and 7 days'
        when schedule.max_fires < 1 then 'max_fires must be positive'
        when schedule.overlap not in ('allow', 'skip', 'queue_one', 'cancel_running')
            then 'overlap must be allow, skip, queue_one or cancel_running'
        when schedule.max_running < 1 then 'max_running must be positive'
        when schedule.catch_up not in ('none', 'latest', 'all') then 'catch_up must be none, latest or all'
        when schedule.max_age not between interval '1 second' and interval '3650 days'
            then 'max_age must be between 1 second and 3650 days'
        when schedule.max_runs not between 1 and 10000 then 'max_runs must be between 1 and 10000'
        when schedule.pace not between 1 and 60000 then 'pace must be between 1 and 60000 a minute'
        when schedule.within not between interval '1 second' and interval '3650 days'
            then 'within must be between 1 second and 3650 days'
        when schedule.gate_closed not in ('skip', 'wait') then 'gate_closed must be skip or wait'
        when schedule.gate_wait not between interval '1 second' and interval '366 days'
            then 'gate_wait must be between 1 second and 366 days'
        when schedule.max_attempts not between 1 and 1000000 then 'max_attempts must be between 1 and 1000000'
    end;
    if v_wrong is not null then
        raise exception using errcode = '22023', message = v_wrong,
            detail = format('Schedule %s was not changed.', schedule.name),
            hint   = 'Correct the argument, or leave it out for the default; see docs/schedules.md.';
    end if;
    if (schedule.cron is null) = (schedule.at is null) then
        v_wrong := 'a schedule has either cron or at';
        v_hint := 'Give cron => ''0 9 * * *'' for every day at nine, or at => ''2027-01-01 09:00+00'' for once.';
    elsif schedule.overlap in ('queue_one', 'cancel_running') and schedule.max_running > 1 then
        v_wrong := format('overlap %s runs one job at a time, so max_running cannot be %s', schedule.overlap,
                          schedule.max_running);
        v_hint := 'Leave max_running out, or use overlap => ''skip'' or ''allow'' with it.';
    elsif schedule.overlap in ('queue_one', 'cancel_running')
          and not starts_with(schedule.concurrency_key, 'schedule:') then
        v_wrong := format('overlap %s needs a concurrency_key that means one job at a time', schedule.overlap);
        v_hint := 'Leave concurrency_key out, or begin it with schedule: for one that several schedules share.';
    elsif schedule.after_schedule is not null and schedule.within is null then
        v_wrong := 'after_schedule needs within: how lately must that schedule have succeeded?';
        v_hint := 'Add, say, within => ''1 hour''.';
    elsif schedule.after_schedule is null
          and coalesce(schedule.within::text, schedule.gate_closed, schedule.gate_wait::text) is not null then
        v_wrong := 'within, gate_closed and gate_wait describe a gate, but after_schedule is missing';
        v_hint := 'Name the schedule to wait for in after_schedule.';
    elsif schedule.after_schedule = schedule.name then
        v_wrong := 'a schedule cannot wait for itself';
        v_hint := 'Name another schedule of the queue in after_schedule; see overlap for runs of the same one.';
    elsif (schedule.gate_closed is not distinct from 'wait') <> (schedule.gate_wait is not null) then
        v_wrong := 'gate_closed => ''wait'' and gate_wait go together';
        v_hint := 'Say how long a tick waits: gate_wait => ''30 minutes''.';
    elsif schedule.catch_up = 'none' and coalesce(schedule.max_age::text, schedule.max_runs::text,
                                                  schedule.pace::text) is not null then
        v_wrong := 'catch_up none makes nothing up, so max_age, max_runs and pace have no meaning';
    elsif schedule.starts_at > schedule.ends_at then
        v_wrong := 'starts_at lies after ends_at';
    end if;
    if v_wrong is not null then
        raise exception using errcode = 'PA009', message = v_wrong,
            detail = format('Schedule %s was not changed.', schedule.name), hint = v_hint;
    end if;
    if schedule.timezone <> 'UTC' and not almanac._known_timezone(schedule.timezone) then
        perform almanac._check_timezone(schedule.timezone);
    end if;
    schedule.rule := case when schedule.cron is not null then almanac.parse_cron(schedule.cron) end;
    return schedule;
end;
$$;
comment on function almanac._check_schedule(almanac.schedule, integer) is
    'Raises unless the definition can be taken; returns it with its rule parsed.';

-- 33 _settle_ticks: when a definition changes, ticks of the old rule that are due and undecided. The newest is handed
-- on to the new definition, the others are coalesced into it. Before a tick that was moved to later none is handed on,
-- nor when the schedule goes away (catch_up null).
-- Calls: _grace, _record_ticks, _tick_after, _caller.
create or replace function almanac._settle_ticks(schedule almanac.schedule, catch_up text, at timestamptz)
    returns timestamptz
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
    v_paused   boolean := schedule.paused_at is not null and coalesce(schedule.paused_until, 'infinity') > at;
    v_missed   boolean := catch_up is null or (catch_up = 'none' and at - schedule.look_at > almanac._grace());
    v_tick     timestamptz;
    v_ticks    timestamptz[] := '{}';
    v_pending  timestamptz;
begin
    if schedule.next_due_at is null or (schedule.next_due_at > at and schedule.moved_to is null) then
        return null;
    end if;
    v_tick := almanac._tick_after(schedule, schedule.decided_until);
    while v_tick <= at loop
        v_ticks := v_ticks || v_tick;
        v_tick := almanac._tick_after(schedule, v_tick);
    end loop;
    if schedule.moved_to <= at then
        v_ticks := array(select distinct t.tick_at from unnest(v_ticks || schedule.moved_to) as t (tick_at)
                          order by t.tick_at);
    end if;
    if not v_paused and not v_missed and schedule.next_due_at <= at and v_ticks <> '{}' then
        v_pending := v_ticks[cardinality(v_ticks)];
        v_ticks := trim_array(v_ticks, 1);
    end if;
    perform almanac._record_ticks(schedule, v_ticks,
        array_fill(case when v_paused then 'skipped_paused' when v_missed then 'skipped_catchup' else 'coalesced' end,
                   array[cardinality(v_ticks)]),
        array_fill(case when catch_up is null then 'the schedule was dropped before it was decided'
                        else 'the definition changed before it was decided' end, array[cardinality(v_ticks)]),
        null, array_fill(false, array[cardinality(v_ticks)]), almanac._caller());
    return v_pending;
end;
$$;
comment on function almanac._settle_ticks(almanac.schedule, text, timestamptz) is
    'Decide what the old rule left undecided; returns the tick that is still to be fired, if any.';

-- 33 _declare: insert or change by name. Declaring what is there already changes nothing at all: no revision, no new
-- next_due_at, no end of a pause. A change keeps the past: ticks up to now are not decided again under the new rule.
-- Reads: tick, schedule, job. Writes: schedule, schedule_revision, zone_watch, job. Calls: clock, _caller, _audit,
-- _hold_queue, _check_schedule, _clock_changes, _clear_alert, _definition, _learn, _settle_ticks, _tick_after.
create or replace function almanac._declare(wanted almanac.schedule, action text)
    returns almanac.declared_schedule
    language plpgsql volatile set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
declare
    v_queue   almanac.queue := almanac._hold_queue(wanted.queue, 'produce', 'operate');
    v_now     timestamptz := almanac.clock();
    v_new     almanac.schedule := almanac._check_schedule(wanted, v_queue.max_payload_bytes);
    v_old     almanac.schedule;
    v_created boolean;
    v_pending timestamptz;
    v_notice  text;
begin
    if v_new.within > v_queue.retention then
        raise exception using errcode = 'PA009',
            message = 'within is longer than the queue keeps history, by which its gate is opened',
            detail  = format('within is %s, and queue %s keeps %s.', v_new.within, v_new.queue, v_queue.retention),
            hint    = format('Keep it longer: select almanac.put_queue(%L, retention => %L);', v_new.queue,
                             v_new.within);
    end if;
    if v_new.overlap in ('queue_one', 'cancel_running') then
        -- One at a time is kept by the claim, not by hope. A name may be as long as a key.
        v_new.concurrency_key := coalesce(v_new.concurrency_key,
            'schedule:' || case when length(v_new.name) <= 191 then v_new.name
                                else left(v_new.name, 158) || ':' || md5(v_new.name) end);
    end if;
    v_new.changed_at := v_now;
    v_new.changed_by := almanac._caller();
    v_new.created_at := v_now;
    v_new.created_by := v_new.changed_by;
    v_new.fires := 0;
    -- A name that was dropped and comes back does not repeat what its predecessor did.
    v_new.decided_until := greatest(
        case when v_new.cron is null then v_new.at - interval '1 microsecond' else v_now end,
        (select max(tick.tick_at) from almanac.tick
          where tick.queue = v_new.queue and tick.schedule = v_new.name
            and tick.tick_at > v_now and tick.decision not in ('triggered', 'backfilled')));
    v_new.next_due_at := almanac._tick_after(v_new, v_new.decided_until);
    v_new.look_at := v_new.next_due_at;
    v_new.revision := 1;
    loop
        if not exists (select from almanac.schedule s where s.queue = v_new.queue and s.name = v_new.name) then
            insert into almanac.schedule select v_new.* on conflict on constraint schedule_pkey do nothing;
            v_created := found;
        else
            v_created := false;
        end if;
        exit when v_created;
        select * into v_old from almanac.schedule s
         where s.queue = v_new.queue and s.name = v_new.name for update;
        -- Whoever was waited for may have dropped it: then there is none, and it is made.
        exit when found;
    end loop;
    if v_created then
        -- Looked up only now that nobody else can add one: a drop that was waited for is a revision too.
        update almanac.schedule s set revision = last.revision + 1
          from (select max(r.revision) as revision from almanac.schedule_revision r
                 where r.queue = v_new.queue and r.schedule = v_new.name) last
         where s.queue = v_new.queue and s.name = v_new.name and last.revision is not null
        returning s.revision into v_new.revision;
        v_new.revision := coalesce(v_new.revision, 1);
    else
        if almanac._definition(v_old) = almanac._definition(v_new) then
            return row (v_old.queue, v_old.name, v_old.next_due_at, v_old.revision, false,
                        false)::almanac.declared_schedule;
        end if;
        -- It may have been waited for, and a tick may have come due meanwhile.
        v_now := almanac.clock();
        v_new.changed_at := v_now;
        v_new.revision := v_old.revision + 1;
        v_new.created_at := v_old.created_at;
        v_new.created_by := v_old.created_by;
        v_new.fires := v_old.fires;
        v_new.paced_until := v_old.paced_until;
        if v_old.error is null then
            v_new.paused_at := v_old.paused_at;
            v_new.paused_by := v_old.paused_by;
            v_new.pause_reason := v_old.pause_reason;
            v_new.paused_until := v_old.paused_until;
        else
            perform almanac._clear_alert('schedule_broken', v_old.queue || '/' || v_old.name);
        end if;
        if row (v_old.cron, v_old.at, v_old.timezone, v_old.dst_gap, v_old.dst_overlap, v_old.starts_at, v_old.ends_at)
           is not distinct from
           row (v_new.cron, v_new.at, v_new.timezone, v_new.dst_gap, v_new.dst_overlap, v_new.starts_at, v_new.ends_at)
           and v_old.next_due_at is not null and v_old.error is null then
            v_new.decided_until := v_old.decided_until;
            v_new.decided_local := v_old.decided_local;
            v_new.next_due_at := v_old.next_due_at;
            -- At once if it waits for its gate, which may be another now; the wait itself is no downtime.
            v_new.look_at := greatest(v_old.next_due_at, least(v_old.look_at, v_now));
            v_new.moved_to := v_old.moved_to;
            v_new.backlog_until := v_old.backlog_until;
            v_new.backlog_from := v_old.backlog_from;
            v_new.skip_until := v_old.skip_until;
        else
            if v_old.error is null then
                v_pending := almanac._settle_ticks(v_old, v_new.catch_up, v_now);
            end if;
            if v_new.cron is not null then
                v_new.decided_until := greatest(v_new.decided_until, v_old.decided_until, v_now);
            elsif v_new.at = v_old.at then
                -- It runs once, also if the ledger has forgotten that it did.
                v_new.decided_until := greatest(v_new.decided_until, v_old.decided_until);
                -- And where it was moved to is that once.
                v_pending := coalesce(v_pending, case when v_old.moved_to > v_now then v_old.moved_to end);
            end if;
            v_new.moved_to := v_pending;
            v_new.next_due_at := coalesce(v_pending, almanac._tick_after(v_new, v_new.decided_until));
            v_new.look_at := v_new.next_due_at;
        end if;
        if v_new.max_fires <= v_new.fires then
            v_new.next_due_at := null;
            v_new.look_at := null;
        end if;
        update almanac.schedule s
           set kind = v_new.kind, job_type = v_new.job_type, payload = v_new.payload, cron = v_new.cron,
               at = v_new.at, rule = v_new.rule, timezone = v_new.timezone, dst_gap = v_new.dst_gap,
               dst_overlap = v_new.dst_overlap, starts_at = v_new.starts_at, ends_at = v_new.ends_at,
               jitter = v_new.jitter, max_fires = v_new.max_fires, overlap = v_new.overlap,
               max_running = v_new.max_running, catch_up = v_new.catch_up, max_age = v_new.max_age,
               max_runs = v_new.max_runs, pace = v_new.pace, after_schedule = v_new.after_schedule,
               within = v_new.within, gate_closed = v_new.gate_closed, gate_wait = v_new.gate_wait,
               priority = v_new.priority, max_attempts = v_new.max_attempts,
               concurrency_key = v_new.concurrency_key, headers = v_new.headers, template = v_new.template,
               description = v_new.description, revision = v_new.revision, next_due_at = v_new.next_due_at,
               look_at = v_new.look_at, decided_until = v_new.decided_until, decided_local = v_new.decided_local,
               moved_to = v_new.moved_to, gate_waiting_at = v_new.gate_waiting_at,
               backlog_until = v_new.backlog_until, backlog_from = v_new.backlog_from,
               paced_until = v_new.paced_until, skip_until = v_new.skip_until, paused_at = v_new.paused_at,
               paused_by = v_new.paused_by, pause_reason = v_new.pause_reason, paused_until = v_new.paused_until,
               error = v_new.error, changed_at = v_new.changed_at, changed_by = v_new.changed_by
         where s.queue = v_new.queue and s.name = v_new.name;
        if v_new.overlap in ('queue_one', 'cancel_running')
           and v_new.concurrency_key is distinct from v_old.concurrency_key then
            -- One at a time includes the jobs of the definition before.
            update almanac.job
               set concurrency_key = v_new.concurrency_key, parked_at = null,
                   counted_at = case when job.state = 'running' then coalesce(job.counted_at, job.claimed_at) end
             where job.queue = v_new.queue and job.id = any (array(
                select job.id from almanac.job where job.queue = v_new.queue and job.schedule = v_new.name
                 order by job.id for update));
        end if;
    end if;
    insert into almanac.schedule_revision (queue, schedule, revision, action, changed_at, changed_by, before, after)
    values (v_new.queue, v_new.name, v_new.revision, _declare.action, v_now, v_new.changed_by,
            case when not v_created then almanac._definition(v_old) end, almanac._definition(v_new));
    perform almanac._audit(_declare.action, v_new.queue, v_new.name, null,
                           case when not v_created then almanac._definition(v_old) end, almanac._definition(v_new));
    perform almanac._learn(v_queue, v_new.priority, v_new.concurrency_key is not null);
    if v_new.timezone <> 'UTC' then
        insert into almanac.zone_watch (timezone, looked_at) values (v_new.timezone, '-infinity')
        on conflict on constraint zone_watch_pkey do nothing;
    end if;
    v_notice := almanac._clock_changes(v_new, v_now);
    if v_notice is not null then
        raise notice 'schedule %: %', v_new.name, v_notice;
    end if;
    if v_new.after_schedule is not null and not exists (
        select from almanac.schedule s where s.queue = v_new.queue and s.name = v_new.after_schedule) then
        raise notice 'schedule %: % does not exist yet, so its gate stays closed', v_new.name, v_new.after_schedule;
    end if;
    return row (v_new.queue, v_new.name, v_new.next_due_at, v_new.revision, v_created, true)::almanac.declared_schedule;
end;
$$;
comment on function almanac._declare(almanac.schedule, text) is
    'Insert a schedule or change it to the given definition.';

-- 33 put_schedule: the whole definition at once; what is not given has its default (or the template's), so that a
-- program can declare its schedules every time it starts.
-- Reads: schedule_template. Calls: _declare.
create or replace function almanac.put_schedule(
    queue text,
    name text,
    cron text default null,
    job_type text default null,
    payload jsonb default '{}',
    timezone text default null,
    at timestamptz default null,
    template text default null,
    starts_at timestamptz default null,
    ends_at timestamptz default null,
    dst_gap text default null,
    dst_overlap text default null,
    jitter interval default null,
    max_fires bigint default null,
    overlap text default null,
    max_running integer default null,
    catch_up text default null,
    max_age interval default null,
    max_runs integer default null,
    pace integer default null,
    after_schedule text default null,
    within interval default null,
    gate_closed text default null,
    gate_wait interval default null,
    priority integer default 0,
    max_attempts integer default null,
    concurrency_key text default null,
    headers jsonb default null,
    description text default null,
    kind text default 'job')
    returns almanac.declared_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_template almanac.schedule_template;
    v_wanted   almanac.schedule;
begin
    if put_schedule.template is not null then
        select * into v_template from almanac.schedule_template t where t.template = put_schedule.template;
        if not found then
            raise exception using errcode = 'PA012',
                message = format('template %s does not exist', quote_literal(put_schedule.template)),
                detail  = format('Schedule %s was not changed.', put_schedule.name),
                hint    = 'See select * from almanac.schedule_template_overview, or make it with '
                          'put_schedule_template.';
        end if;
    end if;
    if put_schedule.priority not between -32768 and 32767 then
        raise exception using errcode = '22023', message = 'priority must be between -32768 and 32767',
            detail = format('It is %s.', put_schedule.priority), hint = 'Higher is claimed first; 0 is usual.';
    end if;
    v_wanted.queue := put_schedule.queue;
    v_wanted.name := put_schedule.name;
    v_wanted.kind := put_schedule.kind;
    v_wanted.job_type := put_schedule.job_type;
    v_wanted.payload := coalesce(put_schedule.payload, '{}');
    v_wanted.at := date_trunc('second', put_schedule.at);
    v_wanted.cron := coalesce(put_schedule.cron, case when put_schedule.at is null then v_template.cron end);
    v_wanted.timezone := coalesce(put_schedule.timezone, v_template.timezone, 'UTC');
    v_wanted.dst_gap := coalesce(put_schedule.dst_gap, v_template.dst_gap, 'after');
    v_wanted.dst_overlap := coalesce(put_schedule.dst_overlap, v_template.dst_overlap, 'first');
    v_wanted.starts_at := put_schedule.starts_at;
    v_wanted.ends_at := put_schedule.ends_at;
    v_wanted.jitter := coalesce(put_schedule.jitter, v_template.jitter, interval '0');
    v_wanted.max_fires := put_schedule.max_fires;
    v_wanted.overlap := coalesce(put_schedule.overlap, v_template.overlap, 'allow');
    v_wanted.max_running := coalesce(put_schedule.max_running, v_template.max_running);
    v_wanted.catch_up := coalesce(put_schedule.catch_up, v_template.catch_up, 'latest');
    v_wanted.max_age := coalesce(put_schedule.max_age, v_template.max_age);
    v_wanted.max_runs := coalesce(put_schedule.max_runs, v_template.max_runs);
    v_wanted.pace := coalesce(put_schedule.pace, v_template.pace);
    v_wanted.after_schedule := put_schedule.after_schedule;
    v_wanted.within := put_schedule.within;
    v_wanted.gate_closed := coalesce(put_schedule.gate_closed,
        case when put_schedule.gate_wait is not null then 'wait'
             when put_schedule.after_schedule is not null then 'skip' end);
    v_wanted.gate_wait := put_schedule.gate_wait;
    v_wanted.priority := coalesce(put_schedule.priority, 0);
    v_wanted.max_attempts := put_schedule.max_attempts;
    v_wanted.concurrency_key := put_schedule.concurrency_key;
    v_wanted.headers := put_schedule.headers;
    v_wanted.template := put_schedule.template;
    v_wanted.description := coalesce(put_schedule.description, v_template.description);
    return almanac._declare(v_wanted, 'put_schedule');
end;
$$;
comment on function almanac.put_schedule(text, text, text, text, jsonb, text, timestamptz, text, timestamptz,
    timestamptz, text, text, interval, bigint, text, integer, text, interval, integer, integer, text, interval, text,
    interval, integer, integer, text, jsonb, text, text) is
    'Declare a schedule: insert it, or change it to this; declaring the same again changes nothing.';

-- 33 put_schedule_template: usual settings under a name.
-- Reads: schedule_template. Writes: schedule_template. Calls: clock, _caller, _audit, _check_name, _check_timezone,
-- _known_timezone, parse_cron.
create or replace function almanac.put_schedule_template(
    name text,
    cron text default null,
    timezone text default null,
    dst_gap text default null,
    dst_overlap text default null,
    jitter interval default null,
    overlap text default null,
    max_running integer default null,
    catch_up text default null,
    max_age interval default null,
    max_runs integer default null,
    pace integer default null,
    description text default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_before almanac.schedule_template;
    v_after  almanac.schedule_template;
begin
    perform almanac._check_name('a template', put_schedule_template.name, 200);
    perform almanac.parse_cron(put_schedule_template.cron);
    if put_schedule_template.timezone is not null and not almanac._known_timezone(put_schedule_template.timezone) then
        perform almanac._check_timezone(put_schedule_template.timezone);
    end if;
    select * into v_before from almanac.schedule_template t where t.template = put_schedule_template.name for update;
    v_after := row (put_schedule_template.name, put_schedule_template.cron, put_schedule_template.timezone,
                    put_schedule_template.dst_gap, put_schedule_template.dst_overlap, put_schedule_template.jitter,
                    put_schedule_template.overlap, put_schedule_template.max_running, put_schedule_template.catch_up,
                    put_schedule_template.max_age, put_schedule_template.max_runs, put_schedule_template.pace,
                    put_schedule_template.description, v_before.changed_at, v_before.changed_by);
    if v_after is not distinct from v_before then
        return;
    end if;
    insert into almanac.schedule_template as t (template, cron, timezone, dst_gap, dst_overlap, jitter, overlap,
        max_running, catch_up, max_age, max_runs, pace, description, changed_at, changed_by)
    values (v_after.template, v_after.cron, v_after.timezone, v_after.dst_gap, v_after.dst_overlap, v_after.jitter,
            v_after.overlap, v_after.max_running, v_after.catch_up, v_after.max_age, v_after.max_runs, v_after.pace,
            v_after.description, almanac.clock(), almanac._caller())
    on conflict on constraint schedule_template_pkey do update
       set cron = excluded.cron, timezone = excluded.timezone, dst_gap = excluded.dst_gap,
           dst_overlap = excluded.dst_overlap, jitter = excluded.jitter, overlap = excluded.overlap,
           max_running = excluded.max_running, catch_up = excluded.catch_up, max_age = excluded.max_age,
           max_runs = excluded.max_runs, pace = excluded.pace, description = excluded.description,
           changed_at = excluded.changed_at, changed_by = excluded.changed_by;
    perform almanac._audit('put_schedule_template', null, put_schedule_template.name, null,
                           case when v_before.template is not null then to_jsonb(v_before) end, to_jsonb(v_after));
end;
$$;
comment on function almanac.put_schedule_template(text, text, text, text, text, interval, text, integer, text, interval,
    integer, integer, text) is
    'Make a template or change it; schedules that were put with it keep what they have.';

-- 33 _find_schedule: operators name a schedule; the queue only where the name alone does not say which. Locks it, so
-- that a tick that is just deciding about it comes first. Without lock it is only for looking, which needs no right.
-- Reads: queue, schedule. Calls: _open_queue.
create or replace function almanac._find_schedule(name text, queue text, lock boolean default true)
    returns almanac.schedule
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queues   text[];
    v_schedule almanac.schedule;
begin
    select array_agg(s.queue order by s.queue) into v_queues
      from almanac.queue q
      join almanac.schedule s on s.queue = q.queue and s.name = _find_schedule.name
     where _find_schedule.queue is null or q.queue = _find_schedule.queue;
    if cardinality(v_queues) > 1 then
        raise exception using errcode = 'PA006',
            message = format('schedule %s exists in several queues', quote_literal(_find_schedule.name)),
            detail  = 'They are ' || array_to_string(v_queues, ', ') || '.',
            hint    = format('Add queue => %L.', v_queues[1]);
    elsif cardinality(v_queues) = 1 then
        if _find_schedule.lock then
            perform almanac._open_queue(v_queues[1], 'operate');
            select * into v_schedule from almanac.schedule s
             where s.queue = v_queues[1] and s.name = _find_schedule.name for update;
        else
            select * into v_schedule from almanac.schedule s
             where s.queue = v_queues[1] and s.name = _find_schedule.name;
        end if;
    end if;
    if v_schedule.name is null then
        raise exception using errcode = 'PA006',
            message = format('schedule %s does not exist%s', coalesce(quote_literal(_find_schedule.name), 'null'),
                             coalesce(' in queue ' || _find_schedule.queue, '')),
            detail  = 'Nothing was changed.',
            hint    = 'See select queue, name from almanac.schedule_overview;';
    end if;
    return v_schedule;
end;
$$;
comment on function almanac._find_schedule(text, text, boolean) is
    'The schedule of that name, locked; raises PA006 if there is none, or several.';

-- 33 revert_schedule: back to the definition that a revision had made; a new revision says so. A schedule that was
-- dropped comes back this way, if its queue is given.
-- Reads: schedule, schedule_revision. Calls: _declare, _definition, _find_schedule, _open_queue.
create or replace function almanac.revert_schedule(
    name text, revision integer, queue text default null, dry_run boolean default false)
    returns almanac.operated_schedule
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_schedule almanac.schedule;
    v_then     almanac.schedule_revision;
    v_declared almanac.declared_schedule;
begin
    if revert_schedule.queue is null then
        v_schedule := almanac._find_schedule(revert_schedule.name, null);
    else
        perform almanac._open_queue(revert_schedule.queue, 'operate');
        select * into v_schedule from almanac.schedule s
         where s.queue = revert_schedule.queue and s.name = revert_schedule.name;
    end if;
    select * into v_then from almanac.schedule_revision r
     where r.queue = coalesce(revert_schedule.queue, v_schedule.queue) and r.schedule = revert_schedule.name
       and r.revision = revert_schedule.revision;
    if v_then.after is null then
        raise exception using errcode = 'PA012',
            message = format('schedule %s has no definition of revision %s', quote_literal(revert_schedule.name),
                             revert_schedule.revision),
            detail  = 'There is no such revision, or it is the one that dropped the schedule.',
            hint    = 'See select * from almanac.schedule_history where schedule = ''...'';';
    end if;
    if revert_schedule.dry_run then
        return row (v_then.queue, v_then.schedule, 'revert_schedule', true,
                    v_then.after is distinct from almanac._definition(v_schedule), v_schedule.next_due_at, 0, null,
                    format('would go back to revision %s: %s', v_then.revision,
                           v_then.after))::almanac.operated_schedule;
    end if;
    v_schedule := jsonb_populate_record(null::almanac.schedule, v_then.after);
    v_schedule.queue := v_then.queue;
    v_schedule.name := v_then.schedule;
    v_declared := almanac._declare(v_schedule, 'revert_schedule');
    return row (v_then.queue, v_then.schedule, 'revert_schedule', false, v_declared.changed, v_declared.next_due_at, 0,
                null, case when v_declared.changed
                           then format('is as revision %s made it; this is revision %s', v_then.revision,
                                       v_declared.revision)
                           else 'was like that already' end)::almanac.operated_schedule;
end;
$$;
comment on function almanac.revert_schedule(text, integer, text, boolean) is
    'Give a schedule the definition that one of its revisions made.';

-- The usual ones, for those who would otherwise look up the fields of cron.
insert into almanac.schedule_template (template, cron, description, changed_at, changed_by)
values ('hourly', '@hourly', 'Every hour, on the hour', almanac.clock(), almanac._caller()),
       ('daily midnight', '0 0 * * *', 'Every day at midnight', almanac.clock(), almanac._caller()),
       ('weekdays 9:00', '0 9 * * MON-FRI', 'Monday to Friday at 9:00', almanac.clock(), almanac._caller()),
       ('weekly Monday 8:00', '0 8 * * MON', 'Every Monday at 8:00', almanac.clock(), almanac._caller())
on conflict on constraint schedule_template_pkey do nothing;
