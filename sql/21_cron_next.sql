-- 21 _is_shown: whether the clocks of a zone show a local time at all. PostgreSQL maps one in a gap to an instant that
-- shows another. The zone must come from _zone.
create or replace function almanac._is_shown(zone text, label bigint)
    returns boolean
    language sql immutable parallel safe
    return to_timestamp(_is_shown.label) at time zone 'UTC'
           = to_timestamp(_is_shown.label) at time zone 'UTC' at time zone _is_shown.zone at time zone _is_shown.zone;
comment on function almanac._is_shown(text, bigint) is
    'Whether a local time, in local seconds since 1970, exists in a zone: false in a gap.';

-- 21 _next_label: the first local time at or after a given one that matches a rule. Labels are local seconds since
-- 1970-01-01 00:00 on the clock of the zone, so that days, months and masks need only integers; zones come in later.
-- Jumps from field to field; the only loop goes over at most 50 years of months that the rule names. With a zone, days
-- are passed over where a gap holds the first and the last label, and so all that the rule names.
-- Calls: _first_time, _has_plain_days, _is_shown, _last_time, _lowest_bit, _month_days, _month_length, _plain_days.
create or replace function almanac._next_label(rule almanac.cron_rule, label bigint, zone text default null)
    returns bigint
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    -- Counted from 0000-03-01, a Wednesday, nothing is negative and division rounds down.
    c_shift   constant integer := 719468;
    v_seconds bigint  := label + 62162035200;
    v_time    integer := v_seconds % 86400;
    v_date    date    := date '1970-01-01' + (v_seconds / 86400 - c_shift)::integer;
    v_year    integer := date_part('year', v_date);
    v_month   integer := date_part('month', v_date);
    v_day     integer := date_part('day', v_date);
    v_first   integer := v_seconds / 86400 - v_day + 1;
    v_until   integer := v_year + 50;
    v_plain   boolean := almanac._has_plain_days(rule);
    v_dow     integer;
    v_length  integer;
    v_hour    integer;
    v_minute  integer;
    v_days    bigint  := 0;
    v_rest    bigint;
    v_found   bigint;
begin
    if (rule.month_mask >> v_month) & 1 = 1 then
        v_dow := (v_first + 3) % 7;
        v_length := almanac._month_length(v_year, v_month);
        if v_plain then
            v_days := almanac._plain_days(rule, v_dow, v_length);
        else
            v_days := almanac._month_days(rule, v_dow, v_length);
        end if;
        if (v_days >> v_day) & 1 = 1 then
            -- Today: this hour and minute, a later minute, a later hour; whichever comes first.
            v_hour := v_time / 3600;
            v_minute := v_time / 60 % 60;
            if (rule.hour_mask >> v_hour) & 1 = 1 then
                v_rest := rule.second_mask & ((-1)::bigint << (v_time % 60));
                if v_rest <> 0 and (rule.minute_mask >> v_minute) & 1 = 1 then
                    return label - v_time % 60 + almanac._lowest_bit(v_rest);
                end if;
                v_rest := rule.minute_mask & ((-2)::bigint << v_minute);
                if v_rest <> 0 then
                    return label - v_time % 3600 + almanac._lowest_bit(v_rest) * 60
                           + almanac._lowest_bit(rule.second_mask);
                end if;
            end if;
            v_rest := rule.hour_mask & ((-2)::bigint << v_hour);
            if v_rest <> 0 then
                return label - v_time + almanac._lowest_bit(v_rest) * 3600
                       + almanac._lowest_bit(rule.minute_mask) * 60 + almanac._lowest_bit(rule.second_mask);
            end if;
            v_days := v_days & ((-2)::bigint << v_day);
        else
            v_days := v_days & ((-1)::bigint << v_day);
        end if;
    end if;
    loop
        while v_days = 0 loop
            v_rest := rule.month_mask & ((-2)::bigint << v_month);
            if v_rest = 0 then
                v_rest := rule.month_mask;
                v_year := v_year + 1;
                if v_year > v_until then
                    return null;
                end if;
            end if;
            v_month := almanac._lowest_bit(v_rest);
            v_first := make_date(v_year, v_month, 1) - date '1970-01-01' + c_shift;
            v_dow := (v_first + 3) % 7;
            v_length := almanac._month_length(v_year, v_month);
            if v_plain then
                v_days := almanac._plain_days(rule, v_dow, v_length);
            else
                v_days := almanac._month_days(rule, v_dow, v_length);
            end if;
        end loop;
        v_found := (v_first + almanac._lowest_bit(v_days) - 1 - c_shift)::bigint * 86400 + almanac._first_time(rule);
        exit when zone is null or almanac._is_shown(zone, v_found);
        v_rest := v_found - almanac._first_time(rule) + almanac._last_time(rule);
        exit when almanac._is_shown(zone, v_rest);
        v_days := v_days & (v_days - 1);
    end loop;
    return v_found;
