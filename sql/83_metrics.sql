-- 83 metrics: figures for a monitoring system that can run a query. Counts only live work and dead letters, so the cost
-- does not grow with history.
-- Reads: queue_overview, heartbeat, worker, schedule. Calls: clock.
create or replace function almanac.metrics()
    returns setof almanac.metric
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off
as $$
declare
    v_now timestamptz := almanac.clock();
begin
    return query
        select figure.metric, o.queue, figure.value::double precision
          from almanac.queue_overview o
         cross join lateral (values
            ('jobs_scheduled', o.scheduled::numeric), ('jobs_due', o.due), ('jobs_running', o.running),
            ('jobs_retrying', o.retrying), ('jobs_parked', o.parked), ('jobs_dead', o.dead),
            ('queue_paused', o.paused::integer),
            ('oldest_due_seconds', coalesce(extract(epoch from o.lateness), 0))) as figure (metric, value)
         order by o.queue, figure.metric;
    return query
        select 'heartbeat_age_seconds', null::text, extract(epoch from v_now - max(h.ticked_at))::double precision
          from almanac.heartbeat h where h.source in ('pg_cron', 'worker', 'manual')
        union all
        select 'workers', null, count(*) from almanac.worker w where w.last_seen_at > v_now - interval '1 minute'
        union all
        select 'schedules_late', null, count(*)
          from almanac.schedule s where s.look_at <= v_now - interval '1 minute';
end;
$$;
comment on function almanac.metrics() is 'Figures for a monitoring system: what waits, runs, is dead, how late it is.';
