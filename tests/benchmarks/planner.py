"""How long planning takes, at sizes that a cluster has: `python -m tests.benchmarks.planner`.

Everything is pure Python on one core; times are seconds of that core, the median and the worst of several runs, caches emptied before each. Cuts are compared with the
largest stage that a cut must have, pipelines with the step time if all work were spread evenly.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from attrs import evolve

from pdsl.lowering import instantiate as planner
from pdsl.lowering import makespan
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.plan import Budget
from pdsl.lowering.promise import Outline
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.templates import cuts_for_sizes, forward_flops
from tests.plans import facts


def model(layers: int, kind: str) -> ModelFacts:
    """A chain of equal layers, of layers that differ by a fifth, or of a light embedding, blocks and a heavy head."""
    draw = random.Random(layers)
    flops = {
        "equal": [10**9] * layers,
        "uneven": [draw.randint(8 * 10**8, 12 * 10**8) for _ in range(layers)],
        "gpt": [10, *[10**9] * (layers - 2), 3 * 10**9],
    }[kind]
    made = facts(layers - 2)
    return evolve(made, layers=tuple(evolve(layer, flops=f) for layer, f in zip(made.layers, flops, strict=True)))


def timed(call: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Median and worst of several runs, in milliseconds."""
    found = []
    for _ in range(runs):
        before()
        begin = time.process_time()
        call()
        found.append(1000 * (time.process_time() - begin))
    return statistics.median(found), max(found)


def templates(runs: int) -> None:
    print("templates: the cuts for every size            median    worst   largest stage / least possible")
    for layers, most in ((24, 24), (48, 32), (96, 32), (96, 64)):
        for kind in ("equal", "uneven", "gpt"):
            chain = model(layers, kind)
            median, worst = timed(lambda chain=chain, most=most: cuts_for_sizes(chain, range(1, most + 1)), runs)
            found = cuts_for_sizes(chain, range(1, most + 1))
            total, widest = sum(layer.flops for layer in chain.layers), max(layer.flops for layer in chain.layers)
            over = max(max(forward_flops(chain, c)) / max(widest, total / n) for n, c in enumerate(found, 1) if c is not None)
            print(f"  {layers} layers, {most} nodes, {kind:<8}{'':<16} {median:8.1f} ms {worst:6.1f} ms   {over:.2f}")


def pipelines(runs: int) -> None:
    print("pipelines: sizes and batch for all nodes       median    worst   step / work spread evenly")
    for nodes, least, sizes, microbatches in (
        (30, 2, 4, 120),
        (64, 4, 8, 512),
        (128, 8, 8, 512),
        (128, 8, 113, 512),
        (128, 8, 113, 4096),
        (1024, 8, 16, 8192),
    ):
        chain = model(130, "uneven")
        budget = Budget(1, least, cuts_for_sizes(chain, range(least, least + sizes)), "one_f_one_b")

        def call(budget=budget, chain=chain, nodes=nodes, microbatches=microbatches):
            return planner.instantiate(budget, chain, nodes, microbatches)

        median, worst = timed(call, runs, planner._times.cache_clear)
        step = planner.step_time_of(budget, chain, call())
        even = 3 * sum(layer.flops for layer in chain.layers) * microbatches / nodes
        label = f"{nodes} nodes, n0 = {least}, {sizes} sizes, {microbatches} microbatches"
        print(f"  {label:<43} {median:8.1f} ms {worst:6.1f} ms   {step / even:.3f}")


def other_schedules(runs: int) -> None:
    print("cuts and pipelines under other schedules         cuts   pipelines   step / work spread evenly")
    for name, family in SCHEDULES.items():
        if name in ("one_f_one_b", "gpipe"):  # above
            continue
        virtual = 2 if family.virtual else 1
        for nodes, least, sizes, microbatches in ((64, 4, 8, 512), (128, 8, 8, 512)):
            chain = model(130, "uneven")

            def cut(chain=chain, least=least, sizes=sizes, name=name, virtual=virtual):
                return cuts_for_sizes(chain, range(least, least + sizes), schedule=name, virtual=virtual)

            def forget() -> None:
                planner._times.cache_clear()
                makespan._order.cache_clear()
                makespan._simulated.cache_clear()

            budget = Budget(1, least, cut(), name, virtual)

            def call(budget=budget, chain=chain, nodes=nodes, microbatches=microbatches):
                return planner.instantiate(budget, chain, nodes, microbatches)

            cuts, _ = timed(cut, runs, forget)
            median, _ = timed(call, runs, forget)
            step = planner.step_time_of(budget, chain, call())
            even = 3 * sum(layer.flops for layer in chain.layers) * microbatches / nodes
            print(f"  {name:<24} {nodes:>4} nodes {cuts:10.1f} ms {median:8.1f} ms   {step / even:.3f}")


def proofs(runs: int) -> None:
    print("proof in numbers, with all remedies            median    worst")
    for outline in (Outline(128, 8, 8, 1, 512), Outline(128, 8, 5, 3, 512), Outline(1024, 8, 2, 4, 8192)):
        median, worst = timed(lambda outline=outline: (outline.holds, outline.losses_until_broken, list(outline.remedies())), runs)
        print(f"  {outline.nodes} nodes, n0 = {outline.least}, f = {outline.lose}: {outline.holds!s:<26} {median:8.2f} ms {worst:6.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    templates(runs)
    pipelines(runs)
    other_schedules(runs)
    proofs(runs)


if __name__ == "__main__":
    main()
