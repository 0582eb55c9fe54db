"""List scheduling: a position that is free takes, of what it could start first, the operation with the best rank.

A rank is an order of operations that is fixed beforehand. Weight gradients fill gaps; `hold` says how long one is held back where something
that others wait for is about to arrive. Everything is decided in the order of start times, so the result is one and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from pdsl.lowering.frontier import Frontier
from pdsl.lowering.search_problem import FORWARD, INPUT, WEIGHT, Ops, Problem

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
    """One pass."""

    def __init__(self, problem: Problem, rank: list[int], hold: Fraction) -> None:
        self.problem, self.rank, self.front = problem, rank, Frontier(problem)
        self.m, self.size = problem.microbatches, problem.size
        self.held_back = [hold.numerator * w // hold.denominator for w in problem.backward_weight]
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
        return self.rows if self.front.finished else None

    def _start(self, position: int, begin: int, op: int) -> None:
        problem = self.problem
        kind, at = divmod(op, self.size)
        self.front.take(op, begin + problem.durations[op])
        self.rows[position].append(op)
        self.next[position] = self._choice(position)
        reader = at // self.m + (1 if kind == FORWARD else -1)
        if kind != WEIGHT and 0 <= reader < problem.stages and problem.placement[reader] != position:
            self.next[problem.placement[reader]] = self._choice(problem.placement[reader])

    def _choice(self, position: int) -> tuple[int, int] | None:
        """Start and number of what a position would do next; None if it can do nothing yet."""
        options = [(begin, self.rank[op], op) for begin, op in self.front.ready(position) if self._room(position, op)]
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

    def _room(self, position: int, op: int) -> bool:
        """Whether a forward leaves room for what the oldest microbatch still has to take here, so that one at least can always be finished."""
        problem = self.problem
        if problem.caps is None or op >= self.size:
            return True
        stage, i = divmod(op, self.m)
        forwards, _, weights = self.front.done
        mine = problem.stages_at[position]
        oldest = min(weights[s] for s in mine)
        ahead = sum(problem.sizes[s] for s in mine if forwards[s] <= oldest and not (s == stage and i == oldest))
        return self.front.held[position] + problem.sizes[stage] + ahead <= problem.caps[position]


def list_schedule(problem: Problem, rank: str, hold: Fraction = HOLDS[0]) -> Ops | None:
    """The rows that one rank gives; None if the caps are too small for one microbatch. Raises KeyError for an unknown rank."""
    key = RANKS[rank]
    stages, m = range(problem.stages), range(problem.microbatches)
    order = sorted((key(kind, s, i), kind, s, i) for kind in (FORWARD, INPUT, WEIGHT) for s in stages for i in m)
    ranks = [0] * (3 * problem.size)
    for place, (_, kind, s, i) in enumerate(order):
        ranks[kind * problem.size + s * problem.microbatches + i] = place
    ranks += ranks[problem.size : 2 * problem.size]  # a B goes where its I would
    return _Run(problem, ranks, hold).run()
