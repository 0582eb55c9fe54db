"""Tensor parallelism: which of a rank's modules are split over the tensor coordinate, and how, in torch's styles."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from pdsl.grammar.errors import RunError
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import ParameterLayout, Plan

__all__ = ["apply_tensor_parallel", "live_names"]


def live_names(model: nn.Module, plan: Plan, rank: int) -> dict[str, str]:
    """For each owned parameter (by canonical name) the name under which this rank's layers use it.

    A tied parameter has a second name in a module that may belong to another rank; there it is put on the meta device, so that sharding the
    one end does not meet the other.
    """
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    layers = [plan.facts.layers[i] for s in plan.stages_of(rank) for i in range(stages[s].start, stages[s].stop)]
    modules = tuple(f"{m}." for layer in layers for m in layer.modules)
    found = {}
    for p in owned_parameters(plan, rank):
        names = (p.name, *p.aliases)
        used = [n for n in names if n.startswith(modules)] or [p.name]
        found[p.name] = used[0]
        for name in names:
            if name in used:
                continue
            owner, _, leaf = name.rpartition(".")
            whole = model.get_submodule(owner)._parameters[leaf]
            if whole is not None:
                model.get_submodule(owner)._parameters[leaf] = nn.Parameter(whole.detach().to("meta"), requires_grad=whole.requires_grad)
    return found


def apply_tensor_parallel(model: nn.Module, plan: Plan, rank: int, mesh: DeviceMesh, names: Mapping[str, str]) -> None:
    """Split the owned modules whose layouts name the tensor axis, in place.

    `colwise` and `rowwise` are the two halves of a pair and leave the tensor between them split; a layout in slots (`[tp, _]`) says only
    where the weight lies, so its module takes and gives whole tensors.
    """
    for p in owned_parameters(plan, rank):
        layout = plan.layout(p.name)
        module, _, leaf = names[p.name].rpartition(".")
        if layout.tensor_dim is None or leaf == "bias":
            continue  # a bias goes with the weight of its module
        parallelize_module(model.get_submodule(module), mesh["tensor"], _style(layout, p.module, p.name))


def _style(layout: ParameterLayout, kind: str, name: str) -> ParallelStyle:
    whole = layout.style.startswith("[")
    by_output = layout.tensor_dim == (1 if kind == "Embedding" else 0)
    if kind not in ("Linear", "Embedding"):
        raise RunError(f"{name}: only Linear and Embedding can be split over a tensor axis, this is a {kind}")
    if by_output:
        return ColwiseParallel(output_layouts=Replicate()) if whole else ColwiseParallel()
    takes_whole = whole or kind == "Embedding"
    return RowwiseParallel(input_layouts=Replicate()) if takes_whole else RowwiseParallel()
