-- 21 _field_name: a field as its errors call it; 1 is the second, 6 the day of the week.
create or replace function almanac._field_name(field integer)
    returns text
    language sql immutable parallel safe
    return case _field_name.field when 1 then 'second' when 2 then 'minute' when 3 then 'hour'
                                  when 4 then 'day of month' when 5 then 'month' else 'day of week' end;
comment on function almanac._field_name(integer) is 'Name of a cron field.';

-- 21 _field_value: the number that a token of a field stands for; null for a name that the field does not have.
create or replace function almanac._field_value(field integer, token text)
    returns integer
    language sql immutable parallel safe
    return case
        when ascii(_field_value.token) <= 57 then _field_value.token::integer
        when _field_value.field = 5 then array_position(
            array['JAN', 'FEB', 'MAR', 'APR', 'MAY', 'JUN', 'JUL', 'AUG', 'SEP', 'OCT', 'NOV', 'DEC'],
            _field_value.token)
        when _field_value.field = 6 then array_position(
            array['SUN', 'MON', 'TUE', 'WED', 'THU', 'FRI', 'SAT'], _field_value.token) - 1 end;
comment on function almanac._field_value(integer, text) is
    'Value of a number or of a name of a month (field 5) or weekday (field 6).';

-- 21 _parse_every: the duration of "@every 1h30m10s" in microseconds, written as Go writes durations.
create or replace function almanac._parse_every(duration text)
    returns bigint
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_us numeric;
begin
    if duration ~ '^(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|ms|s|m|h))+$' then
        select sum(rtrim(part.match[1], 'nusmh')::numeric
                   * case ltrim(part.match[1], '.0123456789') when 'ns' then 0.001 when 'us' then 1 when 'ms' then 1000
                          when 's' then 1000000 when 'm' then 60000000 else 3600000000 end)
          into v_us
          from regexp_matches(duration, '[.0-9]+[a-z]+', 'g') as part (match);
    end if;
    if v_us is null or v_us < 1000000 or v_us > 9223372036854775 or v_us <> trunc(v_us) then
        raise exception using errcode = 'PA007',
            message = format('cron descriptor @every refuses the duration "%s"', left(duration, 40)),
            detail  = case
                when v_us is null then 'A duration is numbers with the units h, m, s, ms, us or ns, without spaces.'
                when v_us < 1000000 then 'The shortest period is one second.'
                when v_us > 9223372036854775 then 'The longest period is 292 years.'
                else 'The clock of the database counts whole microseconds.' end,
            hint    = 'Write for example @every 90s or @every 1h30m.';
    end if;
    return v_us;
end;
$$;
comment on function almanac._parse_every(text) is 'Microseconds in a Go-style duration; raises PA007.';

-- 21 parse_cron: text to cron_rule, once, when a schedule is written. The grammar stands in docs/cron.md.
-- A refusal names the field, the part and what is allowed there, because the reader has only the expression in hand.
-- Plain expressions on plain variables: array constants and capturing groups would cost more than all the rest.
-- Calls: _bits, _field_name, _field_value, _has_a_date, _parse_every.
create or replace function almanac.parse_cron(cron text)
    returns almanac.cron_rule
    language plpgsql immutable strict parallel safe security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_text   text;
    v_fields text[];
    v_shift  integer;
    v_min    integer;
    v_max    integer;
    v_parts  text[];
    v_part   text;
    v_base   text;
    v_token  text;
    v_low    integer;
    v_high   integer;
    v_step   integer;
    v_mask   bigint;
    v_masks  bigint[];
    v_why    text;
    v_rule   almanac.cron_rule;
