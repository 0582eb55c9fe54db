"""Training on one rank of a run with a fault budget: the loop, the data, and what it tells the launcher."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from pdsl.grammar.errors import PdslError
from pdsl.lowering.plan import Plan
from pdsl.runtime.chaos import Chaos, Fault
from pdsl.runtime.elastic import ElasticSession
from pdsl.runtime.feed import make_samples
from pdsl.runtime.link import Link
from pdsl.runtime.session import StepResult

__all__ = ["train_resilient"]


def train_resilient(
    plan: Plan, rank: int, link: Link, *, steps: int | None = None, resume: bool = False, faults: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Train `steps` steps (the plan's own count if None) as one rank, through losses and joins. `resume` begins where the newest
    checkpoint of the spec ends; `faults` are faults on purpose, see `Chaos`.

    Every step is told once by each node, as an event "step" with the fields of a StepResult; so is what happens in between. Raises ModelError or RunError
    with a message for the user.
    """
    total = plan.job.steps if steps is None else steps
    speaks = rank % plan.ranks_per_node == 0
    session: ElasticSession | None = None
    samples = make_samples(plan)

    def told(result: StepResult) -> None:
        if speaks:
            link.tell({"event": "step", "generation": session.plan.generation if session is not None else 0, **asdict(result)})

    def is_fatal(error: BaseException) -> bool:
        """What would happen on every node alike ends the run: a mistake that is found at the start, or in a step that is tried again."""
        if session is None or isinstance(error, PdslError) or not isinstance(error, Exception):
            return True
        return session.steps_taken in (0, session.fault_step)

    link.is_fatal = is_fatal
    session = ElasticSession(
        plan,
        rank,
        link,
        samples,
        resume=resume,
        chaos=Chaos(rank, map(Fault.from_data, faults)),
        on_event=link.tell if speaks else _unheard,
        on_step=told,
    )
    try:
        session.start()
        if resume and speaks and session.steps_taken == 0 and plan.saving is not None:
            link.tell({"event": "fresh", "generation": session.plan.generation, "step": 0, "path": plan.saving.path})
        gc.collect()
        gc.freeze()  # a collection in the middle of a recovery would cost more than all the rest of it
        while True:
            while session.steps_taken < total and samples.count(session.steps_taken):
                session.step()
            if not session.validate(last=True):
                continue
            session.finish()
            if link.done():
                return
            session.recover("a node was lost before all ranks were done")
    finally:
        session.close()


def _unheard(event: dict[str, Any]) -> None:
    return None
