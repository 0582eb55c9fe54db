"""Which layers are FSDP2 units of their own, which ride in the unit of the root, and how often parameters are gathered.

With resharding, a unit is gathered once for the forward and once for the backward. Two kinds need no second time: the root's unit, which stays
whole from the one to the other, and the last of the others, whose backward comes next. So what stands before and after the blocks rides with the
root while it is small; a large vocabulary is a unit of its own, since whole it would cost memory for the whole step.
"""

from __future__ import annotations

from pdsl.lowering.facts import LayerKind, ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan

__all__ = ["gathers", "in_root", "owned_layers", "root_layers", "unit_layers"]


def owned_layers(plan: Plan, rank: int) -> tuple[int, ...]:
    """Layers that a rank runs, in order of its stages."""
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    return tuple(i for s in plan.stages_of(rank) for i in range(stages[s].start, stages[s].stop))


def root_layers(plan: Plan, rank: int) -> frozenset[int]:
    """Owned layers whose parameters ride in the root's unit.

    Layers that hold a parameter which others use too must, since a parameter can only belong to one unit, which must not finish before all its
    uses. With resharding the layers before and after the blocks
    do if all together are no larger than the largest block.
    """
    mine = set(owned_layers(plan, rank))
    shared = [p for p in plan.facts.parameters if len(mine.intersection(p.layers)) > 1]
    sharing = {i for p in shared for i in mine.intersection(p.layers) if _holds(plan, i, p)}
    if not plan.reshard:
        return frozenset(sharing)
    size = dict.fromkeys(mine, 0)
    for p in owned_parameters(plan, rank):
        for i in mine.intersection(p.layers):
            size[i] += p.numel
    ends = {i for i in mine if plan.facts.layers[i].kind is not LayerKind.BLOCK}
    largest = max((size[i] for i in mine - ends), default=0)
    return frozenset(sharing | ends) if sum(size[i] for i in ends) <= largest else frozenset(sharing)


def _holds(plan: Plan, layer: int, parameter: ParameterFacts) -> bool:
    """Whether a parameter lies in a module of the layer; one that lies in none is the model's own and always in the root's unit."""
    inside = tuple(f"{m}." for m in plan.facts.layers[layer].modules)
    return any(name.startswith(inside) for name in (parameter.name, *parameter.aliases))


def in_root(plan: Plan, rank: int, parameter: ParameterFacts) -> bool:
    """Whether the root's unit holds a sharded parameter on this rank: it is reduced when the rank's last stage is, not earlier."""
    return not any(_holds(plan, i, parameter) for i in unit_layers(plan, rank))


def unit_layers(plan: Plan, rank: int) -> tuple[int, ...]:
    """Owned layers that are units of their own, in order."""
    root = root_layers(plan, rank)
    return tuple(i for i in owned_layers(plan, rank) if i not in root)


def gathers(plan: Plan, rank: int, parameter: ParameterFacts) -> int:
    """How often a sharded parameter is gathered in a step.

    Without resharding once; with it once for each microbatch, and again for the backward unless its unit stayed whole.
    """
    if not plan.reshard:
        return 1
    units = unit_layers(plan, rank)
    again = any(i in parameter.layers for i in units[:-1]) and not in_root(plan, rank, parameter)
    return len(plan.pipelines[plan.coordinate(rank).pipeline].microbatches) * (1 + again)
