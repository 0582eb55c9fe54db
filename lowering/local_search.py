"""Local search: move one operation by a few places inside its position, keep what is no worse.

Moves are drawn by a generator of its own with a fixed seed, most of them on the critical path, and the work is counted in operations visited, not in
seconds, so that every machine finds the same. It only accepts what holds to order and caps, and never something slower than what it began with.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from attrs import frozen

from pdsl.lowering.search_problem import INPUT, Ops, Problem

__all__ = ["Improved", "fused", "improve"]

_FARTHEST = 3  # places that one move may go


@frozen
class Improved:
    """What a search came to: rows, their makespan, and how many of the moves made it shorter."""

    rows: Ops
    makespan: int
    moves: int


class _Draw:
    """A small linear congruential generator (multiplier and increment of Knuth's MMIX): the same numbers on every machine and in every version."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        self._state = (6364136223846793005 * self._state + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % limit


def improve(problem: Problem, rows: Ops, *, visits: int, goal: int = 0, seed: int = 1) -> Improved:
    """Search from `rows`, which must be valid, for at most about `visits` visits of operations, or until the makespan is `goal`."""
    current = [list(row) for row in rows]
    ends = problem.ends(current)
    assert ends is not None
    best = _latest(ends)
    draw, moves = _Draw(seed), 0
    critical = _critical(problem, current, ends)
    for _ in range(max(0, visits // max(1, problem.operations))):
        if best <= goal:
            break
        if draw.below(4):
            position, at = critical[draw.below(len(critical))]
        else:
            position = draw.below(problem.positions)
            at = draw.below(len(current[position]))
        to = at + (1 + draw.below(_FARTHEST)) * (1 if draw.below(2) else -1)
        row = current[position]
        if not 0 <= to < len(row) or not _may_pass(problem, row, at, to):
            continue
        op = row.pop(at)
        row.insert(to, op)
        found = None if problem.caps is not None and _peak(problem, row) > problem.caps[position] else problem.ends(current, best)
        if found is None:
            row.insert(at, row.pop(to))
            continue
        if _latest(found) < best:
            best, moves = _latest(found), moves + 1
        critical = _critical(problem, current, found)
    return Improved(current, best, moves)


def _latest(ends: list[list[int]]) -> int:
    return max((row[-1] for row in ends if row), default=0)


def _peak(problem: Problem, row: list[int]) -> int:
    return max(accumulate(map(problem.holds.__getitem__, row)), default=0)


def _may_pass(problem: Problem, row: list[int], at: int, to: int) -> bool:
    """Whether an operation may go past those between: not past another of its own stage and microbatch."""
    size = problem.size
    own = row[at] % size
    between = row[at + 1 : to + 1] if to > at else row[to:at]
    return all(op % size != own for op in between)


def _critical(problem: Problem, rows: Ops, ends: list[list[int]]) -> list[tuple[int, int]]:
    """(position, place) of the operations on one longest path, from its end back."""
    where = {problem.slots[op]: (r, i) for r, row in enumerate(rows) for i, op in enumerate(row)}
    latest = _latest(ends)
    position = next(r for r, row in enumerate(ends) if row and row[-1] == latest)
    at = len(rows[position]) - 1
    path = []
    while True:
        path.append((position, at))
        op = rows[position][at]
        begin = ends[position][at] - problem.durations[op]
        if begin == 0:
            return path
        if at and ends[position][at - 1] == begin:
            at -= 1
            continue
        position, at = where[problem.needs[op]]


def fused(problem: Problem, rows: Ops, *, visits: int) -> Ops:
    """The rows with an I that its W follows at once made a whole backward, wherever the step gets no longer by it.

    A whole backward walks the graph once, so it is cheaper than its halves are told to be; but whoever waits for the gradient gets it later.
    Pairs are joined all together, then half by half where that fails, for at most about `visits` visits of operations.
    """
    size = problem.size
    best = problem.makespan(rows)
    assert best is not None
    pairs = [(r, op) for r, row in enumerate(rows) for op, after in pairwise(row) if op // size == INPUT and after == op + size]
    groups, joined, left = [pairs] if pairs else [], frozenset[tuple[int, int]](), max(4, visits // max(1, problem.operations))
    while groups and left:
        left -= 1
        group = groups.pop()
        if problem.makespan(_joined(problem, rows, joined.union(group)), best) is not None:
            joined = joined.union(group)
        elif len(group) > 1:
            groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    return _joined(problem, rows, joined)


def _joined(problem: Problem, rows: Ops, pairs: frozenset[tuple[int, int]]) -> Ops:
    size = problem.size
    made = []
    for r, row in enumerate(rows):
        gone = {op + size for at, op in pairs if at == r}
        here = gone and {op - size for op in gone}
        made.append([op + 2 * size if op in here else op for op in row if op not in gone])
    return made
