"""The embedded server: one for all processes, gone with the last of them, its data kept."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from pyclient import embedded, errors

HOLD = """
import sys
from pathlib import Path
from pyclient import embedded
with embedded.server(Path(sys.argv[1])) as dsn:
    print(dsn, flush=True)
    sys.stdin.readline()
"""


class Holder:
    """Another process that needs the server until it is told to end."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.dsn = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate("\n", timeout=30)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture
def home() -> Iterator[Path]:
    """Not tmp_path: as root the server runs as another user, who cannot look in there."""
    home = Path(tempfile.mkdtemp(prefix="almanac-home-"))
    home.chmod(0o755)
    yield home
    if pid := postmaster(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)
    shutil.rmtree(home, ignore_errors=True)


def postmaster(home: Path) -> int | None:
    for file in home.glob("*/data/postmaster.pid"):
        return int(file.read_text().split()[0])
    return None


def test_processes_share_one_server_and_the_last_one_stops_it(home):
    with ThreadPoolExecutor(3) as pool:
        holders = list(pool.map(Holder, [home] * 3))
    assert len({holder.dsn for holder in holders}) == 1
    first = postmaster(home)
    for holder in holders[:2]:
        holder.end()
        assert postmaster(home) == first
    with psycopg.connect(holders[2].dsn) as conn:
        assert conn.execute("select current_database()").fetchone() == ("almanac",)
    holders[2].end()
    assert postmaster(home) is None


def test_a_killed_process_is_not_counted(home):
    survivor, victim = Holder(home), Holder(home)
    victim.kill()
    assert postmaster(home) is not None
    survivor.end()
    assert postmaster(home) is None


def test_a_server_whose_last_user_was_killed_is_taken_over(home):
    Holder(home).kill()
    left = postmaster(home)
    assert left is not None
    heir = Holder(home)
    assert postmaster(home) == left
    heir.end()
    assert postmaster(home) is None


def test_data_is_kept_between_runs(home):
    for expected in (0, 1):
        with embedded.server(home) as dsn, psycopg.connect(dsn) as conn:
            conn.execute("create table if not exists kept (run int)")
            assert conn.execute("select count(*) from kept").fetchone() == (expected,)
            conn.execute("insert into kept values (1)")


def test_binaries_that_the_servers_user_cannot_reach_are_copied_with_their_libraries(home, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only for root the server runs as another user")
    installed = embedded.wheel_binaries()
    assert installed is not None
    with tempfile.TemporaryDirectory() as private:  # 0700, as root's home is
        hidden = embedded.copy_binaries(installed, Path(private))
        monkeypatch.setattr(embedded, "wheel_binaries", lambda: hidden)
        for _ in range(2):
            with embedded.server(home) as dsn, psycopg.connect(dsn) as conn:
                assert conn.execute("select 1").fetchone() == (1,)


def test_nobody_else_can_open_its_socket(home):
    with embedded.server(home) as dsn, psycopg.connect(dsn) as conn:
        (sockets,) = conn.execute("show unix_socket_directories").fetchone() or ("",)
        assert conn.execute("show listen_addresses").fetchone() == ("",)
    assert Path(sockets).stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_used_is_named(home):
    (home / "file").touch()
    with pytest.raises(errors.CannotConnect, match="file"), embedded.server(home / "file"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_a_folder_that_the_servers_user_cannot_enter_is_named(home):
    (home / "closed").mkdir(mode=0o700)
    with pytest.raises(errors.CannotConnect, match="cannot look in there"), embedded.server(home / "closed" / "data"):
        pass


@pytest.mark.parametrize("name", ["o'brien", "a, b", "back\\slash", "long" * 20])
def test_a_folder_may_have_a_name_of_its_own(home, name):
    with embedded.server(home / name) as dsn, psycopg.connect(dsn) as conn:
        assert conn.execute("select 1").fetchone() == (1,)


@pytest.mark.parametrize("name", ['say "hi"', "a$HOME", "a`id`", "a\\\\b", "a\nb"])
def test_a_name_that_the_shell_would_read_differently_is_refused_before_anything_is_made(home, name):
    with pytest.raises(errors.CannotConnect, match="pg_ctl") as refused, embedded.server(home / name):
        pass
    assert "ALMANAC_DATA_DIR" in (refused.value.hint or "")
    assert list(home.iterdir()) == []


def test_processes_with_another_pgport_find_the_server(home, monkeypatch):
    monkeypatch.setenv("PGPORT", "5499")
    with embedded.server(home):
        monkeypatch.delenv("PGPORT")
        with embedded.server(home) as dsn, psycopg.connect(dsn) as conn:
            assert conn.execute("select 1").fetchone() == (1,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_sockets_are_not_made_where_somebody_else_was_first(home):
    who = embedded.account()
    cluster = embedded.Cluster(who, embedded.binaries(who, home), home / ("long" * 20))
    cluster.socket_dir.mkdir()
    os.chown(cluster.socket_dir, 12345, 12345)
    try:
        with pytest.raises(errors.CannotConnect, match="another user"), embedded.server(home / ("long" * 20)):
            pass
    finally:
        cluster.socket_dir.rmdir()
