"""make ab: it runs, refuses what it cannot compare, and tells a slower function."""

import json
import os
import subprocess
import sys

import psycopg
import pytest

from tests.bench import ab
from tests.bench.worker import TREE

pytestmark = [
    pytest.mark.skipif(not (TREE / ".git").exists(), reason="not a git checkout: there is no commit to compare with"),
    pytest.mark.skipif(not ab.counts_cpu(), reason="no CPU times in /proc/<pid>/schedstat"),
]
#: A tenth to a sixth of what an enqueue costs.
PLANTED = "\nbegin\n    for planted in 1 .. 2000 loop null; end loop;\n"


def compared(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.ab", *arguments], cwd=TREE, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_row_is_a_line_and_the_worktree_goes(tmp_path):
    done = compared("HEAD", "--only", "doze", "--rounds", "2", "--seconds", "0.02", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["row"], result["rounds"], result["unit"]) == ("doze", 2, "us a call")
    assert result["base_us"] > 0
    assert result["ratio"] == pytest.approx(result["tree_us"] / result["base_us"], abs=0.001)
    assert result["spread"] == sorted(result["spread"])
    assert str(tmp_path) not in ab.git("worktree", "list")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["no-such-commit"], "no commit"),
        (["HEAD", "--only", "doze,nap"], "no row nap"),
        (["HEAD", "--rounds", "1"], "two rounds"),
    ],
    ids=["commit", "row", "rounds"],
)
def test_what_cannot_be_compared_is_refused_in_a_line(arguments, says):
    done = compared(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert says in line


@pytest.mark.slow
def test_a_loop_in_one_function_shows_in_its_row_and_in_no_other():
    with ab.started() as server:
        comparison = ab.Comparison(server, TREE, TREE, rounds=5, seconds=0.05)
        with psycopg.connect(server.dsn_of(comparison.states[1].schema), autocommit=True) as conn:
            (function,) = conn.execute(
                "select pg_get_functiondef(oid) from pg_proc where oid::regproc::text = 'almanac.enqueue'"
            ).fetchone() or ("",)
            assert "\nbegin\n" in function
            conn.execute(function.replace("\nbegin\n", PLANTED, 1))
        assert comparison.compare("doze")["ratio"] < 1.05 < comparison.compare("enqueue")["ratio"]
