"""The mesh: axes with sizes and roles, and where each rank stands.

Words: an *axis* is of the mesh, a *dim* is of a tensor; the two are never mixed. Ranks are numbered row-major over the axes in the order of
the text, outermost first. Roles come from the use of an axis, never from its place: the axis of `pipeline over` is the pipeline axis, one in a
layout slot, `colwise` or `rowwise` a tensor axis, one in `fsdp(...)` a shard axis, any other replicates. Replicas and shards split the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice, product

from attrs import frozen

from pdsl.grammar.source import Span
from pdsl.lowering.elastic import Sizing, sizing
from pdsl.lowering.places import Coordinate, MeshAxis
from pdsl.lowering.spec import AxisSpec, LayoutCall, Rest, SizeRange, Spec

__all__ = [
    "PIPELINE",
    "REPLICA",
    "SHARD",
    "TENSOR",
    "AxisUse",
    "Mesh",
    "axis_roles",
    "axis_uses",
    "build_mesh",
    "declared_world",
    "solve_sizes",
]

PIPELINE, REPLICA, SHARD, TENSOR = "pipeline", "replica", "shard", "tensor"
_MOST_CHOICES = 10_000


@frozen
class AxisUse:
    """One place that gives an axis a role."""

    axis: str
    role: str
    span: Span | None


@frozen(slots=False)
class Mesh:
    """The final mesh of a job. Axes in the order of the text.

    With `sizing` pipelines may differ in length: the pipeline axis then has the size of the longest if they are as equal as they can be, the
    product of the axes need not be the number of ranks, and where ranks stand is settled by the plan and not by coordinates.
    """

    axes: tuple[MeshAxis, ...] = ()
    sizing: Sizing | None = None
    ranks_per_node: int = 1

    def _named(self, role: str) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(self.axes) if axis.role == role)

    def _size(self, role: str) -> int:
        return math.prod(self.axes[i].size for i in self._named(role))

    @cached_property
    def world_size(self) -> int:
        if self.sizing is not None:
            return self.sizing.nodes * self.ranks_per_node
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def pipelines(self) -> int:
        """Copies of the model."""
        return self._size(REPLICA)

    @cached_property
    def positions(self) -> int:
        """Islands of one pipeline."""
        return self._size(PIPELINE)

    @cached_property
    def shard_size(self) -> int:
        return self._size(SHARD)

    @cached_property
    def tensor_size(self) -> int:
        return self._size(TENSOR)

    @property
    def batch_parts(self) -> int:
        """Into how many parts a microbatch round of the global batch is split: pipelines x shards."""
        return self.pipelines * self.shard_size

    def axis(self, name: str) -> MeshAxis | None:
        return next((a for a in self.axes if a.name == name), None)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on each axis. Raises IndexError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        found = []
        for axis in reversed(self.axes):
            rank, at = divmod(rank, axis.size)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, coordinates: Iterable[int]) -> int:
        """The rank at a coordinate on each axis. Raises IndexError outside the mesh."""
        at = tuple(coordinates)
        if len(at) != len(self.axes) or any(not 0 <= c < a.size for c, a in zip(at, self.axes, strict=False)):
            raise IndexError(f"{at} is outside the mesh {tuple(a.size for a in self.axes)}")
        rank = 0
        for c, axis in zip(at, self.axes, strict=True):
            rank = rank * axis.size + c
        return rank

    def coordinate(self, rank: int) -> Coordinate:
        """Pipeline, position, shard and tensor coordinate of a rank; axes of one role count together, major first."""
        at = self.coordinates(rank)
        return Coordinate(*(self._joined(role, at) for role in (REPLICA, PIPELINE, SHARD, TENSOR)))

    def _joined(self, role: str, at: tuple[int, ...]) -> int:
        joined = 0
        for i in self._named(role):
            joined = joined * self.axes[i].size + at[i]
        return joined

    def islands(self, pipeline: int, position: int) -> tuple[int, ...]:
        """The ranks of one position of one pipeline, ordered by (shard, tensor) coordinate, tensor innermost."""
        return self._islands[pipeline, position]

    @cached_property
    def _islands(self) -> dict[tuple[int, int], tuple[int, ...]]:
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for rank in range(self.world_size):
            at = self.coordinate(rank)
            found.setdefault((at.pipeline, at.position), []).append((at.shard, at.tensor, rank))
        return {key: tuple(rank for _, _, rank in sorted(members)) for key, members in found.items()}

    def __str__(self) -> str:
        if self.sizing is not None and self.sizing.least < self.sizing.most:
            return f"{self.sizing.pipelines} pipelines over {self.sizing.nodes} nodes"
        return " x ".join(f"{a.name} {a.size}" for a in self.axes) or "one rank"


# --- from the Spec --------------------------------------------------------------------------------------------------------------------------


def axis_uses(spec: Spec) -> tuple[AxisUse, ...]:
    """Every use of an axis, in the order pipeline, shard rules."""
    return tuple(_uses(spec))


def _uses(spec: Spec) -> Iterator[AxisUse]:
    if spec.pipeline is not None:
        yield AxisUse(spec.pipeline.axis, PIPELINE, spec.pipeline.axis_span)
    for rule in spec.shard:
        for term in rule.terms:
            if not isinstance(term, LayoutCall):
                yield from (AxisUse(axis, TENSOR, term.span) for slot in term.slots for axis in slot)
                continue
            role = SHARD if term.name == "fsdp" else TENSOR
            spans = term.axis_spans if len(term.axis_spans) == len(term.axes) else (term.span,) * len(term.axes)
            yield from (AxisUse(axis, role, span) for axis, span in zip(term.axes, spans, strict=True))


def declared_world(spec: Spec) -> int | None:
    """The number of ranks that the cluster block declares, or None if it does not say."""
    nodes, per_node = spec.cluster.nodes, spec.cluster.ranks_per_node
    return nodes * per_node if nodes is not None and per_node is not None else None


def solve_sizes(axes: tuple[AxisSpec, ...], world: int | None) -> tuple[int, ...] | None:
    """The final size of each axis, or None if none fit the world (None: unknown).

    `rest` takes what is left; a range takes the largest size that fits, the leftmost range first, or its low end while the world is unknown.
    """
    elastic = any(isinstance(a.size, Rest) for a in axes)
    if sum(isinstance(a.size, Rest) for a in axes) > 1:
        return None
    if world is None:
        return (
            None
            if elastic
            else tuple(a.size.low if isinstance(a.size, SizeRange) else int(a.size) for a in axes if not isinstance(a.size, Rest))
        )
    options = [_options(a.size, world) for a in axes]
    for choice in islice(product(*options), _MOST_CHOICES):
        fixed = math.prod(choice)
        if elastic and world % fixed == 0:
            return tuple(world // fixed if isinstance(a.size, Rest) else c for a, c in zip(axes, choice, strict=True))
        if not elastic and fixed == world:
            return choice
    return None


def _options(size: int | Rest | SizeRange, world: int) -> tuple[int, ...]:
    if isinstance(size, Rest):
        return (1,)
    if isinstance(size, SizeRange):
        return tuple(n for n in range(min(size.high, world, size.low + _MOST_CHOICES), size.low - 1, -1) if world % n == 0)
    return (size,)


def axis_roles(spec: Spec) -> dict[str, str]:
    """The role of each axis that is used; one with several uses takes the first one's, and the rules report it. Any other axis replicates."""
    roles: dict[str, str] = {}
    for use in axis_uses(spec):
        roles.setdefault(use.axis, use.role)
    return roles


