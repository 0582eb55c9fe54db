"""The product of all that a spec may combine, and its comparison with one process.

    python -m tests.product --count 400

takes that many combinations of mesh, schedule, accumulation, loss, precision and recomputation, spread so that every pair of choices comes up where the
count allows, and compares loss, every gradient and the weights after three steps with a loop in plain torch that shares nothing with the runtime but
model, data and order of samples. What the checker refuses is counted by the code of its rule; whatever it passes has to be equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations as pairs_of
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.rows import step_indices
from pdsl.runtime.verify import assemble, verify_rank
from tests.equality import farthest, tensor_rules
from tests.pool import Pool
from tests.product_model import OBJECTIVES, decoder, ragged_rows

__all__ = ["MESHES", "SCHEDULES", "TOLERANCE", "Combination", "combinations", "deviation", "refusal"]

STEPS, BATCH, SEED, LAYERS = 3, 32, 11, 6  # with embedding and head eight layers: a stage each at four positions with two
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}

_FSDP = 'shard { "**" => fsdp(fsdp) }'
_SEQUENCE = tensor_rules().replace('  "**" ', '  "layers.*.*_norm.weight" => sequence(tp)\n  "**" ')

MESHES: dict[str, tuple[dict[str, int], str]] = {
    "dp": ({"dp": 2}, ""),
    "fsdp": ({"fsdp": 2}, _FSDP),
    "hybrid": ({"dp": 2, "fsdp": 2}, _FSDP),
    "tp": ({"tp": 2}, tensor_rules()),
    "sp": ({"tp": 2}, _SEQUENCE),
    "fsdp x tp": ({"fsdp": 2, "tp": 2}, tensor_rules("fsdp")),
    "dp x tp": ({"dp": 2, "tp": 2}, tensor_rules()),
    "pp": ({"pp": 2}, ""),
    "pp 4": ({"pp": 4}, ""),
    "pp x fsdp": ({"pp": 2, "fsdp": 2}, _FSDP),
    "pp x dp": ({"dp": 2, "pp": 2}, ""),
    "pp x hybrid": ({"dp": 2, "pp": 2, "fsdp": 2}, _FSDP),
    "pp x tp": ({"pp": 2, "tp": 2}, tensor_rules()),
    "pp x sp": ({"pp": 2, "tp": 2}, _SEQUENCE),
    "pp x fsdp x tp": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp")),
    "pp x dp x tp": ({"dp": 2, "pp": 2, "tp": 2}, tensor_rules()),
}

SCHEDULES = (
    "gpipe", "one_f_one_b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipe_v", "v_half", "v_min", "auto",
)  # fmt: skip
LOSSES = {"rows": "mean(over = samples)", "tokens": "mean(over = tokens)", "total": "sum"}
RATE = {"rows": "1e-1", "tokens": "1e-1", "total": "5e-4"}


@frozen
class Combination:
    """One choice of everything. `schedule` is empty without a pipeline."""

    mesh: str
    schedule: str
    accumulate: int
    loss: str
    precision: str
    recompute: bool

    def __str__(self) -> str:
        words = [
            self.mesh,
            self.schedule,
            f"accumulate {self.accumulate}",
            self.loss,
            self.precision,
            "recompute" if self.recompute else "",
        ]
        return ", ".join(w for w in words if w)

    @property
    def choices(self) -> tuple[Any, ...]:
        return (self.mesh, self.schedule, self.accumulate, self.loss, self.precision, self.recompute)

    def text(self) -> str:
        """The spec."""
        axes, shard = MESHES[self.mesh]
        mesh = "\n".join(f"  axis {name} = {size}" for name, size in axes.items())
        pipeline = f"pipeline over pp {{ schedule = {self.schedule}(microbatches = 4) }}" if self.schedule else ""
        precision = "precision { params = bf16 }" if self.precision == "bf16" else ""
        recompute = 'memory { recompute = "layers.*" }' if self.recompute else ""
        objective = "cross_entropy" if self.loss == "tokens" else f'"tests.product_model:{self.loss}"'
        return f"""pdsl 1
