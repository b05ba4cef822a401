-- pg_almanac into a database that does not have it yet, without Python:  psql -f sql/install.sql
-- The table of contents: every file, in the order in which a job lives. All of it, or nothing.
\set ON_ERROR_STOP on
begin;

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

\ir 20_clock.sql

insert into almanac.migration (version_num) values ('0001');
commit;
