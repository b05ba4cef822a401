"""Which revision of the tables this package brings, and whether a database has it.

Apart from migrate.py, so that a worker can ask without alembic.
"""

from pyclient import errors, files


def revisions() -> list[str]:
    """The names of all revisions, oldest first: a file of a revision is called <name>_<what>.py."""
    versions = files.folder("migrations") / "versions"
    return sorted(path.name.partition("_")[0] for path in versions.glob("[0-9]*_*.py"))


def head() -> str:
    """The revision that this version of the package brings."""
    return revisions()[-1]


def known(revision: str) -> bool:
    return revision in revisions()


def check(installed: str | None) -> str | None:
    """For a program that is about to use the schema at revision `installed` (`database.installed_revision`).

    Raises SchemaMismatch when the schema is missing or older than this package. A newer schema serves older
    programs (revisions expand before they contract), so that is only worth the warning which is returned.
    """
    if installed is None or (installed != head() and known(installed)):
        state = f"has revision {installed}" if installed else "does not have pg_almanac"
        raise errors.SchemaMismatch(
            f"the database {state}, this pyclient needs revision {head()}", hint="Run: pyclient migrate"
        )
    if installed != head():
        return (
            f"the database has revision {installed}, newer than this pyclient's {head()}; "
            "run: pip install --upgrade pg-almanac"
        )
    return None
