"""Boxes: which part of a parameter one (shard, tensor) coordinate holds, as half-open intervals per dim.

Tensor axes cut first, evenly, whichever dims; the shard axis then cuts dim 0 of what is left as `torch.chunk` does: equal parts rounded up, the last ones
shorter or empty. That is where FSDP2 over DTensor tensor parallel puts them.
"""

from __future__ import annotations

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.parts import part
from pdsl.lowering.plan import Plan

__all__ = ["Box", "box", "box_shape", "chunk"]

Box = tuple[tuple[int, int], ...]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` chunks of `range(size)`, as `torch.chunk` cuts; empty past the end."""
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


def box(plan: Plan, parameter: ParameterFacts, shard: int, tensor: int) -> Box:
    """Global intervals of the part that a coordinate holds."""
    layout = plan.layout(parameter.name)
    bounds = [(0, size) for size in parameter.shape]
    for dim, axes in layout.splits:
        index, count = part(plan.tensor_axes, axes, tensor, plan.tensor_size)
        bounds[dim] = chunk(parameter.shape[dim], count, index)
    if layout.sharded:
        low, high = bounds[0]
        index, count = part(plan.shard_axes, layout.shard_axes, shard, plan.shard_size)
        a, b = chunk(high - low, count, index)
        bounds[0] = (low + a, low + b)
    return tuple(bounds)


def box_shape(bounds: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(b - a for a, b in bounds)
