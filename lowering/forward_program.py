"""Programs without backward: what a rank does to compute the loss of a batch that is not trained on.

The rows are those of the schedule without all that is not a forward. What is left is in an order that the whole schedule could be run in, so it
neither waits in a circle nor does a position wait longer than it must.
"""

from __future__ import annotations

from functools import lru_cache

from attrs import evolve

from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Action, ActionKind, Program
from pdsl.lowering.schedule import Op, Operation, Row, Rows, Schedule, Send
from pdsl.lowering.simulate import StageCosts, simulate
from pdsl.lowering.transfers import transfer_order

__all__ = ["forward_program", "forward_rows"]


@lru_cache(maxsize=16)
def forward_rows(schedule: Schedule) -> Rows:
    """The forwards of a schedule, with sends and receives."""
    rows = tuple(tuple(o for o in row if o.op is Op.FORWARD) for row in schedule.rows)
    alone = evolve(schedule, rows=rows)
    return transfer_order(alone, simulate(alone, StageCosts.equal(schedule.stages)))


def forward_program(plan: Plan, rank: int) -> Program:
    """The forwards of one rank with their transfers; no actions in a pipeline without microbatches. Raises KeyError for a rank outside the plan."""
    at = plan.coordinate(rank)
    pipeline = plan.pipelines[at.pipeline]
    if not pipeline.microbatches:
        return Program(rank, (), ())
    row = forward_rows(plan.templates[pipeline.template].schedule)[at.position]
    lane = pipeline.islands[at.position].index(rank)
    peers = tuple(island[lane] for island in pipeline.islands)
    return Program(rank, tuple(_actions(row, pipeline.microbatches, peers)), ())


def _actions(row: Row, microbatches: tuple[int, ...], peers: tuple[int, ...]) -> list[Action]:
    found = []
    for item in row:
        if isinstance(item, Operation):
            found.append(Action(ActionKind.FORWARD, item.stage, microbatches[item.microbatch]))
            continue
        transfer, sends = item.transfer, isinstance(item, Send)
        kind = ActionKind.SEND_ACTIVATION if sends else ActionKind.RECEIVE_ACTIVATION
        stage = transfer.from_stage if sends else transfer.to_stage
        peer = peers[transfer.receiver if sends else transfer.sender]
        found.append(Action(kind, stage, microbatches[transfer.microbatch], peer))
    return found
