"""A schedule from a file: one line for each position, one cell for each operation, as torch's pipelining writes and reads them.

Cells are `0F0`, `1I2`, `1W2`, `2B3` (stage, letter, microbatch), or two operations that torch overlaps, `(0F1;3B0)OVERLAP_F_B`; empty cells wait. Everything
else comes from the cells: positions, stages and where they live, microbatches. Cells of communication (`SEND_F`, `UNSHARD` and so on) are passed
over: transfers are placed from one global order, which cannot hang, and parameters are gathered as the plan says. Rows and columns count from 1.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from attrs import frozen

from pdsl.lowering.schedule import Op, Operation, Schedule, ScheduleError
from pdsl.lowering.schedule_check import findings_of

__all__ = ["RowsFile", "read_rows"]

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_MOST_CELLS = 2_000_000


@frozen
class RowsFile:
    """What a file of rows says. `findings` are what is wrong, in the order of the file; if there are any there is no schedule.

    `passed_over` counts cells of communication; `first_passed` is the place and the text of the first of them.
    """

    path: str
    schedule: Schedule | None = None
    findings: tuple[str, ...] = ()
    passed_over: int = 0
    first_passed: str = ""

    @property
    def split(self) -> bool:
        """Whether any backward is in halves."""
        return self.schedule is not None and any(o.op is Op.BACKWARD_INPUT for row in self.schedule.rows for o in row)


@frozen
class _Cell:
    """An operation and where it stands."""

    column: int
    operation: Operation


def read_rows(text: str | None, path: str) -> RowsFile:
    """The schedule in the text of a file; None stands for a file that is not there, or is no text. `path` is how messages name it. Never raises."""
    if text is None:
        return RowsFile(path, findings=(f"cannot read {path}: there is no such file, or it is no text",))
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text), strict=True)]
    except csv.Error as error:
        return RowsFile(path, findings=(f"{path} is no table of comma-separated cells: {error}",))
    while lines and not any(lines[-1]):
        lines.pop()
    if not lines:
        return RowsFile(path, findings=(f"{path} is empty: it has one line of operations for each position",))
    if sum(map(len, lines)) > _MOST_CELLS:
        return RowsFile(path, findings=(f"{path} has more than {_MOST_CELLS} cells",))
    return _read(lines, path)


def _read(lines: Sequence[Sequence[str]], path: str) -> RowsFile:
    rows: list[list[_Cell]] = []
    bad: list[tuple[int, int, str]] = []
    passed: list[str] = []
    for number, line in enumerate(lines, 1):
        row: list[_Cell] = []
        for column, cell in enumerate(line, 1):
            if not cell:
                continue
            if _COMMUNICATION.fullmatch(cell):
                passed.append(f"row {number}, column {column}: {cell}")
                continue
            found = _operations(cell)
            if found is None:
                bad.append((number, column, cell))
            else:
                row += [_Cell(column, o) for o in found]
        rows.append(row)
    cells = sum(map(len, rows))
    if bad:
        return RowsFile(path, findings=_unreadable(bad, cells, path))
    findings = tuple(_too_large(rows, cells, path)) or tuple(f"{path} row {n} has no operation" for n, row in enumerate(rows, 1) if not row)
    if findings:
        return RowsFile(path, findings=findings)
    schedule = _schedule(rows)
    told = _told(schedule, rows, path)
    if told:
        return RowsFile(path, findings=told)
    return RowsFile(path, schedule, (), len(passed), passed[0] if passed else "")


def _operations(cell: str) -> tuple[Operation, ...] | None:
    """The operations of a cell in their order; None if it has another form."""
    overlap = _OVERLAP.fullmatch(cell)
    try:
        return tuple(map(Operation.parse, overlap[1].split(";") if overlap else [cell]))
    except ScheduleError:
        return None


def _unreadable(bad: Sequence[tuple[int, int, str]], cells: int, path: str) -> tuple[str, ...]:
    number, column, cell = bad[0]
    if len(bad) > cells:
        return (f"{path} is no table of operations such as 0F0 or 1B2: row {number}, column {column} is {_shown(cell)}",)
    return tuple(
        f"{path} row {n}, column {c}: {_shown(text)} is no operation; expected stage, one of F B I W, microbatch, as in 2F0"
        for n, c, text in bad
    )


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 24 else cell[:21] + "...")


def _too_large(rows: Iterable[Sequence[_Cell]], cells: int, path: str) -> Iterable[str]:
    """Numbers that so few operations cannot fill."""
    for number, row in enumerate(rows, 1):
        for cell in row:
            o = cell.operation
            for what, value in (("stage", o.stage), ("microbatch", o.microbatch)):
                if value >= cells:
                    yield f"{path} row {number}, column {cell.column}: {o} is of {what} {value}, in a file of {cells} operation{'s' if cells != 1 else ''}"


def _schedule(rows: Sequence[Sequence[_Cell]]) -> Schedule:
    """The rows as a schedule. A stage lives where it is named first; one that no row names is on position -1."""
    operations = tuple(tuple(cell.operation for cell in row) for row in rows)
    owner: dict[int, int] = {}
    for position, row in enumerate(operations):
        for o in row:
            owner.setdefault(o.stage, position)
    stages = max(owner) + 1
    microbatches = max(o.microbatch for row in operations for o in row) + 1
    return Schedule("rows", stages, microbatches, tuple(owner.get(s, -1) for s in range(stages)), operations)


def _told(schedule: Schedule, rows: Sequence[Sequence[_Cell]], path: str) -> tuple[str, ...]:
    unnamed = [stage for stage, position in enumerate(schedule.placement) if position < 0]
    if unnamed:
        return tuple(f"{path} has no operation of stage {stage}, and its stages are 0 to {schedule.stages - 1}" for stage in unnamed)

    def where(position: int, index: int | None) -> str:
        return f"row {position + 1}" if index is None else f"row {position + 1}, column {rows[position][index].column}"

    found = sorted(findings_of(schedule, where), key=lambda f: f.order)
    return tuple(f"{path} {f.text}" for f in found)
