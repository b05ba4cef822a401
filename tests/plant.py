"""make breaches [ONLY=name,name]: plants the breaches of tests/breaches.py; a test of each promise has to fail.

First those tests run as things are, because one that fails anyway shows nothing. Then, for each breach, the tests of
its promise run in a process and in databases of their own, all of them on one server.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests import servers
from tests.breaches import BREACHES, PAGE, Breach, DoesNotApplyError, promise_of


@dataclass
class Outcome:
    """What became of a run of tests."""

    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    #: Why it shows nothing, whatever else failed.
    unfit: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        return bool(self.failed) and not self.unfit


def run(tests: Iterable[str], dsn: str, breach: Breach | None = None) -> Outcome:
    """The given tests on the server of `dsn`."""
    began = time.monotonic()
    wanted = list(dict.fromkeys(tests))
    # Not what a run that starts this one has set for itself and for its workers.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pg=dsn", f"--junit-xml={report}"]
        done = subprocess.run(
            [*command, *(["--breach", breach.name] if breach else []), *wanted],
            cwd=PAGE.parents[1], env=environment | {"ALMANAC_TEST_DSN": dsn},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        outcome = judge(wanted, ET.parse(report).iter("testcase") if report.exists() else [])
    if done.returncode not in (0, 1):
        outcome.unfit.append(f"pytest ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    outcome.seconds = time.monotonic() - began
    return outcome


def sqlstate(message: str) -> str:
    """Of the error that a test met, by itself or where it expected another one (tests.jobs.refused). Class 42, except
    for 42501, a right that is denied, means that the planted function is no function at all."""
    met = re.match(r"psycopg\.errors\.(\w+)|AssertionError: (\w{5}):", message)
    return "" if met is None else met[2] or getattr(psycopg.errors, met[1]).sqlstate


def judge(wanted: Iterable[str], cases: Iterable[ET.Element]) -> Outcome:
    """Only a test that ran, and failed by what it found, shows something."""
    outcome = Outcome()
    for case in cases:
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcome.ran.append(name)
        failure, error, skipped = (case.find(kind) for kind in ("failure", "error", "skipped"))
        if skipped is not None:
            outcome.unfit.append(f"{name} was skipped: {skipped.get('message')}")
        elif error is not None and failure is None:
            outcome.unfit.append(f"{name} did not run: {error.get('message')}")
        elif failure is not None:
            outcome.failed.append(name)
            message = failure.get("message", "")
            if re.match("42(?!501)", sqlstate(message)):
                outcome.unfit.append(f"{name} met a function that cannot run: {message.splitlines()[0]}")
    if missing := set(wanted) - {name.split("[")[0] for name in outcome.ran}:
        outcome.unfit.append(f"not run: {', '.join(sorted(missing))}")
    return outcome


def plant(breach: Breach, dsn: str) -> Outcome:
    return run(promise_of(breach).tests, dsn, breach)


def show(breach: Breach, outcome: Outcome) -> None:
    verdict = "caught" if outcome.caught else "NOT CAUGHT"
    print(f"{verdict}  {breach.name}: {breach.bug}  ({outcome.seconds:.0f} s)", flush=True)
    for why in outcome.unfit:
        print(textwrap.indent(why, "    "))


def table(outcomes: dict[str, Outcome]) -> str:
    rows = [("breach", "promise", "tests", "which failed")]
    for name, outcome in outcomes.items():
        failed = list(dict.fromkeys(test.split("::")[1].split("[")[0] for test in outcome.failed))
        verdict = ", ".join(failed) if outcome.caught else "NOT CAUGHT" + (": shows nothing" if outcome.unfit else "")
        rows.append((name, promise_of(BREACHES[name]).text, f"{len(outcome.failed)}/{len(outcome.ran)}", verdict))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.plant", description=__doc__)
    parser.add_argument("--only", default="", help="breaches, comma-separated: " + ", ".join(BREACHES))
    parser.add_argument("--pg", default=os.environ.get("ALMANAC_TEST_PG", "auto"), help="as for pytest")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or list(BREACHES)
    if unknown := set(wanted) - set(BREACHES):
        parser.error(f"no breach {', '.join(sorted(unknown))}; there are {', '.join(BREACHES)}")
    chosen = [BREACHES[name] for name in wanted]
    stale = []
    for breach in chosen:
        try:
            breach.statement()
        except DoesNotApplyError as error:
            stale.append(str(error))
    if stale:
        sys.exit("\n".join(stale))
    with servers.Choice(arguments.pg).start() as server, ThreadPoolExecutor(os.cpu_count()) as pool:
        print(f"{server.describe()}: first the tests as things are ...", flush=True)
        untouched = run((test for breach in chosen for test in promise_of(breach).tests), server.dsn)
        if untouched.failed or untouched.unfit:
            sys.exit("\n".join(["without any breach:", *untouched.failed, *untouched.unfit]))
        print(f"{len(untouched.ran)} passed ({untouched.seconds:.0f} s)", flush=True)
        outcomes = {}
        for breach, outcome in zip(chosen, pool.map(lambda breach: plant(breach, server.dsn), chosen), strict=True):
            show(breach, outcome)
            outcomes[breach.name] = outcome
    print("\n" + table(outcomes))
    escaped = [name for name, outcome in outcomes.items() if not outcome.caught]
    print(f"\n{len(outcomes) - len(escaped)} of {len(outcomes)} caught")
    sys.exit(1 if escaped else 0)


if __name__ == "__main__":
    main()
