-- 21 _lowest_bit: index of the lowest bit that is set in a mask. Jumping needs no loop over values.
create or replace function almanac._lowest_bit(mask bigint)
    returns integer
    language sql immutable parallel safe
    return 64 - position(B'1' in (_lowest_bit.mask & -_lowest_bit.mask)::bit(64));
comment on function almanac._lowest_bit(bigint) is 'Index of the lowest bit set in a mask that is not zero.';

-- 21 _highest_bit: index of the highest bit that is set in a mask; the mirror of _lowest_bit for previous_run.
create or replace function almanac._highest_bit(mask bigint)
    returns integer
    language sql immutable parallel safe
    return 64 - position(B'1' in _highest_bit.mask::bit(64));
comment on function almanac._highest_bit(bigint) is 'Index of the highest bit set in a mask that is not zero.';

-- 21 _month_length: days in a month of the proleptic Gregorian calendar.
create or replace function almanac._month_length(year integer, month integer)
    returns integer
    language sql immutable parallel safe
    return case
        when _month_length.month <> 2 then 30 + ((_month_length.month + _month_length.month / 8) & 1)
        when _month_length.year % 4 = 0 and (_month_length.year % 100 <> 0 or _month_length.year % 400 = 0) then 29
        else 28
    end;
comment on function almanac._month_length(integer, integer) is 'Number of days in a month.';

-- 21 _week_days: the days of a month, as bits 1 to 42, that fall on the given weekdays.
-- The factor repeats the seven bits of the week seven times; the shift aligns them with the first of the month.
create or replace function almanac._week_days(weekdays bigint, first_dow integer)
    returns bigint
    language sql immutable parallel safe
    return ((_week_days.weekdays * 4432676798593) >> _week_days.first_dow) << 1;
comment on function almanac._week_days(bigint, integer) is
    'Days of a month whose first day is weekday first_dow that fall on the given weekdays.';

-- 21 _nearest_days: nW for several n at once: the days of a month that are the weekday nearest to a marked day.
-- Saturday moves to Friday and Sunday to Monday, but never out of the month: the 1st to Monday the 3rd, the last day to
-- the Friday before it. What leaves the month on the way is cut off by the caller.
-- Calls: _week_days.
create or replace function almanac._nearest_days(marked bigint, first_dow integer, month_length integer)
    returns bigint
    language sql immutable parallel safe
    return (_nearest_days.marked & ~almanac._week_days(65, _nearest_days.first_dow))
           | ((_nearest_days.marked & almanac._week_days(64, _nearest_days.first_dow)) >> 1)
           | ((_nearest_days.marked & almanac._week_days(64, _nearest_days.first_dow) & 2) << 2)
           | ((_nearest_days.marked & almanac._week_days(1, _nearest_days.first_dow)) << 1)
           | ((_nearest_days.marked & almanac._week_days(1, _nearest_days.first_dow)
               & (1::bigint << _nearest_days.month_length)) >> 2);
comment on function almanac._nearest_days(bigint, integer, integer) is
    'The weekdays, Monday to Friday, nearest to the marked days of a month.';

-- 21 _nth_days: n#k for several n and k at once. Turns each group of seven bits by first_dow, so that a bit that stood
-- for a weekday stands for a place in that week of the month; the factor repeats the seven bits five times.
create or replace function almanac._nth_days(nth_mask bigint, first_dow integer)
    returns bigint
    language sql immutable parallel safe
    return (((_nth_days.nth_mask >> _nth_days.first_dow) & (((1::bigint << (7 - _nth_days.first_dow)) - 1) * 270549121))
            | ((_nth_days.nth_mask << (7 - _nth_days.first_dow))
               & ~(((1::bigint << (7 - _nth_days.first_dow)) - 1) * 270549121))) << 1;
comment on function almanac._nth_days(bigint, integer) is 'Days of a month that are the k-th of their weekday.';

-- 21 _dom_days: the days of one month that the day-of-month field selects, modifiers included.
-- Calls: _nearest_days.
create or replace function almanac._dom_days(rule almanac.cron_rule, first_dow integer, month_length integer)
    returns bigint
    language sql immutable parallel safe
    return (_dom_days.rule).dom_mask
           | ((_dom_days.rule).dom_end_mask >> (31 - _dom_days.month_length))
           | case when (_dom_days.rule).dom_last_weekday
                  then (1::bigint << _dom_days.month_length)
                       >> case (_dom_days.first_dow + _dom_days.month_length - 1) % 7
                          when 0 then 2 when 6 then 1 else 0 end
                  else 0 end
           | case when (_dom_days.rule).dom_nearest_mask = 0 then 0
                  else almanac._nearest_days(
                           (_dom_days.rule).dom_nearest_mask & ((2::bigint << _dom_days.month_length) - 2),
                           _dom_days.first_dow, _dom_days.month_length) end;
comment on function almanac._dom_days(almanac.cron_rule, integer, integer) is
    'Days of one month that the day-of-month field of a rule selects.';

