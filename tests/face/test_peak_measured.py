"""The peak of memory that a plan tells against what its ranks really held, for plans that hold different things at their worst moment."""

from __future__ import annotations

import pytest

import pdsl
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from tests.memory import peak_bytes
from tests.pool import Pool

SPEC = """\
pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "pdsl.models:gpt" {{ layers = 8; width = 128; heads = 4; context = 64 }}
shard {{ {layout} }}
{pipeline}
memory {{ {memory} }}
train {{
  data = source("pdsl.data:python_source", context = 64, limit = 20000)
  batch = 16; steps = 4
  optimizer = adamw(lr = 1e-3)
}}
"""

WHOLE = '"**" => replicate()'
SHARDED = '"**" => fsdp(sh)'
SPLIT = (
    '"layers.*.attn.w{q,k,v}.weight" => colwise(tp); "layers.*.attn.wo.weight" => rowwise(tp); '
    '"layers.*.mlp.w1.weight" => colwise(tp); "layers.*.mlp.w2.weight" => rowwise(tp); "**" => replicate()'
)


def pipelined(schedule: str) -> str:
    return f"pipeline over pp {{ schedule = {schedule}(microbatches = 4) }}"


PLANS = {
    "dp 2": ("axis dp = 2", WHOLE, "", ""),
    "fsdp 2": ("axis sh = 2", SHARDED, "", ""),
    "fsdp 2 that stays whole": ("axis sh = 2", SHARDED, "", "reshard = false"),
    "fsdp 2, two layers a unit": ("axis sh = 2", SHARDED, "", "group = 2"),
    "pp 2": ("axis pp = 2", WHOLE, pipelined("one_f_one_b"), ""),
    "pp 2 x fsdp 2": ("axis pp = 2; axis sh = 2", SHARDED, pipelined("one_f_one_b"), ""),
    "pp 2 x fsdp 2, reduced at once": ("axis pp = 2; axis sh = 2", SHARDED, pipelined("one_f_one_b"), "reshard = true; sync = every"),
    "tp 2": ("axis tp = 2", SPLIT, "", ""),
    "pp 2 in halves": ("axis pp = 2", WHOLE, pipelined("zero_bubble"), ""),
    "fsdp 2, computed again": ("axis sh = 2", SHARDED, "", 'recompute = "layers.*"'),
}


def plan_of(name: str) -> Plan:
    axes, layout, pipeline, memory = PLANS[name]
    return pdsl.compile(pdsl.load(SPEC.format(axes=axes, layout=layout, pipeline=pipeline, memory=memory)))


@pytest.mark.parametrize("name", PLANS)
def test_the_peak_of_every_rank_is_within_ten_per_cent(pool: Pool, name: str):
    plan = plan_of(name)
    measured = pool.run(peak_bytes, plan.world_size, plan.to_json())
    predicted = [m.total for m in cost(plan).memory]
    print("predicted / measured:", [f"{p / m:.3f}" for p, m in zip(predicted, measured, strict=True)])
    assert predicted == pytest.approx(measured, rel=0.1)