def build_mesh(spec: Spec, world: int | None = None, least: int = 1) -> Mesh | None:
    """The mesh of a spec for `world` ranks (by default what the cluster declares), or None if the sizes do not fit or `rest` stays open.

    `least` is the fewest nodes of a pipeline that memory allows, where its length is a range.
    """
    ranks = world if world is not None else declared_world(spec)
    roles = axis_roles(spec)
    found = sizing(spec, roles, ranks, least)
    if found is not None and ranks is not None:
        return _elastic(spec, roles, found, ranks // found.nodes)
    sizes = solve_sizes(spec.mesh.axes, ranks)
    if sizes is None:
        return None
    return Mesh(tuple(MeshAxis(a.name, n, roles.get(a.name, REPLICA)) for a, n in zip(spec.mesh.axes, sizes, strict=True)))


def _elastic(spec: Spec, roles: dict[str, str], found: Sizing, ranks_per_node: int) -> Mesh:
    axes = []
    for a in spec.mesh.axes:
        role = roles.get(a.name, REPLICA)
        fixed = a.size if isinstance(a.size, int) else a.size.low if isinstance(a.size, SizeRange) else 1
        size = found.positions if role == PIPELINE else found.pipelines if role == REPLICA and not isinstance(a.size, int) else fixed
        axes.append(MeshAxis(a.name, size, role))
    return Mesh(tuple(axes), found, ranks_per_node)
