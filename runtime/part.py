"""What one rank owns under a plan: its layers, ready to run and sharded, and their optimizer.

A part outlives generations in which the rank keeps its layers. It can be made anew from the bare model and the state of another part, which is
how layers change their owner: the same way whether the state was kept, came from a peer or was read from a file.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import Box, box, box_shape
from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.precision import applies
from pdsl.lowering.probe import on_meta
from pdsl.lowering.probe_pass import parameter_groups, put, remade
from pdsl.lowering.units import owned_layers
from pdsl.runtime.compiled import compile_layers
from pdsl.runtime.local import local_tensor
from pdsl.runtime.meshes import IslandMesh
from pdsl.runtime.optimizer import LocalOptimizer, OptimizerFactory
from pdsl.runtime.own_inputs import copy_written_inputs
from pdsl.runtime.precision import Formats, on_host
from pdsl.runtime.recompute import Recompute
from pdsl.runtime.shard import Units, shard_layers
from pdsl.runtime.stage import StageRunner
from pdsl.runtime.statistics import Statistics
from pdsl.runtime.tensor_parallel import apply_tensor_parallel, live_names

__all__ = ["BUFFER", "WEIGHT", "Part", "bare_copy", "with_memory"]

WEIGHT, BUFFER = "weight", "buffer"


class Part:
    """The layers of one rank.

    `model` has memory for the owned parameters and is changed in place. `tensors` are all owned parameters by canonical name after sharding,
    `parameters` those of them that are trained, `formats` what layers compute with in their place. Raises RunError if torch holds another part of a parameter than the plan says.
    """

    def __init__(self, plan: Plan, rank: int, mesh: IslandMesh | None, model: nn.Module, optimizer: OptimizerFactory | None = None) -> None:
        self.model = model
        model.train()
        names = live_names(model, plan, rank)
        if mesh is not None and plan.tensor_size > 1:
            apply_tensor_parallel(model, plan, rank, mesh)
        stages = plan.template(plan.coordinate(rank).pipeline).stages
        self.runner = StageRunner(model, plan.facts, {s: (stages[s].start, stages[s].stop) for s in plan.stages_of(rank)})
        shards = mesh is not None and plan.shard_size > 1
        self.units = shard_layers(self.runner, model, plan, rank, mesh, names) if mesh is not None and shards else None
        named = dict(model.named_parameters(remove_duplicate=False))
        owned = owned_parameters(plan, rank)
        self.tensors = {p.name: named[names[p.name]] for p in owned}
        if plan.offload == "params":
            self.tensors = {p.name: self.tensors[p.name] if _sharded(plan, p, self.units) else on_host(self.tensors[p.name]) for p in owned}
        self.parameters = {p.name: self.tensors[p.name] for p in owned if p.trainable}
        self.boxes = _boxes(plan, rank, owned)
        self.statistics = Statistics.of(plan, rank, model, mesh)
        mine = owned_layers(plan, rank)
        if self.units is not None:
            copy_written_inputs(plan, model, mine)
        self._updated = tuple(b.name for b in plan.facts.updated if set(mine).intersection(b.layers))
        modules = {m for i in mine for m in plan.facts.layers[i].modules}
        sharded = {p.name for p in owned if _sharded(plan, p, self.units)}
        self.formats = Formats(plan, model, self.tensors, sharded, modules)
        last = len(stages) - 1
        if applies(plan.precision, plan.facts):
            self.runner.register_forward_hook(lambda _, args, given: Formats.output(plan, given) if args[0] == last else given)
        compile_layers(plan, model, mine)
        again = [n for n in plan.facts.recomputed if n.startswith(tuple(f"{m}." for m in modules)) or n in modules]
        self.recompute = Recompute(random=plan.facts.random)
        self.recompute.apply(model, again)
        self._check_boxes(plan, rank)
        self.optimizer = LocalOptimizer(plan.job.optimizer, self.parameters, optimizer, host=plan.offload == "optimizer")

    def _check_boxes(self, plan: Plan, rank: int) -> None:
        for name, bounds in self.boxes.items():
            held, planned = tuple(local_tensor(self.tensors[name]).shape), box_shape(bounds)
            if held != planned and name in self.parameters:
                # sums and norms would be wrong without a word
                raise RunError(f"{name}: rank {rank} holds a part of shape {held}, the plan says {planned} ({plan.layout(name).style})")

    def state(self) -> dict[str, torch.Tensor]:
        """The local boxes of all that makes up the owned layers: `weight/NAME`, `buffer/NAME` for buffers that the
        forward updates, and what the optimizer keeps, such as `exp_avg/NAME`.

        They share storage with the part. What the optimizer has not made yet is not there: that is not the same as zero.
        """
        weights = {f"{WEIGHT}/{name}": local_tensor(p.data) for name, p in self.tensors.items()}
        buffers = {f"{BUFFER}/{name}": self.model.get_buffer(name) for name in self._updated}
        return weights | buffers | self.optimizer.state()

    def kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the optimizer keeps, and the parameters with a part here for which it keeps nothing yet."""
        pairs = [key.split("/", 1) for key in self.optimizer.state()]
        kept = {name for _, name in pairs}
        bare = tuple(n for n, p in self.parameters.items() if n not in kept and local_tensor(p.data).numel())
        return tuple(dict.fromkeys(kind for kind, _ in pairs)), bare

    def empty_state(self) -> dict[str, torch.Tensor]:
        """The weights of which this rank has no element: nobody sends them."""
        return {key: value for key, value in self.state().items() if key.startswith(f"{WEIGHT}/") and not value.numel()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights by copy, and the optimizer's state as it is. Raises KeyError if a weight is missing."""
        for name, parameter in self.tensors.items():
            local_tensor(parameter.data).copy_(state[f"{WEIGHT}/{name}"])
        for name in self._updated:
            self.model.get_buffer(name).copy_(state[f"{BUFFER}/{name}"])
        self.optimizer.take_weights()
        self.optimizer.load({key: value for key, value in state.items() if not key.startswith((f"{WEIGHT}/", f"{BUFFER}/"))})

    def settle(self) -> None:
        """Wait for gradients that FSDP2 has under way."""
        if self.units is not None:
            self.units.settle()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The local gradients that were computed so far, out of the part; shares in running statistics too, as `buffer/NAME`."""
        self.settle()
        found = {name: grad for name in self.parameters if (grad := self.formats.gradient(name)) is not None}
        found |= {f"{BUFFER}/{name}": share for name, share in self.statistics.shares.items()}
        self.drop_gradients()
        return found

    def release(self) -> None:
        """Free the weights of a part that another has replaced: modules are in cycles, and a collection of garbage costs half a second."""
        self.drop_gradients()
        self.formats.release()
        for parameter in self.tensors.values():
            local_tensor(parameter.data).untyped_storage().resize_(0)

    def drop_gradients(self) -> None:
        """Forget what was computed of a step."""
        self.statistics.forget()
        self.formats.drop_gradients()


def _sharded(plan: Plan, p: ParameterFacts, units: Units | None) -> bool:
    return units is not None and plan.layout(p.name).sharded


def _boxes(plan: Plan, rank: int, owned: Collection[ParameterFacts]) -> dict[str, Box]:
    at = plan.coordinate(rank)
    return {p.name: box(plan, p, at.shard, at.tensor) for p in owned}


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy without memory for parameters, from which parts are made; buffers are copied with their values."""
    memo: dict[int, object] = {}
    for group in parameter_groups(model).values():
        bare = on_meta(group[0][1])
        memo.update({id(parameter): bare for _, parameter in group})
    return copy.deepcopy(model, memo)


def with_memory(bare: nn.Module, plan: Plan, rank: int, device: torch.device) -> nn.Module:
    """A copy of a bare model with memory, not yet filled, for what a rank owns."""
    model = copy.deepcopy(bare)
    owned = {p.name for p in owned_parameters(plan, rank)}
    for canonical, group in parameter_groups(model).items():
        if canonical not in owned:
            continue
        old = group[0][1]
        put(model, group, remade(old, torch.empty(old.shape, dtype=old.dtype, device=device)))
    return model
