"""Equality with one process: a spec, run on the worker pool, against a loop that anybody would write in plain torch.

The oracle here shares nothing with the runtime but the model, the data set and the order of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch

import pdsl
from pdsl.data import python_source
from pdsl.lowering.plan import Plan
from pdsl.models import gpt
from pdsl.runtime.rows import step_indices
from pdsl.runtime.verify import Trace, assemble, verify_rank
from tests.pool import Pool

__all__ = ["FSDP", "MODEL", "STEPS", "TENSOR", "WHOLE", "check_against_one_process", "compile_text", "farthest", "spec_text"]

STEPS = 3
TOLERANCE = 1e-5
MODEL = {"layers": 4, "width": 32, "heads": 4, "context": 16}

WHOLE = ""
FSDP = 'shard { "**" => fsdp(fsdp) }'


def tensor_rules(tail: str = "") -> str:
    """Column-wise into a block's inner width, row-wise out of it; `tail` is added to every layout."""
    whole = f"fsdp({tail})" if tail else "replicate()"
    plus = f" + fsdp({tail})" if tail else ""
    return f"""shard {{
  "layers.*.attn.w{{q,k,v}}.weight" => colwise(tp){plus}
  "layers.*.attn.wo.weight"       => rowwise(tp){plus}
  "layers.*.mlp.w1.weight"        => colwise(tp){plus}
  "layers.*.mlp.w2.weight"        => rowwise(tp){plus}
  "**"                            => {whole}
}}"""


TENSOR = tensor_rules()


def spec_text(
    axes: dict[str, int], shard: str, *, schedule: str = "", accumulate: int = 1, batch: int = 16, train: str = "", model: str = ""
) -> str:
    """A spec of the small GPT."""
    mesh = "\n".join(f"  axis {name} = {size}" for name, size in axes.items())
    pipeline = f"pipeline over pp {{ schedule = {schedule} }}" if schedule else ""
    arguments = "; ".join(f"{k} = {v}" for k, v in MODEL.items()) + (f"; {model}" if model else "")
    return f"""pdsl 1
mesh {{
{mesh}
}}
cluster {{ device = cpu }}
model "pdsl.models:gpt" {{ {arguments} }}
{shard}
{pipeline}
train {{
  data = source("pdsl.data:python_source", context = 16, limit = 20000)
  batch = {batch}
  steps = 10
  accumulate = {accumulate}
  optimizer = adamw(lr = 1e-3, eps = 1e-4)
  seed = 11
  {train}
}}
"""


def compile_text(text: str, world: int | None = None, pipelines: Sequence[tuple[int, int]] | None = None) -> Plan:
    """A spec to its plan."""
    return pdsl.compile(pdsl.load(text), world_size=world, pipelines=pipelines)


def _rank(rank: int, world: int, store: Any, plan: str, steps: int) -> dict[str, Any]:
    return verify_rank(Plan.from_json(plan), rank, store, steps=steps)


def one_process(seed: int, batch: int, steps: int = STEPS, *, clip: float | None = None, **model: Any) -> dict[str, Any]:
    """What a person would write: build, and per step one forward, one backward, one update on the whole batch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = gpt(**{**MODEL, **model})
    data = python_source(context=16, limit=20000)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for step in range(steps):
        rows = data.rows(step_indices(seed, step, len(data), batch))
        optimizer.zero_grad()
        loss = net(**rows)
        loss.backward()
        found["gradients"].append({n: p.grad.clone() for n, p in net.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip if clip is not None else float("inf"))
        optimizer.step()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
    found["weights"] = {n: p.detach().clone() for n, p in net.named_parameters()}
    return found


def check_against_one_process(pool: Pool, plan: Plan, expected: dict[str, Any], steps: int = STEPS, *, deadline: float = 60.0) -> None:
    """Loss, norm and every gradient of every step, and the weights after the last, within 1e-5 relative."""
    ranks = pool.run(_rank, plan.world_size, plan.to_json(), steps, deadline=deadline)
    ours = assemble(plan, ranks)
    assert ours.losses == tuple(expected["losses"]) or _close(ours.losses, expected["losses"])
    assert _close(ours.norms, expected["norms"])
    for step in range(steps):
        _same_tensors(ours.gradients[step], expected["gradients"][step], f"gradient in step {step}")
    _same_tensors(ours.weights[-1], expected["weights"], "weight")


def farthest(ours: Trace, expected: dict[str, Any]) -> tuple[float, str]:
    """The largest relative distance of a loss, a gradient or a last weight from `losses`, `gradients` and `weights` of one process, and what it is of.

    Infinite where a number is none, or a tensor is on one side only.
    """
    found = [(abs(a - b) / abs(b), f"loss of step {i}") for i, (a, b) in enumerate(zip(ours.losses, expected["losses"], strict=True))]
    for step, (mine, theirs) in enumerate(zip(ours.gradients, expected["gradients"], strict=True)):
        found += _distances(mine, theirs, f"gradient in step {step}")
    found += _distances(ours.weights[-1], expected["weights"], "weight")
    return max((float("inf") if isnan(distance) else distance, what) for distance, what in found)


def _distances(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], what: str) -> list[tuple[float, str]]:
    if set(ours) != set(theirs):
        return [(float("inf"), f"{what}: {min(set(ours) ^ set(theirs))} on one side only")]
    return [(float((ours[n].float() - t).norm() / t.norm()), f"{what} of {n}") for n, t in theirs.items()]


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours, theirs, strict=True))


def _same_tensors(ours: Any, theirs: dict[str, torch.Tensor], what: str) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        distance = (ours[name] - tensor).norm() / tensor.norm()
        assert distance <= TOLERANCE, f"{what} of {name}: {distance:.2e}"
