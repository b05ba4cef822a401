"""Servers that are there to be restarted, and a PgBouncer in front of one."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from pyclient import embedded
from pyclient.migrate import migrate
from tests import servers
from tests.workers import wait_until


@dataclass
class Breakable:
    """A server of one's own. Writes reach the disk before they are acknowledged, as in production."""

    server: servers.Server
    dsn: str

    def ctl(self, *arguments: str) -> None:
        assert self.server.bin_dir is not None
        assert self.server.data_dir is not None
        log = self.server.data_dir.parent / "restarts.log"
        command: list[str | Path] = [
            self.server.bin_dir / "pg_ctl",
            "-D",
            self.server.data_dir,
            "-w",
            "-t",
            "30",
            "-l",
            log,
            *arguments,
        ]
        # Not through pipes: the server would inherit them, and their end would be waited for.
        done = embedded.account().run(
            command, capture_output=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"pg_ctl {arguments} failed:\n{log.read_text()[-2000:] if log.exists() else None}"

    def stop(self, mode: str = "fast") -> None:
        self.ctl("stop", "-m", mode)

    def start(self) -> None:
        self.ctl("start")

    def crash(self) -> None:
        """kill -9 of the postmaster. Its sessions end when they notice."""
        assert self.server.data_dir is not None
        lock = self.server.data_dir / "postmaster.pid"
        pid = int(lock.read_text().split("\n")[0])
        os.kill(pid, signal.SIGKILL)
        # One that is still listed, waiting for its parent, would count as running.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        wait_until(lambda: not _exists(pid))

    def start_after_crash(self) -> None:
        """As soon as the last session of the server that crashed has let go of its memory."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.start()
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def processes(self) -> list[int]:
        """The postmaster, then everything that it has started."""
        assert self.server.data_dir is not None
        postmaster = int((self.server.data_dir / "postmaster.pid").read_text().split("\n")[0])
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [[int(number) for number in line.split()] for line in listed.splitlines()]
        return [postmaster, *(pid for pid, parent in pairs if parent == postmaster)]

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(statement.encode())


@contextlib.contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """SIGSTOP: their connections stay open and say nothing."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def breakable(request: pytest.FixtureRequest) -> Iterator[Callable[..., Breakable]]:
    """`breakable()`: a server with pg_almanac in its database `work`."""
    choice = servers.Choice(request.config.getoption("--pg"))
    binaries = choice.binaries or servers.local_binaries() or servers.embedded_binaries()
    if binaries is None:
        pytest.skip("no server binaries on this machine: a container is not ours to crash")
    with contextlib.ExitStack() as stack:

        def make(**settings: str) -> Breakable:
            durable = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
            server = stack.enter_context(binaries.start(**(durable | settings)))
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("create database work")
            made = Breakable(server, server.dsn_of("work"))
            migrate(made.dsn)

            def stop() -> None:
                with contextlib.suppress(AssertionError):
                    made.stop("immediate")

            stack.callback(stop)
            return made

        yield make


class Pooled(NamedTuple):
    """A server behind PgBouncer in transaction mode: three of its sessions, shared by all."""

    behind: Breakable
    dsn: str
    restart: Callable[[], None]
    pid: Callable[[], int]


@pytest.fixture
def pgbouncer(breakable: Callable[..., Breakable]) -> Iterator[Pooled]:
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("no pgbouncer on this machine")
    behind = breakable()
    who = embedded.account()
    folder = Path(tempfile.mkdtemp(prefix="almanac-pgbouncer-"))
    folder.chmod(0o755)
    who.own(folder)
    port = servers.free_port()
    assert behind.server.data_dir is not None
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(f"""
[databases]
work = host={behind.server.data_dir.parent} port={behind.server.port} dbname=work
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 3
max_client_conn = 200
""")
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(
            subprocess.Popen(
                [program, str(folder / "pgbouncer.ini")],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                **who.process_options(),
            )
        )  # fmt: skip
        servers.wait_until_ready(dsn)

    def stop() -> None:
        for process in running:
            process.kill()
            process.wait(10)
        running.clear()

    def restart() -> None:
        stop()
        start()

    dsn = f"postgresql://postgres@127.0.0.1:{port}/work"
    # PostgreSQL refuses a startup parameter that the pooler cannot pass on; wait_until_ready sends none.
    start()
    try:
        yield Pooled(behind, dsn, restart, lambda: running[0].pid)
    finally:
        stop()
        shutil.rmtree(folder, ignore_errors=True)
