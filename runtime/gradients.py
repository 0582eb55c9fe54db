"""Gradients across islands: sums over the ranks that hold the same box, started while the backward pass still runs; the global norm.

torch calls a hook when a gradient is final: autograd's own for a plain parameter, FSDP2's after its reduce-scatter for a sharded one. A bucket
whose last gradient arrives is sent off at once; the program's REDUCE action sends off what has not gone by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from weakref import ref

import torch
from torch import nn

from pdsl.lowering.ownership import holders, owned_parameters
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Bucket, Program
from pdsl.runtime.groups import Groups
from pdsl.runtime.local import local_tensor
from pdsl.runtime.precision import Formats
from pdsl.runtime.waits import Pending

__all__ = ["Reducer"]


class Reducer:
    """Sums of gradients for one rank.

    `parameters` are the owned trainable parameters by name, after sharding; `formats` knows their gradients, and in which dtypes they are added up. Per step: `begin_step`, `begin_last_backward` per stage, `issue` per
    REDUCE action, then `finish`, which gives the summed local gradients. `kept` are local gradients of an earlier part of the step, which are added. `settle` is called before gradients are read: it waits for what FSDP2
    has not finished yet.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        parameters: Mapping[str, nn.Parameter],
        formats: Formats,
        groups: Groups,
        settle: Callable[[], None] = lambda: None,
        kept: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._parameters = dict(parameters)
        self._formats = formats
        self._kept = kept
        self._buckets = program.buckets
        self._groups = groups
        self._settle = settle
        self._bucket_of = {name: i for i, b in enumerate(self._buckets) for name in b.parameters}
        self._flat = [self._make_flat(b) for b in self._buckets]
        self._stages_left: list[set[int]] = []
        self._waiting: list[set[str]] = []
        self._works: dict[int, Pending] = {}
        self._failure: RuntimeError | None = None
        facts = {p.name: p for p in owned_parameters(plan, program.rank)}
        self._counted = tuple(n for n in self._parameters if holders(plan, facts[n], program.rank)[0] == program.rank)
        self._hooks = [formats.leaves[name].register_post_accumulate_grad_hook(_noting(ref(self), name)) for name in self._bucket_of]

    def close(self) -> None:
        """Take the hooks off: another reducer may follow on the same parameters."""
        for hook in self._hooks:
            hook.remove()

    def _make_flat(self, bucket: Bucket) -> torch.Tensor:
        """The boxes one after the other, then one number for each: on how many ranks it got a gradient."""
        parts = [local_tensor(self._parameters[n].data) for n in bucket.parameters]
        dtype = self._formats.sums.get(bucket.parameters[0], parts[0].dtype)
        return torch.zeros(sum(t.numel() for t in parts) + len(parts), dtype=dtype, device=self._groups.device)

    def begin_step(self) -> None:
        self._works.clear()
        self._failure = None
        self._stages_left = [set(b.stages) for b in self._buckets]
        self._waiting = [set(b.parameters) for b in self._buckets]

    def begin_last_backward(self, stage: int) -> None:
        """The next backward of this stage makes its gradients final."""
        for left in self._stages_left:
            left.discard(stage)

    def _note(self, name: str) -> None:
        """The gradient of a parameter has arrived."""
        bucket = self._bucket_of[name]
        if self._stages_left[bucket]:
            return
        self._waiting[bucket].discard(name)
        if not self._waiting[bucket]:
            self._start_complete(self._buckets[bucket].ranks)

    def issue(self, index: int) -> None:
        """The program's REDUCE: start the sum of a bucket now, whatever has arrived; a parameter without gradient counts as zero."""
        self._waiting[index].clear()
        self._start_complete(self._buckets[index].ranks)

    def _start_complete(self, ranks: tuple[int, ...]) -> None:
        """Start what is complete over these ranks, in the order of the program: collectives of one group must start in one order on all."""
        for index, bucket in enumerate(self._buckets):
            if bucket.ranks != ranks or index in self._works:
                continue
            if self._waiting[index]:
                return
            self._start(index)

    @torch.no_grad()
    def _start(self, index: int) -> None:
        self._settle()
        bucket, flat = self._buckets[index], self._flat[index]
        offset = 0
        arrived = flat[-len(bucket.parameters) :].fill_(1.0)
        for place, name in enumerate(bucket.parameters):
            grad = self._own(name)
            size = local_tensor(self._parameters[name].data).numel()
            part = flat[offset : offset + size]
            if grad is None:
                part.zero_()
                arrived[place] = 0.0
            else:
                part.copy_(grad.reshape(-1))
            offset += size
        try:
            self._works[index] = self._groups.summing(bucket.ranks).sum(flat)
        except RuntimeError as error:  # in a hook it would end the backward of a pipeline that is whole; `finish` tells of it
            self._failure = self._failure or error

    def finish(self) -> dict[str, torch.Tensor]:
        """Wait for all sums. Local gradients by name, shaped like the local parameters; a parameter that got none on any rank is left out.

        The optimizer must not see a zero there: with weight decay or momentum it would change what one process leaves alone.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure
        for work in self._works.values():
            work.wait()
        found: dict[str, torch.Tensor] = {}
        arrived = self._arrived()
        for index, bucket in enumerate(self._buckets):
            offset = 0
            for name in bucket.parameters:
                local = local_tensor(self._parameters[name].data)
                if name in arrived:
                    found[name] = self._flat[index][offset : offset + local.numel()].view(local.shape).to(local)
                offset += local.numel()
        for name in self._parameters:
            if name in self._bucket_of:
                continue
            grad = self._own(name)
            if grad is not None:
                found[name] = grad.to(local_tensor(self._parameters[name].data))
        return found

    def _own(self, name: str) -> torch.Tensor | None:
        """The local gradient of this rank, over all parts of the step; FSDP2 cannot add to one that is still under way, so it is done here."""
        grad, kept = self._formats.gradient(name), self._kept.get(name)
        if grad is None or kept is None:
            return kept if grad is None else grad
        return grad + kept

    def _arrived(self) -> set[str]:
        """The parameters of all buckets that got a gradient on some rank."""
        if not self._buckets:
            return set()
        counts = torch.cat([flat[-len(b.parameters) :].float() for flat, b in zip(self._flat, self._buckets, strict=True)]).tolist()
        names = [name for b in self._buckets for name in b.parameters]
        return {name for name, count in zip(names, counts, strict=True) if count}

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """This rank's share of the squared global norm: every box is counted by the first rank that holds it."""
        mine = [gradients[n] for n in self._counted if n in gradients and gradients[n].numel()]
        if not mine:
            return 0.0
        mine = [g.float() if g.dtype in (torch.bfloat16, torch.float16) else g for g in mine]  # their own norms would have 8 or 11 bits
        return float(torch.stack(torch._foreach_norm(mine)).double().square().sum())


def _noting(reducer: ref[Reducer], name: str) -> Callable[[torch.Tensor], None]:
    """A hook that holds nothing: it lies in torch, where the collector would not see that it and its parameter hold each other."""

    def arrived(_: torch.Tensor) -> None:
        found = reducer()
        if found is not None:
            found._note(name)

    return arrived
