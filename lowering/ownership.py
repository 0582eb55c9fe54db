"""Who holds a copy of which box of a parameter, and whose gradients must be summed.

A *box* is the part of a parameter at one (shard, tensor) coordinate. The gradient of a box is summed over every rank that computed a part of
it: the same coordinate in all pipelines and, for a tied parameter, in all stages that use it; over all shard coordinates too if the
parameter is not split there, since those ranks saw different samples. Ranks that differ in the tensor coordinate alone saw the same samples:
they hold equal gradients and are never summed.
"""

from __future__ import annotations

from attrs import frozen

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Bucket

__all__ = ["BUCKET_BYTES", "holders", "local_bytes", "owned_parameters", "rank_buckets", "stages_using", "summed_over"]

BUCKET_BYTES = 8 << 20  # large enough to amortise one collective, small enough to start before the backward pass has ended


def stages_using(plan: Plan, pipeline: int, parameter: ParameterFacts) -> tuple[int, ...]:
    """Indices of the stages of a pipeline whose layers use the parameter."""
    stages = plan.template(pipeline).stages
    return tuple(i for i, s in enumerate(stages) if any(s.start <= layer < s.stop for layer in parameter.layers))


def owned_parameters(plan: Plan, rank: int) -> tuple[ParameterFacts, ...]:
    """Parameters of which a rank holds a box, in the order of the model."""
    at = plan.coordinate(rank)
    mine = set(plan.stages_of(rank))
    return tuple(p for p in plan.facts.parameters if mine.intersection(stages_using(plan, at.pipeline, p)))


def _islands(plan: Plan, parameter: ParameterFacts) -> list[tuple[int, ...]]:
    """Every island that uses the parameter, each once."""
    found: dict[tuple[int, ...], None] = {}
    for index, pipeline in enumerate(plan.pipelines):
        stages = plan.template(index).stages
        for s in stages_using(plan, index, parameter):
            found.setdefault(pipeline.islands[stages[s].position])
    return list(found)


def summed_over(plan: Plan, parameter: ParameterFacts, rank: int) -> tuple[int, ...]:
    """Ranks over which PDSL sums the gradient of this rank's box, ascending; a single rank means that nothing is to be summed."""
    at = plan.coordinate(rank)
    shards = (at.shard,) if plan.layout(parameter.name).sharded else tuple(range(plan.shard_size))
    islands = _islands(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + at.tensor] for island in islands for s in shards))


def holders(plan: Plan, parameter: ParameterFacts, rank: int) -> tuple[int, ...]:
    """Ranks that hold the same box as this rank, ascending. The first of them counts it in a global norm."""
    at = plan.coordinate(rank)
    layout = plan.layout(parameter.name)
    shards = (at.shard,) if layout.sharded else tuple(range(plan.shard_size))
    tensors = (at.tensor,) if layout.tensor_dim is not None else tuple(range(plan.tensor_size))
    islands = _islands(plan, parameter)
    return tuple(sorted(island[s * plan.tensor_size + t] for island in islands for s in shards for t in tensors))


def local_bytes(plan: Plan, parameter: ParameterFacts) -> int:
    """Bytes of the largest box of a parameter."""
    layout = plan.layout(parameter.name)
    parts = (plan.shard_size if layout.sharded else 1) * (plan.tensor_size if layout.tensor_dim is not None else 1)
    return -(-parameter.bytes // parts)


@frozen
class _Entry:
    parameter: ParameterFacts
    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]  # per pipeline; equal keys finish together on every rank


def rank_buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The buckets of a rank, deepest layers first, which is the order in which their gradients become final.

    Parameters share a bucket if they are summed over the same ranks, belong to the same stages in every pipeline and kind of layout, and fit
    BUCKET_BYTES. The cut depends on the plan alone, so all ranks of a bucket agree on it.
    """
    at = plan.coordinate(rank)
    pipelines = range(len(plan.pipelines))
    entries = [
        _Entry(p, ranks, tuple(stages_using(plan, i, p) for i in pipelines))
        for p in owned_parameters(plan, rank)
        if p.trainable and min(p.layers) >= plan.frozen_layers and len(ranks := summed_over(plan, p, rank)) > 1
    ]
    entries.sort(key=lambda e: -min(e.parameter.layers))  # a tied one is final when its lowest layer is

    kinds: dict[object, list[_Entry]] = {}
    for e in entries:
        kinds.setdefault((e.ranks, e.stages, plan.layout(e.parameter.name).sharded, e.parameter.dtype), []).append(e)

    mine = set(plan.stages_of(rank))
    buckets = []
    for run in kinds.values():
        stages = tuple(sorted(mine.intersection(run[0].stages[at.pipeline])))
        buckets += [Bucket(tuple(e.parameter.name for e in part), run[0].ranks, stages) for part in _fill(plan, run)]
    return tuple(buckets)


def _fill(plan: Plan, run: list[_Entry]) -> list[list[_Entry]]:
    parts: list[list[_Entry]] = []
    room = 0
    for entry in run:
        size = local_bytes(plan, entry.parameter)
        if not parts or size > room:
            parts.append([])
            room = BUCKET_BYTES
        parts[-1].append(entry)
        room -= size
    return parts
