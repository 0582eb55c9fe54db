"""Where a search begins: every named schedule that a problem allows, and their relatives with other warm-ups and delays.

The relatives have one stage per position. They differ in how many forwards run ahead and in how many weight gradients wait, and they keep to the caps
by doing what gives memory back first.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from pdsl.lowering.schedule import Op, Schedule, ScheduleError, loop_placement
from pdsl.lowering.schedules import SCHEDULES, ScheduleFamily, single
from pdsl.lowering.search_problem import BACKWARD, INPUT, WEIGHT, Ops, Problem

__all__ = ["Seed", "named", "relatives"]


@frozen
class Seed:
    """Rows to begin with and their name. Without `rows`, `reason` says why this problem does not allow them."""

    name: str
    rows: Ops | None
    reason: str = ""


# --- named schedules ----------------------------------------------------------------------------------------------------------------------


def named(problem: Problem, rounds: int = 1) -> Iterator[Seed]:
    """Every schedule of the language with the stages of the problem where they are; none that only differs in name.

    `rounds` parts of the microbatches follow each other where a schedule would hold all of them at once.
    """
    each, rest = divmod(problem.stages, problem.positions)
    if rest:
        return
    if problem.positions == 1 and each == 1:
        yield Seed("single", problem.rows_of(single(problem.microbatches)))
        return
    for family in SCHEDULES.values():
        made = _built(family, problem, each, rounds)
        if made is None or made.placement != problem.placement:
            continue
        if not problem.split and any(o.op is Op.BACKWARD_INPUT for row in made.rows for o in row):
            yield Seed(family.name, None, "it splits the backward")
            continue
        yield _checked(problem, Seed(family.name, problem.rows_of(made)))


def _built(family: ScheduleFamily, problem: Problem, each: int, rounds: int) -> Schedule | None:
    virtual = each if family.virtual else 1
    if family.per_position(virtual) != each or (family.virtual and each == 1):
        return None
    m, p = problem.microbatches, problem.positions
    try:
        if rounds > 1 and m % rounds == 0 and family.accepts(p, m // rounds, virtual) is None:
            return family.accumulate(p, m // rounds, virtual, rounds)
        return family.build(p, m, virtual)
    except ScheduleError:
        return None


def _checked(problem: Problem, seed: Seed) -> Seed:
    """The seed, or why its rows are none for the problem."""
    if problem.caps is None or seed.rows is None:
        return seed
    for position, (peak, cap) in enumerate(zip(problem.peaks(seed.rows), problem.caps, strict=True)):
        if peak > cap:
            return Seed(seed.name, None, f"it holds {peak} on position {position}, which has room for {cap}")
    return seed


# --- relatives ----------------------------------------------------------------------------------------------------------------------------


def relatives(problem: Problem) -> Iterator[Seed]:
    """1F1B with longer warm-ups and, where the backward may be split, zero bubble with longer warm-ups and delays. They fit by construction."""
    if problem.placement != loop_placement(problem.positions) or problem.positions == 1:
        return
    p = problem.positions
    for more in range(5):  # halves of what eager 1F1B runs ahead of 1F1B
        warm = [p - r + (more * (p - 1 - r) + 1) // 2 for r in range(p)]
        rows = _steady(problem, warm, [0] * p)
        if rows is not None:
            yield Seed(f"1F1B, {more}/2 more ahead", rows)
        if not problem.split:
            continue
        for late, delays in (("r", range(p)), ("2 r", range(0, 2 * p, 2)), ("3 r", range(0, 3 * p, 3)), ("p", (p,) * p)):
            rows = _steady(problem, warm, list(delays))
            if rows is not None:
                yield Seed(f"zero bubble, {more}/2 more ahead, W delayed by {late}", rows)


def _steady(problem: Problem, warm: list[int], delays: list[int]) -> Ops | None:
    """Row r: `warm[r]` forwards, then gradient and forward in turn; W of the oldest once more than `delays[r]` wait, or where memory is short."""
    rows = []
    for position in range(problem.positions):
        row = _steady_row(problem, position, min(warm[position], problem.microbatches), delays[position])
        if row is None:
            return None
        rows.append(row)
    return rows


def _steady_row(problem: Problem, position: int, warm: int, delay: int) -> list[int] | None:
    m, size, stage = problem.microbatches, problem.size, problem.stages_at[position][0]
    base, each, more = stage * m, problem.sizes[stage], problem.halves[stage]
    cap = None if problem.caps is None else problem.caps[position]
    if cap is not None and each > cap:
        return None
    row: list[int] = []
    forwards = inputs = weights = 0
    while weights < m:
        waiting = inputs - weights
        held = (forwards - weights) * each + waiting * more
        next_forward = forwards < m and forwards - inputs < warm
        room = cap is None or held + (each if next_forward else more) <= cap
        if waiting and (waiting > delay or inputs == m or not room or (cap is not None and forwards < m and held + each > cap)):
            row.append(WEIGHT * size + base + weights)
            weights += 1
        elif next_forward and room:
            row.append(base + forwards)
            forwards += 1
        elif problem.split and (cap is None or held + more <= cap):
            row.append(INPUT * size + base + inputs)
            inputs += 1
        else:
            row.append(BACKWARD * size + base + inputs)
            inputs += 1
            weights += 1
    return row
