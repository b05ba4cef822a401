-- 45 claim_job: scheduled or retrying -> running, for one job by its id: somebody wants to see this one run. Paused
-- queues and limits hold as for claim_due, and nothing runs early; but no other job is in the way. Whoever has just
-- locked the job is not waited for: that may be one who ends it and then waits for the turn that we have.
-- Reads: job. Writes: job, claim, queue_turn. Calls: clock, _open_queue, _check_claim, _take_turn, _count_running,
-- _places, _tokens, _raise_no_job, _next_token, _look_after, attempt_key, _idempotency_key.
create or replace function almanac.claim_job(
    queue text, job_id bigint, worker text, lease interval default null)
    returns almanac.claimed_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue almanac.queue;
    v_job   almanac.job;
    v_why   text;
    v_now   timestamptz;
begin
    perform almanac._check_claim(claim_job.worker, 1, claim_job.lease);
    v_queue := almanac._open_queue(claim_job.queue, 'work');
    if v_queue.max_running is not null or v_queue.rate_limit is not null or v_queue.keyed_at is not null then
        v_queue := almanac._take_turn(claim_job.queue);
    end if;
    select * into v_job from almanac.job
     where job.queue = claim_job.queue and job.id = claim_job.job_id
       for update skip locked;
    v_now := almanac.clock();
    v_why := case
        when not found and exists (select from almanac.job
                                    where job.queue = claim_job.queue and job.id = claim_job.job_id)
            then 'is just being changed by somebody else'
        when not found then 'is not waiting: it has ended, or never was'
        when v_job.state not in ('scheduled', 'retrying') then 'is ' || v_job.state
        when v_job.due_at > v_now then 'is not due before ' || v_job.due_at
        when v_queue.held_at is not null then 'has to wait: all work is held'
        when v_queue.paused_at is not null and coalesce(v_queue.paused_until, 'infinity') > v_now
            then 'waits in a paused queue'
        when v_queue.max_running <= almanac._count_running(claim_job.queue)
            then 'has to wait: as many jobs run as the queue allows'
        when almanac._places(v_job.concurrency_key, v_queue.max_running_per_key)
             <= (select count(*) from almanac.job
                  where job.queue = claim_job.queue and job.counted_at is not null
                    and job.concurrency_key = v_job.concurrency_key)
            then 'has to wait: its concurrency_key is busy'
        when v_queue.rate_limit is not null and almanac._tokens(v_queue, v_now) < 1
            then 'has to wait: the queue is at its rate limit'
    end;
    if v_why is not null then
        perform almanac._raise_no_job(claim_job.queue, claim_job.job_id, v_why,
            'Look it up: select * from almanac.job(queue, job_id);');
    end if;
    if v_queue.rate_limit is not null then
        update almanac.queue_turn set tokens = almanac._tokens(v_queue, v_now) - 1, refilled_at = v_now
         where queue_turn.queue = claim_job.queue;
    end if;
    update almanac.job
       set state = 'running', parked_at = null, attempt = job.attempt + 1,
           lease_token = almanac._next_token(job.lease_token), leased_by = claim_job.worker, claimed_at = v_now,
           lease_expires_at = almanac.clock() + coalesce(claim_job.lease, job.lease, v_queue.lease),
           counted_at = case when num_nonnulls(v_queue.max_running, v_queue.rate_limit, v_queue.keyed_at,
                                               job.concurrency_key) > 0 then v_now end
     where job.queue = claim_job.queue and job.id = claim_job.job_id
    returning * into v_job;
    if v_job.counted_at is null then
        insert into almanac.claim (queue, look_at, job_ids)
        values (v_job.queue, v_now + almanac._look_after(), array[v_job.id]);
    end if;
    return row (v_job.queue, v_job.id, v_job.job_type, v_job.payload, v_job.attempt, v_job.max_attempts, v_job.due_at,
                v_now - v_job.due_at, v_job.lease_token, v_job.lease_expires_at,
                coalesce(v_job.idempotency_key,
                         almanac._idempotency_key(v_queue.key_prefix, v_job.id, v_job.created_at)),
                almanac.attempt_key(v_job.id, v_job.attempt, v_job.lease_token), v_job.schedule, v_job.tick_at,
                v_job.caught_up, v_job.priority, v_job.concurrency_key, v_job.headers, v_job.created_at
               )::almanac.claimed_job;
end;
$$;
comment on function almanac.claim_job(text, bigint, text, interval) is
    'Lease one due job by its id to a worker; raises PA003 if it cannot run now.';
