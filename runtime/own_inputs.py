"""Copies of what blocks write into, inside of what FSDP2 hooks to them.

FSDP2 hands its units views of their inputs, made by a function of its own; autograd forbids to write into those. Where nobody but the block reads
an input afterwards, a copy does as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pdsl.lowering.facts import LayerKind
from pdsl.lowering.plan import Plan

__all__ = ["copy_written_inputs"]


def copy_written_inputs(plan: Plan, model: nn.Module, layers: Iterable[int]) -> None:
    """Let the blocks of these layers that write into their inputs write into copies, in place."""
    for index in layers:
        layer = plan.facts.layers[index]
        if layer.kind is LayerKind.BLOCK and layer.writes:
            module = model.get_submodule(layer.name)
            module.forward = _copying(module.forward)


def _copying(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_own, (args, kwargs))
        return forward(*args, **kwargs)

    return run


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter) else leaf
