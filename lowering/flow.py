"""Who sends how much: the exact balance of loads over senders, by max-flow.

Demands come in classes: so many bytes that any of a set of senders may send. The least possible load of the busiest sender is the maximum over
sets N of senders of bytes(classes inside N) / |N|. It is found by a few flows: each flow that does not carry everything at load z leaves a cut,
the cut names a set N that needs more than z, and z rises to what N needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction

__all__ = ["balance", "max_flow"]


class _Network:
    """Arcs in pairs: arc i and its reverse i ^ 1."""

    def __init__(self, size: int) -> None:
        self.heads: list[int] = []
        self.room: list[int] = []
        self.out: list[list[int]] = [[] for _ in range(size)]

    def arc(self, a: int, b: int, room: int) -> int:
        self.heads += [b, a]
        self.room += [room, 0]
        self.out[a].append(len(self.heads) - 2)
        self.out[b].append(len(self.heads) - 1)
        return len(self.heads) - 2

    def levels(self, source: int) -> list[int]:
        found = [-1] * len(self.out)
        found[source] = 0
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for arc in self.out[at]:
                to = self.heads[arc]
                if self.room[arc] and found[to] < 0:
                    found[to] = found[at] + 1
                    queue.append(to)
        return found

    def push(self, at: int, sink: int, most: int, levels: list[int], tried: list[int]) -> int:
        """Send up to `most` from a vertex along shortest paths; paths here have three arcs, or a few more, so depth is no concern."""
        if at == sink:
            return most
        sent = 0
        while tried[at] < len(self.out[at]):
            arc = self.out[at][tried[at]]
            to = self.heads[arc]
            if self.room[arc] and levels[to] == levels[at] + 1:
                got = self.push(to, sink, min(most - sent, self.room[arc]), levels, tried)
                self.room[arc] -= got
                self.room[arc ^ 1] += got
                sent += got
                if sent == most:
                    return sent
            tried[at] += 1
        return sent


def max_flow(size: int, arcs: Sequence[tuple[int, int, int]], source: int, sink: int) -> tuple[int, tuple[int, ...], frozenset[int]]:
    """The largest flow from source to sink over arcs (from, to, capacity) between vertices 0 .. size - 1 (Dinic).

    Returns its value, the flow of each arc, and the vertices on the source's side of a least cut. Capacities are integers.
    """
    network = _Network(size)
    for a, b, room in arcs:
        network.arc(a, b, room)
    total = sum(room for a, _, room in arcs if a == source)
    value = 0
    while True:
        levels = network.levels(source)
        if levels[sink] < 0:
            side = frozenset(v for v, level in enumerate(levels) if level >= 0)
            return value, tuple(network.room[2 * i + 1] for i in range(len(arcs))), side
        value += network.push(source, sink, total + 1, levels, [0] * size)


def balance(
    classes: Mapping[tuple[int, ...], int], given: Mapping[int, int] | None = None
) -> tuple[Fraction, dict[tuple[int, ...], dict[int, Fraction]]]:
    """The least load of the busiest sender, and how many bytes of each class each sender takes there.

    `classes` maps a set of senders (ascending) to bytes that any of them may send. `given` are loads that senders have already. Exact: shares
    are fractions, and those of a class sum to its bytes. The result depends on the values alone, not on their order.
    """
    order = sorted(c for c, size in classes.items() if size)
    loads = dict(given or {})
    senders = sorted({s for c in order for s in c})
    if not order:
        return Fraction(max(loads.values(), default=0)), {}
    total = sum(classes[c] for c in order)
    least = max(Fraction(total + sum(loads.get(s, 0) for s in senders), len(senders)), Fraction(max(loads.get(s, 0) for s in senders)))
    first, sink = 1 + len(order), 1 + len(order) + len(senders)
    place = {s: first + i for i, s in enumerate(senders)}
    while True:
        scale = least.denominator
        arcs = [(0, 1 + i, classes[c] * scale) for i, c in enumerate(order)]
        inner = [(1 + i, place[s], classes[c] * scale) for i, c in enumerate(order) for s in c]
        ends = [(place[s], sink, least.numerator - loads.get(s, 0) * scale) for s in senders]
        value, flows, side = max_flow(sink + 1, [*arcs, *inner, *ends], 0, sink)
        if value == total * scale:
            break
        tight = [s for s in senders if place[s] in side]
        needed = sum(classes[c] for i, c in enumerate(order) if 1 + i in side) + sum(loads.get(s, 0) for s in tight)
        least = Fraction(needed, len(tight))
    shares: dict[tuple[int, ...], dict[int, Fraction]] = {c: {} for c in order}
    for (a, b, _), flow in zip(inner, flows[len(arcs) :], strict=False):
        if flow:
            shares[order[a - 1]][senders[b - first]] = Fraction(flow, scale)
    return max(least, Fraction(max(loads.values(), default=0))), shares
