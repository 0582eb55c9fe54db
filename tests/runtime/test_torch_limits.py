"""What torch itself cannot do, on raw torch: when one of these fails, torch was mended and a rule of ours may go."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
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


def _a_whole_sequence_for_a_sequence_parallel_norm(rank: int, world: int, store: Any) -> tuple[int, ...]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    norm = nn.LayerNorm(8)
    parallelize_module(norm, init_device_mesh("cpu", (world,)), SequenceParallel(use_local_output=False))
    return tuple(norm(torch.zeros(2, 5, 8)).shape)


def test_torch_takes_a_whole_sequence_for_a_part_of_a_longer_one(pool: Pool) -> None:
    """PDSL splits the stream itself, and PDL313 refuses a length of 5."""
    assert pool.run(_a_whole_sequence_for_a_sequence_parallel_norm, 2) == [(2, 10, 8)] * 2


def _a_norm_of_heads(rank: int, world: int, store: Any) -> tuple[float, float]:
    """The gradient of a scale that is whole and works on the heads of one rank, and of the same in one process."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(8, 16, bias=False), "norm": nn.RMSNorm(4), "down": nn.Linear(16, 8, bias=False)})
        x = torch.randn(2, 5, 8)
        if split:
            styles: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, init_device_mesh("cpu", (world,)), styles)
        model["down"](model["norm"](model["up"](x).unflatten(-1, (-1, 4))).flatten(2)).square().sum().backward()
        found.append(float(model["norm"].weight.grad.norm()))
    return found[0], found[1]


def test_torch_leaves_the_gradient_of_a_norm_of_heads_in_parts(pool: Pool) -> None:
    """PDSL sums it; see the tests of tensor parallel plans."""
    for split, whole in pool.run(_a_norm_of_heads, 2):
        assert abs(split - whole) > 0.1 * whole
