-- 44 doze: a worker is about to sleep, so enqueue rings once this commits: claim once more after it, and sleep only if
-- that finds nothing. With job_types, the next job is of these types; where none is among the first thousand of a
-- priority, the time of the last of those. Generic plan: planning costs 3x execution. No sort: a plan cached on an
-- empty table would.
-- Reads: job, sleeper. Writes: sleeper. Calls: clock, _check_name, _is_plain, _open_queue.
create or replace function almanac.doze(
    queue text, worker text, at_most interval default interval '5 seconds', job_types text[] default null)
    returns timestamptz
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_sort = off
as $$
declare
    v_now   timestamptz := almanac.clock();
    v_queue almanac.queue := almanac._open_queue(doze.queue, 'work');
    v_next  timestamptz;
begin
    if almanac._is_plain(doze.worker, 200) is not true then
        perform almanac._check_name('a worker', doze.worker, 200);
    end if;
    if doze.at_most between interval '0' and interval '30 days' is not true then
        raise exception using errcode = case when doze.at_most is null then '22004' else '22023' end,
            message = 'at_most must be between 0 and 30 days',
            detail  = format('It is %s.', coalesce(doze.at_most::text, 'null')),
            hint    = 'Leave it out to sleep for up to 5 seconds.';
    end if;
    -- Marked for twice as long, so that of a worker's naps not each has to write and wait for the disk.
    if not exists (select from almanac.sleeper
                    where sleeper.queue = doze.queue and sleeper.worker = doze.worker
                      and sleeper.sleeps_until between v_now + doze.at_most and v_now + 2 * doze.at_most) then
        insert into almanac.sleeper (queue, worker, sleeps_until)
        values (doze.queue, doze.worker, v_now + 2 * doze.at_most)
        on conflict on constraint sleeper_pkey do update set sleeps_until = excluded.sleeps_until;
    end if;
    if v_queue.held_at is not null then
        return null;
    elsif v_queue.paused_at is not null and coalesce(v_queue.paused_until, 'infinity') > v_now then
        return v_queue.paused_until;
    end if;
    select min(coalesce(
               (select seen.due_at
                  from (select job.due_at, job.job_type from almanac.job
                         where job.queue = doze.queue and job.state in ('scheduled', 'retrying')
                           and job.parked_at is null and job.counted_at is null and job.priority = level.priority
                         order by job.due_at
                         limit 1000) seen
                 where doze.job_types is null or seen.job_type = any (doze.job_types)
                 order by seen.due_at
                 limit 1),
               (select job.due_at from almanac.job
                 where job.queue = doze.queue and job.state in ('scheduled', 'retrying')
                   and job.parked_at is null and job.counted_at is null and job.priority = level.priority
                 order by job.due_at
                offset 999 limit 1)))
      into v_next
      from unnest(v_queue.priorities) as level (priority);
    if v_next <= v_now and v_queue.rate_limit is not null then
        return v_now + v_queue.rate_interval / v_queue.rate_limit;
    elsif v_next <= v_now and v_queue.max_running is not null then
        -- Whoever ends a job rings.
        return null;
    end if;
    return v_next;
end;
$$;
comment on function almanac.doze(text, text, interval, text[]) is
    'Announce that a worker sleeps; returns when the next job is due, or null if nothing is foreseen.';

-- 44 wake: the worker is up again: nobody needs to ring.
-- Writes: sleeper. Calls: _open_queue.
create or replace function almanac.wake(queue text, worker text)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform almanac._open_queue(wake.queue, 'work');
    delete from almanac.sleeper where sleeper.queue = wake.queue and sleeper.worker = wake.worker;
end;
$$;
comment on function almanac.wake(text, text) is 'Take back doze.';

-- 44 count_due: what waits although it is due, parked jobs too. Reads nothing else, however much the future holds, and
-- so a worker can ask every few seconds.
-- Reads: job. Calls: clock, _open_queue.
create or replace function almanac.count_due(queue text)
    returns bigint
    language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
as $$
declare
    v_now   timestamptz := almanac.clock();
    v_queue almanac.queue := almanac._open_queue(count_due.queue, 'work', 'operate');
begin
    return (select count(*) from almanac.job
             where job.queue = count_due.queue and job.priority = any (v_queue.priorities) and job.due_at <= v_now
               and job.state in ('scheduled', 'retrying') and job.parked_at is null and job.counted_at is null)
         + (select count(*) from almanac.job
             where job.queue = count_due.queue and job.parked_at is not null and job.due_at <= v_now);
end;
$$;
comment on function almanac.count_due(text) is 'How many jobs of a queue are due and wait.';

-- 44 report_worker: a worker shows itself to operators. Nothing depends on it: recovery reads leases. A role cannot
-- change what another role reports.
-- Writes: worker. Calls: clock, _caller, _check_name.
create or replace function almanac.report_worker(
    worker text, host text, pid integer, version text, queues text[], concurrency integer, running integer)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform almanac._check_name('a worker', report_worker.worker, 200);
    if num_nulls(report_worker.host, report_worker.pid, report_worker.version, report_worker.queues,
                 report_worker.concurrency, report_worker.running) > 0 then
        raise exception using errcode = '22004',
            message = 'a worker is reported with all of host, pid, version, queues, concurrency and running',
            hint    = 'Give 0 or an empty text for what is not known.';
    end if;
    insert into almanac.worker (worker, host, pid, version, queues, concurrency, running, reported_by, started_at,
                                last_seen_at)
    values (report_worker.worker, report_worker.host, report_worker.pid, report_worker.version, report_worker.queues,
            report_worker.concurrency, report_worker.running, almanac._caller(), almanac.clock(), almanac.clock())
    on conflict on constraint worker_pkey do update
       set host = excluded.host, pid = excluded.pid, version = excluded.version, queues = excluded.queues,
           concurrency = excluded.concurrency, running = excluded.running, last_seen_at = excluded.last_seen_at
     where worker.reported_by = excluded.reported_by;
    if not found then
        raise exception using errcode = 'PA004',
            message = format('worker %s is reported by another role', quote_literal(report_worker.worker)),
            detail  = format('Role %s may not change it.', almanac._caller()),
            hint    = 'Give each process a name of its own, with its pid and a random part.';
    end if;
end;
$$;
comment on function almanac.report_worker(text, text, integer, text, text[], integer, integer) is
    'Register a worker or refresh what worker_overview shows of it.';

-- 44 retire_worker: a worker that stopped cleanly. On a queue that the caller may not work on it goes on sleeping.
-- Reads: queue. Writes: worker, sleeper. Calls: _caller, _has_right.
create or replace function almanac.retire_worker(worker text)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    delete from almanac.sleeper s using almanac.queue q
     where s.worker = retire_worker.worker and q.queue = s.queue
       and (q.restricted_at is null or almanac._has_right(q.queue, array['work']));
    delete from almanac.worker
     where worker.worker = retire_worker.worker and worker.reported_by = almanac._caller();
end;
$$;
comment on function almanac.retire_worker(text) is 'Forget a worker that has stopped.';
