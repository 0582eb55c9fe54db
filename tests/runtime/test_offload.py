"""What waits on the host computes the same. Run on CPU ranks, where a rule refuses it: there are copies all the same, and no device to save memory on."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import nn

import pdsl
from pdsl.lowering.cost import cost
from pdsl.lowering.spec import CallValue
from pdsl.runtime.optimizer import LocalOptimizer
from tests.equality import FSDP, WHOLE, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool
from tests.runtime.test_precision import low_process

PIPELINE = "one_f_one_b(microbatches = 4)"


@pytest.mark.parametrize(
    ("axes", "shard", "schedule"),
    [({"dp": 2}, WHOLE, ""), ({"fsdp": 2}, FSDP, ""), ({"pp": 2}, WHOLE, PIPELINE)],
    ids=["dp 2", "fsdp 2", "pp 2"],
)
def test_an_optimizer_on_the_host_steps_like_one_on_the_device(pool: Pool, axes: dict[str, int], shard: str, schedule: str) -> None:
    plan = compile_text(spec_text(axes, shard, schedule=schedule, batch=32))
    check_against_one_process(pool, evolve(plan, offload="optimizer"), one_process(11, 32))


def test_weights_on_the_host_are_those_that_are_trained(pool: Pool) -> None:
    plan = compile_text(spec_text({"dp": 2}, WHOLE, batch=32))
    check_against_one_process(pool, evolve(plan, offload="params"), one_process(11, 32))
    low = compile_text(spec_text({"dp": 2}, WHOLE, batch=32) + "precision { params = bf16 }")
    check_against_one_process(pool, evolve(low, offload="params"), low_process(16))


def test_the_host_has_the_state_and_a_load_goes_on_from_there() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = LocalOptimizer(CallValue("sgd", (), (("lr", 1), ("momentum", 1))), {"w": weight}, host=True)
    optimizer.step({"w": torch.ones(3)}, 1.0)
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert optimizer.weights["w"].data_ptr() == weight.data_ptr()
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.take_weights()
    optimizer.step({"w": torch.ones(3)}, 1.0)
    assert weight.tolist() == [3.0, 3.0, 3.0]


def test_the_cost_leaves_out_what_waits() -> None:
    plan = compile_text(spec_text({"dp": 2}, WHOLE))
    kept, state, weights = (cost(evolve(plan, offload=o)).memory[0] for o in ("none", "optimizer", "params"))
    assert (state.optimizer, state.parameters, state.gradients) == (0, kept.parameters, kept.gradients)
    assert (weights.optimizer, weights.parameters, weights.gradients) == (0, 0, 0)
    assert weights.transient == kept.parameters, "the copies that layers compute with"


def test_the_plan_of_a_spec_says_what_waits() -> None:
    text = spec_text({"dp": 2}, WHOLE).replace("device = cpu", "device = cuda") + "memory { offload = optimizer }"
    assert not pdsl.check(text)
    assert compile_text(text).offload == "optimizer"
