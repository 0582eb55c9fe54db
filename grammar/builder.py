"""From the productions of the grammar to the nodes of the syntax tree: one function a rule, no knowledge of blocks and keys.

The few errors that a grammar cannot see are reported here: escapes, characters that no text may hold, numbers and expressions beyond all measure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from attrs import define, field

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink
from pdsl.grammar.lexer import Token
from pdsl.grammar.situation import shown
from pdsl.grammar.source import Source, Span

__all__ = ["MAX_DIGITS", "MAX_EXPONENT", "MAX_NESTING", "Builder"]

MAX_DIGITS = 60
MAX_EXPONENT = 308
"""A decimal exponent may be as large as that of a float; digits before and after the point together at most MAX_DIGITS."""

MAX_NESTING = 64
"""Expressions inside expressions. A chain of operators is as deep as it is long, and what comes later walks the tree recursively."""

_NUMBER = re.compile(r"([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")
_ESCAPE = re.compile(r"\\([\s\S])")
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_UNTEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

_Children = list[Any]
_Compound = syntax.BinaryOperation | syntax.Negation | syntax.Comparison | syntax.RangeOf | syntax.Call | syntax.ListOf


@define
class Builder:
    """Makes nodes and collects the items of the file as they are finished. `drops` are the places where recovery dropped something."""

    source: Source
    sink: DiagnosticSink
    items: list[syntax.Item] = field(factory=list)
    drops: list[int] = field(factory=list)
    damaged: bool = False
    depths: dict[int, int] = field(factory=dict)
    """Depth of each compound expression by its identity; set anew for every node, so that a reused identity does no harm."""

    def functions(self) -> dict[str, Callable[[_Children, Span], Any]]:
        """Rule name -> function of (children, span). Children are nodes, and tokens of the terminals that carry meaning."""
        return {rule: getattr(self, name) for rule, name in _FUNCTIONS}

    # --- leaves ---

    def _text(self, token: Token) -> str:
        return self.source.text[token.start : token.stop]

    def _span(self, token: Token) -> Span:
        return Span(self.source, token.start, token.stop)

    def _name(self, token: Token) -> syntax.Name:
        return syntax.Name(self._text(token), self._span(token))

    def _error(self, message: str, span: Span, caption: str = "", *helps: str) -> None:
        self.damaged = True
        if not self.sink.full:
            self.sink.add(Diagnostic("PDL001", message, span, caption=caption, help=helps))

    def _number(self, token: Token) -> syntax.Number | syntax.Missing:
        text, span = self._text(token), self._span(token)
        found = _NUMBER.match(text)
        assert found is not None  # the lexer took it for a number by the same expression
        whole, part, power = found[1], found[2] or "", found[3] or "0"
        if len(whole) + len(part) > MAX_DIGITS:
            self._error(f"a number has at most {MAX_DIGITS} digits", span, f"{len(whole) + len(part)} digits")
            return syntax.Missing(span)
        if len(power) > 8 or abs(int(power)) > MAX_EXPONENT:
            self._error(f"the exponent of a number lies between -{MAX_EXPONENT} and {MAX_EXPONENT}", span, f"the exponent is {power[:12]}")
            return syntax.Missing(span)
        digits, shift = int(whole + part), int(power) - len(part)
        value = Fraction(digits * 10**shift) if shift >= 0 else Fraction(digits, 10**-shift)
        return syntax.Number(value, text[found.end() :], found.end() > found.end(1), span)

    def _string(self, token: Token) -> syntax.String:
        start, text = token.start + 1, self.source.text[token.start + 1 : token.stop - 1]
        odd = _UNTEXT.search(text)
        if odd is not None:
            at = start + odd.start()
            self._error(f"a string cannot hold the character {shown(odd[0])}", Span(self.source, at, at + 1), "remove it")

        def resolve(escape: re.Match[str]) -> str:
            if escape[1] not in _ESCAPES:
                at = start + escape.start()
                helps = ('the escapes are `\\"`, `\\\\`, `\\n` and `\\t`; a backslash is written `\\\\`',)
                self._error(f"`\\{shown(escape[1])}` is no escape", Span(self.source, at, at + 2), "unknown escape", *helps)
            return _ESCAPES.get(escape[1], escape[0])

        return syntax.String(_ESCAPE.sub(resolve, text) if "\\" in text else text, self._span(token))

    # --- items ---

    def make_start(self, children: _Children, span: Span) -> None:
        """The items were collected one by one, so that they are there also when parsing stops early."""

    def _item(self, item: syntax.Item) -> syntax.Item:
        self.items.append(item)
        return item

    def _damaged(self, span: Span) -> bool:
        return any(span.start <= place <= span.stop for place in self.drops)

    def make_edition(self, children: _Children, span: Span) -> syntax.Item | None:
        number = self._number(children[0])
        return self._item(syntax.Edition(number, span)) if isinstance(number, syntax.Number) else None

    def make_import(self, children: _Children, span: Span) -> syntax.Item:
        path, alias = children
        return self._item(syntax.Import(self._string(path), self._name(alias), span))

    def make_param(self, children: _Children, span: Span) -> syntax.Item:
        name, kind, *default = children
        return self._item(syntax.Param(self._name(name), self._name(kind), default[0] if default else None, span))

    def make_let(self, children: _Children, span: Span) -> syntax.Item:
        name, value = children
        return self._item(syntax.Let(self._name(name), value, span))

    def make_assert(self, children: _Children, span: Span) -> syntax.Item:
        condition, *message = children
        return self._item(syntax.Assert(condition, self._string(message[0]) if message else None, span))

    def make_profile(self, children: _Children, span: Span) -> syntax.Item | None:
        name, *overrides = children
        if name.start == name.stop:  # put in by recovery
            return None
        return self._item(syntax.Profile(self._name(name), tuple(overrides), span, self._damaged(span)))

    def make_override(self, children: _Children, span: Span) -> syntax.Override:
        path, value = children
        return syntax.Override(path, value, span)

    def make_block(self, children: _Children, span: Span) -> syntax.Item | None:
        keyword, *rest = children
        if keyword.start == keyword.stop:  # put in by recovery
            return None
        labels = tuple(c for c in rest if isinstance(c, syntax.Name | syntax.String))
        statements = tuple(rest[len(labels) :])
        return self._item(syntax.Block(self._name(keyword), labels, statements, span, self._damaged(span)))

    def make_label(self, children: _Children, span: Span) -> syntax.Name | syntax.String:
        token = children[0]
        return self._name(token) if token.kind == "NAME" else self._string(token)

    # --- statements ---

    def make_assign(self, children: _Children, span: Span) -> syntax.Assign:
        key, value = children
        return syntax.Assign(key, value, span)

    def make_key(self, children: _Children, span: Span) -> syntax.Name:
        return self._name(children[0])

    def make_axis(self, children: _Children, span: Span) -> syntax.Axis:
        _, name, size, *tags = children
        return syntax.Axis(self._name(name), size, tuple(tags), span)

    def make_tag(self, children: _Children, span: Span) -> syntax.Name:
        return self._name(children[0])

    def make_rule(self, children: _Children, span: Span) -> syntax.Rule:
        *patterns, layout = children
        return syntax.Rule(tuple(self._string(p) for p in patterns), layout, span)

    def make_stage(self, children: _Children, span: Span) -> syntax.StageItem:
        _, name, *modules = children
        return syntax.StageItem(self._name(name), tuple(self._string(m) for m in modules), span)

    # --- layouts ---

    def make_layout_sum(self, children: _Children, span: Span) -> syntax.Layout:
        terms = tuple(c for c in children if not isinstance(c, Token))
        return syntax.Missing(span) if _any_missing(*terms) else syntax.Sum(terms, span)

    def make_slots(self, children: _Children, span: Span) -> syntax.Slots:
        return syntax.Slots(tuple(children), span)

    def make_slot_whole(self, children: _Children, span: Span) -> syntax.Slot:
        return syntax.Slot((), span)

    def make_slot_axis(self, children: _Children, span: Span) -> syntax.Slot:
        return syntax.Slot(tuple(self._name(c) for c in children), span)

    make_slot_axes = make_slot_axis

    # --- expressions ---

    def make_missing(self, children: _Children, span: Span) -> syntax.Missing:
        return syntax.Missing(span)

    def _nested(self, node: _Compound, *parts: syntax.Expression) -> syntax.Expression:
        """The node, unless it is nested too deep."""
        depth = 1 + max((self.depths[id(p)] for p in parts if isinstance(p, _Compound)), default=0)
        if depth > MAX_NESTING:
            help_text = "name a part of it with `let`"
            self._error(f"an expression holds at most {MAX_NESTING} operations inside each other", node.span, "too deep", help_text)
            return syntax.Missing(node.span)
        self.depths[id(node)] = depth
        return node

    def make_comparison(self, children: _Children, span: Span) -> syntax.Expression:
        left, operator, right = children
        return self._nested(syntax.Comparison(self._text(operator), left, right, span), left, right)

    def make_range(self, children: _Children, span: Span) -> syntax.Expression:
        low, high = children
        return self._nested(syntax.RangeOf(low, high, span), low, high)

    def make_sum(self, children: _Children, span: Span) -> syntax.Expression:
        left, operator, right = children
        if _any_missing(left, right):
            return syntax.Missing(span)
        return self._nested(syntax.BinaryOperation(self._text(operator), left, right, span), left, right)

    make_product = make_sum

    def make_negation(self, children: _Children, span: Span) -> syntax.Expression:
        _, operand = children
        return syntax.Missing(span) if _any_missing(operand) else self._nested(syntax.Negation(operand, span), operand)

    def make_number(self, children: _Children, span: Span) -> syntax.Expression:
        return self._number(children[0])

    def make_string(self, children: _Children, span: Span) -> syntax.String:
        return self._string(children[0])

    def make_path(self, children: _Children, span: Span) -> syntax.Path:
        return syntax.Path(tuple(self._name(c) for c in children), span)

    def make_call(self, children: _Children, span: Span) -> syntax.Expression:
        callee, *arguments = children
        return self._nested(syntax.Call(callee, tuple(arguments), span), *(a.value for a in arguments))

    def make_named(self, children: _Children, span: Span) -> syntax.Argument:
        name, value = children
        return syntax.Argument(self._name(name), value, span)

    def make_positional(self, children: _Children, span: Span) -> syntax.Argument:
        return syntax.Argument(None, children[0], span)

    def make_list(self, children: _Children, span: Span) -> syntax.Expression:
        return self._nested(syntax.ListOf(tuple(children), span), *children)

    def make_juxtaposition(self, children: _Children, span: Span) -> syntax.Expression:
        parts = tuple(self._number(c) if c.kind == "NUMBER" else syntax.Path((self._name(c),), self._span(c)) for c in children)
        return syntax.Missing(span) if _any_missing(*parts) else syntax.Juxtaposition(parts, span)


def _any_missing(*nodes: object) -> bool:
    return any(isinstance(node, syntax.Missing) for node in nodes)


_FUNCTIONS = tuple((name.removeprefix("make_"), name) for name in vars(Builder) if name.startswith("make_"))
