"""Findings for people: with the lines they are about, or one line each. Formats for machines are in `pdsl.render.reports`.

Columns are counted in characters, carets are placed under what the terminal shows: tabs are expanded, wide characters count twice, characters
that would steer the terminal are replaced.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from attrs import frozen

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.grammar.source import Source, Span
from pdsl.render.terminal import PLAIN, Terminal, join_list, plural

__all__ = ["render_concise", "render_finding", "render_full", "summary"]

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_TAB = 4
_WINDOW = 120  # columns of a line that are shown; a longer one is cut around what is marked


def render_full(diagnostics: Sequence[Diagnostic], files: int, terminal: Terminal = PLAIN) -> str:
    """All findings with their lines, then one line that counts them. Ends with a newline."""
    blocks = [render_finding(d, terminal) for d in diagnostics]
    return "\n".join([*blocks, summary(diagnostics, files)]) + "\n"


def render_concise(diagnostics: Sequence[Diagnostic], files: int, terminal: Terminal = PLAIN) -> str:
    """One line a finding, then one line that counts them. Ends with a newline."""
    lines = []
    for d in diagnostics:
        where = f"{clean(d.span.source.name)}:{d.span.begin.line}:{d.span.begin.column}: " if d.span is not None else ""
        kind = terminal.paint(f"{d.severity.value}[{d.code}]", _COLOURS[d.severity])
        lines.append(f"{where}{kind} {clean(d.message)}")
    return "\n".join([*lines, summary(diagnostics, files)]) + "\n"


def summary(diagnostics: Iterable[Diagnostic], files: int) -> str:
    """`2 errors and 1 warning in 3 files`."""
    found = list(diagnostics)
    counts = [(sum(d.severity is s for d in found), s.value) for s in Severity]
    told = [plural(n, word) for n, word in counts if n]
    return f"{join_list(told)} in {plural(files, 'file')}" if told else f"{plural(files, 'file')} checked, nothing found"


def clean(text: str) -> str:
    """The text without characters that steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.replace("\t", " "))


# --- one finding ----------------------------------------------------------------------------------------------------------------------------


@frozen
class _Mark:
    """A place to underline, with a few words. The main one has carets, the others dashes."""

    span: Span
    text: str
    main: bool

    @property
    def line(self) -> int:
        return self.span.begin.line


def render_finding(d: Diagnostic, terminal: Terminal = PLAIN) -> str:
    """One finding: what is wrong, the lines that it is about with carets, help and notes. Ends with a newline."""
    colour = _COLOURS[d.severity]
    lines = [terminal.paint(f"{d.severity.value}[{d.code}]", colour, "bold") + terminal.paint(f": {clean(d.message)}", "bold")]
    gutter = 1
    if d.span is not None:
        marks = [_Mark(d.span, d.caption, main=True), *(_Mark(label.span, label.text, main=False) for label in d.labels)]
        gutter = max(len(str(mark.line)) for mark in marks)
        lines += _excerpts(d.span, marks, gutter, terminal, colour)
    lead = " " * (gutter + 1) + terminal.paint("=", "blue")
    for word, texts in (("help", d.help), ("note", d.notes)):
        for text in texts:
            first, *more = clean(text).split("\n")
            lines.append(f"{lead} {terminal.paint(word, 'bold')}: {first}")
            lines += [" " * (gutter + 9) + line for line in more]
    return "\n".join(lines) + "\n"


def _excerpts(main: Span, marks: list[_Mark], gutter: int, terminal: Terminal, colour: str) -> list[str]:
    """The marked lines of every source: first the one that the finding is in, then others."""
    lines: list[str] = []
    sources: dict[str, Source] = {}
    for mark in marks:
        sources.setdefault(mark.span.source.name, mark.span.source)
    bar = " " * (gutter + 1) + terminal.paint("|", "blue")
    for name, source in sources.items():
        here = [m for m in marks if m.span.source.name == name]
        first = main if name == main.source.name else here[0].span
        arrow = "-->" if first is main else ":::"
        lines.append(" " * gutter + terminal.paint(arrow, "blue") + f" {clean(name)}:{first.begin.line}:{first.begin.column}")
        lines.append(bar)
        for number in sorted({m.line for m in here}):
            at_line = sorted((m for m in here if m.line == number), key=lambda m: (m.span.start, not m.main))
            lines += _marked_line(source, number, at_line, gutter, terminal, colour)
    return lines


def _marked_line(source: Source, number: int, marks: list[_Mark], gutter: int, terminal: Terminal, colour: str) -> list[str]:
    text = source.line(number)
    starts = [m.span.begin.column - 1 for m in marks]
    shown, offset = _window(text, starts[0])
    lines = [terminal.paint(f"{number:>{gutter}} |", "blue") + (f" {_expand(shown)}" if shown else "")]
    for mark, start in zip(marks, starts, strict=True):
        end = mark.span.end
        stop = end.column - 1 if end.line == number else len(text)
        begin = _columns(shown[: max(0, start - offset)])
        upto = _columns(shown[: max(0, stop - offset)])
        line = ("^" if mark.main else "-") * max(1, upto - begin)
        words = f" {clean(mark.text)}" if mark.text else ""
        lines.append(
            " " * (gutter + 1)
            + terminal.paint("|", "blue")
            + " " * (begin + 1)
            + terminal.paint(line + words, colour if mark.main else "blue")
        )
    return lines


def _window(text: str, at: int) -> tuple[str, int]:
    """The part of a line that is shown, and how many characters were left out before it."""
    if len(text) <= _WINDOW:
        return text, 0
    first = max(0, min(at - _WINDOW // 3, len(text) - _WINDOW))
    return text[first : first + _WINDOW], first


def _expand(text: str) -> str:
    return clean(text.expandtabs(_TAB))


def _columns(text: str) -> int:
    """Columns that a text takes in a terminal; wide characters count twice, combining ones not at all."""
    text = text.expandtabs(_TAB)
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)
