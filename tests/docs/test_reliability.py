"""docs/reliability.md is in step with the README, with the tests that there are and with the breaches of tests/."""

import ast
import re

import pytest

from tests.breaches import BREACHES, PAGE, Promise, promises

CHECKOUT = PAGE.parents[1]


def sections() -> dict[str, str]:
    _, *found = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def test_the_guarantees_of_the_readme_are_the_first_sections():
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    guaranteed = readme.split("## What is guaranteed")[1].split("\n## ")[0]
    guarantees = [text.strip(".") for text in re.findall(r"^- \*\*(.+?)\*\*", guaranteed, re.MULTILINE)]
    assert len(guarantees) == 6
    assert list(sections())[:6] == guarantees


def test_every_line_is_read_and_every_section_has_a_breach():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(lines) == len(promises()) + len(sections()), "a header for each section, and promises"
    for title, text in sections().items():
        assert re.search(r"\| `\w+` \|$", text, re.MULTILINE), title


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.text)
def test_a_promise_is_guarded_by_tests_that_are_there(promise: Promise):
    assert promise.tests
    decorators = {}
    for test in promise.tests:
        path, name = test.split("::")
        functions = [node for node in ast.parse((CHECKOUT / path).read_text(encoding="utf-8")).body
                     if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]  # fmt: skip
        assert len(functions) == 1, test
        decorators[test] = [ast.unparse(decorator) for decorator in functions[0].decorator_list]
    assert any("pytest.mark.full" not in marks for marks in decorators.values()), "all of them run with --full only"


def test_each_breach_breaks_one_promise_and_applies():
    planted = [promise.breach for promise in promises() if promise.breach]
    assert len(planted) >= 15
    assert sorted(planted) == sorted(BREACHES)
    for breach in BREACHES.values():
        assert breach.statement()
