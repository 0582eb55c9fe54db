"""Patterns over dotted names: what they match, what they cover, what is malformed and where, and that matching stays fast."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.grammar.patterns import Pattern, PatternError, parse_pattern
from pdsl.grammar.source import Source, Span

NAMES = {"half": 2, "layers": 4, "zero": 0}


def pattern(text: str, names: Mapping[str, int] = NAMES) -> Pattern:
    return parse_pattern(text, names, Span(Source("t", text), 0, len(text)))


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("norm.weight", ["norm.weight"], ["norm", "norm.weight.x", "a.norm.weight", "normXweight", ""]),
        ("layers.*.weight", ["layers.0.weight", "layers.x1.weight"], ["layers.weight", "layers.0.1.weight", "layers.0.weights"]),
        ("w*", ["w", "w1", "wq"], ["w.q", "aw"]),
        ("*w", ["w", "aw"], ["w1", "a.w"]),
        ("a*b*c", ["abc", "aXbYc", "abbcc"], ["ab", "abcd", "a.b.c"]),
        ("**", ["a", "a.b.c"], []),
        ("**.weight", ["weight", "a.weight", "a.b.weight"], ["weights", "a.weight.b", "aweight"]),
        ("layers.**", ["layers", "layers.0", "layers.0.attn.wq"], ["layer", "a.layers"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b", "a.b.b"], ["a", "ab", "a.x", "b"]),
        (
            "**.norm*.weight",
            ["norm.weight", "norm1.weight", "layers.3.norm_2.weight"],
            ["norm1.bias", "layers.3.xnorm.weight", "norm.a.weight"],
        ),
        ("**.a.**.b", ["a.b", "x.a.a.y.b", "a.x.b"], ["b.a", "x.b"]),
        (
            "layers.*.attn.w{q,k,v}.weight",
            ["layers.0.attn.wq.weight", "layers.9.attn.wv.weight"],
            ["layers.0.attn.wo.weight", "layers.0.attn.w.weight"],
        ),
        ("w{1,3}", ["w1", "w3"], ["w2", "w13", "w1,3", "w{1,3}"]),
        ("{attn,mlp}.{a, b}", ["attn.a", "attn.b", "mlp.a", "mlp.b"], ["attn.c", "attn", "a.attn"]),
        ("{a*,b.**}", ["a", "ax", "b", "b.c.d"], ["c", "ax.y"]),
        ("*{ab,a}*c", ["abc", "aac", "xabyc", "xac"], ["xbc"]),
        ("layers[0..2]", ["layers.0", "layers.1"], ["layers.2", "layers", "layers.0.attn", "layers.00", "layers.a", "layers[0]"]),
        ("layers[0..half]", ["layers.0", "layers.1"], ["layers.2"]),
        ("layers[half..].w", ["layers.2.w", "layers.4711.w"], ["layers.1.w", "layers.2"]),
        ("layers[half..layers]", ["layers.2", "layers.3"], ["layers.1", "layers.4"]),
        ("layers[..3]", ["layers.0", "layers.2"], ["layers.3", "layers.-1"]),
        ("layers[..]", ["layers.0", "layers.99"], ["layers.x", "layers"]),
        ("layers[ 1 .. 2 ]", ["layers.1"], ["layers.0", "layers.2"]),
        ("layers[3].w", ["layers.3.w"], ["layers.2.w", "layers.33.w"]),
        ("layers.[zero]", ["layers.0"], ["layers.1"]),
        ("[1..3].weight", ["1.weight", "2.weight"], ["0.weight", "weight"]),
        ("a[0..2][5]", ["a.0.5", "a.1.5"], ["a.0.4", "a.5"]),
        ("**[0..2].w", ["0.w", "a.b.1.w"], ["a.2.w", "w"]),
        ("*[0..2]", ["a.0", "b.1"], ["0", "a.b.0"]),
        ("{enc,dec}[..1]", ["enc.0", "dec.0"], ["enc.1"]),
        ("{a[1],b}", ["a.1", "b"], ["a", "b.1"]),
        ("a-b", ["a-b"], ["a_b"]),
    ],
)
def test_matches(text: str, yes: list[str], no: list[str]) -> None:
    found = pattern(text)
    assert [name for name in yes if not found.matches(name)] == []
    assert [name for name in no if found.matches(name)] == []


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("layers[0..2]", ["layers.0", "layers.1.attn", "layers.0.attn.wq.weight"], ["layers", "layers.2", "layers.2.attn", "layers0"]),
        ("tok_embeddings", ["tok_embeddings", "tok_embeddings.weight"], ["tok_embeddings2", "a.tok_embeddings"]),
        ("layers.*", ["layers.0", "layers.x.y"], ["layers"]),
        ("**", ["a", "a.b"], []),
        ("**.attn", ["attn", "a.attn.b.c", "layers.0.attn"], ["layers.0", "attn2.x"]),
        ("layers.**", ["layers", "layers.0", "layers.0.x"], ["head"]),
        ("{norm,head}", ["norm", "head.weight"], ["normal"]),
    ],
)
def test_covers_the_module_and_all_inside_it(text: str, yes: list[str], no: list[str]) -> None:
    found = pattern(text)
    assert [name for name in yes if not found.covers_module(name)] == []
    assert [name for name in no if found.covers_module(name)] == []


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("", 0, "the pattern is empty"),
        ("a..b", 2, "a segment is empty"),
        (".a", 0, "a segment is empty"),
        ("a.", 2, "a segment is empty"),
        ("a**b", 1, "`**` stands for whole segments"),
        ("x.a.***", 4, "`**` stands for whole segments"),
        ("w{q,k", 1, "`{` is never closed"),
        ("w}q", 1, "`}` without `{`"),
        ("w{q,{k}}", 4, "braces cannot be nested"),
        ("w{q,,k}", 4, "an alternative between braces is empty"),
        ("w{}", 2, "an alternative between braces is empty"),
        ("layers.a b", 8, "' ' cannot stand in a pattern"),
        ("x.{ab,c$d}", 7, "'$' cannot stand in a pattern"),
        ("(a|b)", 0, "'(' cannot stand in a pattern"),
        ("a\n", 1, r"'\n' cannot stand in a pattern"),
        ("layers[0..hlaf]", 10, "'hlaf' is no integer and no name of one"),
        ("layers[ hlaf ]", 8, "'hlaf' is no integer and no name of one"),
        ("{x,layers[1..0.5]}", 9, "expected an index range"),
        ("layers[-1]", 7, "'-1' is no integer"),
        ("layers[0", 6, "expected an index range"),
        ("layers[0]x", 9, "expected an index range"),
        ("layers[]", 6, "an index range is empty"),
        ("layers[3..3]", 6, "the range 3..3 holds no index"),
        ("a.layers[layers..half]", 8, "the range 4..2 holds no index"),
        ("{a,b}" * 10, 45, "the braces stand for more than 1000 patterns"),
        ("a" * 1001, 1000, "the pattern is longer than 1000 characters"),
    ],
)
def test_malformed_patterns_say_what_and_where(text: str, offset: int, message: str) -> None:
    with pytest.raises(PatternError, match="^" + re.escape(message)) as caught:
        pattern(text)
    assert caught.value.offset == offset


def test_text_and_span_are_kept_and_equality_is_by_meaning() -> None:
    one = pattern("layers[0..half]")
    assert (one.text, str(one)) == ("layers[0..half]", "layers[0..half]")
    assert one.span is not None
    assert one.span.text == one.text
    assert one == parse_pattern("layers[0..half]", NAMES)
    assert one != pattern("layers[0..half]", {"half": 3})
    assert hash(one) == hash(parse_pattern("layers[0..half]", NAMES))


def test_hostile_patterns_and_names_take_bounded_time() -> None:
    deep = ".".join(["a"] * 5000)
    wide = "a" * 100_000
    stars = ".".join(["**"] * 30)
    began = time.process_time()
    assert not pattern("**.**.**.**.**.x").matches(deep)
    assert pattern("**.**.**.**.**.a").matches(deep)
    assert not pattern(stars + ".x.**.a").matches(deep)
    assert not pattern("**.x").covers_module(deep)
    assert not pattern("*a" * 40 + "*b").matches(wide)
    assert pattern("*a" * 40 + "*").matches(wide)
    with pytest.raises(PatternError):
        pattern("[" + " " * 990 + "x")
    with pytest.raises(PatternError):
        pattern("a." * 499 + ".")
    assert time.process_time() - began < 3


SEGMENT = st.sampled_from(["a", "b", "ab", "0", "1", "10"])
PART = st.sampled_from(["a", "b", "*", "a*", "*b", "**", "{a,b}", "{ab,0}", "[0..2]", "[1..]", "[1]", "a[..2]"])


def reference(parts: list[str], segments: list[str]) -> bool:
    """The definition, by trying everything."""
    if not parts:
        return not segments
    head, rest = parts[0], parts[1:]
    if head == "**":
        return any(reference(rest, segments[skip:]) for skip in range(len(segments) + 1))
    if head == "a[..2]":
        return reference(["a", "[..2]", *rest], segments)
    if not segments:
        return False
    one = segments[0]
    fits = {
        "*": True,
        "a*": one.startswith("a"),
        "*b": one.endswith("b"),
        "{a,b}": one in ("a", "b"),
        "{ab,0}": one in ("ab", "0"),
        "[0..2]": one in ("0", "1"),
        "[..2]": one in ("0", "1"),
        "[1..]": one in ("1", "10"),
        "[1]": one == "1",
    }
    return fits.get(head, one == head) and reference(rest, segments[1:])


@given(st.lists(PART, min_size=1, max_size=5), st.lists(SEGMENT, min_size=1, max_size=5))
def test_matching_and_covering_follow_the_definition(parts: list[str], segments: list[str]) -> None:
    found = pattern(".".join(parts))
    assert found.matches(".".join(segments)) == reference(parts, segments)
    prefixes = [segments[:stop] for stop in range(1, len(segments) + 1)]
    assert found.covers_module(".".join(segments)) == any(reference(parts, prefix) for prefix in prefixes)


@given(st.text(max_size=30) | st.text("ab*{},[].0123 ", max_size=30))
def test_any_text_is_a_pattern_or_a_pattern_error(text: str) -> None:
    try:
        offset = 0
        pattern(text).matches("a.0.b")
    except PatternError as error:
        offset = error.offset
    assert 0 <= offset <= len(text)
