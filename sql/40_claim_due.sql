-- 40 _claim_effort: what this session has read of the claim index: entries, which each ask for a row, and pages, which
-- cost as much as some entries also where every entry is known to be dead. Those go when the table is vacuumed.
create or replace function almanac._claim_effort()
    returns bigint
    language sql volatile parallel restricted
    return pg_stat_get_xact_tuples_returned('almanac.job_claim_due_idx'::regclass)
           + 5 * pg_stat_get_xact_blocks_fetched('almanac.job_claim_due_idx'::regclass);
comment on function almanac._claim_effort() is 'Grows with what this session reads of the claim index.';

-- 40 _is_littered: whether a scan of the claim index passed over so much that going on from a remembered position is
-- worth what it costs. Of what a claim leaves behind, the next one clears away what no snapshot needs, so about as much
-- as was found is no litter.
create or replace function almanac._is_littered(effort bigint, jobs_found integer)
    returns boolean
    language sql immutable
return effort > 500 + 3 * jobs_found;
comment on function almanac._is_littered(bigint, integer) is
    'Whether entries of jobs long claimed are in the way of claims.';

-- 40 _recall: what this session remembers of a queue; nothing where the setting, which the session may write to, holds
-- anything else.
create or replace function almanac._recall(setting text)
    returns almanac.claim_memory
    language plpgsql stable set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD'
as $$
declare
    v_memory almanac.claim_memory;
begin
    v_memory := current_setting(_recall.setting)::almanac.claim_memory;
    v_memory.look_back_cost := least(greatest(v_memory.look_back_cost, interval '0'), interval '3 seconds');
    return case when v_memory is not null
                     and cardinality(v_memory.due_at) = cardinality(v_memory.priorities)
                     and cardinality(v_memory.id) = cardinality(v_memory.priorities)
                     and array_position(v_memory.due_at, null) is null and array_position(v_memory.id, null) is null
                then v_memory end;
exception
    when others then return null;
end;
$$;
comment on function almanac._recall(text) is 'The memory of claims in a setting of the session, or null.';

