"""The errors of PDSL, as one tree.

PdslError
 +-- SpecError        the text or what it says is wrong; carries diagnostics
 +-- ModelError       the model could not be built, called or cut into layers
 +-- PlanError        no plan exists for a sound spec on the given ranks
 +-- RunError         a run could not start or could not go on
      +-- RankError   one rank failed; carries the rank and its own traceback as text
      +-- PeerError   this rank only lost a peer; the reason is the peer's to tell
      +-- NotExecuted the spec asks for something that this version does not execute
"""

from __future__ import annotations

from pdsl.grammar.diagnostics import Diagnostic

__all__ = ["ModelError", "NotExecuted", "PdslError", "PeerError", "PlanError", "RankError", "RunError", "SpecError"]


class PdslError(Exception):
    """Base of all errors that PDSL raises on purpose. Catch it to catch them all."""


class SpecError(PdslError):
    """A spec is wrong. `diagnostics` holds every finding, errors and warnings alike."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        lines = []
        for d in self.diagnostics:
            where = f"{d.span}: " if d.span is not None else ""
            lines.append(f"{where}{d.severity.value}[{d.code}]: {d.message}")
        return "\n".join(lines)


class ModelError(PdslError):
    """A model could not be built, called or cut into layers; the message says what stands in the way."""


class PlanError(PdslError):
    """No plan exists for a sound spec on the given ranks."""


class RunError(PdslError):
    """A run could not start or could not go on."""


class RankError(RunError):
    """One rank failed. The first rank that failed for a reason of its own is the one reported."""

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        super().__init__(rank, reason, traceback)
        self.rank = rank
        self.reason = reason
        self.traceback = traceback

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.reason}"


class NotExecuted(RunError):
    """The spec asks for something that this version parses and checks but does not execute."""


class PeerError(RunError):
    """This rank only lost a peer. The rank that failed by itself tells the reason; the command line says nothing here."""
