"""From evaluated values to what a key of the table takes: type, unit, bounds and words."""

from __future__ import annotations

import re
from fractions import Fraction

from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink
from pdsl.grammar.source import Span
from pdsl.lowering.blocks import KeyInfo, Kind
from pdsl.lowering.spec import CallValue, Quantity, Rest, SizeRange, Value
from pdsl.lowering.values import UNKNOWN, Evaluated, Unknown, describe, is_number, near, show

__all__ = ["FACTORY", "coerce"]

FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""The form of `package.module:factory`."""

_LARGEST = 2**62
_DIMENSION = {Kind.SECONDS: "seconds", Kind.BYTES: "bytes", Kind.RATE: "bytes/s"}


def coerce(value: Evaluated, key: KeyInfo, path: str, span: Span, sink: DiagnosticSink, *, param: bool = False) -> Value | Unknown:
    """The value in the form that the key takes, or UNKNOWN after one PDL102.

    Whole numbers come as int, times as Fraction of seconds, sizes and rates as int of bytes (rounded down). With `param` quantities stay
    quantities, since a param is computed with.
    """
    if isinstance(value, Unknown):
        return UNKNOWN
    problem = _Problem(key, path, span, sink)
    match key.kind:
        case Kind.INT:
            return _whole(value, problem)
        case Kind.NUMBER:
            return _number(value, problem)
        case Kind.BOOL:
            return value if isinstance(value, bool) else problem.type(value)
        case Kind.STRING:
            return value if isinstance(value, str) else problem.type(value)
        case Kind.SECONDS | Kind.BYTES | Kind.RATE:
            return _quantity(value, problem, param=param)
        case Kind.PERIOD:
            return value if isinstance(value, Quantity) and value.dimension in ("steps", "epochs") else _whole(value, problem)
        case Kind.COUNT_PER_TIME:
            return value if isinstance(value, CallValue) and value.name == "per" else _whole(value, problem)
        case Kind.PAIR:
            return _pair(value, problem)
        case Kind.CHOICE:
            return _choice(value, problem)
        case Kind.CHOICES:
            return _choices(value, problem)
        case Kind.NAMES:
            return _names(value, problem)
        case Kind.SOURCE:
            return _source(value, problem)
        case _:
            return problem.type(value) if value is None or isinstance(value, Rest | SizeRange) else value


class _Problem:
    """Reports against one key."""

    def __init__(self, key: KeyInfo, path: str, span: Span, sink: DiagnosticSink) -> None:
        self.key, self.path, self.span, self.sink = key, path, span, sink

    def report(self, message: str, *help_: str) -> Unknown:
        self.sink.add(Diagnostic("PDL102", message, self.span, help=help_))
        return UNKNOWN

    def type(self, value: Evaluated) -> Unknown:
        examples = self.key.examples
        wanted = f"one of {examples}" if self.key.choices and not self.key.calls else self.key.kind.value
        return self.report(
            f"{self.path} takes {wanted}, {show(value)} is {describe(value)}",
            *((f"such as {examples}",) if examples and not self.key.choices else ()),
        )

    def bounds(self, number: int | Fraction, value: Evaluated) -> bool:
        """Whether a number is within the bounds of the key; reports if not."""
        if self.key.minimum is not None and number < self.key.minimum:
            self.report(f"{self.path} must be at least {self.key.minimum}, not {show(value)}")
        elif self.key.above is not None and number <= self.key.above:
            self.report(f"{self.path} must be more than {self.key.above}, not {show(value)}")
        elif not -_LARGEST <= number <= _LARGEST:
            self.report(f"{self.path} = {show(value)} is too large")
        else:
            return True
        return False


def _whole(value: Evaluated, problem: _Problem) -> Value | Unknown:
    if not is_number(value):
        return problem.type(value)
    if Fraction(value).denominator != 1:
        text = problem.span.text
        how = f" ({text} = {show(value)})" if show(value) != text else ""
        return problem.report(f"{problem.path} takes a whole number, not {show(value)}{how}")
    number = int(value)
    return number if problem.bounds(number, number) else UNKNOWN


def _number(value: Evaluated, problem: _Problem) -> Value | Unknown:
    number = value.value if isinstance(value, Quantity) and value.dimension == "ratio" else value
    if not is_number(number):
        return problem.type(value)
    return number if problem.bounds(number, value) else UNKNOWN


def _quantity(value: Evaluated, problem: _Problem, *, param: bool) -> Value | Unknown:
    kind = problem.key.kind
    if is_number(value) and value != 0:
        return problem.report(f"{problem.path} is {kind.value} and needs a unit, {show(value)} has none", f"such as {problem.key.examples}")
    number = Fraction(0) if value == 0 and is_number(value) else None
    if isinstance(value, Quantity) and value.dimension == _DIMENSION[kind]:
        number = value.value
    if number is None:
        return problem.report(f"{problem.path} is {kind.value}, {show(value)} is {describe(value)}", f"such as {problem.key.examples}")
    if not problem.bounds(number, value):
        return UNKNOWN
    if param:
        return Quantity(number, _DIMENSION[kind])
    return number if kind is Kind.SECONDS else int(number)


def _pair(value: Evaluated, problem: _Problem) -> Value | Unknown:
    if not isinstance(value, tuple) or len(value) != 2 or not all(is_number(v) and 0 <= v < 1 for v in value):
        return problem.report(f"{problem.path} takes {problem.key.kind.value}, not {show(value)}", f"such as {problem.key.examples}")
    return value


def _choice(value: Evaluated, problem: _Problem) -> Value | Unknown:
    key = problem.key
    if isinstance(value, bool) and str(value).lower() in key.choices:
        return str(value).lower()
    if not isinstance(value, str):
        return problem.type(value)
    if value in key.choices or (key.function and FACTORY.fullmatch(value)):
        return value
    meant = near(value, key.choices)
    extra = ' or "module:function"' if key.function else ""
    return problem.report(
        f'{problem.path} takes one of {", ".join(key.choices)}{extra}, not "{value}"', *((f"did you mean {meant}?",) if meant else ())
    )


def _choices(value: Evaluated, problem: _Problem) -> Value | Unknown:
    words: list[Value] = []
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, str) or item not in problem.key.choices:
            return problem.report(f"{problem.path} takes a list of {', '.join(problem.key.choices)}; {show(item)} is none of them")
        if item in words:
            return problem.report(f"{problem.path} lists {item} twice")
        words.append(item)
    return tuple(words)


def _names(value: Evaluated, problem: _Problem) -> Value | Unknown:
    names: list[Value] = []
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, str):
            return problem.type(value if not isinstance(value, tuple) else item)
        if item in names:
            return problem.report(f'{problem.path} lists "{item}" twice')
        names.append(item)
    return tuple(names)


def _source(value: Evaluated, problem: _Problem) -> Value | Unknown:
    if not isinstance(value, str):
        return problem.type(value)
    if not FACTORY.fullmatch(value):
        return problem.report(f'{problem.path} = "{value}" names no factory', 'the form is "package.module:factory"')
    return CallValue("source", (value,))
