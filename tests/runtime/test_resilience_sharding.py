"""Nodes that are lost while units are grouped, gathered again and reduced after each microbatch: gradients that are kept are kept as shards."""

from __future__ import annotations

import pytest
from attrs import evolve

from pdsl.lowering.plan import Sharding
from pdsl.runtime.chaos import Fault
from pdsl.runtime.resilient import Nursery
from tests.runtime.storms import DEADLINE, TOLERANCE, Storm, deviation, plan_of, run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Storm:
    return run(plan_of(5), nursery, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("sharding", "rank", "point"),
    [
        (Sharding(group=2, every=True), 3, "backward"),
        (Sharding(reshard=True, every=True), 2, "sums"),
        (Sharding(reshard=True, group=2, prefetch=0), 5, "backward"),
    ],
)
def test_a_node_is_lost_under_every_way_to_shard(nursery: Nursery, undisturbed: Storm, sharding: Sharding, rank: int, point: str):
    storm = run(evolve(plan_of(4, ranks=2), sharding=sharding), nursery, [Fault(rank, point, 3, "node")], timeout=DEADLINE)
    assert deviation(undisturbed, storm) <= TOLERANCE
    assert storm.lost == [rank // 2]
