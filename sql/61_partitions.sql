-- 61 _add_partition: one day (UTC) of a partitioned table. Made beside the table and attached, which locks less; rows
-- in the default partition are moved into it. Writers wait if the day has begun: attaching fails over a row that comes
-- between. Bounds are text that is read again, hence the pinned DateStyle.
-- Calls: clock.
create or replace function almanac._add_partition(parent text, day date)
    returns boolean
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD'
as $$
declare
    v_name text := parent || to_char(day, '"_"YYYYMMDD');
    v_key  text;
    v_from timestamptz := day::timestamp at time zone 'UTC';
    v_to   timestamptz := (day + 1)::timestamp at time zone 'UTC';
begin
    if to_regclass(format('almanac_days.%I', v_name)) is not null then
        return false;
    end if;
    if v_from <= almanac.clock() then
        execute format('lock table almanac.%I in share row exclusive mode', parent);
    end if;
    select attribute.attname into v_key
      from pg_partitioned_table partitioned
      join pg_attribute attribute
        on attribute.attrelid = partitioned.partrelid and attribute.attnum = partitioned.partattrs[0]
     where partitioned.partrelid = format('almanac.%I', parent)::regclass;
    execute format('create table almanac_days.%I (like almanac.%I '
                   'including defaults including constraints including comments)', v_name, parent);
    execute format('comment on table almanac_days.%I is %L', v_name, format('%s of %s (UTC).', parent, day));
    execute format('with moved as (delete from almanac_days.%I where %I >= %L and %I < %L returning *) '
                   'insert into almanac_days.%I select * from moved',
                   parent || '_default', v_key, v_from, v_key, v_to, v_name);
    execute format('alter table almanac.%I attach partition almanac_days.%I for values from (%L) to (%L)',
                   parent, v_name, v_from, v_to);
    return true;
end;
$$;
comment on function almanac._add_partition(text, date) is 'Add the partition of one day unless it is there.';

-- 61 _drop_partition: a day that lies wholly before the given time. What was decided since then about a tick of that
-- day, after an outage, is kept from the decision on: it moves to the default partition.
create or replace function almanac._drop_partition(parent text, partition text, before timestamptz)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_keeps boolean := false;
begin
    if parent = 'tick' then
        execute format('select exists (select from almanac_days.%I where decided_at >= $1)', partition)
            into v_keeps using before;
    end if;
    if v_keeps then
        execute format('alter table almanac.tick detach partition almanac_days.%I', partition);
        execute format('insert into almanac_days.tick_default '
                       'select * from almanac_days.%I where decided_at >= $1', partition) using before;
    end if;
    execute format('drop table almanac_days.%I', partition);
end;
$$;
comment on function almanac._drop_partition(text, text, timestamptz) is
    'Drop the partition of a day that ended before a time.';

-- 61 _keep_partitions: makes partitions of today and the days ahead; drops the days no queue keeps. Waits for locks
-- only briefly: a long report must not stop the heartbeat. A partition that cannot be made or dropped is set aside with
-- an alert that names it, and tried again. Returns what it did.
-- Reads: queue. Calls: clock, _add_partition, _clear_alert, _drop_partition, _raise_alert.
create or replace function almanac._keep_partitions(days_ahead integer default 3)
    returns jsonb
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_today   date := (almanac.clock() at time zone 'UTC')::date;
    v_keep    timestamptz := almanac.clock() - (select max(queue.retention) from almanac.queue);
    v_parent  text;
    v_day     date;
    v_doomed  text;
    v_added   integer := 0;
    v_dropped integer := 0;
    v_waiting text[] := '{}';
    v_detail  text;
    v_timeout text := current_setting('lock_timeout');
begin
    perform set_config('lock_timeout', '200ms', true);
    for v_parent, v_day, v_doomed in
        with parent as (
            select c.oid, c.relname from pg_partitioned_table p join pg_class c on c.oid = p.partrelid
             where c.relnamespace = 'almanac'::regnamespace)
        select parent.relname, v_today + ahead, null
          from parent cross join generate_series(0, days_ahead) as ahead
        union all
        select parent.relname, to_date(right(child.relname, 8), 'YYYYMMDD'), child.relname
          from parent join pg_inherits i on i.inhparent = parent.oid join pg_class child on child.oid = i.inhrelid
         where child.relname ~ '_[0-9]{8}$'
           and (to_date(right(child.relname, 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC' <= v_keep
         order by 1, 2
    loop
        begin
            if v_doomed is null then
                v_added := v_added + almanac._add_partition(v_parent, v_day)::integer;
            else
                perform almanac._drop_partition(v_parent, v_doomed, v_keep);
                v_dropped := v_dropped + 1;
            end if;
            perform almanac._clear_alert('housekeeping', v_parent || ' of ' || to_char(v_day, 'YYYY-MM-DD'));
        exception
            -- The last two: a migration has just made the same one.
            when lock_not_available or deadlock_detected or duplicate_table or unique_violation then
                v_waiting := v_waiting || v_parent;
            when others then
                get stacked diagnostics v_detail = pg_exception_detail;
                perform almanac._raise_alert('housekeeping', v_parent || ' of ' || to_char(v_day, 'YYYY-MM-DD'),
                    'warning', format('the partition of %s of %s could not be %s: %s', v_parent, v_day,
                                      case when v_doomed is null then 'made' else 'dropped' end,
                                      concat_ws('; ', sqlerrm, nullif(v_detail, ''))),
                    'Take out of the way what it names. It is tried again every minute; everything else goes on.');
        end;
    end loop;
    perform set_config('lock_timeout', v_timeout, true);
    return jsonb_build_object('added', v_added, 'dropped', v_dropped, 'waiting', to_jsonb(v_waiting));
end;
$$;
comment on function almanac._keep_partitions(integer) is
    'Make partitions ahead of time and drop those past every queue''s retention; reports added, dropped, waiting.';

-- From the first moment on; later the housekeeper does it.
select almanac._keep_partitions();
