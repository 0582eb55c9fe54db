"""Compiled layers compute what eager ones compute, under every way to lay them out, and stay compiled when a part is made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.compiled import require_compiler
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool

DEADLINE = 280.0
"""Seconds; on a machine that does other things too a layer is compiled in a minute."""

pytestmark = pytest.mark.timeout(300)

ONE_F_ONE_B = "one_f_one_b(microbatches = 4)"


def plan_of(axes: dict[str, int], shard: str, memory: str = "", backend: str = "aot_eager", **options: Any) -> Plan:
    return compile_text(spec_text(axes, shard, train=f"compile = {backend}", **options) + f"memory {{ {memory} }}\n")


@pytest.mark.parametrize(
    ("axes", "shard", "memory", "options"),
    [
        ({}, WHOLE, "", {"accumulate": 2}),
        ({"fsdp": 2}, FSDP, "", {}),
        ({"fsdp": 2}, FSDP, 'recompute = "layers.*"; group = 2; sync = every', {"accumulate": 2}),
        ({"fsdp": 2}, FSDP, 'recompute = "layers.*.mlp"', {}),
        ({"pp": 2, "fsdp": 2}, FSDP, "", {"schedule": ONE_F_ONE_B}),
        ({"tp": 2}, TENSOR, "", {}),
    ],
    ids=["one rank", "fsdp", "fsdp, layers again", "fsdp, mlps again", "pp x fsdp", "tp"],
)
def test_compiled_layers_are_equal_to_one_process(pool: Pool, axes: dict[str, int], shard: str, memory: str, options: dict[str, Any]):
    plan = plan_of(axes, shard, memory, **options)
    assert plan.compile == "aot_eager"
    check_against_one_process(pool, plan, one_process(11, 16), deadline=DEADLINE)


def test_code_that_inductor_writes_is_equal_to_one_process(pool: Pool):
    check_against_one_process(pool, plan_of({"fsdp": 2}, FSDP, backend="true"), one_process(11, 16), deadline=DEADLINE)


def graphs(_rank: int, _world: int, _store: Any, text: str) -> tuple[list[int], list[float]]:
    """Graphs that were compiled, after the first step, after another, and after one with a part made anew; and the losses."""
    from torch._dynamo.utils import counters

    plan = Plan.from_json(text)
    rows = read_rows(make_dataset(plan), range(plan.job.batch))
    counted, losses = [], []
    counters.clear()
    with Session(plan, 0, None) as session:
        for _ in range(2):
            losses.append(session.step(rows).loss)
            counted.append(counters["stats"]["unique_graphs"])
    with Session(plan, 0, None) as again:
        assert again.model is not session.model
        losses.append(again.step(rows).loss)
        counted.append(counters["stats"]["unique_graphs"])
    return counted, losses


def test_blocks_share_a_graph_and_a_part_made_anew_finds_it_compiled(pool: Pool):
    [(counted, losses)] = pool.run(graphs, 1, plan_of({}, WHOLE).to_json(), deadline=DEADLINE)
    assert counted[0] == counted[1] == counted[2] <= 4  # an embedding, the blocks, the norm, the head
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def test_a_machine_without_a_compiler_is_told_of_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of({}, WHOLE, backend="true")
    assert plan.compile == "inductor"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RunError, match=r"needs a C\+\+ compiler .* looked for no-such-compiler; .* compile = aot_eager"):
        require_compiler(plan, torch.device("cpu"))
    require_compiler(evolve(plan, compile="aot_eager"), torch.device("cpu"))
    require_compiler(plan, torch.device("cuda"))
