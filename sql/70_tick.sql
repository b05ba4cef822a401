-- 70 _beat: notes that somebody ticked. Whoever finds the row locked leaves it: another tick is noting the same.
-- Reads: heartbeat. Writes: heartbeat. Calls: clock.
create or replace function almanac._beat(source text, ticked_by text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    update almanac.heartbeat h set ticked_at = almanac.clock(), ticked_by = _beat.ticked_by
     where h.ctid = (select b.ctid from almanac.heartbeat b where b.source = _beat.source for update skip locked);
    if not found then
        insert into almanac.heartbeat (source, ticked_at, ticked_by)
        select _beat.source, almanac.clock(), _beat.ticked_by
         where not exists (select from almanac.heartbeat b where b.source = _beat.source)
        on conflict on constraint heartbeat_pkey do nothing;
    end if;
end;
$$;
comment on function almanac._beat(text, text) is 'Refresh the heartbeat of a kind of ticker.';

-- 70 _zone_digest: the offsets of a zone, hour by hour from the start of a day on, as one short text. In seconds: how
-- an interval is written is a setting of the session, and others will compare. A zone that has left the zone database
-- has changed as well: raising here would stop every schedule of every zone.
-- Calls: _zone.
create or replace function almanac._zone_digest(timezone text, day date)
    returns text
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select md5(string_agg(extract(epoch from (h at time zone almanac._zone(_zone_digest.timezone))
                                                 - (h at time zone 'UTC'))::integer::text, ',' order by h))
          from generate_series(_zone_digest.day::timestamp at time zone 'UTC',
                               (_zone_digest.day + 400)::timestamp at time zone 'UTC', interval '1 hour') as h);
exception
    when invalid_parameter_value then
        return 'gone';
end;
$$;
comment on function almanac._zone_digest(text, date) is
    'Digest of the offsets of a zone over 400 days; gone: there is no such zone.';

-- 70 _watch_zones: zone rules change under a running server. Looks at one zone a minute, each once an hour, and
-- recomputes what its schedules do next. No tick is lost, and a local time that has had its run gets no other. SKIP
-- LOCKED: if a schedule is held, the zone is looked at again a minute later. Returns how many schedules moved.
-- Reads: zone_watch, schedule. Writes: zone_watch, schedule. Calls: clock, _audit, _is_passing, _quarantine,
-- _tick_after, _zone, _zone_digest.
create or replace function almanac._watch_zones()
    returns integer
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
    v_now      timestamptz := almanac.clock();
    v_watch    almanac.zone_watch;
    v_schedule almanac.schedule;
    v_tick     timestamptz;
    v_until    timestamptz;
    v_changed  boolean := false;
    v_moved    integer := 0;
    v_seen     integer := 0;
    v_all      integer := 0;
begin
    select * into v_watch from almanac.zone_watch w
     where w.looked_at < v_now - interval '1 hour'
     order by w.looked_at limit 1
       for update skip locked;
    if not found then
        return 0;
    end if;
    if v_watch.offsets is not null then
        v_changed := v_watch.offsets
                     <> almanac._zone_digest(v_watch.timezone, (v_watch.looked_at at time zone 'UTC')::date);
    end if;
    if v_changed then
        select count(*) into v_all from almanac.schedule s
         where s.timezone = v_watch.timezone and s.timezone <> 'UTC' and s.cron is not null
           and s.next_due_at is not null and s.moved_to is null and s.error is null;
        for v_schedule in
            select * from almanac.schedule s
             where s.timezone = v_watch.timezone and s.timezone <> 'UTC' and s.cron is not null
               and s.next_due_at is not null and s.moved_to is null and s.error is null
               for update skip locked
        loop
            v_seen := v_seen + 1;
            begin
                v_until := v_schedule.decided_until;
                v_tick := almanac._tick_after(v_schedule, v_until);
                while not (v_schedule.rule).is_wildcard and (v_schedule.rule).every_us is null
                      and v_tick at time zone almanac._zone(v_schedule.timezone) <= v_schedule.decided_local loop
                    v_until := v_tick;
                    v_tick := almanac._tick_after(v_schedule, v_tick);
                end loop;
                continue when v_tick is not distinct from v_schedule.next_due_at;
                update almanac.schedule s set next_due_at = v_tick, look_at = v_tick, decided_until = v_until
                 where s.queue = v_schedule.queue and s.name = v_schedule.name;
                v_moved := v_moved + 1;
            exception
                when others then
                    if almanac._is_passing(sqlstate) then
                        raise;
                    end if;
                    perform almanac._quarantine(v_schedule, sqlerrm);
            end;
        end loop;
        if v_moved > 0 or v_seen >= v_all then
            perform almanac._audit('zone_changed', null, v_watch.timezone, 'the rules of the zone changed', null,
                                   jsonb_build_object('schedules_moved', v_moved));
        end if;
        if v_seen < v_all then
            return v_moved;
        end if;
    end if;
    update almanac.zone_watch w
       set looked_at = v_now, offsets = almanac._zone_digest(w.timezone, (v_now at time zone 'UTC')::date)
     where w.timezone = v_watch.timezone;
    return v_moved;
