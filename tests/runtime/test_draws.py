"""Dropout and other random numbers: every plan draws for a row what one process draws for it.

The reference is a plain loop over whole batches under `row_seeded`, which only says where the numbers come from.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pdsl.data import python_source
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.plan import Plan
from pdsl.models import gpt
from pdsl.runtime.draws import Draws, row_seeded
from pdsl.runtime.rows import step_indices
from tests.equality import FSDP, MODEL, STEPS, TENSOR, WHOLE, check_against_one_process, compile_text, spec_text, tensor_rules
from tests.pool import Pool

DROPOUT = 0.3
SEED, BATCH = 11, 16


def plan_of(axes: dict[str, int], shard: str = WHOLE, **options: Any) -> Plan:
    return compile_text(spec_text(axes, shard, model=f"dropout = {DROPOUT}", batch=BATCH, **options))


@cache
def expected() -> dict[str, Any]:
    """Three steps of one process on whole batches."""
    facts = plan_of({"dp": 1}).facts
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = gpt(**MODEL, dropout=DROPOUT)
    data = python_source(context=16, limit=20000)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        rows = data.rows(step_indices(SEED, step, len(data), BATCH))
        optimizer.zero_grad()
        with row_seeded(net, facts, seed=SEED, step=step, places=range(BATCH)):
            loss = net(**rows)
        loss.backward()
        found["gradients"].append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        found["norms"].append(float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        optimizer.step()
        found["losses"].append(loss.item())
    found["weights"] = {n: p.detach().clone() for n, p in net.named_parameters()}
    return found


SEQUENCE = TENSOR.replace('  "**" ', '  "layers.*.*_norm.weight" => sequence(tp)\n  "**" ', 1)

PLANS = {
    "one rank": ({"dp": 1}, WHOLE, {}),
    "accumulate": ({"dp": 1}, WHOLE, {"accumulate": 4}),
    "dp": ({"dp": 2}, WHOLE, {}),
    "fsdp": ({"fsdp": 2}, FSDP, {}),
    "tp": ({"tp": 2}, TENSOR, {}),
    "tp, sequence": ({"tp": 2}, SEQUENCE, {}),
    "pp, tp, sequence": ({"pp": 2, "tp": 2}, SEQUENCE, {"schedule": "one_f_one_b(microbatches = 2)"}),
    "pp": ({"pp": 2}, WHOLE, {"schedule": "one_f_one_b(microbatches = 4)"}),
    "pp, cut inside": ({"pp": 3}, WHOLE, {"schedule": "gpipe(microbatches = 8)"}),
    "dp, fsdp": ({"dp": 2, "fsdp": 2}, FSDP, {"accumulate": 2}),
    "fsdp, tp": ({"fsdp": 2, "tp": 2}, tensor_rules("fsdp"), {}),
    "pp, fsdp, tp": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp"), {"schedule": "one_f_one_b(microbatches = 2)"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_dropout_is_that_of_one_process(pool: Pool, name: str) -> None:
    axes, shard, options = PLANS[name]
    check_against_one_process(pool, plan_of(axes, shard, **options), expected())
