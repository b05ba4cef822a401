-- 62 _prune: rows that no partition takes with them: of queues that keep less than the longest, passed dedup windows,
-- workers and sleepers that are gone. At most batch_size of each in a call; "more" in the report: some may be left.
-- SKIP LOCKED: what others change is left to the next call.
-- Reads: queue. Writes: job_history, attempt, tick, dedup, sleeper, worker, audit, alert. Calls: clock.
create or replace function almanac._prune(batch_size integer default 1000)
    returns jsonb
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_now     timestamptz := almanac.clock();
    v_longest interval := (select max(queue.retention) from almanac.queue);
    v_queue   almanac.queue;
    v_count   integer;
    v_more    boolean := false;
    v_history integer := 0;
    v_attempt integer := 0;
    v_tick    integer := 0;
    v_dedup   integer;
begin
    -- In any order: a queue that always has a batch to drop does not keep the others from it.
    for v_queue in select * from almanac.queue where queue.retention < v_longest order by random() loop
        delete from almanac.job_history
         where (job_history.tableoid, job_history.ctid) in (
            select h.tableoid, h.ctid from almanac.job_history h
             where h.queue = v_queue.queue and h.finished_at < v_now - v_queue.retention
             limit _prune.batch_size - v_history
               for update skip locked);
        get diagnostics v_count = row_count;
        v_history := v_history + v_count;
        delete from almanac.attempt
         where (attempt.tableoid, attempt.ctid) in (
            select a.tableoid, a.ctid from almanac.attempt a
             where a.queue = v_queue.queue and a.finished_at < v_now - v_queue.retention
             limit _prune.batch_size - v_attempt
               for update skip locked);
        get diagnostics v_count = row_count;
        v_attempt := v_attempt + v_count;
        delete from almanac.tick
         where (tick.tableoid, tick.ctid) in (
            select t.tableoid, t.ctid from almanac.tick t
             where t.queue = v_queue.queue and t.tick_at < v_now - v_queue.retention
               and t.decided_at < v_now - v_queue.retention
             limit _prune.batch_size - v_tick
               for update skip locked);
        get diagnostics v_count = row_count;
        v_tick := v_tick + v_count;
        exit when v_history >= _prune.batch_size or v_attempt >= _prune.batch_size or v_tick >= _prune.batch_size;
    end loop;
    -- Days on which nobody made partitions have none, and what was finished then is dropped with none.
    delete from almanac_days.job_history_default d
     where d.ctid = any (array(
        select h.ctid from almanac_days.job_history_default h
         where h.finished_at < v_now - v_longest limit _prune.batch_size for update skip locked));
    get diagnostics v_count = row_count;
    v_more := v_more or v_count >= _prune.batch_size;
    delete from almanac_days.attempt_default d
     where d.ctid = any (array(
        select a.ctid from almanac_days.attempt_default a
         where a.finished_at < v_now - v_longest limit _prune.batch_size for update skip locked));
    get diagnostics v_count = row_count;
    v_more := v_more or v_count >= _prune.batch_size;
    -- After a long outage ticks are decided about moments long past. Those have no partition of their own, and are kept
    -- from the decision on.
    delete from almanac_days.tick_default d
     where d.ctid = any (array(
        select t.ctid from almanac_days.tick_default t
         where greatest(t.tick_at, t.decided_at) < v_now - v_longest limit _prune.batch_size for update skip locked));
    get diagnostics v_count = row_count;
    v_more := v_more or v_count >= _prune.batch_size;
    delete from almanac.dedup
     where dedup.ctid = any (array(
        select d.ctid from almanac.dedup d where d.held_until <= v_now limit _prune.batch_size for update skip locked));
    get diagnostics v_dedup = row_count;
    delete from almanac.sleeper
     where sleeper.ctid = any (array(
        select s.ctid from almanac.sleeper s where s.sleeps_until < v_now - interval '1 minute'
         limit _prune.batch_size for update skip locked));
    delete from almanac.worker
     where worker.ctid = any (array(
        select w.ctid from almanac.worker w where w.last_seen_at < v_now - interval '1 day'
         limit _prune.batch_size for update skip locked));
    delete from almanac.alert
     where alert.ctid = any (array(
        select a.ctid from almanac.alert a where a.cleared_at < v_now - v_longest
         limit _prune.batch_size for update skip locked));
    delete from almanac.audit
     where audit.id = any (array(
        select a.id from almanac.audit a where a.at < v_now - greatest(v_longest, interval '365 days')
         order by a.at limit _prune.batch_size));
    get diagnostics v_count = row_count;
    v_more := v_more or greatest(v_history, v_attempt, v_tick, v_dedup, v_count) >= _prune.batch_size;
    return jsonb_build_object('history', v_history, 'attempts', v_attempt, 'ticks', v_tick, 'dedup', v_dedup,
                              'more', v_more);
end;
$$;
comment on function almanac._prune(integer) is
    'Delete what is past its retention and not covered by dropping partitions; bounded; reports counts, and more.';
