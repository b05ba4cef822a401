-- 32 _take_dedup_keys: takes keys for jobs and returns who holds each key then, in the order given. A key is free if no
-- row has it, if its window has passed, or, without one, if its job is gone. The primary key decides: the second of two
-- sessions waits, then looks with a new snapshot. Keys are taken in one order, so that batches do not deadlock; a held
-- key is not locked.
-- Reads: dedup, job. Writes: dedup. Calls: clock.
create or replace function almanac._take_dedup_keys(
    queue text, dedup_keys text[], job_ids bigint[], held_until timestamptz)
    returns bigint[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now     timestamptz := almanac.clock();
    v_key     text;
    v_job_id  bigint;
    v_at      integer;
    v_before  text;
    v_holder  bigint;
    v_holders bigint[] := array_fill(null::bigint, array[coalesce(cardinality(_take_dedup_keys.dedup_keys), 0)]);
begin
    for v_key, v_job_id, v_at in
        select k.dedup_key, k.job_id, k.n
          from unnest(_take_dedup_keys.dedup_keys, _take_dedup_keys.job_ids) with ordinality as k (dedup_key, job_id, n)
         where k.dedup_key is not null
         order by k.dedup_key, k.job_id
    loop
        if v_key is distinct from v_before then
            loop
                v_holder := v_job_id;
                insert into almanac.dedup (queue, dedup_key, job_id, held_until)
                values (_take_dedup_keys.queue, v_key, v_job_id, _take_dedup_keys.held_until)
                on conflict on constraint dedup_pkey do nothing;
                exit when found;
                perform from almanac.dedup d
                  where d.queue = _take_dedup_keys.queue and d.dedup_key = v_key
                    and (d.held_until <= v_now
                         or (d.held_until is null
                             and not exists (select from almanac.job where job.queue = d.queue and job.id = d.job_id)))
                    for update;
                if found then
                    update almanac.dedup d set job_id = v_job_id, held_until = _take_dedup_keys.held_until
                     where d.queue = _take_dedup_keys.queue and d.dedup_key = v_key
                       and (d.held_until <= v_now
                            or (d.held_until is null
                                and not exists (select from almanac.job
                                                 where job.queue = d.queue and job.id = d.job_id)));
                end if;
                select d.job_id into v_holder from almanac.dedup d
                 where d.queue = _take_dedup_keys.queue and d.dedup_key = v_key;
                exit when found;
                -- The holder finished between two statements: the key is free, try again.
            end loop;
            v_before := v_key;
        end if;
        v_holders[v_at] := v_holder;
    end loop;
    return v_holders;
end;
$$;
comment on function almanac._take_dedup_keys(text, text[], bigint[], timestamptz) is
    'Take dedup keys for jobs about to be made; returns which job holds each key then.';

-- 32 _learn: a queue remembers the priorities used in it, and whether keys are: claims look only at what exists.
-- Writes: queue. Calls: clock.
create or replace function almanac._learn(queue almanac.queue, priority smallint, keyed boolean)
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if _learn.priority <> all ((_learn.queue).priorities) or (_learn.keyed and (_learn.queue).keyed_at is null) then
        update almanac.queue as q
           set priorities = (select array_agg(p.priority order by p.priority desc)
                               from (select unnest(q.priorities) as priority union select _learn.priority) p),
               keyed_at = case when _learn.keyed then coalesce(q.keyed_at, almanac.clock()) else q.keyed_at end
         where q.queue = (_learn.queue).queue;
    end if;
end;
$$;
comment on function almanac._learn(almanac.queue, smallint, boolean) is
    'Note a priority or the use of concurrency keys the first time it occurs in a queue.';

-- 32 _check_enqueue: what must hold for a job before it is made, said in words rather than by a constraint's name.
-- Calls: _check_name.
create or replace function almanac._check_enqueue(
    job_type text, due_at timestamptz, priority integer, keyed boolean, dedup_for interval, idempotency_keys text[],
    max_attempts integer, base_delay interval, max_delay interval)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_wrong text;
begin
    perform almanac._check_name('a job type', _check_enqueue.job_type, 200);
    v_wrong := case
        when not isfinite(_check_enqueue.due_at) then 'due_at must be a finite time'
        when _check_enqueue.priority is null or _check_enqueue.priority not between -32768 and 32767
            then 'priority must be between -32768 and 32767'
        when _check_enqueue.dedup_for <= interval '0' or _check_enqueue.dedup_for > interval '36500 days'
            then 'dedup_for must be positive, and at most 36500 days'
        when _check_enqueue.dedup_for is not null and not _check_enqueue.keyed then 'dedup_for needs a dedup_key'
        -- It travels as a header, to receivers that compare bytes.
        when exists (select from unnest(_check_enqueue.idempotency_keys) as k (key)
                      where k.key !~ '^[!-~]([ -~]{0,126}[!-~])?$')
            then 'an idempotency_key must be 1 to 128 characters of printable ASCII, without spaces at its ends'
        when _check_enqueue.max_attempts not between 1 and 1000000 then 'max_attempts must be between 1 and 1000000'
        when _check_enqueue.base_delay not between interval '0' and interval '3650 days'
            then 'base_delay must be between 0 and 3650 days'
        when _check_enqueue.max_delay not between interval '0' and interval '3650 days'
            then 'max_delay must be between 0 and 3650 days'
    end;
    if v_wrong is not null then
        raise exception using errcode = '22023', message = v_wrong,
            detail = format('The job of type %s was not enqueued.', _check_enqueue.job_type),
            hint   = 'Correct the argument and call again; leave it out for the default.';
    end if;
end;
$$;
comment on function almanac._check_enqueue(
    text, timestamptz, integer, boolean, interval, text[], integer, interval, interval) is
    'Raises unless a job with these settings can be made.';

-- 32 enqueue: (nothing) -> scheduled, in the caller's transaction: if that rolls back there is no job. One statement
-- asks for everything that could stand against it, because each by itself would cost as much as the row; only where
-- something does is it looked up, and raised or settled.
-- Reads: queue, job_type, sleeper. Writes: job. Calls: clock, _caller, _check_enqueue, _check_name,
-- _check_payload, _hold_queue, _is_plain, _payload_bytes, _open_queue, _take_dedup_keys, _learn, _ring.
create or replace function almanac.enqueue(
    queue text,
    job_type text,
    payload jsonb default '{}',
    due_at timestamptz default null,
    priority integer default 0,
    dedup_key text default null,
    dedup_for interval default null,
    concurrency_key text default null,
    idempotency_key text default null,
    max_attempts integer default null,
    base_delay interval default null,
    max_delay interval default null,
    headers jsonb default null)
    returns almanac.enqueued_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now     timestamptz := almanac.clock();
    v_queue   almanac.queue;
    v_id      bigint := nextval('almanac.job_id_seq');
    v_holder  bigint;
    v_tries   integer;
    v_lease   interval;
    v_awaited boolean;
begin
    if almanac._is_plain(enqueue.job_type, 200) is not true
       or enqueue.priority is distinct from 0 or current_setting('transaction_isolation') <> 'read committed'
       or num_nonnulls(enqueue.due_at, enqueue.dedup_key, enqueue.dedup_for, enqueue.concurrency_key,
                       enqueue.idempotency_key, enqueue.max_attempts, enqueue.base_delay, enqueue.max_delay) > 0 then
        if current_setting('transaction_isolation') <> 'read committed' then
            -- As _enter_queue; at read committed, the statement that asks for everything locks before it looks.
            perform almanac._hold_queue(enqueue.queue, 'produce');
        end if;
        perform almanac._check_enqueue(enqueue.job_type, coalesce(enqueue.due_at, v_now), enqueue.priority,
                                       enqueue.dedup_key is not null, enqueue.dedup_for,
                                       array[enqueue.idempotency_key], enqueue.max_attempts, enqueue.base_delay,
                                       enqueue.max_delay);
        if enqueue.concurrency_key is not null then
            perform almanac._check_name('a concurrency_key', enqueue.concurrency_key, 200);
        end if;
        if enqueue.dedup_key is not null then
            perform almanac._open_queue(enqueue.queue, 'produce');
            perform almanac._check_name('a dedup_key', enqueue.dedup_key, 400);
            v_holder := (almanac._take_dedup_keys(
                enqueue.queue, array[enqueue.dedup_key], array[v_id], v_now + enqueue.dedup_for))[1];
            if v_holder <> v_id then
                return row (enqueue.queue, v_holder, false)::almanac.enqueued_job;
            end if;
        end if;
    end if;
    loop
        select coalesce(enqueue.max_attempts, t.max_attempts, q.max_attempts), t.lease,
               exists (select from almanac.sleeper where sleeper.queue = q.queue)
          into v_tries, v_lease, v_awaited
          from almanac.queue q
          left join almanac.job_type t on t.queue = q.queue and t.job_type = enqueue.job_type
         where q.queue = enqueue.queue
           and (q.restricted_at is null or q.queue = v_queue.queue)
           and jsonb_typeof(enqueue.payload) in ('object', 'array')
           and almanac._payload_bytes(enqueue.payload) + coalesce(almanac._payload_bytes(enqueue.headers), 0)
               <= q.max_payload_bytes
           and coalesce(jsonb_typeof(enqueue.headers), 'object') = 'object'
           and enqueue.priority = any (q.priorities)
           and (enqueue.concurrency_key is null or q.keyed_at is not null);
        exit when found;
        v_queue := almanac._open_queue(enqueue.queue, 'produce');
        perform almanac._check_payload(enqueue.payload, enqueue.headers, v_queue.max_payload_bytes);
        perform almanac._learn(v_queue, enqueue.priority::smallint, enqueue.concurrency_key is not null);
    end loop;
    insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, base_delay, max_delay, lease,
                             dedup_key, concurrency_key, idempotency_key, headers, created_at, created_by)
    values (enqueue.queue, v_id, enqueue.job_type, enqueue.priority, coalesce(enqueue.due_at, v_now), enqueue.payload,
            v_tries, enqueue.base_delay, enqueue.max_delay, v_lease, enqueue.dedup_key,
            enqueue.concurrency_key, enqueue.idempotency_key, enqueue.headers, v_now, almanac._caller());
    if enqueue.due_at < v_now then
        perform nextval('almanac.backdated_job_seq');
    end if;
    if v_awaited then
        perform almanac._ring(enqueue.queue, coalesce(enqueue.due_at, v_now));
    end if;
    return row (enqueue.queue, v_id, true)::almanac.enqueued_job;
