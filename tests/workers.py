"""Workers for the tests: in a thread of the test's process, or as a process of their own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from pyclient import Almanac
from pyclient.worker import Options, Worker

ROOT = Path(__file__).parent.parent


def wait_until(condition: Callable[[], Any], timeout: float = 20.0, pause: float = 0.01) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("this did not happen in time")
        time.sleep(pause)
    return found


class InThread:
    """A worker in a thread, on an event loop of its own."""

    def __init__(self, app: Almanac, dsn: str, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "queues": dict.fromkeys(app.queues(), 1.0) or {"default": 1.0},
            "poll": 1.0,
            "grace": 5.0,
        }
        self.worker = Worker(app, dsn, Options(**(defaults | options)))
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            work = asyncio.create_task(self.worker.run())
            while not hasattr(self.worker, "keeper") and not work.done():
                await asyncio.sleep(0.005)
                # A database that is not there yet is part of some tests.
                if not self.worker.state.is_up:
                    break
            self.ready.set()
            return await work

        try:
            with asyncio.Runner() as runner:
                self.exit_code = runner.run(main())
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    def stop(self) -> None:
        wait_until(lambda: hasattr(self.worker, "fetcher") or not self.thread.is_alive())
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.worker.stop)

    def join(self, timeout: float = 20.0) -> int | None:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the worker does not end"
        if self.error is not None:
            raise self.error
        return self.exit_code


@contextlib.contextmanager
def in_thread(app: Almanac, dsn: str, **options: Any) -> Iterator[InThread]:
    running = InThread(app, dsn, **options)
    running.thread.start()
    running.ready.wait(10)
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
        running.join()


def run_due(app: Almanac, dsn: str, **options: Any) -> Worker:
    """Work on everything that is due, then stop."""
    running = InThread(app, dsn, burst=True, **options)
    running.thread.start()
    running.join(30)
    return running.worker


class Process:
    """`pyclient worker` on a module written for the test."""

    def __init__(self, folder: Path, dsn: str, code: str, *options: str, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "handlers_under_test.py").write_text(HEAD + textwrap.dedent(code))
        self.log = folder / "worker.log"
        self.command = [sys.executable, "-m", "pyclient", "worker", "--app", "handlers_under_test:app"]
        self.command += ["--log-format", "human", *options]
        self.folder = folder
        self.environment = os.environ | {"ALMANAC_DSN": dsn, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.environment |= environment
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            # A session of its own, so that the supervisor and its children can be killed together.
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """kill -9, supervisor and all: what a power cut leaves behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def terminate(self, timeout: float = 40.0) -> int:
        self.process.terminate()
        return self.process.wait(timeout)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


HEAD = """
import asyncio, os, time
from pyclient import Almanac, Cancelled, JobContext, PermanentError, RetryAfter, Snooze
app = Almanac()
"""


@contextlib.contextmanager
def process(folder: Path, dsn: str, code: str, *options: str, **environment: str) -> Iterator[Process]:
    running = Process(folder, dsn, code, *options, **environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            try:
                running.process.wait(40)
            except subprocess.TimeoutExpired:
                running.kill()
        # Orphans of a supervisor that was killed stop by themselves; nothing of this test stays.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)


class Jobs:
    """What became of the jobs of a database."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, row_factory=namedtuple_row)

    def rows(self, query: str, *params: Any) -> list[Any]:
        return self.conn.execute(query.encode(), params or None).fetchall()

    def one(self, job: Any) -> Any:
        """The job wherever it is."""
        return self.rows("select * from almanac.job(queue => %s, job_id => %s)", job.queue, job.job_id)[0]

    def state(self, job: Any) -> str:
        return self.one(job).state  # type: ignore[no-any-return]

    def wait(self, job: Any, *states: str, timeout: float = 20.0) -> Any:
        wait_until(lambda: self.state(job) in states, timeout)
        return self.one(job)

    def counts(self) -> dict[str, int]:
        found = self.rows(
            "select state, count(*) as n from (select state from almanac.job union all "
            "select state from almanac.job_history) j group by state"
        )
        return {row.state: row.n for row in found}

    def close(self) -> None:
        self.conn.close()
