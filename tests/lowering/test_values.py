"""Values and expressions: exact, with units, total."""

from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import evolve

from pdsl.grammar.diagnostics import DiagnosticSink
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source
from pdsl.lowering.evaluate import Evaluator
from pdsl.lowering.names import build_scope
from pdsl.lowering.spec import Quantity
from pdsl.lowering.values import UNKNOWN, ValueProblem, compare, compute, near, show


def evaluate(expression: str, *lines: str):
    """The value of an expression in a file with some lines, and the codes and messages of the findings."""
    sink = DiagnosticSink()
    file = parse(Source("x.pdsl", "\n".join(["pdsl 1", *lines, f"let wanted = {expression}", ""])), sink)
    scope = build_scope(file, None, sink)
    evaluator = Evaluator(sink)
    values = [evaluator.name(binding.name, scope) for binding in scope.bindings.values()]
    value = values[-1]
    return value, [f"{d.code} {d.message}" for d in sink.diagnostics]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("32 / 2", 16),
        ("33 / 2", Fraction(33, 2)),
        ("1/3", Fraction(1, 3)),
        ("1/3 + 1/3 + 1/3 - 1", 0),
        ("-2 - -3", 1),
        ("1e-3", Fraction(1, 1000)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("true", True),
        ('"a\\"b"', 'a"b'),
        ("[1, 2.5]", (1, Fraction(5, 2))),
        ("5%", Quantity(Fraction(1, 20), "ratio")),
        ("2 * 30s", Quantity(Fraction(60), "seconds")),
        ("1min + 500ms", Quantity(Fraction(121, 2), "seconds")),
        ("16GiB / 2", Quantity(Fraction(2**33), "bytes")),
        ("16GiB / 4GiB", 4),
        ("450GB / 1s", Quantity(Fraction(450 * 10**9), "bytes/s")),
        ("10GB/s * 2s", Quantity(Fraction(20 * 10**9), "bytes")),
        ("5% * 40", 2),
        ("1 epoch", Quantity(Fraction(1), "epochs")),
    ],
)
def test_expressions_have_exact_values(text, value):
    found, problems = evaluate(text)
    assert (found, problems) == (value, [])


def test_a_decimal_stays_a_decimal_and_a_whole_number_whole():
    assert type(evaluate("1.0")[0]) is Fraction
    assert type(evaluate("8 / 2")[0]) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "PDL102 1 is divided by zero"),
        ("30s + 1GiB", "PDL102 30s and 1GiB cannot be added: a time and a size in bytes"),
        ("30s * 30s", "PDL102 30s and 30s cannot be multiplied: a time and a time"),
        ('1 + "a"', 'PDL102 + needs numbers, "a" is a string'),
        ("true + 1", "PDL102 + needs numbers, true is true or false"),
        ("30sec", "PDL102 unknown unit sec"),
        ("hlf * 2", "PDL101 unknown name hlf"),
        ("4 to 2", "PDL102 this range is empty: 4 > 2"),
    ],
)
def test_what_has_no_value_is_told_once(text, message):
    value, problems = evaluate(text)
    assert value is UNKNOWN
    assert problems == [message]


def test_an_unknown_value_spreads_in_silence():
    value, problems = evaluate("a * 2 + b", "let a = nowhere", "let b = a / 0 + a")
    assert value is UNKNOWN
    assert problems == ["PDL101 unknown name nowhere"]


def test_names_are_found_before_and_after_their_use():
    assert evaluate("half * 2", "let half = layers / 2", "param layers: int = 32") == (32, [])


def test_a_circle_of_names_is_told_once():
    _, problems = evaluate("a", "let a = b", "let b = c", "let c = a")
    assert problems == ["PDL105 a needs itself: a -> b -> c -> a"]


def test_numbers_cannot_grow_without_bound():
    lines = ["let a0 = 10", *(f"let a{n} = a{n - 1} * a{n - 1}" for n in range(1, 40))]
    value, problems = evaluate("a39", *lines)
    assert value is UNKNOWN
    assert problems == ["PDL102 the result is too large"]


def test_lists_cannot_grow_without_bound():
    lines = ["let a0 = [1, 2]", *(f"let a{n} = [a{n - 1}, a{n - 1}]" for n in range(1, 60))]
    value, problems = evaluate("a59", *lines)
    assert value is UNKNOWN
    assert len(problems) == 1
    assert "too long" in problems[0]


def test_a_long_sum_is_no_deep_one():
    sink = DiagnosticSink()
    file = parse(Source("x.pdsl", "pdsl 1\nlet wanted = 1 + 1\n"), sink)
    scope = build_scope(file, None, sink)
    total = scope.bindings["wanted"].value
    for _ in range(3000):
        total = evolve(total, left=total)
    assert Evaluator(sink).evaluate(total, scope) == 3002
    assert not sink.diagnostics


@pytest.mark.parametrize("text", ["(" * 200 + "1" + ")" * 200, "-" * 200 + "1", "[" * 200 + "]" * 200, "1 + (" * 150 + "1" + ")" * 150])
def test_deep_nesting_ends_with_a_value_or_a_finding(text):
    value, problems = evaluate(text)
    assert value is not UNKNOWN or len(problems) == 1


def test_long_chains_of_names_end_with_a_value_or_a_finding():
    forward = [f"let a{n} = a{n + 1} + 1" for n in range(2000)]
    _, problems = evaluate("a0", *forward, "let a2000 = 0")
    assert len(problems) == 1
    backward = ["let a0 = 0", *(f"let a{n} = a{n - 1} + 1" for n in range(1, 60))]
    assert evaluate("a59", *backward) == (59, [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Quantity(Fraction(30 * 2**30), "bytes"), "30GiB"),
        (Quantity(Fraction(1, 2), "seconds"), "500ms"),
        (Quantity(Fraction(7200), "seconds"), "2h"),
        (Quantity(Fraction(1, 20), "ratio"), "5%"),
        (Quantity(Fraction(450 * 10**9), "bytes/s"), "450GB/s"),
        (Fraction(1, 3), "1/3"),
        (Fraction(33, 2), "16.5"),
        (True, "true"),
        (("a", 1), '["a", 1]'),
    ],
)
def test_values_are_shown_as_one_would_write_them(value, text):
    assert show(value) == text


def test_comparison_needs_one_dimension():
    assert compare("<", Quantity(Fraction(1), "seconds"), Quantity(Fraction(2), "seconds")) is True
    assert compare("==", "a", "a") is True
    assert compare(">", Fraction(1, 20), Quantity(Fraction(1, 100), "ratio")) is True
    with pytest.raises(ValueProblem, match="a time and a number"):
        compare("==", Quantity(Fraction(1), "seconds"), 1)


def test_unknown_stays_unknown_in_all_operations():
    assert all(compute(op, UNKNOWN, 0) is UNKNOWN for op in "+-*/")
    assert compare("==", 1, UNKNOWN) is UNKNOWN


def test_near_words():
    assert near("bacth", ["data", "batch", "steps"]) == "batch"
    assert near("FSDP", ["fsdp", "tp"]) == "fsdp"
    assert near("zzz", ["fsdp", "tp"]) is None
