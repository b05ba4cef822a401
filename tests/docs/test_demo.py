"""make demo: a person sees schedules fire and jobs complete; Ctrl-C ends it and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data_dir():
    folder = tempfile.mkdtemp(prefix="almanac-demo-")
    os.chmod(folder, 0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(data_dir: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if data_dir.strip("/") in command.replace("%2F", "/"):
            found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_demo_shows_jobs_and_ends_cleanly_twice(data_dir):
    environment = {name: value for name, value in os.environ.items() if name not in ("ALMANAC_DSN", "DATABASE_URL")}
    for _ in range(2):
        demo = subprocess.Popen(
            [sys.executable, "docs/examples/demo.py"],
            cwd=CHECKOUT, env=environment | {"ALMANAC_DATA_DIR": data_dir}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # A shell ignores Ctrl-C for what it runs in the background, and that would be inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert demo.stdout is not None
        shown = ""
        for line in demo.stdout:
            shown += line
            if "fired -> job" in shown and " completed: Good day" in shown:
                break
        assert processes_of(data_dir)
        asked = time.monotonic()
        os.killpg(demo.pid, signal.SIGINT)  # what Ctrl-C does: everybody in the foreground gets it
        rest, _ = demo.communicate(timeout=30)
        took = time.monotonic() - asked
        assert demo.returncode in (0, 130), shown + rest
        assert "Traceback" not in shown + rest
        assert "To go on:" in rest
        assert not processes_of(data_dir)
        # Two seconds on a machine that does nothing else.
        assert took < 6, f"{took:.1f} s"
