"""The cost model against what ranks really hold: bytes of shards and states to the byte, activations within a few per cent."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import pdsl
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from tests.pool import Pool

SPEC = """\
pdsl 1
mesh {{ {axes} }}
model "pdsl.models:gpt" {{ layers = 4; width = 32; heads = 2; context = 16 }}
shard {{ "**" => {layout} }}
{pipeline}
train {{
  data = source("pdsl.data:python_source", context = 16, limit = 20000)
  batch = 8; steps = 4
  optimizer = adamw(lr = 1e-3)
}}
"""


class Saved:
    """Counts the bytes that autograd keeps: each storage once, parameters never."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.now = self.peak = 0
        self._ignored = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._ignored:
            return tensor
        holder = _Holder(tensor)
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(holder, self._drop, key, size)
        return holder

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= size


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_bytes(rank: int, world: int, store: Any, text: str) -> dict[str, int]:
    plan = Plan.from_json(text)
    found: dict[str, int] = {}
    with Session(plan, rank, store) as session:
        session.on_gradients = lambda held: found.update(gradients=sum(g.nbytes for g in held.values()))
        session.step(read_rows(make_dataset(plan), range(plan.job.batch)))
        states = session.part.optimizer._optimizer.state.values()
        found["parameters"] = sum(w.nbytes for w in session.weights.values())
        found["optimizer"] = sum(t.nbytes for state in states for name, t in state.items() if name != "step")
    return found


def saved_bytes(rank: int, world: int, store: Any, text: str) -> int:
    plan = Plan.from_json(text)
    with Session(plan, rank, store) as session:
        saved = Saved(list(session.model.parameters()))
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor if isinstance(held, _Holder) else held):
            session.step(read_rows(make_dataset(plan), range(plan.job.batch)))
    return saved.peak


def plan_of(axes: str, layout: str, pipeline: str = "") -> Plan:
    return pdsl.compile(pdsl.load(SPEC.format(axes=axes, layout=layout, pipeline=pipeline)))


@pytest.mark.parametrize(
    ("axes", "layout", "pipeline"),
    [
        ("axis pp = 2; axis sh = 2", "fsdp(sh)", "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"),
        ("axis sh = 3", "fsdp(sh)", ""),
        ("axis tp = 2", "replicate()", ""),
    ],
    ids=["pp 2 x fsdp 2", "fsdp 3, uneven", "tp 2"],
)
def test_shards_gradients_and_states_are_predicted_to_the_byte(pool: Pool, axes: str, layout: str, pipeline: str) -> None:
    text = SPEC.format(axes=axes, layout=layout, pipeline=pipeline)
    if "tp" in axes:
        rules = '"layers.*.mlp.w1.weight" => colwise(tp); "layers.*.mlp.w2.weight" => rowwise(tp); "**"'
        text = text.replace('"**"', rules)
    plan = pdsl.compile(pdsl.load(text.replace("batch = 8", "batch = 12")))
    measured = pool.run(held_bytes, plan.world_size, plan.to_json())
    for m, predicted in zip(measured, cost(plan).memory, strict=True):
        assert m["parameters"] == predicted.parameters
        assert m["gradients"] == predicted.gradients
        assert m["optimizer"] == predicted.optimizer


@pytest.mark.parametrize(
    "schedule", ["gpipe(microbatches = 4)", "one_f_one_b(microbatches = 4)", "interleaved_1f1b(microbatches = 4, virtual = 2)"]
)
def test_activations_in_flight_are_near_the_measured_ones(pool: Pool, schedule: str) -> None:
    plan = plan_of("axis pp = 2", "replicate()", f"pipeline over pp {{ schedule = {schedule} }}")
    measured = pool.run(saved_bytes, plan.world_size, plan.to_json())
    predicted = [m.activations for m in cost(plan).memory]
    print("predicted / measured:", [f"{p / m:.3f}" for p, m in zip(predicted, measured, strict=True)])
    assert predicted == pytest.approx(measured, rel=0.05)


def kept_bytes(rank: int, world: int, store: Any, text: str) -> int:
    """As `saved_bytes`, with what checkpointing keeps: the tensors that go into the modules that run again, which autograd is not asked to save."""
    plan = Plan.from_json(text)
    with Session(plan, rank, store) as session:
        saved = Saved(list(session.model.parameters()))

        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            for tensor in tree_leaves(args):
                holder = saved.pack(tensor)
                if isinstance(holder, _Holder):
                    del holder.tensor
                    weakref.finalize(tensor, id, holder)  # keeps the holder as long as the tensor lives

        for name in plan.facts.recomputed:
            session.model.get_submodule(name).register_forward_pre_hook(keep)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor if isinstance(held, _Holder) else held):
            session.step(read_rows(make_dataset(plan), range(plan.job.batch)))
    return saved.peak


PIPELINE = "pipeline over pp { schedule = one_f_one_b(microbatches = 4) }"


def test_activations_in_bf16_are_near_the_measured_ones(pool: Pool) -> None:
    plan = plan_of("axis pp = 2", "replicate()", PIPELINE + "\nprecision { params = bf16 }")
    measured = pool.run(saved_bytes, plan.world_size, plan.to_json())
    predicted = [m.activations for m in cost(plan).memory]
    print("predicted / measured:", [f"{p / m:.3f}" for p, m in zip(predicted, measured, strict=True)])
    assert predicted == pytest.approx(measured, rel=0.05)


def test_what_is_kept_of_recomputed_layers_is_near_the_measured(pool: Pool) -> None:
    wide = SPEC.replace("width = 32; heads = 2", "width = 256; heads = 16")  # so that what has no rows, the rotary tables, is little
    plain, plan = (
        pdsl.compile(pdsl.load(wide.format(axes="axis pp = 2", layout="replicate()", pipeline=PIPELINE + memory)))
        for memory in ("", '\nmemory { recompute = "layers.*" }')
    )
    measured = pool.run(kept_bytes, plan.world_size, plan.to_json())
    again = max(layer.again_bytes for layer in plan.facts.layers) * plan.rows_per_rank
    predicted = [m.activations - again for m in cost(plan).memory]
    print("predicted / measured:", [f"{p / m:.3f}" for p, m in zip(predicted, measured, strict=True)])
    assert predicted == pytest.approx(measured, rel=0.05)
    for ours, theirs in zip(plan.facts.layers, plain.facts.layers, strict=True):
        assert ours.activation_bytes + ours.again_bytes == theirs.activation_bytes, "what is not kept is what comes back"


@pytest.mark.parametrize(("axes", "layout"), [("axis dp = 2", "replicate()"), ("axis sh = 2", "fsdp(sh)")], ids=["dp 2", "fsdp 2"])
def test_weights_gradients_and_states_of_bf16_are_those_of_fp32(pool: Pool, axes: str, layout: str) -> None:
    plan = plan_of(axes, layout, "precision { params = bf16 }")
    measured = pool.run(held_bytes, plan.world_size, plan.to_json())
    for m, predicted in zip(measured, cost(plan).memory, strict=True):
        assert (m["parameters"], m["gradients"], m["optimizer"]) == (predicted.parameters, predicted.gradients, predicted.optimizer)
