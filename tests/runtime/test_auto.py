"""Schedules that were searched for compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pdsl.lowering.schedule import Op
from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool

DEADLINE = 100.0

CASES = {
    "two positions": ({"pp": 2}, WHOLE, "auto(microbatches = 4)", 1),
    "slow transfers": ({"pp": 2}, WHOLE, "auto(microbatches = 4, hop = 1)", 1),
    "whole backwards": ({"pp": 3}, WHOLE, "auto(microbatches = 4, split = false, hop = 1/4)", 1),
    "sharded, two pipelines, accumulated": ({"dp": 2, "pp": 2, "fsdp": 2}, FSDP, "auto(microbatches = 2)", 2),
    "tensor": ({"pp": 2, "tp": 2}, TENSOR, "auto(microbatches = 4, hop = 1/8)", 1),
    "four positions": ({"pp": 4}, WHOLE, "auto(microbatches = 8, hop = 1/2)", 1),
}


@cache
def expected() -> dict[str, Any]:
    return one_process(11, 16)


@pytest.mark.parametrize("name", CASES)
def test_a_found_schedule_computes_what_one_process_computes(pool: Pool, name: str):
    axes, shard, schedule, accumulate = CASES[name]
    plan = compile_text(spec_text(axes, shard, schedule=schedule, accumulate=accumulate))
    assert plan.templates[0].schedule.name == "auto"
    check_against_one_process(pool, plan, expected(), deadline=DEADLINE)


def test_unequal_pipelines_with_a_schedule_each_compute_what_one_process_computes(pool: Pool):
    plan = compile_text(spec_text({"pp": 2}, WHOLE, schedule="auto(microbatches = 4)"), world=5, pipelines=[(2, 3), (3, 5)])
    assert [t.schedule.microbatches for t in plan.templates] == [3, 5]
    check_against_one_process(pool, plan, expected(), deadline=DEADLINE)


def test_the_cases_have_backwards_in_halves_and_whole_ones():
    found = set()
    for axes, shard, schedule, accumulate in CASES.values():
        plan = compile_text(spec_text(axes, shard, schedule=schedule, accumulate=accumulate))
        found.update(o.op for t in plan.templates for row in t.schedule.rows for o in row)
    assert found == set(Op)
