"""Clusters for tests of the re-planner, and what is true of a plan found from its islands alone, without the code that is tested."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from attrs import evolve, frozen

from pdsl.lowering.coverage import least_count
from pdsl.lowering.facts import ModelFacts, ParameterFacts
from pdsl.lowering.plan import Budget, Plan
from pdsl.lowering.program import ActionKind, Program
from pdsl.lowering.programs import program
from pdsl.lowering.recovery import Course, Report
from pdsl.lowering.replan import retemplate
from pdsl.lowering.templates import cuts_for_sizes
from tests.plans import facts, job, rectangular

__all__ = [
    "COMMITTED",
    "Cluster",
    "assert_exactly_once",
    "holders",
    "loss_sets",
    "lost_parameters",
    "reports_of",
    "small_model",
    "sums_of",
    "whole_pipelines",
]

COMMITTED = 3


def small_model(layers: int) -> ModelFacts:
    """A chain with one matrix for each layer, of which the first and the last share one."""
    made = facts(layers - 2, tied=True)
    kept = {p.name: p for p in made.parameters if p.name.startswith("embed") or p.name.endswith("up.weight")}
    chain = tuple(evolve(layer, parameters=tuple(n for n in layer.parameters if n in kept)) for layer in made.layers)
    return evolve(made, layers=chain, parameters=tuple(kept.values()))


@frozen
class Cluster:
    """`nodes` nodes of `islands` islands of `shard` ranks; pipelines of `least` nodes or more, `count` sizes (by default as many as the budget needs)."""

    nodes: int
    least: int
    lose: int
    layers: int = 6
    shard: int = 1
    islands: int = 1
    count: int | None = None
    schedule: str = "one_f_one_b"
    microbatches: int = 0
    recover: tuple[str, ...] = ("reroute", "retemplate", "restore")

    def __str__(self) -> str:
        more = [f"{self.shard} shards"] * (self.shard > 1) + [f"{self.islands} islands"] * (self.islands > 1)
        more += [self.schedule] * (self.schedule != "one_f_one_b") + [f"{self.microbatches} microbatches"] * (self.microbatches > 0)
        return ", ".join([f"{self.nodes} nodes", f"pipelines of {self.least} to {self.sizes[-1]}", f"lose {self.lose}", *more])

    @property
    def sizes(self) -> range:
        return range(self.least, self.least + (self.count or least_count(self.least, self.lose)))

    def possible(self, nodes: int) -> set[int]:
        """The counts of pipelines that use exactly so many nodes, by enumeration."""
        found: dict[int, set[int]] = {0: {0}}
        for total in range(1, nodes + 1):
            found[total] = {1 + c for size in self.sizes if size <= total for c in found[total - size]}
        return {c for c in found[nodes] if 0 < c <= (self.microbatches or self.nodes)}

    @property
    def plan(self) -> Plan:
        """The plan of generation 0 over all nodes."""
        model = small_model(self.layers)
        cuts = cuts_for_sizes(model, [n * self.islands for n in self.sizes], schedule=self.schedule)
        assert None not in cuts
        count = self.microbatches or self.nodes
        base = rectangular(
            positions=1,
            shard=self.shard,
            microbatches=count,
            batch=count * self.shard,
            model=model,
            ranks_per_node=self.shard * self.islands,
        )
        budget = Budget(self.lose, self.least, cuts, self.schedule, recover=self.recover)
        base = evolve(base, axes=(), budget=budget, job=evolve(job(count * self.shard), steps=10))
        return retemplate(base, range(self.nodes), {}, generation=0)


def loss_sets(nodes: Iterable[int], lose: int) -> Iterator[tuple[int, ...]]:
    """Every set of 1 to `lose` of the nodes."""
    nodes = tuple(nodes)
    for size in range(1, lose + 1):
        yield from combinations(nodes, size)


# --- what is true of a plan --------------------------------------------------------------------------------------------------------------------------


def _uses(plan: Plan, pipeline: int, position: int, parameter: ParameterFacts) -> bool:
    stages = plan.templates[plan.pipelines[pipeline].template].stages
    return any(s.position == position and any(s.start <= layer < s.stop for layer in parameter.layers) for s in stages)


def holders(plan: Plan, parameter: ParameterFacts) -> dict[int, int]:
    """Every rank that holds a part of a parameter, with its place in the island."""
    return {
        rank: place
        for p, pipeline in enumerate(plan.pipelines)
        for position, island in enumerate(pipeline.islands)
        if _uses(plan, p, position, parameter)
        for place, rank in enumerate(island)
    }


def lost_parameters(plan: Plan, lost: Collection[int]) -> list[str]:
    """Parameters of which no node that is left has a copy."""
    return [p.name for p in plan.facts.parameters if all(plan.node(rank) in lost for rank in holders(plan, p))]


def whole_pipelines(plan: Plan, lost: Collection[int] = ()) -> list[int]:
    """Pipelines of which every island is there without those nodes."""
    return [i for i, p in enumerate(plan.pipelines) if all(island and plan.node(island[0]) not in lost for island in p.islands)]


def sums_of(plan: Plan) -> dict[int, dict[tuple[int, ...], list[tuple[str, ...]]]]:
    """What every rank sums with which ranks, after a look at all programs: messages pair up in order, each microbatch runs once on each stage, sums have the
    same members and contents on all of them and are those that the islands want.
    """
    made = {rank: program(plan, rank) for rank in plan.ranks}
    _assert_messages(made)
    _assert_computing(plan, made)
    found = {rank: _sums(p) for rank, p in made.items()}
    _assert_sums(plan, found)
    assert all(p.actions[-1].kind is ActionKind.STEP for p in made.values())
    return found


def _assert_messages(made: Mapping[int, Program]) -> None:
    sent: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    received: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for rank, p in made.items():
        for a in p.actions:
            match a.kind:
                case ActionKind.SEND_ACTIVATION:
                    sent.setdefault((rank, a.peer), []).append(("activation", a.stage + 1, a.microbatch))
                case ActionKind.SEND_GRADIENT:
                    sent.setdefault((rank, a.peer), []).append(("gradient", a.stage - 1, a.microbatch))
                case ActionKind.RECEIVE_ACTIVATION:
                    received.setdefault((a.peer, rank), []).append(("activation", a.stage, a.microbatch))
                case ActionKind.RECEIVE_GRADIENT:
                    received.setdefault((a.peer, rank), []).append(("gradient", a.stage, a.microbatch))
    assert sent == received


def _assert_computing(plan: Plan, made: Mapping[int, Program]) -> None:
    for rank, p in made.items():
        at = plan.coordinate(rank)
        wanted = sorted((s, m) for s in plan.stages_of(rank) for m in plan.pipelines[at.pipeline].microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert sorted((a.stage, a.microbatch) for a in p.actions if a.kind is kind) == wanted


def _sums(p: Program) -> dict[tuple[int, ...], list[tuple[str, ...]]]:
    """What a rank sums with each set of ranks, in the order in which it starts the sums."""
    found: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for a in p.actions:
        if a.kind is ActionKind.REDUCE:
            bucket = p.buckets[a.bucket]
            found.setdefault(bucket.ranks, []).append(bucket.parameters)
    return found


def _assert_sums(plan: Plan, found: Mapping[int, Mapping[tuple[int, ...], list[tuple[str, ...]]]]) -> None:
    for rank, mine in found.items():
        for ranks, buckets in mine.items():
            assert rank in ranks
            assert all(found[other][ranks] == buckets for other in ranks)
    summed = {rank: sorted(n for buckets in mine.values() for bucket in buckets for n in bucket) for rank, mine in found.items()}
    with_whom = {(rank, n): ranks for rank, mine in found.items() for ranks, buckets in mine.items() for bucket in buckets for n in bucket}
    wanted: dict[int, list[str]] = {rank: [] for rank in found}
    for p in plan.facts.parameters:
        held = holders(plan, p)
        for rank, place in held.items():
            group = tuple(sorted(r for r, other in held.items() if other == place))
            if len(group) > 1:
                wanted[rank].append(p.name)
                assert with_whom[rank, p.name] == group
    assert summed == {rank: sorted(names) for rank, names in wanted.items()}


# --- reports -----------------------------------------------------------------------------------------------------------------------------------------


def reports_of(
    plan: Plan, lost: Collection[int], finished: Mapping[int, Sequence[int]], *, committed: int = COMMITTED, holds: int | None = None
) -> dict[int, Report]:
    """What the ranks that are left report; `finished` by pipeline."""
    return {
        rank: Report(
            committed,
            plan.generation if holds is None else holds,
            finished=tuple(sorted(finished.get(plan.coordinate(rank).pipeline, ()))),
            plan="same",
            totals=(1.0,),
        )
        for rank in plan.ranks
        if plan.node(rank) not in lost
    }


def assert_exactly_once(plan: Plan, found: Course, finished: Mapping[tuple[tuple[int, ...], ...], Collection[int]]) -> None:
    """What pipelines have finished (by their islands) and what they still run is the batch, each microbatch once, and each pipeline's own."""
    assert found.plan is not None
    everything: list[int] = []
    for pipeline, run in zip(found.plan.pipelines, found.run, strict=True):
        kept = tuple(finished.get(pipeline.islands, ())) if tuple(run) != pipeline.microbatches else ()  # who runs all begins anew
        assert sorted([*kept, *run]) == sorted(pipeline.microbatches)
        assert pipeline.whole or not pipeline.microbatches
        everything += [*kept, *run]
    assert sorted(everything) == list(range(plan.microbatches))
