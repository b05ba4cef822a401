-- 71 _pg_cron_state: what there is of pg_cron. Everything about it is dynamic: this installs where it does not exist.
create or replace function almanac._pg_cron_state()
    returns almanac.pg_cron_state
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state almanac.pg_cron_state;
begin
    v_state.database := current_setting('cron.database_name', true);
    v_state.loaded := v_state.database is not null;
    select extversion into v_state.version from pg_extension where extname = 'pg_cron';
    if v_state.version is not null then
        execute 'select jobid, active from cron.job where jobname = $1 and database = current_database()'
            into v_state.job_id, v_state.active
            using 'almanac';
        if v_state.job_id is not null then
            execute 'select start_time, status from cron.job_run_details where jobid = $1 order by runid desc limit 1'
                into v_state.last_run_at, v_state.last_status
                using v_state.job_id;
        end if;
    end if;
    return v_state;
end;
$$;
comment on function almanac._pg_cron_state() is 'Whether pg_cron is loaded, lives in this database, and ticks.';

-- 71 _tick_from_pg_cron: a tick in the name of pg_cron. Also forgets its own runs of more than an hour ago, of which
-- there would otherwise be one for each second.
-- Calls: clock, _pg_cron_state, _tick.
create or replace function almanac._tick_from_pg_cron()
    returns almanac.tick_report
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_report almanac.tick_report := almanac._tick(2000, 'pg_cron', 'pg_cron');
begin
    if extract(second from v_report.ticked_at)::integer = 30 then
        begin
            execute 'delete from cron.job_run_details where jobid = $1 and end_time < $2'
                using (almanac._pg_cron_state()).job_id, almanac.clock() - interval '1 hour';
        exception
            -- Its log is not worth a tick.
            when insufficient_privilege or undefined_table then null;
        end;
    end if;
    return v_report;
end;
$$;
comment on function almanac._tick_from_pg_cron() is 'A tick on behalf of pg_cron, which also prunes its run log.';

-- 71 _tick_loop: what pg_cron calls. Every second with once: ticks until there is no more. Before 1.5 it can only be
-- called once a minute: then ticks every second and ends before the next minute. Commits after each tick, so no lock
-- and no snapshot is held for longer than that. A procedure that commits cannot pin its search_path; it sets it for the
-- session, which is pg_cron's own.
-- Calls: clock, _tick_from_pg_cron.
create or replace procedure almanac._tick_loop(once boolean default false)
    language plpgsql
as $$
declare
    v_more boolean;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
    loop
        v_more := (almanac._tick_from_pg_cron()).more;
        commit;
        exit when extract(second from almanac.clock()) >= 58.5 or (once and not v_more);
        if not v_more then
            perform pg_sleep(1 - extract(microsecond from almanac.clock())::integer % 1000000 / 1000000.0);
        end if;
    end loop;
end;
$$;
comment on procedure almanac._tick_loop(boolean) is
    'Tick until nothing is left, or every second until shortly before the next minute.';

-- 71 start_ticking: lets pg_cron tick in this database: every second where it can, else a loop once a minute.
-- Calling it again sets right what was changed meanwhile, and rings where pg_cron has not heard of it.
-- Calls: _audit, _beat, _pg_cron_state, _ring_pg_cron.
create or replace function almanac.start_ticking()
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state   almanac.pg_cron_state := almanac._pg_cron_state();
    v_command text;
    v_when    text;
    v_jobs    text[];
    v_before  jsonb;
