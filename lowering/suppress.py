"""`# pdsl: ignore[CODE] reason`: silences warnings and notes of its own line or of the line after it, never errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.grammar.source import Span

__all__ = ["suppress"]

_ANY = re.compile(r"#\s*pdsl\s*:\s*ignore\b")
_FULL = re.compile(r"#\s*pdsl\s*:\s*ignore\[\s*(PDL\d{3}(?:\s*,\s*PDL\d{3})*)\s*\]\s*(\S.*)")


@frozen
class _Ignore:
    codes: tuple[str, ...]
    span: Span

    def covers(self, diagnostic: Diagnostic) -> bool:
        span = diagnostic.span
        if span is None or span.source is not self.span.source:
            return False
        line = self.span.begin.line
        return diagnostic.code in self.codes and span.begin.line in (line, line + 1)


def suppress(diagnostics: Sequence[Diagnostic], comments: Iterable[syntax.Comment], skipped: frozenset[str]) -> tuple[Diagnostic, ...]:
    """The findings that are left, with PDL901 for comments that silence nothing and PDL903 for malformed ones.

    A comment for one of the `skipped` codes is not called unused, since its rule was not run.
    """
    ignores, found = _read(comments)
    left: list[Diagnostic] = []
    used: set[tuple[int, str]] = set()
    errors: set[tuple[int, str]] = set()
    for diagnostic in diagnostics:
        covering = [i for i, ignore in enumerate(ignores) if ignore.covers(diagnostic)]
        if diagnostic.severity is Severity.ERROR or not covering:
            errors.update((i, diagnostic.code) for i in covering)
            left.append(diagnostic)
            continue
        used.update((i, diagnostic.code) for i in covering)
    for i, ignore in enumerate(ignores):
        for code in ignore.codes:
            if (i, code) in used or code in skipped:
                continue
            message = f"{code} is an error here; errors cannot be ignored" if (i, code) in errors else f"nothing to ignore: no {code} here"
            found.append(Diagnostic("PDL901", message, ignore.span, Severity.WARNING, help=("delete the comment",)))
    return (*left, *found)


def _read(comments: Iterable[syntax.Comment]) -> tuple[list[_Ignore], list[Diagnostic]]:
    ignores: list[_Ignore] = []
    malformed: list[Diagnostic] = []
    for comment in comments:
        if "pdsl" not in comment.text or _ANY.match(comment.text) is None:
            continue
        match = _FULL.fullmatch(comment.text.rstrip())
        if match is not None:
            ignores.append(_Ignore(tuple(c.strip() for c in match[1].split(",")), comment.span))
            continue
        lacks = "a reason" if re.search(r"\[\s*PDL\d{3}", comment.text) else "a code and a reason"
        help_ = ("write # pdsl: ignore[CODE] reason",)
        malformed.append(Diagnostic("PDL903", f"this ignore needs {lacks}", comment.span, Severity.WARNING, help=help_))
    return ignores, malformed
