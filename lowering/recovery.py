"""What to do after an event, from what all living ranks report. Pure, so every rank comes to the same answer by itself.

A step is committed if any rank knows its agreed numbers: such a rank got an answer from all others, so all of them have their gradients. The same
holds for a new plan whose state was moved: if any rank knows that all voted for it, all have the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from attrs import asdict, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.instantiate import instantiate
from pdsl.lowering.plan import Budget, Plan
from pdsl.lowering.replan import reroute

__all__ = ["Course", "Report", "Standing", "course", "is_broken", "no_way_back", "standing"]


@frozen
class Report:
    """What one rank knows when it stands still.

    `committed` steps are done; `holds` is the generation of the plan whose layers it has (-1: none, it has just come); `staged` the generation of a
    plan whose state it has received and verified without knowing that all have (-1: none). `finished` are the microbatches of the step under way
    whose gradients its pipeline has in full. `totals` are the agreed numbers of the last committed step; `kinds` what the optimizer keeps for a
    parameter, `bare` the parameters for which it keeps nothing yet; `plan` is the hash of the plan it holds; `asks` says that it stands still because new pipelines would pay, `broken`
    that it was cut short inside the model, so that nothing which its island has under way is of use.
    """

    committed: int
    holds: int
    staged: int = -1
    finished: tuple[int, ...] = ()
    totals: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    plan: str = ""
    asks: bool = False
    broken: bool = False

    def to_data(self) -> dict[str, Any]:
        """Plain data for the wire."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_data` gave; other keys are left aside."""
        return cls(
            committed=int(data["committed"]),
            holds=int(data["holds"]),
            staged=int(data["staged"]),
            finished=tuple(data["finished"]),
            totals=tuple(data["totals"]),
            kinds=tuple(data["kinds"]),
            bare=tuple(data["bare"]),
            plan=str(data["plan"]),
            asks=bool(data["asks"]),
            broken=bool(data["broken"]),
        )


