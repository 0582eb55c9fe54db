"""Low precision: any mesh computes what one process does that holds fp32 weights, computes in bf16 and adds up gradients in fp32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pdsl.data import python_source
from pdsl.models import gpt
from pdsl.runtime.rows import step_indices
from pdsl.runtime.verify import compare, oracle
from tests.equality import FSDP, MODEL, STEPS, TENSOR, WHOLE, check_against_one_process, compile_text, spec_text
from tests.pool import Pool
from tests.traces import traced

BATCH, SEED = 32, 11
BF16 = "precision { params = bf16 }"
PIPELINE = "one_f_one_b(microbatches = 4)"
TOLERANCE = 2e-2
"""Of bf16, which has 8 bits: two orders of the sums in a product of matrices differ by some of its roundings of 2**-9 each."""

MESHES = {
    "one rank": ({"dp": 1}, WHOLE, ""),
    "dp 2": ({"dp": 2}, WHOLE, ""),
    "fsdp 2": ({"fsdp": 2}, FSDP, ""),
    "dp 2 x fsdp 2": ({"dp": 2, "fsdp": 2}, FSDP, ""),
    "pp 2": ({"pp": 2}, WHOLE, PIPELINE),
    "pp 2 x fsdp 2": ({"pp": 2, "fsdp": 2}, FSDP, PIPELINE),
}


@lru_cache(maxsize=8)
def low_process(piece: int, reduce: torch.dtype = torch.float32, output: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a person would write: fp32 weights, bf16 copies of them that compute, `piece` rows at a time; sums of gradients in `reduce`."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = gpt(**MODEL)
    data = python_source(context=16, limit=20000)
    weights = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, eps=1e-4)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        rows = data.rows(step_indices(SEED, step, len(data), BATCH))
        sums = {n: torch.zeros_like(p, dtype=reduce) for n, p in weights.items()}
        total = 0.0
        for begin in range(0, BATCH, piece):
            copies = {n: p.detach().bfloat16().requires_grad_() for n, p in weights.items()}
            logits = torch.func.functional_call(net, copies, (rows["tokens"][begin : begin + piece],)).to(output)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"][begin : begin + piece].flatten())
            weighted = loss * (piece / BATCH)
            weighted.backward()
            for name, copy in copies.items():
                assert copy.grad is not None
                sums[name] += copy.grad.to(reduce)
            total += float(weighted.detach())
        for name, p in weights.items():
            p.grad = sums[name].float()
        found["losses"].append(total)
        found["gradients"].append({n: p.grad.clone() for n, p in weights.items()})
        found["norms"].append(float(torch.nn.utils.get_total_norm([p.grad for p in weights.values()])))
        optimizer.step()
    found["weights"] = {n: p.detach().clone() for n, p in weights.items()}
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_bf16_equals_one_process_that_takes_the_same_rows_at_a_time(pool: Pool, name: str, accumulate: int) -> None:
    axes, shard, schedule = MESHES[name]
    plan = compile_text(spec_text(axes, shard, schedule=schedule, accumulate=accumulate, batch=BATCH) + BF16)
    check_against_one_process(pool, plan, low_process(plan.rows_per_rank))


@pytest.mark.parametrize(
    ("axes", "shard", "schedule"), [({"tp": 2}, TENSOR, ""), ({"pp": 2, "tp": 2}, TENSOR, PIPELINE)], ids=["tp 2", "pp 2 x tp 2"]
)
def test_bf16_with_split_matrices_is_as_near_as_bf16_allows(pool: Pool, axes: dict[str, int], shard: str, schedule: str) -> None:
    plan = compile_text(spec_text(axes, shard, schedule=schedule, batch=BATCH) + BF16)
    ours = traced(pool, plan, STEPS)
    theirs = low_process(plan.rows_per_rank)
    assert abs(ours.losses[0] / theirs["losses"][0] - 1) < 1e-4
    for name, gradient in theirs["gradients"][0].items():
        distance = float((ours.gradients[0][name] - gradient).norm() / gradient.norm())
        assert distance <= TOLERANCE, f"{name}: {distance:.2e}"


@pytest.mark.parametrize("name", ["dp 2", "fsdp 2", "pp 2 x fsdp 2"])
def test_sums_in_bf16_are_sums_in_bf16(pool: Pool, name: str) -> None:
    axes, shard, schedule = MESHES[name]
    text = spec_text(axes, shard, schedule=schedule, batch=BATCH) + "precision { params = bf16; reduce = bf16; output = bf16 }"
    plan = compile_text(text)
    ours = traced(pool, plan, STEPS)
    theirs = low_process(plan.rows_per_rank, torch.bfloat16, torch.bfloat16)
    assert abs(ours.losses[0] / theirs["losses"][0] - 1) < 1e-2
    for name_, gradient in theirs["gradients"][0].items():
        assert float((ours.gradients[0][name_] - gradient).norm() / gradient.norm()) <= TOLERANCE
        assert torch.equal(ours.gradients[0][name_].bfloat16().float(), ours.gradients[0][name_]), "a sum in bf16 has 8 bits"


@pytest.mark.parametrize(
    "precision",
    ["params = bf16", "params = bf16; output = bf16", "reduce = bf16", "output = bf16"],
)
def test_pdsl_verify_compares_with_one_process_in_the_same_formats(pool: Pool, precision: str) -> None:
    plan = compile_text(spec_text({"dp": 2, "fsdp": 2}, FSDP, accumulate=2, batch=BATCH) + f"precision {{ {precision} }}")
    ours = traced(pool, plan, STEPS)
    report = compare(ours, oracle(plan, ours), TOLERANCE if "bf16; output" in precision or "reduce" in precision else 1e-5)
    assert report.ok, report.worst
