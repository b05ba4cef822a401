"""worker: run handlers for what is due."""

import importlib
import logging
import math
import os
import sys
import traceback
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
import psycopg

from pyclient import errors, settings
from pyclient.app import Almanac

if TYPE_CHECKING:
    from pyclient.cli import App


def weighted(value: str) -> tuple[str, float]:
    """`name` or `name=weight`."""
    name, separator, weight = value.rpartition("=")
    if not separator:
        if not weight:
            raise click.BadParameter("a queue has a name")
        return weight, 1.0
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not name or not 0 < number < float("inf"):
        raise click.BadParameter(f"{value!r} is not NAME or NAME=WEIGHT with a weight above 0")
    return name, number


def named(value: str) -> str:
    """`module` or `module:name`."""
    if not value or value.startswith((":", ".")):
        raise click.BadParameter(f"{value!r} is not MODULE:NAME; packages are written out, such as shop.jobs:app")
    return value


class Seconds(click.FloatRange):
    """`nan` is neither below nor above a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number


@click.command()
@click.option(
    "--app", "apps", multiple=True, type=named, metavar="MODULE:NAME", help="The Almanac to run; several are combined."
)
@click.option(
    "--queue", "queues", multiple=True, type=weighted, metavar="NAME[=WEIGHT]", help="Default: those of the app."
)
@click.option(
    "--concurrency", default=50, show_default=True, type=click.IntRange(1), help="Handlers at once, a process."
)
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Processes to keep running.")
@click.option("--supervise/--no-supervise", default=True, help="Replace a process that dies (on by default).")
@click.option("--burst", is_flag=True, help="Exit when nothing is due.")
@click.option("--grace", default=25.0, show_default=True, type=Seconds(0), help="Seconds to finish on SIGTERM.")
@click.option(
    "--lease",
    type=Seconds(1, timedelta(days=30).total_seconds()),
    help="Seconds of a lease; default: that of the type or the queue.",
)
@click.option("--prefetch", default=1000, show_default=True, type=click.IntRange(0), help="Most jobs fetched ahead.")
@click.option("--poll", default=5.0, show_default=True, type=Seconds(0.05, 86_400), help="Longest sleep, in seconds.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve /metrics and /healthz; process n of N uses the port + n - 1.",
)
@click.option("--log-format", type=click.Choice(["auto", "human", "json"]), default="auto", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.pass_obj
def worker(
    app: "App",
    apps: tuple[str, ...],
    queues: tuple[tuple[str, float], ...],
    concurrency: int,
    processes: int,
    supervise: bool,
    burst: bool,
    grace: float,
    lease: float | None,
    prefetch: int,
    poll: float,
    metrics_port: int | None,
    log_format: str,
    log_level: str,
) -> None:
    """Run the handlers of --app for what is due.

    Without --app the built-in handlers run: `log` writes a line, `http` (with pg-almanac[http]) calls a URL.
    """
    from pyclient.observe import logs
    from pyclient.worker import Options
    from pyclient.worker import supervise as keep_running
    from pyclient.worker.process import leave, run

    if processes > 1 and not supervise:
        raise click.UsageError("--no-supervise runs one process; leave out --processes")
    if metrics_port and metrics_port + processes - 1 > 65535:
        raise click.UsageError(f"--metrics-port: the last process would need port {metrics_port + processes - 1}")
    logs.setup(log_format, log_level)

    def work(number: int, lifeline: int | None, dsn: str) -> int:
        try:
            combined = load(apps)
            options = Options(
                queues=dict(queues) or dict.fromkeys(combined.queues(), 1.0) or {"default": 1.0},
                concurrency=concurrency,
                prefetch=prefetch,
                lease=None if lease is None else timedelta(seconds=lease),
                grace=grace,
                poll=poll,
                burst=burst,
                number=number,
                metrics_port=metrics_port,
            )
            return run(combined, dsn, options, lifeline=lifeline)
        except errors.AlmanacError as error:
            from pyclient.cli import refuse

            refuse(error)

    with app.database() as dsn:
        if app.settings.dsn is None:
            logging.getLogger("pyclient.worker").info(
                "embedded server without pg_cron: the workers tick data=%s", app.settings.data_dir
            )
        check_schema(dsn)
        if supervise:
            code = keep_running(processes, lambda number, lifeline: work(number, lifeline, dsn), grace)
        else:
            code = work(0, None, dsn)
    leave(code)


def check_schema(dsn: str) -> None:
    """Before the first claim, while somebody is looking: no database, or one without our tables, is an error now.

    Later the worker waits for a database that went away.
    """
    from pyclient import database
    from pyclient.schema import check

    with database.connect(dsn) as conn:
        if warning := check(*database.installed(conn)):
            logging.getLogger("pyclient.worker").warning(warning)


def load(names: tuple[str, ...]) -> Almanac:
    """The apps as one, with the built-in handlers whose names are free."""
    from pyclient.handlers import builtin

    # As `python -m` does: the application is where the command is run.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    combined = Almanac()
    for name in names:
        combined.include(_find(name))
    builtin(combined, settings.http_policy())
    return combined


def _find(name: str) -> Almanac:
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        hint = "Say --app module:name, without .py." if module.endswith(".py") else "Run it where the module is."
        raise errors.AppNotFound(f"--app {name}: there is no module {module}", hint=hint) from error
    except SystemExit as error:
        # The next process would do the same, and one that ends with 0 would look as if it was asked to.
        raise errors.AppNotFound(
            f"--app {name}: its module calls sys.exit({'' if error.code is None else repr(error.code)})",
            hint="A module that is imported must not end the program.",
        ) from error
    except (OSError, psycopg.Error):  # of the world outside: the next process may have more luck
        raise
    except Exception as error:
        raise _broken(name, error) from error
    found = getattr(imported, attribute or "app", None)
    if found is None:
        raise errors.AppNotFound(f"--app {name}: {module} has no {attribute or 'app'}", hint="Say --app module:name.")
    if not isinstance(found, Almanac):
        raise errors.AppNotFound(
            f"--app {name}: that is a {type(found).__name__}, not an Almanac", hint="Say --app module:name."
        )
    return found


def _broken(name: str, error: Exception) -> errors.AppNotFound:
    """A mistake in the application's code stays one: said once, not by one process after the other."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_code.co_filename.startswith("<frozen importlib") or _ours(trace)):
        trace = trace.tb_next
    click.echo("".join(traceback.format_exception(error.with_traceback(trace))), nl=False, err=True)
    return errors.AppNotFound(f"--app {name}: its module cannot be imported", hint="See the traceback above.")


def _ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_globals.get("__name__") in (__name__, "importlib")
