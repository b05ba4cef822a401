-- 53 cancel: scheduled or retrying -> cancelled at once. A running job is marked: extend_lease tells its worker, and it
-- is cancelled when the worker lets go or the lease ends. If the worker completes it first, it is completed: the work
-- was done. Returns the state the job is in afterwards.
-- Reads: job, job_history. Writes: job. Calls: clock, _caller, _limit_idle, _open_queue, _finish, _audit,
-- _raise_no_job.
create or replace function almanac.cancel(queue text, job_id bigint, reason text default null)
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_job   almanac.job;
    v_state text;
begin
    perform almanac._open_queue(cancel.queue, 'produce', 'work', 'operate');
    select * into v_job from almanac.job
     where job.queue = cancel.queue and job.id = cancel.job_id
       for update;
    if not found then
        select h.state into v_state from almanac.job_history h
         where h.queue = cancel.queue and h.id = cancel.job_id
         order by h.redriven_at nulls first, h.finished_at desc limit 1;
        if v_state = 'cancelled' then
            return v_state;
        end if;
        perform almanac._raise_no_job(cancel.queue, cancel.job_id,
            coalesce('is ' || v_state || ' already', 'does not exist'),
            'Look it up: select * from almanac.job(queue, job_id);');
    elsif v_job.state = 'running' then
        perform almanac._limit_idle();
        update almanac.job
           set cancel_requested_at = coalesce(job.cancel_requested_at, almanac.clock()),
               cancel_requested_by = coalesce(job.cancel_requested_by, almanac._caller()),
               cancel_reason = coalesce(job.cancel_reason, cancel.reason)
         where job.queue = cancel.queue and job.id = cancel.job_id;
        v_state := 'running';
    else
        perform almanac._finish(cancel.queue, array[cancel.job_id], array[v_job.lease_token], 'cancelled', false,
                                ended_by => almanac._caller(), end_reason => cancel.reason);
        v_state := 'cancelled';
    end if;
    perform almanac._audit('cancel', cancel.queue, cancel.job_id::text, cancel.reason,
                           jsonb_build_object('state', v_job.state), jsonb_build_object('state', v_state));
    return v_state;
end;
$$;
comment on function almanac.cancel(text, bigint, text) is
    'Cancel a waiting job at once, or ask for it while it runs; returns cancelled or running.';
