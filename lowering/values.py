"""Values of the language: how they are shown, named and computed with. All numbers are exact.

`UNKNOWN` stands for a value that could not be found; it was already reported, and whatever is computed from it is UNKNOWN too, in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fractions import Fraction
from typing import TypeGuard

from pdsl.lowering.spec import CallValue, Quantity, Rest, SizeRange, Value

__all__ = [
    "UNKNOWN",
    "Evaluated",
    "Unknown",
    "ValueProblem",
    "compare",
    "compute",
    "describe",
    "is_number",
    "known",
    "near",
    "show",
    "weight",
]

_BITS = 256  # numbers beyond this many bits are refused, so that no text makes the checker slow
_WEIGHT = 10_000  # most scalars in one list


class Unknown(Enum):
    """The type of UNKNOWN."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

Evaluated = Value | Rest | SizeRange | Unknown


class ValueProblem(Exception):
    """An operation that has no result; the message says why, with the values."""


def known(*values: Evaluated) -> bool:
    """Whether none of the values is UNKNOWN."""
    return not any(isinstance(v, Unknown) for v in values)


def is_number(value: object) -> TypeGuard[int | Fraction]:
    """Whether this is a plain number; true and false are none."""
    return isinstance(value, int | Fraction) and not isinstance(value, bool)


# --- words ----------------------------------------------------------------------------------------------------------------------------------

_DIMENSIONS = {
    "seconds": "a time",
    "bytes": "a size in bytes",
    "bytes/s": "a rate in bytes per second",
    "ratio": "a percentage",
    "steps": "a number of steps",
    "epochs": "a number of epochs",
}
_SHOWN = {
    "bytes": [*((f"{p}iB", 1024**n) for n, p in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "K"))), ("B", 1)],
    "bytes/s": [*((f"{p}B/s", 1000**n) for n, p in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k"))), ("B/s", 1)],
    "seconds": [("h", 3600), ("min", 60), ("s", 1), ("ms", Fraction(1, 1000)), ("us", Fraction(1, 1_000_000))],
    "ratio": [("%", Fraction(1, 100))],
    "steps": [(" steps", 1)],
    "epochs": [(" epochs", 1)],
}


def _number(value: int | Fraction) -> str:
    fraction = Fraction(value)
    if fraction.denominator == 1:
        return str(fraction.numerator)
    rest = fraction.denominator
    while rest % 10 == 0:
        rest //= 10
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest != 1:
        return f"{fraction.numerator}/{fraction.denominator}"
    return f"{float(fraction):.12g}"


def _quantity(value: Quantity) -> str:
    units = _SHOWN.get(value.dimension, [(f" {value.dimension}", 1)])
    if value.value == 0:
        return f"0{units[-1][0]}"
    unit, size = next(((u, s) for u, s in units if (value.value / s).denominator == 1), units[-1])
    return f"{_number(value.value / size)}{unit}"


def show(value: Evaluated) -> str:
    """A value as one would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Fraction):
        return _number(value)
    if isinstance(value, Quantity):
        return _quantity(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, CallValue):
        return f"{value.name}({', '.join((*map(show, value.positional), *(f'{k} = {show(v)}' for k, v in value.keywords)))})"
    if isinstance(value, SizeRange):
        return f"{value.low} to {value.high}"
    if value is None:
        return "nothing"
    return "rest" if isinstance(value, Rest) else "?"


def describe(value: Evaluated) -> str:
    """What kind of value this is, in words: `a size in bytes`."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | Fraction):
        return "a number"
    if isinstance(value, Quantity):
        return _DIMENSIONS.get(value.dimension, value.dimension)
    if isinstance(value, str):
        return "a string"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, CallValue):
        return "a call"
    return "a range" if isinstance(value, SizeRange) else "a word"


def near(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that was probably meant, or None."""
    from difflib import get_close_matches  # slow to import, and needed only when something is wrong

    folded = {option.lower(): option for option in reversed(list(words))}
    if word.lower() in folded:
        return folded[word.lower()]
    found = get_close_matches(word.lower(), list(folded), n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def weight(value: Evaluated, limit: int = _WEIGHT) -> int:
    """How many scalars a value holds; counting stops beyond `limit`. Raises ValueProblem there."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        total += 1
        if total > limit:
            raise ValueProblem(f"this list is too long: more than {limit} values")
        if isinstance(one, tuple):
            waiting.extend(one)
    return total


# --- computing ------------------------------------------------------------------------------------------------------------------------------


def _parts(value: Evaluated, operator: str) -> tuple[int | Fraction, str]:
    """Number and dimension of an operand; a percentage counts as a plain number."""
    if is_number(value):
        return value, ""
    if isinstance(value, Quantity):
        return value.value, "" if value.dimension == "ratio" else value.dimension
    raise ValueProblem(f"{operator} needs numbers, {show(value)} is {describe(value)}")


def _joined(value: int | Fraction, dimension: str) -> int | Fraction | Quantity:
    fraction = Fraction(value)
    if max(fraction.numerator.bit_length(), fraction.denominator.bit_length()) > _BITS:
        raise ValueProblem("the result is too large")
    return Quantity(fraction, dimension) if dimension else value


def compute(operator: str, left: Evaluated, right: Evaluated) -> Evaluated:
    """`left operator right` for `+ - * /`. Whole numbers stay whole where they can. Raises ValueProblem."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    (a, x), (b, y) = _parts(left, operator), _parts(right, operator)
    if operator in "+-":
        if x != y:
            raise ValueProblem(
                f"{show(left)} and {show(right)} cannot be {'added' if operator == '+' else 'subtracted'}: {describe(left)} and {describe(right)}"
            )
        return _joined(a + b if operator == "+" else a - b, x)
    if operator == "*":
        if x and y and {x, y} != {"seconds", "bytes/s"}:
            raise ValueProblem(f"{show(left)} and {show(right)} cannot be multiplied: {describe(left)} and {describe(right)}")
        return _joined(a * b, "bytes" if x and y else x or y)
    if b == 0:
        raise ValueProblem(f"{show(left)} is divided by zero")
    if y and x != y and (x, y) != ("bytes", "seconds"):
        raise ValueProblem(f"{show(left)} cannot be divided by {show(right)}: {describe(left)} and {describe(right)}")
    dimension = "bytes/s" if y and x != y else "" if y else x
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return _joined(a // b, dimension)
    return _joined(Fraction(a) / Fraction(b), dimension)


def compare(operator: str, left: Evaluated, right: Evaluated) -> bool | Unknown:
    """`left operator right` for `== != < <= > >=`. Raises ValueProblem if the two cannot be compared."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    numeric = all(is_number(v) or isinstance(v, Quantity) for v in (left, right))
    if not numeric:
        if operator not in ("==", "!="):
            raise ValueProblem(f"{operator} needs numbers, not {describe(left)} and {describe(right)}")
        if describe(left) != describe(right):
            raise ValueProblem(f"{show(left)} and {show(right)} cannot be compared: {describe(left)} and {describe(right)}")
        return (left == right) is (operator == "==")
    (a, x), (b, y) = _parts(left, operator), _parts(right, operator)
    if x != y:
        raise ValueProblem(f"{show(left)} and {show(right)} cannot be compared: {describe(left)} and {describe(right)}")
    return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[operator]
