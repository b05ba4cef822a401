-- 20 clock: the one place that asks the time. Tests replace it in their template database; nothing else may.
create or replace function almanac.clock()
    returns timestamptz
    language sql volatile
    return clock_timestamp();
comment on function almanac.clock() is
    'The time as pg_almanac sees it. Every function asks here; none accepts a caller''s "now".';
revoke all on function almanac.clock() from public;
