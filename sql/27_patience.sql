-- 27 _limit_idle: from here to the end of its transaction the session may be idle for so long, unless its role or
-- database has a limit. A client that falls silent while it holds a job would keep it until its connection breaks.
create or replace function almanac._limit_idle()
    returns text
    language sql volatile
    return case when current_setting('idle_in_transaction_session_timeout') = '0'
                then set_config('idle_in_transaction_session_timeout',
                                coalesce(nullif(current_setting('almanac.patience', true), ''), '30s'), true) end;
comment on function almanac._limit_idle() is 'End this session if it is idle for 30 s in this transaction.';

-- 27 _holder: the session that has locked a job, by the transaction that wrote to its row last, if that still runs.
-- Reads: job.
create or replace function almanac._holder(queue text, job_id bigint)
    returns integer
    language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
begin
    return (select l.pid from almanac.job join pg_locks l on l.locktype = 'transactionid' and l.granted
             where job.queue = _holder.queue and job.id = _holder.job_id and l.mode = 'ExclusiveLock'
               and l.transactionid = job.xmax and l.pid <> pg_backend_pid()
             limit 1);
end;
$$;
comment on function almanac._holder(text, bigint) is 'The process number of the session that holds a job; null: none.';
