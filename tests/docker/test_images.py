"""docker/: the images do what their heads say, alone and together."""

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from pyclient import migrate
from tests import containers, servers

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True, scope="module")
def _engine():
    if not servers.docker_answers():
        pytest.skip("no Docker engine answers")


def wait_for(conn: psycopg.Connection, query: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while conn.execute(query.encode()).fetchone() != (True,):
        assert time.monotonic() < deadline, query
        time.sleep(0.5)


@pytest.mark.pg_cron
def test_pg_cron_runs_in_the_database_that_the_environment_names(used_servers):
    with containers.postgres({}, database="elsewhere") as dsn:
        used_servers.add(f"PostgreSQL {servers.wait_until_ready(dsn)} (Docker, docker/postgres.Dockerfile)")
        migrate.migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert conn.execute("show cron.database_name").fetchone() == ("elsewhere",)
            assert conn.execute("show cron.use_background_workers").fetchone() == ("on",)
            conn.execute("create table fired (at timestamptz)")
            conn.execute("select cron.schedule('fire', '1 second', 'insert into fired values (now())')")
            wait_for(conn, "select count(*) > 1 from fired", 60)


def test_the_worker_image_runs_as_a_user_without_rights():
    image = containers.image("pyclient")
    run = ["docker", "run", "--rm"]
    done = subprocess.run([*run, image, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pyclient, version ")
    uid = subprocess.run([*run, "--entrypoint", "id", image, "-u"], capture_output=True, text=True, check=True)
    assert int(uid.stdout) > 0


def compose_command() -> list[str]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor docker-compose is installed")


@pytest.fixture
def compose(tmp_path: Path):
    """`compose("up", "-d")`, with a project, a port and a password of its own; everything is removed at the end."""
    port, password = servers.free_port(), secrets.token_urlsafe(12)
    files = ["-f", str(containers.CHECKOUT / "docker" / "compose.yaml")]
    command = [*compose_command(), "-p", f"almanac-test-{port}", *files]
    environment = os.environ | {"ALMANAC_PORT": str(port), "POSTGRES_PASSWORD": password}

    def compose(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield compose, f"postgresql://postgres:{password}@127.0.0.1:{port}/almanac"
    compose("down", "--volumes", "--remove-orphans")


def health(container: str) -> str:
    command = ["docker", "inspect", "--format", "{{.State.Health.Status}}", container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.pg_cron
def test_compose_up_fires_a_schedule_through_pg_cron_and_a_worker_runs_it(compose):
    compose, dsn = compose
    for name in ("postgres", "pyclient"):
        containers.image(name)
    compose("up", "-d", "--no-build")
    servers.wait_until_ready(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        wait_for(conn, "select to_regprocedure('almanac.revision()') is not null", 120)
        wait_for(conn, "select count(*) > 1 from almanac.job_history where schedule is not null", 120)
        wait_for(conn, "select exists (select from cron.job_run_details where status = 'succeeded')", 60)
    container = compose("ps", "-q", "worker").strip()
    deadline = time.monotonic() + 60
    while health(container) != "healthy":
        assert time.monotonic() < deadline, health(container)
        time.sleep(1)
    logs = compose("logs", "worker")
    assert "Traceback" not in logs


def test_nothing_listens_beyond_loopback(compose):
    compose, _ = compose
    config = compose("config")
    assert "127.0.0.1:" in config
    assert "0.0.0.0" not in config
