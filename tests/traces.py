"""What the ranks of a plan compute in the pool, put together as `pdsl verify` does it."""

from __future__ import annotations

from typing import Any

from pdsl.lowering.plan import Plan
from pdsl.runtime.verify import Trace, assemble, verify_rank
from tests.pool import Pool

__all__ = ["traced"]


def traced(pool: Pool, plan: Plan, steps: int, *, deadline: float = 60.0) -> Trace:
    """The first steps of a plan on the data of its spec; `deadline` is in seconds."""
    return assemble(plan, pool.run(_rank, plan.world_size, plan.to_json(), steps, deadline=deadline))


def _rank(rank: int, world: int, store: Any, plan: str, steps: int) -> dict[str, Any]:
    return verify_rank(Plan.from_json(plan), rank, store, steps=steps)
