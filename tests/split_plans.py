"""Plans whose backward comes in halves, made from plans with whole backwards."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from pdsl.lowering.plan import Plan, Template
from pdsl.lowering.schedule import Op, Operation, Schedule

__all__ = ["in_halves", "split_schedule"]


def split_schedule(schedule: Schedule, lag: int = 1) -> Schedule:
    """Every B becomes an I at its place and a W that comes `lag` backwards later, the rest of them at the end of the row."""

    def row(operations: tuple[Operation, ...]) -> Iterator[Operation]:
        waiting: list[Operation] = []
        for o in operations:
            if o.op is not Op.BACKWARD:
                yield o
                continue
            yield evolve(o, op=Op.BACKWARD_INPUT)
            waiting.append(evolve(o, op=Op.BACKWARD_WEIGHT))
            if len(waiting) > lag:
                yield waiting.pop(0)
        yield from waiting

    return evolve(schedule, name="halves", rows=tuple(tuple(row(r)) for r in schedule.rows))


def in_halves(plan: Plan, lag: int = 1) -> Plan:
    """The same plan with every backward in halves."""

    def template(t: Template) -> Template:
        return evolve(t, schedule=split_schedule(t.schedule, lag))

    return evolve(plan, templates=tuple(map(template, plan.templates)))
