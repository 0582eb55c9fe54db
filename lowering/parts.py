"""Which part of a dim a rank holds: from its coordinate on all axes of a role to its place among those that split the dim.

All axes of one role count together in a single coordinate, major first in the order of the mesh. A parameter may be split over some of them, in an
order of its own; then the ranks that differ only on the others hold the same part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from pdsl.lowering.places import MeshAxis

__all__ = ["digits", "named_axes", "part", "part_at", "parts", "role_axes", "same_on"]


def role_axes(axes: Iterable[MeshAxis], role: str) -> tuple[MeshAxis, ...]:
    """The axes of a role that have more than one rank, in the order of the mesh."""
    return tuple(a for a in axes if a.role == role and a.size > 1)


def named_axes(axes: Sequence[MeshAxis], chosen: Sequence[str]) -> tuple[str, ...]:
    """Names of axes without those of one rank; empty also where they are all `axes` in their order, which is how a plan says "all of them"."""
    names = [a.name for a in axes]
    found = tuple(c for c in chosen if c in names)
    return () if list(found) == names else found


def digits(axes: Sequence[MeshAxis], coordinate: int) -> dict[str, int]:
    """The coordinate on each axis of a role."""
    found: dict[str, int] = {}
    for axis in reversed(axes):
        coordinate, found[axis.name] = divmod(coordinate, axis.size)
    return found


def parts(axes: Sequence[MeshAxis], chosen: Sequence[str], whole: int) -> int:
    """Into how many parts the chosen axes split a dim; `whole` where none are named, which means all, or where a role has no axes by name."""
    return prod(a.size for a in axes if a.name in chosen) if chosen and axes else whole


def part(axes: Sequence[MeshAxis], chosen: Sequence[str], coordinate: int, whole: int) -> tuple[int, int]:
    """(index, count) of the part at a coordinate, the first of the chosen axes major; all axes if none are named."""
    if not chosen:
        return coordinate, whole
    return part_at(chosen, digits(axes, coordinate), {a.name: a.size for a in axes})


def part_at(chosen: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """(index, count) of the part at a coordinate on each axis, the first of the chosen axes major."""
    index = 0
    for name in chosen:
        index = index * sizes[name] + at[name]
    return index, prod(sizes[name] for name in chosen)


def same_on(axes: Sequence[MeshAxis], chosen: Sequence[str], coordinate: int, count: int) -> tuple[int, ...]:
    """The coordinates, of `count` in all, that agree with one on the chosen axes and differ on any others; itself alone if none are named."""
    if not chosen:
        return (coordinate,)
    mine = digits(axes, coordinate)
    others = (digits(axes, c) for c in range(count))
    return tuple(c for c, theirs in enumerate(others) if all(theirs[name] == mine[name] for name in chosen))
