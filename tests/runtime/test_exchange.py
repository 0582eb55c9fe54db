"""The reduce-scatter that stands in for the one gloo lacks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdsl.runtime.exchange import ExchangeReduceScatter


def scatter(rank, world, store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    exchange = ExchangeReduceScatter()
    results = [exchange.allocate((3,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(5)]
    for k, result in enumerate(results):
        given = (torch.arange(world * 3, dtype=torch.float32) + k) * 10**rank
        exchange(result, given, dist.group.WORLD, dist.ReduceOp.SUM)
    exchange.settle()
    return torch.stack(results)


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_gets_the_sum_of_its_part_in_every_exchange(pool, world):
    factor = sum(10**r for r in range(world))
    parts = torch.cat(pool.run(scatter, world), dim=1)
    assert torch.equal(parts, torch.stack([(torch.arange(world * 3, dtype=torch.float32) + k) * factor for k in range(5)]))
