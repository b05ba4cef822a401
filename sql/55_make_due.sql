-- 55 make_due: a job that waits is due now; state and attempts stay. One job by its id; or up to batch_size retrying
-- jobs, the next ones first, that match a type and an error pattern (as in LIKE). Never all that is scheduled.
-- Reads: job. Writes: job. Calls: clock, _open_queue, _ring, _audit, _raise_no_job, job.
create or replace function almanac.make_due(
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
    v_now   timestamptz := almanac.clock();
    v_job   almanac.job;
    v_found record;
    v_any   boolean := false;
begin
    perform almanac._open_queue(make_due.queue, 'produce', 'operate');
    if make_due.batch_size is null or make_due.batch_size not between 1 and 10000 then
        raise exception using errcode = '22023', message = 'batch_size must be between 1 and 10000',
            detail = format('It is %s.', coalesce(make_due.batch_size::text, 'null')),
            hint   = 'Call make_due again until it returns nothing.';
    end if;
    for v_job in
        select job.* from almanac.job
         where job.queue = make_due.queue and job.due_at > v_now
           and (job.state = 'retrying' or job.state = 'scheduled' and make_due.job_id is not null)
           and (make_due.job_id is null or job.id = make_due.job_id)
           and (make_due.job_type is null or job.job_type = make_due.job_type)
           and (make_due.error_like is null or job.last_error like make_due.error_like)
         order by job.due_at, job.id
         limit make_due.batch_size
           for update skip locked
    loop
        update almanac.job set due_at = v_now where job.queue = v_job.queue and job.id = v_job.id;
        perform almanac._audit('make_due', v_job.queue, v_job.id::text, make_due.reason,
                               jsonb_build_object('state', v_job.state, 'due_at', v_job.due_at),
                               jsonb_build_object('state', v_job.state, 'due_at', v_now));
        return next v_job.id;
        v_any := true;
    end loop;
    if v_any then
        perform nextval('almanac.backdated_job_seq');
        perform almanac._ring(make_due.queue, v_now);
    elsif make_due.job_id is not null then
        select j.state, j.due_at into v_found from almanac.job(make_due.queue, make_due.job_id) j;
        perform almanac._raise_no_job(make_due.queue, make_due.job_id,
            case when v_found.state is null then 'does not exist'
                 when v_found.state not in ('scheduled', 'retrying') then 'is ' || v_found.state || ', not waiting'
                 when v_found.due_at <= v_now then 'is due already'
                 else 'does not match, or is just being changed by somebody else' end,
            'Look it up: select * from almanac.job(queue, job_id);');
    end if;
end;
$$;
comment on function almanac.make_due(text, bigint, text, text, text, integer) is
    'Make a waiting job due now, or a batch of retrying ones that match; returns their ids.';
