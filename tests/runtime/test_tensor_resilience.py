"""Runs over tensor axes go on through losses: parts of parameters move, and the stream between the layers stays split."""

from __future__ import annotations

import pytest
import torch

import pdsl
from pdsl.data import python_source
from pdsl.models import gpt
from pdsl.runtime.chaos import Fault
from pdsl.runtime.resilient import Nursery
from pdsl.runtime.rows import step_indices
from tests.runtime.storms import DEADLINE, run

SPEC = """pdsl 1
cluster { nodes = 4; ranks_per_node = 2; device = cpu }
mesh { axis dp = rest; axis pp = 2 to 3; axis tp = 2 }
model "pdsl.models:gpt" { layers = 4; width = 16; heads = 2; context = 8; tie = true }
shard {
  "tok_embeddings.weight"         => [tp, _]
  "layers.*.attn.w{q,k,v}.weight" => colwise(tp)
  "layers.*.attn.wo.weight"       => rowwise(tp)
  "layers.*.mlp.w1.weight"        => colwise(tp)
  "layers.*.mlp.w2.weight"        => rowwise(tp)
  "layers.*.*_norm.weight"        => sequence(tp)
  "**"                            => replicate()
}
pipeline over pp { schedule = one_f_one_b(microbatches = 4) }
fault_budget { lose = 1; silence = 20s; recover = [retemplate] }
train {
  data = source("pdsl.data:python_source", context = 8)
  batch = 48; steps = 5; optimizer = adamw(lr = 1e-2, eps = 1e-6); clip = 1.0; seed = 3
}
"""


def losses_of_one_process(steps: int) -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = gpt(layers=4, width=16, heads=2, context=8, tie=True)
    data = python_source(context=8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(**data.rows(step_indices(3, step, len(data), 48)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def test_parts_of_parameters_move_when_a_node_is_lost(nursery: Nursery) -> None:
    storm = run(pdsl.compile(pdsl.load(SPEC)), nursery, [Fault(4, "backward", 2, "rank")], timeout=DEADLINE)
    assert storm.lost == [2]
    assert {tuple(e["pipelines"]) for e in storm.named("moved")} == {(3,)}
    assert [storm.losses[step] for step in range(5)] == pytest.approx(losses_of_one_process(5), rel=1e-5)
