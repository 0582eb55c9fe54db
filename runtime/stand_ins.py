"""What a module gives that lives on another rank: NaN where its weights would decide, the true values where they would not.

The module runs once with one NaN in place of each parameter. A value that wrongly depends on it shows at once, and masks, positions and shapes
are what they are everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["StandIns", "hollow"]


@frozen
class _Replay:
    """What a stand-in gave for inputs of one kind: for each leaf of its output a tensor of NaN, ("input", k), or a plain value."""

    leaves: tuple[Any, ...]
    spec: TreeSpec


@define(eq=False)
class StandIns:
    """Stand-ins for modules by name; what all is NaN need not run again for inputs of the same kind. `running` tells whether one runs now."""

    running: bool = False
    _replays: dict[object, _Replay | None] = field(factory=dict)

    def __call__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the module as far as it is known here."""
        inputs, _ = tree_flatten((args, kwargs))
        key = (name, module.training, tuple(_kind(leaf) for leaf in inputs))
        replay = self._replays.get(key)
        if replay is not None:
            leaves = [_fresh(leaf, inputs) for leaf in replay.leaves]
            return tree_unflatten(leaves, replay.spec)
        output = self._without_weights(module, args, kwargs, inputs)
        if key not in self._replays:
            self._replays[key] = _make_replay(output, inputs)
        return output

    def _without_weights(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]) -> Any:
        device = next((leaf.device for leaf in inputs if isinstance(leaf, Tensor)), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        saved = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        try:
            for m, parameters, buffers in saved:
                m._parameters.update({n: hollow(p, device) for n, p in parameters.items() if p is not None})
                m._buffers.update({n: b.clone() for n, b in buffers.items() if b is not None})
            self.running = True
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                return module.forward(*args, **kwargs)
        finally:
            self.running = False
            for m, parameters, buffers in saved:
                m._parameters.update(parameters)
                m._buffers.update(buffers)


def hollow(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """One NaN in the shape of a parameter (0 where the dtype has no NaN)."""
    floating = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    scalar = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype, device=device)
    return nn.Parameter(scalar.expand(parameter.shape), requires_grad=False)


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _make_replay(output: Any, inputs: list[Any]) -> _Replay | None:
    """What to give next time without running; None if some value depends on more than shapes."""
    places = {id(leaf): k for k, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
    leaves, spec = tree_flatten(output)
    kept: list[Any] = []
    for leaf in leaves:
        if id(leaf) in places:
            kept.append(("input", places[id(leaf)]))
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().all()):
            kept.append(leaf.clone())
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kept.append(leaf)
        else:
            return None
    return _Replay(tuple(kept), spec)


def _fresh(leaf: Any, inputs: list[Any]) -> Any:
    if isinstance(leaf, tuple):
        return inputs[leaf[1]]
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
