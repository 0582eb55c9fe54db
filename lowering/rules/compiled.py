"""Rules on `train { compile = ... }`: PDL710 and on."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule, listed
from pdsl.lowering.schedules import SCHEDULES

__all__ = ["CompiledDraws", "CompiledHalves", "SilenceWhileCompiling"]

_PLACE = "train.compile"
_LEAST = Fraction(60)
"""Seconds of silence that compiling the layers of a stage for the first time may take on a slow machine."""


def _compiles(context: Context) -> bool:
    return context.spec.train is not None and context.spec.train.compile != "false"


class CompiledHalves(Rule):
    """What it does
        Checks that layers are not compiled under a schedule with split backward.

    Why it is bad
        torch.compile makes one operation of a layer's backward, with the gradients of its inputs and of its weights in one. There are no halves
        to run apart, and torch refuses such stages too.

    Example (bad)
        pipeline over pp { schedule = zero_bubble(microbatches = 8) }
        train { compile = true }

    Better
        pipeline over pp { schedule = one_f_one_b(microbatches = 8) }
        train { compile = true }

    Fix
        Take a schedule with whole backwards, or leave layers as they are.
    """

    code = "PDL710"
    name = "compiled-halves"
    needs = frozenset({"pipeline", "train"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        if not _compiles(context) or not context.halves:
            return
        assert context.spec.train is not None
        value = context.spec.train.compile
        whole = [name for name, f in SCHEDULES.items() if not f.split]
        yield self.report(
            f"{context.halves} runs backwards in halves, and a layer that is compiled has its backward in one piece",
            context.place(_PLACE, "train"),
            f"compile = {value}{context.by(_PLACE)}",
            labels=context.label("pipeline.schedule", "split backward"),
            help=(f"compile = false, or a schedule with whole backwards: {listed(whole, 'or')}",),
        )


class CompiledDraws(Rule):
    """What it does
        Checks that layers are not compiled if the model draws random numbers while it trains.

    Why it is bad
        PDSL draws for each row what one process would draw for it, wherever the row is computed. Compiled code draws by itself, so the masks
        would depend on the mesh.

    Example (bad)
        model "pdsl.models:gpt" { layers = 4; dropout = 0.1 }
        train { compile = true }

    Better
        model "pdsl.models:gpt" { layers = 4 }
        train { compile = true }

    Fix
        Leave layers as they are, or train without dropout.
    """

    code = "PDL711"
    name = "compiled-draws"
    needs = frozenset({"model", "train"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.facts is not None
        if not _compiles(context) or not context.facts.random:
            return
        assert context.spec.train is not None
        yield self.report(
            f"{context.facts.factory} draws random numbers while it trains, and compiled layers would draw others on every mesh",
            context.place(_PLACE, "train"),
            f"compile = {context.spec.train.compile}{context.by(_PLACE)}",
            help=("compile = false, or arguments of the model without dropout",),
        )


class SilenceWhileCompiling(Rule):
    """What it does
        Warns if a node may be silent for less time than it may take to compile its layers.

    Why it is bad
        Layers are compiled in the first step, and a rank that compiles answers nobody: others would take its node for lost.

    Example (bad)
        fault_budget { lose = 1; silence = 10s }
        train { compile = true }

    Better
        fault_budget { lose = 1; silence = 120s }
        train { compile = true }

    Fix
        Let nodes be silent for longer.
    """

    code = "PDL712"
    name = "silence-while-compiling"
    severity = Severity.WARNING
    needs = frozenset({"fault_budget", "train"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        budget = context.spec.fault_budget
        if not _compiles(context) or budget is None or budget.silence >= _LEAST:
            return
        seconds = float(budget.silence)
        yield self.report(
            f"a node that is silent for {seconds:g} s counts as lost, and compiling layers in the first step may take {float(_LEAST):g} s",
            context.place("fault_budget.silence", "fault_budget"),
            f"silence{context.by('fault_budget.silence')}",
            labels=context.label(_PLACE, "compiled in the first step"),
            help=(f"silence = {float(_LEAST):g}s or more",),
        )
