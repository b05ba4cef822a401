-- 71 _pg_cron_state: what there is of pg_cron. Everything about it is dynamic: this installs where it does not exist.
-- Asked for by extension, because any role may own a schema called cron. What this role may not see is in missing.
create or replace function almanac._pg_cron_state()
    returns almanac.pg_cron_state
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state almanac.pg_cron_state;
begin
    begin
        v_state.database := current_setting('cron.database_name', true);
        v_state.loaded := v_state.database is not null;
    exception
        when insufficient_privilege then
            v_state.loaded := true;
    end;
    select extversion into v_state.version from pg_extension where extname = 'pg_cron';
    if v_state.version is not null then
        v_state.database := current_database();
        execute 'select jobid, active from cron.job where jobname = $1 and database = current_database()'
            into v_state.job_id, v_state.active
            using 'almanac';
        if v_state.job_id is not null then
            execute 'select start_time, status from cron.job_run_details where jobid = $1 order by runid desc limit 1'
                into v_state.last_run_at, v_state.last_status
                using v_state.job_id;
        end if;
    elsif v_state.loaded and v_state.database is null then
        v_state.missing := format('grant pg_read_all_settings to %I;', current_user);
    end if;
    return v_state;
exception
    when insufficient_privilege then
        v_state.missing := format('grant usage on schema cron to %I;', current_user);
        return v_state;
end;
$$;
comment on function almanac._pg_cron_state() is 'Whether pg_cron is loaded, lives in this database, and ticks.';

-- 71 _tick_loop: what pg_cron calls. With once, every second: ticks until there is no more. Before 1.5 once a minute:
-- ticks every second until the minute is over, when pg_cron starts the next one. Commits after each tick, so locks and
-- snapshots are short. A procedure that commits cannot pin its search_path; it sets it for the session.
-- Calls: clock, _try_tick.
create or replace procedure almanac._tick_loop(once boolean default false)
    language plpgsql
as $$
declare
    v_minute timestamptz := pg_catalog.date_trunc('minute', almanac.clock());
    v_more   boolean;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
    loop
        v_more := coalesce((almanac._try_tick('pg_cron', 'pg_cron')).more, false);
        commit;
        exit when date_trunc('minute', almanac.clock()) <> v_minute or (once and not v_more);
        if not v_more then
            perform pg_sleep(1 - extract(microsecond from almanac.clock())::integer % 1000000 / 1000000.0);
        end if;
    end loop;
end;
$$;
comment on procedure almanac._tick_loop(boolean) is
    'Tick until nothing is left, or every second to the end of a minute.';

-- 71 start_ticking: lets pg_cron tick in this database: every second where it can, else by a loop once a minute; a
-- second job drops its log of these runs. Again: sets right what was changed, and lets pg_cron read its jobs again, in
-- case it lost the message of a new one.
-- Calls: _audit, _beat, _pg_cron_state.
create or replace function almanac.start_ticking()
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state  almanac.pg_cron_state := almanac._pg_cron_state();
    v_wanted jsonb;
    v_before jsonb;
    v_jobs   text[];
