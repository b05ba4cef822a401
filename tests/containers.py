"""Containers for the tests: our images, built from docker/ as a user would build them."""

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
# For an engine whose bridge does not lead outside: ALMANAC_TEST_BUILD_NETWORK=host
BUILD_NETWORK = os.environ.get("ALMANAC_TEST_BUILD_NETWORK")


@functools.cache
def image(name: str) -> str:
    """Build docker/<name>.Dockerfile; the engine's cache makes the second time cheap."""
    tag = f"pg-almanac-{name}:test"
    command = ["docker", "build", "--quiet", "--tag", tag, "--file", f"docker/{name}.Dockerfile"]
    if BUILD_NETWORK:
        command += ["--network", BUILD_NETWORK]
    done = subprocess.run([*command, "."], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tag


@contextlib.contextmanager
def postgres(settings: Mapping[str, str], database: str = "postgres") -> Iterator[str]:
    """A server with pg_cron from our image; yields the DSN of `database`."""
    from testcontainers.core.container import DockerContainer

    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    container = DockerContainer(image("postgres")).with_exposed_ports(5432).with_command(["postgres", *options])
    with container.with_env("POSTGRES_PASSWORD", "postgres").with_env("POSTGRES_DB", database) as running:
        host, port = running.get_container_host_ip(), running.get_exposed_port(5432)
        yield f"postgresql://postgres:postgres@{host}:{port}/{database}"
