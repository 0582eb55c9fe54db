"""Rows of holdings and needs by tensor and version, the cells they make, and what is said when one of them has no copy left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdsl.grammar.errors import PlanError
from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import Cell, box_text, cells, intersect, volume
from pdsl.lowering.holdings import Holding, LogicalTensor, Need

__all__ = ["Bundle", "StateLost", "Table", "meets"]

Rows = tuple[tuple[int, Box], ...]

Bundle = tuple[tuple[LogicalTensor, ...], tuple[Cell, ...]]
"""Tensors that travel together, and the cells that all of them have."""


class StateLost(PlanError):
    """No copy of a part of the state is left. `tensor` and `box` say which part, `version` of which step, `former` who had it."""

    def __init__(self, tensor: str, box: Box, version: int, former: tuple[int, ...], others: tuple[tuple[int, int], ...] = ()) -> None:
        """`others` are (owner, version) of copies of another version."""
        super().__init__(tensor, box, version, former, others)
        self.tensor = tensor
        self.box = box
        self.version = version
        self.former = former
        self.others = others

    def __str__(self) -> str:
        text = f"no copy is left of {self.tensor} {box_text(self.box)} at step {self.version}"
        if self.former:
            text += f": it was held by {_owners(self.former)}"
        if self.others:
            older = sorted({v for _, v in self.others}, reverse=True)
            text += "; " + "; ".join(f"{_owners(tuple(sorted({o for o, w in self.others if w == v})))} has it at step {v}" for v in older)
        return text


def _owners(owners: tuple[int, ...]) -> str:
    ranks = [str(o) for o in owners if o >= 0]
    words = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"] if ranks else []
    return " and ".join([*words, *(f"storage {-o}" for o in owners if o < 0)])


class Table:
    """Rows by tensor and version. Tensors with the same rows have the same cells, which are found once."""

    def __init__(self, holdings: Iterable[Holding], demand: Iterable[Need], tensors: Sequence[LogicalTensor]) -> None:
        self._tensors = tensors
        known = {t.name for t in tensors}
        held: dict[str, dict[int, set[tuple[int, Box]]]] = {t.name: {} for t in tensors}
        needed: dict[str, set[tuple[int, Box]]] = {t.name: set() for t in tensors}
        self._rows = tuple(h for h in holdings if volume(h.box))
        for h in self._rows:
            if h.tensor in known:
                held[h.tensor].setdefault(h.version, set()).add((h.owner, h.box))
        for n in demand:
            if n.tensor not in known:
                raise ValueError(f"{n.tensor} is needed by rank {n.owner}, and is none of the tensors that were given")
            if volume(n.box):
                needed[n.tensor].add((n.owner, n.box))
        self._held = held
        self._needed: dict[str, Rows] = {name: tuple(sorted(rows)) for name, rows in needed.items()}
        self._cells: dict[tuple[Rows, Rows], tuple[Cell, ...]] = {}

    def newest(self, former: Sequence[Holding]) -> int:
        """The newest complete version; 0 if nothing is needed and nothing is held. Raises StateLost if none is complete."""
        versions = sorted({v for by_version in self._held.values() for v in by_version}, reverse=True)
        lost: StateLost | None = None
        for version in versions:
            found = self._missing(version)
            if found is None:
                return version
            lost = lost or self._lost(*found, version, former)
        nothing = self._missing(0)
        if nothing is not None:
            raise lost or self._lost(*nothing, max((h.version for h in former), default=0), former)
        return 0

    def needs(self, tensor: str) -> Rows:
        """(owner, box) of who needs a tensor, ascending."""
        return self._needed[tensor]

    def holds(self, tensor: str, version: int) -> frozenset[tuple[int, Box]]:
        """(owner, box) of who holds a tensor at a version."""
        return frozenset(self._held[tensor].get(version, ()))

    def bundles(self, version: int) -> list[Bundle]:
        """Tensors of one group that have the same cells, with those, in the order of the tensors."""
        found: dict[tuple[str, int], list[LogicalTensor]] = {}
        shared: dict[int, tuple[Cell, ...]] = {}
        for t in self._tensors:
            parts = self._of(t.name, version)
            shared[id(parts)] = parts
            found.setdefault((t.group, id(parts)), []).append(t)
        return [(tuple(members), shared[key]) for (_, key), members in found.items() if shared[key]]

    def dropped(self, kept: Sequence[Need], version: int) -> tuple[Holding, ...]:
        """Rows of ranks of which the owner keeps nothing."""
        staying: dict[tuple[int, str], list[Box]] = {}
        for n in kept:
            staying.setdefault((n.owner, n.tensor), []).append(n.box)
        gone = {h for h in self._rows if h.owner >= 0 and (h.version != version or not meets(h, staying))}
        return tuple(sorted(gone, key=lambda h: (h.tensor, h.owner, h.box, h.version)))

    def _of(self, tensor: str, version: int) -> tuple[Cell, ...]:
        held = tuple(sorted(self._held[tensor].get(version, ())))
        key = (held, self._needed[tensor])
        if key not in self._cells:
            self._cells[key] = cells(*key)
        return self._cells[key]

    def _missing(self, version: int) -> tuple[str, Cell] | None:
        for t in self._tensors:
            for cell in self._of(t.name, version):
                if not cell.holders:
                    return t.name, cell
        return None

    def _lost(self, tensor: str, cell: Cell, version: int, former: Sequence[Holding]) -> StateLost:
        theirs = {h.owner for h in former if h.tensor == tensor and h.version == version and intersect(h.box, cell.box) is not None}
        others = {
            (owner, v)
            for v, rows in self._held[tensor].items()
            if v != version
            for owner, box in rows
            if intersect(box, cell.box) is not None
        }
        return StateLost(tensor, cell.box, version, tuple(sorted(theirs)), tuple(sorted(others)))


def meets(row: Holding, boxes: dict[tuple[int, str], list[Box]]) -> bool:
    """Whether a row shares an element with one of the boxes of its owner and tensor."""
    return any(intersect(row.box, b) is not None for b in boxes.get((row.owner, row.tensor), []))
