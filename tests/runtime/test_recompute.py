"""Activations that are computed again in the backward: the same numbers, as many gathers, and less kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdsl.grammar.errors import ModelError
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.runtime.recompute import Recompute
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool
from tests.traces import traced

BATCH = 32
BLOCKS, PARTS = 'memory { recompute = "layers.*" }', 'memory { recompute = "layers.*.mlp" }'
PIPELINE = "one_f_one_b(microbatches = 4)"

MESHES = {
    "dp 2": ({"dp": 2}, WHOLE, ""),
    "fsdp 2": ({"fsdp": 2}, FSDP, ""),
    "tp 2": ({"tp": 2}, TENSOR, ""),
    "pp 2 x fsdp 2": ({"pp": 2, "fsdp": 2}, FSDP, PIPELINE),
}


@lru_cache(maxsize=2)
def reference(**options: Any) -> dict[str, Any]:
    return one_process(11, BATCH, **options)


@pytest.mark.parametrize("memory", [BLOCKS, PARTS], ids=["blocks", "parts of blocks"])
@pytest.mark.parametrize("name", MESHES)
def test_computing_again_changes_no_number(pool: Pool, name: str, memory: str) -> None:
    axes, shard, schedule = MESHES[name]
    plan = compile_text(spec_text(axes, shard, schedule=schedule, accumulate=2, batch=BATCH) + memory)
    assert plan.facts.recomputed[0] == ("layers.0" if memory is BLOCKS else "layers.0.mlp")
    check_against_one_process(pool, plan, reference())


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_backwards_in_halves_may_compute_again(pool: Pool, schedule: str) -> None:
    text = spec_text({"pp": 2, "fsdp": 2}, FSDP, schedule=f"{schedule}(microbatches = 4)", batch=BATCH) + BLOCKS
    check_against_one_process(pool, compile_text(text), reference())


@pytest.mark.parametrize("name", ["fsdp 2", "pp 2 x fsdp 2"])
def test_what_is_drawn_is_drawn_again(pool: Pool, name: str) -> None:
    """With dropout the masks of the second forward are those of the first: losses and gradients are those of the plan that keeps everything."""
    axes, shard, schedule = MESHES[name]
    found = []
    for memory in ("", BLOCKS):
        plan = compile_text(spec_text(axes, shard, schedule=schedule, batch=BATCH, model="dropout = 0.2") + memory)
        found.append(traced(pool, plan, 2))
    kept, again = found
    assert again.losses == kept.losses
    for step in range(2):
        for parameter, gradient in kept.gradients[step].items():
            assert torch.allclose(again.gradients[step][parameter], gradient, rtol=1e-5, atol=1e-7), parameter


def gathers(rank: int, world: int, store: Any, text: str) -> list[int]:
    """How many gathers of parameters, and reductions of gradients, a step has."""
    plan = Plan.from_json(text)
    counts = [0, 0]
    gather, scatter = dist.all_gather_single, dist.all_to_all_single

    def counting(index: int, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[index] += 1
            return call(*args, **kwargs)

        return counted

    with Session(plan, rank, store) as session:
        rows = read_rows(make_dataset(plan), range(plan.job.batch))
        session.step(rows)
        dist.all_gather_single, dist.all_to_all_single = counting(0, gather), counting(1, scatter)
        try:
            session.step(rows)
        finally:
            dist.all_gather_single, dist.all_to_all_single = gather, scatter
    return counts


@pytest.mark.parametrize("name", ["fsdp 2", "pp 2 x fsdp 2"])
def test_checkpointing_lies_inside_the_unit_and_gathers_nothing_again(pool: Pool, name: str) -> None:
    axes, shard, schedule = MESHES[name]
    found = []
    for memory in ("", BLOCKS):
        plan = compile_text(spec_text(axes, shard, schedule=schedule, batch=BATCH) + memory)
        found.append(pool.run(gathers, plan.world_size, plan.to_json()))
    assert found[0] == found[1]
    assert min(count for counts in found[0] for count in counts) > 0


def test_time_and_memory_tell_of_it() -> None:
    text = spec_text({"pp": 2}, WHOLE, schedule=PIPELINE, batch=BATCH)
    plain, again = cost(compile_text(text)), cost(compile_text(text + BLOCKS))
    assert 1.1 < again.step_time / plain.step_time < 4 / 3, "a forward more for the blocks, which are most of three"
    assert all(a.activations < p.activations / 2 for a, p in zip(again.memory[:1], plain.memory[:1], strict=True))


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0).tanh()


def test_a_module_that_writes_into_its_input_is_refused_where_the_probe_did_not_see_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Writes())
    Recompute().apply(model, ["1"])
    with pytest.raises(ModelError, match="1 writes into what it is given"):
        model(torch.ones(1, 2))
