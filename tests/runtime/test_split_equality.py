"""Every schedule with backwards in halves, or with stages in a V, computes what one process computes, on every kind of mesh."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from pdsl.lowering.program import ActionKind
from pdsl.lowering.programs import program
from pdsl.lowering.schedule import Op
from pdsl.runtime.executor import Executor
from tests.equality import FSDP, TENSOR, WHOLE, check_against_one_process, compile_text, one_process, spec_text, tensor_rules
from tests.pool import Pool
from tests.runtime.test_precision import BF16, low_process

BATCH = 32

PLANS = {
    "fsdp 2": ({"pp": 2, "fsdp": 2}, FSDP),
    "dp 2": ({"dp": 2, "pp": 2}, WHOLE),
    "dp 2 x fsdp 2": ({"dp": 2, "pp": 2, "fsdp": 2}, FSDP),
    "tp 2": ({"pp": 2, "tp": 2}, TENSOR),
    "fsdp 2 x tp 2": ({"pp": 2, "fsdp": 2, "tp": 2}, tensor_rules("fsdp")),
}
SCHEDULES = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipe_v", "v_half", "v_min", "looped_bfs", "zero_bubble_2")
SPREAD = [(schedule, tuple(PLANS)[(2 * i + more) % len(PLANS)], 1 + more) for i, schedule in enumerate(SCHEDULES) for more in (0, 1)]
"""Each schedule on two meshes, once with one round and once with two; every mesh comes with three schedules or more."""


@lru_cache(maxsize=8)
def reference(batch: int = BATCH, **options: Any) -> dict[str, Any]:
    return one_process(11, batch, **options)


def schedule_text(name: str, microbatches: int = 4) -> str:
    virtual = ", virtual = 2" if name in ("interleaved_zero_bubble", "looped_bfs") else ""
    return f"{name}(microbatches = {microbatches}{virtual})"


@pytest.mark.parametrize(("schedule", "name", "accumulate"), SPREAD)
def test_plans_with_halves_equal_one_process(pool: Pool, schedule: str, name: str, accumulate: int) -> None:
    axes, shard = PLANS[name]
    plan = compile_text(spec_text(axes, shard, schedule=schedule_text(schedule), accumulate=accumulate, batch=BATCH))
    halves = any(o.op is Op.BACKWARD_WEIGHT for row in plan.templates[0].schedule.rows for o in row)
    assert halves == (schedule != "looped_bfs")
    check_against_one_process(pool, plan, reference())


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [("zbv", {"pp": 2}), ("zbv", {"pp": 2, "fsdp": 2}), ("zero_bubble", {"dp": 2, "pp": 2}), ("zero_bubble", {"pp": 2, "fsdp": 2})],
    ids=str,
)
def test_a_tied_embedding_equals_one_process(pool: Pool, schedule: str, axes: dict[str, int]) -> None:
    """Case 33. In a V both ends are on one rank; in a row they are summed over two."""
    shard = FSDP if "fsdp" in axes else WHOLE
    plan = compile_text(spec_text(axes, shard, schedule=schedule_text(schedule), batch=BATCH, model="tie = true"))
    assert (plan.stages_of(0)[-1] == len(plan.templates[0].stages) - 1) == (schedule == "zbv")
    check_against_one_process(pool, plan, reference(tie=True))


@pytest.mark.parametrize(("schedule", "name"), [("zbv", "fsdp 2"), ("zero_bubble", "dp 2")])
def test_halves_in_low_precision_add_up_in_the_format_of_the_sums(pool: Pool, schedule: str, name: str) -> None:
    axes, shard = PLANS[name]
    plan = compile_text(spec_text(axes, shard, schedule=schedule_text(schedule), batch=BATCH) + BF16)
    check_against_one_process(pool, plan, low_process(plan.rows_per_rank))


def test_several_layers_in_one_unit_reduce_when_the_last_of_them_is_complete(pool: Pool) -> None:
    text = spec_text({"pp": 2, "fsdp": 2}, FSDP, schedule=schedule_text("zbv"), batch=BATCH) + "memory { group = 2 }"
    check_against_one_process(pool, compile_text(text.replace("layers = 4", "layers = 8")), reference(layers=8))


def test_messages_between_the_ranks_of_a_v_have_tags_of_their_own() -> None:
    """Between two ranks activations and gradients go both ways; the turn in the middle is not sent at all."""
    plan = compile_text(spec_text({"pp": 2}, WHOLE, schedule=schedule_text("zbv"), batch=BATCH))
    assert plan.templates[0].schedule.placement == (0, 1, 1, 0)
    stages: Any = SimpleNamespace(_inputs=plan.templates[0].stages)
    sent = []
    for rank in plan.ranks:
        for a in program(plan, rank).actions:
            if a.kind in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT):
                activation = a.kind is ActionKind.SEND_ACTIVATION
                sent.append((rank, a.peer, Executor._tag(stages, a.stage + activation, a.microbatch, activation, 0)))
    assert {(rank, peer) for rank, peer, _ in sent} == {(0, 1), (1, 0)}
    assert len(sent) == 2 * 2 * 4  # two boundaries between the ranks, two kinds, four microbatches
    assert len({tag for _, _, tag in sent}) == len(sent)
