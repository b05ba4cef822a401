-- 22 _backoff: how long to wait after the given attempt failed. Doubles from base_delay, stops at max_delay.
-- Computed in double precision with a clamped exponent: an interval or an integer would overflow at some attempt, and
-- a failure that cannot be recorded would leave the job cycling through expired leases for ever.
create or replace function almanac._backoff(attempt integer, base_delay interval, max_delay interval)
    returns interval
    language sql immutable parallel safe
    return make_interval(secs => least(
        extract(epoch from max_delay)::double precision,
        extract(epoch from base_delay)::double precision
        * power(2::double precision, least(greatest(attempt, 1) - 1, 62))));
comment on function almanac._backoff(integer, interval, interval) is
    'base_delay x 2^(attempt-1), at most max_delay, for any attempt number.';
