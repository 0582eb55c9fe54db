"""Boxes as sets: what two of them share, what is left of one, and the cells that many of them cut a tensor into.

A box of a tensor without dims is the empty tuple, and holds the one element. A box with an empty interval holds nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import prod

from attrs import frozen

from pdsl.lowering.boxes import Box

__all__ = ["Cell", "box_text", "cells", "inside", "intersect", "pieces", "subtract", "volume"]


@frozen
class Cell:
    """A box that each row of a tensor covers whole or not at all: the owners that hold it, and those that need it, ascending."""

    box: Box
    holders: tuple[int, ...]
    needers: tuple[int, ...]


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(b - a for a, b in box)


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(a < b for a, b in shared) else None


def inside(small: Box, large: Box) -> bool:
    """Whether a box lies in another whole."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(small, large, strict=True))


def subtract(box: Box, taken: Iterable[Box]) -> list[Box]:
    """What is left of a box without others, as disjoint boxes."""
    left = [box]
    for other in taken:
        left = [piece for part in left for piece in _without(part, other)]
        if not left:
            break
    return left


def _without(box: Box, other: Box) -> list[Box]:
    shared = intersect(box, other)
    if shared is None:
        return [box]
    left = []
    core = list(box)
    for dim, ((a, b), (c, d)) in enumerate(zip(box, shared, strict=True)):
        if a < c:
            left.append((*core[:dim], (a, c), *core[dim + 1 :]))
        if d < b:
            left.append((*core[:dim], (d, b), *core[dim + 1 :]))
        core[dim] = (c, d)
    return left


def pieces(box: Box, most: int) -> list[Box]:
    """Cut a box into slabs of at most `most` elements (at least one), along the first dim that has more than one index, then the next."""
    size = volume(box)
    if size <= most or size <= 1:
        return [box]
    dim = next(i for i, (a, b) in enumerate(box) if b - a > 1)
    a, b = box[dim]
    each = size // (b - a)
    step = max(1, most // each)
    found = []
    for start in range(a, b, step):
        slab = (*box[:dim], (start, min(b, start + step)), *box[dim + 1 :])
        found += [slab] if each <= most else pieces(slab, most)
    return found


def box_text(box: Box) -> str:
    """A box in words of an index: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"


def cells(held: Sequence[tuple[int, Box]], needed: Sequence[tuple[int, Box]]) -> tuple[Cell, ...]:
    """The cells that somebody needs, in the order of their boxes.

    Every dim is cut at the ends of all boxes: at most (ends of held + ends of needed) cells a dim, whatever the two ways to split have in
    common. Neighbours with the same holders and needers are one cell.
    """
    rows = [*held, *needed]
    if not rows or not needed:
        return ()
    dims = len(rows[0][1])
    ends = [sorted({e for _, box in rows for e in box[dim]}) for dim in range(dims)]
    holders = _painted(held, ends)
    needers = _painted(needed, ends)
    grid = {index: (tuple(sorted(holders.get(index, ()))), tuple(sorted(who))) for index, who in needers.items()}
    merged = [(tuple((ends[d][i], ends[d][i + 1]) for d, i in enumerate(index)), who) for index, who in grid.items()]
    for dim in reversed(range(dims)):
        merged = _merged(merged, dim)
    return tuple(Cell(box, *who) for box, who in sorted(merged))


def _painted(rows: Sequence[tuple[int, Box]], ends: Sequence[Sequence[int]]) -> dict[tuple[int, ...], set[int]]:
    """For each cell of the grid the owners whose box covers it."""
    found: dict[tuple[int, ...], set[int]] = {}
    spans: dict[Box, list[tuple[int, ...]]] = {}
    for owner, box in rows:
        if box not in spans:
            indices: list[tuple[int, ...]] = [()]
            for dim, (a, b) in enumerate(box):
                covered = range(bisect_left(ends[dim], a), bisect_left(ends[dim], b))
                indices = [(*index, i) for index in indices for i in covered]
            spans[box] = indices
        for index in spans[box]:
            found.setdefault(index, set()).add(owner)
    return found


_Part = tuple[Box, tuple[tuple[int, ...], tuple[int, ...]]]


def _merged(parts: list[_Part], dim: int) -> list[_Part]:
    """Join parts that touch along a dim, are equal in all others and have the same owners."""
    order = sorted(parts, key=lambda p: (p[1], p[0][:dim], p[0][dim + 1 :], p[0][dim]))
    found: list[_Part] = []
    for box, who in order:
        if found:
            last, theirs = found[-1]
            if theirs == who and last[:dim] == box[:dim] and last[dim + 1 :] == box[dim + 1 :] and last[dim][1] == box[dim][0]:
                found[-1] = ((*last[:dim], (last[dim][0], box[dim][1]), *last[dim + 1 :]), who)
                continue
        found.append((box, who))
    return found
