-- Run once, in POSTGRES_DB, when the data directory is made.
create extension if not exists pg_cron;
