"""Which layers are FSDP2 units, which ride in the unit of the root, and how often parameters are gathered and gradients reduced.

With resharding, a unit is gathered once for the forward and once for the backward. Two kinds need no second time where the backward comes next:
the root's unit, which stays whole from the one to the other, and the last unit of each stage. So what stands before and after the blocks rides with
the root while it is small; a large vocabulary is a unit of its own, since whole it would cost memory for the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from pdsl.lowering.facts import LayerKind, ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.schedule import Op, Operation

__all__ = [
    "Collectives",
    "collectives",
    "gathers",
    "owned_layers",
    "reductions",
    "root_layers",
    "root_parameters",
    "unit_groups",
    "unit_layers",
]


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


def root_parameters(plan: Plan, rank: int) -> frozenset[str]:
    """The sharded parameters that the root's unit holds on a rank: they are reduced when the rank's last stage is, not earlier."""
    return frozenset(name for name, layer in _homes(plan, rank).items() if layer is None)


def gathers(plan: Plan, rank: int) -> dict[str, int]:
    """How often each sharded parameter of a rank is gathered in a step: as often as the unit that holds it."""
    counts = _unit_gathers(plan, rank)
    return {name: counts[layer] for name, layer in _homes(plan, rank).items()}


def reductions(plan: Plan, rank: int) -> int:
    """How often the gradients of a unit are reduced in a step."""
    microbatches = len(plan.pipelines[plan.coordinate(rank).pipeline].microbatches)
    return microbatches if plan.sharding.every else min(1, microbatches)


def collectives(plan: Plan, rank: int) -> Collectives:
    """Calls of all-gather and reduce-scatter that a rank makes in a step."""
    if plan.shard_size == 1:
        return Collectives(0, 0)
    first = {i: group[0] for groups in unit_groups(plan, rank).values() for group in groups for i in group}
    homes = _homes(plan, rank)
    trained: dict[int | None, bool] = {}  # by the first layer of each unit that holds anything
    for p in (p for p in owned_parameters(plan, rank) if p.name in homes):
        layer = homes[p.name]
        unit = first[layer] if layer is not None else None
        trained[unit] = trained.get(unit, False) or p.trainable
    counts = _unit_gathers(plan, rank)
    return Collectives(sum(counts[unit] for unit in trained), sum(trained.values()) * reductions(plan, rank))


def _homes(plan: Plan, rank: int) -> dict[str, int | None]:
    """For each sharded parameter of a rank the layer in whose unit it is, None for the root's."""
    modules: dict[str, int] = {}
    layers = unit_layers(plan, rank)
    for i in layers:
        for module in plan.facts.layers[i].modules:
            modules.setdefault(module, i)
    order = {i: k for k, i in enumerate(layers)}

    def home(p: ParameterFacts) -> int | None:
        names = (name.split(".") for name in (p.name, *p.aliases))
        around = (".".join(parts[:k]) for parts in names for k in range(1, len(parts)))
        return min((modules[m] for m in around if m in modules), key=order.__getitem__, default=None)

    return {p.name: home(p) for p in owned_parameters(plan, rank) if plan.layout(p.name).sharded}


def _unit_gathers(plan: Plan, rank: int) -> dict[int | None, int]:
    """How often each unit of a rank is gathered, by its layers, that of the root by None; told by the rank's row of the schedule."""
    at = plan.coordinate(rank)
    idle = not plan.pipelines[at.pipeline].microbatches
    row = () if idle else plan.template(at.pipeline).schedule.rows[at.position]
    groups = unit_groups(plan, rank)
    if not plan.reshard:
        return dict.fromkeys((None, *unit_layers(plan, rank)), 1 if row else 0)
    found: dict[int | None, int] = {None: _kept(row, groups)}
    for stage, units in groups.items():
        each, last = sum(o.stage == stage for o in row), _kept(row, (stage,))
        for unit in units:
            found.update(dict.fromkeys(unit, last if unit is units[-1] else each))
    return found


def _kept(row: Sequence[Operation], stages: Collection[int]) -> int:
    """Gathers of a unit that stays whole after forwards of these stages, until the next backward of the rank, which gives back all that is whole."""
    whole, count = False, 0
    for o in row:
        if o.stage in stages and not whole:
            whole, count = True, count + 1
        if o.op is not Op.FORWARD:
            whole = False
    return count
