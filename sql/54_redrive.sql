-- 54 redrive: dead -> scheduled, with a fresh attempt counter. One job by its id, or up to batch_size dead jobs of the
-- queue, oldest first, that match a type and an error pattern (as in LIKE); call again until it returns none. History
-- keeps the earlier life. A job whose dedup_key another job has taken since is left dead.
-- Reads: job_history, dedup. Writes: job_history, job. Calls: clock, _enter_queue, _take_dedup_keys, _learn,
-- _ring, _audit, _raise_no_job, job.
create or replace function almanac.redrive(
    queue text,
    job_id bigint default null,
    reason text default null,
    job_type text default null,
    error_like text default null,
    batch_size integer default 1000)
    returns setof bigint
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_now     timestamptz := almanac.clock();
    v_queue   almanac.queue := almanac._enter_queue(redrive.queue, 'produce', 'operate');
    v_ids     bigint[];
    v_keys    text[];
    v_holders bigint[];
    v_dead    almanac.job_history;
    v_state   text;
    v_count   integer := 0;
begin
    if redrive.batch_size is null or redrive.batch_size not between 1 and 10000 then
        raise exception using errcode = '22023', message = 'batch_size must be between 1 and 10000',
            detail = format('It is %s.', coalesce(redrive.batch_size::text, 'null')),
            hint   = 'Call redrive again until it returns nothing.';
    end if;
    select array_agg(h.id), array_agg(h.dedup_key) into v_ids, v_keys
      from (select h.id, h.dedup_key from almanac.job_history h
             where h.queue = redrive.queue and h.state = 'dead' and h.redriven_at is null
               and (redrive.job_id is null or h.id = redrive.job_id)
               and (redrive.job_type is null or h.job_type = redrive.job_type)
               and (redrive.error_like is null or h.error like redrive.error_like)
               -- A key taken by another job since: that one stands for both.
               and not exists (select from almanac.dedup d
                                where d.queue = h.queue and d.dedup_key = h.dedup_key and d.job_id <> h.id
                                  and (d.held_until is null or d.held_until > v_now))
             order by h.finished_at, h.id
             limit redrive.batch_size
               for update skip locked) h;
    -- All at once, in the order every taker of keys has, so that none waits for another in a circle.
    v_holders := almanac._take_dedup_keys(redrive.queue, v_keys, v_ids, null);
    for v_dead in
        select h.* from almanac.job_history h
          join unnest(v_ids, v_holders) as found (id, holder) on found.id = h.id
         where h.queue = redrive.queue and h.state = 'dead' and h.redriven_at is null
           and (h.dedup_key is null or found.holder = h.id)
         order by h.finished_at, h.id
    loop
        -- Two lives that end at one instant, because the clock stands still, would have the same key. So the earlier
        -- one is moved by as many microseconds as there are lives.
        update almanac.job_history h
           set redriven_at = v_now,
               finished_at = case when h.finished_at <> v_now then h.finished_at
                                  else v_now + interval '1 microsecond'
                                       * (select count(*) from almanac.job_history life
                                           where life.queue = h.queue and life.id = h.id) end
         where h.queue = v_dead.queue and h.id = v_dead.id and h.finished_at = v_dead.finished_at;
        insert into almanac.job (queue, id, job_type, priority, due_at, payload, max_attempts, base_delay, max_delay,
                                 lease, dedup_key, concurrency_key, idempotency_key, headers, schedule, tick_at,
                                 caught_up, lease_token, last_error, created_at, created_by)
        values (v_dead.queue, v_dead.id, v_dead.job_type, v_dead.priority, v_now, v_dead.payload, v_dead.max_attempts,
                v_dead.base_delay, v_dead.max_delay, v_dead.lease, v_dead.dedup_key, v_dead.concurrency_key,
                v_dead.idempotency_key, v_dead.headers, v_dead.schedule, v_dead.tick_at, v_dead.caught_up,
                v_dead.lease_token, v_dead.error, v_dead.created_at, v_dead.created_by);
        perform almanac._learn(v_queue, v_dead.priority, v_dead.concurrency_key is not null);
        perform almanac._audit('redrive', redrive.queue, v_dead.id::text, redrive.reason,
            jsonb_build_object('state', 'dead', 'attempt', v_dead.attempt, 'error', left(v_dead.error, 200)),
            jsonb_build_object('state', 'scheduled', 'attempt', 0));
        return next v_dead.id;
        v_count := v_count + 1;
    end loop;
    if v_count > 0 then
        perform nextval('almanac.backdated_job_seq');
        perform almanac._ring(redrive.queue, v_now);
    elsif redrive.job_id is not null then
        select j.state into v_state from almanac.job(redrive.queue, redrive.job_id) j;
        perform almanac._raise_no_job(redrive.queue, redrive.job_id,
            case when v_state is null then 'does not exist'
                 when v_state = 'dead' then
                     'does not match, has a dedup_key that another job has taken, or is just being redriven'
                 else 'is ' || v_state || ', not dead' end,
            case when v_state in ('scheduled', 'retrying')
                 then format('To have it run now: select almanac.make_due(%L, %s);', redrive.queue, redrive.job_id)
                 else 'Only dead jobs can be redriven: select * from almanac.dead_job;' end);
    end if;
end;
$$;
comment on function almanac.redrive(text, bigint, text, text, text, integer) is
    'Bring a dead job back, or a batch of those that match; returns their ids.';