end;
$$;
comment on function almanac._next_label(almanac.cron_rule, bigint, text) is
    'First matching local time at or after one, both in local seconds since 1970; null if none within 50 years.';

-- 21 _previous_label: the last local time at or before a given one that matches; the mirror of _next_label.
-- Calls: _first_time, _highest_bit, _is_shown, _last_time, _month_days, _month_length.
create or replace function almanac._previous_label(rule almanac.cron_rule, label bigint, zone text default null)
    returns bigint
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_shift   constant integer := 719468;
    v_seconds bigint  := label + 62162035200;
    v_time    integer := v_seconds % 86400;
    v_date    date    := date '1970-01-01' + (v_seconds / 86400 - c_shift)::integer;
    v_year    integer := date_part('year', v_date);
    v_month   integer := date_part('month', v_date);
    v_day     integer := date_part('day', v_date);
    v_first   integer := v_seconds / 86400 - v_day + 1;
    v_until   integer := greatest(v_year - 50, 1);
    v_dow     integer;
    v_length  integer;
    v_hour    integer;
    v_minute  integer;
    v_days    bigint  := 0;
    v_rest    bigint;
    v_found   bigint;
begin
    if (rule.month_mask >> v_month) & 1 = 1 then
        v_dow := (v_first + 3) % 7;
        v_length := almanac._month_length(v_year, v_month);
        v_days := almanac._month_days(rule, v_dow, v_length);
        if (v_days >> v_day) & 1 = 1 then
            v_hour := v_time / 3600;
            v_minute := v_time / 60 % 60;
            if (rule.hour_mask >> v_hour) & 1 = 1 then
                v_rest := rule.second_mask & ((2::bigint << (v_time % 60)) - 1);
                if v_rest <> 0 and (rule.minute_mask >> v_minute) & 1 = 1 then
                    return label - v_time % 60 + almanac._highest_bit(v_rest);
                end if;
                v_rest := rule.minute_mask & ((1::bigint << v_minute) - 1);
                if v_rest <> 0 then
                    return label - v_time % 3600 + almanac._highest_bit(v_rest) * 60
                           + almanac._highest_bit(rule.second_mask);
                end if;
            end if;
            v_rest := rule.hour_mask & ((1::bigint << v_hour) - 1);
            if v_rest <> 0 then
                return label - v_time + almanac._highest_bit(v_rest) * 3600
                       + almanac._highest_bit(rule.minute_mask) * 60 + almanac._highest_bit(rule.second_mask);
            end if;
        end if;
        v_days := v_days & ((1::bigint << v_day) - 1);
    end if;
    loop
        while v_days = 0 loop
            v_rest := rule.month_mask & ((1::bigint << v_month) - 1);
            if v_rest = 0 then
                v_rest := rule.month_mask;
                v_year := v_year - 1;
                if v_year < v_until then
                    return null;
                end if;
            end if;
            v_month := almanac._highest_bit(v_rest);
            v_first := make_date(v_year, v_month, 1) - date '1970-01-01' + c_shift;
            v_dow := (v_first + 3) % 7;
            v_length := almanac._month_length(v_year, v_month);
            v_days := almanac._month_days(rule, v_dow, v_length);
        end loop;
        v_found := (v_first + almanac._highest_bit(v_days) - 1 - c_shift)::bigint * 86400 + almanac._last_time(rule);
        exit when zone is null or almanac._is_shown(zone, v_found);
        v_rest := v_found - almanac._last_time(rule) + almanac._first_time(rule);
        exit when almanac._is_shown(zone, v_rest);
        v_days := v_days & ~(1::bigint << almanac._highest_bit(v_days));
    end loop;
    return v_found;
