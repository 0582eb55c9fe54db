"""The table of what works together names rules that exist and tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from pdsl.lowering.composability import TABLE, Pair, Verdict, pairs_of
from pdsl.lowering.rules import RULES

TESTS = Path(__file__).resolve().parents[1]
CODES = {rule.code for rule in RULES}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def is_there(proof: str) -> bool:
    if proof.startswith("PDL"):
        return proof in CODES
    file, _, function = proof.partition("::")
    return function in functions_of(file)


@pytest.mark.parametrize("pair", TABLE, ids=str)
def test_every_row_names_what_shows_it(pair: Pair):
    assert pair.proof
    assert [p for p in (*pair.proof, *([pair.upstream] if pair.upstream else [])) if not is_there(p)] == []


@pytest.mark.parametrize("pair", TABLE, ids=str)
def test_what_is_refused_has_a_rule_and_what_is_exact_a_test(pair: Pair):
    if pair.verdict is Verdict.REFUSED:
        assert any(p.startswith("PDL") for p in pair.proof)
    else:
        assert any("::" in p for p in pair.proof)


@pytest.mark.parametrize("pair", TABLE, ids=str)
def test_what_torch_was_seen_to_do_is_watched_by_a_test(pair: Pair):
    assert bool(pair.upstream) == bool(pair.measured)


def test_every_pair_is_there_once():
    assert len({frozenset(pair.features) for pair in TABLE}) == len(TABLE)


def test_pairs_are_found_by_a_word():
    assert {p.verdict for p in pairs_of("reshard")} == {Verdict.REFUSED}
    assert not pairs_of("no such feature")
