"""The wheel: everything that is needed is in it, and nothing of the checkout is needed beside it."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import psycopg
import pytest

from pyclient import files, migrate
from tests import lowest

CHECKOUT = Path(__file__).resolve().parent.parent


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, CHECKOUT)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_sql_the_revisions_and_the_types(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"pyclient/_sql/{file.name}" for file in files.sql_files()}
    wanted |= {"pyclient/_sql/install.sql", "pyclient/_migrations/env.py", "pyclient/py.typed"}
    wanted |= {f"pyclient/_migrations/versions/{path.name}" for path in (CHECKOUT / "migrations/versions").glob("0*")}
    assert wanted <= inside
    assert not [name for name in inside if name.startswith(("tests/", "docs/"))]


@pytest.fixture(scope="module", params=["borrowed", pytest.param("from the index", marks=pytest.mark.full)])
def installed(request, wheel):
    """pyclient of the wheel in a new virtual environment. Its dependencies come from the index with --full, else they
    are borrowed from this environment: a path file leads to them, but not to the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        options = ["--no-deps"] if request.param == "borrowed" else []
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, wheel)
        if request.param == "borrowed":
            site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
            Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        yield Path(folder) / "bin" / "pyclient"


def test_every_dependency_has_a_lowest_version_that_can_be_run():
    allowed = {requirement.partition("==")[0] for requirement in lowest.constraints()}
    assert allowed >= {"SQLAlchemy", "alembic", "click", "psycopg", "psycopg-pool", "pydantic", "orjson", "sentry-sdk"}


def test_the_wheel_alone_migrates(installed, empty_dsn, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert "is now at revision" in run(installed, "--dsn", empty_dsn, "migrate", cwd=tmp_path, env=environment)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select almanac.revision()").fetchone() == (migrate.head(),)
    where = run(installed.parent / "python", "-c", "import pyclient; print(pyclient.__file__)", cwd=tmp_path)
    assert str(CHECKOUT) not in where


def test_the_wheel_prints_the_same_installer(installed, tmp_path):
    assert run(installed, "sql", cwd=tmp_path) == migrate.installer()


def test_the_program_of_the_readme_runs_in_an_empty_folder(installed, empty_dsn, tmp_path):
    program = re.search(r"```python\n(# calls\.py\n.*?)```", (CHECKOUT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    (tmp_path / "calls.py").write_text(program[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"DATABASE_URL": empty_dsn, "ALMANAC_DSN": ""}
    run(installed, "migrate", cwd=tmp_path, env=environment)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create table called (phone text not null, at timestamptz not null default now())")
        run(installed.parent / "python", "calls.py", cwd=tmp_path, env=environment)
        run(installed, "worker", "--app", "calls:app", "--burst", cwd=tmp_path, env=environment)
        assert conn.execute("select phone from called").fetchall() == [("+32 2 555 01 23",)]
