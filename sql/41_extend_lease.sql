-- 41 _lock_jobs: locks the jobs of leases that live at a moment, those that nobody else has locked. Each is looked up
-- by its key whatever the planner believes of the table. Returns where the rows are, for a statement that comes after
-- and so sees what is there once they are locked.
-- Reads: job.
create or replace function almanac._lock_jobs(
    queue text, job_ids bigint[], lease_tokens bigint[], alive_at timestamptz)
    returns tid[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
begin
    return array(
        select locked.ctid
          from unnest(_lock_jobs.job_ids, _lock_jobs.lease_tokens) as wanted (job_id, lease_token)
         cross join lateral (
            select job.ctid from almanac.job
             where job.queue = _lock_jobs.queue and job.id = wanted.job_id and job.lease_token = wanted.lease_token
               and job.state = 'running' and job.lease_expires_at > _lock_jobs.alive_at
               for update skip locked) locked);
end;
$$;
comment on function almanac._lock_jobs(text, bigint[], bigint[], timestamptz) is
    'Lock the jobs of live leases that nobody else has locked; returns their rows.';

-- 41 extend_leases: running -> running, for many jobs in one statement. Lost leases are left out of the answer. A lease
-- never gets shorter, also when the clock was set back. Waits for no lock: one transaction that holds a job would cost
-- the worker the leases of all. Such a job is in the answer as it stands.
-- Reads: job. Writes: job. Calls: clock, _limit_idle, _open_queue, _lock_jobs.
create or replace function almanac.extend_leases(
    queue text, job_ids bigint[], lease_tokens bigint[], lease interval default null)
    returns setof almanac.extended_lease
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue almanac.queue := almanac._open_queue(extend_leases.queue, 'work');
    v_now   timestamptz := almanac.clock();
    v_jobs  tid[];
begin
    if extend_leases.lease not between interval '1 second' and interval '30 days' then
        raise exception using errcode = '22023',
            message = 'lease must be between 1 second and 30 days',
            detail  = format('It is %s.', extend_leases.lease),
            hint    = 'Leave it out to use the lease of the job type or the queue.';
    end if;
    perform almanac._limit_idle();
    v_jobs := almanac._lock_jobs(extend_leases.queue, extend_leases.job_ids, extend_leases.lease_tokens, v_now);
    if cardinality(v_jobs) < cardinality(extend_leases.job_ids) then
        return query
            select distinct held.queue, held.id, held.lease_token, held.lease_expires_at, held.cancel_requested_at
              from unnest(extend_leases.job_ids, extend_leases.lease_tokens) as wanted (job_id, lease_token)
             cross join lateral (
                select job.queue, job.id, job.lease_token, job.lease_expires_at, job.cancel_requested_at
                  from almanac.job
                 where job.queue = extend_leases.queue and job.id = wanted.job_id
                   and job.lease_token = wanted.lease_token
                   and job.state = 'running' and job.lease_expires_at > v_now
                   and job.ctid <> all (v_jobs)
                offset 0) held;
    end if;
    return query
        update almanac.job
           set lease_expires_at = greatest(
                   job.lease_expires_at,
                   (select almanac.clock()) + coalesce(extend_leases.lease, job.lease, v_queue.lease))
         where job.ctid = any (v_jobs)
        returning job.queue, job.id, job.lease_token, job.lease_expires_at, job.cancel_requested_at;
end;
$$;
comment on function almanac.extend_leases(text, bigint[], bigint[], interval) is
    'Extend live leases without waiting for locks; lists those that go on, and whether to let go (cancelled).';

-- 41 extend_lease: running -> running. A worker that is still alive asks for more time. Only the holder of a live lease
-- may extend it; asking late is an error, not a renewal. Waits for whoever has locked the job: there is no other.
-- Reads: job. Calls: extend_leases, _raise_lease_lost.
create or replace function almanac.extend_lease(
    queue text, job_id bigint, lease_token bigint, lease interval default null)
    returns almanac.extended_lease
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_extended almanac.extended_lease;
begin
    perform from almanac.job
      where job.queue = extend_lease.queue and job.id = extend_lease.job_id
        and job.lease_token = extend_lease.lease_token and job.state = 'running'
        for update;
    select * into v_extended
      from almanac.extend_leases(extend_lease.queue, array[extend_lease.job_id], array[extend_lease.lease_token],
                                 extend_lease.lease);
    if not found then
        perform almanac._raise_lease_lost(extend_lease.queue, extend_lease.job_id, extend_lease.lease_token);
    end if;
    return v_extended;
end;
$$;
comment on function almanac.extend_lease(text, bigint, bigint, interval) is
    'Extend a live lease; tells when it now expires and whether to stop (cancelled). Raises PA002 if it is lost.';
