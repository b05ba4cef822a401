"""Until the first release: write sql/02 to sql/19 into versions/0001_baseline.sql, and all files into install.sql.

Run it with `make freeze-baseline` after a change to a table. From the first release on the baseline stays as it is and
a change to a table is a new revision (CONTRIBUTING.md).
"""

from pyclient import files

# Nobody waits for a lock on a table that is only just being made.
NEW_TABLES = (
    "-- squawk-ignore-file require-concurrent-index-creation, require-lock-timeout, adding-required-field, "
    "ban-create-domain-with-constraint\n\n"
)


def baseline() -> str:
    return NEW_TABLES + "".join(f"-- from {file.name}\n{file.text()}\n" for file in files.table_files())


def contents(current: str) -> str:
    """install.sql with its list of files, from the guard to the stamp, brought up to date."""
    head, guard, rest = current.partition("\n$$;\n")
    stamp = rest[rest.index("insert into almanac.migration") :]
    listing = ""
    tens = ""
    for file in files.sql_files(2):
        listing += ("\n" if file.name[0] != tens else "") + f"\\ir {file.name}\n"
        tens = file.name[0]
    return f"{head}{guard}{listing}\n{stamp}"


if __name__ == "__main__":
    versions = files.folder("migrations") / "versions"
    (versions / "0001_baseline.sql").write_text(baseline(), encoding="utf-8")
    install = files.folder("sql") / "install.sql"
    install.write_text(contents(install.read_text(encoding="utf-8")), encoding="utf-8")
