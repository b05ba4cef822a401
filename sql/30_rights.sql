-- 30 _audit: writes down what somebody did.
-- Writes: audit. Calls: clock, _caller.
create or replace function almanac._audit(
    action text, queue text, subject text, reason text, before jsonb, after jsonb)
    returns void
    language sql volatile set search_path = pg_catalog, pg_temp
as $$
    insert into almanac.audit (at, actor, action, queue, subject, reason, before, after)
    values (almanac.clock(), almanac._caller(), _audit.action, _audit.queue, _audit.subject, _audit.reason,
            _audit.before, _audit.after);
$$;
comment on function almanac._audit(text, text, text, text, jsonb, jsonb) is 'Adds a row to the audit log.';

-- 30 _has_right: whether the caller holds one of the rights on a restricted queue. A grant means the role that had
-- both its name and its oid: one dropped and made again under the name is another.
-- Reads: queue_grant. Calls: _caller.
create or replace function almanac._has_right(queue text, rights text[])
    returns boolean
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select from almanac.queue_grant g join pg_roles r on r.oid = g.role_oid and r.rolname = g.role
         where g.queue = _has_right.queue and g.may = any (_has_right.rights)
           and pg_has_role(almanac._caller(), r.oid, 'member'));
end;
$$;
comment on function almanac._has_right(text, text[]) is 'Whether the caller was granted one of the rights on a queue.';

-- 30 _authorize: on a restricted queue the caller needs one of the given rights, whatever else it holds.
-- Calls: _caller, _has_right.
create or replace function almanac._authorize(queue text, variadic rights text[])
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    if almanac._has_right(_authorize.queue, _authorize.rights) then
        return;
    end if;
    raise exception using errcode = 'PA004',
        message = format('role %s may not %s queue %s', almanac._caller(),
                         array_to_string(_authorize.rights, ' or '), _authorize.queue),
        detail  = 'The queue is restricted to the roles it was granted to.',
        hint    = format('An admin can allow it: select almanac.grant_queue(%L, %L, %L);',
                         _authorize.queue, almanac._caller(), _authorize.rights[1]);
end;
$$;
comment on function almanac._authorize(text, text[]) is
    'Raises PA004 unless the caller holds one of the rights on a restricted queue.';

-- 30 _raise_no_queue: queues are made before they are used, so that a typing error does not become one.
create or replace function almanac._raise_no_queue(queue text)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = 'PA001',
        message = format('queue %s does not exist', coalesce(quote_literal(_raise_no_queue.queue), 'null')),
        detail  = 'Queues are made before they are used; almanac.queue_overview lists them.',
        hint    = format('Make it: select almanac.put_queue(%L);', coalesce(_raise_no_queue.queue, 'name'));
end;
$$;
comment on function almanac._raise_no_queue(text) is 'Raises PA001.';

-- 30 _open_queue: every function that acts on a queue starts here: it exists, and the caller may act on it.
-- Reads: queue. Calls: _authorize, _raise_no_queue.
create or replace function almanac._open_queue(queue text, variadic rights text[])
    returns almanac.queue
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue almanac.queue;
begin
    select * into v_queue from almanac.queue where queue.queue = _open_queue.queue;
    if not found then
        perform almanac._raise_no_queue(_open_queue.queue);
    end if;
    if v_queue.restricted_at is not null then
        perform almanac._authorize(_open_queue.queue, variadic _open_queue.rights);
    end if;
    return v_queue;
end;
$$;
comment on function almanac._open_queue(text, text[]) is
    'The queue''s row; raises PA001 if there is none and PA004 without the right.';

-- 30 _hold_queue: as _open_queue, for what must fit the queue also when it commits: whoever sets or drops it waits, or
-- is waited for. The weakest lock there is: those who hold it do not keep each other from noting a priority in the row.
-- Reads: queue. Calls: _open_queue.
create or replace function almanac._hold_queue(queue text, variadic rights text[])
    returns almanac.queue
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    loop
        perform from almanac.queue where queue.queue = _hold_queue.queue for key share;
        exit when found;
        -- Raises, unless it was dropped and made again: then the new one is not held yet.
        perform almanac._open_queue(_hold_queue.queue, variadic _hold_queue.rights);
    end loop;
    return almanac._open_queue(_hold_queue.queue, variadic _hold_queue.rights);
end;
$$;
comment on function almanac._hold_queue(text, text[]) is
    'The queue''s row, which put_queue does not change before the end of the transaction; raises as _open_queue.';

-- 30 _enter_queue: as _open_queue, for those who make jobs: the queue is not dropped before they commit. ACCESS SHARE
-- on the table, taken before the look, conflicts with drop_queue and costs no write. At isolation levels above read
-- committed a queue that is gone can still be seen, but its row cannot be locked.
-- Calls: _hold_queue, _open_queue.
create or replace function almanac._enter_queue(queue text, variadic rights text[])
    returns almanac.queue
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        return almanac._hold_queue(_enter_queue.queue, variadic _enter_queue.rights);
    end if;
    lock table almanac.queue in access share mode;
    return almanac._open_queue(_enter_queue.queue, variadic _enter_queue.rights);
