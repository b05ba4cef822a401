"""Runs an example app and shows on the terminal what the database writes down, as it happens; Ctrl-C ends it."""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from pyclient import embedded, settings
from pyclient.migrate import migrate

TICKS = """
    select decided_at, schedule, decision, job_id, count(*), max(reason)
      from almanac.tick where queue = %(queue)s and decided_at > %(after)s
     group by decided_at, schedule, decision, job_id order by decided_at
"""
ENDED = """
    select log.finished_at, job.job_type, log.outcome, log.job_id, log.attempt, job.max_attempts, job.result, log.error,
           job.due_at
      from almanac.attempt_log as log
     cross join lateral almanac.job(log.queue, log.job_id) as job
     where log.queue = %(queue)s and log.finished_at > %(after)s order by log.finished_at
"""


def run(app: str, queue: str) -> None:
    """The database, a worker on `app` as another process, and the story of `queue` until Ctrl-C."""
    where = settings.load()
    try:
        print(
            "starting PostgreSQL ..." if where.dsn is None else f"using the database of {where.dsn_source}", flush=True
        )
        if where.dsn is not None:
            tell(where.dsn, app, queue)
        else:
            with embedded.server(where.data_dir) as dsn:
                print("this PostgreSQL has no pg_cron, so the worker makes the schedules tick")
                tell(dsn, app, queue)
                print("stopping PostgreSQL ...")
    except KeyboardInterrupt:
        pass
    if where.dsn is None:
        print("\nEverything is still there. To go on:")
        print("    make demo                             the schedules go on where they stopped")
        print(f"    {pyclient() + ' psql':<37} look around; for example: select * from almanac.queue_overview;")
    print("    README.md, sql/README.md, docs/       what else there is")


def tell(dsn: str, app: str, queue: str) -> None:
    migrate(dsn)
    print(f"in another terminal, while this runs:  psql {shlex.quote(dsn)}")
    print("Ctrl-C ends it.\n", flush=True)
    command = [sys.executable, "-m", "pyclient", "--dsn", dsn, "worker", "--app", app, "--queue", queue]
    worker = subprocess.Popen([*command, "--grace", "1", "--log-level", "error"], cwd=Path(__file__).parent)
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for line in story(conn, queue):
                print(line, flush=True)
                if worker.poll() is not None:
                    sys.exit("the worker ended")
    except KeyboardInterrupt:  # the worker got it too, and lets go of what it holds
        print()
    finally:
        worker.terminate()
        worker.wait()


def story(conn: psycopg.Connection[Any], queue: str) -> Iterator[str]:
    """A line for each tick that was decided and each attempt that ended, from now on."""
    (now,) = conn.execute("select almanac.clock()").fetchone() or (None,)
    seen = {TICKS: now, ENDED: now}
    while True:
        lines = []
        for query, describe in ((TICKS, tick_line), (ENDED, attempt_line)):
            for at, *row in conn.execute(query.encode(), {"queue": queue, "after": seen[query]}):
                lines.append((at, describe(*row)))
                seen[query] = at
        for at, line in sorted(lines):
            yield f"{at.astimezone():%H:%M:%S}  {line}"
        time.sleep(0.2)


def tick_line(schedule: str, decision: str, job: int | None, count: int, reason: str | None) -> str:
    what = f"-> job {job}" if job else f"({count} missed; {reason})"
    return f"tick    {schedule:<13} {decision} {what}"


def attempt_line(
    job_type: str, outcome: str, job: int, attempt: int, attempts: int, result: Any, error: str | None, due_at: Any
) -> str:
    what = f"job {job} {outcome}"
    if outcome == "completed":
        return f"job     {job_type:<13} {what}" + (f": {result}" if result else "")
    return f"job     {job_type:<13} {what}, attempt {attempt} of {attempts}: {(error or '').splitlines()[0]}"


def pyclient() -> str:
    command = Path(sys.executable).parent / "pyclient"
    return str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else "pyclient"
