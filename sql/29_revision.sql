-- 29 revision: which tables this database has. A worker asks before it starts, and holds no privilege on a table.
-- Reads: migration.
create or replace function almanac.revision()
    returns text
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
as $$
    select version_num from almanac.migration;
$$;
comment on function almanac.revision() is
    'The revision of the tables in this database; pyclient compares it with the one it was made for.';
revoke all on function almanac.revision() from public;

-- 29 installed_version: which version of pg_almanac the functions are of.
-- Reads: migration.
create or replace function almanac.installed_version()
    returns text
    language sql stable security definer
    set search_path = pg_catalog, pg_temp
as $$
    select version from almanac.migration;
$$;
comment on function almanac.installed_version() is
    'The version of pg_almanac whose functions this database has; null: not known.';
revoke all on function almanac.installed_version() from public;
