-- 50 job: a job wherever it is, the live one before its earlier lives.
-- Reads: job, job_history. Calls: _open_queue, _idempotency_key.
create or replace function almanac.job(queue text, job_id bigint)
    returns setof almanac.found_job
    language plpgsql stable security definer rows 1 set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue almanac.queue := almanac._open_queue(job.queue, 'produce', 'work', 'operate');
begin
    return query
        select j.queue, j.id, j.job_type, j.state::text, j.priority, j.due_at, j.payload::jsonb, j.attempt,
               j.max_attempts, j.dedup_key, j.concurrency_key::text,
               coalesce(j.idempotency_key, almanac._idempotency_key(v_queue.key_prefix, j.id, j.created_at)),
               j.schedule, j.tick_at, j.caught_up, j.leased_by, j.claimed_at, j.lease_expires_at, j.cancel_requested_at,
               j.last_error, null::jsonb, null::text, j.created_at, j.created_by, null::timestamptz, j.headers
          from almanac.job j where j.queue = job.queue and j.id = job.job_id;
    if not found then
        return query
            select h.queue, h.id, h.job_type, h.state::text, h.priority, h.due_at, h.payload, h.attempt, h.max_attempts,
                   h.dedup_key, h.concurrency_key,
                   coalesce(h.idempotency_key, almanac._idempotency_key(v_queue.key_prefix, h.id, h.created_at)),
                   h.schedule, h.tick_at, h.caught_up, h.leased_by, h.claimed_at, null::timestamptz, null::timestamptz,
                   h.error, h.result, h.external_id, h.created_at, h.created_by, h.finished_at, h.headers
              from almanac.job_history h
             where h.queue = job.queue and h.id = job.job_id
             -- Not by time alone: the clock may have been set back between two lives. The last is not redriven.
             order by h.redriven_at nulls first, h.finished_at desc
             limit 1;
    end if;
end;
$$;
comment on function almanac.job(text, bigint) is 'Find a job wherever it is: live, or its latest life in history.';
