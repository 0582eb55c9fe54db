"""Text to tree, with every syntax error of the text in one run.

    text -> lexer -> delimiters (brackets balanced) -> recovery (the machine over the tables, errors, nodes) -> syntax.File

The tables are lark's (`tables`). Nothing here raises because of what a text says, and the time is bounded by its length.
"""

from __future__ import annotations

import re
from functools import cache

from pdsl.grammar.automaton import Automaton
from pdsl.grammar.builder import Builder
from pdsl.grammar.delimiters import Balanced, balance
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Edit, Fix, Safety
from pdsl.grammar.lexer import MAX_TOKENS, Lexed, tokenize
from pdsl.grammar.recovery import Run
from pdsl.grammar.situation import shown
from pdsl.grammar.source import Source, Span
from pdsl.grammar.syntax import Edition, File
from pdsl.grammar.tables import load_tables

__all__ = ["EDITION", "parse"]

EDITION = 1
"""The edition of the language that this parser reads."""

_HALF = re.compile("[\\ud800-\\udfff]")


def parse(source: Source, sink: DiagnosticSink) -> File:
    """The syntax tree of a text. Never raises; errors go to the sink as PDL001 (syntax) and PDL002 (edition), up to the sink's limit.

    What could not be read is `Missing` in the tree or left out, and the node around it says `damaged`.
    """
    automaton = _automaton()
    lexed = tokenize(source, automaton.tables)
    whole = Span(source, 0, len(source.text))
    if lexed.cut is not None:
        message = f"the text is too long: more than {MAX_TOKENS} words and signs"
        sink.add(Diagnostic("PDL001", message, Span(source, lexed.cut, lexed.cut), caption="read up to here"))
        return File(source, (), lexed.comments, whole, damaged=True)
    builder = _attempt(source, automaton, lexed, sink)
    _check_edition(source, builder, lexed)
    _check_comments(builder, lexed)
    sink.extend(builder.sink.diagnostics)
    return File(source, tuple(builder.items), lexed.comments, whole, builder.damaged)


@cache
def _automaton() -> Automaton:
    return Automaton(load_tables())


def _attempt(source: Source, automaton: Automaton, lexed: Lexed, sink: DiagnosticSink) -> Builder:
    """Parse; where an error looks like a bracket left open although brackets match by count, believe the lines and parse again."""
    builder, suspicious = _run(source, automaton, balance(source, lexed.tokens), sink)
    if not suspicious:
        return builder
    balanced = balance(source, lexed.tokens, by_lines=True)
    return _run(source, automaton, balanced, sink)[0] if balanced.diagnostics else builder


def _run(source: Source, automaton: Automaton, balanced: Balanced, sink: DiagnosticSink) -> tuple[Builder, bool]:
    room = max(1, sink.limit - len(sink.diagnostics))
    builder = Builder(source, DiagnosticSink(limit=room), damaged=bool(balanced.diagnostics))
    for diagnostic in balanced.diagnostics[:room]:
        builder.sink.add(diagnostic)
    run = Run(source, balanced, automaton, builder)
    run.run()
    return builder, run.suspicious


def _check_edition(source: Source, builder: Builder, lexed: Lexed) -> None:
    """PDL002: the first statement is `pdsl 1`. Silent where the first statement could not be read."""
    first = lexed.tokens[0]
    first = lexed.tokens[1] if first.kind == "_END" else first
    line = source.position(first.start).line
    if any(d.span is not None and d.span.begin.line == line for d in builder.sink.diagnostics):
        return
    editions = [item for item in builder.items if isinstance(item, Edition)]
    if not editions or builder.items[0] is not editions[0]:
        start = 1 if source.text.startswith("\ufeff") else 0
        fix = Fix(f"Insert `pdsl {EDITION}`", (Edit(Span(source, start, start), f"pdsl {EDITION}\n"),), Safety.SAFE)
        if editions:
            message, span, caption = "the edition is not the first statement of the file", editions[0].span, "move it to the top"
            _edition_error(builder, message, span, caption)
            return
        caption = f"expected `pdsl {EDITION}` before this"
        _edition_error(builder, "the file does not say its edition", Span(source, first.start, first.stop), caption, fix)
        return
    number = editions[0].number
    if number.value != EDITION or number.unit or number.decimal:
        message = f"edition {shown(number.span.text)} is not known; this PDSL reads edition {EDITION}"
        _edition_error(builder, message, number.span, f"expected {EDITION}")
    for again in editions[1:]:
        _edition_error(builder, "the edition is written twice", again.span, "remove it")


def _edition_error(builder: Builder, message: str, span: Span, caption: str, fix: Fix | None = None) -> None:
    if not builder.sink.full:
        builder.sink.add(Diagnostic("PDL002", message, span, caption=caption, fix=fix))


def _check_comments(builder: Builder, lexed: Lexed) -> None:
    """Half characters cannot be written to any file, so they are errors in comments too."""
    for comment in lexed.comments:
        found = None if comment.text.isascii() else _HALF.search(comment.text)
        if found is None or builder.sink.full:
            continue
        at = comment.span.start + found.start()
        message = f"a comment cannot hold the character {shown(found[0])}"
        builder.sink.add(Diagnostic("PDL001", message, Span(builder.source, at, at + 1), caption="remove it"))
