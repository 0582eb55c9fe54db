"""An event simulator for schedules: when each operation starts and ends, and how long positions idle.

Every position runs its row in order, each operation as early as its inputs allow. A transfer between positions takes `hop` and keeps no one
busy. With costs of int and Fraction everything is exact. One visit per operation: O(N) time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import TypeAlias

from attrs import frozen

from pdsl.lowering.schedule import Number, Op, Operation, Schedule, ScheduleError

__all__ = ["StageCosts", "StuckSchedule", "Timeline", "Waiting", "Where", "at_action", "flop_costs", "simulate"]


Where: TypeAlias = Callable[[int, int | None], str]
"""The words for a place in the rows: (position, index in its row, or None for the whole row)."""


def at_action(position: int, index: int | None) -> str:
    """A place in the words of a plan: `position 1, action 6`, counted from 0."""
    return f"position {position}" if index is None else f"position {position}, action {index}"


@frozen
class Waiting:
    """The operation at (position, index) waits for ever for `needed`, which is at `source`, or in no row."""

    position: int
    index: int
    operation: Operation
    needed: str
    source: tuple[int, int] | None

    def text(self, where: Where = at_action) -> str:
        there = f"{self.needed} ({where(*self.source)})" if self.source is not None else f"{self.needed}, which is in no row"
        return f"{where(self.position, self.index)}: {self.operation} waits for {there}"


class StuckSchedule(ScheduleError):
    """The rows cannot be run to their end. `waiting` has one entry for each position that waits for ever, `blocked` the same in words."""

    def __init__(self, waiting: tuple[Waiting, ...]) -> None:
        super().__init__(waiting)
        self.waiting = waiting
        self.blocked = tuple(w.text() for w in waiting)

    def __str__(self) -> str:
        return "the schedule does not progress: " + "; ".join(self.blocked)


@frozen
class StageCosts:
    """Times per stage, in any one unit. A whole backward takes input plus weight time."""

    forward: tuple[Number, ...]
    backward_input: tuple[Number, ...]
    backward_weight: tuple[Number, ...]

    @classmethod
    def equal(cls, stages: int, forward: Number = 1, backward_input: Number = 1, backward_weight: Number = 1) -> StageCosts:
        """The same costs for every stage."""
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages)

    def of(self, operation: Operation) -> Number:
        """The time of one operation."""
        stage = operation.stage
        if operation.op is Op.FORWARD:
            return self.forward[stage]
        if operation.op is Op.BACKWARD_INPUT:
            return self.backward_input[stage]
        if operation.op is Op.BACKWARD_WEIGHT:
            return self.backward_weight[stage]
        return self.backward_input[stage] + self.backward_weight[stage]


def flop_costs(forward: Sequence[Number], again: Sequence[Number] = ()) -> StageCosts:
    """Costs in FLOPs from those of the forwards: each half of a backward takes as much as a forward. `again` is what the backward of each stage
    computes once more before; a backward with such work cannot be had in halves, so all of it is in the first.

    Nobody waits for an input gradient of the first stage, so its weight half does all.
    """
    if not any(again):
        return StageCosts(tuple(forward), (0, *forward[1:]), (2 * forward[0], *forward[1:]))
    whole = tuple(2 * f + a for f, a in zip(forward, again, strict=True))
    inputs = tuple(w if a else f for w, f, a in zip(whole, forward, again, strict=True))
    weights = tuple(w - i for w, i in zip(whole, inputs, strict=True))
    return StageCosts(tuple(forward), (0, *inputs[1:]), (whole[0], *weights[1:]))


@frozen
class Timeline:
    """When everything happens. `start` and `end` are shaped like `Schedule.rows`; `idle` is per position, over the whole makespan.

    `bubble` is the share of idle time over all positions: 1 - work / (positions * makespan); a Fraction unless the costs were floats.
    """

    makespan: Number
    start: tuple[tuple[Number, ...], ...]
    end: tuple[tuple[Number, ...], ...]
    idle: tuple[Number, ...]
    bubble: Fraction | float


def simulate(schedule: Schedule, costs: StageCosts, hop: Number = 0) -> Timeline:
    """Run the rows of a schedule on paper.

    `hop` is the latency of one activation or gradient between two positions, in the unit of `costs`. Raises StuckSchedule, with what each
    position waits for, if the rows contradict each other or lack an operation; ScheduleError if the costs or the stages of an operation do not fit.
    """
    _check_shapes(schedule, costs)
    scale = _common_denominator([*costs.forward, *costs.backward_input, *costs.backward_weight, hop])

    def whole(time: Number) -> Number:
        return float(time) if scale is None else int(time * scale)

    times = {(op, stage): whole(costs.of(Operation(op, stage, 0))) for stage in range(schedule.stages) for op in Op}
    start, end = _run(schedule, times, whole(hop))
    if scale is not None and scale > 1:
        start, end = _unscaled(start, scale), _unscaled(end, scale)
    makespan = max((row[-1] for row in end if row), default=_ZERO)
    work = [sum((costs.of(o) for o in row), start=_ZERO) for row in schedule.rows]
    total = schedule.positions * makespan
    share = sum(work, start=_ZERO)
    bubble: Fraction | float
    if isinstance(share, float) or isinstance(total, float):
        bubble = 1 - float(share) / float(total) if total else 0.0
    else:
        bubble = 1 - Fraction(share) / Fraction(total) if total else Fraction(0)
    return Timeline(makespan, _frozen(start), _frozen(end), tuple(makespan - w for w in work), bubble)


_ZERO: Number = 0


def _unscaled(rows: Sequence[Sequence[Number]], scale: int) -> list[list[Number]]:
    return [[t if isinstance(t, float) else Fraction(t, scale) for t in row] for row in rows]


def _check_shapes(schedule: Schedule, costs: StageCosts) -> None:
    for name in ("forward", "backward_input", "backward_weight"):
        count = len(getattr(costs, name))
        if count != schedule.stages:
            raise ScheduleError(f"{count} {name} costs for {schedule.stages} stages")
    if len(schedule.placement) != schedule.stages:
        raise ScheduleError(f"{len(schedule.placement)} placements for {schedule.stages} stages")
    for position, row in enumerate(schedule.rows):
        for index, o in enumerate(row):
            if not (0 <= o.stage < schedule.stages and 0 <= o.microbatch < schedule.microbatches):
                raise ScheduleError(
                    f"position {position}, action {index}: {o} is outside {schedule.stages} stages and {schedule.microbatches} microbatches"
                )


def _common_denominator(values: Sequence[Number]) -> int | None:
    """What makes all values integers, or None if one is a float. Integer arithmetic is exact and far cheaper than that of Fraction."""
    denominators = []
    for value in values:
        if isinstance(value, float):
            return None
        denominators.append(value.denominator)
    return lcm(*denominators)


def _frozen(rows: Sequence[Sequence[Number]]) -> tuple[tuple[Number, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _run(schedule: Schedule, times: Mapping[tuple[Op, int], Number], hop: Number) -> tuple[list[list[Number]], list[list[Number]]]:
    """Start and end of all operations. `times` are by operation and stage.

    A result (forward, gradient to the input, gradient of the weights) of one stage and microbatch has one slot. A position that needs an
    unfinished slot goes to sleep on it and is woken by whoever fills it, so every operation is visited a bounded number of times.
    """
    stages, m, place = schedule.stages, schedule.microbatches, schedule.placement
    size = stages * m
    finished: list[Number | None] = [None] * (3 * size)
    sleepers: dict[int, list[int]] = {}
    reached = [0] * schedule.positions
    starts: list[list[Number]] = [[] for _ in schedule.rows]
    ends: list[list[Number]] = [[] for _ in schedule.rows]
    awake = list(reversed(range(schedule.positions)))
    while awake:
        position = awake.pop()
        row = schedule.rows[position]
        free: Number = ends[position][-1] if ends[position] else 0
        while reached[position] < len(row):
            o = row[reached[position]]
            slot, needs = _slot_and_needs(o, stages, m)
            begin = free
            missing = -1
            for need in needs:
                ready = finished[need]
                if ready is None:
                    missing = need
                    break
                if place[need % size // m] != position:
                    ready = ready + hop
                begin = max(begin, ready)
            if missing >= 0:
                sleepers.setdefault(missing, []).append(position)
                break
            if finished[slot] is not None:
                raise ScheduleError(f"position {position}, action {reached[position]}: {o} is computed a second time")
            free = begin + times[o.op, o.stage]
            starts[position].append(begin)
            ends[position].append(free)
            finished[slot] = free
            reached[position] += 1
            awake.extend(sleepers.pop(slot, ()))
    if any(at < len(row) for at, row in zip(reached, schedule.rows, strict=True)):
        raise StuckSchedule(_blocked(schedule, reached, {p: need for need, ps in sleepers.items() for p in ps}))
    return starts, ends


def _slot_and_needs(o: Operation, stages: int, m: int) -> tuple[int, tuple[int, ...]]:
    """The slot an operation fills and the slots it reads: forwards first, then input gradients (of B or I), then weight gradients."""
    size = stages * m
    at = o.stage * m + o.microbatch
    if o.op is Op.FORWARD:
        return at, (at - m,) if o.stage else ()
    if o.op is Op.BACKWARD_WEIGHT:
        return 2 * size + at, (size + at,)
    return size + at, (at, size + at + m) if o.stage + 1 < stages else (at,)


def _blocked(schedule: Schedule, reached: Sequence[int], waits: dict[int, int]) -> tuple[Waiting, ...]:
    """One entry per position that stands still: where, on what, and who should have computed it."""
    stages, m = schedule.stages, schedule.microbatches
    where = {_slot_and_needs(o, stages, m)[0]: (p, i, o) for p, row in enumerate(schedule.rows) for i, o in enumerate(row)}
    found = []
    for position, need in sorted(waits.items()):
        index = reached[position]
        kind, at = divmod(need, stages * m)
        p, i, o = where.get(need, (-1, -1, f"{at // m}{'FBW'[kind]}{at % m}"))
        found.append(Waiting(position, index, schedule.rows[position][index], str(o), (p, i) if p >= 0 else None))
    return tuple(found)
