"""Handlers that come with the package, for people who enqueue from psql and write no Python."""

import importlib.util

from pyclient.app import Almanac
from pyclient.handlers import log
from pyclient.settings import HttpPolicy


def builtin(app: Almanac, policy: HttpPolicy) -> None:
    """Add `log` and, where httpx is installed, `http`; an application's own handler of that name comes first."""
    if "log" not in app.jobs:
        app.register("log", log.handle)
    if "http" not in app.jobs and importlib.util.find_spec("httpx") is not None:
        from pyclient.handlers.http import HttpHandler

        app.register("http", HttpHandler(policy))
