-- 60 _unpark_forgotten: parked jobs whose key has a free place. Whoever lets go of a key unparks, but passes over a
-- parked job that somebody is just cancelling; if that is rolled back, nobody else comes for it. And a claim that began
-- before the queue allowed more parks by what was allowed then. Unparking one too many does no harm.
-- Reads: job, queue. Calls: _unpark.
create or replace function almanac._unpark_forgotten(queue text)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue text;
    v_keys  text[];
begin
    for v_queue, v_keys in
        with recursive parked as (
            (select job.queue, job.concurrency_key from almanac.job
              where job.parked_at is not null
                and (_unpark_forgotten.queue is null or job.queue = _unpark_forgotten.queue)
              order by job.queue, job.concurrency_key
              limit 1)
            union all
            select behind.queue, behind.concurrency_key
              from parked
             cross join lateral (
                select job.queue, job.concurrency_key from almanac.job
                 where job.parked_at is not null
                   and (_unpark_forgotten.queue is null or job.queue = _unpark_forgotten.queue)
                   and (job.queue, job.concurrency_key) > (parked.queue, parked.concurrency_key)
                 order by job.queue, job.concurrency_key
                 limit 1) behind
        )
        select parked.queue, array_agg(parked.concurrency_key)
          from parked
          join almanac.queue q on q.queue = parked.queue
         where q.max_running_per_key > (select count(*) from almanac.job
                                         where job.queue = parked.queue and job.state = 'running'
                                           and job.concurrency_key = parked.concurrency_key)
         group by parked.queue
    loop
        perform almanac._unpark(v_queue, v_keys);
    end loop;
end;
$$;
comment on function almanac._unpark_forgotten(text) is
    'Make jobs claimable that are parked for a key with a free place.';

-- 60 reclaim_expired: running -> retrying or dead, for leases nobody extended. The attempt ends as lost and goes
-- through the same decision as a failure, so a job that kills its workers ends in dead. Reads only the job row: what
-- became of the worker does not matter. All queues if none is given.
-- Reads: job. Calls: clock, _end_attempt, _unpark_forgotten.
create or replace function almanac.reclaim_expired(queue text default null, batch_size integer default 1000)
    returns integer
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now       timestamptz := almanac.clock();
    v_job       almanac.job;
    v_reclaimed integer := 0;
begin
    if reclaim_expired.batch_size is null or reclaim_expired.batch_size not between 1 and 100000 then
        raise exception using errcode = '22023', message = 'batch_size must be between 1 and 100000',
            detail = format('It is %s.', coalesce(reclaim_expired.batch_size::text, 'null')),
            hint   = 'Call reclaim_expired again while it returns as many as that.';
    end if;
    for v_job in
        select job.* from almanac.job
         where job.state = 'running' and job.lease_expires_at <= v_now
           and (reclaim_expired.queue is null or job.queue = reclaim_expired.queue)
         order by job.queue, job.concurrency_key, job.id
         limit reclaim_expired.batch_size
           for update skip locked
    loop
        perform almanac._end_attempt(v_job, 'lost', error => format(
            'worker %s did not report back before its lease ended at %s', v_job.leased_by, v_job.lease_expires_at));
        v_reclaimed := v_reclaimed + 1;
    end loop;
    perform almanac._unpark_forgotten(reclaim_expired.queue);
    return v_reclaimed;
end;
$$;
comment on function almanac.reclaim_expired(text, integer) is
    'End attempts whose lease has expired as lost; returns how many.';