begin
    if not v_state.loaded then
        raise exception using errcode = 'PA011',
            message = 'pg_cron is not loaded on this server',
            detail  = 'It is not in shared_preload_libraries, or not installed at all.',
            hint    = 'Add to postgresql.conf: shared_preload_libraries = ''pg_cron'' and cron.database_name = '
                      || quote_literal(current_database()) || ', restart, and run: create extension pg_cron; '
                      || 'Without it workers tick by themselves, and so does any scheduler that calls almanac.tick().';
    elsif v_state.version is null and v_state.database = current_database() then
        raise exception using errcode = 'PA011',
            message = 'pg_cron is loaded but not created in this database',
            detail  = 'cron.database_name names this database.',
            hint    = 'Run: create extension pg_cron; then select almanac.start_ticking();';
    elsif v_state.version is null then
        raise exception using errcode = 'PA011',
            message = format('pg_cron lives in database %s, not in this one', quote_ident(v_state.database)),
            detail  = 'It can be told from there to tick here.',
            hint    = format('In database %I run, with pg_cron 1.5 or later: select cron.schedule_in_database(%L, '
                             '''1 seconds'', ''call almanac._tick_loop(once => true)'', %L); with 1.4: select '
                             'cron.schedule_in_database(%L, ''* * * * *'', ''call almanac._tick_loop()'', %L);',
                             v_state.database, 'almanac', current_database(), 'almanac', current_database());
    end if;
    if string_to_array(regexp_replace(v_state.version, '[^0-9.].*', ''), '.')::integer[] >= array[1, 5] then
        v_when := '1 seconds';
        v_command := 'call almanac._tick_loop(once => true)';
    else
        v_when := '* * * * *';
        v_command := 'call almanac._tick_loop()';
    end if;
    execute 'select jsonb_agg(jsonb_build_object(''schedule'', schedule, ''command'', command, ''active'', active)), '
            'array_agg(jobid::text) from cron.job where jobname = $1 and database = current_database()'
        into v_before, v_jobs using 'almanac';
    -- One row, ours, as it should be: nothing to change.
    if v_before <> jsonb_build_array(jsonb_build_object('schedule', v_when, 'command', v_command, 'active', true))
       or v_before is null then
        if v_jobs is not null then
            execute 'select count(cron.unschedule(jobid)) from cron.job where jobid = any ($1::bigint[])' using v_jobs;
        end if;
        -- After an installation there is more news than pg_cron's launcher can hear at once (see _ring_pg_cron). It
        -- listens every second: then this will be all the news there is.
        perform pg_sleep(1.2);
        execute 'select cron.schedule($1, $2, $3)' using 'almanac', v_when, v_command;
        perform almanac._audit('start_ticking', null, 'pg_cron', null, v_before,
                               jsonb_build_object('schedule', v_when, 'command', v_command));
    else
        perform almanac._ring_pg_cron();
    end if;
    -- From now on its silence is worth an alert.
    perform almanac._beat('pg_cron', 'start_ticking');
    return format('pg_cron %s ticks %s', v_state.version,
                  case when v_when = '1 seconds' then 'every second' else 'every second, in a loop once a minute' end);
end;
$$;
comment on function almanac.start_ticking() is
    'Let pg_cron tick in this database; says how. Raises PA011 where it cannot.';

-- 71 stop_ticking: takes pg_cron's job away. A loop that is running ends with its minute. Nobody misses it after that.
-- Writes: heartbeat. Calls: _audit, _clear_alert, _pg_cron_state.
create or replace function almanac.stop_ticking()
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state almanac.pg_cron_state := almanac._pg_cron_state();
    v_count integer := 0;
begin
    if v_state.version is not null then
        execute 'select count(cron.unschedule(jobid)) from cron.job '
                'where jobname = $1 and database = current_database()'
            into v_count using 'almanac';
    end if;
    delete from almanac.heartbeat where heartbeat.source = 'pg_cron';
    perform almanac._clear_alert('ticker_silent', 'pg_cron');
    if v_count > 0 then
        perform almanac._audit('stop_ticking', null, 'pg_cron', null, null, null);
        return 'pg_cron does not tick any more; workers do, if there are any';
    end if;
    return 'pg_cron was not ticking';
end;
$$;
comment on function almanac.stop_ticking() is 'Take pg_cron''s job away; workers tick by themselves then.';
