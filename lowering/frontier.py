"""How far a step is while it is put together, operation by operation: what every position could do next, and what it would begin.

Microbatches are alike, so each stage may run them in their order; a count per stage and kind says what is done. Both ways to build rows from nothing,
by ranks and by trying everything, stand on this.
"""

from __future__ import annotations

from pdsl.lowering.search_problem import BACKWARD, FORWARD, INPUT, WEIGHT, Problem

__all__ = ["Frontier"]


class Frontier:
    """`done[kind][stage]` counts F, I and W, a B as both of its halves. `ends[0][stage]` are the ends of F, `ends[1][stage]` those of I or B, in the order
    of microbatches. `free` is by position when it is done with what it has, `held` what it holds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.done = [[0] * problem.stages for _ in range(3)]
        self.ends: list[list[list[int]]] = [[[] for _ in range(problem.stages)] for _ in range(2)]
        self.free = [0] * problem.positions
        self.held = [0] * problem.positions

    @property
    def finished(self) -> bool:
        """Whether everything is done."""
        return sum(self.done[WEIGHT]) == self.problem.size

    def ready(self, position: int) -> list[tuple[int, int]]:
        """(earliest start, operation) of everything whose inputs are known and that there is room for on a position.

        A backward begins with its first half, if there is room for what stands between the halves; else it is whole, and waits for the weight halves that wait.
        """
        problem, free = self.problem, self.free[position]
        m, size, last, lags = problem.microbatches, problem.size, problem.stages - 1, problem.lags
        forwards, inputs, weights = self.done
        room = None if problem.caps is None else problem.caps[position] - self.held[position]
        found = []
        for s in problem.stages_at[position]:
            base = s * m
            i = forwards[s]
            if i < m and (s == 0 or forwards[s - 1] > i) and (room is None or problem.sizes[s] <= room):
                found.append((max(free, self.ends[0][s - 1][i] + lags[s]) if s else free, base + i))
            i = inputs[s]
            if i < forwards[s] and (s == last or inputs[s + 1] > i):
                half = problem.split and (room is None or problem.halves[s] <= room)
                if half or weights[s] == i:
                    begin = max(free, self.ends[1][s + 1][i] + lags[s + 1]) if s < last else free
                    found.append((begin, (INPUT if half else BACKWARD) * size + base + i))
            i = weights[s]
            if i < inputs[s]:
                found.append((free, WEIGHT * size + base + i))
        return found

    def take(self, op: int, end: int) -> None:
        """Do an operation, which ends then."""
        kind, stage = self._count(op, 1)
        self.free[self.problem.placement[stage]] = end
        if kind != WEIGHT:
            self.ends[0 if kind == FORWARD else 1][stage].append(end)

    def undo(self, op: int, free: int) -> None:
        """Take back the last operation of its position, which was `free` then."""
        kind, stage = self._count(op, -1)
        self.free[self.problem.placement[stage]] = free
        if kind != WEIGHT:
            self.ends[0 if kind == FORWARD else 1][stage].pop()

    def _count(self, op: int, change: int) -> tuple[int, int]:
        problem = self.problem
        kind, at = divmod(op, problem.size)
        stage = at // problem.microbatches
        self.held[problem.placement[stage]] += change * problem.holds[op]
        for k in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
            self.done[k][stage] += change
        return kind, stage
