-- 21 _name_values: the values of a mask in words: "Monday to Friday", "0 to 55 in steps of 5".
-- names[1] is the word for the value 0.
-- Calls: _join_words.
create or replace function almanac._name_values(mask bigint, names text[])
    returns text
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_values integer[] := array(select n from generate_series(0, 59) as n where (mask >> n) & 1 = 1 order by n);
    v_count  integer := cardinality(v_values);
    v_step   integer := v_values[2] - v_values[1];
    v_words  text[] := '{}';
    v_at     integer := 1;
    v_last   integer;
begin
    if v_count >= 4 and v_step > 1
       and v_values = array(select n from generate_series(v_values[1], v_values[v_count], v_step) as n) then
        return format('%s to %s in steps of %s', names[v_values[1] + 1], names[v_values[v_count] + 1], v_step);
    end if;
    while v_at <= v_count loop
        v_last := v_at;
        while v_values[v_last + 1] = v_values[v_last] + 1 loop
            v_last := v_last + 1;
        end loop;
        if v_last - v_at >= 2 then
            v_words := v_words || format('%s to %s', names[v_values[v_at] + 1], names[v_values[v_last] + 1]);
            v_at := v_last + 1;
        else
            v_words := v_words || names[v_values[v_at] + 1];
            v_at := v_at + 1;
        end if;
    end loop;
    return almanac._join_words(v_words);
end;
$$;
comment on function almanac._name_values(bigint, text[]) is 'The values of a mask in words.';

-- 21 _join_words: "a", "a and b", "a, b and c".
create or replace function almanac._join_words(words text[])
    returns text
    language sql immutable parallel safe
    return case when cardinality(_join_words.words) < 2 then _join_words.words[1]
                else array_to_string(_join_words.words[:cardinality(_join_words.words) - 1], ', ')
                     || ' and ' || _join_words.words[cardinality(_join_words.words)] end;
comment on function almanac._join_words(text[]) is 'An enumeration in English.';

-- 21 _describe_times: the time-of-day fields of a rule in words, without a capital letter.
-- Calls: _highest_bit, _join_words, _lowest_bit, _name_values.
create or replace function almanac._describe_times(rule almanac.cron_rule)
    returns text
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_full    constant bigint := 1152921504606846975;
    c_numbers constant text[] := array(select n::text from generate_series(0, 59) as n);
    c_hours   constant text[] := array(select to_char(n, 'fm00') from generate_series(0, 23) as n);
    v_times   text[];
    v_minutes text;
    v_hours   text;
    v_first   integer := almanac._lowest_bit(rule.hour_mask);
    v_last    integer := almanac._highest_bit(rule.hour_mask);
begin
    if rule.second_mask & (rule.second_mask - 1) = 0 then
        v_times := array(
            select to_char(h, 'fm00') || to_char(m, '":"fm00')
                   || case when rule.second_mask = 1 then ''
                           else to_char(almanac._lowest_bit(rule.second_mask), '":"fm00') end
              from generate_series(0, 23) as h, generate_series(0, 59) as m
             where (rule.hour_mask >> h) & 1 = 1 and (rule.minute_mask >> m) & 1 = 1
             order by h, m
             limit 7);
        if cardinality(v_times) < 7 then
            return 'at ' || almanac._join_words(v_times);
        end if;
    end if;

    v_minutes := case rule.minute_mask when c_full then 'every minute' else
        (select format('every %s minutes', n) from generate_series(2, 30) as n
          where 60 % n = 0
            and rule.minute_mask = (select sum(1::bigint << m)::bigint from generate_series(0, 59, n) as m)) end;
    if rule.second_mask = c_full then
        v_minutes := case when rule.minute_mask = c_full then 'every second'
            else format('every second of minute %s', almanac._name_values(rule.minute_mask, c_numbers)) end;
    elsif rule.second_mask <> 1 then
        v_minutes := format('at second %s of %s', almanac._name_values(rule.second_mask, c_numbers),
            coalesce(v_minutes, 'minute ' || almanac._name_values(rule.minute_mask, c_numbers)));
    end if;
    v_hours := case
        when rule.hour_mask = 16777215 then
            case when v_minutes is null or v_minutes ~ ' of minute ' then ' of every hour' else '' end
        when v_minutes is not null and rule.hour_mask = (2::bigint << v_last) - (1::bigint << v_first) then
            format(' from %s:00 to %s:59', c_hours[v_first + 1], c_hours[v_last + 1])
        else ' of hour ' || almanac._name_values(rule.hour_mask, c_hours) end;
    return coalesce(v_minutes, 'at minute ' || almanac._name_values(rule.minute_mask, c_numbers)) || v_hours;
end;
$$;
comment on function almanac._describe_times(almanac.cron_rule) is 'The time-of-day fields of a rule in English.';

