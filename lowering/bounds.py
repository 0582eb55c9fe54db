"""Times below which no schedule of a problem ends, whatever its rows: what a search may stop at, and what proves a schedule optimal.

Each argument holds for all orders of the operations, not only for those in which microbatches keep their order.
"""

from __future__ import annotations

from itertools import accumulate

from attrs import frozen

from pdsl.lowering.search_problem import Problem

__all__ = ["Paths", "lower_bound", "paths_of"]


@frozen
class Paths:
    """One microbatch alone, by stage: `head` from the begin of the step to its F, `below` from the end of that F to the begin of its I or B, `tail`
    from the end of that to the end of the step. `gradient` is the time of I, or of B where the backward is whole; `weight` that of W, or 0.
    """

    head: tuple[int, ...]
    below: tuple[int, ...]
    tail: tuple[int, ...]
    gradient: tuple[int, ...]
    weight: tuple[int, ...]


def paths_of(problem: Problem) -> Paths:
    """The longest paths that one microbatch takes through the stages."""
    forward, lags = problem.forward, problem.lags
    weight = problem.backward_weight if problem.split else (0,) * problem.stages
    both = zip(problem.backward_input, problem.backward_weight, strict=True)
    gradient = problem.backward_input if problem.split else tuple(a + b for a, b in both)
    down = tuple(accumulate((f + lag for f, lag in zip(forward[:-1], lags[1:], strict=True)), initial=0))
    back = tuple(accumulate((g + lag for g, lag in zip(gradient[:-1], lags[1:], strict=True)), initial=weight[0]))
    around = [f + g + 2 * lag for f, g, lag in zip(forward, gradient, lags, strict=True)]
    below = tuple(sum(around[s + 1 :]) for s in range(problem.stages))
    return Paths(down, below, back, gradient, weight)


def lower_bound(problem: Problem) -> int:
    """The largest of the bounds: the path of one microbatch, the work of each position, and what the caps allow."""
    paths = paths_of(problem)
    alone = paths.head[-1] + problem.forward[-1] + paths.gradient[-1] + max(paths.tail[-1], paths.weight[-1])
    return max(alone, *(_of_position(problem, paths, r) for r in range(problem.positions)), *_of_caps(problem, paths))


def _of_position(problem: Problem, paths: Paths, position: int) -> int:
    """All of its work, before and after which the first and the last microbatch have a way to go."""
    stages, m = problem.stages_at[position], problem.microbatches
    if not stages:
        return 0
    forwards = m * sum(problem.forward[s] for s in stages)
    gradients = m * sum(paths.gradient[s] for s in stages)
    weights = m * sum(paths.weight[s] for s in stages)
    head, tail = min(paths.head[s] for s in stages), min(paths.tail[s] for s in stages)
    # until the first gradient can be here only forwards run, and no more of them than the cap lets in
    arrives = min(paths.head[s] + problem.forward[s] + paths.below[s] for s in stages)
    before = min(forwards, _forwards_within(problem, position))
    return max(
        head + forwards + gradients + max(weights, tail),
        arrives + forwards - before + gradients + max(weights, tail),
    )


def _forwards_within(problem: Problem, position: int) -> int:
    """The most time that forwards can take before anything is given back."""
    stages, everything = problem.stages_at[position], problem.microbatches * sum(problem.forward)
    if problem.caps is None or any(problem.sizes[s] == 0 for s in stages):
        return everything
    return max(problem.caps[position] * problem.forward[s] // problem.sizes[s] for s in stages)


def _of_caps(problem: Problem, paths: Paths) -> list[int]:
    """Where a stage may hold k microbatches, forward n + k waits for the end of one that began no earlier than forward n, a whole round trip."""
    if problem.caps is None:
        return []
    found = []
    for s, position in enumerate(problem.placement):
        size = problem.sizes[s]
        most = problem.caps[position] // size if size else problem.microbatches
        if most < 1:
            continue
        there = problem.forward[s] + paths.below[s] + paths.gradient[s]
        rounds, rest = divmod(problem.microbatches - 1, most)
        last = max(
            there + max(paths.weight[s], paths.tail[s]),
            (rest + 1) * (problem.forward[s] + paths.gradient[s] + paths.weight[s]),
        )
        found.append(paths.head[s] + rounds * (there + paths.weight[s]) + last)
    return found
