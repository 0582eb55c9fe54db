"""Parameters that are frozen or shared, under plans that shard and cut: what is trained is what one process trains, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.session import Session
from pdsl.runtime.verify import compare, oracle
from tests.pool import Pool
from tests.traces import traced

SPEC = """pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "tests.row_models:tuned" {{ kind = "{kind}" }}
{blocks}
train {{
  data = source("tests.row_models:tuned_rows")
  batch = 16; steps = 4; seed = 3
  optimizer = adamw(lr = 1e-3, eps = 1e-4)
}}
"""
FSDP = 'shard { "**" => fsdp(fsdp) }'
PLANS = {
    "fsdp": ("axis fsdp = 2", FSDP),
    "fsdp, resharded": ("axis fsdp = 2", f"{FSDP}\nmemory {{ reshard = true }}"),
    "pp": ("axis pp = 2", "pipeline over pp { schedule = one_f_one_b(microbatches = 4) }"),
    "halves": ("axis pp = 2; axis fsdp = 2", f"{FSDP}\npipeline over pp {{ schedule = zbv(microbatches = 4) }}"),
    "dp, pp, fsdp": ("axis dp = 2; axis pp = 2; axis fsdp = 2", f"{FSDP}\npipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}"),
}
KINDS = ("mixed", "first", "middle", "last", "all but one", "tied in a layer", "tied over layers", "tied ends", "one module", "parts")
CHOSEN = [(kind, name) for i, kind in enumerate(KINDS) for j, name in enumerate(PLANS) if (i + 2 * j) % 5 in {0, 2}]


def compiled(kind: str, name: str) -> Plan:
    axes, blocks = PLANS[name]
    return pdsl.compile(pdsl.load(SPEC.format(axes=axes, blocks=blocks, kind=kind)))


@pytest.mark.parametrize(("kind", "name"), CHOSEN)
def test_what_is_trained_is_what_one_process_trains(pool: Pool, kind: str, name: str) -> None:
    plan = compiled(kind, name)
    ours = traced(pool, plan, 3, deadline=180.0)
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst
    trained = {p.name for p in plan.facts.parameters if p.trainable}
    assert set(ours.weights[-1]) == set(ours.gradients[-1]) == trained


def _frozen_rank(rank: int, world: int, store: Any, text: str) -> dict[str, Any]:
    """What of the frozen parameters has a gradient or optimizer state, and whether one has moved."""
    from pdsl.runtime.feed import make_samples

    plan = Plan.from_json(text)
    samples = make_samples(plan)
    with Session(plan, rank, store) as session:
        frozen = {
            n: t for n, t in session.part.state().items() if n.startswith("weight/") and n.removeprefix("weight/") not in session.parameters
        }
        before = {n: t.clone() for n, t in frozen.items()}
        result = session.step_shares(samples.take(0, session.places), samples.ids(0, session.places))
        moved = [n for n, t in frozen.items() if not torch.equal(t, before[n])]
        state = [n for n in session.part.state() if not n.startswith("weight/") and n.partition("/")[2] not in session.parameters]
        return {"frozen": list(frozen), "moved": moved, "state": state, "loss": result.loss, "trained": list(session.parameters)}


@pytest.mark.parametrize(
    ("kind", "axes", "idle"), [("first", "axis pp = 6", 0), ("last", "axis pp = 6", 5), ("all but one", "axis pp = 6", 0)]
)
def test_case_36_a_rank_with_nothing_to_train_takes_part(pool: Pool, kind: str, axes: str, idle: int) -> None:
    blocks = "pipeline over pp { schedule = one_f_one_b(microbatches = 8) }"
    plan = pdsl.compile(pdsl.load(SPEC.format(axes=axes, blocks=blocks, kind=kind)))
    ranks = pool.run(_frozen_rank, plan.world_size, plan.to_json(), deadline=180.0)
    assert not ranks[idle]["trained"]
    for rank in ranks:
        assert rank["loss"] == ranks[0]["loss"]
        assert not rank["moved"]
        assert not rank["state"]
    assert all(ranks[idle]["frozen"])


def test_case_64_frozen_parameters_of_a_unit_have_neither_gradients_nor_optimizer_state_in_the_estimate() -> None:
    from pdsl.lowering.cost import cost

    mixed, whole = compiled("mixed", "fsdp"), compiled("none", "fsdp")
    share = sum(p.numel for p in mixed.facts.parameters if p.trainable) / mixed.facts.numel
    a, b = cost(mixed).memory[0], cost(whole).memory[0]
    assert a.parameters == b.parameters
    assert a.gradients == pytest.approx(b.gradients * share, rel=1e-6)
    assert a.optimizer == pytest.approx(b.optimizer * share, rel=1e-6)
