"""What the pages show runs: SQL blocks of a page in one database from top to bottom, shell blocks line by line.

A Python block that begins with `# name.py` is that file for the shell lines of its page.
A block that cannot be run (a fragment, an output) is marked `text`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from pyclient import embedded

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "sql" / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]

# Shell lines that would do here what this very run is doing, or that change the machine: their form is checked only.
CHECKED_ELSEWHERE = re.compile(r"^(git clone |cd |pip install |docker |\.venv/bin/pre-commit |\.venv/bin/pytest )")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def with_blocks(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(blocks(page, language) for language in languages)]


def name(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


@pytest.mark.parametrize("page", with_blocks("sql"), ids=name)
def test_the_sql_of_a_page_runs(page, live_dsn):
    bin_dir = embedded.wheel_binaries()
    assert bin_dir is not None
    done = subprocess.run(
        [bin_dir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", live_dsn],
        input="\n".join(blocks(page, "sql")), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in with_blocks("sh", "bash") if page.parent != CHECKOUT], ids=name)
def test_the_shell_lines_of_a_page_run(page, empty_dsn, tmp_path):
    bin_dir = embedded.wheel_binaries()
    assert bin_dir is not None
    path = os.pathsep.join([str(Path(sys.executable).parent), str(bin_dir), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "DSN": empty_dsn, "DATABASE_URL": empty_dsn, "ALMANAC_DSN": empty_dsn}
    for program in blocks(page, "python"):
        if title := re.match(r"# (\w+\.py)\n", program):
            (tmp_path / title[1]).write_text(program, encoding="utf-8")
    for block in blocks(page, "sh") + blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command = re.sub(r"\s+#.*$", "", line).removeprefix("$ ").strip()
            if not command or command.startswith("#") or CHECKED_ELSEWHERE.match(command):
                continue
            if command.startswith("make "):
                command += " --dry-run"
            folder = CHECKOUT if command.startswith(("make ", "psql ")) else tmp_path
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            # A page may show several roads to the same place; the second one says that somebody was there before.
            installed_before = "already installed" in done.stderr
            assert done.returncode == 0 or installed_before, f"{name(page)}: {command}\n{done.stderr}"


def test_the_program_of_the_readme_calls_once(empty_dsn, tmp_path):
    test_the_shell_lines_of_a_page_run(CHECKOUT / "README.md", empty_dsn, tmp_path)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select phone from called").fetchall() == [("+32 2 555 01 23",)]
        assert conn.execute("select state, result from almanac.job_history").fetchall() == [
            ("completed", {"called": "+32 2 555 01 23"})
        ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
