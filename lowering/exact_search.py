"""The best schedule of a small problem, with a proof: branch and bound over the order of operations.

Each stage runs its microbatches in their order; a state is then a count of F, I and W per stage, with the times that still matter.
Depth first, on the position whose next operation could be over first (Giffler and Thompson): every order that a best schedule may have is tried, as
one that leaves a gap for an operation which would fit into it is never better. Only if several stages share a cap, or the halves of a backward
take memory between them, such a gap may pay, and all positions are branched on. Bounds cut off what cannot be better, a table of states what cannot be different.
"""

from __future__ import annotations

from attrs import frozen

from pdsl.lowering.bounds import lower_bound, paths_of
from pdsl.lowering.frontier import Frontier
from pdsl.lowering.search_problem import Ops, Problem

__all__ = ["Exact", "exact_search"]


@frozen
class Exact:
    """`makespan` and `rows` of the best that was found below the given limit (None: nothing was); `proven` if there is nothing better."""

    makespan: int | None
    rows: Ops | None
    proven: bool


@frozen
class _Choice:
    """One operation that could be next on its position."""

    start: int
    end: int
    position: int
    op: int


class _Search:
    def __init__(self, problem: Problem, best: int, nodes: int) -> None:
        self.problem, self.paths = problem, paths_of(problem)
        self.best, self.rows, self.left = best, None, nodes  # type: int, Ops | None, int
        self.goal = lower_bound(problem)
        self.m, self.last = problem.microbatches, problem.stages - 1
        self.front = Frontier(problem)
        self.order: list[tuple[int, int]] = []
        self.labels: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.everywhere = problem.caps is not None and (problem.stages > problem.positions or any(problem.halves))

    def run(self) -> bool:
        """Whether the search came to its end: to that of the tree, or to the lower bound."""
        if self.best <= self.goal:
            return True
        if self.left <= 0:
            return False
        self.left -= 1
        front = self.front
        if front.finished:
            latest = max(front.free)
            if latest < self.best:
                self.best, self.rows = latest, self._rows()
            return True
        if self._bound() >= self.best or self._dominated():
            return True
        choices = self._choices()
        for choice in sorted(choices, key=lambda c: (c.start, -(c.op // self.m), c.op)):
            before = front.free[choice.position]
            front.take(choice.op, choice.end)
            self.order.append((choice.position, choice.op))
            finished = self.run()
            self.order.pop()
            front.undo(choice.op, before)
            if not finished:
                return False
        return True

    # --- operations -----------------------------------------------------------------------------------------------------------------------

    def _choices(self) -> list[_Choice]:
        found = [c for position in range(self.problem.positions) for c in self._ready(position)]
        if self.everywhere or not found:
            return found
        first = min(found, key=lambda c: (c.end, c.start, c.op))
        return [c for c in found if c.position == first.position and (c.start < first.end or c is first)]

    def _ready(self, position: int) -> list[_Choice]:
        durations = self.problem.durations
        return [_Choice(begin, begin + durations[op], position, op) for begin, op in self.front.ready(position)]

    def _rows(self) -> Ops:
        rows: Ops = [[] for _ in range(self.problem.positions)]
        for position, op in self.order:
            rows[position].append(op)
        return rows

    # --- bounds and states --------------------------------------------------------------------------------------------------------------------

    def _earliest(self) -> tuple[list[int], list[int]]:
        """No next F, and no next I, of a stage starts earlier than this."""
        problem, front = self.problem, self.front
        forwards, inputs, _ = front.done
        f, g = [0] * problem.stages, [0] * problem.stages
        for s, position in enumerate(problem.placement):
            i, ready = forwards[s], 0
            if s and i < self.m:
                known = front.ends[0][s - 1][i] if forwards[s - 1] > i else f[s - 1] + problem.forward[s - 1]
                ready = known + problem.lags[s]
            f[s] = max(front.free[position], ready)
        for s in reversed(range(problem.stages)):
            i, ready = inputs[s], 0
            if i == self.m:
                continue
            if s < self.last:
                known = front.ends[1][s + 1][i] if inputs[s + 1] > i else g[s + 1] + self.paths.gradient[s + 1]
                ready = known + problem.lags[s + 1]
            if forwards[s] == i:
                ready = max(ready, f[s] + problem.forward[s])
            g[s] = max(front.free[problem.placement[s]], ready)
        return f, g

    def _bound(self) -> int:
        """No end of the step from here on is earlier."""
        problem, paths, front, m = self.problem, self.paths, self.front, self.m
        forwards, inputs, weights = front.done
        f, g = self._earliest()
        latest = max(front.free)
        for s in range(problem.stages):
            if forwards[s] < m:
                ends = f[s] + (m - forwards[s]) * problem.forward[s]
                latest = max(latest, ends + paths.below[s] + paths.gradient[s] + max(paths.tail[s], paths.weight[s]))
            if inputs[s] < m:
                latest = max(latest, g[s] + (m - inputs[s]) * paths.gradient[s] + max(paths.tail[s], paths.weight[s]))
        for position, stages in enumerate(problem.stages_at):
            left_f = sum((m - forwards[s]) * problem.forward[s] for s in stages)
            left_g = sum((m - inputs[s]) * paths.gradient[s] for s in stages)
            left_w = sum((m - weights[s]) * paths.weight[s] for s in stages)
            arrives = min((g[s] for s in stages if inputs[s] < m), default=None)
            free = front.free[position]
            if arrives is None:
                latest = max(latest, free + left_w)
                continue
            pending = sum((inputs[s] - weights[s]) * paths.weight[s] for s in stages)
            first = min((f[s] for s in stages if forwards[s] < m), default=arrives)
            begin = free if pending else min(first, arrives)
            before = min(arrives - begin, left_f + pending)
            tail = min(paths.tail[s] for s in stages if inputs[s] < m)
            latest = max(latest, arrives + left_f + left_g + left_w - before, arrives + left_g + tail)
        return latest

    def _dominated(self) -> bool:
        """Whether the same operations were all done before no later in everything that still matters; if not, remember them."""
        front = self.front
        forwards, inputs, weights = front.done
        label = list(front.free)
        for s in range(self.problem.stages):
            if s < self.last:
                label += front.ends[0][s][forwards[s + 1] :]
            if s:
                label += front.ends[1][s][inputs[s - 1] :]
        made = tuple(label)
        known = self.labels.setdefault((*forwards, *inputs, *weights), [])
        if any(all(a <= b for a, b in zip(old, made, strict=True)) for old in known):
            return True
        known[:] = [old for old in known if not all(b <= a for a, b in zip(old, made, strict=True))]
        known.append(made)
        return False


def exact_search(problem: Problem, *, below: int | None = None, nodes: int = 20_000) -> Exact:
    """The best schedule that ends before `below` (None: any), visiting at most `nodes` states.

    Costs about 30 microseconds a state. With one stage per position problems of 4 positions and 8 microbatches take some thousand states at most.
    """
    work = sum(problem.durations[: 3 * problem.size]) + 2 * problem.hop * problem.size + 1
    search = _Search(problem, work if below is None else below, nodes)
    proven = search.run()
    found = search.best if search.rows is not None else None
    return Exact(found, search.rows, proven)
