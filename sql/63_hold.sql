-- 63 _go_on: claims and ticks go on; workers that sleep are woken.
-- Reads: queue. Writes: installation, queue. Calls: clock, _ring.
create or replace function almanac._go_on()
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    update almanac.installation set held_at = null, held_by = null, hold_reason = null;
    update almanac.queue set held_at = null where queue.held_at is not null;
    perform almanac._ring(q.queue, almanac.clock()) from almanac.queue q;
end;
$$;
comment on function almanac._go_on() is 'End the hold.';

-- 63 hold: stops claims and ticks in the whole installation. What runs may end; enqueue and every look go on.
-- Calls: _audit, _caller, _hold_all, held.
create or replace function almanac.hold(reason text default null)
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if not almanac._hold_all(almanac._caller(), hold.reason) then
        return 'it was held already: ' || almanac.held();
    end if;
    perform almanac._audit('hold', null, null, hold.reason, null, null);
    return almanac.held();
end;
$$;
comment on function almanac.hold(text) is 'Stop claims and ticks everywhere at once; what runs may end.';

-- 63 end_hold: what hold stopped goes on. Not in a copy, which has to be adopted.
-- Calls: _audit, _go_on, _is_copy, held.
create or replace function almanac.end_hold(reason text default null)
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if almanac._is_copy() then
        raise exception using errcode = 'PA014',
            message = 'this database is a copy of another one',
            detail  = 'Its jobs would have their effects a second time, and the leases in it are of the other.',
            hint    = almanac.held();
    elsif almanac.held() is null then
        return 'nothing was held';
    end if;
    perform almanac._go_on();
    perform almanac._audit('end_hold', null, null, end_hold.reason, null, null);
    return 'work goes on';
end;
$$;
comment on function almanac.end_hold(text) is 'Let claims and ticks go on. Raises PA014 in a copy.';

-- 63 adopt_copy: a copy begins to work. Numbers go on above the largest in its tables, which a replica's sequences may
-- lack. What ran is retried as after a lost lease, so tokens from before are worth nothing. Grants mean the roles of
-- this server. Other keys, unless it takes the place of the other database.
-- Reads: installation, job, job_history, attempt, tick, claim, audit, queue. Writes: queue, job, job_history, sleeper,
-- worker, heartbeat, alert. Calls: clock, _audit, _bind_grants, _end_attempt, _go_on, _is_copy, _new_key_prefix,
-- _note_home, held.
create or replace function almanac.adopt_copy(keep_keys boolean, reason text default null)
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue   almanac.queue;
    v_prefix  text;
    v_job     almanac.job;
    v_running integer := 0;
    v_unbound text[];
begin
    if adopt_copy.keep_keys is null then
        raise exception using errcode = '22004', message = 'keep_keys must not be null',
            hint = 'true: it takes the place of the other database and repeats its keys. false: it lives beside it.';
    end if;
    perform from almanac.installation for update;
    if not almanac._is_copy() and almanac.held() is null then
        raise exception using errcode = 'PA014', message = 'this database is neither a copy nor held',
            detail = 'Nothing was changed.',
            hint   = 'For a snapshot of a whole cluster, which cannot be told: select almanac.hold(''copy''); first.';
    end if;
    perform setval('almanac.job_id_seq', greatest(
        nextval('almanac.job_id_seq'), (select max(job.id) from almanac.job),
        (select max(h.id) from almanac.job_history h), (select max(a.job_id) from almanac.attempt a),
        (select max(t.job_id) from almanac.tick t)));
    perform setval('almanac.claim_id_seq', greatest(
        nextval('almanac.claim_id_seq'), (select max(claim.id) from almanac.claim)));
    perform setval('almanac.audit_id_seq', greatest(
        nextval('almanac.audit_id_seq'), (select max(audit.id) from almanac.audit)));
    perform nextval('almanac.backdated_job_seq');
    for v_queue in select * from almanac.queue where not adopt_copy.keep_keys order by queue.queue loop
        v_prefix := almanac._new_key_prefix(v_queue.queue);
        update almanac.queue set key_prefix = v_prefix where queue.queue = v_queue.queue;
        update almanac.job
           set idempotency_key = v_prefix || substr(job.idempotency_key, length(v_queue.key_prefix) + 1)
         where job.queue = v_queue.queue and job.schedule is not null
           and starts_with(job.idempotency_key, v_queue.key_prefix || ':');
        update almanac.job_history h
           set idempotency_key = v_prefix || substr(h.idempotency_key, length(v_queue.key_prefix) + 1)
         where h.queue = v_queue.queue and h.schedule is not null and h.state = 'dead' and h.redriven_at is null
           and starts_with(h.idempotency_key, v_queue.key_prefix || ':');
    end loop;
    for v_job in select * from almanac.job where job.state = 'running' order by job.queue, job.id for update loop
        perform almanac._end_attempt(v_job, 'lost', error => 'it ran in the database that this is a copy of');
        v_running := v_running + 1;
    end loop;
    delete from almanac.sleeper;
    delete from almanac.worker;
    delete from almanac.heartbeat;
    update almanac.alert a set cleared_at = almanac.clock() where a.cleared_at is null;
    v_unbound := almanac._bind_grants(anyway => true);
    perform almanac._note_home();
    perform almanac._go_on();
    perform almanac._audit('adopt_copy', null, null, adopt_copy.reason, null,
        jsonb_build_object('keep_keys', adopt_copy.keep_keys, 'running', v_running, 'unbound', to_jsonb(v_unbound)));
    return format('this copy works from now on, with %s; %s running jobs are retried%s',
                  case when adopt_copy.keep_keys then 'the keys of the other' else 'keys of its own' end, v_running,
                  '; grants of roles that are not here: ' || nullif(array_to_string(v_unbound, ', '), ''));
end;
$$;
comment on function almanac.adopt_copy(boolean, text) is
    'Let a copy work, in place of the other database (keep_keys) or beside it. Raises PA014 unless it is one, or held.';
