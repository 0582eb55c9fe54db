"""Dropout and other random numbers: every plan draws for a row what one process draws for it.

The reference is a plain loop over whole batches under `row_seeded`, which only says where the numbers come from.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdsl.data import python_source
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe import probe
from pdsl.models import gpt
from pdsl.runtime.draws import row_seeded
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


RECOMPUTE = 'memory { recompute = "layers.*" }'
SEQUENCE = tensor_rules().replace('  "**" ', '  "**.*_norm.weight" => sequence(tp)\n  "**" ', 1)

PLANS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
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
    "recompute": ({"dp": 1}, RECOMPUTE, {"accumulate": 2}),
    "fsdp, recompute": ({"fsdp": 2}, f"{FSDP}\n{RECOMPUTE}", {"accumulate": 2}),
    "halves": ({"pp": 2}, WHOLE, {"schedule": "zbv(microbatches = 4)"}),
    "halves, recompute": ({"pp": 2}, RECOMPUTE, {"schedule": "zbv(microbatches = 4)"}),
    "pp, fsdp, tp": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp"), {"schedule": "one_f_one_b(microbatches = 2)"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_dropout_is_that_of_one_process(pool: Pool, name: str) -> None:
    axes, shard, options = PLANS[name]
    check_against_one_process(pool, plan_of(axes, shard, **options), expected())


class _Again(nn.Module):
    """A block that may compute a part of itself once more in the backward, by its own decision."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.4)
        self.again = again

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.second(self.dropout(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x) + self.first(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return y


class _AgainChain(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Again(again=again) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", ["method", "function", "grad"])
def test_what_a_model_computes_again_by_itself_draws_the_same_rows(how: str, parts: int) -> None:
    x = torch.randn(6, 8)

    def gradient(parts: int, how: str, *, again: bool) -> Tensor:
        torch.manual_seed(0)
        model = _AgainChain(again=again)
        facts = probe(lambda: _AgainChain(again=again), {}, batch={"x": x})
        size = 6 // parts
        found = []
        for part in range(parts):
            places = range(part * size, (part + 1) * size)
            with row_seeded(model, facts, seed=1, step=0, places=places, microbatch=part):
                loss = model(x[places.start : places.stop]) / parts
                torch.manual_seed(7)
                if how == "method":
                    loss.backward()
                elif how == "function":
                    torch.autograd.backward([loss], [torch.ones_like(loss)])
                else:
                    found.append(torch.autograd.grad(loss, list(model.parameters())))
        whole = [p.grad for p in model.parameters()] if how != "grad" else [sum(grads) for grads in zip(*found, strict=True)]
        return torch.cat([g.flatten() for g in whole if isinstance(g, Tensor)])

    torch.testing.assert_close(gradient(parts, how, again=True), gradient(1, "method", again=False), rtol=1e-5, atol=1e-6)
