"""What a spec asks for that this version parses, checks and plans around, and does not execute."""

from __future__ import annotations

from collections.abc import Iterator

from pdsl.lowering.spec import LayoutSlots, SizeRange, Spec

__all__ = ["pending"]


def pending(spec: Spec) -> Iterator[tuple[str, str]]:
    """What a spec asks for that this version does not execute: dotted path and a few words."""
    if spec.fault_budget is not None and spec.fault_budget.lose > 0:
        yield (
            "fault_budget.lose",
            f"surviving the loss of {spec.fault_budget.lose} {spec.fault_budget.unit}{'s' if spec.fault_budget.lose > 1 else ''}",
        )
    if spec.freeze is not None:
        yield "freeze", "freezing"
    if spec.checkpoint is not None:
        yield "checkpoint", "saving checkpoints"
    if spec.memory.recompute is not None:
        yield "memory.recompute", "recomputing activations"
    if spec.memory.offload != "none":
        yield "memory.offload", f"offloading {spec.memory.offload}"
    for key in ("params", "reduce", "output"):
        if getattr(spec.precision, key) != "fp32":
            yield f"precision.{key}", f"precision {getattr(spec.precision, key)}"
    if spec.train is not None and spec.train.last == "pad":
        yield "train.last", "padding the last batch"
    for axis in spec.mesh.axes:
        if isinstance(axis.size, SizeRange):
            yield f"mesh.{axis.name}", f"an elastic axis ({axis.size.low} to {axis.size.high})"
    for rule in spec.shard:
        if any(isinstance(t, LayoutSlots) and len({s for s in t.slots if s}) > 1 for t in rule.terms):
            yield "shard", "splitting one parameter along two dims"
            break
