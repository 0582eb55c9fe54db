"""The planner of unequal pipelines against exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from attrs import evolve

from pdsl.grammar.errors import PlanError
from pdsl.lowering.instantiate import deal, instantiate, step_time_of
from pdsl.lowering.makespan import makespan
from pdsl.lowering.plan import Budget
from pdsl.lowering.templates import cuts_for_sizes, forward_flops
from tests.plans import facts


def chain(draw: random.Random, layers: int, low: int = 1, high: int = 20):
    made = facts(layers - 2)
    return evolve(made, layers=tuple(evolve(layer, flops=draw.randint(low, high)) for layer in made.layers))


def budget_of(model, least: int, count: int, lose: int = 1, *, per_node: int = 1, schedule: str = "one_f_one_b") -> Budget:
    return Budget(lose, least, cuts_for_sizes(model, [n * per_node for n in range(least, least + count)], schedule=schedule), schedule)


def multisets(nodes: int, sizes: range, first: int = 0) -> Iterator[tuple[int, ...]]:
    if nodes == 0:
        yield ()
        return
    for size in sizes:
        if first <= size <= nodes:
            yield from ((size, *rest) for rest in multisets(nodes - size, sizes, size))


def splits(parts: int, total: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in splits(parts - 1, total - first))


def exhaustive(budget: Budget, model, nodes: int, microbatches: int, at_most: int | None) -> int | None:
    """The least step time over all multisets of sizes and all splits of the batch; None if there is no multiset."""
    possible = [p for p in multisets(nodes, budget.sizes) if len(p) <= microbatches and (at_most is None or len(p) <= at_most)]
    if not possible:
        return None
    wanted = min(budget.lose + 1, max(map(len, possible)))
    stages = {n: forward_flops(model, budget.cut(n)) for n in budget.sizes}
    times = {(n, c): makespan(budget.schedule, len(stages[n]), stages[n], c) for n in stages for c in range(1, microbatches + 1)}
    return min(
        max(times[n, c] for n, c in zip(sizes, split, strict=True))
        for sizes in possible
        if len(sizes) >= wanted
        for split in splits(len(sizes), microbatches)
    )


def test_five_hundred_small_cases_are_as_fast_as_an_exhaustive_search():
    draw, solved, impossible = random.Random(5), 0, 0
    while solved < 500:
        layers = draw.randint(4, 10)
        model, least = chain(draw, layers), draw.randint(1, 3)
        count = draw.randint(1, min(4, layers - least + 1))
        budget = budget_of(model, least, count, draw.randint(0, 2), schedule=draw.choice(["one_f_one_b", "gpipe"]))
        nodes, microbatches, at_most = draw.randint(1, 10), draw.randint(1, 9), draw.choice([None, None, 1, 2, 3])
        best = exhaustive(budget, model, nodes, microbatches, at_most)
        if best is None:
            impossible += 1
            with pytest.raises(PlanError):
                instantiate(budget, model, nodes, microbatches, at_most=at_most)
            continue
        solved += 1
        found = instantiate(budget, model, nodes, microbatches, at_most=at_most)
        assert (sum(n for n, _ in found), sum(c for _, c in found)) == (nodes, microbatches)
        assert all(n in budget.sizes and c >= 1 for n, c in found)
        assert step_time_of(budget, model, found) == best
        sizes = [n for n, _ in found]
        assert step_time_of(budget, model, tuple(zip(sizes, deal(budget, model, sizes, microbatches), strict=True))) == best
    assert impossible > 20


def test_several_islands_on_a_node_are_several_positions():
    model = chain(random.Random(1), 10)
    budget = budget_of(model, 1, 2, per_node=2)
    assert [max(s.position for s in cut) + 1 for cut in budget.cuts] == [2, 4]
    assert sum(n for n, _ in instantiate(budget, model, 3, 12)) == 3


def test_twenty_runs_give_the_same_pipelines():
    model = chain(random.Random(2), 24, 80, 120)
    found = set()
    for _ in range(20):
        budget = budget_of(model, 3, 5)
        found.add(instantiate(budget, model, 31, 96))
    assert len(found) == 1
    assert list(found.pop()) == sorted(instantiate(budget, model, 31, 96))


def test_as_many_pipelines_as_asked_for_where_nodes_and_microbatches_allow():
    model = chain(random.Random(3), 12)
    budget = budget_of(model, 2, 5, lose=2)
    assert len(instantiate(budget, model, 6, 12)) == 3
    assert len(instantiate(budget, model, 5, 12)) == 2  # three would need 6 nodes
    assert len(instantiate(budget, model, 6, 1)) == 1  # a pipeline without microbatches is none
    assert len(instantiate(budget, model, 6, 12, at_least=1, at_most=1)) == 1


def test_nodes_that_cannot_all_be_used_are_named():
    model = chain(random.Random(4), 12)
    budget = budget_of(model, 4, 2)
    with pytest.raises(PlanError, match=r"pipelines of 4 to 5 nodes.* use exactly 7 nodes: 5 of them can be used"):
        instantiate(budget, model, 7, 8)
    with pytest.raises(PlanError, match="the smallest pipeline has 4"):
        instantiate(budget, model, 3, 8)
    with pytest.raises(PlanError, match="3 pipelines need at least 3 microbatches, and there are 2"):
        deal(budget, model, [4, 4, 4], 2)


def test_equal_pipelines_get_counts_that_differ_by_one_at_most():
    model = chain(random.Random(6), 8, 10, 10)
    assert deal(budget_of(model, 2, 1), model, [2, 2, 2], 11) == (4, 4, 3)


def test_a_longer_pipeline_takes_more_of_the_batch():
    model = chain(random.Random(7), 12, 10, 10)
    found = instantiate(budget_of(model, 2, 3), model, 5, 40)
    assert [n for n, _ in found] == [2, 3]
    assert found[1][1] > found[0][1]
