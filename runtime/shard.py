"""Sharding what a rank owns: one FSDP2 unit per layer.

FSDP2 is told to sum, not to average, because every microbatch already weighs by its share of the global batch. Units stay unsharded between
the microbatches of a pipeline step; only the last backward of a stage reshards and reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan, Sharding
from pdsl.lowering.units import unit_groups
from pdsl.runtime.exchange import ExchangeReduceScatter
from pdsl.runtime.meshes import IslandMesh, mesh_dim
from pdsl.runtime.precision import unit_policy
from pdsl.runtime.unit_ends import UnitEnds, accumulate, end_backward, reduce_now, set_reduction

__all__ = ["Units", "shard_layers"]


class Units:
    """The FSDP2 units of a rank, by stage, and the switches that the program sets on them.

    The root's unit holds what belongs to no layer alone; it reduces when the last stage of the rank comes to its last backward.
    """

    def __init__(
        self, root: FSDPModule, by_stage: dict[int, list[FSDPModule]], sharding: Sharding, exchange: ExchangeReduceScatter | None = None
    ) -> None:
        self._root = root
        self._by_stage = by_stage
        self._all = (root, *(u for units in by_stage.values() for u in units))
        self._sharding = sharding
        self._exchange = exchange
        self._remaining: set[int] = set()

    def begin_step(self) -> None:
        """No unit reduces or reshards until the program says that a stage comes to its last backward, if the plan asks for no more."""
        self._remaining = set(self._by_stage)
        for unit in self._all:
            self._set(unit, last=False)
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

    def end_weight_half(self, stage: int) -> None:
        """The weight half of a microbatch is done, and more follow."""
        for unit in (*self._by_stage[stage], self._root):
            accumulate(unit)

    def ends(self, stage: int, weights: Iterable[Tensor]) -> UnitEnds:
        """What reduces the units of a stage in its last weight half, in which `weights` get their gradients."""
        self._remaining.discard(stage)
        last = () if self._remaining else (self._root,)
        return UnitEnds((*self._by_stage[stage][::-1], *last), weights, self._reduce, self._end)

    def _reduce(self, unit: FSDPModule) -> None:
        self._set(unit, last=True)
        reduce_now(unit)

    def _end(self) -> None:
        self._root.set_is_last_backward(True)
        end_backward(self._root)

    def rest(self) -> None:
        """Free what forwards alone have gathered."""
        for unit in self._all:
            unit.reshard()

    def settle(self) -> None:
        """Wait for the reductions that are under way; before that the gradients of the units hold nothing."""
        if self._exchange is not None:
            self._exchange.settle()

    def _set(self, unit: FSDPModule, *, last: bool) -> None:
        unit.set_requires_gradient_sync(last or self._sharding.every, recurse=False)
        unit.set_reshard_after_backward(last or self._sharding.reshard, recurse=False)


def shard_layers(root: nn.Module, model: nn.Module, plan: Plan, rank: int, mesh: IslandMesh, names: Mapping[str, str]) -> Units:
    """Wrap the owned layers of `model` as FSDP2 units, as `unit_groups` has them, and `root`, the module whose forward runs a stage, around them.

    What rides in the root's unit says `root_layers`. Parameters that are not sharded, or live elsewhere, are left alone.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    facts = {named[names[p.name]]: p for p in owned_parameters(plan, rank) if plan.layout(p.name).sharded}
    sharded = facts.keys()
    in_root = dict(facts)
    waits = plan.sharding.every
    # not pinned: what is copied to pinned memory arrives later, and sums across islands begin at once
    offload = CPUOffloadPolicy(pin_memory=False) if plan.offload == "params" else OffloadPolicy()
    ignored = {p for p in named.values() if p not in sharded}
    placements = _placements(plan, facts, mesh)
    options: dict[str, Any] = {
        "mesh": mesh["shard"],
        "offload_policy": offload,
        "ignored_params": ignored,
        "shard_placement_fn": placements,
    }
    by_stage: dict[int, list[FSDPModule]] = {s: [] for s in plan.stages_of(rank)}
    for stage, layers in ((s, group) for s, groups in unit_groups(plan, rank).items() for group in groups):
        modules = [model.get_submodule(m) for index in layers for m in plan.facts.layers[index].modules if m]
        modules = [m for m in modules if any(p not in ignored for p in m.parameters())]
        if not modules:
            continue
        policy, converts = unit_policy(plan, [in_root.pop(p) for m in modules for p in m.parameters() if p in in_root])
        waits = waits or converts
        unit = fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=plan.reshard, mp_policy=policy, **options)
        by_stage[stage].append(unit if isinstance(unit, FSDPModule) else unit[0])
    policy, converts = unit_policy(plan, in_root.values())
    fully_shard(root, reshard_after_forward=False, mp_policy=policy, **options)
    assert isinstance(root, FSDPModule)
    units = [u for stage in by_stage.values() for u in stage]
    for unit in (root, *units):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _order_gathers(root, by_stage, plan.sharding)
    exchange = ExchangeReduceScatter(waits=waits or converts) if mesh.device_type == "cpu" else None
    if exchange is not None:
        for unit in (root, *units):
            set_reduction(unit, exchange)
        # on a GPU gathers run on a stream of their own; on a CPU they only overlap if they are asynchronous
        root._set_unshard_async_op(True)
    return Units(root, by_stage, plan.sharding, exchange)


def _placements(
    plan: Plan, facts: Mapping[nn.Parameter, ParameterFacts], mesh: IslandMesh
) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """Over which ranks each parameter is sharded, for FSDP2; None where all are over all shard axes. PDSL sums over the axes that are left."""
    axes = {p: plan.layout(f.name).shard_axes for p, f in facts.items()}
    if not any(axes.values()):
        return None
    meshes = {named: FSDPMeshInfo(mesh[mesh_dim("shard", named)], shard_mesh_dim=0) for named in set(axes.values())}
    return lambda parameter: ShardPlacementResult(None, meshes[axes.get(parameter, ())])


def _order_gathers(root: FSDPModule, by_stage: dict[int, list[FSDPModule]], sharding: Sharding) -> None:
    """Say which unit is gathered when, since FSDP2's own guess follows the forward passes of all microbatches, of which some are long over."""
    stages = list(by_stage.values())
    if not sharding.reshard:
        # the program gathers each stage once; what a backward has reduced is not to be gathered again for nothing
        for unit in (u for units in stages for u in units):
            unit.set_unshard_in_backward(False)
        return
    ahead = sharding.prefetch
    for units in stages:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1] or [unit])  # itself: FSDP2 guesses where there is none
        if units:
            units[-1].set_reshard_after_forward(False)
    # a root that runs several stages cannot know which comes next
    only = stages[0] if len(stages) == 1 else []
    root.set_modules_to_forward_prefetch(only[:ahead])
    root.set_modules_to_backward_prefetch(only[::-1][:ahead] or [root])
