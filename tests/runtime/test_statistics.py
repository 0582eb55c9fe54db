"""Batch normalisation: a plan computes what one process does that runs the microbatches of a step one after another, buffers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.rows import step_indices
from pdsl.runtime.session import Session
from pdsl.runtime.verify import assemble
from tests import row_models
from tests.pool import Pool

SPEC = """pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "tests.row_models:normed" {{ {arguments} }}
{blocks}
train {{
  data = source("tests.row_models:normed_rows", size = {size})
  batch = 24; steps = 5; seed = 3
  optimizer = sgd(lr = 1e-1, momentum = 0.9)
  {train}
}}
"""
STEPS = 3


def compiled(axes: str, *, blocks: str = "", train: str = "", arguments: str = "", size: int = 96) -> Plan:
    return pdsl.compile(pdsl.load(SPEC.format(axes=axes, blocks=blocks, train=train, arguments=arguments, size=size)))


def one_process(plan: Plan, size: int = 96) -> dict[str, Any]:
    """The microbatches of each step in order, in plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = row_models.normed(**dict(plan.job.arguments))  # type: ignore[arg-type]
    net.train()
    data = row_models.normed_rows(size)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-1, momentum=0.9)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(STEPS):
        order = step_indices(3, step, size, 24, pad=plan.job.last == "pad")
        optimizer.zero_grad()
        loss = 0.0
        for begin in range(0, len(order), plan.rows_per_microbatch):
            part = order[begin : begin + plan.rows_per_microbatch]
            each = net(**data.rows(part)) * (len(part) / len(order))
            each.backward()
            loss += each.item()
        found["losses"].append(loss)
        found["gradients"].append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    found["weights"] = {n: p.detach().clone() for n, p in net.named_parameters()}
    found["buffers"] = {n: b.clone() for n, b in net.named_buffers()}
    return found


def _rank(rank: int, world: int, store: Any, text: str) -> dict[str, Any]:
    from pdsl.runtime.feed import make_samples

    plan = Plan.from_json(text)
    samples = make_samples(plan)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "weights": []}
    with Session(plan, rank, store) as session:
        session.on_gradients = lambda grads: found["gradients"].append({n: g.detach().clone() for n, g in grads.items()})
        for step in range(STEPS):
            result = session.step_shares(samples.take(step, session.places), samples.ids(step, session.places))
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
            found["weights"].append({n: t.detach().clone() for n, t in session.weights.items()})
        found["buffers"] = {k.removeprefix("buffer/"): b.clone() for k, b in session.part.state().items() if k.startswith("buffer/")}
    return found


def check(pool: Pool, plan: Plan, size: int = 96) -> None:
    ranks = pool.run(_rank, plan.world_size, plan.to_json(), deadline=180.0)
    expected = one_process(plan, size)
    ours = assemble(plan, ranks)
    torch.testing.assert_close(list(ours.losses), expected["losses"], rtol=1e-5, atol=0.0)
    for step in range(STEPS):
        same(ours.gradients[step], expected["gradients"][step])
    same(ours.weights[-1], expected["weights"])
    seen = set()
    for rank in ranks:
        for name, buffer in rank["buffers"].items():
            seen.add(name)
            torch.testing.assert_close(buffer, expected["buffers"][name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == set(expected["buffers"])


def same(ours: Any, theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    whole = torch.cat([t.flatten() for t in theirs.values()]).norm()
    for name, tensor in theirs.items():
        # a bias before a norm has the gradient zero: what is left of it is rounding
        assert (ours[name] - tensor).norm() <= 1e-5 * max(float(tensor.norm()), 1e-2 * float(whole)), name


FSDP = 'shard { "**" => fsdp(fsdp) }'
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"axes": "axis dp = 1"},
    "accumulate": {"axes": "axis dp = 1", "train": "accumulate = 3"},
    "dp": {"axes": "axis dp = 2", "train": "accumulate = 2"},
    "fsdp": {"axes": "axis fsdp = 2", "blocks": FSDP},
    "pp": {"axes": "axis pp = 2", "blocks": "pipeline over pp { schedule = one_f_one_b(microbatches = 4) }"},
    "dp, pp, fsdp": {
        "axes": "axis dp = 2; axis pp = 2; axis fsdp = 2",
        "blocks": f"{FSDP}\npipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}",
    },
    "a plain average": {"axes": "axis dp = 2", "train": "accumulate = 2", "arguments": "momentum = 0"},
    "no weights": {"axes": "axis dp = 2; axis fsdp = 2", "blocks": FSDP, "arguments": "affine = false"},
    "a last batch that is not full": {
        "axes": "axis dp = 2; axis fsdp = 2",
        "blocks": FSDP,
        "train": "last = pad; accumulate = 2",
        "size": 58,
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_rows_are_normalised_as_in_one_process(pool: Pool, name: str) -> None:
    options = PLANS[name]
    check(pool, compiled(**options), options.get("size", 96))


def test_case_40_every_microbatch_counts_once_and_the_probe_never(pool: Pool) -> None:
    plan = compiled("axis pp = 2", blocks="pipeline over pp { schedule = gpipe(microbatches = 4) }")
    for rank in pool.run(_rank, plan.world_size, plan.to_json(), deadline=180.0):
        counters = [int(b) for n, b in rank["buffers"].items() if n.endswith("num_batches_tracked")]
        assert counters == [STEPS * 4] * len(counters)
        assert counters
