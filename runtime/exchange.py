"""A reduce-scatter for gloo, which has none: torch sums the whole tensor on every rank there and throws most of it away.

Every rank sends each other rank its part and adds up what it got: half the bytes of the sum, and one round instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["ExchangeReduceScatter"]


class ExchangeReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: where the buffers come from, and the reduction."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Sum the parts of `input_tensor` (ranks * n,) that belong to this rank into `output_tensor` (n,), in order of rank; blocks."""
        assert op == dist.ReduceOp.SUM, "units are told to sum"
        assert not async_op, "FSDP2 uses the result at once"
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
