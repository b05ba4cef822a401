"""What `migrate` does to a database."""

import contextlib
from collections.abc import Iterator, Sequence

import psycopg
import psycopg.errors
from psycopg import sql

from pyclient import errors
from pyclient.database.calling import Connection
from pyclient.database.connecting import cannot_connect


def run_script(conn: Connection, script: str) -> None:
    """A whole SQL file through the driver, untouched: no parameters, so neither `%` nor `:name` means anything."""
    conn.execute(sql.SQL(script))


def trust_the_catalog_only(conn: Connection) -> None:
    """To the end of the transaction names mean the catalog's: what others have planted in a schema that everybody may
    write to does not become part of a function."""
    conn.execute("set local search_path = pg_catalog, pg_temp")


def installed(conn: Connection) -> tuple[str | None, str | None]:
    """The newest revision this database has, and the version its functions are of, if that is known; for
    `schema.check`. Neither where pg_almanac is not installed."""
    try:
        with conn.transaction():
            row = conn.execute("select almanac.revision(), almanac.installed_version()").fetchone()
            return row or (None, None)
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        return None, None
    except psycopg.errors.InsufficientPrivilege as error:
        raise errors.CannotConnect(
            f'role "{conn.info.user}" may not use pg_almanac',
            hint=f'Let an administrator run: grant almanac_worker to "{conn.info.user}"; (or another of its roles)',
        ) from error


def note_version(conn: Connection, version: str | None) -> None:
    conn.execute("update almanac.migration set version = %s", [version])


def bind_grants(conn: Connection) -> list[str]:
    """After a restore on another server, let grants on queues mean its roles; returns names that mean none."""
    row = conn.execute("select almanac._bind_grants()").fetchone()
    return row[0] if row else []


@contextlib.contextmanager
def install_errors() -> Iterator[None]:
    """What the server says while installing, with its DETAIL and HINT, as one of our errors."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise cannot_connect(error) from error
        diag = error.diag
        hint = diag.message_hint
        if hint is None and isinstance(error, psycopg.errors.InsufficientPrivilege):
            hint = "The role must own the database, or a schema almanac in it, or: grant create on database ... to ...;"
        if hint is None and isinstance(error, psycopg.errors.DuplicateTable):
            hint = "The schema almanac is not one that pg_almanac made: rename it, or use another database."
        raise errors.from_database(error) or errors.InstallRefused(
            f"cannot install: {diag.message_primary or error}", detail=diag.message_detail, hint=hint
        ) from error


def drop_all_except(conn: Connection, functions: Sequence[str], views: Sequence[str]) -> None:
    """Drop functions and views that no file defines any more: an old signature must not stay as an overload."""
    doomed = conn.execute(
        """
        select 'pg_proc'::regclass::oid, oid
          from pg_proc
         where pronamespace = to_regnamespace('almanac')
           and oid not in (select to_regprocedure(name) from unnest(%(functions)s::text[]) as name
                            where to_regprocedure(name) is not null)
        union all
        select 'pg_class'::regclass::oid, oid
          from pg_class
         where relnamespace = to_regnamespace('almanac') and relkind = 'v' and relname <> all (%(views)s::text[])
        """,
        {"functions": list(functions), "views": list(views)},
    ).fetchall()
    _drop(conn, doomed)


def replace_all(conn: Connection, script: str, functions: Sequence[str], views: Sequence[str]) -> None:
    """Run a file of functions or views. What cannot be replaced in place (another result type, other argument names,
    other columns) is dropped first; that loses grants made on it by hand, so it is done only when needed."""
    try:
        with conn.transaction():
            run_script(conn, script)
    except (psycopg.errors.InvalidFunctionDefinition, psycopg.errors.InvalidTableDefinition):
        doomed = conn.execute(
            """
            select 'pg_proc'::regclass::oid, to_regprocedure(name)::oid from unnest(%s::text[]) as name
            union all
            select 'pg_class'::regclass::oid, to_regclass('almanac.' || name)::oid from unnest(%s::text[]) as name
            """,
            [list(functions), list(views)],
        ).fetchall()
        _drop(conn, [(kind, oid) for kind, oid in doomed if oid is not None])
        run_script(conn, script)


def _drop(conn: Connection, doomed: Sequence[tuple[int, int]]) -> None:
    """Drop functions and views with what depends on them inside the schema, all of which is made again afterwards.

    Something outside that depends on them belongs to the user and is never dropped: that is an error.
    """
    kinds, oids = [kind for kind, _ in doomed], [oid for _, oid in doomed]
    closure = conn.execute(
        """
        with recursive doomed (classid, objid) as (
            select kind, oid from unnest(%s::oid[], %s::oid[]) as given (kind, oid)
            union
            select case when rule.oid is null then depend.classid else 'pg_class'::regclass end,
                   coalesce(rule.ev_class, depend.objid)
              from doomed
              join pg_depend as depend on depend.refclassid = doomed.classid and depend.refobjid = doomed.objid
              left join pg_rewrite as rule on depend.classid = 'pg_rewrite'::regclass and rule.oid = depend.objid
             where depend.deptype in ('n', 'a', 'i')
        )
        select doomed.objid, pg_describe_object(doomed.classid, doomed.objid, 0),
               case when doomed.classid = 'pg_proc'::regclass then 'routine ' || doomed.objid::regprocedure::text
                    when view.relkind = 'v' then 'view ' || doomed.objid::regclass::text
               end,
               coalesce(function.pronamespace, view.relnamespace, type.typnamespace, hooked.relnamespace)
               is not distinct from to_regnamespace('almanac')
          from doomed
          left join pg_proc as function on doomed.classid = 'pg_proc'::regclass and function.oid = doomed.objid
          left join pg_class as view
            on doomed.classid = 'pg_class'::regclass and view.oid = doomed.objid and view.relkind = 'v'
          left join pg_type as type on doomed.classid = 'pg_type'::regclass and type.oid = doomed.objid
          left join pg_trigger as trigger on doomed.classid = 'pg_trigger'::regclass and trigger.oid = doomed.objid
          left join pg_class as hooked on hooked.oid = trigger.tgrelid
        """,
        [kinds, oids],
    ).fetchall()
    if foreign := sorted(description for _, description, _, ours in closure if not ours):
        raise errors.InstallRefused(
            "something outside of pg_almanac depends on a function or view that this version replaces",
            detail="It is: " + ", ".join(foreign) + ".",
            hint="Drop it, migrate, and make it again.",
        )
    for statement in (f"drop {what} cascade" for _, _, what, _ in closure if what):
        with contextlib.suppress(psycopg.errors.UndefinedFunction, psycopg.errors.UndefinedTable), conn.transaction():
            conn.execute(sql.SQL(statement))


def create_database_if_missing(conn: Connection, name: str) -> None:
    if conn.execute("select from pg_database where datname = %s", [name]).fetchone() is None:
        conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
