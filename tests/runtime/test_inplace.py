"""Models that write into tensors: exact under every plan, or no plan."""

from __future__ import annotations

import pytest
import torch

import pdsl
from pdsl.lowering.probe import probe
from pdsl.runtime.verify import compare, oracle
from tests import row_models
from tests.pool import Pool
from tests.traces import traced

SPEC = """pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "tests.row_models:inplace" {{ way = "{way}" }}
{blocks}
train {{
  data = source("tests.row_models:inplace_rows")
  batch = 16; steps = 4; seed = 3
  optimizer = sgd(lr = 1e-1)
}}
"""
FSDP = 'shard { "**" => fsdp(fsdp) }'
PLANS = {
    "pp": ("axis pp = 2", "pipeline over pp { schedule = one_f_one_b(microbatches = 4) }"),
    "pp, a stage for each layer": ("axis pp = 6", "pipeline over pp { schedule = gpipe(microbatches = 2) }"),
    "halves": ("axis pp = 2", "pipeline over pp { schedule = zbv(microbatches = 4) }"),
    "fsdp": ("axis fsdp = 2", FSDP),
    "fsdp, resharded": ("axis fsdp = 2", f"{FSDP}\nmemory {{ reshard = true }}"),
    "pp, fsdp": ("axis pp = 2; axis fsdp = 2", f"{FSDP}\npipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}"),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("way", ["input", "relu", "view"])
def test_blocks_that_write_into_what_they_are_given(pool: Pool, way: str, name: str) -> None:
    axes, blocks = PLANS[name]
    plan = pdsl.compile(pdsl.load(SPEC.format(axes=axes, blocks=blocks, way=way)))
    ours = traced(pool, plan, 3, deadline=180.0)
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst


def test_a_block_that_writes_into_what_later_blocks_read_cannot_be_cut_from_them() -> None:
    rows = row_models.inplace_rows().rows(range(4))
    layers = probe(row_models.inplace, {"way": "mask"}, batch=rows).layers
    assert [bool(layer.cut_before) for layer in layers] == [False, False, True, True, True, False]
    assert "blocks.0 writes into a tensor" in layers[2].cut_before
    assert not any(layer.cut_before for layer in probe(row_models.inplace, {"way": "input"}, batch=rows).layers)
    assert torch.is_tensor(rows["x"])