begin
    if not v_state.loaded then
        raise exception using errcode = 'PA011',
            message = 'pg_cron is not loaded on this server',
            detail  = 'It is not in shared_preload_libraries, or not installed at all.',
            hint    = 'Add to postgresql.conf: shared_preload_libraries = ''pg_cron'' and cron.database_name = '
                      || quote_literal(current_database()) || ', restart, and run: create extension pg_cron; '
                      || 'Without it workers tick by themselves, and so does any scheduler that calls almanac.tick().';
    elsif v_state.missing is not null then
        raise exception using errcode = 'PA011',
            message = format('role %I may not look at pg_cron', current_user),
            detail  = 'It is loaded on this server, and the functions of pg_almanac run as this role.',
            hint    = format('Let an administrator run: %s', v_state.missing);
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
                             v_state.database, 'almanac in ' || current_database(), current_database(),
                             'almanac in ' || current_database(), current_database());
    end if;
    v_wanted := jsonb_build_object(
        'almanac',
        case when string_to_array(regexp_replace(v_state.version, '[^0-9.].*', ''), '.')::integer[] >= array[1, 5]
             then array['1 seconds', 'call almanac._tick_loop(once => true)']
             else array['* * * * *', 'call almanac._tick_loop()'] end || array['true'],
        'almanac log',
        array['*/10 * * * *', 'delete from cron.job_run_details where database = current_database() '
              'and username = current_user and end_time < now() - interval ''1 hour'' '
              'and command in (select command from cron.job where jobname in (''almanac'', ''almanac log''))', 'true']);
    execute 'select jsonb_object_agg(jobname, array[schedule, command, active::text]), array_agg(jobid::text) '
            'from cron.job where jobname = any ($1) and database = current_database()'
        into v_before, v_jobs using array['almanac', 'almanac log'];
    if v_before = v_wanted and cardinality(v_jobs) = 2 then
        -- The same job declared once more is news to pg_cron, and no change.
        execute 'select cron.schedule($1, $2, $3)'
            using 'almanac', v_wanted -> 'almanac' ->> 0, v_wanted -> 'almanac' ->> 1;
    else
        execute 'select count(cron.unschedule(jobid)) from cron.job where jobid = any ($1::bigint[])' using v_jobs;
        -- An installation is more news than pg_cron's launcher can hear at once. It listens every second.
        perform pg_sleep(1.2);
        execute 'select count(cron.schedule(key, value ->> 0, value ->> 1)) from jsonb_each($1)' using v_wanted;
        perform almanac._audit('start_ticking', null, 'pg_cron', null, v_before, v_wanted);
    end if;
    -- From now on its silence is worth an alert.
    perform almanac._beat('pg_cron', 'start_ticking');
    return format('pg_cron %s ticks %s', v_state.version,
                  case when v_wanted -> 'almanac' ->> 0 = '1 seconds' then 'every second'
                       else 'every second, in a loop once a minute' end);
end;
$$;
comment on function almanac.start_ticking() is
    'Let pg_cron tick in this database; says how. Raises PA011 where it cannot.';

-- 71 stop_ticking: takes pg_cron's jobs away. A loop that is running ends with its minute. Its silence after that is no
-- alert. If pg_cron ticks without a job, it has lost the message: a job that comes and goes is another.
-- Reads: heartbeat. Writes: heartbeat. Calls: _audit, _clear_alert, _pg_cron_state, clock.
create or replace function almanac.stop_ticking()
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_state almanac.pg_cron_state := almanac._pg_cron_state();
    v_count integer := 0;
    v_ticks boolean := exists (select from almanac.heartbeat h
                                where h.source = 'pg_cron' and h.ticked_by <> 'start_ticking'
                                  and h.ticked_at > almanac.clock() - interval '90 seconds');
begin
    if v_state.version is not null and v_state.missing is not null then
        raise exception using errcode = 'PA011',
            message = format('role %I may not look at pg_cron', current_user),
            detail  = 'The functions of pg_almanac run as this role. Nothing was changed.',
            hint    = format('Let an administrator run: %s', v_state.missing);
    elsif v_state.version is not null then
        execute 'select count(cron.unschedule(jobid)) from cron.job '
                'where jobname = any ($1) and database = current_database()'
            into v_count using array['almanac', 'almanac log'];
        if v_count = 0 and v_ticks then
            execute 'select cron.unschedule(cron.schedule($1, $2, $3))' using 'almanac', '* * * * *', 'select 1';
        end if;
    end if;
    delete from almanac.heartbeat where heartbeat.source = 'pg_cron';
    perform almanac._clear_alert('ticker_silent', 'pg_cron');
    if v_count > 0 then
        perform almanac._audit('stop_ticking', null, 'pg_cron', null, null, null);
        return 'pg_cron does not tick any more; workers do, if there are any';
    elsif v_ticks then
        return 'pg_cron ticks by no job named almanac of this database; one of another name or database goes on';
    end if;
    return 'pg_cron was not ticking';
end;
$$;
comment on function almanac.stop_ticking() is 'Take pg_cron''s jobs away; workers tick by themselves then.';