end;
$$;
comment on function almanac.enqueue(text, text, jsonb, timestamptz, integer, text, interval, text, text, integer,
    interval, interval, jsonb) is
    'Make a job in the caller''s transaction; with a dedup_key that is taken, name the job that has it instead.';

-- 32 enqueue_many: as enqueue, for many payloads in one statement. Arrays run in parallel with payloads.
-- Reads: job_type. Writes: job. Calls: clock, _caller, _check_enqueue, _check_name,
-- _check_payload, _enter_queue, _is_plain, _payload_bytes, _take_dedup_keys, _learn, _ring.
create or replace function almanac.enqueue_many(
    queue text,
    job_type text,
    payloads jsonb[],
    due_at timestamptz default null,
    priority integer default 0,
    dedup_keys text[] default null,
    dedup_for interval default null,
    concurrency_keys text[] default null,
    idempotency_keys text[] default null,
    max_attempts integer default null,
    base_delay interval default null,
    max_delay interval default null,
    headers jsonb default null)
    returns setof almanac.enqueued_job
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now    timestamptz := almanac.clock();
    v_due_at timestamptz := coalesce(enqueue_many.due_at, v_now);
    v_queue  almanac.queue := almanac._enter_queue(enqueue_many.queue, 'produce');
    v_room   integer := v_queue.max_payload_bytes - coalesce(almanac._payload_bytes(enqueue_many.headers), 0);
    v_type   almanac.job_type;
    v_bad    jsonb;
    v_ids    bigint[];
    v_owners bigint[];
