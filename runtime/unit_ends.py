"""The end of a stage whose last backward came in halves: its FSDP2 units are told to reduce, which no hook of theirs does.

FSDP2 reduces a unit when the gradient of its input is known. That is in the input half, when the weights of the unit have nothing yet. So
reducing is off until the weight half has finished with a unit, and is then called for. torch has no public name for it; its own pipelines reach for the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

__all__ = ["UnitEnds", "accumulate", "end_backward", "reduce_now", "set_reduction"]


class UnitEnds:
    """Reduces `units` in their order, which must be the same on all ranks: each as soon as it and those before it have all gradients.

    `weights` are those whose gradients are still to come; `reduce` is called with each unit, `finish` with none at the end.
    """

    def __init__(
        self, units: Sequence[FSDPModule], weights: Iterable[Tensor], reduce: Callable[[FSDPModule], None], finish: Callable[[], None]
    ) -> None:
        awaited = {id(w) for w in weights}
        self._left = [(unit, awaited.intersection(_gathered(unit))) for unit in reversed(units)]
        self._reduce = reduce
        self._finish = finish

    def done(self, weights: Iterable[Tensor]) -> None:
        """The gradients of these are complete."""
        found = {id(w) for w in weights}
        for left in self._left:
            left[1].difference_update(found)
        while self._left and not self._left[-1][1]:
            self._reduce(self._left.pop()[0])

    def finish(self) -> None:
        """All are complete."""
        while self._left:
            self._reduce(self._left.pop()[0])
        self._finish()


def reduce_now(unit: FSDPModule) -> None:
    """Begin to reduce what the unit has of gradients, and reshard it, as far as its switches say so."""
    for group in _groups(unit):
        group.post_backward()


def accumulate(unit: FSDPModule) -> None:
    """Add the gradients of one microbatch to those before in the format in which they are reduced."""
    for group in _groups(unit):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def end_backward(root: FSDPModule) -> None:
    """What FSDP2 does at the end of a backward: the state of all units is as between steps."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def set_reduction(unit: FSDPModule, reduction: object) -> None:
    """What reduces the gradients of a unit. `set_custom_reduce_scatter` refuses a unit whose parameters are sharded over different axes."""
    for group in _groups(unit):
        group._reduce_scatter_comm = reduction


def _groups(unit: FSDPModule) -> Sequence[Any]:
    return unit._get_fsdp_state()._fsdp_param_groups


def _gathered(unit: FSDPModule) -> set[int]:
    """The parameters that a forward used, by id."""
    held = (p for group in _groups(unit) for p in group.fsdp_params)
    return {id(p._unsharded_param) for p in held if hasattr(p, "_unsharded_param")}
