-- 26 _raise_lease_lost: the one answer to everybody who acts with a lease that is not theirs any more.
create or replace function almanac._raise_lease_lost(queue text, job_id bigint, lease_token bigint)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = 'PA002',
        message = format('lease %s on job %s of queue %s is not held',
                         coalesce(_raise_lease_lost.lease_token::text, 'null'),
                         coalesce(_raise_lease_lost.job_id::text, 'null'), _raise_lease_lost.queue),
        detail  = 'It expired, or the job was completed, failed, released or cancelled.',
        hint    = 'Stop working on this job; whoever holds it now will finish it.';
end;
$$;
comment on function almanac._raise_lease_lost(text, bigint, bigint) is 'Raises PA002.';

-- 26 _raise_no_job: the job is not there, or not in a state for what was asked.
create or replace function almanac._raise_no_job(queue text, job_id bigint, why text, next_action text)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = 'PA003',
        message = format('job %s of queue %s %s', coalesce(_raise_no_job.job_id::text, 'null'),
                         _raise_no_job.queue, _raise_no_job.why),
        detail  = 'Nothing was changed.',
        hint    = _raise_no_job.next_action;
end;
$$;
comment on function almanac._raise_no_job(text, bigint, text, text) is 'Raises PA003.';
