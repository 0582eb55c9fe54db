"""When units are gathered and reduced: every choice computes what one process computes, with the collectives that the plan counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from pdsl.lowering.plan import Plan
from pdsl.lowering.units import collectives
from pdsl.runtime.exchange import ExchangeReduceScatter
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from tests.equality import FSDP, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool


def plan_of(axes: dict[str, int], memory: str, **options: Any) -> Plan:
    return compile_text(spec_text(axes, FSDP, **options) + f"memory {{ {memory} }}\n")


def counted(rank: int, world: int, store: Any, text: str) -> tuple[int, int]:
    """Calls of all-gather and of reductions by FSDP2 in the second step of a rank."""
    plan = Plan.from_json(text)
    counts: Counter[str] = Counter()
    gather, reduce = _fsdp_collectives.DefaultAllGather.__call__, ExchangeReduceScatter.__call__

    def gathers(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["gather"] += 1
        return gather(self, *args, **kwargs)

    def reduces(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["reduce"] += 1
        return reduce(self, *args, **kwargs)

    with Session(plan, rank, store) as session:
        rows = read_rows(make_dataset(plan), range(plan.job.batch))
        session.step(rows)
        _fsdp_collectives.DefaultAllGather.__call__ = gathers  # type: ignore[method-assign]
        ExchangeReduceScatter.__call__ = reduces  # type: ignore[method-assign]
        try:
            session.step(rows)
        finally:
            _fsdp_collectives.DefaultAllGather.__call__ = gather  # type: ignore[method-assign]
            ExchangeReduceScatter.__call__ = reduce  # type: ignore[method-assign]
    return counts["gather"], counts["reduce"]


ONE_F_ONE_B = "one_f_one_b(microbatches = 4)"
INTERLEAVED = "interleaved_1f1b(microbatches = 4, virtual = 2)"
CHOICES = [
    ({"fsdp": 2}, "reshard = true", {}),
    ({"fsdp": 2}, "reshard = false", {}),
    ({"fsdp": 2}, "reshard = false", {"accumulate": 2}),
    ({"fsdp": 2}, "group = 2", {}),
    ({"fsdp": 2}, "group = 3; prefetch = 0", {"accumulate": 2}),
    ({"fsdp": 2}, "prefetch = 0", {}),
    ({"fsdp": 2}, 'recompute = "layers.*"', {}),
    ({"fsdp": 2}, 'recompute = "layers.*.mlp"; group = 2', {"accumulate": 2}),
    ({"pp": 2, "fsdp": 2}, 'reshard = true; recompute = "layers.*"', {"schedule": ONE_F_ONE_B}),
    ({"fsdp": 2}, "prefetch = 0", {"accumulate": 2}),
    ({"fsdp": 2}, "prefetch = 3", {"accumulate": 2}),
    ({"fsdp": 2}, "sync = every", {"accumulate": 2}),
    ({"fsdp": 2}, "sync = every; reshard = false", {"accumulate": 4}),
    ({"dp": 2, "fsdp": 2}, "sync = every", {"accumulate": 2}),
    ({"dp": 2, "fsdp": 2}, "sync = last", {"accumulate": 2}),
    ({"pp": 2, "fsdp": 2}, "reshard = true", {"schedule": ONE_F_ONE_B}),
    ({"pp": 2, "fsdp": 2}, "reshard = true; group = 2; prefetch = 2; sync = every", {"schedule": "gpipe(microbatches = 2)"}),
    ({"pp": 2, "fsdp": 2}, "reshard = true", {"schedule": INTERLEAVED}),
    ({"pp": 2, "fsdp": 2}, "reshard = true; sync = every; prefetch = 0", {"schedule": INTERLEAVED}),
    ({"pp": 2, "fsdp": 2}, "sync = every; group = 2", {"schedule": ONE_F_ONE_B}),
    ({"pp": 2, "fsdp": 2}, "sync = every", {"schedule": INTERLEAVED}),
    ({"pp": 2, "fsdp": 2}, "reshard = auto", {"schedule": ONE_F_ONE_B}),
    ({"fsdp": 2}, "sync = every; group = 2", {"accumulate": 2, "model": "tie = true"}),
    ({"pp": 2, "fsdp": 2}, "reshard = true; sync = every", {"schedule": ONE_F_ONE_B, "model": "tie = true"}),
]


def named(choice: Any) -> str:
    axes, memory, options = choice
    return " ".join([*(f"{n}{k}" for n, k in axes.items()), memory, *map(str, options.values())])


@pytest.mark.parametrize("choice", CHOICES, ids=named)
def test_every_choice_is_equal_to_one_process_and_makes_the_planned_collectives(pool: Pool, choice: Any) -> None:
    axes, memory, options = choice
    plan = plan_of(axes, memory, **options)
    model = {"tie": True} if "model" in options else {}
    check_against_one_process(pool, plan, one_process(11, 16, **model))
    found = pool.run(counted, plan.world_size, plan.to_json())
    planned = [collectives(plan, rank) for rank in plan.ranks]
    assert found == [(c.gathers, c.reductions) for c in planned]