mesh {{
{mesh}
}}
cluster {{ device = cpu }}
model "tests.product_model:decoder" {{ layers = {LAYERS} }}
{shard}
{pipeline}
{precision}
{recompute}
train {{
  data = "tests.product_model:ragged_rows"
  objective = {objective}
  loss = {LOSSES[self.loss]}
  batch = {BATCH}
  steps = {STEPS}
  accumulate = {self.accumulate}
  optimizer = sgd(lr = {RATE[self.loss]}, momentum = 0.9)
  seed = {SEED}
}}
"""


def _all() -> list[Combination]:
    return [
        Combination(mesh, schedule, accumulate, loss, precision, recompute)
        for mesh, (axes, _) in MESHES.items()
        for schedule in (SCHEDULES if "pp" in axes else ("",))
        for accumulate in (1, 2)
        for loss in LOSSES
        for precision in TOLERANCE
        for recompute in (False, True)
    ]


def _pairs(one: Combination) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(pairs_of(enumerate(one.choices), 2))


def combinations(count: int, seed: int = 0) -> Iterator[Combination]:
    """`count` combinations, the same for the same seed; each is, of some drawn at random, the one with most pairs not seen yet."""
    draw = random.Random(seed)
    left = _all()
    draw.shuffle(left)
    seen: set[Any] = set()
    for _ in range(min(count, len(left))):
        best = max(left[:60], key=lambda one: len(_pairs(one) - seen))
        left.remove(best)
        draw.shuffle(left)
        seen |= _pairs(best)
        yield best


def refusal(one: Combination) -> str | None:
    """The code of the rule that refuses a combination, None if none does."""
    return next((d.code for d in pdsl.check(one.text()) if d.severity.value == "error"), None)


# --- one process ------------------------------------------------------------------------------------------------------------------------------


def _computing(model: nn.Module, precision: str) -> dict[str, Tensor]:
    """What the layers compute with: the weights themselves, or low-precision copies of them."""
    return {n: p.detach().to(torch.bfloat16).requires_grad_() if precision == "bf16" else p for n, p in model.named_parameters()}


@lru_cache(maxsize=16)
def one_process(loss: str, precision: str) -> dict[str, Any]:
    """Build; per step one forward, one backward, one update on the whole batch. Weights and gradients are in fp32 whatever the layers compute in."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = decoder(LAYERS)
    data = ragged_rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(RATE[loss]), momentum=0.9)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(STEPS):
        rows = data.rows(step_indices(SEED, step, len(data), BATCH))
        weights = _computing(model, precision)
        for w in weights.values():
            w.grad = None
        output = torch.func.functional_call(model, weights, (rows["tokens"],)).float()
        value = OBJECTIVES[loss](output, rows["labels"])
        value.backward()
        gradients = {n: w.grad.float().clone() for n, w in weights.items() if w.grad is not None}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        found["losses"].append(value.item())
        found["gradients"].append(gradients)
    found["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


# --- the comparison -------------------------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, store: Any, plan: str) -> dict[str, Any]:
    return verify_rank(Plan.from_json(plan), rank, store, steps=STEPS)


def deviation(pool: Pool, one: Combination) -> tuple[float, str]:
    """The largest relative distance of a loss, a gradient or a weight from one process, and what it is of."""
    plan = pdsl.compile(pdsl.load(one.text()))
    ranks = pool.run(_rank, plan.world_size, plan.to_json(), deadline=120.0)
    return farthest(assemble(plan, ranks), one_process(one.loss, one.precision))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and tell; 1 if any combination is not equal."""
    parser = argparse.ArgumentParser(description="Compare combinations of everything with one process.")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only combinations whose name has this text")
    options = parser.parse_args(arguments)
    pool, begin, refused, where, wrong, done = Pool(), time.monotonic(), Counter[str](), Counter[str](), [], 0
    largest: dict[str, float] = dict.fromkeys(TOLERANCE, 0.0)
    try:
        for one in combinations(len(_all()), options.seed):
            if done == options.count:
                break
            if options.only not in str(one):
                continue
            code = refusal(one)
            if code is not None:
                refused[code] += 1
                continue
            done += 1
            try:
                distance, what = deviation(pool, one)
            except Exception as error:  # noqa: BLE001  whatever a rank raises is a finding, and the others are still to be looked at
                distance, what = float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if distance > TOLERANCE[one.precision]:
                wrong.append(one)
                print(f"NOT EQUAL  {one}: {what} is off by {distance:.2e}", flush=True)
                where[one.schedule or one.mesh] += 1
                continue
            largest[one.precision] = max(largest[one.precision], distance)
            if done % 20 == 0:
                print(f"{done} compared, {len(wrong)} not equal, {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        pool.close()
    print(f"{done} combinations compared in {time.monotonic() - begin:.0f} s, {len(wrong)} not equal; largest distance {largest}")
    print(f"refused on the way, by rule: {dict(refused)}; not equal, by schedule or mesh: {dict(where)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
