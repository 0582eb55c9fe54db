"""The picture of a schedule in the terminal: one row per position, time to the right, every cell as long as it takes.

A cell begins with its name, `F0` for the forward of microbatch 0; where a position runs several stages, the stage comes first: `2F0`. The rest of a
forward is drawn with a thin line, of a backward with a thick one, and what is idle is dotted.
"""

from __future__ import annotations

from fractions import Fraction

from pdsl.lowering.schedule import Number, Op, Operation, Schedule
from pdsl.lowering.simulate import Timeline
from pdsl.render.terminal import PLAIN, Terminal

__all__ = ["draw_schedule"]

_MOST_ROWS = 12
_STYLE = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward", Op.BACKWARD_WEIGHT: "magenta"}


def draw_schedule(schedule: Schedule, timeline: Timeline, terminal: Terminal = PLAIN, *, indent: int = 2) -> list[str]:
    """The rows of a schedule as lines of text, never wider than the terminal.

    A cell without room for its name keeps its letter; of many positions the first and the last are shown.
    """
    shown = _shown(schedule.positions)
    label = max(len(str(p)) for p in shown)
    scale = _scale(schedule, timeline, terminal.width - indent - label - 3)
    edge = terminal.symbol("│", "|")
    lines = []
    for i, position in enumerate(shown):
        if i and shown[i - 1] != position - 1:
            lines.append(" " * indent + f"{':':>{label}}   {position - shown[i - 1] - 1} more")
        lines.append(" " * indent + f"{position:>{label}} {edge}{_row(schedule, timeline, position, scale, terminal)}{edge}")
    return lines


def _shown(positions: int) -> list[int]:
    if positions <= _MOST_ROWS:
        return list(range(positions))
    return [*range(_MOST_ROWS - 4), *range(positions - 3, positions)]


def _name(o: Operation, schedule: Schedule) -> str:
    return str(o) if schedule.stages > schedule.positions else f"{o.op.value}{o.microbatch}"


def _scale(schedule: Schedule, timeline: Timeline, room: int) -> Fraction:
    """Columns per unit of time: enough for every name and a column between if there is room, else all there is."""
    makespan = Fraction(timeline.makespan)
    if not makespan:
        return Fraction(0)
    need = Fraction(min(room, 60)) / makespan
    for row, starts, ends in zip(schedule.rows, timeline.start, timeline.end, strict=True):
        for o, start, end in zip(row, starts, ends, strict=True):
            if end > start:
                need = max(need, Fraction(len(_name(o, schedule)) + 1) / Fraction(end - start))
    return min(Fraction(room) / makespan, need)


def _row(schedule: Schedule, timeline: Timeline, position: int, scale: Fraction, terminal: Terminal) -> str:
    idle = terminal.symbol("·", ".")
    text, at = "", 0
    for o, start, end in zip(schedule.rows[position], timeline.start[position], timeline.end[position], strict=True):
        first, stop = max(at, _column(start, scale)), _column(end, scale)
        text += terminal.paint(idle * (first - at), "dim")
        text += terminal.paint(_cell(_name(o, schedule), o.op, stop - first, terminal), _STYLE[o.op])
        at = max(at, stop)
    return text + terminal.paint(idle * (_column(timeline.makespan, scale) - at), "dim")


def _column(time: Number, scale: Fraction) -> int:
    return int(Fraction(time) * scale + Fraction(1, 2))


def _cell(name: str, op: Op, width: int, terminal: Terminal) -> str:
    """A cell of so many columns: its name, or only its letter, then a line, and a blank at the end where there is room."""
    head = name if len(name) <= width else op.value
    fill = terminal.symbol("─", "-") if op is Op.FORWARD else terminal.symbol("━", "=")
    blank = " " if width > len(name) else ""
    return (head + fill * (width - len(head) - len(blank)) + blank)[: max(0, width)]
