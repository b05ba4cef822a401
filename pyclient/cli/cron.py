"""cron check, next, describe: what the database makes of a cron expression, and where croniter alone would disagree.

The database decides; croniter is what many a Python program would have asked instead, so its different answers are
worth knowing before a schedule moves here.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
import psycopg

if TYPE_CHECKING:
    from pyclient import database
    from pyclient.cli import App

# As runs are printed, with or without the seconds and the Z.
INSTANTS = [f"%Y-%m-%d{time}" for time in ("T%H:%M:%SZ", "T%H:%MZ", "T%H:%M:%S", "T%H:%M", " %H:%M:%S", " %H:%M", "")]

timezone_option = click.option(
    "--timezone", "-z", default="UTC", show_default=True, help="A name such as Europe/Paris."
)
gap_option = click.option(
    "--dst-gap",
    type=click.Choice(["after", "skip"]),
    default="after",
    show_default=True,
    help="Local times that the clocks leave out.",
)
overlap_option = click.option(
    "--dst-overlap",
    type=click.Choice(["first", "second", "both"]),
    default="first",
    show_default=True,
    help="Local times shown twice.",
)


@click.group()
def cron() -> None:
    """Ask the database what a cron expression means."""


@cron.command()
@click.argument("expression")
@timezone_option
@gap_option
@overlap_option
@click.pass_obj
def check(app: "App", expression: str, timezone: str, dst_gap: str, dst_overlap: str) -> None:
    """Say whether EXPRESSION is valid, what it means and when it runs next; exit code 2 if it is refused."""
    from pyclient import database

    with _connection(app) as conn:

        def preview(count: int, after: datetime | None = None) -> "list[database.PreviewedRun]":
            return database.preview_cron(
                conn,
                cron=expression,
                timezone=timezone,
                count=count,
                after=after,
                dst_gap=dst_gap,
                dst_overlap=dst_overlap,
            )

        sentence = database.describe_cron(conn, cron=expression)
        runs = preview(100)
        # The nights that matter, once for rules with few runs a day and once for those with many.
        nights = [
            preview(count, change - timedelta(hours=hours))
            for change in _changes(timezone, runs[0].run_at)
            for hours, count in ((26, 30), (2, 300))
        ]
    click.echo(f"valid: {sentence}")
    click.echo(f"kind:  {_kind(runs[0].rule_kind, dst_gap, dst_overlap)}")
    click.echo(f"next:  {_line(runs[0])}")
    year = runs[0].run_at + timedelta(days=366)
    noted = [_line(run) for night in nights for run in night if run.note and run.run_at < year]
    for line in list(dict.fromkeys(noted))[:4]:
        click.echo(f"later: {line}")
    _compare(expression, timezone, [runs, *nights])


@cron.command("next")
@click.argument("expression")
@timezone_option
@click.option("--count", "-n", type=click.IntRange(1, 10_000), default=10, show_default=True, help="How many runs.")
@click.option(
    "--after",
    type=click.DateTime(INSTANTS),
    metavar="INSTANT",
    help="Runs after this instant, in UTC (2027-03-14T05:30Z), or after this date began; else after now.",
)
@gap_option
@overlap_option
@click.pass_obj
def next_(
    app: "App",
    expression: str,
    timezone: str,
    count: int,
    after: datetime | None,
    dst_gap: str,
    dst_overlap: str,
) -> None:
    """Print the coming runs of EXPRESSION: local time, offset, UTC, and a note where the clocks change."""
    from pyclient import database

    with _connection(app) as conn:
        runs = database.preview_cron(
            conn,
            cron=expression,
            timezone=timezone,
            count=count,
            after=after.replace(tzinfo=UTC) if after else None,
            dst_gap=dst_gap,
            dst_overlap=dst_overlap,
        )
    for run in runs:
        click.echo(_line(run))
    _compare(expression, timezone, [runs])


@cron.command()
@click.argument("expression")
@click.pass_obj
def describe(app: "App", expression: str) -> None:
    """Print EXPRESSION as an English sentence."""
    from pyclient import database

    with _connection(app) as conn:
        click.echo(database.describe_cron(conn, cron=expression))


def _kind(rule_kind: str, dst_gap: str, dst_overlap: str) -> str:
    """What becomes of a rule of this kind when the clocks change."""
    if rule_kind == "wildcard":
        return "wildcard: runs at every real instant whose local time matches"
    if rule_kind == "elapsed":
        return "elapsed: counts real time, whatever the clocks show"
    if (dst_gap, dst_overlap) == ("after", "first"):
        return "fixed: each local time runs once, also on the days when the clocks change"
    missing = {"after": "runs after the gap", "skip": "is skipped"}[dst_gap]
    twice = {"first": "the first time", "second": "the second time", "both": "both times"}[dst_overlap]
    return f"fixed: a local time that the clocks leave out {missing}, one that they show twice runs {twice}"


@contextlib.contextmanager
def _connection(app: "App") -> Iterator["database.Connection"]:
    """A connection to a database that has pg_almanac; an embedded one gets it here, as it is ours to change."""
    from pyclient import database, migrate

    with app.database() as dsn, database.connect(dsn) as conn:
        installed = database.installed(conn)
        if app.settings.dsn is None and installed[0] is None:
            migrate.migrate(dsn)
        else:
            migrate.check(*installed)
        try:
            yield conn
        except psycopg.DataError as error:
            said = (error.diag.message_primary or str(error), error.diag.message_detail)
            raise click.UsageError(". ".join(filter(None, said))) from error


def _line(run: "database.PreviewedRun") -> str:
    note = f"  {run.note}" if run.note else ""
    return f"{run.local_time:%a %Y-%m-%d %H:%M:%S} {run.utc_offset}  {run.utc_time:%Y-%m-%dT%H:%M:%S}Z{note}"


def _changes(timezone: str, start: datetime) -> Iterator[datetime]:
    """The changes of the clocks within a year, to the hour; none where Python does not know the zone."""
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError):
        return
    start = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    for hour in (start + timedelta(hours=n) for n in range(366 * 24)):
        if hour.astimezone(zone).utcoffset() != (hour + timedelta(hours=1)).astimezone(zone).utcoffset():
            yield hour + timedelta(hours=1)


def _compare(expression: str, timezone: str, stretches: Sequence[Sequence["database.PreviewedRun"]]) -> None:
    """Say where croniter, asked for the same runs, first gives another answer."""
    for run, there in itertools.chain.from_iterable(_croniter(expression, timezone, runs) for runs in stretches):
        if isinstance(there, str):
            click.echo(f"croniter alone would refuse it: {there}")
            return
        if there != run:
            here = f"{run:%Y-%m-%dT%H:%M:%S}Z"
            click.echo(f"croniter alone would run at {there:%Y-%m-%dT%H:%M:%S}Z where the database runs at {here}")
            return
    click.echo("croniter alone would agree on these runs")


def _croniter(
    expression: str, timezone: str, runs: Sequence["database.PreviewedRun"]
) -> Iterator[tuple[datetime, datetime | str]]:
    """Each run with croniter's answer, or with the reason why it has none.

    croniter starts just before the first run, so that only its reading of the expression is compared.
    """
    from croniter import croniter

    instants = [run.run_at.astimezone(UTC) for run in runs]
    try:
        zone = ZoneInfo(timezone)
        start = datetime.fromtimestamp(instants[0].timestamp() - 1, zone)
        there = croniter(expression, start, max_years_between_matches=50)
        for instant in instants:
            yield instant, there.get_next(datetime).astimezone(UTC)
    except (ValueError, KeyError, ArithmeticError, RecursionError) as error:
        # croniter's own errors are ValueErrors; others escape from inside it.
        yield instants[0], " ".join(str(error).split()) or type(error).__name__
