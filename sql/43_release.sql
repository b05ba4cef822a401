-- 43 release: running -> scheduled. A worker that shuts down gives the job back; the attempt does not count.
-- Calls: _open_queue, _hold, _end_attempt.
create or replace function almanac.release(queue text, job_id bigint, lease_token bigint, reason text default null)
    returns almanac.failed_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform almanac._open_queue(release.queue, 'work');
    return almanac._end_attempt(almanac._hold(release.queue, release.job_id, release.lease_token), 'released',
                                error => release.reason);
end;
$$;
comment on function almanac.release(text, bigint, bigint, text) is
    'Give a leased job back unworked; it is due as before and the attempt does not count.';

-- 43 snooze: running -> scheduled, at a later time. A handler that finds it is too early; the attempt does not count.
-- Calls: clock, _open_queue, _hold, _end_attempt.
create or replace function almanac.snooze(
    queue text, job_id bigint, lease_token bigint, until timestamptz, reason text default null)
    returns almanac.failed_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if snooze.until is null or not isfinite(snooze.until) or snooze.until > almanac.clock() + interval '36500 days' then
        raise exception using errcode = '22023',
            message = 'until must be a time within the next 100 years',
            detail  = format('It is %s.', coalesce(snooze.until::text, 'null')),
            hint    = 'Use release to give the job back at once, cancel to have it never run.';
    end if;
    perform almanac._open_queue(snooze.queue, 'work');
    return almanac._end_attempt(almanac._hold(snooze.queue, snooze.job_id, snooze.lease_token), 'released',
                                error => coalesce(snooze.reason, 'snoozed'), due_at => snooze.until);
end;
$$;
comment on function almanac.snooze(text, bigint, bigint, timestamptz, text) is
    'Put a leased job back to a later time; the attempt does not count.';
