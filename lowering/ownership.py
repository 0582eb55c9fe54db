"""Who holds a copy of which box of a parameter, and whose gradients must be summed.

A *box* is the part of a parameter at one (shard, tensor) coordinate. The gradient of a box is summed over every rank that computed a part of
it: the same coordinate in all pipelines and, for a tied parameter, in all stages that use it; over all shard coordinates too if the
parameter is not split there, since those ranks saw different samples. Ranks that differ in the tensor coordinate alone saw the same samples:
they hold equal gradients and are never summed.
"""

from __future__ import annotations

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.plan import Plan

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
    shards = (at.shard,) if plan.layout(parameter.name).sharded else tuple(range(plan.shard_size))
    islands = islands_using(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + at.tensor] for island in islands for s in shards))


def holders(plan: Plan, parameter: ParameterFacts, rank: int) -> tuple[int, ...]:
    """Ranks that hold the same box as this rank, ascending. The first of them counts it in a global norm."""
    at = plan.coordinate(rank)
    layout = plan.layout(parameter.name)
    shards = (at.shard,) if layout.sharded else tuple(range(plan.shard_size))
    tensors = (at.tensor,) if layout.tensor_dim is not None else tuple(range(plan.tensor_size))
    islands = islands_using(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + t] for island in islands for s in shards for t in tensors))


def local_bytes(plan: Plan, parameter: ParameterFacts) -> int:
    """Bytes of the largest box of a parameter."""
    layout = plan.layout(parameter.name)
    parts = (plan.shard_size if layout.sharded else 1) * (plan.tensor_size if layout.tensor_dim is not None else 1)
    return -(-parameter.bytes // parts)
