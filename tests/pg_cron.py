"""pg_cron as tests need it: with no job, listening, or deaf."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

# Any database of the server will do. More than the 4,096 messages that PostgreSQL keeps for a process that is behind.
A_LOT_OF_NEWS = """
do $$
begin
    for i in 1 .. 2500 loop
        execute format('create function public.news_%s() returns integer language sql return 1', i);
    end loop;
end
$$
"""


def forget_jobs(conn: psycopg.Connection[Any]) -> None:
    conn.execute("delete from cron.job")
    end_loops(conn)
    conn.execute("delete from cron.job_run_details")


def end_loops(conn: psycopg.Connection[Any]) -> None:
    """A loop of pg_cron 1.4 would go on to the end of its minute, and hold up the next one."""
    running = """select pg_terminate_backend(pid) from pg_stat_activity
                  where datname = current_database() and query ~ '_tick_' and pid <> pg_backend_pid()"""
    assert _within(10, lambda: not conn.execute(running).fetchall()), "pg_cron's loop does not end"


class Launcher:
    """pg_cron's launcher, and whether it has read its jobs: 1.4 shows when, 1.6 begins to run them within a second."""

    def __init__(
        self, conn: psycopg.Connection[Any], send: Callable[[int, signal.Signals], None] | None = None
    ) -> None:
        """`send` is how to send it a signal, where it is not a process of this machine."""
        self.conn = conn
        self.send = send or self._kill

    def _shown(self) -> tuple[Any, ...] | None:
        return self.conn.execute(
            """select pid, state_change, (select count(*) from cron.job_run_details where command ~ 'almanac')
                 from pg_stat_activity where backend_type = 'pg_cron launcher'"""
        ).fetchone()

    def _reads_within(self, seconds: float, before: tuple[Any, ...] | None) -> bool:
        return _within(seconds, lambda: self._shown() not in (None, before))

    @contextlib.contextmanager
    def reads_its_jobs(self, expected: bool = True) -> Iterator[None]:
        """Because of what the block commits, or not even then."""
        before = self._shown()
        yield
        assert self._reads_within(10 if expected else 2.5, before) is expected

    def hears(self, news: Callable[[], Any]) -> bool:
        """Once: it may miss news that come among many others, and whoever tells it may have to tell it again."""
        before = self._shown()
        news()
        return self._reads_within(2.5, before)

    def shows_when_it_reads(self) -> bool:
        """Also when it finds no job to run. Later versions show only what they run."""
        row = self.conn.execute("select extversion < '1.5' from pg_extension where extname = 'pg_cron'").fetchone()
        assert row is not None
        return bool(row[0])

    def catch_up(self) -> None:
        """An installation is more news than it can hear at once, and it would miss what comes right after."""
        heard = self._hears_a_change if self.shows_when_it_reads() else self._runs_a_job
        assert any(heard() for _ in range(10)), f"pg_cron's launcher does not read its jobs: {self._shown()}"
        forget_jobs(self.conn)

    def _hears_a_change(self) -> bool:
        return self.hears(lambda: self.conn.execute("update cron.job set active = active"))

    def _runs_a_job(self) -> bool:
        self.conn.execute("select cron.schedule('probe', '1 second', 'select 1')")
        done = "select from cron.job_run_details where status = 'succeeded' limit 1"
        return _within(3, lambda: self.conn.execute(done).fetchone() is not None)

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """In the block it does not hear the news, of which there are too many; afterwards it listens again."""
        shown = self._shown()
        assert shown, "pg_cron's launcher does not run"
        self.send(shown[0], signal.SIGSTOP)
        try:
            self.conn.execute(A_LOT_OF_NEWS)
            yield
        finally:
            self.send(shown[0], signal.SIGCONT)

    def _kill(self, pid: int, number: signal.Signals) -> None:
        # In a container it has another number, which here may be anybody's.
        process = Path(f"/proc/{pid}/cmdline")
        if not process.exists() or "pg_cron launcher" not in process.read_text():
            pytest.skip("pg_cron's launcher is not a process of this machine")
        os.kill(pid, number)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
