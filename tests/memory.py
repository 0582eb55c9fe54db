"""The memory of a rank as it is: what the allocator of the CPU gave out over a step, and what stood there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdsl.lowering.plan import Plan
from pdsl.runtime.local import local_tensor
from pdsl.runtime.rows import read_rows
from pdsl.runtime.session import Session
from pdsl.runtime.train import make_dataset
from tests.quiet import quiet

__all__ = ["peak_bytes"]


def peak_bytes(rank: int, _world: int, store: Any, text: str) -> int:
    """The most bytes of tensors that a rank holds at once in a step: weights, states and buffers for sums, and what the step allocates on top.

    Measured by the profiler's record of each allocation, which knows tensors alone: neither the interpreter nor the buffers of gloo. It misses what
    another thread frees, such as one that sends, so of three steps the one with the least counts.
    """
    plan = Plan.from_json(text)
    with Session(plan, rank, store) as session:
        rows = read_rows(make_dataset(plan), range(plan.job.batch))
        for _ in range(2):
            session.step(rows)
        kept = (*session.part.state().values(), *session.engine.reducer._flat, *session.part.formats.leaves.values())
        stores = [local_tensor(t.data).untyped_storage() for t in kept]
        standing = sum({s.data_ptr(): s.nbytes() for s in stores}.values())
        return standing + min(_most_allocated(lambda: session.step(rows)) for _ in range(3))


def _most_allocated(step: Callable[[], object]) -> int:
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