-- 21 _dow_days: the days of one month that the day-of-week field selects, modifiers included.
-- Calls: _nth_days, _week_days.
create or replace function almanac._dow_days(rule almanac.cron_rule, first_dow integer, month_length integer)
    returns bigint
    language sql immutable parallel safe
    return almanac._week_days((_dow_days.rule).dow_mask, _dow_days.first_dow)
           | case when (_dow_days.rule).dow_last_mask = 0 then 0
                  else almanac._week_days((_dow_days.rule).dow_last_mask, _dow_days.first_dow)
                       & (127::bigint << (_dow_days.month_length - 6)) end
           | case when (_dow_days.rule).dow_nth_mask = 0 then 0
                  else almanac._nth_days((_dow_days.rule).dow_nth_mask, _dow_days.first_dow) end;
comment on function almanac._dow_days(almanac.cron_rule, integer, integer) is
    'Days of one month that the day-of-week field of a rule selects.';

-- 21 _month_days: the days of one month that a rule selects, from the weekday of the 1st and the month's length.
-- Like its parts one expression, which the planner puts in place of the call as long as the arguments are variables.
-- Calls: _dom_days, _dow_days.
create or replace function almanac._month_days(rule almanac.cron_rule, first_dow integer, month_length integer)
    returns bigint
    language sql immutable parallel safe
    return ((2::bigint << _month_days.month_length) - 2)
           & case when (_month_days.rule).days_must_both
                  then almanac._dom_days(_month_days.rule, _month_days.first_dow, _month_days.month_length)
                       & almanac._dow_days(_month_days.rule, _month_days.first_dow, _month_days.month_length)
                  else almanac._dom_days(_month_days.rule, _month_days.first_dow, _month_days.month_length)
                       | almanac._dow_days(_month_days.rule, _month_days.first_dow, _month_days.month_length) end;
comment on function almanac._month_days(almanac.cron_rule, integer, integer) is
    'Days of one month that a rule selects, as bits 1 to 31.';

-- 21 _has_a_date: whether any day of the calendar can match, so that a rule that never runs is refused when written.
-- A month is its length and the weekday of its 1st; every weekday comes up for every length, 29 February included.
-- Calls: _month_days.
create or replace function almanac._has_a_date(rule almanac.cron_rule)
    returns boolean
    language plpgsql immutable parallel safe set search_path = ''
as $$
declare
    -- Masks of the months that can have 28, 29, 30 and 31 days.
    c_months constant bigint[] := '{4,4,2640,5546}';
begin
    -- Either day field will do, and weekdays come in every month.
    if not rule.days_must_both then
        return true;
    end if;
    for v_length in 28 .. 31 loop
        continue when rule.month_mask & c_months[v_length - 27] = 0;
        for v_first_dow in 0 .. 6 loop
            if almanac._month_days(rule, v_first_dow, v_length) <> 0 then
                return true;
            end if;
        end loop;
    end loop;
    return false;
end;
$$;
comment on function almanac._has_a_date(almanac.cron_rule) is 'Whether a rule matches any day of any year.';

-- 21 _parse_every: the duration of "@every 1h30m10s" in microseconds, written as Go writes durations.
create or replace function almanac._parse_every(duration text)
    returns bigint
    language plpgsql immutable parallel safe set search_path = ''
as $$
declare
    c_form constant text := '([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|ms|s|m|h)';
    v_us   numeric;
begin
    if duration ~ ('^(' || c_form || ')+$') then
        select sum(part.parts[1]::numeric * case part.parts[2] when 'ns' then 0.001 when 'us' then 1 when 'ms' then 1000
                                                 when 's' then 1000000 when 'm' then 60000000 else 3600000000 end)
          into v_us
          from regexp_matches(duration, c_form, 'g') as part (parts);
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
-- Calls: _has_a_date, _parse_every.
create or replace function almanac.parse_cron(cron text)
    returns almanac.cron_rule
    language plpgsql immutable strict parallel safe security definer set search_path = ''
as $$
declare
    c_field   constant text[] := '{second,minute,hour,day of month,month,day of week}';
    c_min     constant integer[] := '{0,0,0,1,1,0}';
    c_max     constant integer[] := '{59,59,23,31,12,7}';
    c_every   constant bigint[] := '{1152921504606846975,1152921504606846975,16777215,4294967294,8190,127}';
    c_month   constant text[] := '{JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC}';
    c_weekday constant text[] := '{SUN,MON,TUE,WED,THU,FRI,SAT}';
    v_text    text;
    v_fields  text[];
    v_part    text;
    v_why     text;
    v_base    text;
    v_token   text;
    v_low     integer;
    v_high    integer;
    v_step    integer;
    v_mask    bigint;
    v_comb    bigint;
    v_masks   bigint[] := '{1,0,0,0,0,0}';
    v_shift   integer;
    v_rule    almanac.cron_rule;
