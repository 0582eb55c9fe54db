"""Where things stand: an axis of the final mesh, and the place of a rank in it."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Coordinate", "MeshAxis"]


@frozen
class MeshAxis:
    """One axis with its final size and its role: `pipeline`, `replica`, `shard` or `tensor`."""

    name: str
    size: int
    role: str


@frozen
class Coordinate:
    """Where a rank stands: pipeline, position in it, shard and tensor coordinate in its island."""

    pipeline: int
    position: int
    shard: int
    tensor: int
