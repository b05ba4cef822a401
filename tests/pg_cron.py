"""pg_cron as tests need it: with no job, listening, or deaf."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
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
    deadline = time.monotonic() + 10
    while conn.execute(running).fetchall():
        assert time.monotonic() < deadline, "pg_cron's loop does not end"
        time.sleep(0.1)


class Launcher:
    """pg_cron's launcher. It shows when it last read its jobs, which is all it does while it runs none."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def _shown(self) -> tuple[int, datetime] | None:
        return self.conn.execute(
            "select pid, state_change from pg_stat_activity where backend_type = 'pg_cron launcher'"
        ).fetchone()

    def _reads_within(self, seconds: float, before: tuple[int, datetime] | None) -> bool:
        deadline = time.monotonic() + seconds
        while (shown := self._shown()) is None or shown == before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @contextlib.contextmanager
    def reads_its_jobs(self, expected: bool = True) -> Iterator[None]:
        """Because of what the block commits, or not even then."""
        before = self._shown()
        yield
        assert self._reads_within(10 if expected else 2.5, before) is expected

    def catch_up(self) -> None:
        """An installation is more news than it can hear at once, and it would miss what comes right after."""
        for _ in range(10):
            before = self._shown()
            self.conn.execute("update cron.job set active = active")
            if self._reads_within(2.5, before):
                return
        raise AssertionError(f"pg_cron's launcher does not read its jobs: {self._shown()}")

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """In the block it does not hear the news, of which there are too many; afterwards it listens again."""
        shown = self._shown()
        assert shown, "pg_cron's launcher does not run"
        try:
            os.kill(shown[0], signal.SIGSTOP)
        except (ProcessLookupError, PermissionError):
            pytest.skip("pg_cron's launcher is not a process of this machine")
        try:
            self.conn.execute(A_LOT_OF_NEWS)
            yield
        finally:
            os.kill(shown[0], signal.SIGCONT)
