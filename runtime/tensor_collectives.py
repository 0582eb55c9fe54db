"""What tensor ranks exchange, as autograd functions: each says what its backward exchanges in turn.

A tensor that is whole and equal on all ranks has a gradient that is whole and equal too; one that is split has the gradient of its part. Under that
convention the backward of a sum is a copy and that of a copy a sum, a gather and a slice are each other's backward, and so are a gather into parts
of the computation and a sum that scatters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TensorGroup", "enter", "gather", "gather_both", "gather_parts", "scatter_sum", "slice_of", "sum_of"]

_Exchanging: TypeAlias = Callable[[Tensor], Tensor]


class TensorGroup:
    """The ranks that differ on some tensor axes only: their process group, the part that this rank holds and their number.

    `places` gives the part that each rank of the group holds, if that is not its number.
    """

    def __init__(self, group: dist.ProcessGroup, index: int, size: int, places: tuple[int, ...] = ()) -> None:
        self.group = group
        self.index = index
        self.size = size
        self._places = places
        self.scores: type[Tensor] | None = None  # of tensors whose last dim lies split over this group, once there are any

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in new memory."""
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=self.group)
        return whole

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, in new memory."""
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along a dim."""
        part = tensor.detach().movedim(dim, 0).contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(whole, part, group=self.group)
        if self._places:
            chunks = whole.chunk(self.size)
            whole = torch.cat([chunks[self._places.index(i)] for i in range(self.size)])
        return whole.movedim(0, dim).contiguous()  # else every projection of it would copy it, and keep its copy

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
        return tensor.detach().narrow(dim, self.index * width, width).clone(memory_format=torch.contiguous_format)


class _Exchange(torch.autograd.Function):
    """What `there` makes of a tensor; its backward is what `back` makes of the gradient of that.

    What is made is no view of the tensor, which would hold it: a tensor may hold what was exchanged for it, and the two would live for ever.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Exchanging, back: _Exchanging) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


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


def _exchanged(tensor: Tensor, there: _Exchanging, back: _Exchanging) -> Tensor:
    return _Exchange.apply(tensor, there, back)  # type: ignore[no-any-return,no-untyped-call]


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A whole tensor, for computing a different part on each rank: the backward sums the gradients of the parts."""
    return _exchanged(tensor, lambda t: t.data, group.sum)


def sum_of(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The whole from a term on each rank."""
    return _exchanged(tensor, group.sum, lambda grad: grad)


def gather(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """The whole from a part on each rank, used in the same way on all of them: the backward takes the part of the gradient."""
    return _exchanged(tensor, lambda t: group.gather(t, dim), lambda grad: group.slice(grad, dim))


def gather_parts(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """The whole from a part on each rank, for computing a different part on each: the backward sums the gradients and takes the part."""
    return _exchanged(tensor, lambda t: group.gather(t, dim), lambda grad: group.scatter(grad, dim))


def gather_both(tensor: Tensor, group: TensorGroup, dim: int) -> tuple[Tensor, Tensor]:
    """What `gather` and what `gather_parts` give, for one exchange."""
    whole, partial = _GatherBoth.apply(tensor, group, dim)  # type: ignore[no-untyped-call]
    return whole, partial


def slice_of(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part of a whole: the backward gathers the gradients of all parts."""
    return _exchanged(tensor, lambda t: group.slice(t, dim), lambda grad: group.gather(grad, dim))


def scatter_sum(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part of the sum of a term on each rank: the backward gathers the gradients of all parts."""
    return _exchanged(tensor, lambda t: group.scatter(t, dim), lambda grad: group.gather(grad, dim))
