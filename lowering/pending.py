"""What a spec asks for that this version parses, checks and plans around, and does not execute."""

from __future__ import annotations

from collections.abc import Iterator

from pdsl.lowering.mesh import SHARD, TENSOR, axis_roles
from pdsl.lowering.spec import SizeRange, Spec

__all__ = ["pending"]


def pending(spec: Spec) -> Iterator[tuple[str, str]]:
    """What a spec asks for that this version does not execute: dotted path and a few words."""
    budget = spec.fault_budget
    if budget is not None and budget.spares:
        yield "fault_budget.spares", "spare nodes (a node may join a run at any time)"
    if budget is not None and budget.restarts is not None:
        yield "fault_budget.restarts", "an allowance of restarts (a checkpoint is gone back to as often as it must be)"
    if spec.freeze is not None:
        yield "freeze", "freezing"
    if spec.checkpoint is not None and (spec.fault_budget is None or spec.fault_budget.lose == 0):
        yield "checkpoint", "saving checkpoints"
    roles = axis_roles(spec)
    for axis in spec.mesh.axes:
        if isinstance(axis.size, SizeRange) and roles.get(axis.name) in (SHARD, TENSOR):
            yield f"mesh.{axis.name}", f"an elastic axis ({axis.size.low} to {axis.size.high})"
