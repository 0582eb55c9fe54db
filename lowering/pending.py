"""What a spec asks for that this version parses, checks and plans around, and does not execute."""

from __future__ import annotations

from collections.abc import Iterator

from pdsl.grammar.errors import NotExecuted
from pdsl.lowering.mesh import SHARD, TENSOR, axis_roles
from pdsl.lowering.spec import SizeRange, Spec

__all__ = ["pending", "require_executable"]

_STOPPING = ("memory.", "shard")


def require_executable(pending: tuple[str, ...]) -> None:
    """Raises NotExecuted if a run without what is pending would compute other numbers, or need other memory, than the spec says.

    `pending` are the entries of `Plan.pending`. The rest (what is done about losses, freezing, saving) leaves an undisturbed run as it is.
    """
    stopping = [text for text in pending if text.startswith(_STOPPING)]
    if stopping:
        raise NotExecuted(f"the spec asks for what this version checks and plans but does not execute: {'; '.join(stopping)}")


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
