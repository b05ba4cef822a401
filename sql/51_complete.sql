-- 51 complete_many: running -> completed, for many jobs in one statement. Returns the ids that are completed by these
-- tokens, also those that were so before: a reply can be lost after the commit.
-- Reads: queue, job_history. Calls: clock, _open_queue, _finish, _ring.
create or replace function almanac.complete_many(
    queue text, job_ids bigint[], lease_tokens bigint[], results jsonb[] default null, external_ids text[] default null)
    returns setof bigint
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_queue    almanac.queue;
    v_finished bigint[];
begin
    -- What _open_queue does, without the call where it would only say yes.
    select * into v_queue from almanac.queue as q where q.queue = complete_many.queue and q.restricted_at is null;
    if not found then
        v_queue := almanac._open_queue(complete_many.queue, 'work');
    end if;
    if cardinality(complete_many.job_ids) <> cardinality(complete_many.lease_tokens)
       or cardinality(complete_many.results) <> cardinality(complete_many.job_ids)
       or cardinality(complete_many.external_ids) <> cardinality(complete_many.job_ids) then
        raise exception using errcode = '22023',
            message = 'job_ids, lease_tokens, results and external_ids must have the same length',
            hint    = 'Put null into results or external_ids for a job that has none.';
    end if;
    if complete_many.job_ids <> array(
           select distinct c.job_id from unnest(complete_many.job_ids) as c (job_id)
            where c.job_id is not null order by c.job_id)
       or array_dims(complete_many.lease_tokens) <> array_dims(complete_many.job_ids)
       or array_dims(complete_many.results) <> array_dims(complete_many.job_ids)
       or array_dims(complete_many.external_ids) <> array_dims(complete_many.job_ids) then
        -- Subscripts need not begin at 1, and what belongs together has the same place, not the same subscript.
        -- Of several tokens of one job only the largest can be live, so that one comes last and counts.
        select array_agg(c.job_id), array_agg(c.lease_token), array_agg(c.result), array_agg(c.external_id)
          into complete_many.job_ids, complete_many.lease_tokens, complete_many.results, complete_many.external_ids
          from (select *
                  from unnest(complete_many.job_ids, complete_many.lease_tokens, complete_many.results,
                              complete_many.external_ids) as u (job_id, lease_token, result, external_id)
                 where u.job_id is not null
                 order by u.job_id, u.lease_token nulls first) c;
    end if;
    v_finished := almanac._finish(complete_many.queue, complete_many.job_ids, complete_many.lease_tokens, 'completed',
                                  true, complete_many.results, complete_many.external_ids);
    if v_queue.max_running is not null and v_finished <> '{}' then
        perform almanac._ring(complete_many.queue, almanac.clock());
    end if;
    return query select unnest(v_finished);
    if cardinality(v_finished) < cardinality(complete_many.job_ids) then
        return query
            select distinct h.id
              from unnest(complete_many.job_ids, complete_many.lease_tokens) as c (job_id, lease_token)
              join almanac.job_history h
                on h.queue = complete_many.queue and h.id = c.job_id and h.lease_token = c.lease_token
               and h.state = 'completed'
             where c.job_id <> all (v_finished);
    end if;
end;
$$;
comment on function almanac.complete_many(text, bigint[], bigint[], jsonb[], text[]) is
    'Complete leased jobs; returns the ids that are completed. A job whose lease is lost is left out.';

-- 51 complete: running -> completed. The same call again is answered with success.
-- Calls: complete_many, _raise_lease_lost.
create or replace function almanac.complete(
    queue text, job_id bigint, lease_token bigint, result jsonb default null, external_id text default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform almanac.complete_many(complete.queue, array[complete.job_id], array[complete.lease_token],
                                  array[complete.result], array[complete.external_id]);
    if not found then
        perform almanac._raise_lease_lost(complete.queue, complete.job_id, complete.lease_token);
    end if;
end;
$$;
comment on function almanac.complete(text, bigint, bigint, jsonb, text) is
    'Complete a leased job and keep its result. Raises PA002 if the lease is lost.';
