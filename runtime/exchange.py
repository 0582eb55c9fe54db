"""A reduce-scatter for gloo, which has none: torch sums the whole tensor on every rank there and throws most of it away.

Every rank sends each other rank its part and adds up what it got: half the bytes of the sum, and one round instead of two. The exchange runs
while the backward goes on, which FSDP2 by itself only does on streams of a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["ExchangeReduceScatter"]

_IN_FLIGHT = 2  # exchanges at a time; more hide no more time, and each keeps two buffers of the size of a unit


class ExchangeReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: where the buffers come from, and the reduction.

    The results are there after `settle`. FSDP2 only hands them on as the gradients, as long as it neither divides them (units are told to
    sum) nor reduces in another dtype than that of the parameters, nor adds to gradients of an earlier reduction. Where it does more than that,
    the exchange has to be one that `waits`: its results are there when the call returns.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._flying: deque[tuple[dist.Work, torch.Tensor, torch.Tensor, torch.Tensor]] = deque()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Begin to sum the parts of `input_tensor` (ranks * n,) that belong to this rank into `output_tensor` (n,), in order of rank."""
        assert op == dist.ReduceOp.SUM, "units are told to sum"
        assert not async_op, "FSDP2 does not wait for this one"
        self._settle(_IN_FLIGHT - 1)
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        assert work is not None
        self._flying.append((work, input_tensor, parts.view(group.size(), -1), output_tensor))
        if self._waits:
            self._settle(0)

    def settle(self) -> None:
        """Wait until every result is there."""
        self._settle(0)

    @torch.no_grad()
    def _settle(self, left: int) -> None:
        while len(self._flying) > left:
            work, _, parts, output = self._flying.popleft()
            work.wait()
            torch.sum(parts, dim=0, out=output)
