"""What the environment says. The only module that reads it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class HttpPolicy:
    """What the handler `http` may call, and how it signs.

    A host on the list may be called wherever it is. Without a list every host on the internet may be, and none inside
    the network unless `allow_private`.
    """

    allowed_hosts: tuple[str, ...] = ()
    allow_private: bool = False
    secret: str | None = field(default=None, repr=False)


def http_policy(environ: Mapping[str, str] = os.environ) -> HttpPolicy:
    """ALMANAC_HTTP_HOSTS (comma-separated, `*.example.org` for subdomains), ALMANAC_HTTP_PRIVATE=1,
    ALMANAC_HTTP_SECRET."""
    return HttpPolicy(
        allowed_hosts=tuple(host.strip() for host in environ.get("ALMANAC_HTTP_HOSTS", "").split(",") if host.strip()),
        allow_private=environ.get("ALMANAC_HTTP_PRIVATE", "").lower() in ("1", "true", "yes", "on"),
        secret=environ.get("ALMANAC_HTTP_SECRET") or None,
    )


def patience(environ: Mapping[str, str] = os.environ) -> float:
    """ALMANAC_PATIENCE: for how many seconds a server that says nothing is waited for; 30 unless it is set."""
    given = environ.get("ALMANAC_PATIENCE") or "30"
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise ValueError(f"ALMANAC_PATIENCE={given!r} is not a number of seconds from 1 to 3600")
    return seconds


@dataclass(frozen=True)
class Settings:
    """`dsn` is None when nobody named a database: then the embedded server is used."""

    dsn: str | None
    dsn_source: str
    data_dir: Path


def load(dsn: str | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """The option first, then ALMANAC_DSN, then DATABASE_URL. An empty value counts as not set."""
    named = [("--dsn", dsn), *((name, environ.get(name)) for name in ("ALMANAC_DSN", "DATABASE_URL"))]
    source, value = next(((source, value) for source, value in named if value), ("embedded", None))
    return Settings(dsn=_for_libpq(value) if value else None, dsn_source=source, data_dir=_data_dir(environ))


def dsn_for_tests(environ: Mapping[str, str] = os.environ) -> str | None:
    """A server to make databases for tests on; never the one an application works with."""
    value = environ.get("ALMANAC_TEST_DSN")
    return _for_libpq(value) if value else None


def _for_libpq(dsn: str) -> str:
    """DATABASE_URL is often written for SQLAlchemy, `postgresql+psycopg://`, which libpq does not know."""
    scheme, separator, rest = dsn.partition("://")
    return f"postgresql://{rest}" if separator and scheme.startswith(("postgresql+", "postgres+")) else dsn


def _data_dir(environ: Mapping[str, str]) -> Path:
    """Where the embedded server keeps its data: ALMANAC_DATA_DIR, else the user's data directory."""
    if chosen := environ.get("ALMANAC_DATA_DIR"):
        return Path(chosen).expanduser().absolute()
    if sys.platform != "win32" and os.geteuid() == 0:
        # The server runs as another user then, who cannot see into root's home.
        return Path("/var/lib/pg-almanac")
    try:
        home = Path.home()
    except RuntimeError:
        # An account without a home, as in a container: no reason to stop somebody who names a database.
        return Path("/var/lib/pg-almanac")
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "pg-almanac"
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "pg-almanac"
