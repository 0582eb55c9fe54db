"""A plan as a workload to simulate: how long a step takes, and which pipelines there are, for any number of nodes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

from attrs import frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.cost import cost
from pdsl.lowering.coverage import pipeline_counts, usable
from pdsl.lowering.goodput import Workload
from pdsl.lowering.instantiate import deal, instantiate, step_time_of
from pdsl.lowering.plan import Budget, Plan

__all__ = ["PlanShape", "node_state", "plan_shape", "plan_workload", "step_flops"]

_EXACT = 128
"""Up to so many nodes the best pipelines are looked for; for more, as many pipelines as there can be, as equal as they can be."""


@frozen
class PlanShape:
    """The pipelines of the best plan by number of nodes: `least` nodes make the smallest one, `lose` may be lost at once.

    `pipelines(n)` are the nodes of each, longest first, () where n nodes cannot train; `flops(n)` the FLOPs on the critical path of a step.
    """

    least: int
    lose: int
    pipelines: Callable[[int], tuple[int, ...]]
    flops: Callable[[int], Fraction | None]


def step_flops(plan: Plan) -> Fraction:
    """FLOPs on the critical path of a step of the plan as it stands."""
    return cost(plan).step_time


def node_state(plan: Plan) -> int:
    """Bytes of parameters and optimizer state on the node that has most: what moves, at most, to whoever takes its place."""
    held: dict[int, int] = {}
    for memory in cost(plan).memory:
        node = plan.node(memory.rank)
        held[node] = held.get(node, 0) + memory.parameters + memory.optimizer
    return max(held.values())


def plan_shape(plan: Plan) -> PlanShape:
    """How a plan would look on other numbers of nodes. Without a budget pipelines keep their length and nothing may be lost."""
    return _elastic(plan, plan.budget) if plan.budget is not None else _rigid(plan)


def plan_workload(plan: Plan, seconds_per_flop: float) -> Workload:
    """The workload of a plan. `seconds_per_flop` is the time of one FLOP on the critical path."""
    shape = plan_shape(plan)

    def seconds(nodes: int) -> float | None:
        flops = shape.flops(nodes)
        return float(flops) * seconds_per_flop if flops is not None else None

    return Workload(plan.job.batch, seconds, shape.pipelines, shape.least, shape.lose)


def _elastic(plan: Plan, budget: Budget) -> PlanShape:
    facts, microbatches = plan.facts, plan.microbatches
    scale = Fraction(plan.rows_per_rank, plan.tensor_size)

    @cache
    def assignment(nodes: int) -> tuple[tuple[int, int], ...]:
        used = usable(nodes, budget.least, len(budget.cuts), microbatches) if nodes >= budget.least else 0
        if not used:
            return ()
        try:
            return instantiate(budget, facts, used, microbatches) if used <= _EXACT else even(used)
        except PlanError:
            return ()

    def even(nodes: int) -> tuple[tuple[int, int], ...]:
        count = pipeline_counts(nodes, budget.least, len(budget.cuts), 1, microbatches)[-1]
        each, more = divmod(nodes, count)
        sizes = (each,) * (count - more) + (each + 1,) * more
        return tuple(zip(sizes, deal(budget, facts, sizes, microbatches), strict=True))

    @cache
    def pipelines(nodes: int) -> tuple[int, ...]:
        return tuple(sorted((size for size, _ in assignment(nodes)), reverse=True))

    @cache
    def flops(nodes: int) -> Fraction | None:
        found = assignment(nodes)
        return step_time_of(budget, facts, found) * scale if found else None

    return PlanShape(budget.least, budget.lose, pipelines, flops)


def _rigid(plan: Plan) -> PlanShape:
    """Pipelines of the length of the longest; the microbatches are shared out as equally as whole ones allow."""
    islands = max(len(p.islands) for p in plan.pipelines)
    least = max(1, -(-islands * plan.shard_size * plan.tensor_size // plan.ranks_per_node))
    each = max(len(p.microbatches) for p in plan.pipelines)
    now, microbatches = step_flops(plan), plan.microbatches

    def pipelines(nodes: int) -> tuple[int, ...]:
        return (least,) * min(nodes // least, microbatches)

    def flops(nodes: int) -> Fraction | None:
        count = len(pipelines(nodes))
        return now * -(-microbatches // count) / each if count else None

    return PlanShape(least, 0, pipelines, flops)
