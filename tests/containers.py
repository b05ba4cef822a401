"""Containers for the tests: our images, built from docker/ as a user would build them."""

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent

# Our containers end with their context; the reaper would be one more image to pull.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")


@functools.cache
def image(name: str) -> str:
    """Build docker/<name>.Dockerfile under the name that compose.yaml uses; the engine's cache makes it cheap again.

    An engine whose bridge does not lead outside can still build on the host's network.
    """
    tag = f"pg-almanac-{name}"
    for network in ("default", "host"):
        command = ["docker", "build", "--quiet", "--network", network, "--tag", tag]
        command += ["--file", f"docker/{name}.Dockerfile", "."]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return tag
    raise AssertionError(done.stderr)


@contextlib.contextmanager
def postgres(settings: Mapping[str, str], database: str = "postgres", auth: str = "scram-sha-256") -> Iterator[str]:
    """A server with pg_cron from our image; yields the DSN of `database`."""
    from testcontainers.core.container import DockerContainer

    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    container = DockerContainer(image("postgres")).with_exposed_ports(5432).with_command(["postgres", *options])
    container.with_env("POSTGRES_PASSWORD", "postgres").with_env("POSTGRES_DB", database)
    container.with_env("POSTGRES_HOST_AUTH_METHOD", auth)
    with container as running:
        host, port = running.get_container_host_ip(), running.get_exposed_port(5432)
        yield f"postgresql://postgres:postgres@{host}:{port}/{database}"
