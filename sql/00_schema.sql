-- 00 schema: where everything lives, and which revision of it this database has.
-- Can be run again at any time: `pyclient migrate` does so before it looks for pending revisions.
do $$
begin
    -- "create schema if not exists" asks for the right to create schemas even where there is nothing to create;
    -- on a managed service an administrator may have made the schema for us.
    if to_regnamespace('almanac') is null then
        create schema almanac;
        comment on schema almanac is 'pg_almanac: what is due, when, who holds it, what became of it.';
    end if;
    if to_regclass('almanac.migration') is null then
        create table almanac.migration (
            version_num varchar(32) collate "C" not null constraint migration_pkey primary key
        );
        comment on table almanac.migration is 'The revision of the tables in this schema; kept by pyclient migrate.';
        comment on column almanac.migration.version_num is 'Name of the newest revision applied.';
    end if;
end;
$$;
