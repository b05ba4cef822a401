-- 90 grants: who may call what. Everything is revoked first, so that what a role may do is what stands here.
-- Roles hold execute on functions and select on views, never a privilege on a table.

do $$
declare
    v_role text;
begin
    foreach v_role in array array['public', 'almanac_producer', 'almanac_worker', 'almanac_operator',
                                  'almanac_observer', 'almanac_admin'] loop
        execute format('revoke all on all tables in schema almanac from %s', v_role);
        execute format('revoke all on all sequences in schema almanac from %s', v_role);
        execute format('revoke all on all routines in schema almanac from %s', v_role);
        execute format('revoke all on schema almanac, almanac_days from %s', v_role);
        if v_role <> 'public' then
            execute format('grant usage on schema almanac to %s', v_role);
        end if;
    end loop;
end;
$$;

-- producers: put work in, take it back.
grant execute on function
    almanac.enqueue, almanac.enqueue_many, almanac.cancel, almanac.redrive, almanac.make_due, almanac.job,
    almanac.put_schedule
    to almanac_producer, almanac_admin;

-- workers: lease work, end it, tick when nobody else does.
grant execute on function
    almanac.claim_due, almanac.extend_lease, almanac.extend_leases, almanac.release, almanac.snooze,
    almanac.complete, almanac.complete_many, almanac.fail_with_backoff, almanac.cancel, almanac.job,
    almanac.doze, almanac.wake, almanac.count_due, almanac.report_worker, almanac.retire_worker,
    almanac.put_job_type, almanac.reclaim_expired, almanac.put_schedule, almanac.advance_schedule, almanac.tick,
    almanac.tick_if_stale
    to almanac_worker, almanac_admin;

-- operators: look, pause, cancel, bring back.
grant execute on function
    almanac.pause_queue, almanac.resume_queue, almanac.cancel, almanac.redrive, almanac.make_due, almanac.job,
    almanac.count_due, almanac.reclaim_expired, almanac.end_lease, almanac.put_schedule,
    almanac.put_schedule_template, almanac.revert_schedule, almanac.pause_schedule, almanac.resume_schedule,
    almanac.trigger_schedule, almanac.reschedule, almanac.backfill_schedule, almanac.drop_schedule,
    almanac.advance_schedule, almanac.tick, almanac.start_ticking, almanac.stop_ticking, almanac.hold,
    almanac.end_hold
    to almanac_operator, almanac_admin;

-- admins: queues, types and rights.
grant execute on function
    almanac.put_queue, almanac.drop_queue, almanac.put_job_type, almanac.grant_queue, almanac.revoke_queue,
    almanac.open_queue, almanac.adopt_copy
    to almanac_admin;

-- everybody with a role: the time, what cron says, and nothing that writes.
grant execute on function
    almanac.clock, almanac.attempt_key, almanac.parse_cron, almanac.next_run, almanac.next_runs, almanac.previous_run,
    almanac.describe_cron, almanac.preview_cron, almanac.revision, almanac.installed_version, almanac.local_time,
    almanac.held
    to almanac_producer, almanac_worker, almanac_operator, almanac_observer, almanac_admin;

grant select on
    almanac.queue_overview, almanac.job_overview, almanac.late_job, almanac.running_job, almanac.stuck_job,
    almanac.dead_job, almanac.worker_overview, almanac.attempt_log, almanac.audit_log, almanac.schedule_overview,
    almanac.upcoming_tick, almanac.tick_log, almanac.schedule_history, almanac.schedule_template_overview
    to almanac_operator, almanac_observer, almanac_admin;

-- Those who look: is it well, and why did it (not) run?
grant execute on function almanac.explain_tick, almanac.health, almanac.alerts, almanac.metrics
    to almanac_operator, almanac_observer, almanac_admin;
