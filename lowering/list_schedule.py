"""List scheduling: a position that is free takes, of what it could start first, the operation with the best rank.

A rank is an order of operations that is fixed beforehand. Weight gradients fill gaps; `hold` says how long one is held back where something
that others wait for is about to arrive. Everything is decided in the order of start times, so the result is one and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from pdsl.lowering.search_problem import BACKWARD, FORWARD, INPUT, WEIGHT, Ops, Problem

__all__ = ["HOLDS", "RANKS", "list_schedule"]

_Key = Callable[[int, int, int], tuple[int, ...]]
"""(kind, stage, microbatch) -> key; smaller goes first."""


def _kinds(first: int, second: int, third: int) -> dict[int, int]:
    return {first: 0, second: 1, third: 2}


_GRADIENT_FIRST = _kinds(INPUT, FORWARD, WEIGHT)
_FORWARD_FIRST = _kinds(FORWARD, INPUT, WEIGHT)
_FORWARD_LAST = _kinds(INPUT, WEIGHT, FORWARD)

RANKS: Mapping[str, _Key] = MappingProxyType(
    {
        "deepest": lambda kind, stage, i: (_GRADIENT_FIRST[kind], -stage, i),
        "forward": lambda kind, stage, i: (_FORWARD_FIRST[kind], i, -stage),
        "oldest": lambda kind, stage, i: (_GRADIENT_FIRST[kind], i, -stage),
        "weight": lambda kind, stage, i: (_FORWARD_LAST[kind], -stage, i),
        "shallowest": lambda kind, stage, i: (_GRADIENT_FIRST[kind], stage, i),
        "forward deepest": lambda kind, stage, i: (_FORWARD_FIRST[kind], -stage, i),
        "forward shallowest": lambda kind, stage, i: (_FORWARD_FIRST[kind], stage, i),
        "microbatch": lambda kind, stage, i: (kind == WEIGHT, i, -stage, _GRADIENT_FIRST[kind]),
    }
)
"""Orders of operations, by name. The first wins most often where nothing is scarce."""

HOLDS = (Fraction(0), Fraction(1, 2), Fraction(1))
"""How much of a weight gradient may stand in the way of an F or I that comes meanwhile: all of it, the second half, or nothing."""


class _Run:
    """One pass. Each stage runs its microbatches in their order, so a count per stage and kind says what is done."""

    def __init__(self, problem: Problem, rank: list[int], hold: Fraction) -> None:
        self.problem, self.rank = problem, rank
        self.split = problem.split
        self.m, self.size, self.last = problem.microbatches, problem.size, problem.stages - 1
        self.held_back = [hold.numerator * w // hold.denominator for w in problem.backward_weight]
        self.done: list[list[int]] = [[0] * problem.stages for _ in range(3)]
        self.ends: list[list[list[int]]] = [[[] for _ in range(problem.stages)] for _ in range(2)]
        self.free = [0] * problem.positions
        self.held = [0] * problem.positions
        self.rows: Ops = [[] for _ in range(problem.positions)]
        self.next: list[tuple[int, int] | None] = [self._choice(r) for r in range(problem.positions)]

    def run(self) -> Ops | None:
        """The rows; None if the caps let nobody go on."""
        for _ in range(self.problem.operations):
            first, at = None, -1
            for r, found in enumerate(self.next):
                if found is not None and (first is None or found[0] < first[0]):
                    first, at = found, r
            if first is None:
                break
            self._start(at, *first)
        return self.rows if sum(self.done[WEIGHT]) == self.size else None

    def _start(self, position: int, begin: int, op: int) -> None:
        problem = self.problem
        kind, at = divmod(op, self.size)
        stage = at // self.m
        end = begin + problem.durations[op]
        self.free[position] = end
        self.held[position] += problem.holds[op]
        self.rows[position].append(op)
        for k in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
            self.done[k][stage] += 1
        if kind == WEIGHT:
            self.next[position] = self._choice(position)
            return
        self.ends[0 if kind == FORWARD else 1][stage].append(end)
        self.next[position] = self._choice(position)
        reader = stage + 1 if kind == FORWARD else stage - 1
        if 0 <= reader <= self.last and problem.placement[reader] != position:
            self.next[problem.placement[reader]] = self._choice(problem.placement[reader])

    def _choice(self, position: int) -> tuple[int, int] | None:
        """Start and number of what a position would do next; None if it can do nothing yet."""
        options = self._options(position)
        if not options:
            return None
        begin, _, op = min(options)
        if op // self.size != WEIGHT:
            return begin, op
        limit = begin + self.held_back[op % self.size // self.m]
        others = [option for option in options if option[2] // self.size != WEIGHT and option[0] < limit]
        if others:
            begin, _, op = min(others)
        return begin, op

    def _options(self, position: int) -> list[tuple[int, int, int]]:
        """(earliest start, rank, operation) of everything whose inputs are known."""
        m, size, rank, free = self.m, self.size, self.rank, self.free[position]
        forwards, inputs, weights = self.done
        found = []
        for stage in self.problem.stages_at[position]:
            base = stage * m
            i = forwards[stage]
            if i < m and (stage == 0 or len(self.ends[0][stage - 1]) > i) and self._room(position, stage, i):
                ready = self.ends[0][stage - 1][i] + self.problem.lags[stage] if stage else 0
                found.append((max(free, ready), rank[base + i], base + i))
            i = inputs[stage]
            kind = self._backward(position, stage)
            if kind is not None and i < forwards[stage] and (stage == self.last or len(self.ends[1][stage + 1]) > i):
                ready = self.ends[1][stage + 1][i] + self.problem.lags[stage + 1] if stage < self.last else 0
                found.append((max(free, ready), rank[size + base + i], kind * size + base + i))
            i = weights[stage]
            if i < inputs[stage]:
                found.append((free, rank[2 * size + base + i], 2 * size + base + i))
        return found

    def _backward(self, position: int, stage: int) -> int | None:
        """How the next backward of a stage can begin: with its first half, if there is room for what stands between the halves; else whole, or not
        before the weight halves that wait.
        """
        problem = self.problem
        if self.split and (problem.caps is None or self.held[position] + problem.halves[stage] <= problem.caps[position]):
            return INPUT
        return BACKWARD if self.done[INPUT][stage] == self.done[WEIGHT][stage] else None

    def _room(self, position: int, stage: int, i: int) -> bool:
        """Whether a forward leaves room for what the oldest microbatch still has to take here, so that one at least can always be finished."""
        problem = self.problem
        if problem.caps is None:
            return True
        forwards, _, weights = self.done
        mine = problem.stages_at[position]
        oldest = min(weights[s] for s in mine)
        ahead = sum(problem.sizes[s] for s in mine if forwards[s] <= oldest and not (s == stage and i == oldest))
        return self.held[position] + problem.sizes[stage] + ahead <= problem.caps[position]


def list_schedule(problem: Problem, rank: str, hold: Fraction = HOLDS[0]) -> Ops | None:
    """The rows that one rank gives; None if the caps are too small for one microbatch. Raises KeyError for an unknown rank."""
    key = RANKS[rank]
    stages, m = range(problem.stages), range(problem.microbatches)
    order = sorted((key(kind, s, i), kind, s, i) for kind in (FORWARD, INPUT, WEIGHT) for s in stages for i in m)
    ranks = [0] * (3 * problem.size)
    for place, (_, kind, s, i) in enumerate(order):
        ranks[kind * problem.size + s * problem.microbatches + i] = place
    return _Run(problem, ranks, hold).run()
