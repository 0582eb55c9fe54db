"""Diagnostics: what PDSL has to say about a text. Data first; renderers live in `pdsl.render`.

Severity is beside the code, not in it, so that a rule can be softened without renaming it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from attrs import field, frozen

from pdsl.grammar.source import Span

__all__ = ["Diagnostic", "DiagnosticSink", "Edit", "Fix", "Label", "Safety", "Severity", "has_errors"]


class Severity(Enum):
    """How bad a finding is. Only errors stop a plan."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Safety(Enum):
    """A safe fix leaves the hash of the plan as it is; an unsafe one may change the plan."""

    SAFE = "safe"
    UNSAFE = "unsafe"


@frozen
class Label:
    """A second place that explains the finding, with a few words."""

    span: Span
    text: str


@frozen
class Edit:
    """Replace the text of a span."""

    span: Span
    text: str


@frozen
class Fix:
    """A repair: what it does in words, the edits, and whether it may change the plan."""

    title: str
    edits: tuple[Edit, ...]
    safety: Safety = Safety.UNSAFE


@frozen
class Diagnostic:
    """One finding.

    `span` is the place to look at first and `caption` the few words printed beside its carets; `labels` are the places where the other
    values were written. A finding about no text (an override on the command line, a missing file) has no span.
    """

    code: str
    message: str
    span: Span | None = None
    severity: Severity = Severity.ERROR
    caption: str = ""
    labels: tuple[Label, ...] = ()
    help: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fix: Fix | None = None

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        if self.span is None:
            return ("", -1, -1, self.code, self.message)
        return (self.span.source.name, self.span.start, self.span.stop, self.code, self.message)


@frozen
class DiagnosticSink:
    """Collects diagnostics; drops a second one of the same code at the same place."""

    limit: int = 50
    _found: dict[object, Diagnostic] = field(factory=dict, init=False, repr=False)

    def add(self, diagnostic: Diagnostic) -> None:
        key = (diagnostic.code, diagnostic.span if diagnostic.span is not None else diagnostic.message)
        self._found.setdefault(key, diagnostic)

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self.add(diagnostic)

    @property
    def full(self) -> bool:
        return len(self._found) >= self.limit

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All findings in the order of the text."""
        return tuple(sorted(self._found.values(), key=lambda d: d.sort_key))


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Whether any finding is an error."""
    return any(d.severity is Severity.ERROR for d in diagnostics)
