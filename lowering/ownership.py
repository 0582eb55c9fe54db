"""Who holds a copy of which box of a parameter, and whose gradients must be summed.

A *box* is the part of a parameter at one (shard, tensor) coordinate. The gradient of a box is summed over every rank that computed a part of
it: the same coordinate in all pipelines and, for a tied parameter, in all stages that use it; over all shard coordinates too if the
parameter is not split there, since those ranks saw different samples. Ranks that differ in the tensor coordinate alone saw the same samples:
they hold equal gradients, which are not summed, unless the layout says that each has a part.
"""

from __future__ import annotations

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.parts import parts, same_on
from pdsl.lowering.plan import ParameterLayout, Plan

__all__ = ["holders", "islands_using", "local_bytes", "owned_parameters", "stages_using", "summed_over"]


def stages_using(plan: Plan, pipeline: int, parameter: ParameterFacts) -> tuple[int, ...]:
    """Indices of the stages of a pipeline whose layers use the parameter."""
    stages = plan.template(pipeline).stages
    return tuple(i for i, s in enumerate(stages) if any(s.start <= layer < s.stop for layer in parameter.layers))


def owned_parameters(plan: Plan, rank: int) -> tuple[ParameterFacts, ...]:
    """Parameters of which a rank holds a box, in the order of the model."""
    at = plan.coordinate(rank)
    mine = set(plan.stages_of(rank))
    return tuple(p for p in plan.facts.parameters if mine.intersection(stages_using(plan, at.pipeline, p)))


def islands_using(plan: Plan, parameter: ParameterFacts) -> list[tuple[int, ...]]:
    """Every living island that uses the parameter, each once."""
    found: dict[tuple[int, ...], None] = {}
    for index, pipeline in enumerate(plan.pipelines):
        stages = plan.template(index).stages
        for s in stages_using(plan, index, parameter):
            found.setdefault(pipeline.islands[stages[s].position])
    return [island for island in found if island]


def summed_over(plan: Plan, parameter: ParameterFacts, rank: int) -> tuple[int, ...]:
    """Ranks over which PDSL sums the gradient of this rank's box, ascending; a single rank means that nothing is to be summed."""
    at = plan.coordinate(rank)
    layout = plan.layout(parameter.name)
    tensors: tuple[int, ...] = (at.tensor,)
    if layout.summed:
        others = [a.name for a in plan.tensor_axes if a.name not in layout.summed]
        tensors = same_on(plan.tensor_axes, others, at.tensor, plan.tensor_size) if others else tuple(range(plan.tensor_size))
    islands = islands_using(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + t] for island in islands for s in _shards(plan, layout, at.shard) for t in tensors))


def holders(plan: Plan, parameter: ParameterFacts, rank: int) -> tuple[int, ...]:
    """Ranks that hold the same box as this rank, ascending. The first of them counts it in a global norm."""
    at = plan.coordinate(rank)
    layout = plan.layout(parameter.name)
    tensors: tuple[int, ...] = tuple(range(plan.tensor_size))
    if layout.splits:
        axes = [name for _, names in layout.splits for name in names]
        tensors = same_on(plan.tensor_axes, axes, at.tensor, plan.tensor_size)
    islands = islands_using(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + t] for island in islands for s in _shards(plan, layout, at.shard) for t in tensors))


def _shards(plan: Plan, layout: ParameterLayout, shard: int) -> tuple[int, ...]:
    """The shard coordinates with the same part of a parameter as one."""
    if not layout.sharded:
        return tuple(range(plan.shard_size))
    return same_on(plan.shard_axes, layout.shard_axes, shard, plan.shard_size)


def local_bytes(plan: Plan, parameter: ParameterFacts) -> int:
    """Bytes of the largest box of a parameter."""
    layout = plan.layout(parameter.name)
    cut = parts(plan.shard_axes, layout.shard_axes, plan.shard_size) if layout.sharded else 1
    for _, axes in layout.splits:
        cut *= parts(plan.tensor_axes, axes, plan.tensor_size)
    return -(-parameter.bytes // cut)
