"""Every rule against a bad spec with its exact output, and against the nearest good one.

A fixture may begin with a line `# check: facts=gpt world=4 set=mesh.dp=2 profile=small`. After a change of wording: `pytest tests/test_specs.py
--update`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdsl.grammar.diagnostics import Severity
from pdsl.grammar.source import Source
from pdsl.lowering.check import CheckResult, check
from pdsl.lowering.rules import RULES, explain
from pdsl.render.diagnostics import render_full
from tests.facts import FACTS

SPECS = Path(__file__).parent / "specs"
BAD = sorted((SPECS / "bad").glob("*.pdsl"))
GOOD = sorted((SPECS / "good").glob("*.pdsl"))
HEADINGS = ["What it does", "Why it is bad", "Example (bad)", "Better", "Fix"]


def check_fixture(path: Path) -> CheckResult:
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    options = [tuple(word.split("=", 1)) for word in first.removeprefix("# check:").split()] if first.startswith("# check:") else []

    def load(name: str) -> str | None:
        file = path.parent / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    given = dict(options)
    return check(
        Source(path.name, text),
        world=int(given["world"]) if "world" in given else None,
        overrides=[value for key, value in options if key == "set"],
        profile=given.get("profile"),
        facts=FACTS[given["facts"]] if "facts" in given else None,
        loader=load,
    )


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad_spec_gives_exactly_this_output(path: Path, request: pytest.FixtureRequest):
    found = check_fixture(path)
    printed = render_full(found.diagnostics, 1)
    expected = path.with_suffix(".out")
    if request.config.getoption("--update"):
        expected.write_text(printed, encoding="utf-8")
    assert printed == expected.read_text(encoding="utf-8")
    assert path.stem.split("_")[0] in {d.code for d in found.diagnostics}


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.stem)
def test_nearest_good_spec_is_free_of_it(path: Path):
    found = check_fixture(path)
    code = path.stem.split("_")[0]
    wrong = [d for d in found.diagnostics if d.code == code or d.severity is not Severity.NOTE]
    assert not wrong, render_full(wrong, 1)
    assert found.spec is not None


def test_every_rule_has_a_bad_and_a_good_spec():
    elsewhere = {"PDL108", "PDL802", "PDL806"}  # need a factory that fails: see test_check.py and the tests of the command line
    codes = {r.code for r in RULES} - elsewhere
    assert {p.stem.split("_")[0] for p in BAD} == codes
    assert {p.stem.split("_")[0] for p in GOOD} >= codes


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_every_rule_explains_itself_under_the_same_headings(rule):
    page = explain(rule.code)
    assert page.startswith(f"{rule.code} {rule.name} ({rule.severity.value})\n")
    assert [line for line in page.splitlines()[2:] if line and not line.startswith(" ")] == HEADINGS


def test_codes_and_names_of_rules_are_unique_and_sorted():
    codes = [r.code for r in RULES]
    assert codes == sorted(set(codes))
    assert len({r.name for r in RULES}) == len(RULES)
