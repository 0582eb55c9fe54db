"""Normalisation by statistics of the rows, as one process does it that runs the microbatches of a step one after another.

A microbatch is normalised over all its rows, whichever ranks of the island they lie on. Running means and variances are moving averages, so they
are linear in the statistics of the microbatches: every microbatch's share in the value after the step is known when it runs, whoever runs it. The
shares are added up over all pipelines like gradients, and the buffers are written where the weights are, when the step is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdsl.lowering.plan import Plan
from pdsl.lowering.units import owned_layers
from pdsl.runtime.groups import Groups
from pdsl.runtime.meshes import IslandMesh
from pdsl.runtime.waits import Pending

__all__ = ["Statistics"]

_MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


@frozen
class _Now:
    """The microbatch that runs: its place among those of the step, how many there are, whether its rows count here."""

    index: int
    total: int
    counts: bool


@define(eq=False)
class Statistics:
    """The modules with batch statistics of one rank. `begin_pass` before each forward; `sum_up`, then `write` at the end of a step."""

    modules: dict[str, _BatchNorm]
    group: dist.ProcessGroup | None = None  # the ranks that the rows of a microbatch lie on, None for one
    shares: dict[str, Tensor] = field(factory=dict)  # by buffer: what the microbatches that ran here give to its next value
    _now: _Now | None = None
    _next: dict[str, Tensor] = field(factory=dict)
    _last: int = 0

    @classmethod
    def of(cls, plan: Plan, rank: int, model: nn.Module, mesh: IslandMesh | None) -> Statistics:
        """Takes over the forwards of the modules that a rank owns, in place."""
        owned = tuple(f"{m}." for i in owned_layers(plan, rank) for m in plan.facts.layers[i].modules)
        names = [n for n in plan.facts.statistics if f"{n}.".startswith(owned)]
        group = mesh["shard"].get_group() if mesh is not None and plan.shard_size > 1 and names else None
        made = cls({n: m for n in names if isinstance(m := model.get_submodule(n), _BatchNorm)}, group)
        for name, module in made.modules.items():
            module.forward = made._forward(name, module, module.forward)  # type: ignore[method-assign,assignment]
        return made

    def begin_pass(self, index: int, total: int, *, counts: bool) -> None:
        """The next forward is that of the microbatch at `index` of `total` in the order of the step; without `counts` its rows here are stand-ins."""
        self._now = _Now(index, total, counts)

    def forget(self) -> None:
        """What was computed of a step."""
        self.shares = {}
        self._now = None

    # --- one module -----------------------------------------------------------------------------------------------------------------------

    def _forward(self, name: str, module: _BatchNorm, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            now = self._now
            if not module.training or now is None:
                return plain(x)
            if self.group is None and not now.counts:
                return _stand_in(module, x)
            tracks = module.track_running_stats and module.running_mean is not None
            with _fresh(module) if tracks else _as_it_is():
                y = plain(x) if self.group is None else _over_shards(module, x, self.group, counts=now.counts)
                found = {key: b for key in (_MEAN, _VARIANCE) if tracks and (b := module._buffers[key]) is not None}
            again = torch._C._current_graph_task_id() != -1
            if now.index < now.total and not again:
                for key, batch in found.items():
                    self._add(f"{name}.{key}", batch.double() * _weight(module, now))
            return y

        return forward

    def _add(self, name: str, share: Tensor) -> None:
        self.shares[name] = self.shares[name] + share if name in self.shares else share

    # --- the step -------------------------------------------------------------------------------------------------------------------------

    def sum_up(self, plan: Plan, groups: Groups, samples: int, kept: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Add up the shares of all pipelines. `kept` are those of an earlier part of the step, by buffer. All ranks come here, in one order."""
        self._last = -(-samples // plan.rows_per_microbatch)
        self._next = {}
        if not self.modules:
            return
        works: list[tuple[Pending, Tensor, list[tuple[str, Tensor]]]] = []
        for ranks, buffers in groups.running:
            mine = [(b, self.model_buffer(b)) for b in buffers if b.rpartition(".")[0] in self.modules]
            parts = [self._share(name, buffer, kept) for name, buffer in mine]
            if not parts:
                continue
            flat = torch.cat(parts)
            if len(ranks) > 1:
                works.append((groups.summing(ranks).sum(flat), flat, mine))
            else:
                self._spread(flat, mine)
        for work, flat, mine in works:
            work.wait()
            self._spread(flat, mine)

    def _share(self, name: str, buffer: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        found = self.shares.get(name, torch.zeros(buffer.shape, dtype=torch.float64, device=buffer.device))
        return (found + kept[name] if name in kept else found).reshape(-1)

    def _spread(self, flat: Tensor, names: list[tuple[str, Tensor]]) -> None:
        offset = 0
        for name, buffer in names:
            self._next[name] = flat[offset : offset + buffer.numel()].view(buffer.shape)
            offset += buffer.numel()

    def model_buffer(self, name: str) -> Tensor:
        """A buffer of one of the modules, by its name in the model."""
        module, _, key = name.rpartition(".")
        found: Tensor = self.modules[module].get_buffer(key)
        return found

    @torch.no_grad()
    def write(self) -> None:
        """The buffers after the step, in place."""
        for name, share in self._next.items():
            module, _, key = name.rpartition(".")
            buffer = self.modules[module].get_buffer(key)
            buffer.copy_(buffer.double() * _remains(self.modules[module], self._last) + share)
        for module in {n.rpartition(".")[0] for n in self._next}:
            counter = self.modules[module].num_batches_tracked
            if counter is not None:
                counter.add_(self._last)
        self._next = {}
        self.forget()


def _weight(module: _BatchNorm, now: _Now) -> float:
    """What the statistics of one microbatch count in the value after the step."""
    if module.momentum is None:  # a plain average over all batches so far
        before = int(module.num_batches_tracked) if module.num_batches_tracked is not None else 0
        return 1.0 / (before + now.total)
    return float(module.momentum * (1.0 - module.momentum) ** (now.total - 1 - now.index))


def _remains(module: _BatchNorm, total: int) -> float:
    """What the value before the step counts in that after it."""
    if module.momentum is None:
        before = int(module.num_batches_tracked) if module.num_batches_tracked is not None else 0
        return before / (before + total) if before + total else 1.0
    return float((1.0 - module.momentum) ** total)


@contextmanager
def _fresh(module: _BatchNorm) -> Iterator[None]:
    """Within the block the module has buffers that hold nothing yet, and takes the statistics of a batch as they are."""
    buffers, momentum = dict(module._buffers), module.momentum
    module._buffers.update({n: torch.zeros_like(b) for n, b in buffers.items() if b is not None})
    module.momentum = 1.0
    try:
        yield
    finally:
        module._buffers.update(buffers)
        module.momentum = momentum


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


# --- rows on several ranks ----------------------------------------------------------------------------------------------------------------


def _stand_in(module: _BatchNorm, x: Tensor) -> Tensor:
    """Something of the right shape for rows that weigh nothing, of which there may be a single one."""
    zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return nn.functional.batch_norm(x, zeros, ones, module.weight, module.bias, training=False)


def _over_shards(module: _BatchNorm, x: Tensor, group: dist.ProcessGroup, *, counts: bool) -> Tensor:
    """The module's output with statistics over the rows of all ranks of a group; its running ones become those of this batch."""
    module._check_input_dim(x)
    y, mean, variance = _Normalised.apply(x, module.weight, module.bias, module.eps, group, counts)  # type: ignore[no-untyped-call]
    if module.running_mean is not None and module.running_var is not None:
        module.running_mean.copy_(mean)
        module.running_var.copy_(variance)
    found: Tensor = y
    return found


class _Normalised(torch.autograd.Function):
    """(x, weight, bias) -> y, mean and unbiased variance by channel. Rows that do not count neither enter the statistics nor get a gradient.

    With n values a channel over all ranks, h = (x - mean) / deviation and g = weight * dL/dy, dL/dx is
    (g - sum(g) / n - h * sum(g * h) / n) / deviation, the sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        number = x.numel() // x.shape[1] if counts else 0
        mean = wide.mean(dims)
        squares = (wide - _along(mean, x)).square().sum(dims)
        mine = (
            torch.cat([mean, squares, mean.new_full((1,), float(number))])
            if counts
            else torch.zeros_like(torch.cat([mean, squares, mean[:1]]))
        )
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        table = torch.stack(everyone)
        channels = x.shape[1]
        means, sums, numbers = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = numbers.sum().clamp(min=1)
        mean = (means * numbers).sum(0) / total
        squares = (sums + numbers * (means - mean).square()).sum(0)
        scale = torch.rsqrt(squares / total + eps)
        hat = (wide - _along(mean, x)) * _along(scale, x)
        y = hat if weight is None else hat * _along(weight.to(hat.dtype), x)
        y = y if bias is None else y + _along(bias.to(hat.dtype), x)
        ctx.save_for_backward(hat, weight, scale, total)
        ctx.group, ctx.counts, ctx.dims, ctx.has_bias = group, counts, dims, bias is not None
        ctx.mark_non_differentiable(mean, squares)
        return y.to(x.dtype), mean, squares / (total - 1).clamp(min=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hat, weight, scale, total = ctx.saved_tensors
        grad = grads[0].to(hat.dtype)
        by_bias, by_weight = grad.sum(ctx.dims), (grad * hat).sum(ctx.dims)
        sums = torch.cat([by_bias, by_weight])
        dist.all_reduce(sums, group=ctx.group)
        whole_bias, whole_weight = sums.chunk(2)
        inner = grad - _along(whole_bias / total, grad) - hat * _along(whole_weight / total, grad)
        inner = inner * _along(scale if weight is None else scale * weight.to(hat.dtype), grad)
        if not ctx.counts:
            inner = torch.zeros_like(inner)
        at_weight = by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        at_bias = by_bias.to(grads[0].dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return inner.to(grads[0].dtype), at_weight, at_bias, None, None, None


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """One value for each channel, to be combined with x (rows, channels, ...)."""
    return channels.view(1, -1, *(1 for _ in x.shape[2:]))
