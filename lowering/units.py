"""Which layers are FSDP2 units, which ride in the unit of the root, and how often parameters are gathered and gradients reduced.

With resharding, a unit is gathered once for the forward and once for the backward. Two kinds need no second time where the backward comes next:
the root's unit, which stays whole from the one to the other, and the last unit of each stage. So what stands before and after the blocks rides with
the root while it is small; a large vocabulary is a unit of its own, since whole it would cost memory for the whole step.
"""

from __future__ import annotations

from attrs import frozen

from pdsl.lowering.facts import LayerKind, ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.schedule import Op

__all__ = ["Collectives", "collectives", "gathers", "in_root", "owned_layers", "reductions", "root_layers", "unit_groups", "unit_layers"]


@frozen
class Collectives:
    """Calls of collectives of one rank in one step that sharding makes: of all units together."""

    gathers: int
    reductions: int


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
    """Owned layers that are in a unit other than the root's, in order."""
    root = root_layers(plan, rank)
    return tuple(i for i in owned_layers(plan, rank) if i not in root)


def unit_groups(plan: Plan, rank: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """For each stage of the rank the layers of each unit, in order.

    As many blocks that follow each other as the plan groups are one unit; a layer before or after the blocks is one by itself.
    """
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    layers = unit_layers(plan, rank)
    return {s: _grouped(plan, [i for i in layers if stages[s].start <= i < stages[s].stop]) for s in plan.stages_of(rank)}


def _grouped(plan: Plan, layers: list[int]) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    room = False
    for i in layers:
        block = plan.facts.layers[i].kind is LayerKind.BLOCK
        if block and room and groups[-1][-1] == i - 1 and len(groups[-1]) < plan.sharding.group:
            groups[-1] = (*groups[-1], i)
        else:
            groups.append((i,))
        room = block
    return tuple(groups)


def gathers(plan: Plan, rank: int, parameter: ParameterFacts) -> int:
    """How often a sharded parameter is gathered in a step: that of the unit that holds it."""
    layers = unit_layers(plan, rank)
    at = next((i for i in layers if _holds(plan, i, parameter)), None)
    return _Gathers(plan, rank).root() if at is None else _Gathers(plan, rank).unit(at)


def reductions(plan: Plan, rank: int) -> int:
    """How often the gradients of a unit are reduced in a step."""
    microbatches = len(plan.pipelines[plan.coordinate(rank).pipeline].microbatches)
    return microbatches if plan.sharding.every else min(1, microbatches)


def collectives(plan: Plan, rank: int) -> Collectives:
    """Calls of all-gather and reduce-scatter that a rank makes in a step."""
    if plan.shard_size == 1:
        return Collectives(0, 0)
    counts = _Gathers(plan, rank)
    sharded = [p for p in owned_parameters(plan, rank) if plan.layout(p.name).sharded]
    root = [p for p in sharded if in_root(plan, rank, p)]
    units = [
        (group, [p for p in sharded if any(_holds(plan, i, p) for i in group) and p not in root])
        for groups in unit_groups(plan, rank).values()
        for group in groups
    ]
    gathered = sum(counts.unit(group[0]) for group, held in units if held) + (counts.root() if root else 0)
    trained = sum(any(p.trainable for p in held) for held in (root, *(held for _, held in units)))
    return Collectives(gathered, trained * reductions(plan, rank))


class _Gathers:
    """Counts of one rank, from its row of the schedule.

    Every backward of the rank gives back all that is whole; a unit that stays whole after a forward serves all that comes before the next one.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        at = plan.coordinate(rank)
        self._reshard = plan.reshard
        self._groups = unit_groups(plan, rank)
        idle = not plan.pipelines[at.pipeline].microbatches
        self._row = () if idle else plan.template(at.pipeline).schedule.rows[at.position]

    def root(self) -> int:
        if not self._reshard:
            return 1 if self._row else 0
        return self._kept(frozenset(self._groups))

    def unit(self, layer: int) -> int:
        """Of the unit that a layer belongs to."""
        if not self._reshard:
            return 1 if self._row else 0
        stage, groups = next((s, groups) for s, groups in self._groups.items() if any(layer in g for g in groups))
        if layer in groups[-1]:
            return self._kept(frozenset({stage}))
        return sum(o.stage == stage for o in self._row)

    def _kept(self, stages: frozenset[int]) -> int:
        whole, count = False, 0
        for o in self._row:
            if o.stage in stages and not whole:
                whole, count = True, count + 1
            if o.op is not Op.FORWARD:
                whole = False
        return count