@frozen
class Standing:
    """What holds for all: steps committed anywhere, with their numbers, the newest plan that was voted for anywhere, and what the optimizer keeps.

    `lacking` are the ranks that have nothing of that plan's state: they have just come, or their state never became whole.
    """

    committed: int
    totals: tuple[float, ...]
    holds: int
    kinds: tuple[str, ...]
    bare: frozenset[str]
    lacking: frozenset[int] = frozenset()

    def kinds_in(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        """By parameter the kinds of state that exist: its weight, and for a trained one what the optimizer keeps."""
        return {p.name: ("weight", *self.kinds) if p.trainable and p.name not in self.bare else ("weight",) for p in plan.facts.parameters}


def standing(reports: Mapping[int, Report]) -> Standing:
    """The common state of all ranks that had a part before the event. Raises PlanError if their reports contradict each other."""
    old = {rank: r for rank, r in reports.items() if r.holds >= 0}
    if not old:
        return Standing(0, (), -1, (), frozenset(), frozenset(reports))
    holds = max(r.holds for r in old.values())
    astray = [rank for rank, r in old.items() if holds not in (r.holds, r.staged)]
    if astray:
        raise PlanError(f"rank {astray[0]} holds plan {old[astray[0]].holds}, others {holds}, which it never received in full")
    holders = {rank: r for rank, r in old.items() if r.holds == holds}
    hashes = {r.plan: rank for rank, r in holders.items()}
    if len(hashes) > 1:
        raise PlanError(f"ranks {' and '.join(map(str, sorted(hashes.values())[:2]))} hold different plans of generation {holds}")
    committed = max(r.committed for r in holders.values())
    behind = [rank for rank, r in holders.items() if r.committed < committed - 1]
    if behind:
        raise PlanError(
            f"rank {behind[0]} has committed {old[behind[0]].committed} steps, others {committed}: no rank can be two steps behind"
        )
    totals = next(r.totals for r in holders.values() if r.committed == committed)
    kinds = tuple(dict.fromkeys(kind for _, r in sorted(holders.items()) for kind in r.kinds))
    lacking = frozenset(rank for rank, r in reports.items() if holds not in (r.holds, r.staged))
    return Standing(committed, totals, holds, kinds, frozenset(name for r in holders.values() for name in r.bare), lacking)


@frozen
class Course:
    """`plan`: the plan to go on with at once, in which nothing moves, and `run` the microbatches of the interrupted step that each of its
    pipelines still has to run. Without a plan the step starts anew after a transition to a plan over all living nodes.
    """

    plan: Plan | None
    run: tuple[tuple[int, ...], ...] = ()


def course(base: Plan, reports: Mapping[int, Report], nodes: Sequence[int], *, generation: int) -> Course:
    """How to go on from `base`, the plan that all old ranks hold, on `nodes`. `reports` are those of their ranks.

    Raises PlanError if the spec allows none of the answers that would do, or if nodes have come that no pipelines could use.
    """
    budget = base.budget
    assert budget is not None
    lost = sorted(set(base.nodes) - set(nodes))
    joined = sorted(set(nodes) - set(base.nodes))
    now = standing(reports)
    if joined or now.lacking:
        return Course(None)
    if lost and "reroute" not in budget.recover:
        return Course(None)
    asked = any(r.asks for r in reports.values()) or (lost and _rather_moves(budget.recover))
    if asked and _usable(base, budget, len(nodes)):
        return Course(None)
    finished = {
        index: _finished(pipeline_ranks, reports, now)
        for index, pipeline in enumerate(base.pipelines)
        if (pipeline_ranks := [r for island in pipeline.islands for r in island])
    }
    found = reroute(base, lost, generation=generation, finished=finished)
    if found is None:
        if budget.recover == ("reroute",):
            raise PlanError(
                f"without node{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} no pipeline is whole, and recover = [reroute] allows no "
                "new ones; retemplate or restore would do"
            )
        return Course(None)
    by_islands = {pipeline.islands: finished.get(i, frozenset()) for i, pipeline in enumerate(base.pipelines)}
    run = tuple(tuple(m for m in p.microbatches if m not in by_islands.get(p.islands, ())) for p in found.pipelines)
    return Course(found, run)


def _rather_moves(recover: Sequence[str]) -> bool:
    return "retemplate" in recover and recover.index("retemplate") < recover.index("reroute")


def _usable(base: Plan, budget: Budget, nodes: int) -> bool:
    """Whether new pipelines could use all of that many nodes; if more were lost since somebody asked for them, perhaps not."""
    try:
        instantiate(budget, base.facts, nodes, base.microbatches)
    except PlanError:
        return False
    return True


def _finished(ranks: Sequence[int], reports: Mapping[int, Report], now: Standing) -> frozenset[int]:
    """Microbatches of the step under way whose gradients every rank of a pipeline has.

    A rank has their sum, of which nothing can be taken out again: ranks that do not agree have to run all of them anew.
    """
    mine = [reports.get(rank) for rank in ranks]
    if any(r is None or r.broken or (r.committed, r.holds) != (now.committed, now.holds) for r in mine):
        return frozenset()
    found = {frozenset(r.finished) for r in mine if r is not None}
    return found.pop() if len(found) == 1 else frozenset()


def is_broken(plan: Plan, rank: int, lost: Collection[int]) -> bool:
    """Whether the pipeline of a rank has lost an island; one that has no pipeline yet has nothing to finish either."""
    if rank not in plan.ranks:
        return True
    mine = plan.pipelines[plan.coordinate(rank).pipeline]
    return any(plan.node(r) in lost for island in mine.islands for r in island)


def no_way_back(plan: Plan) -> str:
    """Why no checkpoint helps, to end a message with."""
    if plan.budget is not None and "restore" not in plan.budget.recover:
        return f"recover = [{', '.join(plan.budget.recover)}] does not allow to go back to a checkpoint"
    return "there is no checkpoint to go back to" + ("" if plan.saving is not None else ": the spec has no checkpoint block")
