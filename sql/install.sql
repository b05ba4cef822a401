-- pg_almanac into a database that does not have it yet, without Python:  psql -f sql/install.sql
-- The table of contents: every file, in the order in which a job lives. All of it, or nothing.
\set ON_ERROR_STOP on
begin;
-- What others have planted in a schema that everybody may write to does not become part of a function here.
set local search_path = pg_catalog, pg_temp;

\ir 00_schema.sql
\ir 01_roles.sql

do $$
begin
    if exists (select from almanac.migration) then
        raise exception using
            message = 'pg_almanac is already installed in this database',
            hint    = 'To bring it to a new version run: pyclient migrate';
    end if;
end;
$$;

\ir 10_queue.sql
\ir 11_job.sql
\ir 12_cron_rule.sql
\ir 13_history.sql
\ir 14_schedule.sql
\ir 15_operations.sql
\ir 16_types.sql
\ir 17_schedule_types.sql

\ir 20_clock.sql
\ir 21_cron_arguments.sql
\ir 21_cron_calendar.sql
\ir 21_cron_describe.sql
\ir 21_cron_next.sql
\ir 21_cron_parse.sql
\ir 22_backoff.sql
\ir 23_caller.sql
\ir 24_keys.sql
\ir 25_checks.sql
\ir 26_errors.sql
\ir 27_patience.sql
\ir 29_revision.sql

\ir 30_alerts.sql
\ir 30_installation.sql
\ir 30_rights.sql
\ir 31_queues.sql
\ir 32_enqueue.sql
\ir 33_fire_ticks.sql
\ir 33_schedules.sql
\ir 34_operate_schedules.sql
\ir 36_explain_tick.sql

\ir 40_claim_due.sql
\ir 41_extend_lease.sql
\ir 42_let_go.sql
\ir 43_release.sql
\ir 44_doze.sql

\ir 50_job.sql
\ir 51_complete.sql
\ir 52_fail_with_backoff.sql
\ir 53_cancel.sql
\ir 54_redrive.sql
\ir 55_make_due.sql

\ir 60_reclaim_expired.sql
\ir 61_partitions.sql
\ir 62_retention.sql
\ir 63_hold.sql

\ir 70_advance_schedule.sql
\ir 70_tick.sql
\ir 71_pg_cron.sql

\ir 80_views.sql
\ir 81_health.sql
\ir 82_schedule_views.sql
\ir 83_metrics.sql

\ir 90_grants.sql

insert into almanac.migration (version_num, version) values ('0001', '0.1.0');
commit;