end;
$$;
comment on function almanac._enter_queue(text, text[]) is
    'The queue''s row, which is not dropped before the end of the transaction; raises as _open_queue.';

-- 30 _bind_grants: where no grant finds its role, this is a restore on another server, and the roles of these names are
-- meant. Otherwise a name that means another role now gets nothing. Returns the names that mean no role.
-- Reads: queue_grant. Writes: queue_grant.
create or replace function almanac._bind_grants(anyway boolean default false)
    returns text[]
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if anyway or not exists (
        select from almanac.queue_grant g join pg_roles r on r.oid = g.role_oid and r.rolname = g.role) then
        update almanac.queue_grant g set role_oid = r.oid from pg_roles r where r.rolname = g.role;
    end if;
    return array(select distinct g.role from almanac.queue_grant g
                  where not exists (select from pg_roles r where r.oid = g.role_oid and r.rolname = g.role)
                  order by g.role);
end;
$$;
comment on function almanac._bind_grants(boolean) is
    'After a restore elsewhere, let grants mean the roles of this server.';

-- 30 grant_queue: from the first grant on, a queue is closed to every role that was not granted a right.
-- Reads: queue, queue_grant. Writes: queue, queue_grant. Calls: clock, _caller, _audit, _raise_no_queue.
create or replace function almanac.grant_queue(queue text, role text, may text)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regrole(quote_ident(grant_queue.role)) is null then
        raise exception using errcode = '42704',
            message = format('role %s does not exist', coalesce(quote_literal(grant_queue.role), 'null')),
            hint    = format('Create it first: create role %I;', coalesce(grant_queue.role, 'name'));
    end if;
    if grant_queue.may is null or grant_queue.may not in ('produce', 'work', 'operate') then
        raise exception using errcode = '22023',
            message = format('right %s is not known', coalesce(quote_literal(grant_queue.may), 'null')),
            hint    = 'Use produce, work or operate.';
    end if;
    update almanac.queue set restricted_at = coalesce(queue.restricted_at, almanac.clock())
     where queue.queue = grant_queue.queue;
    if not found then
        perform almanac._raise_no_queue(grant_queue.queue);
    end if;
    insert into almanac.queue_grant as g (queue, role, role_oid, may, granted_at, granted_by)
    values (grant_queue.queue, grant_queue.role, to_regrole(quote_ident(grant_queue.role)), grant_queue.may,
            almanac.clock(), almanac._caller())
    on conflict on constraint queue_grant_pkey do update
       set role_oid = excluded.role_oid, granted_at = excluded.granted_at, granted_by = excluded.granted_by
     where g.role_oid <> excluded.role_oid;
    if found then
        perform almanac._audit('grant_queue', grant_queue.queue, grant_queue.role, null, null,
                               jsonb_build_object('may', grant_queue.may));
    end if;
end;
$$;
comment on function almanac.grant_queue(text, text, text) is
    'Let a role produce, work or operate on a queue; from the first grant on nobody else may.';

-- 30 revoke_queue: takes a right back. The queue stays restricted until open_queue.
-- Reads: queue_grant. Writes: queue_grant. Calls: _audit.
create or replace function almanac.revoke_queue(queue text, role text, may text)
    returns boolean
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    delete from almanac.queue_grant
     where queue_grant.queue = revoke_queue.queue and queue_grant.role = revoke_queue.role
       and queue_grant.may = revoke_queue.may;
    if found then
        perform almanac._audit('revoke_queue', revoke_queue.queue, revoke_queue.role, null,
                               jsonb_build_object('may', revoke_queue.may), null);
        return true;
    end if;
    return false;
end;
$$;
comment on function almanac.revoke_queue(text, text, text) is
    'Take a right on a queue back; false if it was not granted. The queue stays restricted.';

-- 30 open_queue: lifts the restriction and forgets the grants.
-- Reads: queue, queue_grant. Writes: queue, queue_grant. Calls: _audit, _raise_no_queue.
create or replace function almanac.open_queue(queue text, reason text default null)
    returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_grants jsonb;
begin
    if not exists (select from almanac.queue where queue.queue = open_queue.queue) then
        perform almanac._raise_no_queue(open_queue.queue);
    end if;
    with gone as (
        delete from almanac.queue_grant where queue_grant.queue = open_queue.queue
        returning queue_grant.role, queue_grant.may
    )
    select jsonb_agg(jsonb_build_object('role', gone.role, 'may', gone.may)) into v_grants from gone;
    update almanac.queue set restricted_at = null
     where queue.queue = open_queue.queue and queue.restricted_at is not null;
    if found then
        perform almanac._audit('open_queue', open_queue.queue, null, open_queue.reason, v_grants, null);
    end if;
end;
$$;
comment on function almanac.open_queue(text, text) is
    'Lift the restriction of a queue: every role that may call a function may again act on it.';
