-- 52 fail_with_backoff: running -> retrying, or dead when no attempt is left or the failure is permanent.
-- Calls: _open_queue, _hold, _end_attempt.
create or replace function almanac.fail_with_backoff(
    queue text, job_id bigint, lease_token bigint, error text, permanent boolean default false,
    retry_after interval default null)
    returns almanac.failed_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if fail_with_backoff.retry_after not between interval '0' and interval '3650 days' then
        raise exception using errcode = '22023',
            message = 'retry_after must be between 0 and 3650 days',
            detail  = format('It is %s.', fail_with_backoff.retry_after),
            hint    = 'Leave it out for the backoff of the job; say permanent => true to give up.';
    end if;
    perform almanac._open_queue(fail_with_backoff.queue, 'work');
    return almanac._end_attempt(
        almanac._hold(fail_with_backoff.queue, fail_with_backoff.job_id, fail_with_backoff.lease_token), 'failed',
        error => coalesce(fail_with_backoff.error, 'no error was given'), permanent => fail_with_backoff.permanent,
        retry_after => fail_with_backoff.retry_after);
end;
$$;
comment on function almanac.fail_with_backoff(text, bigint, bigint, text, boolean, interval) is
    'Record a failed attempt: retried after the backoff or retry_after, dead if it was the last or permanent.';