-- 21 _describe_days: the day and month fields of a rule in words; null where every day matches.
-- Calls: _join_words, _name_values.
create or replace function almanac._describe_days(rule almanac.cron_rule)
    returns text
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_numbers  constant text[] := array(select n::text from generate_series(0, 31) as n);
    c_weekdays constant text[] := '{Sunday,Monday,Tuesday,Wednesday,Thursday,Friday,Saturday}';
    c_ordinals constant text[] := '{first,second,third,fourth,fifth}';
    c_months   constant text[] := '{"",January,February,March,April,May,June,July,August,September,October,November,'
                                  'December}';
    v_dom      text[] := '{}';
    v_dow      text[] := '{}';
    v_dom_text text;
    v_dow_text text;
    v_result   text;
begin
    if rule.dom_mask = 4294967294 then
        v_dom_text := null;
    else
        if rule.dom_mask <> 0 then
            v_dom := v_dom || format('day %s of the month', almanac._name_values(rule.dom_mask, c_numbers));
        end if;
        v_dom := v_dom || array(
            select case n when 0 then 'the last day of the month' when 1 then 'the day before the last of the month'
                   else format('%s days before the last of the month', n) end
              from generate_series(0, 30) as n where (rule.dom_end_mask >> (31 - n)) & 1 = 1 order by n);
        v_dom := v_dom || array(
            select format('the weekday nearest to day %s of the month', n)
              from generate_series(1, 31) as n where (rule.dom_nearest_mask >> n) & 1 = 1 order by n);
        if rule.dom_last_weekday then
            v_dom := v_dom || 'the last weekday of the month'::text;
        end if;
        v_dom_text := almanac._join_words(v_dom);
    end if;
    if rule.dow_mask = 127 then
        v_dow_text := null;
    else
        if rule.dow_mask <> 0 then
            -- A week that starts on Monday reads better, where Sunday ends a run.
            v_dow := v_dow || case when rule.dow_mask & 97 = 97 and rule.dow_mask & 2 = 0
                then almanac._name_values((rule.dow_mask & 126) | 128, c_weekdays || 'Sunday'::text)
                else almanac._name_values(rule.dow_mask, c_weekdays) end;
        end if;
        v_dow := v_dow || array(
            select format('the %s %s of the month', c_ordinals[n / 7 + 1], c_weekdays[n % 7 + 1])
              from generate_series(0, 34) as n where (rule.dow_nth_mask >> n) & 1 = 1 order by n);
        v_dow := v_dow || array(
            select format('the last %s of the month', c_weekdays[n + 1])
              from generate_series(0, 6) as n where (rule.dow_last_mask >> n) & 1 = 1 order by n);
        v_dow_text := almanac._join_words(v_dow);
    end if;
    v_result := case
        when v_dom_text is null and v_dow_text is null then null
        -- Either field will do, and one of them is every day.
        when not rule.days_must_both and (v_dom_text is null or v_dow_text is null) then null
        when v_dom_text is null then 'on ' || v_dow_text
        when v_dow_text is null then 'on ' || v_dom_text
        when rule.days_must_both then format('on %s, but only if it is %s', v_dom_text,
            case when v_dow_text like 'the %' then '' else 'a ' end || replace(v_dow_text, ' and ', ' or '))
        else format('on %s, and also on %s', v_dom_text, v_dow_text) end;
    if rule.month_mask <> 8190 then
        v_result := concat_ws(' ', coalesce(v_result, 'every day'),
                              'in ' || almanac._name_values(rule.month_mask, c_months));
    end if;
    return v_result;
end;
$$;
comment on function almanac._describe_days(almanac.cron_rule) is
    'The day and month fields of a rule in English; null where every day matches.';

-- 21 describe_cron: a cron expression as an English sentence, for people who are about to trust it.
-- Calls: _describe_days, _describe_times, _join_words, parse_cron.
create or replace function almanac.describe_cron(cron text)
    returns text
    language plpgsql immutable strict parallel safe security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_rule  almanac.cron_rule := almanac.parse_cron(cron);
    v_days  text;
    v_times text;
    v_left  bigint;
begin
    if v_rule.every_us is not null then
        v_left := v_rule.every_us;
        return 'Every ' || almanac._join_words(array_remove(array[
            case v_left / 3600000000 when 0 then null when 1 then '1 hour'
                 else v_left / 3600000000 || ' hours' end,
            case v_left / 60000000 % 60 when 0 then null when 1 then '1 minute'
                 else v_left / 60000000 % 60 || ' minutes' end,
            case v_left % 60000000 when 0 then null when 1000000 then '1 second'
                 else trim_scale(v_left % 60000000 / 1000000.0) || ' seconds' end], null))
            || ' of elapsed time';
    end if;
    v_times := almanac._describe_times(v_rule);
    v_days := almanac._describe_days(v_rule);
    if v_days is null and v_times like 'at %' and v_times not like '%every%' then
        v_days := 'every day';
    end if;
    return concat_ws(' ', upper(left(v_times, 1)) || substr(v_times, 2), v_days);
end;
$$;
comment on function almanac.describe_cron(text) is
    'What a cron expression says, as an English sentence: At 09:00 on Monday to Friday. Raises PA007.';

