"""A pipeline step as flat integers: what the search for a schedule works on, with a simulator that is fast enough to be asked thousands of times.

An operation is one number: kind * (stages * microbatches) + stage * microbatches + microbatch, kinds in the order F, I, W, B. A candidate is a list of such
numbers per position. Costs are whole numbers in one unit, so that all comparisons are exact and the same on every machine. The tests compare
`Problem.ends` with `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import TypeAlias

from attrs import frozen

from pdsl.lowering.schedule import Number, Op, Operation, Schedule, ScheduleError
from pdsl.lowering.simulate import StageCosts

__all__ = ["BACKWARD", "FORWARD", "INPUT", "WEIGHT", "Ops", "Problem", "problem_of"]

Ops: TypeAlias = list[list[int]]
"""Operations by position, in order."""

FORWARD, INPUT, WEIGHT, BACKWARD = range(4)
_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)


@frozen(slots=False)
class Problem:
    """Stages on positions, what they cost, and what they may hold.

    `forward`, `backward_input` and `backward_weight` are times by stage; `hop` is the latency between two positions; `sizes` is what a microbatch
    leaves on a stage from its F to the end of its B or W, `between` what it takes more from its I to the end of its W (empty: nothing), and `caps`
    what each position may hold of both (None: any amount). With `split` false the backward stays whole. Multiply times by `unit` to get those of
    the costs it was made from.
    """

    positions: int
    microbatches: int
    placement: tuple[int, ...]
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    hop: int
    sizes: tuple[int, ...]
    caps: tuple[int, ...] | None = None
    split: bool = True
    unit: Fraction = Fraction(1)
    between: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def size(self) -> int:
        """Operations of one kind."""
        return self.stages * self.microbatches

    @cached_property
    def operations(self) -> int:
        """Operations of a step."""
        return self.size * (3 if self.split else 2)

    @cached_property
    def stages_at(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each position, ascending."""
        return tuple(tuple(s for s, at in enumerate(self.placement) if at == position) for position in range(self.positions))

    @cached_property
    def lags(self) -> tuple[int, ...]:
        """lags[s]: the latency between stage s - 1 and stage s; 0 for stage 0."""
        return tuple(self.hop if s and self.placement[s - 1] != at else 0 for s, at in enumerate(self.placement))

    @cached_property
    def durations(self) -> list[int]:
        """Time of each operation."""
        whole = [a + b for a, b in zip(self.backward_input, self.backward_weight, strict=True)]
        kinds = (self.forward, self.backward_input, self.backward_weight, whole)
        return [times[stage] for times in kinds for stage in range(self.stages) for _ in range(self.microbatches)]

    @cached_property
    def slots(self) -> list[int]:
        """Where each operation puts its result: a B gives the same gradient as an I."""
        size = self.size
        return [*range(3 * size), *range(size, 2 * size)]

    @cached_property
    def needs(self) -> list[int]:
        """The result that each operation waits for, from the stage before or after; what a row does first itself is not told. 4 * size stands for none."""
        m, size, last = self.microbatches, self.size, self.stages - 1
        nothing = 4 * size
        found = [nothing] * (4 * size)
        for stage in range(self.stages):
            for i in range(m):
                at = stage * m + i
                if stage:
                    found[at] = at - m
                if stage < last:
                    found[size + at] = found[3 * size + at] = size + at + m
        return found

    @cached_property
    def waits(self) -> list[int]:
        """The latency of what each operation waits for."""
        m, lags = self.microbatches, self.lags
        before = [lags[s] for s in range(self.stages) for _ in range(m)]
        after = [(*lags, 0)[s + 1] for s in range(self.stages) for _ in range(m)]
        return [*before, *after, *([0] * self.size), *after]

    @cached_property
    def holds(self) -> list[int]:
        """What each operation adds to what its position holds."""
        m = range(self.microbatches)
        sizes = [size for size in self.sizes for _ in m]
        more = [size for size in self.halves for _ in m]
        return [*sizes, *more, *(-a - b for a, b in zip(sizes, more, strict=True)), *(-size for size in sizes)]

    @property
    def halves(self) -> tuple[int, ...]:
        """`between` of every stage."""
        return self.between or (0,) * self.stages

    # --- candidates ---------------------------------------------------------------------------------------------------------------------

    def ends(self, rows: Ops, most: int | None = None) -> list[list[int]] | None:
        """When each operation ends, every position as early as it can; None if the rows do not progress or one ends after `most`.

        Every I and B must stand behind its F and every W behind its I: `in_order` tells.
        """
        done = [-1] * (4 * self.size + 1)
        done[-1] = 0
        needs, waits, durations, slots = self.needs, self.waits, self.durations, self.slots
        ends: list[list[int]] = [[] for _ in rows]
        at = [0] * len(rows)
        free = [0] * len(rows)
        left = [r for r, row in enumerate(rows) if row]
        while left:
            open_: list[int] = []
            moved = False
            for r in left:
                row, time, i, mine = rows[r], free[r], at[r], ends[r]
                count = len(row)
                begin = i
                while i < count:
                    op = row[i]
                    ready = done[needs[op]]
                    if ready < 0:
                        open_.append(r)
                        break
                    ready += waits[op]
                    if ready > time:  # noqa: PLR1730  a call of max would cost as much as the rest of the loop
                        time = ready
                    time += durations[op]
                    done[slots[op]] = time
                    mine.append(time)
                    i += 1
                if most is not None and time > most:
                    return None
                at[r], free[r] = i, time
                moved = moved or i > begin
            if not moved:
                return None
            open_.reverse()  # forwards flow one way, gradients the other
            left = open_
        return ends

    def makespan(self, rows: Ops, most: int | None = None) -> int | None:
        """The end of the step; None as in `ends`."""
        ends = self.ends(rows, most)
        return None if ends is None else max((row[-1] for row in ends if row), default=0)

    def peaks(self, rows: Ops) -> tuple[int, ...]:
        """The most that each position holds at once."""
        holds = self.holds.__getitem__
        return tuple(max(accumulate(map(holds, row)), default=0) for row in rows)

    def fits(self, rows: Ops) -> bool:
        """Whether no position holds more than it may."""
        return self.caps is None or all(peak <= cap for peak, cap in zip(self.peaks(rows), self.caps, strict=True))

    def in_order(self, rows: Ops) -> bool:
        """Whether each position does all of its operations once, and those of one stage and microbatch in the order F, I, W or F, B."""
        size = self.size
        for position, row in enumerate(rows):
            state: dict[int, int] = {}
            for op in row:
                kind, at = divmod(op, size)
                before = state.get(at, -1)
                if before != (FORWARD if kind == BACKWARD else kind - 1):
                    return False
                state[at] = WEIGHT if kind == BACKWARD else kind
            if len(state) != len(self.stages_at[position]) * self.microbatches or any(kind != WEIGHT for kind in state.values()):
                return False
            if any(self.placement[at // self.microbatches] != position for at in state):
                return False
        return True

    def changes(self, rows: Ops) -> int:
        """How often a position goes over to another kind of operation."""
        size = self.size
        return sum(a // size != b // size for row in rows for a, b in pairwise(row))

    # --- to and from schedules ------------------------------------------------------------------------------------------------------------

    def rows_of(self, schedule: Schedule) -> Ops:
        """A schedule as numbers."""
        m, size = self.microbatches, self.size
        base = {op: kind * size for kind, op in enumerate(_OPS)}
        return [[base[o.op] + o.stage * m + o.microbatch for o in row] for row in schedule.rows]

    def schedule_of(self, rows: Ops, name: str) -> Schedule:
        """Numbers as a schedule."""
        m, size = self.microbatches, self.size
        made = tuple(tuple(Operation(_OPS[op // size], op % size // m, op % m) for op in row) for row in rows)
        return Schedule(name, self.stages, m, self.placement, made)


def problem_of(
    placement: Sequence[int],
    microbatches: int,
    costs: StageCosts,
    *,
    hop: Number = 0,
    sizes: Sequence[Number] | None = None,
    caps: Sequence[Number] | None = None,
    split: bool = True,
    between: Sequence[Number] = (),
) -> Problem:
    """A problem with whole numbers from costs of any kind; times in units of their greatest common divisor, which is kept as `Problem.unit`.

    `sizes` (1 by default) and `between` (0 by default) are by stage, `caps` by position. They are rounded to whole numbers, caps down and the others
    up. Raises ScheduleError for lists of the wrong length, negative numbers, or no microbatch.
    """
    stages, positions = len(placement), max(placement, default=-1) + 1
    sizes = (1,) * stages if sizes is None else sizes
    if microbatches < 1 or not stages:
        raise ScheduleError(f"a schedule needs stages and microbatches, not {stages} and {microbatches}")
    if any(len(part) != stages for part in (costs.forward, costs.backward_input, costs.backward_weight, sizes, between or sizes)):
        raise ScheduleError(f"costs and sizes must be given for each of {stages} stages")
    if caps is not None and len(caps) != positions:
        raise ScheduleError(f"{len(caps)} caps for {positions} positions")
    times = [Fraction(t) for t in (*costs.forward, *costs.backward_input, *costs.backward_weight, hop)]
    if min(times) < 0 or min((*sizes, *between)) < 0:
        raise ScheduleError("costs, sizes and hop must not be negative")
    scale = lcm(*(t.denominator for t in times))
    whole = [int(t * scale) for t in times]
    shared = gcd(*whole) or 1
    forward, gradient, weight = (tuple(t // shared for t in whole[k * stages : (k + 1) * stages]) for k in range(3))
    return Problem(
        positions=positions,
        microbatches=microbatches,
        placement=tuple(placement),
        forward=forward,
        backward_input=gradient,
        backward_weight=weight,
        hop=whole[-1] // shared,
        sizes=tuple(_up(size) for size in sizes),
        caps=None if caps is None else tuple(int(cap // 1) for cap in caps),
        split=split,
        between=tuple(_up(size) for size in between),
        unit=Fraction(shared, scale),
    )


def _up(size: Number) -> int:
    return -int(-size // 1)
