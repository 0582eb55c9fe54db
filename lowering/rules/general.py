"""Rules on the check itself and on what this version does not execute: PDL9."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule
from pdsl.lowering.spec import LayoutSlots, SizeRange, Spec

__all__ = ["ModelNotRead", "NotExecutedYet", "SuppressionMalformed", "SuppressionUnused", "pending"]


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
        fault_budget { lose = 1 }

    Better
        fault_budget { lose = 0 }

    Fix
        None is needed if the run may do without.
    """

    code = "PDL902"
    name = "not-executed-yet"
    severity = Severity.NOTE

    def check(self, context: Context) -> Iterable[Diagnostic]:
        for path, what in pending(context.spec):
            yield self.report(f"{what}: parsed and checked, not executed yet", context.place(path, path.split(".", maxsplit=1)[0]))


def pending(spec: Spec) -> Iterator[tuple[str, str]]:
    """What a spec asks for that this version does not execute: dotted path and a few words."""
    if spec.fault_budget is not None and spec.fault_budget.lose > 0:
        yield (
            "fault_budget.lose",
            f"surviving the loss of {spec.fault_budget.lose} {spec.fault_budget.unit}{'s' if spec.fault_budget.lose > 1 else ''}",
        )
    if spec.freeze is not None:
        yield "freeze", "freezing"
    if spec.checkpoint is not None:
        yield "checkpoint", "saving checkpoints"
    if spec.memory.recompute is not None:
        yield "memory.recompute", "recomputing activations"
    if spec.memory.offload != "none":
        yield "memory.offload", f"offloading {spec.memory.offload}"
    for key in ("params", "reduce", "output"):
        if getattr(spec.precision, key) != "fp32":
            yield f"precision.{key}", f"precision {getattr(spec.precision, key)}"
    if spec.train is not None and spec.train.last == "pad":
        yield "train.last", "padding the last batch"
    for axis in spec.mesh.axes:
        if isinstance(axis.size, SizeRange):
            yield f"mesh.{axis.name}", f"an elastic axis ({axis.size.low} to {axis.size.high})"
    for rule in spec.shard:
        if any(isinstance(t, LayoutSlots) and len({s for s in t.slots if s}) > 1 for t in rule.terms):
            yield "shard", "splitting one parameter along two dims"
            break


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
