"""Schedules for many microbatches from one for few: find a stretch of every row that can be repeated, and repeat it.

A stretch that holds every kind of operation of every stage once moves each microbatch one place on and leaves memory as it was, so it may be repeated
without holding more. Where the rows are cut matters only to time; a few places are tried and the simulator decides.
"""

from __future__ import annotations

from attrs import evolve

from pdsl.lowering.search_problem import BACKWARD, INPUT, WEIGHT, Ops, Problem

__all__ = ["lengthened", "shortened"]

_CUTS = 8  # places in time at which rows are cut


def shortened(problem: Problem) -> Problem | None:
    """The same problem with about three microbatches for each position; None if it has few more than that."""
    m = 3 * problem.positions + 2
    return evolve(problem, microbatches=m) if 4 * m <= 3 * problem.microbatches else None


def lengthened(short: Problem, rows: Ops, long: Problem) -> Ops | None:
    """Rows of `long` that begin and end like those of `short`; None if no stretch can be repeated. Stages must run their microbatches in order."""
    ends = short.ends(rows)
    if ends is None or long.microbatches <= short.microbatches:
        return None
    symbols = [_symbols(short, row) for row in rows]
    last = max(row[-1] for row in ends)
    best: tuple[int, Ops] | None = None
    for cut in range(1, _CUTS):
        at = last * cut // _CUTS
        made = [_repeated(part, times, at, long.microbatches - short.microbatches) for part, times in zip(symbols, ends, strict=True)]
        if any(row is None for row in made):
            continue
        full = [_numbered(long, row) for row in made if row is not None]
        makespan = long.makespan(full) if long.in_order(full) else None
        if makespan is not None and (best is None or makespan < best[0]):
            best = makespan, full
    return None if best is None else best[1]


def _symbols(problem: Problem, row: list[int]) -> list[tuple[int, int]]:
    """(kind, stage) of each operation."""
    return [(op // problem.size, op % problem.size // problem.microbatches) for op in row]


def _repeated(row: list[tuple[int, int]], ends: list[int], at: int, times: int) -> list[tuple[int, int]] | None:
    """The row with a stretch of one microbatch, which begins about `at`, repeated `times` more; None if there is none."""
    begin = next((i for i, end in enumerate(ends) if end > at), len(row))
    stages = {stage for _, stage in row}
    for i in range(begin, len(row)):
        seen: set[tuple[int, int]] = set()
        for j in range(i, len(row)):
            kind, stage = row[j]
            parts = [(INPUT, stage), (WEIGHT, stage)] if kind == BACKWARD else [(kind, stage)]
            if seen.intersection(parts):
                break
            seen.update(parts)
            if len(seen) == 3 * len(stages):
                return row[: j + 1] + row[i : j + 1] * times + row[j + 1 :]
    return None


def _numbered(problem: Problem, row: list[tuple[int, int]]) -> list[int]:
    """Operations with the microbatches counted up, for each kind and stage."""
    count: dict[tuple[int, int], int] = {}
    found = []
    for kind, stage in row:
        parts = ((INPUT, stage), (WEIGHT, stage)) if kind == BACKWARD else ((kind, stage),)
        i = count.get(parts[0], 0)
        for part in parts:
            count[part] = count.get(part, 0) + 1
        found.append(kind * problem.size + stage * problem.microbatches + i)
    return found
