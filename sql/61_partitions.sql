-- 61 _add_partition: one day (UTC) of a partitioned table. Made beside the table and attached, which locks less than
-- creating it in place; rows that fell into the default partition for want of this one are moved into it. Nobody may
-- write meanwhile if the day has begun: attaching fails over a row that came between, and under load one always does.
-- The bounds are written as text and read again, which must not depend on how the session writes dates.
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
    if to_regclass(format('almanac.%I', v_name)) is not null then
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
    execute format('create table almanac.%I (like almanac.%I '
                   'including defaults including constraints including comments)', v_name, parent);
    execute format('comment on table almanac.%I is %L', v_name, format('%s of %s (UTC).', parent, day));
    execute format('with moved as (delete from almanac.%I where %I >= %L and %I < %L returning *) '
                   'insert into almanac.%I select * from moved',
                   parent || '_default', v_key, v_from, v_key, v_to, v_name);
    execute format('alter table almanac.%I attach partition almanac.%I for values from (%L) to (%L)',
                   parent, v_name, v_from, v_to);
    return true;
end;
$$;
comment on function almanac._add_partition(text, date) is 'Add the partition of one day unless it is there.';

-- 61 _drop_partitions: days that lie wholly before the given time. What was decided since then about a tick of such a
-- day, after an outage, is kept from the decision on: it moves to the default partition.
-- Writes: tick_default.
create or replace function almanac._drop_partitions(parent text, before timestamptz)
    returns integer
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_name    text;
    v_keeps   boolean;
    v_dropped integer := 0;
begin
    for v_name in
        select child.relname
          from pg_inherits
          join pg_class child on child.oid = pg_inherits.inhrelid
         where pg_inherits.inhparent = format('almanac.%I', parent)::regclass
           and child.relname ~ '_[0-9]{8}$'
           and ((to_date(right(child.relname, 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC') <= before
         order by child.relname
    loop
        if parent = 'tick' then
            execute format('select exists (select from almanac.%I where decided_at >= $1)', v_name)
                into v_keeps using before;
            if v_keeps then
                execute format('alter table almanac.tick detach partition almanac.%I', v_name);
                execute format('insert into almanac.tick_default '
                               'select * from almanac.%I where decided_at >= $1', v_name) using before;
            end if;
        end if;
        execute format('drop table almanac.%I', v_name);
        v_dropped := v_dropped + 1;
    end loop;
    return v_dropped;
end;
$$;
comment on function almanac._drop_partitions(text, timestamptz) is
    'Drop the partitions of days that ended before a time.';

-- 61 _keep_partitions: today's partitions and those of the days ahead; drops the days no queue wants to keep. Waits
-- for locks only briefly: somebody who reads history for an hour must not stop the heartbeat. Returns what it did.
-- Reads: queue. Calls: clock, _add_partition, _drop_partitions.
create or replace function almanac._keep_partitions(days_ahead integer default 3)
    returns jsonb
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_today   date := (almanac.clock() at time zone 'UTC')::date;
    v_keep    timestamptz := almanac.clock() - (select max(queue.retention) from almanac.queue);
    v_parent  text;
    v_added   integer := 0;
    v_dropped integer := 0;
    v_waiting text[] := array[]::text[];
    v_timeout text := current_setting('lock_timeout');
begin
    perform set_config('lock_timeout', '200ms', true);
    for v_parent in
        select parent.relname
          from pg_partitioned_table
          join pg_class parent on parent.oid = pg_partitioned_table.partrelid
         where parent.relnamespace = 'almanac'::regnamespace
         order by parent.relname
    loop
        begin
            select v_added + count(*) filter (where almanac._add_partition(v_parent, v_today + ahead)) into v_added
              from generate_series(0, days_ahead) as ahead;
            v_dropped := v_dropped + almanac._drop_partitions(v_parent, v_keep);
        exception
            -- The last two: a migration has just made the same one.
            when lock_not_available or deadlock_detected or duplicate_table or unique_violation then
                v_waiting := v_waiting || v_parent;
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