begin
    if length(cron) > 1000 then
        raise exception using errcode = 'PA007', message = 'cron expression is too long',
            detail = format('It has %s characters; at most 1000 are read.', length(cron)),
            hint   = 'Use ranges and steps (0-59/5) instead of long lists.';
    end if;
    -- Case folds only after this check: in some locales upper() makes ASCII letters out of others.
    if cron ~ E'[^\\u0020-\\u007e\\u0009]' then
        raise exception using errcode = 'PA007',
            message = 'cron expression contains a character that is not allowed',
            detail  = format('Character %s is a control character or not ASCII.',
                             length(substring(cron from E'^[\\u0020-\\u007e\\u0009]*')) + 1),
            hint    = 'Use ASCII digits and letters, * , - / ? # and @, separated by spaces or tabs.';
    end if;
    v_fields := array_remove(string_to_array(upper(replace(cron, E'\t', ' ') collate "C"), ' '), '');

    if v_fields[1] like '@%' then
        if v_fields[1] = '@EVERY' and cardinality(v_fields) = 2 then
            v_rule.is_wildcard := false;
            v_rule.every_us := almanac._parse_every(lower(v_fields[2] collate "C"));
            return v_rule;
        end if;
        v_text := case when cardinality(v_fields) = 1 then case v_fields[1]
            when '@YEARLY' then '0 0 1 1 *' when '@ANNUALLY' then '0 0 1 1 *' when '@MONTHLY' then '0 0 1 * *'
            when '@WEEKLY' then '0 0 * * 0' when '@DAILY' then '0 0 * * *' when '@MIDNIGHT' then '0 0 * * *'
            when '@HOURLY' then '0 * * * *' when '@MINUTELY' then '* * * * *' end end;
        if v_text is null then
            raise exception using errcode = 'PA007',
                message = format('cron descriptor "%s" is not known', left(btrim(cron, E' \t'), 40)),
                detail  = 'Known are @yearly @annually @monthly @weekly @daily @midnight @hourly @minutely, each '
                          'alone, and @every with one duration.',
                hint    = case v_fields[1]
                    when '@REBOOT' then 'A database has no boot to wait for: enqueue a job when your service starts.'
                    when '@EVERY' then 'Write for example @every 90s or @every 1h30m.'
                    else 'Write five fields: minute, hour, day of month, month, day of week.' end;
        end if;
        v_fields := string_to_array(v_text, ' ');
    end if;

    if v_fields[1] like '%TZ=%' then
        raise exception using errcode = 'PA007',
            message = 'cron expression begins with a time zone',
            detail  = 'The zone is kept beside the expression, not in it.',
            hint    = 'Leave the prefix out and give the time zone as its own argument.';
    end if;

    v_shift := cardinality(v_fields) - 6;
    if v_shift not between -1 and 0 then
        raise exception using errcode = 'PA007',
            message = case cardinality(v_fields) when 0 then 'cron expression is empty'
                when 1 then 'cron expression has 1 field, not five or six'
                else format('cron expression has %s fields, not five or six', cardinality(v_fields)) end,
            detail  = 'Five: minute, hour, day of month, month, day of week. Six: a second before them.',
            hint    = case
                when cardinality(v_fields) > 6 then 'Leave out years and commands: only the time goes here.'
                when cardinality(v_fields) = 0 then 'Write for example 0 9 * * 1-5 for 09:00 from Monday to Friday.'
                else 'Write * for a field that does not matter.' end;
    end if;

    v_rule.dom_end_mask := 0;
    v_rule.dom_nearest_mask := 0;
    v_rule.dom_last_weekday := false;
    v_rule.dow_nth_mask := 0;
    v_rule.dow_last_mask := 0;

    -- Five fields run on second 0: bit 0 of the first mask, which is not read then.
    v_masks := '{1,0,0,0,0,0}';
    for v_field in 1 - v_shift .. 6 loop
        v_text := v_fields[v_field + v_shift];
        v_text := case when v_text = '?' and v_field in (4, 6) then '*' else v_text end;
        v_min := case when v_field in (4, 5) then 1 else 0 end;
        v_max := case v_field when 3 then 23 when 4 then 31 when 5 then 12 when 6 then 7 else 59 end;
        v_mask := 0;
        v_parts := string_to_array(v_text, ',');
        -- Values are few, so a list that is very long repeats itself.
        if cardinality(v_parts) > 60 then
            v_parts := array(select distinct part.text from unnest(v_parts) as part (text));
        end if;
        foreach v_part in array v_parts loop
            v_why := null;
            if v_field = 4 and v_part = 'LW' then
                v_rule.dom_last_weekday := true;
            elsif v_field = 4 and v_part ~ '^L(-[0-9]{1,4})?$' then
                v_low := nullif(substr(v_part, 3), '');
                if v_low not between 1 and 30 then
                    v_why := 'In L-n, n is 1 to 30.';
                else
                    v_rule.dom_end_mask := v_rule.dom_end_mask | (1::bigint << (31 - coalesce(v_low, 0)));
                end if;
            elsif v_field = 4 and v_part ~ '^[0-9]{1,4}W$' then
                v_low := rtrim(v_part, 'W');
                if v_low not between 1 and 31 then
                    v_why := 'In nW, n is 1 to 31.';
                else
                    v_rule.dom_nearest_mask := v_rule.dom_nearest_mask | (1::bigint << v_low);
                end if;
            elsif v_field = 6 and v_part ~ '^([0-9]{1,4}|[A-Z]{3})(L|#[0-9]{1,4})$' then
                v_token := split_part(rtrim(v_part, 'L'), '#', 1);
                v_low := almanac._field_value(6, v_token);
                if v_low is null or v_low > 7 then
                    v_why := format('%s is not a day of week.', v_token);
                elsif v_part like '%L' then
                    v_rule.dow_last_mask := v_rule.dow_last_mask | (1::bigint << (v_low % 7));
                elsif split_part(v_part, '#', 2)::integer not between 1 and 5 then
                    v_why := 'In n#k, k is 1 to 5.';
                else
                    v_high := split_part(v_part, '#', 2);
                    v_rule.dow_nth_mask := v_rule.dow_nth_mask | (1::bigint << (7 * (v_high - 1) + v_low % 7));
                end if;
            elsif v_part ~ '^([*]|([0-9]{1,4}|[A-Z]{3})(-([0-9]{1,4}|[A-Z]{3}))?)(/[0-9]{1,4})?$' then
                v_base := split_part(v_part, '/', 1);
                v_step := coalesce(nullif(split_part(v_part, '/', 2), ''), '1');
                if v_base = '*' then
                    v_low := v_min;
                    v_high := v_max;
                else
                    v_token := split_part(v_base, '-', 1);
                    v_low := almanac._field_value(v_field, v_token);
                    v_high := case when v_part like '%/%' then v_max else v_low end;
                    if v_base like '%-%' and v_low between v_min and v_max then
                        v_token := split_part(v_base, '-', 2);
                        v_high := almanac._field_value(v_field, v_token);
                        -- FRI-SUN: the week may end on Sunday, though Sunday is also where it begins.
                        if v_field = 6 and v_high = 0 and v_low > 0 then
                            v_high := 7;
                        end if;
                    end if;
                end if;
                if v_low between v_min and v_max and v_high between v_low and v_max
                   and v_step between 1 and v_max then
                    v_mask := v_mask | almanac._bits(v_low, v_high, v_step);
                else
                    v_why := case
                        when v_low > v_high and v_low <= v_max and v_high >= v_min then
                            format('%s is after %s: ranges do not wrap around.', split_part(v_base, '-', 1), v_token)
                        when v_low between v_min and v_max and v_high between v_min and v_max then
                            format('The step is 1 to %s.', v_max)
                        else format('%s is not %s %s.', v_token, case v_field when 3 then 'an' else 'a' end,
                                    almanac._field_name(v_field)) end;
                end if;
            else
                v_why := case
                    when v_part = '' then 'There is an empty item: a comma too many.'
                    when v_part = '?' then '? stands alone, and only in a day field.'
                    when v_part ~ '[0-9]{5}' then 'Numbers have at most four digits.'
                    else 'It has none of the forms that this field takes.' end;
            end if;
            if v_why is not null then
                raise exception using errcode = 'PA007',
                    message = format('cron field "%s" refuses "%s"', almanac._field_name(v_field), left(v_part, 40)),
                    detail  = v_why,
                    hint    = format('Allowed there: * */n a a-b a-b/n a/n, in lists with commas; values %s to %s%s.',
                                     v_min, v_max, case v_field
                                     when 4 then '; also L L-n LW nW ?'
                                     when 5 then ' or JAN to DEC'
                                     when 6 then ' or SUN to SAT (0 and 7 are Sunday); also nL n#k ?'
                                     else '' end);
            end if;
        end loop;
        v_masks[v_field] := v_mask;
    end loop;

    v_rule.second_mask := v_masks[1];
    v_rule.minute_mask := v_masks[2];
    v_rule.hour_mask := v_masks[3];
    v_rule.dom_mask := v_masks[4];
    v_rule.month_mask := v_masks[5];
    v_rule.dow_mask := (v_masks[6] & 127) | (v_masks[6] >> 7);
    v_text := v_fields[4 + v_shift];
    v_base := v_fields[6 + v_shift];
    v_rule.days_must_both := v_text like '*%' or v_text = '?' or v_base like '*%' or v_base = '?';
    v_rule.is_wildcard := v_fields[2 + v_shift] like '*%' or v_fields[3 + v_shift] like '*%';

    -- A day up to the 28th is in every month, and falls on every weekday in time.
    if (v_rule.dom_mask & 536870910 = 0 or v_rule.dow_mask = 0) and not almanac._has_a_date(v_rule) then
        raise exception using errcode = 'PA007',
            message = format('cron expression "%s" has no possible date', left(btrim(cron, E' \t'), 40)),
            detail  = 'No year has a day that matches its day of month, month and day of week together.',
            hint    = 'For the last day of a month write L in the day of month field.';
    end if;
    return v_rule;
end;
$$;
comment on function almanac.parse_cron(text) is
    'Parse a cron expression of five or six fields or a descriptor. Raises PA007, naming the field and the part.';