end;
$$;
comment on function almanac._watch_zones() is 'Notice a change of zone rules and recompute the ticks of that zone.';

-- 70 _keep_house: once a minute, by the tick that gets there first: partitions, retention, zone rules. Where more was
-- past its retention than one call may drop, each tick drops as much again until it has caught up. A task that raises
-- is undone alone, with an alert. The turn is a row that only functions can lock.
-- Reads: heartbeat. Writes: heartbeat, alert. Calls: clock, _beat, _clear_alert, _keep_partitions, _prune,
-- _raise_alert, _watch_zones.
create or replace function almanac._keep_house(batch_size integer, ticked_by text)
    returns boolean
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
    v_now    timestamptz := almanac.clock();
    v_done   boolean := exists (
        select from almanac.heartbeat h
         where h.source = 'housekeeper' and h.ticked_at > v_now - interval '1 minute' and h.ticked_at <= v_now);
    v_behind boolean := exists (select from almanac.heartbeat h where h.source = 'retention');
    v_task   text;
begin
    if v_done and not v_behind then
        return false;
    end if;
    perform from almanac.heartbeat h where h.source = 'housekeeper' for no key update skip locked;
    if not found and exists (select from almanac.heartbeat h where h.source = 'housekeeper') then
        return false;
    end if;
    if not v_done then
        perform almanac._beat('housekeeper', _keep_house.ticked_by);
        update almanac.alert a set cleared_at = v_now where a.alert = 'tick_failed' and a.cleared_at is null;
    end if;
    foreach v_task in array case when v_done then array['retention']
                                 else array['partitions', 'retention', 'zones'] end loop
        begin
            if v_task = 'partitions' then
                perform almanac._keep_partitions();
            elsif v_task = 'zones' then
                perform almanac._watch_zones();
            elsif (almanac._prune(_keep_house.batch_size) ->> 'more')::boolean then
                perform almanac._beat('retention', _keep_house.ticked_by);
            elsif v_behind then
                delete from almanac.heartbeat h where h.source = 'retention';
            end if;
            perform almanac._clear_alert('housekeeping', v_task);
        exception
            when others then
                perform almanac._raise_alert('housekeeping', v_task, 'warning',
                    format('%s failed: %s', v_task, sqlerrm),
                    'Take out of the way what it names. It is tried again every minute; everything else goes on.');
        end;
    end loop;
    return true;
end;
$$;
comment on function almanac._keep_house(integer, text) is
    'Housekeeping, once a minute, and retention until it has caught up; true if any was done.';

-- 70 _tick: one beat: ticks of schedules, expired leases, housekeeping. Forbidden plans look dear to the planner, and
-- dear plans get compiled, which takes longer than a whole tick: hence no jit here.
-- Calls: clock, _advance_due, _beat, _keep_house, _say_hold, held, reclaim_expired.
create or replace function almanac._tick(batch_size integer, source text, ticked_by text)
    returns almanac.tick_report
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
    v_now    timestamptz := almanac.clock();
    v_report almanac.tick_report;
begin
    if _tick.batch_size is null or _tick.batch_size not between 1 and 100000 then
        raise exception using errcode = '22023',
            message = 'batch_size must be between 1 and 100000',
            detail  = format('It is %s.', coalesce(_tick.batch_size::text, 'null')),
            hint    = 'The report says in "more" whether to call again at once.';
    end if;
    if almanac.held() is not null then
        perform almanac._say_hold();
        return row (null, _tick.ticked_by, 0, 0, 0, 0, 0, false, interval '0')::almanac.tick_report;
    end if;
    v_report := almanac._advance_due(_tick.batch_size, _tick.ticked_by);
    v_report.reclaimed := almanac.reclaim_expired(batch_size => _tick.batch_size);
    v_report.more := v_report.more or v_report.reclaimed >= _tick.batch_size;
    perform almanac._keep_house(_tick.batch_size, _tick.ticked_by);
    perform almanac._beat(_tick.source, _tick.ticked_by);
    v_report.ticked_at := v_now;
    v_report.ticked_by := _tick.ticked_by;
    v_report.took := almanac.clock() - v_now;
    return v_report;
