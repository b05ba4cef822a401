"""migrate, sql, psql-line: getting pg_almanac into a database, and getting at it."""

import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pyclient.cli import App


@click.command()
@click.pass_obj
def migrate(app: "App") -> None:
    """Install pg_almanac, or bring it to this version. All or nothing; safe to repeat."""
    from pyclient.migrate import migrate

    with app.database() as dsn:
        done = migrate(dsn)
    step = f"stays at revision {done.after}" if done.before == done.after else f"is now at revision {done.after}"
    click.echo(f"schema almanac {step}; functions are those of this version")


@click.command()
@click.pass_obj
def check(app: "App") -> None:
    """Say whether the schema in the database is the one this version needs; exit code 2 if not."""
    from pyclient import database
    from pyclient.migrate import check, head

    with app.database() as dsn, database.connect(dsn) as conn:
        warning = check(database.installed_revision(conn))
    click.echo(warning or f"schema almanac is at revision {head()}, as this pyclient needs it")


@click.command()
def sql() -> None:
    """Print one self-contained installer, for psql -f or any driver."""
    from pyclient.migrate import installer

    click.echo(installer(), nl=False)


@click.command("psql-line")
@click.pass_obj
def psql_line(app: "App") -> None:
    """Print the psql command for this database."""
    with app.database() as dsn:
        click.echo(f"psql {shlex.quote(dsn)}")
