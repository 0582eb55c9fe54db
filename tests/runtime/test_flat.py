"""Three hundred steps leave nothing behind: no hooks, no open files, no memory (case 41)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.session import Session
from tests.pool import Pool
from tests.runtime.test_cases import compiled
from tests.runtime.test_tensor import MATRICES, REST, STREAM, VOCABULARY, text
from tests.tensor_models import llama_rows

WARM_UP, STEPS = 100, 300
GROWTH = 4 << 20  # bytes; a microbatch's activations of one stage are about 10 KiB, so what is kept of each would be 10 MiB and more

pytestmark = pytest.mark.timeout(300)


def _hooks(module: nn.Module) -> Iterator[int]:
    """The number of hooks of each kind on all modules, parameters and nodes that add to a parameter's gradient."""
    for part in module.modules():
        yield from (len(value) for name, value in vars(part).items() if name.endswith("_hooks") and isinstance(value, dict))
    for parameter in module.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield len(getattr(parameter, name, None) or ())


def _counts(session: Session) -> dict[str, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    objects = gc.get_objects()
    executor = session.engine.executor
    return {
        "hooks": sum(_hooks(session.model)),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "tensors": sum(isinstance(o, torch.Tensor) for o in objects),
        "flying": sum(len(held) for held in (executor._flying, executor._halves, executor._handed, executor._ready, executor._posted)),
        "bytes": resident,
    }


def _train(rank: int, world: int, store: Any, plan: str, batch: dict[str, torch.Tensor]) -> tuple[dict[str, int], dict[str, int]]:
    with Session(Plan.from_json(plan), rank, store) as session:
        for _ in range(WARM_UP):
            session.step(batch)
        before = _counts(session)
        for _ in range(STEPS):
            session.step(batch)
        return before, _counts(session)


@pytest.mark.parametrize("schedule", ["one_f_one_b(microbatches = 4)", "zbv(microbatches = 4)"])
def test_three_hundred_steps_leave_nothing_behind(pool: Pool, schedule: str) -> None:
    blocks = f'shard {{ "**" => fsdp(sh) }}\npipeline over pp {{ schedule = {schedule} }}'
    plan = compiled("axis pp = 2; axis sh = 2", blocks=blocks, model="residual_mlps", module="tests.split_models", batch=16)
    check(pool, plan, {"x": torch.randn(16, 8), "target": torch.zeros(16, 8)})


@pytest.mark.parametrize(
    "split", [MATRICES + VOCABULARY, STREAM + MATRICES + '"head.weight" => colwise(tp)\n'], ids=["whole", "split stream"]
)
def test_nor_do_they_between_tensor_ranks(pool: Pool, split: str) -> None:
    plan = pdsl.compile(pdsl.load(text({"tp": 2}, split + REST, bias=True)))
    check(pool, plan, llama_rows().rows(range(8)))


def check(pool: Pool, plan: Plan, batch: dict[str, torch.Tensor]) -> None:
    """Train with one batch again and again."""
    for before, after in pool.run(_train, plan.world_size, plan.to_json(), batch, deadline=240.0):
        assert before["hooks"] > 0 or plan.shard_size == 1
        assert before["flying"] == 0
        grown = {what: after[what] - before[what] for what in before}
        assert grown.pop("bytes") < GROWTH
        assert max(grown.values()) <= 0, grown  # what earlier tests of this worker have left may go meanwhile


def _threads(rank: int, world: int, store: Any, plan: str, sessions: int) -> list[int]:
    """Threads of this process after each of some sessions, one after the other."""
    found = []
    for i in range(sessions):
        with Session(Plan.from_json(plan), rank, torch.distributed.PrefixStore(str(i), store)) as session:
            session.step(llama_rows().rows(range(8)))
        del session
        gc.collect()
        found.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return found


SPLITS = {
    "tensor": (MATRICES + REST, ""),
    "sharded": ('"**" => fsdp(tp)\n', ""),
    "replicas": (REST, ""),
    "replicas in bf16": (REST, "precision { params = bf16 }"),
    "stages": (REST, "pipeline over tp { schedule = zbv(microbatches = 2) }"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_groups_end_with_their_threads(pool: Pool, name: str) -> None:
    shard, blocks = SPLITS[name]
    plan = pdsl.compile(pdsl.load(text({"tp": 2}, shard, pipeline=blocks)))
    for first, *more in pool.run(_threads, 2, plan.to_json(), 3):
        assert more == [first, first]