end;
$$;
comment on function almanac._previous_label(almanac.cron_rule, bigint, text) is
    'Last matching local time at or before one, both in local seconds since 1970; null if none within 50 years.';

-- 21 _utc_offset: local minus UTC, in seconds, at an instant given in Unix seconds. The zone must come from _zone.
create or replace function almanac._utc_offset(zone text, instant bigint)
    returns bigint
    language sql immutable parallel safe
    return extract(epoch from to_timestamp(_utc_offset.instant) at time zone _utc_offset.zone)::bigint
           - _utc_offset.instant;
comment on function almanac._utc_offset(text, bigint) is 'Offset of a zone from UTC at an instant, in seconds.';

-- 21 _offset_change: the first second with the new offset, where the offset differs between two instants.
-- Calls: _utc_offset.
create or replace function almanac._offset_change(zone text, low bigint, high bigint)
    returns bigint
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_low    bigint := low;
    v_high   bigint := high;
    v_middle bigint;
    v_offset bigint := almanac._utc_offset(zone, low);
begin
    -- Clocks change on a quarter of an hour, nearly always: halving those takes half the steps. Seconds come after.
    loop
        v_middle := (v_low + v_high) / 1800 * 900;
        exit when v_middle <= v_low or v_middle >= v_high;
        if almanac._utc_offset(zone, v_middle) = v_offset then
            v_low := v_middle;
        else
            v_high := v_middle;
        end if;
    end loop;
    if almanac._utc_offset(zone, v_high - 1) = v_offset then
        return v_high;
    end if;
    while v_high - v_low > 1 loop
        v_middle := (v_low + v_high) >> 1;
        if almanac._utc_offset(zone, v_middle) = v_offset then
            v_low := v_middle;
        else
            v_high := v_middle;
        end if;
    end loop;
    return v_high;
end;
$$;
comment on function almanac._offset_change(text, bigint, bigint) is
    'Unix second at which the offset of a zone changes between two instants; found by bisection.';

-- 21 _instant: Unix microseconds to an instant. Seconds and the rest apart, because a double holds no more exactly.
create or replace function almanac._instant(microseconds numeric)
    returns timestamptz
    language sql immutable parallel safe
    return to_timestamp(floor(_instant.microseconds / 1000000)::bigint)
           + make_interval(secs => _instant.microseconds / 1000000 - floor(_instant.microseconds / 1000000));
comment on function almanac._instant(numeric) is 'The instant so many microseconds after 1970-01-01 00:00 UTC.';

-- 21 _next_elapsed: the next instant of an @every rule, strictly after one. The anchor is null for the epoch.
-- Calls: _instant.
create or replace function almanac._next_elapsed(every_us bigint, after timestamptz, anchor timestamptz)
    returns timestamptz
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_anchor numeric := coalesce(extract(epoch from anchor) * 1000000, 0);
    v_after  numeric := extract(epoch from after) * 1000000 - v_anchor;
begin
    return almanac._instant(v_anchor + every_us * (floor(v_after / every_us) + 1));
end;
$$;
comment on function almanac._next_elapsed(bigint, timestamptz, timestamptz) is
    'Next multiple of a period, counted from an anchor, strictly after an instant.';

-- 21 _previous_elapsed: the last instant of an @every rule, strictly before one; the mirror of _next_elapsed.
-- Calls: _instant.
create or replace function almanac._previous_elapsed(every_us bigint, before timestamptz, anchor timestamptz)
    returns timestamptz
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    v_anchor numeric := coalesce(extract(epoch from anchor) * 1000000, 0);
    v_before numeric := extract(epoch from before) * 1000000 - v_anchor;
begin
    return almanac._instant(v_anchor + every_us * (ceil(v_before / every_us) - 1));
end;
$$;
comment on function almanac._previous_elapsed(bigint, timestamptz, timestamptz) is
    'Last multiple of a period, counted from an anchor, strictly before an instant.';

