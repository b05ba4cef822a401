"""Which revision of the tables and which version of the functions this package brings, and whether a database has them.

Apart from migrate.py, so that a worker can ask without alembic.
"""

import re
from importlib import metadata

from pyclient import errors, files

try:
    VERSION: str | None = metadata.version("pg-almanac")
except metadata.PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = None
_STAGES = ("dev", "a", "b", "rc", None, "post")


def revisions() -> list[str]:
    """The names of all revisions, oldest first: a file of a revision is called <name>_<what>.py."""
    versions = files.folder("migrations") / "versions"
    return sorted(path.name.partition("_")[0] for path in versions.glob("[0-9]*_*.py"))


def head() -> str:
    """The revision that this version of the package brings."""
    return revisions()[-1]


def known(revision: str) -> bool:
    return revision in revisions()


def compared(version: str | None) -> int:
    """-1: this version is older than the package's; 1: newer; 0: equal, or one of them is not known."""
    theirs, ours = _order(version), _order(VERSION)
    return 0 if theirs is None or ours is None else (theirs > ours) - (theirs < ours)


def _order(version: str | None) -> tuple[list[int], int, int] | None:
    """0.2 is 0.2.0, and comes after 0.2.0rc1."""
    found = re.match(r"(\d+(?:\.\d+)*?)(?:\.0)*(?:\.?(dev|a|b|rc|post)(\d+))?(?:\+|$)", version or "")
    return found and ([int(one) for one in found[1].split(".")], _STAGES.index(found[2]), int(found[3] or 0))


def check(revision: str | None, version: str | None = None) -> str | None:
    """For a program that is about to use the schema at this revision, with functions of this version
    (`database.installed`).

    Raises SchemaMismatch when the schema is missing or older than this package. A newer schema serves older
    programs (revisions expand before they contract), so that is only worth the warning which is returned.
    """
    if revision != head():
        has, mine = f"has revision {revision}", f"revision {head()}"
        is_newer = revision is not None and not known(revision)
    elif order := compared(version):
        has, mine, is_newer = f"has the functions of version {version}", f"version {VERSION}", order > 0
    else:
        return None
    if is_newer:
        return f"the database {has}, newer than this pyclient's {mine}; run: pip install --upgrade pg-almanac"
    if revision is None:
        has = "does not have pg_almanac"
    raise errors.SchemaMismatch(f"the database {has}, this pyclient needs {mine}", hint="Run: pyclient migrate")
