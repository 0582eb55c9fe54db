"""Brackets that are missing, too many or of the wrong kind: one finding at the bracket concerned, and the rest is read as if it were right."""

from __future__ import annotations

import pytest

from pdsl.grammar.delimiters import CLOSERS, MAX_DEPTH, OPENERS, balance
from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.lexer import tokenize
from pdsl.grammar.source import Source
from pdsl.grammar.syntax import Assign, Block
from pdsl.grammar.tables import load_tables
from tests.grammar.reading import lines, place, read
from tests.grammar.specs import DAMAGEABLE


def summary(found: Diagnostic) -> tuple[str, str, tuple[str, ...]]:
    return place(found.span), found.message, tuple(place(label.span) for label in found.labels)


# text after `pdsl 1`, place of the finding, message, places called "opened here"
MISMATCHES = [
    ("train {\n  a = f(1\n  b = 2\n}", "3:10-10", "`(` is never closed", ("3:8-9",)),
    ("train {\n  a = f([1, 2)\n  b = 2\n}", "3:14-14", "`[` is never closed", ("3:9-10",)),
    ("train {\n  a = [1\n}", "3:9-9", "`[` is never closed", ("3:7-8",)),
    ("train {\n  a = f(\n    x = 1\n  b = 2\n}", "4:10-10", "`(` is never closed", ("3:8-9",)),
    ("train {\n  a = f(1))\n  b = 2\n}", "3:11-12", "`)` closes nothing", ()),
    ("train {\n  a = 1]\n}", "3:8-9", "`]` closes nothing", ()),
    ("train {\n  a = (1]\n  b = 2\n}", "3:9-10", "`(` is closed by `]`", ("3:7-8",)),
    ("train {\n  a = f(1; b = 2\n}", "3:10-10", "`(` is never closed", ("3:8-9",)),
    ("train { a = 1; b = 2\nmesh { axis pp = 2 }", "2:21-21", "`{` is never closed", ("2:7-8",)),
    ("train {\n  a = 1\n  b = 2\nmesh {\n  axis pp = 2\n}", "4:8-8", "`{` is never closed", ("2:7-8",)),
    ("train {\na = 1\nb = 2\nmesh {\naxis pp = 2\n}", "4:6-6", "`{` is never closed", ("2:7-8",)),
    ("train {\n  a = 1\n  b = 2", "4:8-8", "`{` is never closed", ("2:7-8",)),
    ("train {\n  a = 1\n}\n}\nmesh { }", "5:1-2", "`}` closes nothing", ()),
    ("train a = 1; b = 2 }\nmesh { }", "2:20-21", "`}` closes nothing", ()),
    ("train\n  a = 1\n  b = 2\n}\nmesh { }", "2:6-6", "`{` is missing after the head of the block", ()),
    ('pipeline over pp {\n  stage x { "a"\n  schedule = f()\n}', "3:16-16", "`{` is never closed", ("3:11-12",)),
    ('pipeline over pp {\n  stage x {\n    "a",\n  schedule = f()\n}', "4:9-9", "`{` is never closed", ("3:11-12",)),
    ('pipeline over pp {\n  stage x "a" }\n  schedule = f()\n}', "3:15-16", "`}` closes nothing", ()),
    ('shard {\n  "a" => [(x, y], _]\n}', "3:16-16", "`(` is never closed", ("3:11-12",)),
    ("let x = (1\nlet y = 2", "2:11-11", "`(` is never closed", ("2:9-10",)),
    ("let x = f(\nparam y: int", "2:11-11", "`(` is never closed", ("2:10-11",)),
    ("}", "2:1-2", "`}` closes nothing", ()),
    ("{", "2:2-2", "`{` is never closed", ("2:1-2",)),
]


@pytest.mark.parametrize(("text", "where", "message", "opened"), MISMATCHES, ids=[repr(m[0]) for m in MISMATCHES])
def test_a_mismatch_is_one_finding(text: str, where: str, message: str, opened: tuple[str, ...]) -> None:
    _, found = read("pdsl 1\n" + text)
    assert [summary(d) for d in found] == [(where, message, opened)]
    assert all(label.text == "opened here" for label in found[0].labels)


def test_the_statements_around_a_missing_bracket_are_still_there() -> None:
    file, _ = read("pdsl 1\ntrain {\n  a = f(1\n  b = 2\nmesh {\n  c = 3\n}\n")
    train, mesh = file.items[1:]
    assert isinstance(train, Block)
    assert isinstance(mesh, Block)
    assert [s.key.text for s in train.statements if isinstance(s, Assign)] == ["a", "b"]
    assert [s.key.text for s in mesh.statements if isinstance(s, Assign)] == ["c"]
    assert file.damaged