-- 21 _next_in_zone: the first run at or after a Unix second, by the clocks of a zone; null if none within 50 years.
-- Time is walked in stretches of constant offset. No clock change is larger than 24 hours and no two are closer than
-- 78 hours in any zone, so looking 26 hours back and 52 ahead sees the one change that can matter, and a far label can
-- be approached to within 26 hours without looking at the changes in between.
-- Calls: _is_shown, _next_label, _offset_change, _utc_offset, _zone.
create or replace function almanac._next_in_zone(
    rule almanac.cron_rule, timezone text, first bigint, dst_gap text, dst_overlap text)
    returns timestamptz
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_back   constant bigint := 93600;
    c_ahead  constant bigint := 187200;
    v_zone   text   := almanac._zone(timezone);
    v_from   bigint := first;  -- runs before this instant are of no interest
    v_until  bigint := first + 1577880000;
    v_offset bigint;
    v_before bigint;  -- offset before the change behind v_from
    v_beyond bigint;  -- offset after the change ahead of v_from
    v_start  bigint;  -- change behind v_from: the stretch begins here
    v_end    bigint;  -- change ahead of v_from: the stretch ends here
    v_low    bigint;
    v_high   bigint;
    v_label  bigint;
begin
    while v_from < v_until loop
        v_offset := almanac._utc_offset(v_zone, v_from);
        v_before := case when rule.is_wildcard then v_offset else almanac._utc_offset(v_zone, v_from - c_back) end;
        v_beyond := almanac._utc_offset(v_zone, v_from + c_ahead);

        v_low := v_from + v_offset;
        if v_before <> v_offset then
            v_start := almanac._offset_change(v_zone, v_from - c_back, v_from);
            if v_before > v_offset then
                -- The clock went back: what it shows for the second time has had its run.
                if dst_overlap = 'first' then
                    v_low := greatest(v_low, v_start + v_before);
                end if;
            elsif v_start = v_from and dst_gap = 'after'
                  and almanac._next_label(rule, v_start + v_before) < v_start + v_offset then
                -- The clock went forward over a label that matches: it runs at the first instant after the gap.
                return to_timestamp(v_start);
            end if;
        end if;

        v_end := null;
        v_high := v_from + v_offset + c_ahead;
        if v_beyond <> v_offset then
            v_end := almanac._offset_change(v_zone, v_from, v_from + c_ahead);
            v_high := v_end + v_offset;
            if dst_overlap = 'second' and v_beyond < v_offset and not rule.is_wildcard then
                v_high := v_end + v_beyond;
            end if;
        end if;

        if v_label is null or v_label < v_low then
            v_label := almanac._next_label(rule, v_low);
            exit when v_label is null;
        end if;
        if v_label < v_high then
            return to_timestamp(v_label - v_offset);
        elsif v_end is not null then
            -- Behind a change the labels may begin again.
            v_from := v_end;
            v_label := null;
        else
            -- Not worth going to if the clocks leave it out. The day before has no label any more: begin there.
            if (rule.is_wildcard or dst_gap = 'skip') and not almanac._is_shown(v_zone, v_label) then
                v_label := almanac._next_label(rule, v_label - 86400, v_zone);
                exit when v_label is null;
            end if;
            v_from := greatest(v_from + c_ahead, v_label - v_offset - c_back);
        end if;
    end loop;
    return null;
end;
$$;
comment on function almanac._next_in_zone(almanac.cron_rule, text, bigint, text, text) is
    'First run of a rule at or after a Unix second by the clocks of a zone, or null if there is none within 50 years.';

-- 21 _previous_in_zone: the last run at or before a Unix second, by the clocks of a zone; the mirror of _next_in_zone.
-- Calls: _is_shown, _offset_change, _previous_label, _utc_offset, _zone.
create or replace function almanac._previous_in_zone(
    rule almanac.cron_rule, timezone text, last bigint, dst_gap text, dst_overlap text)
    returns timestamptz
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
    c_back   constant bigint := 187200;
    c_ahead  constant bigint := 93600;
    v_zone   text   := almanac._zone(timezone);
    v_from   bigint := last;  -- runs after this instant are of no interest
    v_until  bigint := last - 1577880000;
    v_offset bigint;
    v_before bigint;
    v_beyond bigint;
    v_start  bigint;
    v_low    bigint;
    v_high   bigint;
    v_label  bigint;
