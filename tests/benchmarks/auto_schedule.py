"""How good `schedule = auto` is, on paper: `python -m tests.benchmarks.auto_schedule`.

Random costs of unequal positions, with latency and memory caps. Each time of `auto` is divided by that of the best named schedule which fits, over the same
placements (one stage, two in a loop, two in a V on each position); then, for small problems of one stage per position, by the proven
optimum, with and without the exact search that `auto` itself makes where it can. Times are seconds of one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from fractions import Fraction

from pdsl.lowering import search as engine
from pdsl.lowering.exact_search import exact_search
from pdsl.lowering.schedule import loop_placement, v_placement
from pdsl.lowering.search import Candidate, Found, search
from pdsl.lowering.search_problem import problem_of
from pdsl.lowering.simulate import StageCosts


def candidates(draw: random.Random, positions: int, microbatches: int, *, chunks: bool = True) -> tuple[tuple[Candidate, ...], int]:
    """The placements of random positions, and a latency. What a position holds of a microbatch is 4, whatever the placement."""
    times = [[draw.randint(2, 8) for _ in range(positions)] for _ in range(3)]
    if draw.random() < 0.3:
        times = [[t] * positions for t in (4, draw.randint(3, 6), draw.randint(2, 5))]
    caps = None
    if draw.random() < 0.6:
        least = draw.randint(2, positions + 2)
        caps = tuple(4 * max(1, min(microbatches, least + draw.randint(-1, 1))) for _ in range(positions))
    placements = (
        (loop_placement(positions), loop_placement(positions, 2), v_placement(positions)) if chunks else (loop_placement(positions),)
    )
    found = []
    for placement in placements:
        each = len(placement) // positions
        f, i, w = (tuple(Fraction(kind[r], each) for r in placement) for kind in times)
        found.append(Candidate(placement, StageCosts(f, i, w), (Fraction(4, each),) * len(placement), caps))
    return tuple(found), draw.choice((0, 0, 1, 2, 4))


def table(title: str, ratios: list[float]) -> None:
    """One line of figures about ratios."""
    if ratios:
        shares = f"{sum(r < 1 for r in ratios):4d} below 1, {sum(r > 1 for r in ratios):2d} above"
        print(
            f"  {title:<28}{len(ratios):4d} cases   mean {statistics.mean(ratios):.4f}   min {min(ratios):.4f}   max {max(ratios):.4f}   {shares}"
        )


def against_named(count: int, seed: int) -> None:
    """`auto` over the best named schedule that fits."""
    draw = random.Random(seed)
    groups: dict[str, list[float]] = {}
    ways: Counter[str] = Counter()
    best_named: Counter[str] = Counter()
    met, seconds = 0, []
    for _ in range(count):
        p = draw.choice((2, 3, 4, 4, 6, 8))
        m = draw.randint(p, 4 * p)
        given, hop = candidates(draw, p, m)
        begin = time.process_time()
        found = search(given, m, hop=hop)
        seconds.append(time.process_time() - begin)
        met += found.optimal
        ways[_kind(found)] += 1
        named = [t for t in found.tried if t.makespan is not None]
        if not named:
            groups.setdefault("no named schedule fits", []).append(1.0)
            continue
        best_named[named[0].name] += 1
        ratio = float(found.makespan / named[0].makespan)
        for group in ("all", "caps" if given[0].caps else "no caps", "latency" if hop else "no latency"):
            groups.setdefault(group, []).append(ratio)
    print(f"auto / best named schedule that fits, {count} random cost vectors")
    for group, ratios in groups.items():
        table(group, ratios)
    print(f"  lower bound met, so proven optimal: {met} of {count}")
    print(f"  seconds for each: median {statistics.median(seconds):.2f}, worst {max(seconds):.2f}")
    print("  chosen: " + ", ".join(f"{name} {n}" for name, n in ways.most_common()))
    print("  best named: " + ", ".join(f"{name} {n}" for name, n in best_named.most_common()))


def _kind(found: Found) -> str:
    if "move" in found.way:
        return "local search"
    if found.way.startswith(("list", "1F1B", "zero bubble")):
        return found.way.split(",")[0].replace("1F1B", "relative").replace("zero bubble", "relative")
    return found.way if found.way == "exact search" else "named"


def against_optimum(count: int, seed: int) -> None:
    """`auto`, with and without its own exact search, over the proven optimum."""
    draw = random.Random(seed)
    whole, without, named = [], [], []
    nodes = engine._EXACT_NODES
    while len(whole) < count:
        p, m = draw.choice((2, 3, 4)), draw.randint(2, 7)
        (one,), hop = candidates(draw, p, m, chunks=False)
        flat = problem_of(one.placement, m, one.costs, hop=hop, sizes=one.sizes, caps=one.caps)
        best = exact_search(flat, nodes=100_000)
        if not best.proven or best.makespan is None:
            continue
        optimum = best.makespan * flat.unit
        search.cache_clear()
        found = search((one,), m, hop=hop)
        engine._EXACT_NODES = 0
        search.cache_clear()
        less = search((one,), m, hop=hop)
        engine._EXACT_NODES = nodes
        whole.append(float(found.makespan / optimum))
        without.append(float(less.makespan / optimum))
        fits = [t.makespan for t in found.tried if t.makespan is not None]
        if fits:
            named.append(float(min(fits) / optimum))
    print(f"over the proven optimum, {count} small problems of one stage per position")
    table("auto", whole)
    table("auto without exact search", without)
    table("best named that fits", named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="random cost vectors")
    parser.add_argument("--small", type=int, default=60, help="small problems with a proven optimum")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    against_named(options.count, options.seed)
    against_optimum(options.small, options.seed)


if __name__ == "__main__":
    main()
