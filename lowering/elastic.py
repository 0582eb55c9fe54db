"""Meshes whose pipelines may differ in length: what a range on the pipeline axis, a `rest` beside it and a fault budget ask for.

A node has k islands, its ranks over the ranks of an island, and a pipeline takes whole nodes, so n nodes are n * k positions. As many pipelines are
made at first as nodes and replica axes allow, because short pipelines idle least and more copies survive more; of these counts the largest that
divides the batch. The sum of all microbatches is then what a step has for good, however many pipelines are left.
"""

from __future__ import annotations

import math

from attrs import frozen

from pdsl.lowering.coverage import pipeline_counts
from pdsl.lowering.spec import AxisSpec, Rest, SizeRange, Spec

__all__ = ["Sizing", "island_axes", "positions_range", "sizing"]

_PIPELINE, _REPLICA = "pipeline", "replica"


@frozen
class Sizing:
    """Pipelines of `least` to `most` nodes over `nodes` nodes, each of `islands_per_node` islands; `pipelines` of them at first."""

    nodes: int
    islands_per_node: int
    least: int
    most: int
    pipelines: int

    @property
    def positions(self) -> int:
        """Positions of the longest pipeline, if they are as equal as they can be."""
        return -(-self.nodes // self.pipelines) * self.islands_per_node


def island_axes(spec: Spec, roles: dict[str, str]) -> int | None:
    """Ranks of an island: the product of the shard and tensor axes, or None if one of them has no fixed size."""
    sizes = [_fixed(a) for a in spec.mesh.axes if roles.get(a.name, _REPLICA) not in (_PIPELINE, _REPLICA)]
    return math.prod(s for s in sizes if s is not None) if None not in sizes else None


def positions_range(spec: Spec, roles: dict[str, str]) -> tuple[int, int]:
    """Fewest and most positions of a pipeline that the mesh allows: (1, 1) without a pipeline axis. `rest` allows any."""
    axis = next((a for a in spec.mesh.axes if roles.get(a.name) == _PIPELINE), None)
    if axis is None:
        return 1, 1
    if isinstance(axis.size, Rest):
        return 1, len(spec.mesh.axes) << 20
    return (axis.size.low, axis.size.high) if isinstance(axis.size, SizeRange) else (axis.size, axis.size)


def sizing(spec: Spec, roles: dict[str, str], world: int | None, least: int = 1) -> Sizing | None:
    """The sizes of pipelines if the pipeline axis is a range and everything else is settled by it; None for any other mesh, or if nothing fits.

    `least` is the fewest nodes that hold a pipeline in memory. Layers that are listed by stage leave only one length, so they are no such case.
    """
    low, high = positions_range(spec, roles)
    island = island_axes(spec, roles)
    axis = next((a for a in spec.mesh.axes if roles.get(a.name) == _PIPELINE), None)
    replicas = _replicas(spec, roles)
    if axis is None or not isinstance(axis.size, SizeRange) or low == high or island is None or replicas is None or world is None:
        return None
    if spec.pipeline is None or spec.pipeline.stages:
        return None
    per_node = spec.cluster.ranks_per_node or island
    if per_node % island or world % per_node:
        return None
    islands, nodes = per_node // island, world // per_node
    smallest, largest = max(least, -(-low // islands)), high // islands
    if smallest > largest:
        return None
    counts = pipeline_counts(nodes, smallest, largest - smallest + 1, replicas[0], replicas[1])
    if not counts:
        return None
    return Sizing(nodes, islands, smallest, largest, _dividing(spec, counts, island_shards(spec, roles)))


def island_shards(spec: Spec, roles: dict[str, str]) -> int:
    return math.prod(_fixed(a) or 1 for a in spec.mesh.axes if roles.get(a.name) == "shard")


def _dividing(spec: Spec, counts: range, shards: int) -> int:
    """The most pipelines with whole microbatches, and one more than may be lost; if no count is so the most of all, and the rules tell of it."""
    if spec.train is None or spec.pipeline is None:
        return counts[-1]
    each = spec.pipeline.microbatches * spec.train.accumulate * shards
    fewest = spec.fault_budget.lose + 1 if spec.fault_budget is not None else 1
    return next((r for r in reversed(counts) if r >= fewest and spec.train.batch % (r * each) == 0), counts[-1])


def _replicas(spec: Spec, roles: dict[str, str]) -> tuple[int, int | None] | None:
    """Fewest and most pipelines that the replica axes allow (None: any number); None if that is no range."""
    axes = [a for a in spec.mesh.axes if roles.get(a.name, _REPLICA) == _REPLICA]
    open_ = [a for a in axes if _fixed(a) is None]
    product = math.prod(_fixed(a) or 1 for a in axes)
    if not open_:
        return product, product
    if len(open_) > 1 or product > 1:
        return None
    size = open_[0].size
    return (size.low, size.high) if isinstance(size, SizeRange) else (1, None)


def _fixed(axis: AxisSpec) -> int | None:
    if isinstance(axis.size, SizeRange):
        return axis.size.low if axis.size.low == axis.size.high else None
    return axis.size if isinstance(axis.size, int) else None
