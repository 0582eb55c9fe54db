"""What of a transition is to be compared: boxes before and boxes after, whose digests have the same sum.

Each element of what moves, or comes to lie in another box, is there once on either side. The boxes before are where the data of the boxes after
came from: copies that differ in their last bits, as sums in another order give, are no reason for an alarm here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import inside, intersect, volume
from pdsl.lowering.holdings import LogicalTensor, Need
from pdsl.lowering.sources import Delivery, Item
from pdsl.lowering.tables import Bundle, Table

__all__ = ["covers", "kept_boxes"]


def kept_boxes(bundles: Sequence[Bundle], table: Table) -> dict[int, tuple[tuple[int, Box], ...]]:
    """For each bundle (owner, box) of what stays: the whole need where all of its cells stay, else the cells that do."""
    found = {}
    for index, (members, cells) in enumerate(bundles):
        staying: dict[int, list[Box]] = {}
        for cell in cells:
            for owner in cell.needers:
                if owner in cell.holders:
                    staying.setdefault(owner, []).append(cell.box)
        rows: dict[tuple[int, Box], None] = {}
        for owner, box in table.needs(members[0].name):
            mine = [b for b in staying.get(owner, []) if inside(b, box)]
            whole = sum(map(volume, mine)) == volume(box)
            rows.update(dict.fromkeys([(owner, box)] if whole else [(owner, b) for b in mine]))
        found[index] = tuple(rows)
    return found


def covers(
    items: Sequence[Item], bundles: Sequence[Bundle], deliveries: Iterable[Delivery], table: Table, version: int
) -> tuple[tuple[Need, ...], tuple[Need, ...]]:
    """Boxes before and boxes after. Of the ranks that get a cell the one that has it first is looked at; of those that keep a cell, and have
    it in another box from now on, the lowest. What stays as it is, and what is read from storages, is not in them.
    """
    by_item: dict[int, list[Delivery]] = {}
    for d in deliveries:
        by_item.setdefault(d.item, []).append(d)
    copied = [_copied(members, table, version) for members, _ in bundles]
    before: list[Need] = []
    after: list[Need] = []
    for index, item in enumerate(items):
        looked_at = _looked_at(item, by_item.get(index, []), copied[item.bundle])
        if looked_at is None:
            continue
        target, parts = looked_at
        names = [t.name for t in bundles[item.bundle][0]]
        after += [Need(target, name, item.cell.box) for name in names]
        before += [Need(owner, name, box) for owner, box in parts for name in names]
    return tuple(before), tuple(after)


def _copied(members: Sequence[LogicalTensor], table: Table, version: int) -> frozenset[int]:
    """Owners that need a box which is none of those that they hold."""
    held = table.holds(members[0].name, version)
    return frozenset(owner for owner, box in table.needs(members[0].name) if (owner, box) not in held)


def _looked_at(item: Item, deliveries: Sequence[Delivery], copied: frozenset[int]) -> tuple[int, list[tuple[int, Box]]] | None:
    """The rank whose copy of a cell is compared, and where its parts came from."""
    cell = item.cell
    if deliveries:
        last: dict[int, int] = {}
        for d in deliveries:
            last[d.target] = max(last.get(d.target, 0), d.level)
        target = min(last, key=lambda r: (last[r], r))
        return target, _origins(item, deliveries, target, cell.box)
    kept = next((n for n in cell.needers if n in copied and n in cell.holders), None)
    return (kept, [(kept, cell.box)]) if kept is not None else None


def _origins(item: Item, deliveries: Sequence[Delivery], owner: int, box: Box) -> list[tuple[int, Box]]:
    if owner in item.cell.holders:
        return [(owner, box)]
    found = []
    for d in deliveries:
        shared = intersect(d.box, box) if d.target == owner else None
        if shared is not None:
            found += _origins(item, deliveries, d.source, shared)
    return found
