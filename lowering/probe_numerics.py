"""Casts at the edges of layers, for a model that computes in another format than its weights have: when it is probed, and when it runs.

They are hooks on the modules of the layers, so they hold wherever a module runs, and not for a module that another rank owns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from pdsl.grammar.patterns import Pattern
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.precision import LOW, compute_format, input_format, output_format
from pdsl.lowering.spec import PrecisionSpec

__all__ = ["Numerics", "cast_edges", "cast_floating", "cast_forward", "layer_modules", "matched_modules", "to_output"]


@frozen
class Numerics:
    """What a second probe looks at: `facts` are those of the first, in the model's own formats and without recomputation."""

    facts: ModelFacts
    precision: PrecisionSpec = field(factory=PrecisionSpec)
    casts: bool = False
    casts_output: bool = False
    recompute: tuple[str, ...] = ()

    def dtype(self, name: str) -> torch.dtype:
        """The format in which layers use a parameter."""
        return dtype_of(compute_format(self.precision, self.facts, self.facts.parameter(name)))

    def install(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the casts on a model."""
        if not self.casts:
            return []
        return cast_edges(model, self.facts, self.precision, layer_modules(self.facts), output=self.casts_output)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of torch that has a name such as `bfloat16`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def layer_modules(facts: ModelFacts) -> tuple[str, ...]:
    """The outermost modules of all layers, in the order in which they are first called."""
    return tuple(dict.fromkeys(m for layer in facts.layers for m in layer.modules if m))


def matched_modules(model: nn.Module, facts: ModelFacts, pattern: Pattern) -> tuple[str, ...]:
    """Modules that the pattern takes and that are layers or inside of one, without those inside of another of them."""
    homes = layer_modules(facts)
    found: list[str] = []
    for name, _ in model.named_modules():
        inside = any(name == m or name.startswith(f"{m}.") for m in homes)
        if name and inside and pattern.matches(name) and not any(name.startswith(f"{f}.") for f in found):
            found.append(name)
    return tuple(found)


def cast_edges(
    model: nn.Module, facts: ModelFacts, precision: PrecisionSpec, modules: Iterable[str], *, output: bool
) -> list[RemovableHandle]:
    """Cast floating inputs of the named modules to the format of the layers, and, with `output`, what the model's last module gives to that of the output."""
    target, names = input_format(precision), tuple(modules)
    handles = [_cast_inputs(model.get_submodule(name), dtype_of(target)) for name in names] if target is not None else []
    last = layer_modules(facts)[-1:]
    if output and last and last[0] in names:
        word = output_format(precision)
        module = model.get_submodule(last[0])
        handles.append(module.register_forward_hook(lambda _module, _args, given: to_output(given, word), prepend=True))
    return handles


def cast_forward(model: nn.Module, facts: ModelFacts, precision: PrecisionSpec, name: str, *, output: bool) -> None:
    """The same for a module whose forward is called without its hooks, as that of a stand-in is."""
    module, target, word = model.get_submodule(name), input_format(precision), output_format(precision)
    forward, last = module.forward, output and name == layer_modules(facts)[-1]

    def run(*args: Any, **kwargs: Any) -> Any:
        if target is not None:
            args, kwargs = (tree_map(lambda t: cast_floating(t, dtype_of(target)), given) for given in (args, kwargs))
        given = forward(*args, **kwargs)
        return to_output(given, word) if last else given

    module.forward = run


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(cast_floating(a, dtype) for a in args), {k: cast_floating(v, dtype) for k, v in kwargs.items()}

    return module.register_forward_pre_hook(cast, with_kwargs=True)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors anywhere in a value, in the given format; all else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple | list | dict):
        return tree_map(lambda leaf: cast_floating(leaf, dtype) if isinstance(leaf, Tensor) else leaf, value)
    return value


def to_output(value: Any, word: str) -> Any:
    """What a model gives, in the format of the output: `float32` widens what is lower and leaves fp64 as it is."""
    dtype = dtype_of(word)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        widens = word not in LOW
        return leaf.to(dtype) if not widens or str(leaf.dtype).removeprefix("torch.") in LOW else leaf

    return one(value) if isinstance(value, Tensor) else tree_map(one, value)