end;
$$;
comment on function almanac._tick(integer, text, text) is 'Everything that is due, once, on behalf of a ticker.';

-- 70 _try_tick: for tickers that go on by themselves. A tick that fails is undone, said in a WARNING, and its reason is
-- kept for health(); the next one tries again.
-- Calls: _raise_alert, _tick.
create or replace function almanac._try_tick(source text, ticked_by text)
    returns almanac.tick_report
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    return almanac._tick(2000, _try_tick.source, _try_tick.ticked_by);
exception
    when others then
        perform almanac._raise_alert('tick_failed', _try_tick.source, 'critical',
            format('a tick by %s failed: %s', _try_tick.ticked_by, sqlerrm),
            'No schedule fires and no lease ends until ticks succeed: select almanac.tick(); shows the error whole.');
        raise warning 'tick failed: %', sqlerrm;
        return null;
end;
$$;
comment on function almanac._try_tick(text, text) is 'A tick; or a warning, an alert, and nothing.';

-- 70 tick: for psql, any other scheduler, and everybody in a hurry. Idempotent, concurrent, bounded; no leader.
-- Calls: _caller, _tick.
create or replace function almanac.tick(batch_size integer default 2000)
    returns almanac.tick_report
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    return almanac._tick(tick.batch_size, 'manual', almanac._caller());
end;
$$;
comment on function almanac.tick(integer) is
    'Decide every due tick, reclaim expired leases, keep house; at most batch_size of each. Call again if "more".';

-- 70 tick_if_stale: the dead man's switch, called by every worker every second. While pg_cron, or somebody by hand,
-- ticks, it costs a look at two rows. Otherwise one of the workers ticks each second; if pg_cron was expected to, an
-- alert says so until it is back.
-- Reads: heartbeat, alert. Calls: clock, _check_name, _clear_alert, _raise_alert, _try_tick.
create or replace function almanac.tick_if_stale(worker text, stale_after interval default interval '3 seconds')
    returns boolean
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off
as $$
declare
    v_now      timestamptz := almanac.clock();
    v_pg_cron  timestamptz;
    v_manual   timestamptz;
    v_worker   timestamptz;
    v_report   almanac.tick_report;
begin
    perform almanac._check_name('a worker', tick_if_stale.worker, 200);
    if tick_if_stale.stale_after is null then
        raise exception using errcode = '22004',
            message = 'stale_after must not be null',
            hint    = 'Leave it out to tick after 3 seconds of silence.';
    end if;
    select max(h.ticked_at) filter (where h.source = 'pg_cron'), max(h.ticked_at) filter (where h.source = 'manual'),
           max(h.ticked_at) filter (where h.source = 'worker')
      into v_pg_cron, v_manual, v_worker
      from almanac.heartbeat h;
    -- A beat from the future was written before the clock stepped back: it says nothing about now.
    if v_now - v_pg_cron between interval '0' and tick_if_stale.stale_after
       or v_now - v_manual between interval '0' and tick_if_stale.stale_after then
        if v_now - v_pg_cron between interval '0' and tick_if_stale.stale_after then
            perform from almanac.alert a
              where a.alert = 'ticker_silent' and a.subject = 'pg_cron' and a.cleared_at is null
                for update skip locked;
            if found then
                perform almanac._clear_alert('ticker_silent', 'pg_cron');
            end if;
        end if;
        return false;
    end if;
    if v_now - v_worker between interval '0' and interval '900 milliseconds' then
        return false;
    end if;
    -- One of them is enough; the others find its beat when they look again.
    perform from almanac.heartbeat h where h.source = 'worker' for no key update skip locked;
    if not found and v_worker is not null then
        return false;
    end if;
    -- A while, not for ever: it is one transaction.
    loop
        v_report := almanac._try_tick('worker', tick_if_stale.worker);
        if v_report.ticked_at is null then
            return false;
        end if;
        exit when not v_report.more
            or almanac.clock() - v_now not between interval '0' and interval '500 milliseconds';
    end loop;
    if v_pg_cron is not null then
        perform almanac._raise_alert('ticker_silent', 'pg_cron', 'warning',
            format('pg_cron has not ticked since %s; worker %s ticks instead', v_pg_cron, tick_if_stale.worker),
            'See select * from almanac.health(); start it again with select almanac.start_ticking();');
    end if;
    return true;
end;
$$;
comment on function almanac.tick_if_stale(text, interval) is
    'Tick in the name of a worker if nobody else has ticked for a while; true if it did.';
