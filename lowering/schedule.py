"""What a pipeline schedule is: a list of operations per position, as plain data.

A *position* is one island of a pipeline, counted from 0. A *stage* is a run of layers; `placement` says on which position each stage lives, so
that one position may hold several stages. What travels between positions is a `Transfer`; rows with sends and receives are `Rows`. All indices (stage, microbatch, position, place in a row) count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from fractions import Fraction
from typing import Literal, TypeAlias

from attrs import frozen

from pdsl.grammar.errors import PlanError

__all__ = [
    "Item",
    "Number",
    "Op",
    "Operation",
    "Receive",
    "Row",
    "Rows",
    "Schedule",
    "ScheduleError",
    "Send",
    "Transfer",
    "loop_placement",
    "peak_activations",
    "peak_in_flight",
    "repeat",
    "v_placement",
]

Number: TypeAlias = int | Fraction | float
"""Times and sizes. With int and Fraction all results are exact."""


class ScheduleError(PlanError, ValueError):
    """No such schedule exists, or its rows cannot be run."""


class Op(Enum):
    """What a position computes. `BACKWARD` is the whole backward pass; the split form is `BACKWARD_INPUT`, then `BACKWARD_WEIGHT`."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


_OPERATION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


@frozen
class Operation:
    """One computation of one stage on one microbatch. Its text is stage, letter, microbatch: `2F0`."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Read the text form. Raises ScheduleError with the text if it has another form."""
        match = _OPERATION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text.strip()!r} is no operation: expected stage, one of F B I W, microbatch, as in '2F0'")
        return cls(Op(match[2]), int(match[1]), int(match[3]))


@frozen
class Schedule:
    """Who computes what in which order: `rows[position]` is executed from left to right.

    `placement[stage]` is the position of a stage. Microbatches are 0..microbatches-1, local to the pipeline. Building one checks nothing:
    rows may come from anywhere, `schedule_check.check_schedule` says what is wrong with them.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Operation, ...], ...]

    @property
    def positions(self) -> int:
        return len(self.rows)

    def stages_at(self, position: int) -> tuple[int, ...]:
        """The stages that live on a position, in ascending order."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == position)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


@frozen
class Transfer:
    """One activation (from the stage before) or gradient (from the stage after) of one microbatch, from one position to another."""

    kind: Literal["activation", "gradient"]
    from_stage: int
    to_stage: int
    microbatch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, stage {self.from_stage} to {self.to_stage}"


@frozen
class Send:
    """The sender's part of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer} (to position {self.transfer.receiver})"


@frozen
class Receive:
    """The receiver's part of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"receive {self.transfer} (from position {self.transfer.sender})"


Item: TypeAlias = Operation | Send | Receive
Row: TypeAlias = tuple[Item, ...]
"""What one position does, in order: computations, sends and receives."""

Rows: TypeAlias = tuple[Row, ...]
"""One row of items per position."""


def loop_placement(positions: int, per_position: int = 1) -> tuple[int, ...]:
    """Stage s on position s % positions: 0 1 2 0 1 2."""
    return tuple(range(positions)) * per_position


def v_placement(positions: int) -> tuple[int, ...]:
    """Two stages per position, there and back: 0 1 2 2 1 0. First and last stage share position 0."""
    return (*range(positions), *reversed(range(positions)))


def repeat(schedule: Schedule, rounds: int) -> Schedule:
    """The schedule `rounds` times one after another, the microbatches of round r counted from r * schedule.microbatches.

    There is no barrier between rounds, but where the first position begins and ends a round the next pays the whole bubble again. For a
    schedule that can take all microbatches in the same memory, `ScheduleFamily.accumulate` is faster. Raises ScheduleError for fewer than one round.
    """
    if rounds < 1:
        raise ScheduleError(f"a schedule needs at least one round, not {rounds}")
    if rounds == 1:
        return schedule
    m = schedule.microbatches
    rows = tuple(tuple(Operation(o.op, o.stage, r * m + o.microbatch) for r in range(rounds) for o in row) for row in schedule.rows)
    return Schedule(schedule.name, schedule.stages, rounds * m, schedule.placement, rows)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most activations, in units of one stage and one microbatch, that each position holds at once.

    One is held from its F to the end of its B, or of its W where the backward is split. It depends on the order of the row alone.
    """
    return tuple(int(peak) for peak, _ in peak_activations(schedule, (1,) * schedule.stages))


def peak_activations(schedule: Schedule, sizes: Sequence[Number]) -> tuple[tuple[Number, int], ...]:
    """Per position the largest sum of held activations, and the index in the row of the forward that reaches it first (-1 for an empty row).

    `sizes[stage]` is what one microbatch leaves behind on a stage, in any one unit, such as bytes.
    """
    peaks = []
    for row in schedule.rows:
        held: Number = 0
        peak: tuple[Number, int] = (0, -1)
        for index, o in enumerate(row):
            if o.op is Op.FORWARD:
                held = held + sizes[o.stage]
                if held > peak[0]:
                    peak = (held, index)
            elif o.op is not Op.BACKWARD_INPUT:
                held = held - sizes[o.stage]
        peaks.append(peak)
    return tuple(peaks)
