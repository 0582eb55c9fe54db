"""What tensor ranks exchange, as autograd functions: each says what its backward exchanges in turn.

A tensor that is whole and equal on all ranks has a gradient that is whole and equal too; one that is split has the gradient of its part. Under that
convention the backward of a sum is a copy and that of a copy a sum, a gather and a slice are each other's backward, and so are a gather into parts
of the computation and a sum that scatters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TensorGroup", "enter", "gather", "gather_both", "gather_parts", "scatter_sum", "slice_of", "sum_of"]


class TensorGroup:
    """The ranks that differ on some tensor axes only: their process group, the part that this rank holds and their number.

    `places` gives the part that each rank of the group holds, if that is not its number.
    """

    def __init__(self, group: dist.ProcessGroup, index: int, size: int, places: tuple[int, ...] = ()) -> None:
        self.group = group
        self.index = index
        self.size = size
        self._places = places

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in new memory."""
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=self.group)
        return whole

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along a dim."""
        part = tensor.detach().movedim(dim, 0).contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(whole, part, group=self.group)
        if self._places:
            chunks = whole.chunk(self.size)
            whole = torch.cat([chunks[self._places.index(i)] for i in range(self.size)])
        return whole.movedim(0, dim)

    def scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part, along a dim, of the sum over the ranks."""
        whole = tensor.detach().movedim(dim, 0).contiguous()
        if self._places:
            chunks = whole.chunk(self.size)
            whole = torch.cat([chunks[place] for place in self._places])
        shape = (whole.shape[0] // self.size, *whole.shape[1:])
        if whole.device.type == "cpu":  # gloo would sum the whole on every rank
            terms = torch.empty_like(whole)
            dist.all_to_all_single(terms, whole, group=self.group)
            return terms.view(self.size, *shape).sum(0).movedim(0, dim)
        part = whole.new_empty(shape)
        dist.reduce_scatter_single(part, whole, group=self.group)
        return part.movedim(0, dim)

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor along a dim."""
        width = tensor.shape[dim] // self.size
        return tensor.detach().narrow(dim, self.index * width, width).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(tensor)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.slice(grad, ctx.dim), None, None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.scatter(grad, ctx.dim), None, None


class _GatherBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.dim = group, dim
        ctx.set_materialize_grads(False)
        whole = group.gather(tensor, dim)
        return whole, whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, partial: Tensor | None) -> tuple[Tensor | None, None, None]:
        mine = ctx.group.slice(grad, ctx.dim) if grad is not None else None
        theirs = ctx.group.scatter(partial, ctx.dim) if partial is not None else None
        return mine if theirs is None else theirs if mine is None else mine + theirs, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.slice(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather(grad, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather(grad, ctx.dim), None, None


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A whole tensor, for computing a different part on each rank: the backward sums the gradients of the parts."""
    return _Enter.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


def sum_of(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The whole from a term on each rank."""
    return _Sum.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


def gather(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """The whole from a part on each rank, used in the same way on all of them: the backward takes the part of the gradient."""
    return _Gather.apply(tensor, group, dim)  # type: ignore[no-any-return,no-untyped-call]


def gather_parts(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """The whole from a part on each rank, for computing a different part on each: the backward sums the gradients and takes the part."""
    return _GatherParts.apply(tensor, group, dim)  # type: ignore[no-any-return,no-untyped-call]


def gather_both(tensor: Tensor, group: TensorGroup, dim: int) -> tuple[Tensor, Tensor]:
    """What `gather` and what `gather_parts` give, for one exchange."""
    whole, partial = _GatherBoth.apply(tensor, group, dim)  # type: ignore[no-untyped-call]
    return whole, partial


def slice_of(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part of a whole: the backward gathers the gradients of all parts."""
    return _Slice.apply(tensor, group, dim)  # type: ignore[no-any-return,no-untyped-call]


def scatter_sum(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part of the sum of a term on each rank: the backward gathers the gradients of all parts."""
    return _ScatterSum.apply(tensor, group, dim)  # type: ignore[no-any-return,no-untyped-call]