begin
    while v_from > v_until loop
        v_offset := almanac._utc_offset(v_zone, v_from);
        v_before := almanac._utc_offset(v_zone, v_from - c_back);

        v_high := v_from + v_offset;
        if dst_overlap = 'second' and not rule.is_wildcard then
            v_beyond := almanac._utc_offset(v_zone, v_from + c_ahead);
            if v_beyond < v_offset then
                -- The clock will go back: what it will show again runs then.
                v_high := least(v_high, almanac._offset_change(v_zone, v_from, v_from + c_ahead) + v_beyond - 1);
            end if;
        end if;

        v_start := null;
        v_low := v_from + v_offset - c_back + 1;
        if v_before <> v_offset then
            v_start := almanac._offset_change(v_zone, v_from - c_back, v_from);
            v_low := v_start + v_offset;
            if dst_overlap = 'first' and v_before > v_offset and not rule.is_wildcard then
                v_low := v_start + v_before;
            end if;
        end if;

        if v_label is null or v_label > v_high then
            v_label := almanac._previous_label(rule, v_high);
            exit when v_label is null;
        end if;
        if v_label >= v_low then
            return to_timestamp(v_label - v_offset);
        elsif v_start is not null then
            if v_before < v_offset and dst_gap = 'after' and not rule.is_wildcard
               and v_label >= v_start + v_before then
                return to_timestamp(v_start);
            end if;
            v_from := v_start - 1;
            v_label := null;
        else
            if (rule.is_wildcard or dst_gap = 'skip') and not almanac._is_shown(v_zone, v_label) then
                v_label := almanac._previous_label(rule, v_label + 86400, v_zone);
                exit when v_label is null;
            end if;
            v_from := least(v_from - c_back, v_label - v_offset + c_ahead);
        end if;
    end loop;
    return null;
end;
$$;
comment on function almanac._previous_in_zone(almanac.cron_rule, text, bigint, text, text) is
    'Last run of a rule at or before a Unix second by the clocks of a zone, or null if there is none within 50 years.';

-- 21 _next_run: the next instant of a parsed rule, strictly after one; what a tick calls, so nothing is parsed or
-- checked here. Null where there is none within 50 years (a rule whose every local time falls into gaps, skipped).
-- One expression, which the planner puts in place of the call; hence UTC said aloud, where extract would be stable.
-- Calls: _next_elapsed, _next_in_zone, _next_label.
create or replace function almanac._next_run(
    rule almanac.cron_rule, timezone text, after timestamptz, dst_gap text, dst_overlap text, anchor timestamptz)
    returns timestamptz
    language sql immutable parallel safe
    return case
        when (_next_run.rule).every_us is not null then
            almanac._next_elapsed((_next_run.rule).every_us, _next_run.after, _next_run.anchor)
        when _next_run.timezone = 'UTC' then
            to_timestamp(almanac._next_label(
                _next_run.rule, floor(extract(epoch from _next_run.after at time zone 'UTC'))::bigint + 1))
        else
            almanac._next_in_zone(
                _next_run.rule, _next_run.timezone,
                floor(extract(epoch from _next_run.after at time zone 'UTC'))::bigint + 1,
                _next_run.dst_gap, _next_run.dst_overlap) end;
comment on function almanac._next_run(almanac.cron_rule, text, timestamptz, text, text, timestamptz) is
    'Next run of a parsed rule strictly after an instant, or null if there is none within 50 years.';

-- 21 _previous_run: the last instant of a parsed rule, strictly before one; the mirror of _next_run.
-- Calls: _previous_elapsed, _previous_in_zone, _previous_label.
create or replace function almanac._previous_run(
    rule almanac.cron_rule, timezone text, before timestamptz, dst_gap text, dst_overlap text, anchor timestamptz)
    returns timestamptz
    language sql immutable parallel safe
    return case
        when (_previous_run.rule).every_us is not null then
            almanac._previous_elapsed((_previous_run.rule).every_us, _previous_run.before, _previous_run.anchor)
        when _previous_run.timezone = 'UTC' then
            to_timestamp(almanac._previous_label(
                _previous_run.rule, ceil(extract(epoch from _previous_run.before at time zone 'UTC'))::bigint - 1))
        else
            almanac._previous_in_zone(
                _previous_run.rule, _previous_run.timezone,
                ceil(extract(epoch from _previous_run.before at time zone 'UTC'))::bigint - 1,
                _previous_run.dst_gap, _previous_run.dst_overlap) end;
