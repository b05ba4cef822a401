"""The tables of the first release. 0001_baseline.sql is frozen; later revisions change what it made."""

from pathlib import Path

from pyclient.migrate import run_sql

revision, down_revision = "0001", None


def upgrade() -> None:
    run_sql(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
