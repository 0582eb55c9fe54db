"""Losses of nodes in the middle of a step of models with dropout or batch statistics: masks and running statistics are those of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from pdsl.runtime.chaos import Fault
from pdsl.runtime.resilient import Nursery
from tests.runtime.storms import DEADLINE, GPT, TOLERANCE, deviation, plan_of, run

pytestmark = pytest.mark.timeout(300)

JOBS: dict[str, dict[str, Any]] = {
    "dropout": {"model": GPT.format("dropout = 0.3")},
    "statistics": {
        "model": '"tests.row_models:reading" {}',
        "data": 'data = source("tests.row_models:normed_rows", size = 960)',
        "optimizer": "sgd(lr = 1e-2)",
    },
}


@pytest.mark.parametrize(("ranks", "point"), [(1, "backward"), (2, "sums")])
@pytest.mark.parametrize("kind", JOBS)
def test_a_step_that_others_finish_is_the_step_that_it_was(nursery: Nursery, kind: str, ranks: int, point: str) -> None:
    job = JOBS[kind]
    undisturbed = run(plan_of(4, ranks=ranks, steps=6, **job), nursery, timeout=DEADLINE)
    storm = run(plan_of(4, ranks=ranks, steps=6, **job), nursery, [Fault(1, point, 2, "node")], timeout=DEADLINE)
    assert storm.named("rerouted")
    assert deviation(undisturbed, storm) <= TOLERANCE
