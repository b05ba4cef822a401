-- 42 _unpark: a place for a concurrency_key became free: bring back the first job of each type that was parked for it,
-- because whoever claims next may be a worker for some types only. keys has one entry for each place. Taking a row that
-- somebody else is just changing is left to them.
-- Writes: job. Calls: clock, _ring.
create or replace function almanac._unpark(queue text, keys text[])
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
begin
    with recursive freed as (
        select k.key, count(*) as places,
               (select min(job.job_type) from almanac.job
                 where job.queue = _unpark.queue and job.concurrency_key = k.key and job.parked_at is not null
               ) as job_type
          from unnest(_unpark.keys) as k (key)
         group by k.key
        union all
        select freed.key, freed.places,
               (select min(job.job_type) from almanac.job
                 where job.queue = _unpark.queue and job.concurrency_key = freed.key and job.parked_at is not null
                   and job.job_type > freed.job_type)
          from freed
         where freed.job_type is not null
    )
    update almanac.job set parked_at = null
     where job.ctid = any (array(
        select first_parked.ctid
          from freed
         cross join lateral (
            select job.ctid from almanac.job
             where job.queue = _unpark.queue and job.concurrency_key = freed.key and job.parked_at is not null
               and job.job_type = freed.job_type
             order by job.priority desc, job.due_at, job.id
             limit freed.places
               for update skip locked) first_parked
         where freed.job_type is not null));
    if found then
        perform almanac._ring(_unpark.queue, almanac.clock());
    end if;
end;
$$;
comment on function almanac._unpark(text, text[]) is
    'Make parked jobs claimable again: for each freed place one of each type.';

-- 42 _finish: the only way out of the job table. Moves jobs to history in one statement, frees their keys, returns the
-- ids it moved. fenced: only while the given lease is live. job_ids ascend, and rows are locked in that order by
-- walking the primary key, so overlapping batches do not deadlock. Ids close to each other are read as one range.
-- Writes: job, job_history, dedup. Calls: clock, _limit_idle, _unpark.
create or replace function almanac._finish(
    queue text, job_ids bigint[], lease_tokens bigint[], state text, fenced boolean,
    results jsonb[] default null, external_ids text[] default null, error text default null,
    ended_by text default null, end_reason text default null)
    returns bigint[]
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_now      timestamptz := almanac.clock();
    v_finished bigint[];
    v_dedup    text[];
    v_keys     text[];
    v_count    integer := cardinality(_finish.job_ids);
    v_first    bigint := _finish.job_ids[1];
    v_last     bigint := _finish.job_ids[v_count];
    -- Not as integers: the caller may have thought up the ids, and their difference may be none.
    v_close    boolean := v_last::float8 - v_first::float8 < 2 * v_count;
begin
    -- PERFORM would run a query.
    if almanac._limit_idle() is null then
        null;
    end if;
    -- width_bucket is a binary search: the position of an id among the ids.
    with close as (
        delete from almanac.job
         where v_close and job.queue = _finish.queue and job.id between v_first and v_last
           and job.id = _finish.job_ids[width_bucket(job.id, _finish.job_ids)]
           and job.lease_token = _finish.lease_tokens[width_bucket(job.id, _finish.job_ids)]
           and (not _finish.fenced or (job.state = 'running' and job.lease_expires_at > v_now))
        returning job.*
    ), scattered as (
        delete from almanac.job
         where not v_close and job.queue = _finish.queue and job.id = any (_finish.job_ids)
           and job.lease_token = _finish.lease_tokens[width_bucket(job.id, _finish.job_ids)]
           and (not _finish.fenced or (job.state = 'running' and job.lease_expires_at > v_now))
        returning job.*
    ), ended as not materialized (
        select * from close union all select * from scattered
    ), kept as (
        insert into almanac.job_history (
            queue, id, job_type, state, priority, due_at, payload, attempt, max_attempts, base_delay, max_delay, lease,
            dedup_key, concurrency_key, idempotency_key, headers, schedule, tick_at, caught_up, lease_token, leased_by,
            claimed_at, error, result, external_id, ended_by, end_reason, created_at, created_by, finished_at)
        select ended.queue, ended.id, ended.job_type, _finish.state, ended.priority, ended.due_at, ended.payload,
               ended.attempt, ended.max_attempts, ended.base_delay, ended.max_delay, ended.lease, ended.dedup_key,
               ended.concurrency_key, ended.idempotency_key, ended.headers, ended.schedule, ended.tick_at,
               ended.caught_up, ended.lease_token, ended.leased_by, ended.claimed_at,
               coalesce(_finish.error, ended.last_error), _finish.results[width_bucket(ended.id, _finish.job_ids)],
               _finish.external_ids[width_bucket(ended.id, _finish.job_ids)], _finish.ended_by, _finish.end_reason,
               ended.created_at, ended.created_by, v_now
          from ended
    )
    select array_agg(ended.id), array_agg(ended.dedup_key) filter (where ended.dedup_key is not null),
           array_agg(ended.concurrency_key) filter (where ended.concurrency_key is not null and ended.parked_at is null)
      into v_finished, v_dedup, v_keys
      from ended;
    if v_dedup is not null then
        -- A job that was cancelled had no effect, so also its window is free again. One that has passed is left to
        -- whoever takes it over, so that neither waits for the other.
        delete from almanac.dedup
         where dedup.queue = _finish.queue and dedup.dedup_key = any (v_dedup) and dedup.job_id = any (v_finished)
           and (dedup.held_until is null or (_finish.state = 'cancelled' and dedup.held_until > v_now));
    end if;
    if v_keys is not null then
        perform almanac._unpark(_finish.queue, v_keys);
    end if;
    return coalesce(v_finished, '{}');
