"""Patterns in a file: strings with names of integers in their index ranges, `layers[0..half]`."""

from __future__ import annotations

import re

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.patterns import Pattern, PatternError, parse_pattern
from pdsl.grammar.source import Span
from pdsl.lowering.evaluate import Evaluator
from pdsl.lowering.names import Scope

__all__ = ["pattern"]

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z_]\w*")


def pattern(node: syntax.String, evaluator: Evaluator, scope: Scope) -> Pattern | None:
    """The pattern that a string means, or None after one finding."""
    names: dict[str, int] = {}
    for bracket in _BRACKETS.finditer(node.text):
        for name in _NAME.findall(bracket[1]):
            if name in names:
                continue
            if name not in scope.bindings:
                if evaluator.lenient:
                    return None
                continue
            value = evaluator.number(syntax.Path((syntax.Name(name, node.span),), node.span), scope)
            if value is None:
                return None
            names[name] = value
    try:
        return parse_pattern(node.text, names, node.span)
    except PatternError as error:
        at = min(node.span.start + 1 + error.offset, node.span.stop - 1)
        message = f'"{node.text}" is no pattern: {error.message}' if node.text else error.message
        evaluator.sink.add(Diagnostic("PDL102", message, Span(node.span.source, at, at + 1)))
        return None
