"""Handlers that come with the package, for people who enqueue from psql and write no Python."""

from pyclient.app import Almanac
from pyclient.handlers import log


def builtin(app: Almanac) -> None:
    """Add `log` and, where httpx is installed, `http`; an application's own handler of that name comes first."""
    if "log" not in app.jobs:
        app.register("log", log.handle)