end;
$$;
comment on function almanac._finish(text, bigint[], bigint[], text, boolean, jsonb[], text[], text, text, text) is
    'Move jobs to history and free their keys; returns the ids that were moved.';

-- 42 _end_attempt: the one place that decides what follows an attempt that did not succeed. The caller has locked the
-- row and checked the lease.
--   released            -> scheduled again, the attempt given back; at due_at if one is given
--   failed, lost        -> retrying after the backoff, or dead if it was the last attempt or permanent
--   asked to be cancelled -> cancelled, whatever the worker said
-- Reads: queue, job_type. Writes: job, attempt. Calls: clock, _backoff, _limit_idle, _unpark, _finish, _ring.
create or replace function almanac._end_attempt(
    held almanac.job, outcome text, error text default null, permanent boolean default false,
    retry_after interval default null, due_at timestamptz default null)
    returns almanac.failed_job
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now    timestamptz := almanac.clock();
    v_job    almanac.job := _end_attempt.held;
    v_queue  almanac.queue;
    v_type   almanac.job_type;
    v_error  text := left(coalesce(_end_attempt.error, case when _end_attempt.outcome = 'lost' then format(
                         'worker %s did not report back before its lease ended at %s', v_job.leased_by,
                         v_job.lease_expires_at) end), 20000);
    v_delay  interval;
    v_due_at timestamptz;
begin
    perform almanac._limit_idle();
    insert into almanac.attempt (queue, job_id, attempt, lease_token, worker, claimed_at, finished_at, outcome, error)
    values (v_job.queue, v_job.id, v_job.attempt, v_job.lease_token, v_job.leased_by, v_job.claimed_at, v_now,
            case when v_job.cancel_requested_at is not null then 'cancelled' else _end_attempt.outcome end, v_error);
    select * into v_queue from almanac.queue where queue.queue = v_job.queue;
    if v_queue.max_running is not null then
        -- A place is free, whatever follows.
        perform almanac._ring(v_job.queue, v_now);
    end if;

    if v_job.cancel_requested_at is not null then
        perform almanac._finish(v_job.queue, array[v_job.id], array[v_job.lease_token], 'cancelled', false,
                                error => v_error, ended_by => v_job.cancel_requested_by,
                                end_reason => v_job.cancel_reason);
        return row ('cancelled', null, v_job.attempt)::almanac.failed_job;
    end if;

    if _end_attempt.outcome = 'released' then
        update almanac.job
           set state = 'scheduled', attempt = job.attempt - 1, due_at = coalesce(_end_attempt.due_at, job.due_at),
               leased_by = null, claimed_at = null, lease_expires_at = null, counted_at = null
         where job.queue = v_job.queue and job.id = v_job.id
        returning job.due_at into v_due_at;
        v_job.attempt := v_job.attempt - 1;
        v_job.state := 'scheduled';
    elsif coalesce(_end_attempt.permanent, false) or v_job.attempt >= v_job.max_attempts then
        perform almanac._finish(v_job.queue, array[v_job.id], array[v_job.lease_token], 'dead', false,
                                error => v_error,
                                end_reason => case when _end_attempt.permanent then 'permanent failure'
                                                   else format('attempt %s of %s %s', v_job.attempt, v_job.max_attempts,
                                                               _end_attempt.outcome) end);
        return row ('dead', null, v_job.attempt)::almanac.failed_job;
    else
        select * into v_type from almanac.job_type
         where job_type.queue = v_job.queue and job_type.job_type = v_job.job_type;
        v_delay := coalesce(_end_attempt.retry_after,
            almanac._backoff(v_job.attempt, coalesce(v_job.base_delay, v_type.base_delay, v_queue.base_delay),
                             coalesce(v_job.max_delay, v_type.max_delay, v_queue.max_delay))
            * (1 + coalesce(v_type.jitter, v_queue.jitter) * random()));
        v_due_at := v_now + v_delay;
        update almanac.job
           set state = 'retrying', due_at = v_due_at, last_error = v_error,
               leased_by = null, claimed_at = null, lease_expires_at = null, counted_at = null
         where job.queue = v_job.queue and job.id = v_job.id;
        v_job.state := 'retrying';
    end if;

    if v_due_at <= v_now then
        perform nextval('almanac.backdated_job_seq');
    end if;
    if v_job.concurrency_key is not null then
        perform almanac._unpark(v_job.queue, array[v_job.concurrency_key]);
    end if;
    if v_queue.max_running is null then
        perform almanac._ring(v_job.queue, v_due_at);
    end if;
    return row (v_job.state, v_due_at, v_job.attempt)::almanac.failed_job;
end;
$$;
comment on function almanac._end_attempt(almanac.job, text, text, boolean, interval, timestamptz) is
    'Record the end of an attempt that did not succeed and decide what follows.';

-- 42 _hold: the caller's running job, locked, if the lease is live; raises PA002 otherwise.
-- Reads: job. Calls: clock, _raise_lease_lost.
create or replace function almanac._hold(queue text, job_id bigint, lease_token bigint)
    returns almanac.job
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_job almanac.job;
begin
    select * into v_job from almanac.job
     where job.queue = _hold.queue and job.id = _hold.job_id and job.lease_token = _hold.lease_token
       and job.state = 'running'
       for update;
    -- The clock is read after the lock is had: a lease that ended while waiting for it has ended.
    if not found or v_job.lease_expires_at <= almanac.clock() then
        perform almanac._raise_lease_lost(_hold.queue, _hold.job_id, _hold.lease_token);
    end if;
    return v_job;
end;
$$;
comment on function almanac._hold(text, bigint, bigint) is 'Lock the job of a live lease, or raise PA002.';
