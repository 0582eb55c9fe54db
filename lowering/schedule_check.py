"""What is wrong with the rows of a schedule.

Findings name position, place in the row and operation, all counted from 0: "position 1, action 6: W of stage 1, microbatch 2 before its I".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from pdsl.lowering.schedule import Op, Operation, Schedule
from pdsl.lowering.schedules import SCHEDULES, placed
from pdsl.lowering.simulate import StageCosts, StuckSchedule, Where, at_action, simulate

__all__ = ["Finding", "check_schedule", "findings_of"]


@frozen
class Finding:
    """What is wrong at a place in the rows: at an operation, in a whole row (`index` None), or in no row (`position` -1). `text` names the place."""

    position: int
    index: int | None
    text: str

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts findings as a reader of the rows meets them."""
        return (self.position, self.index is None, self.index or 0)


def check_schedule(schedule: Schedule) -> tuple[str, ...]:
    """All findings about a schedule in words; empty if it is valid."""
    return tuple(f.text for f in findings_of(schedule))


def findings_of(schedule: Schedule, where: Where = at_action) -> tuple[Finding, ...]:
    """All findings about a schedule, with places in the words that `where` has for them.

    Checked are the placement (each stage on one position, as the schedule's family wants it), the operations (each forward once, each backward
    once and either whole or split, on the stage's own position), their order in the row, and, if all that holds, that the rows progress.
    """
    placement = tuple(Finding(-1, None, text) for text in _placement(schedule, where))
    if placement:
        return placement
    rows = _Rows(schedule, where)
    findings = (*rows.owners(), *rows.coverage(), *rows.order())
    if findings:
        return findings
    try:
        simulate(schedule, StageCosts.equal(schedule.stages))
    except StuckSchedule as stuck:
        return tuple(Finding(w.position, w.index, f"{w.text(where)}: these wait for each other in a circle") for w in stuck.waiting)
    return ()


def _placement(schedule: Schedule, where: Where) -> Iterator[str]:
    if len(schedule.placement) != schedule.stages:
        yield f"{len(schedule.placement)} placements for {schedule.stages} stages"
        return
    for stage, position in enumerate(schedule.placement):
        if not 0 <= position < schedule.positions:
            yield f"stage {stage} is placed on position {position}, but there are {schedule.positions} positions"
            return
    for position in range(schedule.positions):
        if not schedule.stages_at(position):
            yield f"{where(position, None)} has no stage"
    family = SCHEDULES.get(schedule.name)
    if family is None:
        return
    kind = "V" if family.placement == "v" else "loop"
    wanted = placed(family.placement, schedule.positions, schedule.stages // schedule.positions)
    if schedule.placement != wanted:
        yield f"{schedule.name} needs {kind} placement: stages on positions {_list(wanted)}, not {_list(schedule.placement)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@frozen(slots=False)
class _Rows:
    """The rows of a schedule whose placement is sound."""

    schedule: Schedule
    where: Where

    def _at(self, position: int, index: int, o: Operation, text: str) -> Finding:
        return Finding(position, index, f"{self.where(position, index)}: {o.op.value} of stage {o.stage}, microbatch {o.microbatch}{text}")

    def owners(self) -> Iterator[Finding]:
        schedule = self.schedule
        for position, row in enumerate(schedule.rows):
            for index, o in enumerate(row):
                if not 0 <= o.stage < schedule.stages:
                    yield self._at(position, index, o, f": stages are 0 to {schedule.stages - 1}")
                elif not 0 <= o.microbatch < schedule.microbatches:
                    yield self._at(position, index, o, f": microbatches are 0 to {schedule.microbatches - 1}")
                elif schedule.placement[o.stage] != position:
                    yield self._at(position, index, o, f": stage {o.stage} lives on {self.where(schedule.placement[o.stage], None)}")

    def coverage(self) -> Iterator[Finding]:
        seen: dict[tuple[Op, int, int], tuple[int, int]] = {}
        for position, row in enumerate(self.schedule.rows):
            for index, o in enumerate(row):
                first = seen.setdefault((o.op, o.stage, o.microbatch), (position, index))
                if first != (position, index):
                    yield self._at(position, index, o, f" a second time, first at {self.where(*first)}")
        for stage in range(self.schedule.stages):
            for microbatch in range(self.schedule.microbatches):
                yield from self._complete(self.schedule.placement[stage], stage, microbatch, seen)

    def _complete(self, position: int, stage: int, microbatch: int, seen: dict[tuple[Op, int, int], tuple[int, int]]) -> Iterator[Finding]:
        has = {op: seen.get((op, stage, microbatch)) for op in Op}
        what = f"of stage {stage}, microbatch {microbatch}"
        if has[Op.FORWARD] is None:
            yield Finding(position, None, f"{self.where(position, None)}: no F {what}")
        whole, gradient, weight = has[Op.BACKWARD], has[Op.BACKWARD_INPUT], has[Op.BACKWARD_WEIGHT]
        if whole is None and gradient is None and weight is None:
            yield Finding(position, None, f"{self.where(position, None)}: no backward {what}, neither B nor I and W")
        elif whole is not None:
            for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                at = has[op]
                if at is not None:
                    beside = f" beside B at {self.where(*whole)}: whole or split, not both"
                    yield self._at(*at, Operation(op, stage, microbatch), beside)
        elif weight is None and gradient is not None:
            yield self._at(*gradient, Operation(Op.BACKWARD_INPUT, stage, microbatch), " without a W")
        elif gradient is None and weight is not None:
            yield self._at(*weight, Operation(Op.BACKWARD_WEIGHT, stage, microbatch), " without an I")

    def order(self) -> Iterator[Finding]:
        """Operations of one stage and microbatch that come before what they need. One that is missing altogether is told by `coverage`."""
        rows = self.schedule.rows
        present = {(o.op, o.stage, o.microbatch) for row in rows for o in row}
        for position, row in enumerate(rows):
            done: set[tuple[Op, int, int]] = set()
            for index, o in enumerate(row):
                done.add((o.op, o.stage, o.microbatch))
                if o.op is Op.FORWARD:
                    continue
                first = Op.BACKWARD_INPUT if o.op is Op.BACKWARD_WEIGHT else Op.FORWARD
                need = (first, o.stage, o.microbatch)
                if need in present and need not in done:
                    yield self._at(position, index, o, f" before its {first.value}")
