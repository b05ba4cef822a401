"""The Python on the pages about the client runs, page by page, from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest

from pyclient.testing import TestAlmanac
from tests import servers

pytest_plugins = ["pyclient.testing.plugin"]
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="session")
def almanac_server(server: servers.Server) -> str:
    return server.dsn


@pytest.mark.parametrize("page", ["client", "exactly-once", "switching", "testing"])
def test_the_page_runs(page: str, almanac: TestAlmanac, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALMANAC_DSN", almanac.dsn)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)):
        exec(compile(block, f"{page}.md block {number}", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    for test in tests:
        test(almanac)
    if not tests:
        names["app"].close()
        almanac.use(names["app"])
        ran = almanac.run_due()
        assert ran
        assert {job.state for job in ran} == {"completed"}, [job.last_error for job in ran]
