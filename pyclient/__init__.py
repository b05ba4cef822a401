"""pg_almanac from Python: the calls (`database`), the errors (`errors`), the worker and the command line.

Every guarantee is kept by the functions of the schema `almanac`; nothing in this package is needed for one.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pg-almanac")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

from pyclient import errors
from pyclient.app import Almanac
from pyclient.context import JobContext
from pyclient.outcomes import Cancelled, PermanentError, RetryAfter, Snooze

__all__ = [
    "Almanac",
    "Cancelled",
    "JobContext",
    "PermanentError",
    "RetryAfter",
    "Snooze",
    "__version__",
    "errors",
]
