"""Boxes: which part of a parameter one (shard, tensor) coordinate holds, as half-open intervals per dim.

Tensor axes cut first, evenly, whichever dims; the shard axis then cuts dim 0 of what is left as `torch.chunk` does: equal parts rounded up, the last ones
shorter or empty. That is where FSDP2 over DTensor tensor parallel puts them.
"""

from __future__ import annotations

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.parts import part
from pdsl.lowering.plan import Plan

__all__ = ["Box", "box", "box_shape", "chunk", "tensor_box"]

Box = tuple[tuple[int, int], ...]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` chunks of `range(size)`, as `torch.chunk` cuts; empty past the end."""
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


def box(plan: Plan, parameter: ParameterFacts, shard: int, tensor: int) -> Box:
    """Global intervals of the part that a coordinate holds."""
    layout, bounds = plan.layout(parameter.name), tensor_box(plan, parameter, tensor)
    if not layout.sharded:
        return bounds
    low, high = bounds[0]
    index, count = part(plan.shard_axes, layout.shard_axes, shard, plan.shard_size)
    a, b = chunk(high - low, count, index)
    return ((low + a, low + b), *bounds[1:])


def tensor_box(plan: Plan, parameter: ParameterFacts, tensor: int) -> Box:
    """The part at a tensor coordinate, before anything is sharded."""
    bounds = [(0, size) for size in parameter.shape]
    for dim, axes in plan.layout(parameter.name).splits:
        index, count = part(plan.tensor_axes, axes, tensor, plan.tensor_size)
        bounds[dim] = chunk(parameter.shape[dim], count, index)
    return tuple(bounds)


def box_shape(bounds: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(b - a for a, b in bounds)
