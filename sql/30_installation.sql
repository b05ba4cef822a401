-- 30 _here: what a copy of this database cannot have in common with it.
create or replace function almanac._here()
    returns text[]
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_cluster text;
begin
    begin
        v_cluster := (select c.system_identifier from pg_control_system() c);
    exception
        when insufficient_privilege then v_cluster := 'unknown';
    end;
    return array[(select d.oid from pg_database d where d.datname = current_database())::text,
                 'almanac.installation'::regclass::oid::text, v_cluster,
                 (current_setting('server_version_num')::integer / 10000)::text];
end;
$$;
comment on function almanac._here() is 'What installation.home should be in this database.';

-- 30 _note_home: writes down where these tables live. For an installation, a copy that is adopted, and a database that
-- was cloned for tests. Its owner alone may call it.
-- Writes: installation. Calls: _here.
create or replace function almanac._note_home()
    returns void
    language sql volatile set search_path = pg_catalog, pg_temp
as $$
    insert into almanac.installation (home) values (almanac._here())
    on conflict on constraint installation_pkey do update set home = excluded.home;
$$;
comment on function almanac._note_home() is 'Say that this database is no copy.';

-- 30 _is_copy: a restore and a clone have other oids; a restore on another server may have equal ones and another
-- identifier. pg_upgrade keeps the oids, and changes the identifier together with the major version.
-- Reads: installation. Calls: _here.
create or replace function almanac._is_copy()
    returns boolean
    language sql stable set search_path = pg_catalog, pg_temp
as $$
    select exists (select from almanac.installation i cross join almanac._here() h
                    where i.home[1:2] <> h[1:2]
                       or i.home[3] <> h[3] and i.home[4] = h[4] and 'unknown' not in (i.home[3], h[3]));
$$;
comment on function almanac._is_copy() is 'Whether this database is a copy of the one where its tables were made.';

-- 30 _hold_all: nothing is claimed and nothing ticks from the commit on. Noted in each queue, too: a claim reads that.
-- Writes: installation, queue. Calls: clock.
create or replace function almanac._hold_all(held_by text, reason text)
    returns boolean
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := almanac.clock();
begin
    update almanac.installation i
       set held_at = v_now, held_by = _hold_all.held_by, hold_reason = _hold_all.reason
     where i.held_at is null;
    if not found then
        return false;
    end if;
    update almanac.queue set held_at = v_now where queue.held_at is null;
    return true;
end;
$$;
comment on function almanac._hold_all(text, text) is 'Hold all work; false if it is held already.';

-- 30 _know_home: asked once in each session, because none outlives the identity of its database: a copy holds itself.
-- Writes: installation. Calls: _here, _hold_all, _is_copy.
create or replace function almanac._know_home()
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_read_only') = 'on' then
        return; -- a standby: asked again when it has taken over
    elsif almanac._is_copy() then
        perform almanac._hold_all('copy', 'this database is a copy of another one');
        return;
    end if;
    update almanac.installation i set home = almanac._here() where i.home <> almanac._here();
    perform set_config('almanac.at_home', 'yes', false);
end;
$$;
comment on function almanac._know_home() is 'Hold a copy; remember of any other database that it is none.';

-- 30 held: why nothing is claimed and nothing ticks, and how it goes on, in one line. Asked in a copy, it holds it.
-- Reads: installation. Calls: _is_copy, _know_home.
create or replace function almanac.held()
    returns text
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('almanac.at_home', true) is distinct from 'yes' then
        perform almanac._know_home();
    end if;
    return (
        select format('held since %s by %s%s: nothing is claimed and nothing ticks; select almanac.%s',
                      i.held_at, i.held_by, ' (' || i.hold_reason || ')',
                      case when almanac._is_copy()
                           then 'adopt_copy(keep_keys => true); in its place, or keep_keys => false beside it'
                           else 'end_hold();' end)
          from almanac.installation i where i.held_at is not null);
end;
$$;
comment on function almanac.held() is 'Why all work is held, and how it goes on; null: it is not held.';

-- 30 _say_hold: a notice to a caller that asks for work while it is held. No error: it may ask again.
-- Calls: held.
create or replace function almanac._say_hold()
    returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
    raise notice using errcode = 'PA014', message = coalesce(almanac.held(), 'the hold has just ended: ask again');
end;
$$;
comment on function almanac._say_hold() is 'A notice that says why all work is held.';

-- Once: what is restored or cloned brings the row of the other database.
select almanac._note_home() where not exists (select from almanac.installation);
