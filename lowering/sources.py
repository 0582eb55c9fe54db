"""Who sends what: for each cell that has to move, the rank that sends it.

Cheaper sources come first: a rank of the same node, then another node, then a storage. What crosses nodes crosses once for each node that lacks
it, balanced exactly over the nodes that have it; within the chosen node the rank that has sent least sends. A large cell that more ranks lack
than have is cut into one part for each of them: the holder sends every byte once, and the receivers exchange their parts afterwards. Small cells
go with traffic that is there anyway, since a message of its own costs them more than their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import gcd

from attrs import field, frozen

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import Cell, pieces, volume
from pdsl.lowering.flow import balance

__all__ = ["Delivery", "Item", "Limits", "Sources", "choose_sources"]


@frozen
class Limits:
    """Bytes that decide how cells are handled. `chunk`: the largest message. `split`: no cell is cut below this to balance senders.
    `spread`: from here on a cell that several lack is cut into parts that they exchange. `small`: below this a cell goes with other traffic.
    """

    chunk: int = 4 << 20
    split: int = 1 << 20
    spread: int = 8 << 20
    small: int = 64 << 10


@frozen
class Item:
    """A cell of tensors that travel together: `bundle` names them for the caller, `unit` are the bytes of one index over all of them."""

    bundle: int
    cell: Cell
    unit: int

    @property
    def bytes(self) -> int:
        return volume(self.cell.box) * self.unit


@frozen
class Delivery:
    """One part of an item on its way. Deliveries of level n may send what those of lower levels brought."""

    item: int
    box: Box
    source: int
    target: int
    level: int


@frozen
class Sources:
    """Deliveries between ranks, reads from storages, and the least load of the busiest node that any choice of senders could reach."""

    deliveries: tuple[Delivery, ...]
    reads: tuple[Delivery, ...]
    optimum: Fraction


@frozen
class _Crossing:
    """A box that must come to one rank of another node. `nodes` have it."""

    item: int
    box: Box
    bytes: int
    target: int
    nodes: tuple[int, ...]


_Onward = tuple[int, tuple[int, ...], list[tuple[int, list[int]]]]
"""An item, the ranks that exchange parts of it (none if each got the whole), and for each node the rank that has it and all that need it."""


@frozen
class _Desk:
    """What is known while sources are chosen."""

    items: Sequence[Item]
    node_of: Callable[[int], int]
    limits: Limits
    deliveries: list[Delivery] = field(factory=list)
    sent: dict[int, int] = field(factory=dict)
    received: dict[int, int] = field(factory=dict)

    def deliver(self, item: int, box: Box, source: int, target: int, level: int) -> None:
        size = volume(box) * self.items[item].unit
        self.deliveries.append(Delivery(item, box, source, target, level))
        self.sent[source] = self.sent.get(source, 0) + size
        self.received[target] = self.received.get(target, 0) + size

    def idlest(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda r: (self.sent.get(r, 0), r))

    def spread(self, item: int, box: Box, sources: Sequence[int], targets: Sequence[int], level: int) -> None:
        """From ranks that have a box to ranks that lack it, within what both can reach; see the module."""
        size = volume(box) * self.items[item].unit
        if len(targets) <= len(sources) or len(targets) < 2 or size < self.limits.spread:
            for target in targets:
                self.deliver(item, box, self.idlest(sources), target, level)
            return
        for part, first in zip(_parts(box, len(targets)), targets, strict=False):
            self.deliver(item, part, self.idlest(sources), first, level)
            for other in targets:
                if other != first:
                    self.deliver(item, part, first, other, level + 1)


def choose_sources(items: Sequence[Item], node_of: Callable[[int], int], limits: Limits) -> Sources:
    """Deliveries for every needer of every cell that does not hold it. Every cell has a holder, which the caller has seen to.

    The result depends on the values alone. Loads are bytes; nodes have equal bandwidth.
    """
    desk = _Desk(items, node_of, limits)
    reads: list[Delivery] = []
    crossings: list[_Crossing] = []
    later: list[_Onward] = []  # what follows once a box has come to its nodes
    small: list[int] = []
    for index, item in enumerate(items):
        cell = item.cell
        ranks = [h for h in cell.holders if h >= 0]
        lacking = [n for n in cell.needers if n not in cell.holders]
        if not lacking:
            continue
        if not ranks:
            reads += [Delivery(index, cell.box, max(cell.holders), n, 0) for n in lacking]
        elif item.bytes < limits.small:
            small.append(index)
        else:
            _large(desk, index, ranks, lacking, crossings, later)
    optimum, chosen = _assign(crossings, limits, [i.unit for i in items])
    for crossing, box, node in chosen:
        ranks = [h for h in items[crossing.item].cell.holders if h >= 0 and node_of(h) == node]
        desk.deliver(crossing.item, box, desk.idlest(ranks), crossing.target, 0)
    for index, firsts, groups in later:
        _onward(desk, index, firsts, groups)
    pairs = {(d.source, d.target) for d in desk.deliveries}
    for index in small:
        _small(desk, index, pairs)
    return Sources(tuple(desk.deliveries), tuple(reads), optimum)


def _large(
    desk: _Desk,
    index: int,
    ranks: list[int],
    lacking: list[int],
    crossings: list[_Crossing],
    later: list[_Onward],
) -> None:
    """In-node sources at once; what must cross nodes is noted for the balance."""
    item = desk.items[index]
    holders: dict[int, list[int]] = {}
    for h in ranks:
        holders.setdefault(desk.node_of(h), []).append(h)
    groups: dict[int, list[int]] = {}
    for n in lacking:
        groups.setdefault(desk.node_of(n), []).append(n)
    for node in sorted(groups):
        if node in holders:
            desk.spread(index, item.cell.box, holders[node], groups[node], 0)
    away = [(node, groups[node]) for node in sorted(groups) if node not in holders]
    if not away:
        return
    nodes = tuple(sorted(holders))
    firsts = []
    for _, members in away:
        first = min(members, key=lambda r: (desk.received.get(r, 0), r))
        desk.received[first] = desk.received.get(first, 0) + item.bytes
        firsts.append(first)
    exchange = len(firsts) > max(1, len(nodes)) and item.bytes >= desk.limits.spread
    parts = _parts(item.cell.box, len(firsts)) if exchange else [item.cell.box] * len(firsts)
    crossings += [_Crossing(index, part, volume(part) * item.unit, first, nodes) for part, first in zip(parts, firsts, strict=False)]
    later.append((index, tuple(firsts) if exchange else (), [(f, members) for f, (_, members) in zip(firsts, away, strict=True)]))


def _onward(desk: _Desk, index: int, firsts: tuple[int, ...], groups: list[tuple[int, list[int]]]) -> None:
    """After the crossing: the firsts of the nodes exchange their parts, then give the whole to the others of their node."""
    box = desk.items[index].cell.box
    level = 1
    if firsts:
        for part, first in zip(_parts(box, len(firsts)), firsts, strict=False):
            for other in firsts:
                if other != first:
                    desk.deliver(index, part, first, other, level)
        level = 2
    for first, members in groups:
        desk.spread(index, box, [first], [m for m in members if m != first], level)


def _small(desk: _Desk, index: int, pairs: set[tuple[int, int]]) -> None:
    item = desk.items[index]
    ranks = [h for h in item.cell.holders if h >= 0]
    for target in item.cell.needers:
        if target in item.cell.holders:
            continue
        near = [h for h in ranks if desk.node_of(h) == desk.node_of(target)]
        known = [h for h in near or ranks if (h, target) in pairs]
        source = desk.idlest(known or near or ranks)
        pairs.add((source, target))
        desk.deliver(index, item.cell.box, source, target, 0)


_Choice = tuple[_Crossing, Box, int]


def _assign(crossings: Sequence[_Crossing], limits: Limits, units: Sequence[int]) -> tuple[Fraction, list[_Choice]]:
    """A sending node for each crossing, some of them cut: by the flow, or greedily where whole cells balance as well."""
    classes: dict[tuple[int, ...], int] = {}
    for c in crossings:
        classes[c.nodes] = classes.get(c.nodes, 0) + c.bytes
    optimum, shares = balance(classes)
    order = sorted(range(len(crossings)), key=lambda i: (-crossings[i].bytes, i))
    whole = _greedy([crossings[i] for i in order])
    if _busiest(whole, units) <= optimum:
        return optimum, whole
    exact = _by_flow([crossings[i] for i in order], shares, limits, units)
    return optimum, min(whole, exact, key=lambda chosen: _busiest(chosen, units))


def _busiest(chosen: Sequence[_Choice], units: Sequence[int]) -> int:
    loads: dict[int, int] = {}
    for crossing, box, node in chosen:
        loads[node] = loads.get(node, 0) + volume(box) * units[crossing.item]
    return max(loads.values(), default=0)


def _greedy(crossings: Sequence[_Crossing]) -> list[_Choice]:
    """Each to the node that has least so far; largest first this is within 4/3 of the optimum if all have the same holders (Graham)."""
    loads: dict[int, int] = {}
    chosen = []
    for c in crossings:
        node = min(c.nodes, key=lambda n: (loads.get(n, 0), n))
        loads[node] = loads.get(node, 0) + c.bytes
        chosen.append((c, c.box, node))
    return chosen


def _by_flow(
    crossings: Sequence[_Crossing], shares: Mapping[tuple[int, ...], Mapping[int, Fraction]], limits: Limits, units: Sequence[int]
) -> list[_Choice]:
    """Fill what the flow gives each node of each class, cutting the cell that does not fit where both parts are large enough."""
    room = {nodes: dict(given) for nodes, given in shares.items()}
    chosen = []
    for c in crossings:
        left: Box | None = c.box
        while left is not None:
            mine = room[c.nodes]
            node = max(mine, key=lambda n: (mine[n], -n))
            size = volume(left) * units[c.item]
            cut = _cut(left, int(mine[node]), units[c.item], limits.split) if size > mine[node] else None
            box, left = cut if cut is not None else (left, None)
            mine[node] -= volume(box) * units[c.item]
            chosen.append((c, box, node))
    return chosen


def _cut(box: Box, want: int, unit: int, least: int) -> tuple[Box, Box] | None:
    """Two slabs, the first of about `want` bytes and a multiple of 512; None if one of them would be smaller than `least`."""
    dim = next((i for i, (a, b) in enumerate(box) if b - a > 1), None)
    if dim is None:
        return None
    a, b = box[dim]
    each = volume(box) // (b - a) * unit
    step = 512 // gcd(512, each)
    rows = want // each // step * step or want // each
    if rows * each < max(1, least) or (b - a - rows) * each < max(1, least):
        return None
    return (*box[:dim], (a, a + rows), *box[dim + 1 :]), (*box[:dim], (a + rows, b), *box[dim + 1 :])


def _parts(box: Box, count: int) -> list[Box]:
    """At most `count` slabs of about equal size along the first dim that has more than one index."""
    dim = next((i for i, (a, b) in enumerate(box) if b - a > 1), None)
    if dim is None:
        return [box]
    a, b = box[dim]
    width = -(-(b - a) // count)
    return pieces(box, volume(box) // (b - a) * width)
