"""Sends and receives between positions, placed from one global order of transfers.

A transfer is one event that two positions take part in. If every position lists its events in the order of one common sequence, no circle of
waiting can arise, whatever the backend's queues are, and both ends of a pair list the same transfers in the same order, so that messages
without tags cannot be swapped. `deadlock.find_deadlock` shows it for given rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pdsl.lowering.deadlock import Semantics, find_deadlock
from pdsl.lowering.schedule import Item, Number, Op, Operation, Receive, Row, Rows, Schedule, Send, Transfer
from pdsl.lowering.simulate import Timeline

__all__ = ["Item", "Receive", "Row", "Rows", "Semantics", "Send", "Transfer", "find_deadlock", "transfer_after", "transfer_order"]


def transfer_after(schedule: Schedule, operation: Operation) -> Transfer | None:
    """What must travel after an operation: nothing for W, at either end of the pipeline, and between stages on one position.

    A forward feeds the next stage, a whole or input backward the stage before.
    """
    stage, place = operation.stage, schedule.placement
    if operation.op is Op.BACKWARD_WEIGHT:
        return None
    forward = operation.op is Op.FORWARD
    target = stage + 1 if forward else stage - 1
    if not 0 <= target < schedule.stages or place[target] == place[stage]:
        return None
    return Transfer("activation" if forward else "gradient", stage, target, operation.microbatch, place[stage], place[target])


def transfer_order(schedule: Schedule, timeline: Timeline) -> Rows:
    """The rows of a schedule with sends and receives inserted.

    All operations are visited in one topological order, by simulated end, start and position. Each is appended to its row; what it produces is at
    once appended as a send to its own row and as a receive to the row of the other position. So receives stand early: post them there and
    wait where the operation needs them. The schedule must be valid and `timeline` its simulation.
    """
    rows: list[list[Item]] = [[] for _ in schedule.rows]
    wanted = {(o.op is Op.FORWARD, o.stage, o.microbatch) for row in schedule.rows for o in row if o.op is not Op.BACKWARD_WEIGHT}
    for position, operation in _visit(schedule, timeline):
        rows[position].append(operation)
        transfer = transfer_after(schedule, operation)
        # A gradient goes only where a backward pass waits for it: the stage before may be frozen.
        if transfer is None or (transfer.kind == "activation", transfer.to_stage, transfer.microbatch) not in wanted:
            continue
        rows[position].append(Send(transfer))
        rows[transfer.receiver].append(Receive(transfer))
    return tuple(tuple(row) for row in rows)


def _visit(schedule: Schedule, timeline: Timeline) -> Iterator[tuple[int, Operation]]:
    """Operations by (end, start, position), but never before what they need: with costs of zero the times alone do not order them."""
    at = {(o.op, o.stage, o.microbatch): (p, i) for p, row in enumerate(schedule.rows) for i, o in enumerate(row)}
    users: dict[tuple[int, int], list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    ready: list[tuple[Number, Number, int, int]] = []
    for position, row in enumerate(schedule.rows):
        for index, o in enumerate(row):
            here = (position, index)
            sources = [at[key] for key in _sources(o) if key in at]
            if index:
                sources.append((position, index - 1))
            missing[here] = len(sources)
            for source in sources:
                users.setdefault(source, []).append(here)
    for (position, index), count in missing.items():
        if not count:
            ready.append((timeline.end[position][index], timeline.start[position][index], position, index))
    heapify(ready)
    while ready:
        _, _, position, index = heappop(ready)
        yield position, schedule.rows[position][index]
        for p, i in users.get((position, index), ()):
            missing[p, i] -= 1
            if not missing[p, i]:
                heappush(ready, (timeline.end[p][i], timeline.start[p][i], p, i))


def _sources(o: Operation) -> tuple[tuple[Op, int, int], ...]:
    """Operations on other rows or stages whose result this one reads, as far as the schedule has them."""
    if o.op is Op.FORWARD:
        return ((Op.FORWARD, o.stage - 1, o.microbatch),)
    if o.op is Op.BACKWARD_WEIGHT:
        return ()
    return ((Op.BACKWARD, o.stage + 1, o.microbatch), (Op.BACKWARD_INPUT, o.stage + 1, o.microbatch))
