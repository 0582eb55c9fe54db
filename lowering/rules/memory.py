"""Rules on what is traded for memory: PDL705 to PDL707, PDL709."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.lowering.rules.base import Context, Rule, quoted
from pdsl.lowering.values import near

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts

__all__ = ["NothingToRecompute", "OffloadNeedsAccelerator", "OffloadWithBudget", "Unrepeatable"]

_RECOMPUTE = "memory.recompute"


class NothingToRecompute(Rule):
    """What it does
        Checks that `recompute` names modules that are layers, or lie inside of layers.

    Why it is bad
        A name that fits nothing would change nothing: the run needs the memory that it was meant to save. Modules around several layers cannot be
        computed again as one, since their layers are placed and gathered one by one.

    Example (bad)
        memory { recompute = "layer.*" }

    Better
        memory { recompute = "layers.*" }

    Fix
        Name the layers, `"layers.*"`, or modules in them, `"layers.*.mlp"`.
    """

    code = "PDL705"
    name = "nothing-to-recompute"
    needs = frozenset({"memory"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        pattern, facts = context.spec.memory.recompute, context.facts
        if pattern is None or facts is None or facts.recomputed:
            return
        names = _module_names(facts)
        around = [n for n in sorted(_above(facts)) if pattern.matches(n)]
        if not names or (not facts.inputs and any(pattern.matches(n) for n in names)):
            return  # without its data the model was not run, and nothing was marked
        close = near(pattern.text, [".".join("*" if s.isdigit() else s for s in n.split(".")) for n in names]) if not around else ""
        layers = [layer.modules[0] for layer in facts.layers if layer.modules]
        yield self.report(
            f'"{pattern.text}" takes {around[0]}, which is no layer but holds several'
            if around
            else f'"{pattern.text}" takes no module of the model',
            context.place(_RECOMPUTE, "memory"),
            help=((f'did you mean "{close}"?',) if close else ()) + (f"the layers are {quoted(layers)}",),
        )


class Unrepeatable(Rule):
    """What it does
        Checks that modules whose activations are computed again give the same when they run twice.

    Why it is bad
        A module that writes into what it is given, or updates a buffer such as running statistics, does so once more when it runs again: the gradients are
        those of other inputs, or the statistics count each microbatch twice, without a word.

    Example (bad)
        memory { recompute = "stages.*" }              # each has a BatchNorm2d

    Better
        memory { recompute = "stages.*.mlp" }          # the part without

    Fix
        Name the modules inside that can be computed again.
    """

    code = "PDL706"
    name = "unrepeatable"
    needs = frozenset({"memory"})
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        facts = context.facts
        if facts is None or context.spec.memory.recompute is None or not facts.unrepeatable:
            return
        more = len(facts.unrepeatable) - 1
        yield self.report(
            f"{facts.unrepeatable[0]}" + (f" (and {more} more such modules)" if more else ""),
            context.place(_RECOMPUTE, "memory"),
            "it would run twice",
            help=("name modules inside of it that do not, or leave it out",),
        )


class OffloadNeedsAccelerator(Rule):
    """What it does
        Checks that `offload` is asked for on a device that has memory of its own.

    Why it is bad
        On CPU ranks the device's memory is the host's: nothing would be saved, and each step would copy. torch's FSDP2 fails there too, it looks for an accelerator. `auto` is
        the CPU on a machine without one.

    Example (bad)
        memory { offload = optimizer }

    Better
        cluster { device = cuda }
        memory { offload = optimizer }

    Fix
        Say `device = cuda`, or delete `offload`.
    """

    code = "PDL707"
    name = "offload-needs-accelerator"
    needs = frozenset({"cluster", "memory"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        spec = context.spec
        if spec.memory.offload == "none" or spec.cluster.device == "cuda":
            return
        auto = spec.cluster.device == "auto"
        yield self.report(
            f"offload = {spec.memory.offload} moves what waits to the memory of the host, and "
            + ("device = auto may be the CPU, which has no other" if auto else "CPU ranks have no other"),
            context.place("memory.offload", "memory"),
            f"{spec.memory.offload}{context.by('memory.offload')}",
            labels=context.label("cluster.device", spec.cluster.device),
            help=("device = cuda in cluster says that there is an accelerator" if auto else "delete it, or say device = cuda in cluster",),
        )


class OffloadWithBudget(Rule):
    """What it does
        Refuses `offload` together with a fault budget.

    Why it is bad
        After a loss, layers and their optimizer's state move from device to device. What waits on the host would have to be brought to the device first, which is where
        there is no room for it.

    Example (bad)
        memory { offload = optimizer }
        fault_budget { lose = 1 }

    Better
        fault_budget { lose = 1 }

    Fix
        Delete one of the two; more shards, or `recompute`, save memory too.
    """

    code = "PDL709"
    name = "offload-with-budget"
    needs = frozenset({"fault_budget", "memory"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        spec = context.spec
        if spec.memory.offload == "none" or spec.fault_budget is None:
            return
        yield self.report(
            f"what waits on the host ({spec.memory.offload}) cannot move from node to node, as it must after a loss",
            context.place("memory.offload", "memory"),
            f"{spec.memory.offload}{context.by('memory.offload')}",
            labels=context.label("fault_budget.lose", f"lose = {spec.fault_budget.lose}"),
            help=("delete offload, or fault_budget; more shards, or recompute, save memory too",),
        )


def _module_names(facts: ModelFacts) -> list[str]:
    """Names of modules that are layers or lie inside of them, as far as parameters tell."""
    homes = tuple(m for layer in facts.layers for m in layer.modules if m)
    found = dict.fromkeys(homes)
    for p in facts.parameters:
        parts = p.name.split(".")[:-1]
        names = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
        found.update(dict.fromkeys(n for n in names if any(n == m or n.startswith(f"{m}.") for m in homes)))
    return list(found)


def _above(facts: ModelFacts) -> set[str]:
    """Names of modules that hold layers."""
    found: set[str] = set()
    for layer in facts.layers:
        for module in layer.modules:
            parts = module.split(".")
            found.update(".".join(parts[:k]) for k in range(1, len(parts)))
    return found
