"""The command `pyclient`. The only package that parses arguments and prints.

Each topic has its module with one or more click commands; this one ties them together and turns errors into one line
and exit code 2.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import click
import psycopg
import psycopg.errors

from pyclient import __version__, embedded, errors, settings


class App:
    """What every command gets (`@click.pass_obj`): the settings, and the database they lead to."""

    def __init__(self, dsn: str | None) -> None:
        self.settings = settings.load(dsn)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The DSN to use. Without one an embedded server runs for as long as this lasts."""
        if self.settings.dsn is not None:
            yield self.settings.dsn
            return
        with embedded.server(self.settings.data_dir) as dsn:
            yield dsn


class Commands(click.Group):
    """Errors that somebody can act on become one line on stderr and exit code 2; a traceback stays a bug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.AlmanacError as error:
            refuse(error)
        except (psycopg.OperationalError, psycopg.errors.InsufficientPrivilege) as error:
            diag = error.diag
            message = diag.message_primary or str(error)
            refuse(errors.AlmanacError(message, detail=diag.message_detail, hint=diag.message_hint))
        except psycopg.errors.UndefinedFunction as error:
            refuse(errors.SchemaMismatch(error.diag.message_primary or str(error), hint="Run: pyclient migrate"))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # What is left in the buffer would be tried again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            refuse(errors.AlmanacError(f"cannot write: {error.strerror}", hint="Make room, and try again."))
        except UnicodeEncodeError as error:
            if not error.reason.startswith("surrogates"):
                raise
            # How Python shows bytes of the command line that are no text.
            refuse(errors.AlmanacError(f"an argument is not text: {error.object!a}", hint="Give it in UTF-8."))


def refuse(error: errors.AlmanacError) -> NoReturn:
    parts = (error.message, error.detail, error.hint)
    click.echo("pyclient: " + " · ".join(" ".join(part.split()) for part in parts if part), err=True)
    sys.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pyclient")
@click.option("--dsn", help="Database to use; else ALMANAC_DSN, else DATABASE_URL, else an embedded server.")
@click.pass_context
def main(ctx: click.Context, dsn: str | None) -> None:
    """pg_almanac: schedules and jobs kept by PostgreSQL."""
    ctx.obj = App(dsn)


# After main and App, which the modules import.
from pyclient.cli import cron, install, worker  # noqa: E402

main.add_command(cron.cron)
main.add_command(install.migrate)
main.add_command(install.check)
main.add_command(install.sql)
main.add_command(install.psql)
main.add_command(install.psql_line)
main.add_command(worker.worker)
