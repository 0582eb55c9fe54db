"""Losses of nodes in runs on data that is iterated, with a last batch that is not full and held-out data: same samples, same losses, both kinds."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from pdsl.lowering.plan import Plan, Validation
from pdsl.lowering.spec import CallValue
from pdsl.runtime.chaos import Fault
from pdsl.runtime.resilient import Nursery
from tests.runtime.storms import DEADLINE, TOLERANCE, Storm, deviation, plan_of, run

pytestmark = pytest.mark.timeout(300)

DATA = 'data = source("tests.batch_models:text", context = 8); last = pad'  # 40 rows: batches of 16, 16, 8


def plan(nodes: int = 4, **more: Any) -> Plan:
    made = plan_of(nodes, batch=16, steps=6, data=DATA, **more)
    held_out = CallValue("source", ("tests.batch_models:text",), (("context", 8),))
    return evolve(made, validation=Validation(held_out, 2, 21))


def validations(storm: Storm) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in storm.named("validated")}


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Storm:
    storm = run(plan(), nursery, timeout=DEADLINE)
    assert list(storm.losses) == [0, 1, 2, 3, 4, 5]
    assert {e["step"]: e["samples"] for e in storm.named("step")} == {0: 16, 1: 16, 2: 8, 3: 16, 4: 16, 5: 8}
    assert {e["step"]: e["samples"] for e in storm.named("validated")} == {2: 21, 4: 21, 6: 21}
    return storm


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        (1, [Fault(1, "validate", 4, "rank")]),
        (1, [Fault(3, "validate", 6, "node")]),  # after the last step: the others take the loss once more
        (1, [Fault(2, "sums", 2, "node")]),  # in a step that is not full
        (2, [Fault(3, "validate", 2, "rank")]),
    ],
    ids=["between steps", "after the last", "in a short step", "half of an island"],
)
def test_a_loss_leaves_no_trace_in_any_loss(nursery: Nursery, undisturbed: Storm, ranks: int, faults: list[Fault]) -> None:
    storm = run(plan(ranks=ranks), nursery, faults, timeout=DEADLINE)
    assert len(storm.lost) == 1
    assert deviation(undisturbed, storm) <= TOLERANCE
    assert validations(storm) == pytest.approx(validations(undisturbed), rel=TOLERANCE)
