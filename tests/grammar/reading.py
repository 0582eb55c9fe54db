"""How tests read a text: the tree and the findings, and places as line:column."""

from __future__ import annotations

from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source, Span
from pdsl.grammar.syntax import Assign, Block, Expression, File


def read(text: str, limit: int = 50) -> tuple[File, tuple[Diagnostic, ...]]:
    sink = DiagnosticSink(limit=limit)
    return parse(Source("t.pdsl", text), sink), sink.diagnostics


def clean(text: str) -> File:
    """The tree of a text that has no finding."""
    file, found = read(text)
    assert [f"{d.span} {d.message}" for d in found] == []
    assert not file.damaged
    return file


def value(text: str) -> Expression:
    """The tree of one expression."""
    (block,) = clean(f"pdsl 1\nb {{ key = {text} }}\n").items[1:]
    assert isinstance(block, Block)
    (statement,) = block.statements
    assert isinstance(statement, Assign)
    return statement.value


def place(span: Span | None) -> str:
    """`line:column-column` of the characters of a span; the second column does not belong to it."""
    assert span is not None
    return f"{span.begin.line}:{span.begin.column}-{span.end.column}"


def lines(found: tuple[Diagnostic, ...]) -> set[int]:
    return {d.span.begin.line for d in found if d.span is not None}
