"""The formats in which a rank computes and adds up gradients, for the parameters that it owns.

A weight in fp32 of which layers need bf16 is held twice: the weight itself, which is updated, moved and saved, and a copy in the lower format that stands
in the modules and is written anew in each step. The gradients of a copy come in its own format and are added up in that of the sums.
What FSDP2 shards it casts itself, as it gathers; there the weight alone is held. With `offload = params` the weights wait on the host, and all copies are of their kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.plan import Plan
from pdsl.lowering.precision import applies, compute_format, output_format, sum_format
from pdsl.lowering.probe_numerics import cast_edges, cast_forward, dtype_of, layer_modules, to_output
from pdsl.lowering.probe_pass import remade
from pdsl.runtime.local import final_gradient, local_tensor

__all__ = ["Formats", "on_host", "unit_policy"]


class Formats:
    """What stands in the modules of `model` for the parameters of a plan, which it changes in place.

    `tensors` are the owned parameters by canonical name, those in `sharded` are cast by FSDP2. `leaves` are, by the same names, what
    autograd gives gradients to; `sums` the dtype of these gradients. `modules` are those at whose edges tensors are cast (those of the owned layers).
    """

    def __init__(
        self, plan: Plan, model: nn.Module, tensors: Mapping[str, nn.Parameter], sharded: Collection[str], modules: Collection[str]
    ) -> None:
        self.leaves: dict[str, nn.Parameter] = dict(tensors)
        self.sums: dict[str, torch.dtype] = {}
        self._totals: dict[str, torch.Tensor] = {}  # sums of gradients that autograd gives in another format
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # a weight and its copy, as they lie here
        casts, moves = applies(plan.precision, plan.facts), plan.offload == "params"
        if not casts and not moves:
            return
        for p in plan.facts.parameters:
            self._place(plan, model, p, tensors.get(p.name), kept=p.name in sharded)
        if not casts:
            return
        mine = [m for m in layer_modules(plan.facts) if m in modules]
        cast_edges(model, plan.facts, plan.precision, mine, output=plan.facts.casts_output)
        for name in layer_modules(plan.facts):
            if name not in modules:
                cast_forward(model, plan.facts, plan.precision, name, output=plan.facts.casts_output)

    def _place(self, plan: Plan, model: nn.Module, p: ParameterFacts, weight: nn.Parameter | None, *, kept: bool) -> None:
        """Put what layers compute with under all names of a parameter: a copy, the weight itself, or a copy without memory."""
        dtype, total = dtype_of(compute_format(plan.precision, plan.facts, p)), dtype_of(sum_format(plan.precision, p))
        if weight is not None:
            self.sums[p.name] = total
        copy: nn.Parameter | None = None
        for holder, leaf in ((model.get_submodule(n.rpartition(".")[0])._parameters, n.rpartition(".")[2]) for n in (p.name, *p.aliases)):
            held = holder.get(leaf)
            if held is None or (kept and held is weight):
                continue
            if held.device.type == "meta" or weight is None:
                holder[leaf] = remade(held, torch.empty_like(held, dtype=dtype, device="meta")) if held.dtype != dtype else held
                continue
            if copy is None:
                same = weight.dtype == dtype and weight.device == held.device
                copy = weight if same else remade(weight, weight.detach().to(held.device, dtype, copy=True))
                self._sum_in(p.name, copy, total)
            holder[leaf] = copy
        if copy is not None and copy is not weight and weight is not None:
            self._pairs.append((local_tensor(weight.data), local_tensor(copy.data)))

    def _sum_in(self, name: str, leaf: nn.Parameter, total: torch.dtype) -> None:
        self.leaves[name] = leaf
        if not leaf.requires_grad or leaf.dtype == total:
            return

        totals = self._totals  # and not what holds the leaf: the collector does not see the hooks of a leaf

        def collect(tensor: torch.Tensor) -> None:
            grad, tensor.grad = tensor.grad, None
            assert grad is not None
            if name in totals:
                totals[name] += grad
            else:
                totals[name] = grad.to(total)

        leaf.register_post_accumulate_grad_hook(collect)

    def gradient(self, name: str) -> torch.Tensor | None:
        """What this rank has of the gradient of an owned parameter, as it lies here; None if it got none."""
        found = self._totals.get(name)
        return found if found is not None else final_gradient(self.leaves[name])

    def drop_gradients(self) -> None:
        """Forget them."""
        self._totals.clear()
        for leaf in self.leaves.values():
            leaf.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the copies anew from the weights."""
        if self._pairs:
            torch._foreach_copy_([copy for _, copy in self._pairs], [weight for weight, _ in self._pairs])

    def release(self) -> None:
        """Free the copies."""
        for _, copy in self._pairs:
            copy.untyped_storage().resize_(0)

    @staticmethod
    def output(plan: Plan, given: Any) -> Any:
        """What a model gave, in the format of the output."""
        return to_output(given, output_format(plan.precision)) if applies(plan.precision, plan.facts) else given


def on_host(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter in the memory of the host."""
    return remade(parameter, parameter.detach().to("cpu", copy=True))


def unit_policy(plan: Plan, parameters: Collection[ParameterFacts]) -> tuple[MixedPrecisionPolicy, bool]:
    """How FSDP2 casts a unit that holds these parameters, and whether it reduces in another format than that of the weights.

    Inputs and outputs of layers are cast by hooks that are the same with and without sharding. All trained parameters of a unit have one format: a rule sees to it.
    """
    first = next((p for p in parameters if p.trainable), next(iter(parameters), None))
    if first is None or not applies(plan.precision, plan.facts):
        return MixedPrecisionPolicy(), False
    dtype, total = compute_format(plan.precision, plan.facts, first), sum_format(plan.precision, first)
    policy = MixedPrecisionPolicy(param_dtype=dtype_of(dtype), reduce_dtype=dtype_of(total), cast_forward_inputs=False)
    return policy, total != first.dtype
