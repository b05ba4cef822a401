"""pg_almanac from Python: the calls (`database`), the errors (`errors`), the worker and the command line.

Every guarantee is kept by the functions of the schema `almanac`; nothing in this package is needed for one.
"""

from pyclient import errors
from pyclient.app import Almanac
from pyclient.context import JobContext
from pyclient.outcomes import Cancelled, PermanentError, RetryAfter, Snooze
from pyclient.schema import VERSION

__version__ = VERSION or "0+unknown"

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
