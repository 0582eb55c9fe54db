"""Rules on the check itself and on what this version does not execute: PDL9."""

from __future__ import annotations

from collections.abc import Iterable

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.pending import pending
from pdsl.lowering.rules.base import Context, Rule

__all__ = ["ModelNotRead", "NotExecutedYet", "SuppressionMalformed", "SuppressionUnused"]


class ModelNotRead(Rule):
    """What it does
        Notes once that the model was not read, so that rules on names and shapes of parameters and on layers were passed over.

    Why it is bad
        Patterns with a typo and stages with a gap are not found.

    Example (bad)
        pdsl check --no-model train.pdsl

    Better
        pdsl check train.pdsl

    Fix
        Check without `--no-model`.
    """

    code = "PDL900"
    name = "model-not-read"
    severity = Severity.NOTE

    def check(self, context: Context) -> Iterable[Diagnostic]:
        if context.facts is not None or "model" in context.broken:
            return
        message = "the model was not read" if context.spec.model is not None else "the file names no model"
        yield self.report(f"{message}; rules on its parameters and layers were passed over", context.place("model"))


class SuppressionUnused(Rule):
    """What it does
        Warns of a `# pdsl: ignore[CODE]` comment that silences nothing.

    Why it is bad
        It will silence a later finding that nobody has looked at. Errors cannot be silenced at all.

    Example (bad)
        param layers: int = 4      # pdsl: ignore[PDL103] set by the launcher
        model "pdsl.models:gpt" { layers = layers }

    Better
        param layers: int = 4
        model "pdsl.models:gpt" { layers = layers }

    Fix
        Delete the comment.
    """

    code = "PDL901"
    name = "suppression-unused"
    severity = Severity.WARNING


class NotExecutedYet(Rule):
    """What it does
        Notes what is parsed and checked, and not executed by this version.

    Why it is bad
        A run would do without it. `pdsl run` says so too.

    Example (bad)
        freeze { prefix = at(step = 2000) }

    Better
        train { steps = 2000 }

    Fix
        None is needed if the run may do without.
    """

    code = "PDL902"
    name = "not-executed-yet"
    severity = Severity.NOTE

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for path, what in pending(context.spec):
            yield self.report(f"{what}: parsed and checked, not executed yet", context.place(path, path.split(".", maxsplit=1)[0]))


class SuppressionMalformed(Rule):
    """What it does
        Warns of a `# pdsl: ignore` comment without a code or without a reason.

    Why it is bad
        A bare ignore would silence everything, and without a reason nobody knows when it may go.

    Example (bad)
        param layers: int = 4      # pdsl: ignore

    Better
        param layers: int = 4      # pdsl: ignore[PDL103] set by the launcher

    Fix
        Write `# pdsl: ignore[CODE] reason`.
    """

    code = "PDL903"
    name = "suppression-malformed"
    severity = Severity.WARNING
