-- 21 _lowest_bit: index of the lowest bit that is set in a mask. Jumping needs no loop over values.
-- A power of two is exact as a double and its logarithm is off by far less than the half that rounding forgives.
create or replace function almanac._lowest_bit(mask bigint)
    returns integer
    language sql immutable parallel safe
    return (ln((_lowest_bit.mask & -_lowest_bit.mask)::double precision) * 1.4426950408889634)::integer;
comment on function almanac._lowest_bit(bigint) is 'Index of the lowest bit set in a mask that is not zero.';

-- 21 _highest_bit: index of the highest bit that is set in a mask; the mirror of _lowest_bit for previous_run.
-- Without the bits that have a higher neighbour, what is left is below 4/3 of its highest bit: that rounds down too.
create or replace function almanac._highest_bit(mask bigint)
    returns integer
    language sql immutable parallel safe
    return (ln((_highest_bit.mask & ~(_highest_bit.mask >> 1))::double precision) * 1.4426950408889634)::integer;
comment on function almanac._highest_bit(bigint) is 'Index of the highest bit set in a mask that is not zero.';

-- 21 _bits: the values low, low + step, ... up to high as a mask: a geometric series has a closed form.
create or replace function almanac._bits(low integer, high integer, step integer)
    returns bigint
    language sql immutable parallel safe
    return ((((1::bigint << ((_bits.high - _bits.low) / _bits.step * _bits.step)) - 1)
             / ((1::bigint << _bits.step) - 1) << _bits.step) | 1) << _bits.low;
comment on function almanac._bits(integer, integer, integer) is 'Mask of the values low, low + step, ... up to high.';

-- 21 _first_time: the first time of a day at which a rule can run, in seconds.
-- Calls: _lowest_bit.
create or replace function almanac._first_time(rule almanac.cron_rule)
    returns integer
    language sql immutable parallel safe
    return almanac._lowest_bit((_first_time.rule).hour_mask) * 3600
           + almanac._lowest_bit((_first_time.rule).minute_mask) * 60
           + almanac._lowest_bit((_first_time.rule).second_mask);
comment on function almanac._first_time(almanac.cron_rule) is 'First matching time of day, in seconds.';

-- 21 _last_time: the last time of a day at which a rule can run, in seconds.
-- Calls: _highest_bit.
create or replace function almanac._last_time(rule almanac.cron_rule)
    returns integer
    language sql immutable parallel safe
    return almanac._highest_bit((_last_time.rule).hour_mask) * 3600
           + almanac._highest_bit((_last_time.rule).minute_mask) * 60
           + almanac._highest_bit((_last_time.rule).second_mask);
comment on function almanac._last_time(almanac.cron_rule) is 'Last matching time of day, in seconds.';

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

-- 21 _has_plain_days: whether a rule names its days by numbers and weekdays only, as most do: no L, W, #.
create or replace function almanac._has_plain_days(rule almanac.cron_rule)
    returns boolean
    language sql immutable parallel safe
    return ((_has_plain_days.rule).dom_end_mask | (_has_plain_days.rule).dom_nearest_mask
            | (_has_plain_days.rule).dow_nth_mask | (_has_plain_days.rule).dow_last_mask) = 0
           and not (_has_plain_days.rule).dom_last_weekday;
comment on function almanac._has_plain_days(almanac.cron_rule) is
    'Whether the day fields of a rule have no modifiers: then _plain_days is what _month_days is.';

-- 21 _plain_days: _month_days for a rule with plain days. A transaction sets up an expression whole before it first
-- asks it, and that of _month_days takes longer to set up than everything else on the way to the next run.
-- Calls: _week_days.
create or replace function almanac._plain_days(rule almanac.cron_rule, first_dow integer, month_length integer)
    returns bigint
    language sql immutable parallel safe
    return ((2::bigint << _plain_days.month_length) - 2)
           & case when (_plain_days.rule).days_must_both
                  then (_plain_days.rule).dom_mask
                       & almanac._week_days((_plain_days.rule).dow_mask, _plain_days.first_dow)
                  else (_plain_days.rule).dom_mask
                       | almanac._week_days((_plain_days.rule).dow_mask, _plain_days.first_dow) end;
comment on function almanac._plain_days(almanac.cron_rule, integer, integer) is
    'Days of one month that a rule without day modifiers selects, as bits 1 to 31.';

-- 21 _has_a_date: whether any day of the calendar can match, so that a rule that never runs is refused when written.
-- A month is its length and the weekday of its 1st; every weekday comes up for every length, 29 February included.
-- Calls: _month_days.
create or replace function almanac._has_a_date(rule almanac.cron_rule)
    returns boolean
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
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
