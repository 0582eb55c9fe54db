"""Training: the loop of one rank over a data set."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from attrs import frozen

from pdsl.lowering.plan import Plan
from pdsl.runtime.feed import make_dataset, make_samples
from pdsl.runtime.report import Reporter
from pdsl.runtime.session import Session

__all__ = ["RunReport", "make_dataset", "train_rank"]


@frozen
class RunReport:
    """What a run did. `seconds` are those of all its steps together, `losses` one per step."""

    steps: int
    losses: tuple[float, ...]
    samples: int
    seconds: float
    metrics: str | None

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def final_loss(self) -> float:
        return self.losses[-1]


def train_rank(
    plan: Plan,
    rank: int,
    store: dist.Store | None,
    *,
    steps: int | None = None,
    metrics: str | None = None,
    progress: bool = True,
    local_rank: int | None = None,
) -> dict[str, Any]:
    """Train `steps` steps (the plan's own count if None) as one rank. Gives the fields of a RunReport as plain data.

    Raises ModelError or RunError with a message for the user.
    """
    total = plan.job.steps if steps is None else steps
    samples = make_samples(plan)
    losses: list[float] = []
    seconds, consumed = 0.0, 0
    with (
        Session(plan, rank, store, local_rank=local_rank) as session,
        Reporter(total, metrics=metrics, progress=progress, generation=plan.generation, active=rank == 0) as reporter,
    ):
        for step in range(total):
            if not samples.count(step):
                reporter.ends(step)
                break
            rows, ids = samples.take(step, session.places), samples.ids(step, session.places)
            result = session.step_shares(rows, ids, samples.count(step + 1))
            losses.append(result.loss)
            seconds += result.seconds
            consumed += result.samples
            reporter.step(result)
            if session.validator.due(step + 1, last=step + 1 == total or not samples.count(step + 1)):
                reporter.validated(session.validate())
    return {"steps": len(losses), "losses": losses, "samples": consumed, "seconds": seconds, "metrics": metrics}
