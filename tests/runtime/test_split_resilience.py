"""Nodes that are lost while backwards come in halves: what is kept of the step is complete, and the losses are those of an undisturbed run."""

from __future__ import annotations

import pytest

from pdsl.lowering.program import ActionKind
from pdsl.lowering.programs import program
from pdsl.runtime.chaos import Fault
from pdsl.runtime.resilient import Nursery
from tests.runtime.storms import DEADLINE, TOLERANCE, Storm, deviation, plan_of, run

pytestmark = pytest.mark.timeout(300)

GPT = '"pdsl.models:gpt" { layers = 6; width = 16; heads = 2; context = 8 }'  # eight layers: stages in a V for three positions

PLAIN = "sgd(lr = 1e-2)"
"""Over these steps Adam would make differences that count out of the order in which shards are summed."""


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Storm:
    return run(plan_of(5, model=GPT, optimizer=PLAIN), nursery, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("schedule", "ranks", "fault"),
    [
        ("zero_bubble", 1, Fault(1, "backward", 3, "node")),
        ("zbv", 1, Fault(4, "sums", 3, "node")),
        ("zbv", 2, Fault(2, "backward", 3, "rank")),
    ],
    ids=str,
)
def test_a_node_is_lost_between_two_halves(nursery: Nursery, undisturbed: Storm, schedule: str, ranks: int, fault: Fault) -> None:
    plan = plan_of(5 if ranks == 1 else 4, ranks=ranks, model=GPT, optimizer=PLAIN, schedule=schedule)
    assert any(a.kind is ActionKind.BACKWARD_WEIGHT for a in program(plan, fault.rank).actions)
    storm = run(plan, nursery, [fault], timeout=DEADLINE)
    assert storm.lost == [fault.rank // ranks]
    assert deviation(undisturbed, storm) <= TOLERANCE
