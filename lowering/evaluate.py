"""Evaluation of expressions: total, exact, without side effects. What has no value is reported once and becomes UNKNOWN."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fractions import Fraction

from attrs import field, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Label
from pdsl.grammar.source import Span
from pdsl.lowering.blocks import PARAM_TYPES, UNITS, KeyInfo, Kind
from pdsl.lowering.coerce import coerce
from pdsl.lowering.names import Scope, name_of
from pdsl.lowering.spec import CallValue, Quantity, SizeRange
from pdsl.lowering.values import UNKNOWN, Evaluated, ValueProblem, compare, compute, describe, known, near, show, weight

__all__ = ["Evaluator", "suggest"]

_DEEPEST = 64
_WORDS = {"true": True, "false": False}


def suggest(word: str, options: Collection[str]) -> tuple[str, ...]:
    """The help of an unknown word: what was probably meant, else the legal words if they are few."""
    meant = near(word, options)
    if meant is not None:
        return (f"did you mean {meant}?",)
    return (f"one of: {', '.join(options)}",) if 0 < len(options) <= 12 else ()


@frozen(eq=False)
class Evaluator:
    """Evaluates expressions of one run of the checker. `leaf` gives values of block keys to asserts (`mesh.pp`), or None.
    `lenient` passes over unknown names: in a text with syntax errors they may have been written.
    """

    sink: DiagnosticSink
    leaf: Callable[[str], Evaluated | None] = field(default=lambda _: None)
    lenient: bool = False
    _depth: list[None] = field(factory=list, init=False)
    _too_deep: list[None] = field(factory=list, init=False)

    # --- expressions ------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, node: syntax.Expression, scope: Scope, words: Collection[str] = ()) -> Evaluated:
        """The value of an expression. A bare name among `words` stands for itself, as a string."""
        if len(self._depth) >= _DEEPEST:
            if not self._too_deep:  # the other operands on the way out would only repeat it
                self._fail("PDL102", f"nested more than {_DEEPEST} deep", node.span)
            self._too_deep.append(None)
            return UNKNOWN
        self._depth.append(None)
        try:
            return self._evaluate(node, scope, words)
        except ValueProblem as problem:
            return self._fail("PDL102", str(problem), node.span)
        finally:
            self._depth.pop()

    def _evaluate(self, node: syntax.Expression, scope: Scope, words: Collection[str]) -> Evaluated:
        match node:
            case syntax.Missing():
                return UNKNOWN
            case syntax.Number():
                return self._number(node)
            case syntax.String():
                return node.text
            case syntax.Path():
                return self._path(node, scope, words)
            case syntax.Negation():
                return compute("*", -1, self.evaluate(node.operand, scope))
            case syntax.BinaryOperation():
                return self._binary(node, scope)
            case syntax.Comparison():
                return compare(node.operator, self.evaluate(node.left, scope), self.evaluate(node.right, scope))
            case syntax.RangeOf():
                return self._range(node, scope)
            case syntax.ListOf():
                items = tuple(self.evaluate(item, scope, words) for item in node.items)
                if not known(*items):
                    return UNKNOWN
                weight(items)  # type: ignore[arg-type]
                return items  # type: ignore[return-value]
            case syntax.Call():
                return self._fail("PDL102", f"{node.callee.text}(...) is a call; no call is taken here", node.span)
            case syntax.Juxtaposition():
                return self._juxtaposition(node, scope)

    def _number(self, node: syntax.Number) -> Evaluated:
        if max(node.value.numerator.bit_length(), node.value.denominator.bit_length()) > 256:
            return self._fail("PDL102", "this number is too large or has too many digits", node.span)
        if not node.unit:
            return node.value if node.decimal or node.value.denominator != 1 else node.value.numerator
        if node.unit not in UNITS:
            meant = near(node.unit, UNITS)
            help_ = (
                f"did you mean {meant}?"
                if meant
                else "units are us, ms, s, min, h, d; B, KiB, MiB, GiB, TiB, kB, MB, GB, TB; GB/s and the like; %"
            )
            return self._fail("PDL102", f"unknown unit {node.unit}", node.span, help_)
        size, dimension = UNITS[node.unit]
        return Quantity(node.value * size, dimension)

    def _binary(self, node: syntax.BinaryOperation, scope: Scope) -> Evaluated:
        # a long sum leans to the left; walking down that side in a loop keeps it from counting as nesting
        spine: list[syntax.BinaryOperation] = []
        left: syntax.Expression = node
        while isinstance(left, syntax.BinaryOperation):
            spine.append(left)
            left = left.left
        value = self.evaluate(left, scope)
        for part in reversed(spine):
            right = self.evaluate(part.right, scope)
            try:
                value = compute(part.operator, value, right)
            except ValueProblem as problem:
                return self._fail("PDL102", str(problem), part.span)
        return value

    def _range(self, node: syntax.RangeOf, scope: Scope) -> Evaluated:
        low, high = self.evaluate(node.low, scope), self.evaluate(node.high, scope)
        if not known(low, high):
            return UNKNOWN
        if not (type(low) is int and type(high) is int):
            return self._fail("PDL102", f"a range goes from one whole number to another, not from {show(low)} to {show(high)}", node.span)
        if low > high:
            return self._fail("PDL102", f"this range is empty: {low} > {high}", node.span, f"{high} to {low}")
        return SizeRange(low, high)

    def _juxtaposition(self, node: syntax.Juxtaposition, scope: Scope) -> Evaluated:
        first, *rest = node.parts
        count = self.evaluate(first, scope)
        word = rest[0].text if rest and isinstance(rest[0], syntax.Path) else ""
        if not known(count):
            return UNKNOWN
        if len(rest) == 1 and word.rstrip("s") in ("epoch", "step") and isinstance(count, int | Fraction):
            return Quantity(Fraction(count), word.rstrip("s") + "s")
        if len(rest) == 2 and word == "per" and isinstance(count, int):
            period = self.evaluate(rest[1], scope)
            if isinstance(period, Quantity) and period.dimension == "seconds":
                return CallValue("per", (count, period))
            return (
                UNKNOWN
                if not known(period)
                else self._fail("PDL102", f"a time follows `per`, not {show(period)}", rest[1].span, "5 per 24h")
            )
        return self._fail("PDL102", f"{node.span.text} has no meaning", node.span, "write 1 epoch, 100 steps or 5 per 24h")

    # --- names ------------------------------------------------------------------------------------------------------------------------------

    def _path(self, node: syntax.Path, scope: Scope, words: Collection[str]) -> Evaluated:
        first = node.names[0]
        if len(node.names) == 1:
            if first.text in words:
                return first.text
            if first.text in scope.bindings:
                return self.name(first, scope)
            if first.text in _WORDS:
                return _WORDS[first.text]
            return self._unknown(first, scope, tuple(words))
        if isinstance(scope.bindings.get(first.text), syntax.Import):
            scope.used.add(first.text)
            inner = scope.imports.get(first.text)
            if inner is None:
                return UNKNOWN  # the import was reported
            return self._inner(node, inner)
        value = self.leaf(node.text)
        return value if value is not None else self._unknown(first, scope, ())

    def _inner(self, node: syntax.Path, scope: Scope) -> Evaluated:
        for at, name in enumerate(node.names[1:], 1):
            if name.text not in scope.bindings:
                return self._fail(
                    "PDL101", f"{scope.source.name} has no name {name.text}", name.span, *suggest(name.text, tuple(scope.bindings))
                )
            if at == len(node.names) - 1:
                return self.name(name, scope)
            inner = scope.imports.get(name.text)
            if inner is None:
                return UNKNOWN
            scope = inner
        return UNKNOWN

    def _unknown(self, name: syntax.Name, scope: Scope, words: tuple[str, ...]) -> Evaluated:
        if self.lenient:
            return UNKNOWN
        names = tuple(scope.bindings)
        meant = near(name.text, (*words, *names))
        if meant in scope.bindings:
            scope.used.add(meant)  # so that it is not called unused as well
        help_ = suggest(name.text, words or names) if meant is None else (f"did you mean {meant}?",)
        return self._fail(
            "PDL101", f"unknown name {name.text}", name.span, *help_, *(() if words or meant else (f'a string is written "{name.text}"',))
        )

    def name(self, name: syntax.Name, scope: Scope) -> Evaluated:
        """The value of a param or let. It is evaluated once; a circle of names is reported once."""
        scope.used.add(name.text)
        if name.text in scope.values:
            return scope.values[name.text]
        if name.text in scope.active:
            return self._circle(name, scope)
        binding = scope.bindings[name.text]
        if isinstance(binding, syntax.Import):
            return self._fail("PDL102", f"{name.text} is a file; a name of it is {name.text}.NAME", name.span)
        scope.active.append(name.text)
        value = self._param(binding, scope) if isinstance(binding, syntax.Param) else self.evaluate(binding.value, scope)
        scope.active.pop()
        return scope.values.setdefault(name.text, value)

    def _circle(self, name: syntax.Name, scope: Scope) -> Evaluated:
        ring = scope.active[scope.active.index(name.text) :]
        for member in ring:
            scope.values[member] = UNKNOWN
        places = [name_of(scope.bindings[member]).span for member in ring]
        self.sink.add(
            Diagnostic(
                "PDL105",
                f"{ring[0]} needs itself: {' -> '.join((*ring, ring[0]))}" if len(ring) > 1 else f"{ring[0]} needs itself",
                min(places, key=lambda s: s.start),
                labels=tuple(Label(s, "in the circle") for s in sorted(places, key=lambda s: s.start)[1:]),
                help=("give one of them a value of its own",),
            )
        )
        return UNKNOWN

    def _param(self, param: syntax.Param, scope: Scope) -> Evaluated:
        kind = PARAM_TYPES.get(param.type.text)
        given = scope.given.get(param.name.text)
        expression = given[0] if given is not None else param.default
        if kind is None:
            return self._fail("PDL101", f"unknown type {param.type.text}", param.type.span, *suggest(param.type.text, PARAM_TYPES))
        if expression is None:
            return self._fail(
                "PDL106",
                f"param {param.name.text} has no value",
                param.name.span,
                f"--set {param.name.text}=VALUE gives one; a default is written  param {param.name.text}: {param.type.text} = VALUE",
            )
        if kind is Kind.STRING and isinstance(expression, syntax.Path) and given is not None:
            return expression.text  # a shell has taken the quotes off
        value = self.evaluate(expression, scope)
        return coerce(value, KeyInfo(param.name.text, kind, ""), f"param {param.name.text}", expression.span, self.sink, param=True)

    # --- helpers ----------------------------------------------------------------------------------------------------------------------------

    def _fail(self, code: str, message: str, span: Span, *help_: str) -> Evaluated:
        self.sink.add(Diagnostic(code, message, span, help=help_))
        return UNKNOWN

    def number(self, node: syntax.Expression, scope: Scope) -> int | None:
        """A whole number, as patterns need it; None if it is none."""
        value = self.evaluate(node, scope)
        if type(value) is int:
            return value
        if known(value):
            self._fail("PDL102", f"a whole number is needed, {show(value)} is {describe(value)}", node.span)
        return None
