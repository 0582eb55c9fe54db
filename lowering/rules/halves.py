"""Rules on schedules that run backwards in halves: PDL415 and PDL416."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.rules.base import Context, Rule, listed, plural
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.spec import OriginKind

__all__ = ["RecomputedHalves", "ReshardingBetweenHalves"]


def _whole_instead() -> str:
    return listed(name for name, family in SCHEDULES.items() if not family.split)


class ReshardingBetweenHalves(Rule):
    """What it does
        Checks that a schedule with backwards in halves keeps sharded layers gathered for the step, and reduces gradients at its end.

    Why it is bad
        The input half of a backward comes first and the weight half later, with other work between. What a sharded layer gathered must be there
        for both, and its gradients are complete after the second. torch's FSDP2 gives the layer back, or reduces what it has, after the first: the
        gradients are silently wrong. PDSL does neither under such a schedule, so a key that asks for it cannot be kept. The price is memory: a rank
        holds the whole parameters of its stages for the step.

    Example (bad)
        shard { "**" => fsdp(fsdp) }
        pipeline over pp { schedule = zbv(microbatches = 8) }
        memory { reshard = true }

    Better
        shard { "**" => fsdp(fsdp) }
        pipeline over pp { schedule = zbv(microbatches = 8) }

    Fix
        Delete the key, or take a schedule with whole backwards.
    """

    code = "PDL415"
    name = "resharding-between-halves"
    needs = frozenset({"memory", "mesh", "pipeline", "shard"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        assert context.mesh is not None
        schedule = context.halves
        if not schedule or context.mesh.shard_size == 1 or not any(context.sharded(rule) for rule in context.spec.shard):
            return
        for path, value, what in self._asked(context):
            yield self.report(
                f"{schedule} runs backwards in halves, between which sharded layers must stay whole",
                context.place(path, "memory"),
                f"{value}{context.by(path)} {what}",
                labels=context.label("pipeline.schedule", schedule),
                help=(f"delete the key, or take a schedule with whole backwards: {_whole_instead()}",),
            )

    def _asked(self, context: Context) -> Iterator[tuple[str, str, str]]:
        memory = context.spec.memory
        if memory.reshard == "true":
            yield "memory.reshard", "true", "gives them back between"
        if memory.sync == "every":
            yield "memory.sync", "every", "reduces their gradients before the second half"


class RecomputedHalves(Rule):
    """What it does
        Warns if activations are computed again in backwards that a schedule has in halves.

    Why it is bad
        Each half would have to compute them again. So where anything of a stage is computed again, its input half is the whole backward: the gradients
        are right, but nothing is left for the weight half, which is what such a schedule fills gaps with. It is no faster than one with whole
        backwards then.

    Example (bad)
        pipeline over pp { schedule = zero_bubble(microbatches = 8) }
        memory { recompute = "layers.*" }

    Better
        pipeline over pp { schedule = one_f_one_b(microbatches = 8) }
        memory { recompute = "layers.*" }

    Fix
        Keep the activations if there is memory for them, or take a schedule with whole backwards.
    """

    code = "PDL416"
    name = "recomputed-halves"
    severity = Severity.WARNING
    needs = frozenset({"memory", "pipeline"})

    def check(self, context: Context) -> Iterable[Diagnostic]:
        schedule = context.halves
        if not schedule or context.origin("memory.recompute").kind is OriginKind.DEFAULT or context.spec.memory.recompute is None:
            return
        modules = context.facts.recomputed if context.facts is not None else ()
        told = f" ({plural(len(modules), 'module')})" if modules else ""
        yield self.report(
            f"{schedule} gains nothing from backwards in halves where activations are computed again{told}",
            context.place("memory.recompute", "memory"),
            "the input half is the whole backward",
            labels=context.label("pipeline.schedule", schedule),
            help=(f"delete the key if memory allows, or take a schedule with whole backwards: {_whole_instead()}",),
        )
