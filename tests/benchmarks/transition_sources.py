"""How well the load of a transition is spread over the nodes that send: PDSL's choice of sources beside the rules of other systems.

Random pairs of plans: 8 nodes of 8 ranks, 32 layers of 12 to 50 million elements, three pipelines of unequal length; one node is lost, two other
pipelines follow. Load is what leaves a node; the optimum is the least load of the busiest node, by max-flow. Then one large case.

    python tests/benchmarks/transition_sources.py [--pairs N]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from statistics import mean
from time import perf_counter

from pdsl.lowering.boxes import Box, chunk
from pdsl.lowering.cells import Cell, cells, volume
from pdsl.lowering.holdings import Holding, LogicalTensor, Need, without
from pdsl.lowering.transition import transition

RANKS = 8  # of a node
ITEM = 12  # bytes: fp32 weight and both moments
Layers = Sequence[int]
Rule = Callable[[Sequence[tuple[Cell, int]]], dict[int, int]]


def node_of(rank: int) -> int:
    return rank // RANKS


def rows(pipelines: Iterable[Sequence[int]], layers: Layers, width: int) -> list[tuple[int, str, Box]]:
    """Who has which shard: pipelines are tuples of nodes over which the layers are cut evenly, shards lie on `width` ranks of the node."""
    found = []
    for nodes in pipelines:
        for layer, size in enumerate(layers):
            node = nodes[layer * len(nodes) // len(layers)]
            parts = [(node * RANKS + s * RANKS // width, f"weight/{layer}", (chunk(size, width, s),)) for s in range(width)]
            found.extend(parts)
    return found


def leaving(cell: Cell, target: int) -> list[int]:
    """Nodes that could send a cell to a rank; empty if it need not cross."""
    nodes = sorted({node_of(h) for h in cell.holders})
    return [] if target in cell.holders or node_of(target) in nodes else nodes


def first(needed: Sequence[tuple[Cell, int]]) -> dict[int, int]:
    """The first surviving holder, wherever it is."""
    loads: dict[int, int] = {}
    for cell, target in needed:
        if target not in cell.holders and node_of(cell.holders[0]) != node_of(target):
            node = node_of(cell.holders[0])
            loads[node] = loads.get(node, 0) + volume(cell.box) * ITEM
    return loads


def round_robin(needed: Sequence[tuple[Cell, int]]) -> dict[int, int]:
    """In the node first, then the holders in turn."""
    turn = count()
    loads: dict[int, int] = {}
    for cell, target in needed:
        nodes = leaving(cell, target)
        if nodes:
            node = nodes[next(turn) % len(nodes)]
            loads[node] = loads.get(node, 0) + volume(cell.box) * ITEM
    return loads


def least_loaded(needed: Sequence[tuple[Cell, int]]) -> dict[int, int]:
    """In the node first, then the holder that has sent least."""
    loads: dict[int, int] = {}
    for cell, target in needed:
        nodes = leaving(cell, target)
        if nodes:
            node = min(nodes, key=lambda n: (loads.get(n, 0), n))
            loads[node] = loads.get(node, 0) + volume(cell.box) * ITEM
    return loads


def largest_first(needed: Sequence[tuple[Cell, int]]) -> dict[int, int]:
    """As `least_loaded`, the largest cells first."""
    return least_loaded(sorted(needed, key=lambda n: -volume(n[0].box)))


RULES: dict[str, Rule] = {
    "first holder": first,
    "in-node first, round robin": round_robin,
    "in-node first, least loaded": least_loaded,
    "same, largest first": largest_first,
}


def compare(
    before: list[tuple[int, str, Box]], after: list[tuple[int, str, Box]], layers: Layers, lost: int
) -> tuple[dict[str, float], float, int]:
    """Busiest node over the optimum for each rule, seconds that PDSL took, and its count of moves."""
    held = without([Holding(r, t, b, 0) for r, t, b in before], set(range(lost * RANKS, (lost + 1) * RANKS)))
    needs = [Need(r, t, b) for r, t, b in after]
    tensors = [LogicalTensor(f"weight/{i}", (size,), ITEM, str(i)) for i, size in enumerate(layers)]
    begin = perf_counter()
    found = transition(held, needs, tensors, node_of=node_of, chunk_bytes=64 << 20)
    took = perf_counter() - begin
    needed = []
    for t in tensors:
        made = cells([(h.owner, h.box) for h in held if h.tensor == t.name], [(n.owner, n.box) for n in needs if n.tensor == t.name])
        needed += [(cell, target) for cell in made for target in cell.needers]
    ratios = {name: max(rule(needed).values(), default=0) / max(1, found.optimum) for name, rule in RULES.items()}
    ratios["PDSL: max-flow, cells cut"] = found.busiest_sender / max(1, found.optimum)
    return ratios, took, len(found.moves)


def pair(seed: int) -> tuple[dict[str, float], float, int]:
    generator = random.Random(seed)
    layers = [generator.randint(12_000_000, 50_000_000) for _ in range(32)]
    nodes = generator.sample(range(8), 8)
    lost = generator.randrange(8)
    left = [n for n in generator.sample(range(8), 8) if n != lost]
    cut = generator.choice([3, 4])
    before = rows((nodes[:2], nodes[2:5], nodes[5:]), layers, generator.choice([4, 8]))
    after = rows((left[:cut], left[cut:]), layers, generator.choice([4, 8]))
    return compare(before, after, layers, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    options = parser.parse_args()
    found = []
    for seed in range(options.pairs):
        result = pair(seed)
        if result[0]["same, largest first"]:
            found.append(result)
    print(f"{len(found)} pairs of 8 nodes, {mean(moves for _, _, moves in found):.0f} moves on average; busiest sender / optimum")
    print(f"{'rule':32}{'mean':>8}{'p95':>8}{'max':>8}")
    for name in found[0][0]:
        values = sorted(ratios[name] for ratios, _, _ in found)
        print(f"{name:32}{mean(values):8.2f}{values[int(0.95 * (len(values) - 1))]:8.2f}{values[-1]:8.2f}")
    print(f"PDSL's whole transition: {1000 * mean(took for _, took, _ in found):.1f} ms")
    generator = random.Random(7)
    layers = [generator.randint(12_000_000, 50_000_000) for _ in range(128)]
    eight = rows([range(8 * i, 8 * i + 8) for i in range(8)], layers, 8)
    seven = rows([range(1 + 9 * i, 10 + 9 * i) for i in range(7)], layers, 8)
    ratios, took, moves = compare(eight, seven, layers, 0)
    print(f"\n64 nodes of 8 ranks, 128 layers, 8 to 7 pipelines, {moves} moves, {took:.2f} s")
    print("  ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))


if __name__ == "__main__":
    main()
