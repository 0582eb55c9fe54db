"""Sharding what a rank owns: one FSDP2 unit per layer.

FSDP2 is told to sum, not to average, because every microbatch already weighs by its share of the global batch. Units stay unsharded between
the microbatches of a pipeline step; only the last backward of a stage reshards and reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.units import unit_layers
from pdsl.runtime.exchange import ExchangeReduceScatter

__all__ = ["Units", "shard_layers"]


class Units:
    """The FSDP2 units of a rank, by stage, and the switches that the program sets on them.

    The root's unit holds what belongs to no layer alone; it reduces when the last stage of the rank comes to its last backward.
    """

    def __init__(
        self, root: FSDPModule, by_stage: dict[int, list[FSDPModule]], *, reshard: bool, exchange: ExchangeReduceScatter | None = None
    ) -> None:
        self._root = root
        self._by_stage = by_stage
        self._reshard = reshard
        self._exchange = exchange
        self._remaining: set[int] = set()

    def begin_step(self) -> None:
        """No unit reduces or reshards until the program says that a stage comes to its last backward."""
        self._remaining = set(self._by_stage)
        for units in self._by_stage.values():
            for unit in units:
                self._set(unit, last=False)
        self._set(self._root, last=False)
        self._root.set_is_last_backward(False)

    def unshard(self, stage: int) -> None:
        """Begin to gather the parameters of a stage, all at once; each unit waits for its own when it first runs."""
        for unit in self._by_stage[stage]:
            unit.unshard(async_op=True)

    def begin_last_backward(self, stage: int) -> None:
        """From here on every unit of the stage reduces its gradient and frees its gathered parameters as its backward ends."""
        self._remaining.discard(stage)
        for unit in self._by_stage[stage]:
            self._set(unit, last=True)
        if not self._remaining:
            self._set(self._root, last=True)
        self._root.set_is_last_backward(True)

    def settle(self) -> None:
        """Wait for the reductions that are under way; before that the gradients of the units hold nothing."""
        if self._exchange is not None:
            self._exchange.settle()

    def _set(self, unit: FSDPModule, *, last: bool) -> None:
        unit.set_requires_gradient_sync(last, recurse=False)
        unit.set_reshard_after_backward(last or self._reshard, recurse=False)


def shard_layers(root: nn.Module, model: nn.Module, plan: Plan, rank: int, mesh: DeviceMesh, names: Mapping[str, str]) -> Units:
    """Wrap each owned layer of `model` as one FSDP2 unit, and `root`, the module whose forward runs a stage, around them.

    What rides in the root's unit says `root_layers`. Parameters that are not sharded, or live elsewhere, are left alone.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    sharded = {named[names[p.name]] for p in owned_parameters(plan, rank) if plan.layout(p.name).sharded}
    ignored = {p for p in named.values() if p not in sharded}
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    by_stage: dict[int, list[FSDPModule]] = {s: [] for s in plan.stages_of(rank)}
    for index in unit_layers(plan, rank):
        modules = [model.get_submodule(m) for m in plan.facts.layers[index].modules if m]
        modules = [m for m in modules if any(p not in ignored for p in m.parameters())]
        if not modules:
            continue
        unit = fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=mesh["shard"], reshard_after_forward=plan.reshard, ignored_params=ignored
        )
        stage = next(s for s in by_stage if stages[s].start <= index < stages[s].stop)
        by_stage[stage].append(unit if isinstance(unit, FSDPModule) else unit[0])
    fully_shard(root, mesh=mesh["shard"], reshard_after_forward=False, ignored_params=ignored)
    assert isinstance(root, FSDPModule)
    units = [u for stage in by_stage.values() for u in stage]
    for unit in (root, *units):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _order_gathers(root, units, reshard=plan.reshard)
    exchange = ExchangeReduceScatter() if mesh.device_type == "cpu" else None
    if exchange is not None:
        for unit in (root, *units):
            unit.set_custom_reduce_scatter(cast("Any", exchange))
        # on a GPU gathers run on a stream of their own; on a CPU they only overlap if they are asynchronous
        root._set_unshard_async_op(True)
    return Units(root, by_stage, reshard=plan.reshard, exchange=exchange)


def _order_gathers(root: FSDPModule, units: list[FSDPModule], *, reshard: bool) -> None:
    """Say which unit is gathered when, since FSDP2's own guess follows the forward passes of all microbatches, of which some are long over."""
    if not units:
        return
    if not reshard:
        # the program gathers each stage once; what a backward has reduced is not to be gathered again for nothing
        for unit in units:
            unit.set_unshard_in_backward(False)
        return
    units[-1].set_reshard_after_forward(False)
    root.set_modules_to_forward_prefetch([units[0]])
    root.set_modules_to_backward_prefetch([units[-1]])
    for before, after in pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
