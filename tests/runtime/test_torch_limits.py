"""What torch itself cannot do, on raw torch: when one of these fails, torch was mended and a rule of ours may go."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.pool import Pool


def _attention_over_a_split_sequence(rank: int, world: int, store: Any) -> str:
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    buffers = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(*buffers, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_torch_has_no_context_parallel_attention_on_a_cpu(pool: Pool) -> None:
    """PDL320 says so."""
    for message in pool.run(_attention_over_a_split_sequence, 2):
        assert "_scaled_dot_product_flash_attention_for_cpu" in message
