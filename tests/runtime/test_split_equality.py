"""Plans whose backward comes in halves compute what one process computes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text, tensor_rules
from tests.pool import Pool
from tests.split_plans import in_halves

BATCH = 32

PLANS = {
    "pp 2": ({"pp": 2}, WHOLE),
    "fsdp 2": ({"pp": 2, "fsdp": 2}, FSDP),
    "dp 2": ({"dp": 2, "pp": 2}, WHOLE),
    "dp 2 x fsdp 2": ({"dp": 2, "pp": 2, "fsdp": 2}, FSDP),
    "tp 2": ({"pp": 2, "tp": 2}, TENSOR),
    "fsdp 2 x tp 2": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp")),
}


@lru_cache(maxsize=8)
def reference(batch: int = BATCH, **options: Any) -> dict[str, Any]:
    return one_process(11, batch, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved_1f1b"])
@pytest.mark.parametrize("name", PLANS)
def test_halves_of_a_known_schedule_equal_one_process(pool: Pool, name: str, schedule: str) -> None:
    axes, shard = PLANS[name]
    virtual = ", virtual = 2" if schedule == "interleaved_1f1b" else ""
    plan = compile_text(spec_text(axes, shard, schedule=f"{schedule}(microbatches = 4{virtual})", batch=BATCH))
    check_against_one_process(pool, in_halves(plan), reference())


@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "fsdp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_tied_embedding_over_stages_in_halves_equals_one_process(pool: Pool, axes: dict[str, int]) -> None:
    shard = FSDP if "fsdp" in axes else WHOLE
    plan = compile_text(spec_text(axes, shard, schedule="one_f_one_b(microbatches = 4)", batch=BATCH, model="tie = true"))
    check_against_one_process(pool, in_halves(plan), reference(tie=True))