begin
    perform almanac._check_enqueue(enqueue_many.job_type, v_due_at, enqueue_many.priority,
                                   enqueue_many.dedup_keys is not null, enqueue_many.dedup_for,
                                   enqueue_many.idempotency_keys, enqueue_many.max_attempts, enqueue_many.base_delay,
                                   enqueue_many.max_delay);
    if enqueue_many.payloads is null
       or cardinality(enqueue_many.dedup_keys) <> cardinality(enqueue_many.payloads)
       or cardinality(enqueue_many.concurrency_keys) <> cardinality(enqueue_many.payloads)
       or cardinality(enqueue_many.idempotency_keys) <> cardinality(enqueue_many.payloads) then
        raise exception using errcode = '22023',
            message = 'payloads and the arrays of keys must have the same length',
            detail  = concat_ws(', ', 'payloads: ' || coalesce(cardinality(enqueue_many.payloads)::text, 'null'),
                                'dedup_keys: ' || cardinality(enqueue_many.dedup_keys),
                                'concurrency_keys: ' || cardinality(enqueue_many.concurrency_keys),
                                'idempotency_keys: ' || cardinality(enqueue_many.idempotency_keys)),
            hint    = 'Put null into an array of keys for a job that has none.';
    end if;
    select p.payload into v_bad from unnest(enqueue_many.payloads) as p (payload)
     where p.payload is null or jsonb_typeof(p.payload) not in ('object', 'array')
        or almanac._payload_bytes(p.payload) > v_room or jsonb_typeof(enqueue_many.headers) <> 'object'
     limit 1;
    if found then
        perform almanac._check_payload(v_bad, enqueue_many.headers, v_queue.max_payload_bytes);
    end if;
    perform almanac._check_name('a dedup_key', k.dedup_key, 400)
       from unnest(enqueue_many.dedup_keys) as k (dedup_key)
      where not almanac._is_plain(k.dedup_key, 400);
    perform almanac._check_name('a concurrency_key', k.concurrency_key, 200)
       from unnest(enqueue_many.concurrency_keys) as k (concurrency_key)
      where not almanac._is_plain(k.concurrency_key, 200);
    v_ids := array(select nextval('almanac.job_id_seq') from generate_series(1, cardinality(enqueue_many.payloads)));
    if enqueue_many.dedup_keys is not null then
        v_owners := almanac._take_dedup_keys(enqueue_many.queue, enqueue_many.dedup_keys, v_ids,
                                              v_now + enqueue_many.dedup_for);
    end if;
    select * into v_type from almanac.job_type
     where job_type.queue = enqueue_many.queue and job_type.job_type = enqueue_many.job_type;
    insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, base_delay, max_delay, lease,
                             dedup_key, concurrency_key, idempotency_key, headers, created_at, created_by)
    select enqueue_many.queue, p.id, enqueue_many.job_type, enqueue_many.priority, v_due_at, p.payload,
           coalesce(enqueue_many.max_attempts, v_type.max_attempts, v_queue.max_attempts), enqueue_many.base_delay,
           enqueue_many.max_delay, v_type.lease, p.dedup_key, p.concurrency_key, p.idempotency_key,
           enqueue_many.headers, v_now, almanac._caller()
      from unnest(v_ids, enqueue_many.payloads, enqueue_many.dedup_keys, enqueue_many.concurrency_keys,
                  enqueue_many.idempotency_keys, v_owners)
           as p (id, payload, dedup_key, concurrency_key, idempotency_key, holder)
     where p.dedup_key is null or p.id = p.holder;
    perform almanac._learn(v_queue, enqueue_many.priority::smallint,
                           coalesce(num_nonnulls(variadic enqueue_many.concurrency_keys) > 0, false));
    if v_due_at < v_now then
        perform nextval('almanac.backdated_job_seq');
    end if;
    perform almanac._ring(enqueue_many.queue, v_due_at);
    return query
        select enqueue_many.queue, coalesce(p.holder, p.id), p.holder is null or p.holder = p.id
          from unnest(v_ids, v_owners) as p (id, holder);
end;
$$;
comment on function almanac.enqueue_many(text, text, jsonb[], timestamptz, integer, text[], interval, text[], text[],
    integer, interval, interval, jsonb) is
    'Make many jobs of one type in one statement; answers in the order of payloads.';