def test_two_mistakes_that_cancel_out_are_told_by_the_lines() -> None:
    text = "pdsl 1\ntrain {\n  a = f(x = 1\n  b = 2\n  c = 3)\n  d = 4\n}\n"
    _, found = read(text)
    assert [summary(d) for d in found] == [("3:14-14", "`(` is never closed", ("3:8-9",)), ("5:8-9", "`)` closes nothing", ())]


def test_odd_indentation_is_no_error_where_brackets_match() -> None:
    for text in ("train {\na = f(\nx = 1,\n  y = [\n2\n]\n)\n    b = 2\n}", "  train { a = 1\nb = 2 }\n mesh {\n}"):
        assert read("pdsl 1\n" + text)[1] == ()


def test_another_mistake_does_not_make_odd_indentation_one() -> None:
    _, found = read("pdsl 1\ntrain {\na = f(\nx = 1,\ny = 2\n)\nb: 2\n}\nmesh { axis pp 2 }\n")
    assert lines(found) == {7, 9}


def test_a_missing_brace_does_not_hide_other_mistakes() -> None:
    _, found = read("pdsl 1\ntrain {\n  a: 1\nmesh {\n  axis pp 2\n  axis dp = 3\n}\nlet = 4\n")
    assert [(d.span.begin.line, d.message[:20]) for d in found if d.span] == [
        (3, "expected `=`, found "),
        (3, "`{` is never closed"),
        (5, "expected `=`, found "),
        (8, "expected a name, fou"),
    ]


def test_every_block_without_its_closing_brace_is_found_at_its_end() -> None:
    rows = DAMAGEABLE.splitlines()
    closing = [number for number, row in enumerate(rows) if row == "}"]
    for number in closing:
        _, found = read("\n".join([*rows[:number], *rows[number + 1 :]]))
        assert [(d.span.begin.line, d.message) for d in found if d.span] == [(number, "`{` is never closed")]
    everything = [row for row in rows if row != "}"]
    _, found = read("\n".join(everything))
    assert [d.message for d in found] == ["`{` is never closed"] * len(closing)


def test_every_block_without_its_opening_brace_is_found_at_its_head() -> None:
    rows = DAMAGEABLE.splitlines()
    opening = [number for number, row in enumerate(rows) if row.split("#")[0].rstrip().endswith("{")]
    assert len(opening) >= 6
    for number in opening:
        _, found = read("\n".join([*rows[:number], rows[number].replace("{", " ", 1), *rows[number + 1 :]]))
        assert lines(found) == {number + 1}


@pytest.mark.parametrize("opener", "([")
def test_brackets_nested_too_deep_are_one_finding(opener: str) -> None:
    closer = {"(": ")", "[": "]"}[opener]
    depth = MAX_DEPTH - 1  # the block's brace is one
    assert read(f"pdsl 1\nb {{ a = {opener * depth}1{closer * depth} }}")[1] == ()
    _, found = read(f"pdsl 1\nb {{ a = {opener * 10_000}1{closer * 10_000}\n  c: 1\n}}")
    assert [(place(d.span), d.message) for d in found] == [
        (f"2:{9 + depth}-{10 + depth}", "more than 64 brackets or signs inside each other"),
        ("3:4-5", "expected `=`, found `:`"),
    ]


def test_ten_thousand_open_brackets_are_one_finding() -> None:
    _, found = read("pdsl 1\nb {\n  a = " + "([" * 5000 + "\n  c: 1\n}")
    assert [(d.span.begin.line, d.message) for d in found if d.span] == [
        (3, "`(` is never closed"),
        (4, "expected `=`, found `:`"),
    ]


@pytest.mark.parametrize("by_lines", [False, True])
@pytest.mark.parametrize("text", [m[0] for m in MISMATCHES])
def test_what_comes_out_is_balanced_and_partners_point_at_each_other(text: str, by_lines: bool) -> None:
    source = Source("t", text)
    balanced = balance(source, tokenize(source, load_tables()).tokens, by_lines=by_lines)
    stack: list[int] = []
    for at, (token, partner) in enumerate(zip(balanced.tokens, balanced.partners, strict=True)):
        if token.kind in OPENERS:
            stack.append(at)
            assert OPENERS[token.kind] == balanced.tokens[partner].kind
        elif token.kind in CLOSERS:
            opener = stack.pop()
            assert (partner, balanced.partners[opener]) == (opener, at)
        else:
            assert partner == -1
    assert stack == []
