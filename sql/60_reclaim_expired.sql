-- 60 reclaim_expired: running -> retrying or dead, for leases nobody extended. The attempt ends as lost and goes
-- through the same decision as a failure, so a job that kills its workers ends in dead. Reads only the job row: what
-- became of the worker does not matter. All queues if none is given.
-- Reads: job. Calls: clock, _end_attempt.
create or replace function almanac.reclaim_expired(queue text default null, batch_size integer default 1000)
    returns integer
    language plpgsql volatile security definer set search_path = '' set enable_seqscan = off
as $$
declare
    v_now       timestamptz := almanac.clock();
    v_job       almanac.job;
    v_reclaimed integer := 0;
begin
    for v_job in
        select job.* from almanac.job
         where job.state = 'running' and job.lease_expires_at <= v_now
           and (reclaim_expired.queue is null or job.queue = reclaim_expired.queue)
         order by job.queue, job.id
         limit reclaim_expired.batch_size
           for update skip locked
    loop
        perform almanac._end_attempt(v_job, 'lost', error => format(
            'worker %s did not report back before its lease ended at %s', v_job.leased_by, v_job.lease_expires_at));
        v_reclaimed := v_reclaimed + 1;
    end loop;
    return v_reclaimed;
end;
$$;
comment on function almanac.reclaim_expired(text, integer) is
    'End attempts whose lease has expired as lost; returns how many.';
