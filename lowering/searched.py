"""Templates whose schedule was searched for: from what the whole search found, and found again for another count of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeGuard

from pdsl.grammar.errors import PlanError
from pdsl.lowering.plan import StageCut, Template
from pdsl.lowering.schedules import SEARCHED
from pdsl.lowering.search import Candidate, Found, NothingFits, placement_text, search
from pdsl.lowering.search_report import ScheduleBasis, SearchReport
from pdsl.lowering.simulate import flop_costs
from pdsl.lowering.spec import PipelineSpec

__all__ = ["candidate_of", "searched_template", "searches", "stand_in", "template_from"]


def searches(pipeline: PipelineSpec | None) -> TypeGuard[PipelineSpec]:
    """Whether the schedule is searched for."""
    return pipeline is not None and pipeline.schedule.name in SEARCHED


def searched_template(stages: Sequence[StageCut], basis: ScheduleBasis, microbatches: int, rounds: int = 1) -> Template:
    """The template of given stages for any count of microbatches.

    Named schedules, their relatives and list schedules, without local or exact search: a plan is made anew in the middle of a run, by every
    rank. Raises PlanError if memory allows no schedule.
    """
    try:
        found = search(
            (candidate_of(stages, basis),), microbatches, hop=basis.hop, rounds=min(rounds, microbatches), split=basis.split, thorough=False
        )
    except NothingFits as error:
        raise PlanError(str(error)) from None
    return template_from(tuple(stages), found, basis.hop)


def candidate_of(stages: Sequence[StageCut], basis: ScheduleBasis) -> Candidate:
    """Stages as a candidate of a search."""
    return Candidate(tuple(s.position for s in stages), flop_costs(basis.forward, basis.again), basis.sizes, basis.caps, basis.between)


def template_from(stages: tuple[StageCut, ...], found: Found, hop: Fraction) -> Template:
    """Stages with the schedule that was found for them."""
    where = placement_text(found.schedule.placement)
    report = SearchReport(found.way, where, found.makespan, found.bound, found.peak, Fraction(hop), found.tried)
    return Template(stages, found.schedule, report)


def stand_in(stages: Sequence[StageCut]) -> str:
    """A named schedule whose step time stands for that of the best one where many counts are compared: no slower than it is told to be."""
    where = placement_text(tuple(s.position for s in stages))
    return {"v": "zbv", "loop": "one_f_one_b"}.get(where, "interleaved_1f1b")