begin
    if length(cron) > 1000 then
        raise exception using errcode = 'PA007', message = 'cron expression is too long',
            detail = format('It has %s characters; at most 1000 are read.', length(cron)),
            hint   = 'Use ranges and steps (0-59/5) instead of long lists.';
    end if;
    -- Case folds only after this check: in some locales upper() makes ASCII letters out of others.
    if cron ~ '[^\u0020-\u007e\u0009]' then
        raise exception using errcode = 'PA007',
            message = 'cron expression contains a character that is not allowed',
            detail  = format('Character %s is a control character or not ASCII.',
                             length(substring(cron from '^[\u0020-\u007e\u0009]*')) + 1),
            hint    = 'Use ASCII digits and letters, * , - / ? # and @, separated by spaces or tabs.';
    end if;
    v_text := upper(translate(cron, E'\t', ' ') collate "C");
    v_fields := array_remove(string_to_array(v_text, ' '), '');

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
            message = format('cron expression has %s fields, not five or six', cardinality(v_fields)),
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
    for v_field in 1 - v_shift .. 6 loop
        v_text := v_fields[v_field + v_shift];
        if v_text = '*' or (v_text = '?' and v_field in (4, 6)) then
            v_masks[v_field] := c_every[v_field];
            continue;
        elsif v_text ~ '^[0-9]{1,2}$' and v_text::integer between c_min[v_field] and c_max[v_field] then
            v_masks[v_field] := 1::bigint << v_text::integer;
            continue;
        end if;
        v_mask := 0;
        foreach v_part in array string_to_array(v_text, ',') loop
            v_why := null;
            -- Matched first and cut afterwards: capturing groups would cost more than all the rest of this function.
            if v_part ~ '^(\*|([0-9]{1,4}|[A-Z]{3})(-([0-9]{1,4}|[A-Z]{3}))?)(/[0-9]{1,4})?$' then
                v_base := split_part(v_part, '/', 1);
                v_step := nullif(split_part(v_part, '/', 2), '');
                if v_base = '*' then
                    v_low := c_min[v_field];
                    v_high := c_max[v_field];
                else
                    v_token := split_part(v_base, '-', 1);
                    v_low := case when ascii(v_token) <= 57 then v_token::integer
                                  when v_field = 5 then array_position(c_month, v_token)
                                  when v_field = 6 then array_position(c_weekday, v_token) - 1 end;
                    if v_low between c_min[v_field] and c_max[v_field] then
                        v_token := split_part(v_base, '-', 2);
                        if v_token = '' then
                            v_high := case when v_step is null then v_low else c_max[v_field] end;
                        else
                            v_high := case when ascii(v_token) <= 57 then v_token::integer
                                           when v_field = 5 then array_position(c_month, v_token)
                                           when v_field = 6 then array_position(c_weekday, v_token) - 1 end;
                            -- FRI-SUN: the week may end on Sunday, though Sunday is also where it begins.
                            if v_field = 6 and v_high = 0 and v_low > 0 then
                                v_high := 7;
                            end if;
                        end if;
                    else
                        v_high := null;
                    end if;
                end if;
                if v_high is null or v_high not between c_min[v_field] and c_max[v_field] then
                    v_why := format('%s is not a %s.', v_token, c_field[v_field]);
                elsif v_low > v_high then
                    v_why := format('%s is after %s: ranges do not wrap around.', split_part(v_base, '-', 1), v_token);
                elsif v_step not between 1 and c_max[v_field] then
                    v_why := format('The step is 1 to %s.', c_max[v_field]);
                else
                    -- A comb of every v_step-th bit, by doubling; then cut to the range.
                    v_comb := -1;
                    if v_step > 1 then
                        v_comb := 1;
                        while v_step < 64 loop
                            v_comb := v_comb | (v_comb << v_step);
                            v_step := v_step * 2;
                        end loop;
                    end if;
                    v_mask := v_mask | ((v_comb << v_low) & ((2::bigint << v_high) - 1));
                end if;
            elsif v_field = 4 and v_part = 'LW' then
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
                v_token := substring(v_part from '^[0-9]+|^[A-Z]{3}');
                v_low := case when ascii(v_token) <= 57 then v_token::integer
                              else array_position(c_weekday, v_token) - 1 end;
                v_high := nullif(split_part(v_part, '#', 2), '');
                if v_low is null or v_low > 7 then
                    v_why := format('%s is not a day of week.', v_token);
                elsif v_high not between 1 and 5 then
                    v_why := 'In n#k, k is 1 to 5.';
                elsif v_high is null then
                    v_rule.dow_last_mask := v_rule.dow_last_mask | (1::bigint << (v_low % 7));
                else
                    v_rule.dow_nth_mask := v_rule.dow_nth_mask | (1::bigint << (7 * (v_high - 1) + v_low % 7));
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
                    message = format('cron field "%s" refuses "%s"', c_field[v_field], left(v_part, 40)),
                    detail  = v_why,
                    hint    = format('Allowed there: * */n a a-b a-b/n a/n, in lists with commas; values %s to %s%s.',
                                     c_min[v_field], c_max[v_field], case v_field
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

    -- A plain day up to the 28th is in every month: most rules need no closer look.
    if not (v_rule.dow_mask = 127 and v_rule.dom_mask & 536870910 <> 0) and not almanac._has_a_date(v_rule) then
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
