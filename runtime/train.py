"""Training: the loop of one rank over a data set."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from attrs import frozen

from pdsl.grammar.errors import ModelError, RunError
from pdsl.lowering.factory import call_factory, plain_arguments, resolve
from pdsl.lowering.plan import Plan
from pdsl.runtime.report import Reporter
from pdsl.runtime.rows import read_rows, step_indices, steps_per_epoch
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

    Raises ModelError, RunError or NotExecuted with a message for the user.
    """
    total = plan.job.steps if steps is None else steps
    dataset = make_dataset(plan)
    size = len(dataset)
    steps_per_epoch(size, plan.job.batch)
    losses: list[float] = []
    seconds = 0.0
    with (
        Session(plan, rank, store, local_rank=local_rank) as session,
        Reporter(total, metrics=metrics, progress=progress, generation=plan.generation, active=rank == 0) as reporter,
    ):
        for step in range(total):
            order = step_indices(plan.job.seed, step, size, plan.job.batch)
            ids = {m: [order[i] for i in places] for m, places in session.places.items()}
            result = session.step_rows({m: read_rows(dataset, part) for m, part in ids.items()}, ids)
            losses.append(result.loss)
            seconds += result.seconds
            reporter.step(result)
    return {"steps": total, "losses": losses, "samples": total * plan.job.batch, "seconds": seconds, "metrics": metrics}


def make_dataset(plan: Plan) -> Any:
    """The data set of a plan. Raises RunError if it has none, ModelError if its factory cannot be called."""
    data = plan.job.data
    if data is None:
        raise RunError("the plan names no data; use a session and give it your own batches")
    name = str(data.positional[0])
    found = call_factory(resolve(name, plan.job.directory), plain_arguments(data.keywords), name)
    if not hasattr(found, "__len__") or not (hasattr(found, "__getitem__") or hasattr(found, "rows")):
        raise ModelError(f"{name} gave a {type(found).__name__}; a data set has a length and gives rows by index")
    return found