-- 21 _clock_note: what a change of the clocks does to one run, in words; null on all other days.
-- previous is the run before, so that what was left out is told once, at the run that follows.
-- Calls: _next_label, _offset_change, _utc_offset.
create or replace function almanac._clock_note(
    rule almanac.cron_rule, zone text, run bigint, previous bigint, dst_gap text, dst_overlap text)
    returns text
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_reach  constant bigint := 93600;
    v_offset bigint := almanac._utc_offset(zone, run);
    v_before bigint := almanac._utc_offset(zone, run - c_reach);
    v_beyond bigint := almanac._utc_offset(zone, run + c_reach);
    v_change bigint;
    v_label  bigint;
    v_shown  text := to_char(to_timestamp(run + v_offset) at time zone 'UTC', 'HH24:MI:SS');
    v_advice text := case when rule.is_wildcard
        then ' A minute or hour field that starts with * keeps its real cadence; 0-23/2 instead of */2 would not.'
        else '' end;
begin
    v_shown := regexp_replace(v_shown, ':00$', '');
    if v_before < v_offset then
        v_change := almanac._offset_change(zone, run - c_reach, run);
        v_label := almanac._next_label(rule, v_change + v_before);
        if v_label < v_change + v_offset and previous < v_change then
            return format('The clocks go from %s to %s: %s does not exist and %s.%s',
                to_char(to_timestamp(v_change + v_before) at time zone 'UTC', 'YYYY-MM-DD HH24:MI'),
                to_char(to_timestamp(v_change + v_offset) at time zone 'UTC', 'YYYY-MM-DD HH24:MI'),
                to_char(to_timestamp(v_label) at time zone 'UTC', 'HH24:MI'),
                case when rule.is_wildcard then 'is left out' when dst_gap = 'skip' then 'is skipped'
                     else 'runs at the first instant after the gap' end, v_advice);
        end if;
    elsif v_before > v_offset then
        v_change := almanac._offset_change(zone, run - c_reach, run);
        if run + v_offset < v_change + v_before then
            return format('%s comes twice on this date: this is the second time%s.%s', v_shown,
                case when rule.is_wildcard or dst_overlap = 'both' then '' else ', the first is left out' end,
                v_advice);
        end if;
    end if;
    if v_beyond < v_offset then
        v_change := almanac._offset_change(zone, run, run + c_reach);
        if run + v_offset >= v_change + v_beyond then
            return format('%s comes twice on this date: this is the first time%s.%s', v_shown,
                case when rule.is_wildcard or dst_overlap = 'both' then '' else ', the second is left out' end,
                v_advice);
        end if;
    end if;
    return null;
end;
$$;
comment on function almanac._clock_note(almanac.cron_rule, text, bigint, bigint, text, text) is
    'What a gap or an overlap of local time does to one run; null if nothing.';

-- 21 preview_cron: the coming runs as the clocks will show them, with a note where a change of the clocks matters.
-- Calls: _clock_note, _previous_run, _zone, clock, next_runs, parse_cron.
create or replace function almanac.preview_cron(
    cron text, timezone text default 'UTC', count integer default 10, after timestamptz default null,
    dst_gap text default 'after', dst_overlap text default 'first',
    anchor timestamptz default '1970-01-01 00:00:00+00')
    returns setof almanac.previewed_run
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_rule     almanac.cron_rule := almanac.parse_cron(cron);
    v_zone     text := almanac._zone(timezone);
    v_previous timestamptz;
    v_minutes  integer;
    v_row      almanac.previewed_run;
begin
    v_row.rule_kind := case when v_rule.every_us is not null then 'elapsed'
                            when v_rule.is_wildcard then 'wildcard' else 'fixed' end;
    for v_row.run_at in
        select run.at
          from almanac.next_runs(preview_cron.cron, preview_cron.timezone,
                                 coalesce(preview_cron.after, almanac.clock()), preview_cron.count,
                                 preview_cron.dst_gap, preview_cron.dst_overlap, preview_cron.anchor)
               with ordinality as run (at, place)
         order by run.place
    loop
        v_row.local_time := v_row.run_at at time zone v_zone;
        v_row.utc_time := v_row.run_at at time zone 'UTC';
        v_minutes := extract(epoch from v_row.local_time - v_row.utc_time) / 60;
        v_row.utc_offset := case when v_minutes < 0 then '-' else '+' end
            || to_char(abs(v_minutes) / 60, 'fm00') || ':' || to_char(abs(v_minutes) % 60, 'fm00');
        v_row.note := null;
        if v_row.rule_kind <> 'elapsed' then
            v_previous := coalesce(v_previous, almanac._previous_run(
                v_rule, timezone, v_row.run_at, dst_gap, dst_overlap, anchor), '-infinity');
            v_row.note := almanac._clock_note(
                v_rule, v_zone, extract(epoch from v_row.run_at)::bigint,
                case when isfinite(v_previous) then extract(epoch from v_previous)::bigint else -62135510400 end,
                dst_gap, dst_overlap);
            v_previous := v_row.run_at;
        end if;
        return next v_row;
    end loop;
end;
$$;
comment on function almanac.preview_cron(text, text, integer, timestamptz, text, text, timestamptz) is
    'The coming runs of a cron expression: local time, UTC, offset, wildcard or fixed, what clock changes do to them.';
