-- 41 extend_leases: running -> running, for many jobs in one statement. Jobs whose lease is lost are left out of the
-- answer. A lease never gets shorter by it, also when the clock was set back.
-- Writes: job. Calls: clock, _open_queue.
create or replace function almanac.extend_leases(
    queue text, job_ids bigint[], lease_tokens bigint[], lease interval default null)
    returns setof almanac.extended_lease
    language plpgsql volatile security definer
    set search_path = '' set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_queue almanac.queue := almanac._open_queue(extend_leases.queue, 'work');
    v_now   timestamptz := almanac.clock();
begin
    if extend_leases.lease not between interval '1 second' and interval '30 days' then
        raise exception using errcode = '22023',
            message = 'lease must be between 1 second and 30 days',
            detail  = format('It is %s.', extend_leases.lease),
            hint    = 'Leave it out to use the lease of the job type or the queue.';
    end if;
    return query
        update almanac.job
           set lease_expires_at = greatest(
                   job.lease_expires_at, v_now + coalesce(extend_leases.lease, job.lease, v_queue.lease))
          from (select h.job_id, h.lease_token
                  from unnest(extend_leases.job_ids, extend_leases.lease_tokens) as h (job_id, lease_token)
                 order by h.job_id) held
         where job.queue = extend_leases.queue and job.id = held.job_id and job.lease_token = held.lease_token
           and job.state = 'running' and job.lease_expires_at > v_now
        returning job.queue, job.id, job.lease_token, job.lease_expires_at, job.cancel_requested_at;
end;
$$;
comment on function almanac.extend_leases(text, bigint[], bigint[], interval) is
    'Extend live leases; the answer lists those that go on and whether their cancellation was asked for.';

-- 41 extend_lease: running -> running. A worker that is still alive asks for more time. Only the holder of a live lease
-- may extend it; asking late is an error, not a renewal.
-- Calls: extend_leases, _raise_lease_lost.
create or replace function almanac.extend_lease(
    queue text, job_id bigint, lease_token bigint, lease interval default null)
    returns almanac.extended_lease
    language plpgsql volatile security definer set search_path = ''
as $$
declare
    v_extended almanac.extended_lease;
begin
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
