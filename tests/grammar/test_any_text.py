"""Any text at all gives a tree and diagnostics in bounded time, never an exception."""

from __future__ import annotations

import time

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.syntax import File
from tests.grammar.reading import clean, read
from tests.grammar.specs import LARGE, SMALL

ANYTHING = st.text(st.characters(exclude_categories=()), max_size=200)
PIECES = st.sampled_from(
    [
        "pdsl",
        "1",
        "mesh",
        "axis",
        "stage",
        "profile",
        "param",
        "let",
        "assert",
        "import",
        "as",
        "to",
        "a",
        "_",
        '"s"',
        '"',
        "'",
        "=",
        "=>",
        "==",
        "<",
        "+",
        "-",
        "*",
        "/",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        ".",
        "@",
        ";",
        "\n",
        "\n  ",
        "#",
        "30s",
        "1.5",
        "1e999",
        "$",
        "\\",
        "\x00",
        "�",
        "é",
        "",
    ]
)
SOUP = st.lists(PIECES, max_size=60).map(" ".join)
LINES = st.lists(st.sampled_from([*LARGE.splitlines(), *SMALL.splitlines(), "}", "{", ")"]), max_size=40).map("\n".join)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A sound spec with a few runs of characters cut out, doubled or overwritten."""
    text = LARGE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 30)))
        text = text[:start] + draw(st.one_of(st.just(""), SOUP, st.just(text[start:stop] * 2))) + text[stop:]
    return text


def nodes(node: object) -> int:
    """Walk a tree as later steps do, recursively; also a check that its depth is bounded."""
    if isinstance(node, tuple):
        return sum(map(nodes, node))
    if attrs.has(type(node)) and hasattr(node, "span"):
        own = getattr(node, "span")  # noqa: B009  any node has one
        assert 0 <= own.start <= own.stop <= len(own.source.text)
        return 1 + sum(nodes(getattr(node, f.name)) for f in attrs.fields(type(node)) if f.name not in ("span", "source"))
    return 0


def check(text: str) -> tuple[File, tuple[Diagnostic, ...]]:
    file, found = read(text)
    assert nodes(file) >= 1
    assert len(found) <= 50
    assert any(d.code == "PDL001" for d in found) or not file.damaged
    for diagnostic in found:
        assert diagnostic.code in ("PDL001", "PDL002")
        assert diagnostic.span is not None
        assert 0 <= diagnostic.span.start <= diagnostic.span.stop <= len(text)
        assert diagnostic.message.isprintable() or "\u00ad" in diagnostic.message
        assert diagnostic.message.encode()  # no half characters
    return file, found


@settings(max_examples=60)
@given(ANYTHING)
def test_any_characters(text: str) -> None:
    check(text)


@settings(max_examples=60)
@given(SOUP)
def test_any_words_and_signs(text: str) -> None:
    check(text)


@settings(max_examples=40)
@given(LINES)
def test_any_lines_of_sound_specs(text: str) -> None:
    check(text)


@settings(max_examples=60)
@given(edited())
def test_any_edits_of_a_sound_spec(text: str) -> None:
    check(text)


@settings(max_examples=20)
@given(LINES)
def test_repairs_stay_inside_the_text(text: str) -> None:
    for diagnostic in read(text)[1]:
        for edit in diagnostic.fix.edits if diagnostic.fix else ():
            assert 0 <= edit.span.start <= edit.span.stop <= len(text)


MEGA = 1_000_000
LONG = {
    "open brackets": "(" * MEGA,
    "braces in lines": "a {\n" * (MEGA // 4),
    "brackets of three kinds": "([{" * (MEGA // 3),
    "nested": "(" * (MEGA // 2) + ")" * (MEGA // 2),
    "quotes": '"' * MEGA,
    "one open string": '"' + "\\" * MEGA,
    "digits": "1" * MEGA,
    "one name": "a" * MEGA,
    "NUL": "\0" * MEGA,
    "separators": ";" * MEGA,
    "comments": "#\n" * (MEGA // 2),
    "signs": "pdsl 1\nb { a = " + "-" * 100_000 + "1 }",
    "operators": "pdsl 1\nb { a = 1" + " + 1" * 20_000 + " }",
    "long list": "pdsl 1\nb { a = [" + "1, " * 20_000 + "] }",
    "labels": "pdsl 1\nb " + "c " * 40_000 + "{ }",
    "errors": "pdsl 1\nb {\n" + " x y\n" * 30_000 + "}",
    "bad escapes": 'pdsl 1\nb { a = "' + "\\q" * 100_000 + '" }',
    "open lists": "pdsl 1\nb {\n" + " a = [1\n" * 15_000 + "}",
}


@pytest.mark.parametrize("kind", sorted(LONG))
def test_a_megabyte_of_anything_ends_soon(kind: str) -> None:
    began = time.process_time()
    _, found = read(LONG[kind])
    # Each takes well below one second; quadratic time would be minutes.
    assert time.process_time() - began < 8
    assert found or kind in ("long list", "labels")


def test_chains_and_nesting_are_bounded_so_that_the_tree_can_be_walked_recursively() -> None:
    def key(expression: str) -> str:
        return f"pdsl 1\nb {{ a = {expression} }}\n"

    assert nodes(clean(key("1" + " + 1" * 63))) > 64
    for deep in ("1" + " + 1" * 500, "f(" * 30 + "1" + " * 2)" * 30 + " + 1" * 60, "-" * 65 + "1", "[" * 70 + "]" * 70):
        _, found = check(key(deep))
        assert [d.code for d in found] == ["PDL001"], deep
