"""Tensor parallelism: which of a rank's modules are split over tensor axes, and what they exchange.

A split module holds its part of the weight as a plain parameter and its forward is replaced by one that computes with the part. Modules that are
given one and the same tensor share what was exchanged for it: three projections of an attention cost one sum in the backward, or one gather of a split sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import Box, tensor_box
from pdsl.lowering.facts import LayerKind, ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.parts import named_axes, part
from pdsl.lowering.plan import ParameterLayout, Plan
from pdsl.lowering.styles import ModuleStyle, module_style, split_modules
from pdsl.lowering.tensor_facts import SEQUENCE, TensorFacts
from pdsl.runtime.meshes import IslandMesh, mesh_dim
from pdsl.runtime.split_loss import mark_split
from pdsl.runtime.tensor_collectives import TensorGroup, enter, gather, gather_both, gather_parts, scatter_sum, slice_of, sum_of

__all__ = ["apply_tensor_parallel", "live_names"]


def live_names(model: nn.Module, plan: Plan, rank: int) -> dict[str, str]:
    """For each owned parameter (by canonical name) the name under which this rank's layers use it.

    A tied parameter has a second name in a module that may belong to another rank; there it is put on the meta device, so that sharding the
    one end does not meet the other.
    """
    found = {}
    for p in owned_parameters(plan, rank):
        used = _used_names(plan, rank, p)
        found[p.name] = used[0]
        places = {_place(model, name) for name in used}
        for name in (p.name, *p.aliases):
            owner, leaf = _place(model, name)
            if (owner, leaf) in places:
                continue  # the same module may stand in several layers
            whole = owner._parameters[leaf]
            if whole is not None:
                owner._parameters[leaf] = nn.Parameter(whole.detach().to("meta"), requires_grad=whole.requires_grad)
    return found


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and what the parameter is called in it."""
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _used_names(plan: Plan, rank: int, p: ParameterFacts) -> list[str]:
    """The names of a parameter in modules of this rank's layers; its canonical name if it is in none."""
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    layers = [plan.facts.layers[i] for s in plan.stages_of(rank) for i in range(stages[s].start, stages[s].stop)]
    modules = tuple(f"{m}." for layer in layers for m in layer.modules)
    return [n for n in (p.name, *p.aliases) if n.startswith(modules)] or [p.name]


def apply_tensor_parallel(model: nn.Module, plan: Plan, rank: int, mesh: IslandMesh) -> None:
    """Split the owned modules whose layouts name tensor axes, in place, and the sequence of the stream between the layers where the plan says so.

    `mesh` is that of the island. Raises RunError for a module that cannot be split.
    """
    groups = _Groups(plan, rank, mesh)
    facts = plan.facts.tensor or TensorFacts()
    at = plan.coordinate(rank)
    for p in owned_parameters(plan, rank):
        layout = plan.layout(p.name)
        if not layout.splits:
            continue
        bounds = tensor_box(plan, p, at.tensor)
        names = _used_names(plan, rank, p)
        _split_parameter(model, names, bounds)
        for module, leaf in (n.rpartition(".")[::2] for n in names):
            if leaf != "bias":  # a bias goes with the weight of its module
                _replace_forward(model, module, layout, bounds, groups, facts)
    _split_stream(model, plan, facts, groups)


class _Groups:
    """The groups of a rank by the tensor axes on which their members differ."""

    def __init__(self, plan: Plan, rank: int, mesh: IslandMesh) -> None:
        self.axes = plan.tensor_axes
        self._plan, self._mesh = plan, mesh
        self._tensor = plan.coordinate(rank).tensor
        self._made: dict[tuple[str, ...], TensorGroup] = {}

    def over(self, axes: tuple[str, ...]) -> TensorGroup:
        """The group over some axes; over all of them if none are named."""
        named = named_axes(self.axes, axes)
        if named not in self._made:
            index, size = part(self.axes, named, self._tensor, self._plan.tensor_size)
            ordered = named_axes(self.axes, tuple(a.name for a in self.axes if a.name in named)) if named else ()
            group = self._mesh[mesh_dim("tensor", ordered)].get_group()
            self._made[named] = TensorGroup(group, index, size, self._places(named))
        return self._made[named]

    def _places(self, named: tuple[str, ...]) -> tuple[int, ...]:
        """For each rank of a group, which are in the order of the mesh, the part that it holds where the axes are named in another order; () for the same."""
        if len(named) < 2:
            return ()
        axes = [a for a in self.axes if a.name in named]
        count = prod(a.size for a in axes)
        found = tuple(part(axes, named, at, count)[0] for at in range(count))
        return () if found == tuple(range(count)) else found


def _split_parameter(model: nn.Module, names: list[str], bounds: Box) -> None:
    """Keep the part of a parameter, under all its names."""
    owner, _, leaf = names[0].rpartition(".")
    whole = model.get_submodule(owner)._parameters[leaf]
    assert whole is not None
    local = whole.detach()[tuple(slice(a, b) for a, b in bounds)].clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(local, requires_grad=whole.requires_grad)
    made.__dict__.update(whole.__dict__)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = made


# --- modules --------------------------------------------------------------------------------------------------------------------------


def _replace_forward(model: nn.Module, name: str, layout: ParameterLayout, bounds: Box, groups: _Groups, facts: TensorFacts) -> None:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise RunError(f"{name}: only Linear and Embedding can be split over a tensor axis, this is a {type(module).__name__}")
    style = module_style(layout, groups.axes, embedding=isinstance(module, nn.Embedding))
    stream = facts.sequence
    gathers = groups.over(stream) if name in dict(facts.gathers) else None
    scatters = groups.over(stream) if name in facts.scatters else None
    inputs = groups.over(style.inputs) if style.inputs else None
    outputs = groups.over(style.outputs) if style.outputs else None
    made: Callable[[Tensor], Tensor]
    if isinstance(module, nn.Embedding):
        made = _embedding(module, style, inputs, outputs, bounds[0])
    else:
        made = _linear(module, style, inputs, outputs, gathers, scatters)
        if outputs is not None and any(loss.module == name for loss in facts.losses):
            made = _scores(made, mark_split(outputs))
    module.__dict__["forward"] = made


