"""Where the SQL is: beside the package in a checkout, inside it in a wheel.

File numbers say what a file is: 00 and 01 (schema, roles) can be run again at any time; 02 to 19 (tables, types)
are run once and changed by revisions; 20 to 99 (functions, views, grants) are re-applied on every migrate.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class SqlFile:
    """One file of sql/; `number` is its place in the story."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def number(self) -> int:
        return int(self.path.name[:2])

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


def folder(name: str) -> Path:
    """The folder `sql` or `migrations`."""
    for candidate in (PACKAGE / f"_{name}", PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"pyclient was installed without its {name}/ folder; install it again")


def sql_files(first: int = 0, last: int = 99) -> list[SqlFile]:
    """The numbered files from `first` to `last`, in the order they are applied."""
    paths = sorted(path for path in folder("sql").glob("*.sql") if re.match(r"\d\d_", path.name))
    return [file for file in map(SqlFile, paths) if first <= file.number <= last]


def bootstrap_files() -> list[SqlFile]:
    """Schema, version table and roles: needed before the first revision can be recorded."""
    return sql_files(0, 1)


def table_files() -> list[SqlFile]:
    """Tables and types as they are today; revisions lead to them."""
    return sql_files(2, 19)


def function_files() -> list[SqlFile]:
    """Everything that is simply replaced."""
    return sql_files(20, 99)
