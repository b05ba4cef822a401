-- 00 schema: where everything lives, and which revision of it this database has.
-- Can be run again at any time: `pyclient migrate` does so before it looks for pending revisions.
do $$
declare
    v_schema text;
begin
    -- "create schema if not exists" asks for the right to create schemas even where there is nothing to create;
    -- on a managed service an administrator may have made the schemas for us.
    foreach v_schema in array array['almanac', 'almanac_days'] loop
        begin
            if to_regnamespace(v_schema) is null then
                execute format('create schema %I', v_schema);
            end if;
        exception
            -- Another session installs at this moment, and was waited for.
            when duplicate_schema or unique_violation then null;
        end;
    end loop;
    if to_regclass('almanac.migration') is null then
        create table almanac.migration (
            version_num varchar(32) collate "C" not null constraint migration_pkey primary key,
            version     text
        );
        comment on table almanac.migration is 'The revision of the tables in this schema; kept by pyclient migrate.';
        comment on column almanac.migration.version_num is 'Name of the newest revision applied.';
        comment on column almanac.migration.version is 'The version of pg_almanac that brought the functions.';
        comment on schema almanac is 'pg_almanac: what is due, when, who holds it, what became of it.';
        comment on schema almanac_days is
            'pg_almanac: a table for each day of what is done. No role may use it: a view on one day would keep it.';
    end if;
    -- Two installations of one database wait for each other here. Not an advisory lock: any login could hold that.
    lock table almanac.migration in share row exclusive mode;
end;
$$;