def _linear(
    module: nn.Linear,
    style: ModuleStyle,
    inputs: TensorGroup | None,
    outputs: TensorGroup | None,
    gathers: TensorGroup | None,
    scatters: TensorGroup | None,
) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:  # noqa: A002  as in torch
        x = input
        if gathers is not None:
            x = _shared(x, "gathered", lambda t: _gathered(t, gathers, outputs))
        if inputs is not None and style.takes_whole:
            x = _shared(x, f"part of {style.inputs}", lambda t: slice_of(t, inputs, -1))
        if outputs is not None and outputs is not gathers:
            x = _shared(x, _entering(style.outputs), lambda t: enter(t, outputs))
        y = F.linear(x, module.weight, module.bias if inputs is None else None)
        if inputs is not None:
            y = _summed(y, inputs, scatters)
            bias: Tensor | None = module.bias
            y = y if bias is None else y + bias
        return gather(y, outputs, -1) if outputs is not None and style.gives_whole else y

    return forward


def _scores(forward: Callable[[Tensor], Tensor], kind: type[Tensor]) -> Callable[[Tensor], Tensor]:
    """A forward whose output is marked as scores of some classes."""
    return lambda input: forward(input).as_subclass(kind)  # noqa: A006  as in torch


def _gathered(x: Tensor, stream: TensorGroup, outputs: TensorGroup | None) -> Tensor:
    return gather_parts(x, stream, SEQUENCE) if outputs is stream else gather(x, stream, SEQUENCE)


def _summed(y: Tensor, inputs: TensorGroup, stream: TensorGroup | None) -> Tensor:
    if stream is None:
        return sum_of(y, inputs)
    return scatter_sum(y, stream, SEQUENCE) if stream is inputs else slice_of(sum_of(y, inputs), stream, SEQUENCE)


def _shared(x: Tensor, key: str, exchange: Callable[[Tensor], Tensor]) -> Tensor:
    """What is exchanged for a tensor, once for all modules that are given it."""
    known = _exchanged(x)
    if key not in known:
        known[key] = exchange(x)
    return known[key]


def _exchanged(x: Tensor) -> dict[str, Tensor]:
    """What was exchanged for a tensor as it is now."""
    by_state: dict[tuple[int, bool], dict[str, Tensor]] = x.__dict__.setdefault("_pdsl_exchanged", {})
    return by_state.setdefault((x._version, torch.is_grad_enabled()), {})


def _entering(outputs: tuple[str, ...]) -> str:
    return f"for {', '.join(outputs)}"


def _embedding(
    module: nn.Embedding, style: ModuleStyle, inputs: TensorGroup | None, outputs: TensorGroup | None, rows: tuple[int, int]
) -> Callable[[Tensor], Tensor]:
    first, last = rows
    padding = module.padding_idx
    padding = padding - first if padding is not None and first <= padding < last else None

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        if inputs is None:
            y = F.embedding(input, module.weight, padding)
        else:
            elsewhere = (input < first) | (input >= last)
            y = F.embedding((input - first).clamp(0, last - first - 1), module.weight, padding)
            y = sum_of(y.masked_fill(elsewhere.unsqueeze(-1), 0.0), inputs)
        return gather(y, outputs, -1) if outputs is not None and style.gives_whole else y

    return forward


# --- the stream between the layers ----------------------------------------------------------------------------------------------------


def _split_stream(model: nn.Module, plan: Plan, facts: TensorFacts, groups: _Groups) -> None:
    """Split the sequence where the first block begins, and gather it where the last one ends if what follows takes it whole.

    The hooks lie on the modules themselves: where another rank owns a block they do not run, and what comes over the wire is split already.
    """
    if not facts.sequence:
        return
    group = groups.over(facts.sequence)
    blocks = [layer for layer in plan.facts.layers if layer.kind is LayerKind.BLOCK]
    entering = {plan.facts.layers[e.layer].inputs[e.index].leaf: e.dim for e in facts.enters}
    leaving = dict(facts.exits)

    def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([slice_of(t, group, entering[i]) if i in entering else t for i, t in enumerate(leaves)], spec)
        return args, kwargs

    def leaves_(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        return tree_unflatten([gather(t, group, leaving[i]) if i in leaving else t for i, t in enumerate(leaves)], spec)

    styled = split_modules(plan.facts.parameters, plan.layouts)
    for name, where in facts.gathers:
        if name not in styled:  # those gather by themselves
            model.get_submodule(name).register_forward_pre_hook(_giving_whole(group, facts.sequence, where), with_kwargs=True)
    model.get_submodule(blocks[0].name).register_forward_pre_hook(enters, with_kwargs=True)
    if leaving:
        model.get_submodule(blocks[-1].name).register_forward_hook(leaves_)


def _giving_whole(group: TensorGroup, axes: tuple[str, ...], where: tuple[int, ...]) -> Callable[..., Any]:
    """A hook that gathers the sequence of some arguments. Projections that split their outputs over the same axes find theirs made, for one exchange."""

    def whole(tensor: Tensor) -> Tensor:
        found, partial = gather_both(tensor, group, SEQUENCE)
        _exchanged(found)[_entering(axes)] = partial
        return found

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([whole(t) if i in where else t for i, t in enumerate(leaves)], spec)
        return args, kwargs

    return before
