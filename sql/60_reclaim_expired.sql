-- 60 _unpark_forgotten: parked jobs whose key has a free place. The end of a holder unparks, but passes over a job
-- locked by a cancel; a rollback of that would leave it parked. A claim that began before a limit was raised parks by
-- the old one. Unparking one too many does no harm.
-- Reads: job, queue. Calls: _places, _unpark.
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
         where almanac._places(parked.concurrency_key, q.max_running_per_key)
               > (select count(*) from almanac.job
                   where job.queue = parked.queue and job.counted_at is not null
                     and job.concurrency_key = parked.concurrency_key)
         group by parked.queue
    loop
        perform almanac._unpark(v_queue, v_keys);
    end loop;
end;
$$;
comment on function almanac._unpark_forgotten(text) is
    'Make jobs claimable that are parked for a key with a free place.';

-- 60 _reclaim_claimed: ends expired attempts among what was claimed in queues without limits. Claims that are due for a
-- look are taken out; their jobs that still run go back as one claim of their queue, due when the first lease may have
-- ended. Locked jobs count as running. Ends at most batch_size attempts, checks about 100 times as many jobs.
-- Reads: job. Writes: claim. Calls: clock, _end_attempt.
create or replace function almanac._reclaim_claimed(queue text, batch_size integer)
    returns integer
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_now       timestamptz := almanac.clock();
    -- What is put back is not taken out again by the same call: it may be locked.
    v_back      bigint[] := '{}';
    v_claim     bigint;
    v_claims    integer;
    v_queue     text;
    v_ids       bigint[];
    v_job       almanac.job;
    v_asked     bigint := 0;
    v_reclaimed integer := 0;
begin
    loop
        v_claims := 0;
        for v_queue, v_ids in
            with looked_at as (
                delete from almanac.claim
                 where claim.ctid = any (array(
                    select due.ctid from almanac.claim due
                     where due.look_at <= v_now and due.id <> all (v_back)
                       and (_reclaim_claimed.queue is null or due.queue = _reclaim_claimed.queue)
                     order by due.look_at
                     limit 100
                       for update skip locked))
                returning claim.queue, claim.job_ids
            )
            select looked_at.queue, array_agg(distinct listed.job_id)
              from looked_at cross join lateral unnest(looked_at.job_ids) as listed (job_id)
             group by looked_at.queue
             order by looked_at.queue
        loop
            v_claims := v_claims + 1;
            v_asked := v_asked + cardinality(v_ids);
            for v_job in
                select job.* from almanac.job
                 where job.queue = v_queue and job.id = any (v_ids)
                   and job.state = 'running' and job.lease_expires_at <= v_now
                 limit _reclaim_claimed.batch_size - v_reclaimed
                   for update skip locked
            loop
                perform almanac._end_attempt(v_job, 'lost');
                v_reclaimed := v_reclaimed + 1;
            end loop;
            insert into almanac.claim (queue, look_at, job_ids)
            select v_queue, min(job.lease_expires_at), array_agg(job.id)
              from almanac.job
             where job.queue = v_queue and job.id = any (v_ids)
               and job.state = 'running' and job.counted_at is null
            having count(*) > 0
            returning claim.id into v_claim;
            if found then
                v_back := v_back || v_claim;
            end if;
        end loop;
        exit when v_claims = 0 or v_reclaimed >= _reclaim_claimed.batch_size
            or v_asked >= 100 * _reclaim_claimed.batch_size::bigint;
    end loop;
    return v_reclaimed;
end;
$$;
comment on function almanac._reclaim_claimed(text, integer) is
    'End expired attempts of queues without limits, and forget claims whose jobs have ended.';

-- 60 reclaim_expired: running -> retrying or dead, for leases nobody extended. The attempt ends as lost and goes
-- through the same decision as a failure, so a job that kills its workers ends in dead. Reads only the job row: what
-- became of the worker does not matter. All queues if none is given.
-- Reads: job. Calls: clock, _end_attempt, _reclaim_claimed, _unpark_forgotten.
create or replace function almanac.reclaim_expired(queue text default null, batch_size integer default 1000)
    returns integer
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now       timestamptz := almanac.clock();
    v_job       almanac.job;
    v_reclaimed integer;
begin
    if reclaim_expired.batch_size is null or reclaim_expired.batch_size not between 1 and 100000 then
        raise exception using errcode = '22023', message = 'batch_size must be between 1 and 100000',
            detail = format('It is %s.', coalesce(reclaim_expired.batch_size::text, 'null')),
            hint   = 'Call reclaim_expired again while it returns as many as that.';
    end if;
    v_reclaimed := almanac._reclaim_claimed(reclaim_expired.queue, reclaim_expired.batch_size);
    for v_job in
        select job.* from almanac.job
         where job.counted_at is not null and job.lease_expires_at <= v_now
           and (reclaim_expired.queue is null or job.queue = reclaim_expired.queue)
         order by job.queue, job.concurrency_key, job.id
         limit reclaim_expired.batch_size - v_reclaimed
           for update skip locked
    loop
        perform almanac._end_attempt(v_job, 'lost');
        v_reclaimed := v_reclaimed + 1;
    end loop;
    perform almanac._unpark_forgotten(reclaim_expired.queue);
    return v_reclaimed;
end;
$$;
comment on function almanac.reclaim_expired(text, integer) is
    'End attempts whose lease has expired as lost; returns how many.';

-- 60 end_lease: running -> retrying or dead, by an operator who knows that the worker is gone. If it is not, it has
-- lost its lease like any other. A session that holds the job is waited for only briefly, and named.
-- Reads: job. Calls: _caller, _holder, _open_queue, _end_attempt, _audit, _raise_no_job.
create or replace function almanac.end_lease(queue text, job_id bigint, reason text default null)
    returns almanac.failed_job
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set lock_timeout = '1s'
as $$
declare
    v_job   almanac.job;
    v_ended almanac.failed_job;
    v_pid   integer;
begin
    perform almanac._open_queue(end_lease.queue, 'operate');
    begin
        select * into v_job from almanac.job
         where job.queue = end_lease.queue and job.id = end_lease.job_id
           for update;
    exception
        when lock_not_available then
            v_pid := almanac._holder(end_lease.queue, end_lease.job_id);
            perform almanac._raise_no_job(end_lease.queue, end_lease.job_id,
                concat_ws(' ', 'is held by another session', v_pid),
                coalesce('If it is silent: select pg_terminate_backend(' || v_pid || '); and call again.',
                         'See pg_stat_activity for one that is idle in transaction, and call again.'));
    end;
    if not found or v_job.state <> 'running' then
        perform almanac._raise_no_job(end_lease.queue, end_lease.job_id,
            coalesce('is ' || v_job.state || ', not running', 'is not running: it has ended, or never was'),
            'Look it up: select * from almanac.job(queue, job_id);');
    end if;
    v_ended := almanac._end_attempt(v_job, 'lost', error => concat_ws(': ',
        format('%s ended the lease of worker %s', almanac._caller(), v_job.leased_by), end_lease.reason));
    perform almanac._audit('end_lease', end_lease.queue, end_lease.job_id::text, end_lease.reason,
        jsonb_build_object('state', v_job.state, 'leased_by', v_job.leased_by,
                           'lease_expires_at', v_job.lease_expires_at),
        jsonb_build_object('state', v_ended.state, 'due_at', v_ended.due_at));
    return v_ended;
end;
$$;
comment on function almanac.end_lease(text, bigint, text) is
    'End the lease of a running job whose worker is gone; the attempt is lost, and retried or dead as usual.';
