"""Install and upgrade: pending revisions of the tables, then every function as it is today. All of it, or nothing."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import alembic.command
import alembic.config
import alembic.op
import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.pool

from pyclient import database, errors, files, schema
from pyclient.schema import check, head, known

__all__ = ["Migrated", "check", "head", "installer", "known", "migrate", "run_sql"]


@dataclass(frozen=True)
class Migrated:
    """Revisions of the tables, and the version of the package whose functions they have now, if that is known."""

    before: str | None
    after: str
    version: str | None
    #: Names in grants on queues that mean no role of this server.
    unbound: tuple[str, ...] = ()


def migrate(dsn: str, *, downgrade: bool = False) -> Migrated:
    """Bring the database at `dsn` to `head()`. Safe to run again, and from several places at once. Functions of a newer
    version are replaced only by a `downgrade`: programs of that version would miss them."""
    with database.connect(dsn, autocommit=False) as conn, _for_alembic(conn) as alembic_connection:
        database.trust_the_catalog_only(conn)
        with database.install_errors():
            for file in files.bootstrap_files():
                database.run_script(conn, file.text())
        before, version = database.installed(conn)
        if before is not None and not known(before):
            raise errors.SchemaMismatch(
                f"the database has revision {before}, which this pyclient does not know (it brings {head()})",
                detail="A newer pyclient has migrated it.",
                hint="Install the newer version: pip install --upgrade pg-almanac",
            )
        if schema.compared(version) > 0 and not downgrade:
            raise errors.SchemaMismatch(
                f"the database has the functions of {version}, newer than this pyclient's {schema.VERSION}",
                hint="Install the newer version: pip install --upgrade pg-almanac, or say --downgrade.",
            )
        with database.install_errors():
            _run_revisions(alembic_connection)
            _replace_functions(conn)
            database.note_version(conn, schema.VERSION)
            unbound = database.bind_grants(conn)
        alembic_connection.commit()
        return Migrated(before, head(), schema.VERSION, tuple(unbound))


def defined_functions(script: str) -> list[str]:
    """The functions a file defines, as `almanac.name(types)`: each has a comment, and comments name the types."""
    return [
        " ".join(signature.split())
        for signature in re.findall(
            r"^comment on (?:function|procedure)\s+(almanac\.\w+\s*\([^)]*\))", script, re.MULTILINE
        )
    ]


def defined_views(script: str) -> list[str]:
    return re.findall(r"^create (?:or replace )?view\s+almanac\.(\w+)", script, re.MULTILINE)


def _replace_functions(conn: database.Connection) -> None:
    scripts = [file.text() for file in files.function_files()]
    everything = "\n".join(scripts)
    database.drop_all_except(conn, defined_functions(everything), defined_views(everything))
    for script in scripts:
        database.replace_all(conn, script, defined_functions(script), defined_views(script))


@contextlib.contextmanager
def _for_alembic(conn: database.Connection) -> Iterator[sqlalchemy.Connection]:
    """`conn` as SQLAlchemy sees it. Opened before any work: on first sight SQLAlchemy rolls back."""
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: conn, poolclass=sqlalchemy.pool.StaticPool, pool_reset_on_return=None
    )
    with engine.connect() as connection:
        yield connection


def _run_revisions(connection: sqlalchemy.Connection) -> None:
    """Alembic, inside the transaction that is already open."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(files.folder("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, "head")
    except sqlalchemy.exc.DBAPIError as error:  # what the server said, without SQLAlchemy around it
        raise error.orig or error from error


def run_sql(script: str) -> None:
    """For revisions: send SQL as it stands. `op.execute` would read `:name`, `exec_driver_sql` would read `%`."""
    connection = alembic.op.get_bind().connection.driver_connection
    assert connection is not None
    database.run_script(cast(database.Connection, connection), script)


def installer() -> str:
    """sql/install.sql with every file in its place: runs with psql -f, or through any driver as one script."""
    folder = files.folder("sql")
    lines: list[str] = []
    for line in (folder / "install.sql").read_text(encoding="utf-8").splitlines():
        if line.startswith("\\ir "):
            name = line.removeprefix("\\ir ").strip()
            lines += [f"-- ── {name} " + "─" * (112 - len(name)), (folder / name).read_text(encoding="utf-8")]
        elif not line.startswith(("\\", "-- ")):
            lines.append(line)
    # psql would go on after an error, and end as if there had been none; a line that stops it is none for a driver.
    how = "-- Run it on an empty place with psql -v ON_ERROR_STOP=1 -f or any driver.\n"
    return "-- pg_almanac, installer in one file.\n" + how + "\n".join(lines)