-- 40 _pick_due: locks due jobs in claim order, going on from where this session stopped. For sessions that met many
-- dead index entries: an old snapshot keeps them, or there was no vacuum since. It looks back to the start when a job
-- became claimable behind the position (backdated_job_seq), when it found too little, and every second, for at most a
-- twentieth of the time. setting: where the position is kept.
-- Reads: job. Calls: clock, _claim_effort, _is_littered, _recall.
create or replace function almanac._pick_due(
    queue almanac.queue, batch_size integer, job_types text[], setting text)
    returns tid[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD'
as $$
declare
    v_now       timestamptz := almanac.clock();
    v_memory    almanac.claim_memory := almanac._recall(_pick_due.setting);
    v_backdated bigint := coalesce(pg_sequence_last_value('almanac.backdated_job_seq'), 0);
    v_look_back boolean;
    v_effort    bigint;
    v_jobs      tid[];
    v_found     tid[];
    v_due_at    timestamptz;
    v_id        bigint;
begin
    v_look_back := v_memory.queue is distinct from (_pick_due.queue).queue
        or v_memory.priorities <> (_pick_due.queue).priorities
        or v_memory.backdated <> v_backdated
        or v_now < v_memory.looked_back_at
        or v_now >= v_memory.looked_back_at
                    + greatest(case when v_memory.came_short then interval '0' else interval '1 second' end,
                               20 * v_memory.look_back_cost);
    loop
        v_jobs := '{}';
        if v_look_back then
            v_memory.queue := (_pick_due.queue).queue;
            v_memory.priorities := (_pick_due.queue).priorities;
            v_memory.due_at := array_fill('-infinity'::timestamptz, array[cardinality(v_memory.priorities)]);
            v_memory.id := array_fill(0::bigint, array[cardinality(v_memory.priorities)]);
            v_memory.backdated := v_backdated;
            v_memory.looked_back_at := v_now;
            v_effort := almanac._claim_effort();
        end if;
        for v_level in 1 .. cardinality(v_memory.priorities) loop
            -- array(select ...) rather than aggregates, which take longer to set up than a small batch to lock.
            v_found := array(
                select job.ctid
                  from almanac.job
                 where job.queue = (_pick_due.queue).queue
                   and job.state in ('scheduled', 'retrying')
                   and job.parked_at is null and job.counted_at is null
                   and job.priority = v_memory.priorities[v_level]
                   and job.due_at <= v_now
                   and job.concurrency_key is null
                   and (_pick_due.job_types is null or job.job_type = any (_pick_due.job_types))
                   and (job.due_at, job.id) > (v_memory.due_at[v_level], v_memory.id[v_level])
                 order by job.due_at, job.id
                 limit _pick_due.batch_size - cardinality(v_jobs)
                   for update skip locked);
            v_jobs := v_jobs || v_found;
            if cardinality(v_jobs) >= _pick_due.batch_size then
                select job.due_at, job.id into v_due_at, v_id
                  from almanac.job where job.ctid = v_found[cardinality(v_found)];
                v_memory.due_at[v_level] := v_due_at;
                v_memory.id[v_level] := v_id;
                exit;
            end if;
            -- Nothing more is due here.
            v_memory.due_at[v_level] := v_now;
            v_memory.id[v_level] := 9223372036854775807;
        end loop;
        v_memory.came_short := cardinality(v_jobs) < _pick_due.batch_size;
        if v_look_back then
            -- Within bounds, because the clock may have been set meanwhile.
            v_memory.look_back_cost := least(greatest(almanac.clock() - v_now, interval '0'), interval '3 seconds');
            v_effort := almanac._claim_effort() - v_effort;
        end if;
        exit when v_look_back or not v_memory.came_short
            or v_now < v_memory.looked_back_at + 20 * v_memory.look_back_cost;
        v_look_back := true;
    end loop;
    perform set_config(_pick_due.setting,
                       case when almanac._is_littered(v_effort, cardinality(v_jobs)) is false then ''
                            else v_memory::text end,
                       false);
    return v_jobs;
end;
$$;
comment on function almanac._pick_due(almanac.queue, integer, text[], text) is
    'Lock due jobs of an unlimited queue in claim order, going on from where this session stopped.';

-- 40 _park: sets jobs aside whose concurrency_key is busy: they leave the claim index until the key is free. The
-- holders of the key are share-locked meanwhile, so that each sees the parked job when it ends. A holder that is ending
-- already is not waited for; the next claim decides. keys_taken: those of jobs about to run.
-- Reads: job. Writes: job. Calls: _places.
create or replace function almanac._park(queue almanac.queue, jobs tid[], keys_taken text[], parked_at timestamptz)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_keys text[];
    v_held text[];
begin
    select array_agg(distinct job.concurrency_key) into v_keys from almanac.job where job.ctid = any (_park.jobs);
    with running as materialized (
        select job.id, job.concurrency_key from almanac.job
         where job.queue = (_park.queue).queue and job.counted_at is not null and job.concurrency_key = any (v_keys)
    ), held as materialized (
        select job.id from almanac.job
         where job.queue = (_park.queue).queue and job.counted_at is not null and job.concurrency_key = any (v_keys)
           for share skip locked
    )
    select array_agg(k.concurrency_key) into v_held
      from unnest(v_keys) as k (concurrency_key)
     where (select count(running.id) = count(held.id)
                   and count(held.id) + cardinality(array_positions(_park.keys_taken, k.concurrency_key))
                       >= almanac._places(k.concurrency_key, (_park.queue).max_running_per_key)
              from running left join held on held.id = running.id
             where running.concurrency_key = k.concurrency_key);
    update almanac.job set parked_at = _park.parked_at
     where job.ctid = any (_park.jobs) and job.concurrency_key = any (v_held);
end;
$$;
comment on function almanac._park(almanac.queue, tid[], text[], timestamptz) is
    'Set locked jobs aside until their concurrency_key is free.';

-- 40 _count_running: how many jobs of a queue run. Those that were claimed before it had limits are not counted in the
-- job table; they are few, and gone after a while.
-- Reads: job, claim.
create or replace function almanac._count_running(queue text)
    returns integer
    language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
begin
    return (select count(*) from almanac.job where job.queue = _count_running.queue and job.counted_at is not null)
         + (select count(*)
              from (select distinct listed.job_id
                      from almanac.claim cross join lateral unnest(claim.job_ids) as listed (job_id)
                     where claim.queue = _count_running.queue) before
             cross join lateral (
                select from almanac.job
                 where job.queue = _count_running.queue and job.id = before.job_id
                   and job.state = 'running' and job.counted_at is null
                offset 0) running);
end;
$$;
comment on function almanac._count_running(text) is 'How many jobs of a queue run.';

-- 40 _pick_within_limits: as _pick_due, for queues with limits. Claims take turns, so that two of them cannot both use
-- the last free place. The turn is a row that only functions can lock: any login could hold an advisory lock. What was
-- changed, paused or restricted meanwhile counts.
-- Reads: job, queue_turn. Writes: queue_turn. Calls: clock, _count_running, _open_queue, _park, _places.
create or replace function almanac._pick_within_limits(queue almanac.queue, batch_size integer, job_types text[])
    returns tid[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue   almanac.queue := _pick_within_limits.queue;
    v_now     timestamptz;
    v_room    integer := _pick_within_limits.batch_size;
    v_turn    almanac.queue_turn;
    v_tokens  double precision;
    v_level   integer := 1;
    v_due_at  timestamptz := '-infinity';
    v_id      bigint := 0;
    v_seen    integer;
    v_jobs    tid[] := '{}';
    v_keys    text[] := '{}';
    v_found   tid[];
    v_found_keys text[];
    v_busy    tid[];
    v_passed  integer := 0;
begin
    -- Who would find nothing does not take the turn, which is a write and waits for others.
    v_now := almanac.clock();
    if not exists (
        select from almanac.job
         where job.queue = v_queue.queue and job.priority = any (v_queue.priorities) and job.due_at <= v_now
           and job.state in ('scheduled', 'retrying') and job.parked_at is null and job.counted_at is null
           and (_pick_within_limits.job_types is null or job.job_type = any (_pick_within_limits.job_types))) then
        return v_jobs;
    end if;
    select * into v_turn from almanac.queue_turn where queue_turn.queue = v_queue.queue for no key update;
    v_queue := almanac._open_queue(v_queue.queue, 'work');
    v_now := almanac.clock();
    if v_queue.held_at is not null
       or v_queue.paused_at is not null and coalesce(v_queue.paused_until, 'infinity') > v_now then
        return v_jobs;
    end if;
    if v_queue.max_running is not null then
        v_room := least(v_room, v_queue.max_running - almanac._count_running(v_queue.queue));
    end if;
    if v_queue.rate_limit is not null then
        v_tokens := least(v_queue.rate_limit, v_turn.tokens
            + v_queue.rate_limit * greatest(extract(epoch from v_now - v_turn.refilled_at), 0)::float8
              / extract(epoch from v_queue.rate_interval)::float8);
        v_room := least(v_room, floor(v_tokens)::integer);
    end if;
    while v_room > cardinality(v_jobs) and v_level <= cardinality(v_queue.priorities) loop
        -- place: how many of this key would run with this one; those already running, those picked before, and its
        -- rank in this page.
        with page as materialized (
            select job.ctid, job.concurrency_key, job.due_at, job.id
              from almanac.job
             where job.queue = v_queue.queue
               and job.state in ('scheduled', 'retrying')
               and job.parked_at is null and job.counted_at is null
               and job.priority = v_queue.priorities[v_level]
               and job.due_at <= v_now
               and (job.due_at, job.id) > (v_due_at, v_id)
               and (_pick_within_limits.job_types is null or job.job_type = any (_pick_within_limits.job_types))
             order by job.due_at, job.id
             limit v_room - cardinality(v_jobs)
               for update skip locked
        ), placed as (
            select page.*,
                   case when page.concurrency_key is null then 0
                        else row_number() over (partition by page.concurrency_key order by page.due_at, page.id)
                             + coalesce(mine.picked, 0)
                             + (select count(*) from almanac.job
                                 where job.queue = v_queue.queue and job.counted_at is not null
                                   and job.concurrency_key = page.concurrency_key) end as place
              from page
              left join (select k.key, count(*) as picked from unnest(v_keys) as k (key) group by k.key) mine
                     on mine.key = page.concurrency_key
        )
        select array_agg(placed.ctid order by placed.due_at, placed.id)
                   filter (where placed.place
                                 <= almanac._places(placed.concurrency_key, v_queue.max_running_per_key)),
               array_agg(placed.concurrency_key)
                   filter (where placed.place between 1 and
                                 almanac._places(placed.concurrency_key, v_queue.max_running_per_key)),
               array_agg(placed.ctid)
                   filter (where placed.place
                                 > almanac._places(placed.concurrency_key, v_queue.max_running_per_key)),
               count(*),
               (array_agg(placed.due_at order by placed.due_at desc, placed.id desc))[1],
               (array_agg(placed.id order by placed.due_at desc, placed.id desc))[1]
          into v_found, v_found_keys, v_busy, v_seen, v_due_at, v_id
          from placed;
        v_jobs := v_jobs || coalesce(v_found, '{}');
        v_keys := v_keys || coalesce(v_found_keys, '{}');
        if v_busy is not null then
            perform almanac._park(v_queue, v_busy, v_keys, v_now);
            v_passed := v_passed + cardinality(v_busy);
            -- What one claim sets aside is bounded; the next one goes on behind it.
            exit when v_passed > 10 * _pick_within_limits.batch_size + 1000;
        end if;
        if v_seen = 0 then
            v_level := v_level + 1;
            v_due_at := '-infinity';
            v_id := 0;
        end if;
    end loop;
    if v_tokens is not null and (v_jobs <> '{}' or v_tokens < 1) then
        -- An empty bucket that is dated ahead, because the clock was set back, would stay empty until then.
        update almanac.queue_turn set tokens = v_tokens - cardinality(v_jobs), refilled_at = v_now
         where queue_turn.queue = v_queue.queue and (v_jobs <> '{}' or queue_turn.refilled_at > v_now);
    end if;
    return v_jobs;
end;
$$;
comment on function almanac._pick_within_limits(almanac.queue, integer, text[]) is
    'Lock due jobs in claim order within max_running, rate_limit and concurrency keys.';

-- 40 _check_claim: what must hold for a claim and its arguments, said in words. An older snapshot would show a queue
-- that has been paused, limited or restricted since.
-- Calls: _check_name, _know_home.
create or replace function almanac._check_claim(worker text, batch_size integer, lease interval)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('almanac.at_home', true) is distinct from 'yes' then
        perform almanac._know_home();
    end if;
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception using errcode = '25000',
            message = 'jobs can only be claimed at isolation level read committed',
            detail  = format('The level is %s.', current_setting('transaction_isolation')),
            hint    = 'Begin with: begin isolation level read committed; or set default_transaction_isolation.';
    end if;
    perform almanac._check_name('a worker', _check_claim.worker, 200);
    if _check_claim.batch_size is null or _check_claim.batch_size not between 1 and 10000 then
        raise exception using errcode = '22023',
            message = 'batch_size must be between 1 and 10000',
            detail  = format('It is %s.', coalesce(_check_claim.batch_size::text, 'null')),
            hint    = 'Claim what can be started before the lease ends.';
    end if;
    if _check_claim.lease not between interval '1 second' and interval '30 days' then
        raise exception using errcode = '22023',
            message = 'lease must be between 1 second and 30 days',
            detail  = format('It is %s.', _check_claim.lease),
            hint    = 'Leave it out to use the lease of the job type or the queue.';
    end if;
end;
$$;
comment on function almanac._check_claim(text, integer, interval) is 'Raises unless a claim can have these arguments.';

-- 40 claim_due: scheduled or retrying -> running. Consumes an attempt and issues a new, larger lease token. Without
-- limits, and while nothing is in the way, one statement picks, locks and claims.
-- Every statement and expression here is set up anew in each call, which is most of what a small claim costs: so they
-- are few, and what is seldom needed is done elsewhere.
-- Reads: queue, job. Writes: job, claim. Calls: clock, _open_queue, _check_claim, _claim_effort, _is_littered,
-- _is_plain, _pick_due, _pick_within_limits, _say_hold, _next_token, attempt_key, _idempotency_key.
create or replace function almanac.claim_due(
    queue text,
    worker text,
    batch_size integer default 1,
    lease interval default null,
    job_types text[] default null)
    returns setof almanac.claimed_job
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_tidscan = on set jit = off
as $$
declare
    v_queue   almanac.queue;
    v_now     timestamptz := almanac.clock();
    -- Where this session stopped, if that matters. What it passed over depends on job_types, so each choice of them has
    -- a memory of its own.
    v_setting text := 'almanac.claimed_' || to_hex(hashtextextended(
                          claim_due.queue || coalesce(claim_due.job_types::text, ''), 0));
    v_effort  bigint := almanac._claim_effort();
    v_drawn   bigint := pg_sequence_last_value('almanac.backdated_job_seq');
    v_claimed integer;
    v_again   boolean;
    -- When they are claimed, if they are to be counted.
    v_counted timestamptz;
    -- Null: the statement that claims picks them itself.
    v_jobs    tid[];
begin
    if almanac._is_plain(claim_due.worker, 200) is not true
       or claim_due.batch_size is null or claim_due.batch_size not between 1 and 10000
       or current_setting('transaction_isolation') <> 'read committed'
       or current_setting('almanac.at_home', true) is distinct from 'yes'
       or claim_due.lease not between interval '1 second' and interval '30 days' then
        perform almanac._check_claim(claim_due.worker, claim_due.batch_size, claim_due.lease);
    end if;
    -- What _open_queue does, without the call where it would only say yes.
    select * into v_queue from almanac.queue as q where q.queue = claim_due.queue and q.restricted_at is null;
    if not found then
        v_queue := almanac._open_queue(claim_due.queue, 'work');
    end if;
    if num_nonnulls(v_queue.max_running, v_queue.rate_limit, v_queue.keyed_at, v_queue.paused_at, v_queue.held_at) > 0
       or current_setting(v_setting, true) <> '' then
        if v_queue.held_at is not null then
            perform almanac._say_hold();
            return;
        elsif num_nonnulls(v_queue.max_running, v_queue.rate_limit, v_queue.keyed_at) > 0 then
            v_jobs := almanac._pick_within_limits(v_queue, claim_due.batch_size, claim_due.job_types);
            v_counted := v_now;
        elsif v_queue.paused_at is not null and coalesce(v_queue.paused_until > v_now, true) then
            return;
        elsif current_setting(v_setting, true) <> '' then
            v_jobs := almanac._pick_due(v_queue, claim_due.batch_size, claim_due.job_types, v_setting);
        end if;
        if v_jobs = '{}' then
            return;
        end if;
        v_now := almanac.clock();
    end if;
    -- By ctid of rows just locked: the plan cannot flip with the size of the table. The levels are read one after the
    -- other, and only as far as is needed: to sort them would lock them all.
    return query
        with claimed as (
            update almanac.job
               set state = 'running',
                   attempt = job.attempt + 1,
                   lease_token = almanac._next_token(job.lease_token),
                   leased_by = claim_due.worker,
                   claimed_at = v_now,
                   counted_at = v_counted,
                   -- Not from v_now: the statement may have waited for whoever builds an index on the table. Asked once
                   -- for all of them, which a subquery is.
                   lease_expires_at = (select almanac.clock()) + coalesce(claim_due.lease, job.lease, v_queue.lease)
             where job.ctid = any (coalesce(v_jobs, array(
                select picked.ctid
                  from unnest(v_queue.priorities) as level (priority)
                 cross join lateral (
                    select due.ctid
                      from almanac.job due
                     where due.queue = claim_due.queue
                       and due.state in ('scheduled', 'retrying')
                       and due.parked_at is null and due.counted_at is null
                       and due.priority = level.priority
                       and due.due_at <= v_now
                       and due.concurrency_key is null
                       and (claim_due.job_types is null or due.job_type = any (claim_due.job_types))
                     order by due.due_at, due.id
                     limit claim_due.batch_size
                       for update skip locked) picked
                 limit claim_due.batch_size)))
            returning job.queue, job.id, job.job_type, job.payload::jsonb, job.attempt, job.max_attempts, job.due_at,
                      v_now - job.due_at, job.lease_token, job.lease_expires_at,
                      coalesce(job.idempotency_key,
                               almanac._idempotency_key(v_queue.key_prefix, job.id, job.created_at)),
                      almanac.attempt_key(job.id, job.attempt, job.lease_token),
                      job.schedule, job.tick_at, job.caught_up, job.priority, job.concurrency_key::text, job.headers,
                      job.created_at
        ), listed as (
            -- No lease is shorter than this; and most short jobs have ended by then.
            insert into almanac.claim (queue, look_at, job_ids)
            select claim_due.queue, v_now + interval '1 second', array_agg(claimed.id)
              from claimed
             where v_counted is null
            having count(*) > 0
        )
        select * from claimed order by claimed.priority desc, claimed.due_at, claimed.id;
    get diagnostics v_claimed = row_count;
    if v_jobs is null then
        v_again := v_claimed < claim_due.batch_size
            and pg_sequence_last_value('almanac.backdated_job_seq') is distinct from v_drawn;
        if v_again or almanac._is_littered(almanac._claim_effort() - v_effort, v_claimed) then
            -- No memory that _recall would know: the next claim looks back, and remembers.
            perform set_config(v_setting, 'from the start', false);
        end if;
        if v_again then
            -- A job that was claimed and given back since the statement began was locked as it is now, which the
            -- statement cannot see. So look again, in two statements. What is found now comes after the others,
            -- whatever its priority: it became claimable after they were claimed, and to sort all of them every claim
            -- would have to collect its answer before it returns it.
            return query select * from almanac.claim_due(
                claim_due.queue, claim_due.worker, claim_due.batch_size - v_claimed, claim_due.lease,
                claim_due.job_types);
        end if;
    end if;
end;
$$;
comment on function almanac.claim_due(text, text, integer, interval, text[]) is
    'Lease due jobs of one queue to a worker: highest priority first, then oldest due; never early, never to two.';
