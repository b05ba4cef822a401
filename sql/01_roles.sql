-- 01 roles: who may do what. They cannot log in; grant them to the logins of your applications.
-- Can be run again at any time. Where the installing role may not create roles, an administrator does it once.
do $$
declare
    v_role    text;
    v_missing text[] := array(
        select name
          from unnest(array['almanac_producer', 'almanac_worker', 'almanac_operator', 'almanac_observer',
                            'almanac_admin']) with ordinality as wanted (name, position)
         where not exists (select from pg_roles where rolname = name)
         order by position);
begin
    if v_missing = '{}' then
        return;
    end if;
    if not (select rolsuper or rolcreaterole from pg_roles where rolname = current_user) then
        raise exception using errcode = 'insufficient_privilege',
            message = format('role %I may not create the roles that pg_almanac needs', current_user),
            detail  = 'Missing: ' || array_to_string(v_missing, ', ') || '.',
            hint    = 'Let an administrator run: create role '
                      || array_to_string(v_missing, ' nologin; create role ') || ' nologin;';
    end if;
    foreach v_role in array v_missing loop
        begin
            execute format('create role %I nologin', v_role);
        exception
            -- Roles belong to the whole server: another database may be installing at this moment.
            when duplicate_object or unique_violation then null;
        end;
    end loop;
end;
$$;