comment on function almanac._previous_run(almanac.cron_rule, text, timestamptz, text, text, timestamptz) is
    'Last run of a parsed rule strictly before an instant, or null if there is none within 50 years.';

-- 21 _refuse_no_run: the answer where 50 years hold no run.
create or replace function almanac._refuse_no_run(cron text, timezone text)
    returns void
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = 'PA007',
        message = format('cron expression "%s" does not run within 50 years', left(_refuse_no_run.cron, 40)),
        detail  = format('Every local time it names is left out by the clocks of %s.', _refuse_no_run.timezone),
        hint    = 'Name a time that the clocks show. Where neither minute nor hour starts with *, dst_gap => ''after'' '
                  'runs at the first instant after the gap.';
end;
$$;
comment on function almanac._refuse_no_run(text, text) is 'Raises PA007 for a rule that has no run within 50 years.';

-- 21 next_run: cron text to the next instant, for people in psql and for checks; a tick uses _next_run.
-- Calls: _check_run_arguments, _next_run, _refuse_no_run, parse_cron.
create or replace function almanac.next_run(
    cron text, timezone text, after timestamptz, dst_gap text default 'after', dst_overlap text default 'first',
    anchor timestamptz default '1970-01-01 00:00:00+00')
    returns timestamptz
    language plpgsql immutable strict parallel safe security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_run timestamptz;
begin
    perform almanac._check_run_arguments(timezone, after, dst_gap, dst_overlap, anchor);
    v_run := almanac._next_run(almanac.parse_cron(cron), timezone, after, dst_gap, dst_overlap, anchor);
    if v_run is null then
        perform almanac._refuse_no_run(cron, timezone);
    end if;
    return v_run;
end;
$$;
comment on function almanac.next_run(text, text, timestamptz, text, text, timestamptz) is
    'Next run of a cron expression in a time zone, strictly after an instant. Raises PA007, PA008, 22023.';

-- 21 previous_run: cron text to the last instant before another.
-- Calls: _check_run_arguments, _previous_run, _refuse_no_run, parse_cron.
create or replace function almanac.previous_run(
    cron text, timezone text, before timestamptz, dst_gap text default 'after', dst_overlap text default 'first',
    anchor timestamptz default '1970-01-01 00:00:00+00')
    returns timestamptz
    language plpgsql immutable strict parallel safe security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_run timestamptz;
begin
    perform almanac._check_run_arguments(timezone, before, dst_gap, dst_overlap, anchor);
    v_run := almanac._previous_run(almanac.parse_cron(cron), timezone, before, dst_gap, dst_overlap, anchor);
    if v_run is null then
        perform almanac._refuse_no_run(cron, timezone);
    end if;
    return v_run;
end;
$$;
comment on function almanac.previous_run(text, text, timestamptz, text, text, timestamptz) is
    'Last run of a cron expression in a time zone, strictly before an instant. Raises PA007, PA008, 22023.';

-- 21 next_runs: the next so many instants, in order. Parsed and checked once.
-- Calls: _check_run_arguments, _next_run, _refuse_no_run, parse_cron.
create or replace function almanac.next_runs(
    cron text, timezone text, after timestamptz, count integer default 10, dst_gap text default 'after',
    dst_overlap text default 'first', anchor timestamptz default '1970-01-01 00:00:00+00')
    returns setof timestamptz
    language plpgsql immutable strict parallel safe security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_rule almanac.cron_rule := almanac.parse_cron(cron);
    v_run  timestamptz := after;
begin
    perform almanac._check_run_arguments(timezone, after, dst_gap, dst_overlap, anchor);
    if next_runs.count not between 1 and 10000 then
        raise exception using errcode = '22023',
            message = format('count %s is out of range', next_runs.count),
            detail  = 'One call returns 1 to 10000 runs.',
            hint    = 'Ask again with after set to the last run you got.';
    end if;
    for v_number in 1 .. next_runs.count loop
        v_run := almanac._next_run(v_rule, timezone, v_run, dst_gap, dst_overlap, anchor);
        if v_run is null then
            perform almanac._refuse_no_run(cron, timezone);
        end if;
        return next v_run;
    end loop;
end;
$$;
comment on function almanac.next_runs(text, text, timestamptz, integer, text, text, timestamptz) is
    'The next runs of a cron expression in a time zone after an instant, in order; at most 10000.';
