"""Formats and what models have of their own: buffers, statistics, weights in other formats, outputs that are no module's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from pdsl.runtime.verify import VerifyReport, compare, oracle
from tests.pool import Pool
from tests.traces import traced

BF16 = "precision { params = bf16 }"


def text(model: str, mesh: str, tail: str = "", *, rows: str = "float32", shard: str = "", objective: str = "mse") -> str:
    return f"""pdsl 1
mesh {{ {mesh} }}
cluster {{ device = cpu }}
model "tests.precision_models:{model}" {{ }}
{shard}
train {{
  data = source("tests.precision_models:rows", kind = "{rows}")
  objective = {objective}
  batch = 8
  steps = 4
  optimizer = sgd(lr = 1e-1, momentum = 0.9)
  seed = 3
}}
{tail}
"""


PIPELINE = "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"
FSDP = 'shard { "**" => fsdp(fsdp) }'


def verified(pool: Pool, spec: str, tolerance: float = 1e-5) -> VerifyReport:
    plan = pdsl.compile(pdsl.load(spec))
    ours = traced(pool, plan, 2)
    return compare(ours, oracle(plan, ours), tolerance)


MESHES = [("axis dp = 2", "", ""), ("axis fsdp = 2", FSDP, ""), ("axis pp = 2", "", PIPELINE)]
NAMES = ["dp 2", "fsdp 2", "pp 2"]


@pytest.mark.parametrize(("mesh", "shard", "pipeline"), MESHES, ids=NAMES)
def test_tables_stay_in_fp32_and_are_cast_by_who_uses_them(pool: Pool, mesh: str, shard: str, pipeline: str) -> None:
    report = verified(pool, text("tabled", mesh, f"{pipeline}\n{BF16}", shard=shard))
    assert report.ok, report.worst


def test_a_table_that_is_mixed_in_is_named_before_the_run() -> None:
    spec = text("tabled", "axis dp = 2", BF16).replace('tabled" { }', 'tabled" { casts = false }')
    found = [d for d in pdsl.check(spec) if d.code == "PDL704"]
    assert len(found) == 1
    assert "blocks.0.table (and 2 more) of _Block stays in float32" in found[0].message
    assert found[0].span is not None
    assert found[0].span.begin.line == spec.splitlines().index(BF16) + 1


@pytest.mark.parametrize(("mesh", "shard", "pipeline"), MESHES, ids=NAMES)
@pytest.mark.parametrize(("model", "kind", "tolerance"), [("halved", "bfloat16", 1e-5), ("doubled", "float64", 1e-12)])
def test_models_with_a_format_of_their_own_keep_it(
    pool: Pool, model: str, kind: str, tolerance: float, mesh: str, shard: str, pipeline: str
) -> None:
    report = verified(pool, text(model, mesh, pipeline, rows=kind, shard=shard), tolerance)
    assert report.ok, report.worst


def test_gradients_of_weights_in_bf16_are_added_up_in_fp32(pool: Pool) -> None:
    """Of one process that adds up in bf16 the sum of the two halves of a batch would be another."""
    plan = pdsl.compile(pdsl.load(text("halved", "axis dp = 2", rows="bfloat16")))
    ours = traced(pool, plan, 2)
    assert all(g.dtype is torch.bfloat16 for g in ours.gradients[0].values())
    assert compare(ours, oracle(plan, ours), 1e-5).ok


def test_weights_in_two_formats_are_refused_in_one_unit_and_right_apart(pool: Pool) -> None:
    refused = [d for d in pdsl.check(text("mixed", "axis fsdp = 2", BF16, shard=FSDP)) if d.code == "PDL703"]
    assert refused
    assert "float32" in refused[0].message
    assert "bfloat16" in refused[0].message
    apart = 'shard { "**.up.*" => replicate(); "**" => fsdp(fsdp) }'
    report = verified(pool, text("mixed", "axis fsdp = 2", BF16, shard=apart))
    assert report.ok, report.worst


WHOLE_NORMS = 'shard { "1.*" => replicate(); "4.*" => replicate(); "7.*" => replicate(); "**" => fsdp(fsdp) }'


@pytest.mark.parametrize(
    ("mesh", "shard", "linear"), [("axis dp = 2", "", "bfloat16"), ("axis fsdp = 2", WHOLE_NORMS, "float32")], ids=["dp 2", "fsdp 2"]
)
def test_batch_statistics_stay_in_fp32_with_what_stands_beside_them(pool: Pool, mesh: str, shard: str, linear: str) -> None:
    """A sharded weight is cast when it is gathered, what stands in the module is its part in fp32."""
    plan = pdsl.compile(pdsl.load(text("normed", mesh, BF16, shard=shard)))
    found = pool.run(norm_formats, 2, plan.to_json())
    assert found == [{"weight": "float32", "running_mean": "float32", "linear": linear}] * 2


def norm_formats(rank: int, world: int, store: Any, plan_text: str) -> dict[str, str]:
    plan = Plan.from_json(plan_text)
    with Session(plan, rank, store) as session:
        session.step(read_rows(make_dataset(plan), range(plan.job.batch)))
        norm, linear = session.model.get_submodule("1"), session.model.get_submodule("0")
        assert isinstance(norm, nn.BatchNorm1d)
        assert bool(torch.isfinite(norm.running_mean).all())
        assert float(norm.running_mean.abs().sum()) > 0
        formats = {"weight": norm.weight.dtype, "running_mean": norm.running_mean.dtype, "linear": linear.weight.dtype}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in formats.items()}


def test_sharding_statistics_beside_what_computes_in_bf16_is_refused() -> None:
    found = [d for d in pdsl.check(text("normed", "axis fsdp = 2", f"{BF16}\nmemory {{ group = 8 }}", shard=FSDP)) if d.code == "PDL703"]
    assert found


@pytest.mark.parametrize(("mesh", "shard", "pipeline"), MESHES, ids=NAMES)
def test_an_output_that_is_no_modules_is_cast_as_it_leaves_the_model(pool: Pool, mesh: str, shard: str, pipeline: str) -> None:
    spec = text("tied", mesh, f"{pipeline}\n{BF16}", rows="tokens", shard=shard, objective="cross_entropy")
    plan = pdsl.compile(pdsl.load(spec))
    assert not plan.facts.casts_output
    # one process adds up what the two uses of the embedding give it before it is rounded, two stages after
    report = verified(pool, spec, 2e-2 if pipeline else 1e-5)
    assert report.ok, report.worst


def test_what_crosses_between_stages_is_in_the_format_of_the_layers() -> None:
    plain, low = (pdsl.compile(pdsl.load(text("tabled", "axis pp = 2", f"{PIPELINE}\n{tail}"))) for tail in ("", BF16))
    assert {t.dtype for layer in plain.facts.layers for t in layer.inputs} == {"float32"}
    assert {t.dtype for layer in low.facts.layers for t in layer.inputs} == {"bfloat16"}
    assert {p.dtype for p in low.facts.parameters} == {"float32"}, "the weights stay what they are"
