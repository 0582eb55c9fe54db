"""Every combination of axes, schedule and accumulation computes what one process computes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text, tensor_rules
from tests.pool import Pool

BATCH = 32

PLAIN = {
    "fsdp 2": ({"fsdp": 2}, FSDP),
    "dp 2": ({"dp": 2}, WHOLE),
    "dp 2 x fsdp 2": ({"dp": 2, "fsdp": 2}, FSDP),
    "tp 2": ({"tp": 2}, TENSOR),
}
PIPELINED = {
    "pp 2": ({"pp": 2}, WHOLE),
    "pp 4": ({"pp": 4}, WHOLE),
    "pp 2 x fsdp 2": ({"pp": 2, "fsdp": 2}, FSDP),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, TENSOR),
    "pp 2 x fsdp 2 x tp 2": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp")),
}
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved_1f1b")


@lru_cache(maxsize=8)
def reference(batch: int = BATCH, **options: Any) -> dict[str, Any]:
    return one_process(11, batch, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_plan_without_pipeline_equals_one_process(pool: Pool, name: str, accumulate: int) -> None:
    axes, shard = PLAIN[name]
    plan = compile_text(spec_text(axes, shard, accumulate=accumulate, batch=BATCH))
    check_against_one_process(pool, plan, reference())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PIPELINED)
def test_plan_with_pipeline_equals_one_process(pool: Pool, name: str, schedule: str, accumulate: int) -> None:
    axes, shard = PIPELINED[name]
    virtual = ", virtual = 2" if schedule == "interleaved_1f1b" else ""
    layers = 8 if virtual and axes["pp"] == 4 else 4  # eight stages need eight layers
    text = spec_text(axes, shard, schedule=f"{schedule}(microbatches = 4{virtual})", accumulate=accumulate, batch=BATCH)
    plan = compile_text(text.replace("layers = 4", f"layers = {layers}"))
    assert len(plan.templates[0].stages) == axes["pp"] * (2 if virtual else 1)
    check_against_one_process(pool, plan, reference(layers=layers))


@pytest.mark.parametrize(
    ("world", "pipelines"),
    [(5, ((2, 3), (3, 5))), (6, ((1, 1), (2, 3), (3, 4)))],
    ids=["2 stages x 3 + 3 stages x 5", "lengths 1, 2, 3"],
)
def test_pipelines_of_different_length_equal_one_process(pool: Pool, world: int, pipelines: tuple[tuple[int, int], ...]) -> None:
    text = spec_text({"dp": 1, "pp": 2}, WHOLE, schedule="one_f_one_b(microbatches = 2)", batch=BATCH)
    plan = compile_text(text, world, pipelines)
    assert plan.world_size == world
    assert [len(p.microbatches) for p in plan.pipelines] == [m for _, m in pipelines]
    assert len({t.stages for t in plan.templates}) == len(pipelines)
    check_against_one_process(pool, plan, reference())


def test_pipelines_of_different_length_with_sharded_stages_equal_one_process(pool: Pool) -> None:
    text = spec_text({"dp": 1, "pp": 2, "fsdp": 2}, FSDP, schedule="one_f_one_b(microbatches = 2)", batch=BATCH)
    check_against_one_process(pool, compile_text(text, 8, ((1, 1), (3, 3))), reference())


@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "fsdp": 2}, {"dp": 2, "pp": 2}, {"fsdp": 2}], ids=str)
def test_tied_embedding_over_stages_equals_one_process(pool: Pool, axes: dict[str, int]) -> None:
    shard = FSDP if "fsdp" in axes else WHOLE
    schedule = "one_f_one_b(microbatches = 4)" if "pp" in axes else ""
    plan = compile_text(spec_text(axes, shard, schedule=schedule, batch=BATCH, model="tie = true"))
    check_against_one_process(pool, plan, reference(tie=True))


def test_clipping_uses_one_norm_over_all_stages_and_pipelines(pool: Pool) -> None:
    text = spec_text({"dp": 2, "pp": 2, "fsdp": 2}, FSDP, schedule="one_f_one_b(microbatches = 2)", batch=BATCH, train="clip = 0.1")
    expected = reference(clip=0.1)
    assert min(expected["norms"]) > 0.1
    check_against_one_process(pool, compile_text(text), expected)


def test_parameters_kept_whole_beside_sharded_ones_are_summed_over_the_shard_axis(pool: Pool) -> None:
    shard = 'shard { "**.*norm.weight" => replicate(); "**" => fsdp(fsdp) }'
    text = spec_text({"pp": 2, "fsdp": 2}, shard, schedule="one_f_one_b(microbatches = 2)", batch=BATCH)
    check_against_one_process(pool, compile_text(text), reference())
