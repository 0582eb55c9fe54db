"""The cross entropy of scores of which each tensor rank has those of some classes, without gathering them.

For scores x and the class t of a place it is log(sum exp(x)) - x[t]: the greatest score, the sum and the one score are each a small exchange. What a rank
keeps for the backward, and what it gets of the gradient, are of its own classes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from pdsl.grammar.errors import RunError
from pdsl.lowering.probe_loss import CrossEntropy
from pdsl.runtime.tensor_collectives import TensorGroup

__all__ = ["mark_split", "split_cross_entropy"]


class _Split(Tensor):
    """Scores of some classes. What is computed from them place by place stays marked until torch's cross entropy takes it."""

    group: ClassVar[TensorGroup]

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy or not isinstance(args[0] if args else kwargs["input"], _Split):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        plain = [a.as_subclass(Tensor) if isinstance(a, Tensor) else a for a in args]
        named = {k: a.as_subclass(Tensor) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        return split_cross_entropy(CrossEntropy.of(plain, named), cls.group)


def mark_split(group: TensorGroup) -> type[Tensor]:
    """The type of scores whose classes lie split over a group, one for each group: `scores.as_subclass(...)` lets the cross entropy be computed from parts."""
    if group.scores is None:
        group.scores = type("SplitScores", (_Split,), {"group": group})
    return group.scores


def split_cross_entropy(call: CrossEntropy, group: TensorGroup) -> Tensor:
    """Torch's cross entropy, the same on every rank of a group. Raises RunError for what cannot be computed from parts of the scores."""
    if call.refused:
        raise RunError(call.refused)
    scores = call.scores.movedim(call.dim, -1)
    dtype = torch.float32 if torch.is_autocast_enabled(scores.device.type) else scores.dtype  # as torch itself gives it
    target = call.target
    losses: Tensor = _Losses.apply(scores.reshape(-1, scores.shape[-1]), target.reshape(-1), group, call.ignored, call.smoothing)  # type: ignore[no-untyped-call]
    if call.reduction == "none":
        return losses.view(target.shape).to(dtype)
    total = losses.sum()
    return (total / (target != call.ignored).sum() if call.reduction == "mean" else total).to(dtype)


class _Losses(torch.autograd.Function):
    """One loss for each place, of scores (places, classes here) and targets (places,); 0 where a target is ignored."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, group: TensorGroup, ignored: int, smoothing: float) -> Tensor:
        width = scores.shape[-1]
        classes, first = width * group.size, width * group.index
        counts = target != ignored
        if scores.device.type == "cpu" and bool((counts & ((target < 0) | (target >= classes))).any()):
            raise IndexError(f"a target is out of bounds: expected 0 to {classes - 1}, or {ignored} for one that does not count")
        exact = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
        exact = exact - group.largest(exact.amax(-1)).unsqueeze(-1)
        here = ((target >= first) & (target < first + width)).unsqueeze(-1)
        place = (target - first).clamp(0, width - 1).unsqueeze(-1)
        chosen = torch.where(here, exact.gather(-1, place), 0.0).squeeze(-1)
        everything = [exact.sum(-1)] if smoothing else []
        shares = exact.exp_()
        chosen, total, *rest = group.sum(torch.stack([chosen, shares.sum(-1), *everything]))
        losses = (1.0 - smoothing) * (total.log() - chosen)
        if smoothing:
            losses = losses + smoothing * (total.log() - rest[0] / classes)
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), place, here, counts)
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, scores.dtype
        return torch.where(counts, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, place, here, counts = ctx.saved_tensors
        grad = torch.where(counts, grad, 0.0).unsqueeze(-1)
        found = shares * grad
        if ctx.smoothing:
            found = found - grad * (ctx.smoothing / ctx.classes)
        found.scatter_add_(-1, place, torch.where(here, grad * (ctx.smoothing - 1.0), 0.0))
        return found.to(ctx.dtype), None, None, None, None
