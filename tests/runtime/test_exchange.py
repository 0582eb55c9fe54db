"""The reduce-scatter that stands in for the one gloo lacks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdsl.runtime.exchange import ExchangeReduceScatter


def scatter(rank, world, store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    exchange = ExchangeReduceScatter()
    given = torch.arange(world * 3, dtype=torch.float32) * 10**rank
    got = exchange.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    exchange(got, given, dist.group.WORLD, dist.ReduceOp.SUM)
    return got


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_gets_the_sum_of_its_part(pool, world):
    factor = sum(10**r for r in range(world))
    parts = pool.run(scatter, world)
    assert torch.equal(torch.cat(parts), torch.arange(world * 3, dtype=torch.float32) * factor)
