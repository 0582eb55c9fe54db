"""The re-planner against every loss: all sets of nodes within the budget, and all sequences of two such sets, in small clusters.

Each case goes the way that the runtime goes: reports, course, what is left of the interrupted step, new pipelines, transition.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import permutations
from math import comb

import pytest
from attrs import evolve, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.holdings import demand, plan_holdings, state_tensors
from pdsl.lowering.plan import Pipeline, Plan, Template
from pdsl.lowering.plan_check import check_plan
from pdsl.lowering.program import Program
from pdsl.lowering.programs import program
from pdsl.lowering.recovery import Course, course
from pdsl.lowering.replan import copies, layers_held, redo, reroute, rescheduled, retemplate, step_time
from pdsl.lowering.templates import schedule_for, stage_cuts
from pdsl.lowering.transition import StateLost, Transition, transition
from pdsl.lowering.transition_check import check_transition
from tests.plans import facts, heterogeneous
from tests.replans import (
    COMMITTED,
    Cluster,
    assert_exactly_once,
    loss_sets,
    lost_parameters,
    reports_of,
    sums_of,
    whole_pipelines,
)

pytestmark = pytest.mark.timeout(600)  # many cases, in one process

KINDS = ("weight", "exp_avg")

CLUSTERS = [
    *(Cluster(n, 2, 1) for n in range(4, 13)),
    *(Cluster(n, 3, 1) for n in (7, 9, 11, 12)),
    *(Cluster(n, 1, 1) for n in (2, 3, 6)),
    *(Cluster(n, 2, 2) for n in (6, 7, 8)),
    *(Cluster(n, 1, 3) for n in (4, 5, 6)),
    Cluster(12, 4, 2),
    Cluster(12, 4, 1, layers=7, shard=2),
    Cluster(6, 2, 2, shard=2),
    Cluster(8, 3, 1, layers=12, islands=2),
    Cluster(6, 2, 2, layers=8, islands=2),
    Cluster(7, 2, 1, layers=10, shard=2, islands=2),
    Cluster(7, 2, 1, schedule="gpipe", microbatches=11),
    Cluster(6, 1, 2, count=2, microbatches=3),  # fewer microbatches than nodes: pipelines are longer
    Cluster(8, 2, 1, microbatches=3),
    # the promise cannot be kept: too few nodes, or sizes that do not sum to what is left
    Cluster(5, 2, 2),
    Cluster(5, 3, 1, count=3),
    Cluster(6, 3, 1),
    Cluster(3, 2, 1),
    Cluster(6, 2, 1, count=1),
    Cluster(9, 3, 2, count=1),
]


@frozen
class Outcome:
    """What became of a loss: the new plan and what moved, or the kind of error that says why not."""

    plan: Plan | None
    moves: Transition | None
    error: type[Exception] | None


# --- what every plan must be -------------------------------------------------------------------------------------------------------------------------


def shape(plan: Plan, run: tuple[tuple[int, ...], ...]) -> tuple[object, ...]:
    """All of a plan and of the rest of a step under it but the numbers of ranks, microbatches and pipelines."""
    parts = [
        (plan.templates[p.template].stages, tuple(map(len, p.islands)), len(p.microbatches), len(rest))
        for p, rest in zip(plan.pipelines, run, strict=True)
    ]
    return tuple(sorted(parts, key=lambda part: repr(part[1:])))


class Looked:
    """What of a cluster was looked at. Programs name ranks and microbatches and depend on them in no other way, which a test of its own shows;
    so of plans that differ in these numbers alone one is looked at.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seen: set[object] = set()
        self.counts: dict[str, int] = {}

    def add(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def assert_sound(self, plan: Plan, run: tuple[tuple[int, ...], ...] | None = None) -> None:
        """Batch, schedules, islands and programs of a plan fit together; so does the rest of a step, in the groups that the whole step has."""
        assert sorted(m for p in plan.pipelines for m in p.microbatches) == list(range(plan.microbatches))
        ranks = [r for p in plan.pipelines for island in p.islands for r in island]
        assert len(set(ranks)) == len(ranks)
        key = shape(plan, run or tuple(p.microbatches for p in plan.pipelines))
        if key in self.seen:
            return
        self.seen.add(key)
        self.add("programs looked at")
        assert check_plan(plan) == ()
        groups = sums_of(plan)
        if run is not None:
            rest = redo(plan, dict(enumerate(run)))
            assert [p.microbatches for p in rest.pipelines] == list(run)
            for rank, mine in sums_of(rest).items():
                assert mine.keys() <= groups[rank].keys()


# --- one loss ----------------------------------------------------------------------------------------------------------------------------------------


def finished_by(plan: Plan, lost: Collection[int], pattern: int) -> dict[int, tuple[int, ...]]:
    """Whole pipelines that have run all of their microbatches when they hear of the loss: none, all, or some."""
    whole = whole_pipelines(plan, lost)
    chosen = {0: [], 1: whole, 2: whole[::2], 3: whole[1::2]}[pattern % 4]
    return {i: plan.pipelines[i].microbatches for i in chosen}


def check_course(plan: Plan, lost: Collection[int], finished: Mapping[int, tuple[int, ...]], looked: Looked, generation: int) -> Course:
    """The first answer to a loss: whole pipelines take all over, nothing moves."""
    nodes = [n for n in plan.nodes if n not in lost]
    found = course(plan, reports_of(plan, lost, finished), nodes, generation=generation)
    whole = whole_pipelines(plan, lost)
    assert (found.plan is not None) == bool(whole)
    if found.plan is None:
        return found
    assert found.plan.generation == generation
    assert set(found.plan.nodes) == set(nodes)
    assert [p.islands for p in found.plan.pipelines if p.whole] == [plan.pipelines[i].islands for i in whole]
    assert_exactly_once(plan, found, {plan.pipelines[i].islands: m for i, m in finished.items()})
    for i, p in enumerate(found.plan.pipelines):
        mine = next(j for j in whole if plan.pipelines[j].islands == p.islands) if p.whole else None
        assert set(found.run[i]).isdisjoint(finished.get(mine, ())) or mine is None
    looked.assert_sound(found.plan, found.run)
    return found


def move(plan: Plan, lost: Collection[int], looked: Looked, generation: int) -> Outcome:
    """The second answer: new pipelines over all that is left, and the state moved; or the error, which must be the right one."""
    nodes = [n for n in plan.nodes if n not in lost]
    held = {node: layers for node, layers in layers_held(plan).items() if node in nodes}
    cluster = looked.cluster
    possible = cluster.possible(len(nodes))
    if not possible:
        with pytest.raises(PlanError, match=f"use exactly {len(nodes)} nodes") as refused:
            retemplate(plan, nodes, held, generation=generation)
        assert not isinstance(refused.value, StateLost)
        return Outcome(None, None, PlanError)
    after = retemplate(plan, nodes, held, generation=generation)
    rows, needs = plan_holdings(plan, COMMITTED, KINDS), demand(after, KINDS)
    live = tuple(h for h in rows if plan.node(h.owner) not in lost)
    former = tuple(h for h in rows if plan.node(h.owner) in lost)
    find = partial(transition, live, needs, state_tensors(plan, KINDS), node_of=after.node, former=former)
    gone = lost_parameters(plan, lost)
    if gone:
        with pytest.raises(StateLost, match="no copy is left of") as nowhere:
            find()
        assert nowhere.value.tensor.partition("/")[2] in gone
        assert nowhere.value.former
        assert {plan.node(rank) for rank in nowhere.value.former} <= set(lost)
        return Outcome(None, None, StateLost)
    moves = find()
    assert moves.version == COMMITTED
    assert check_transition(moves, live, needs) == ()
    assert after.nodes == tuple(nodes)  # no node idles
    assert all(p.whole and p.microbatches for p in after.pipelines)
    assert len(after.pipelines) >= min(cluster.lose + 1, max(possible))
    assert min(copies(after)) >= len(after.pipelines)
    looked.assert_sound(after)
    return Outcome(after, moves, None)


def within_promise(cluster: Cluster, nodes: int, lost: int) -> bool:
    """Whether the budget promises to survive: lose + 1 copies before, and pipelines for what is left."""
    return lost <= cluster.lose and max(cluster.possible(nodes), default=0) > cluster.lose and bool(cluster.possible(nodes - lost))


# --- all of them -------------------------------------------------------------------------------------------------------------------------------------


def every_loss(looked: Looked) -> Iterator[tuple[Plan, tuple[int, ...], Outcome]]:
    """Every first set: in the middle of a step with none, all and some of the pipelines finished. Gives the plan before and what came of it."""
    cluster = looked.cluster
    plan = cluster.plan
    looked.assert_sound(plan)
    moved: dict[tuple[int, ...], Outcome] = {}
    for number, lost in enumerate(loss_sets(plan.nodes, looked.cluster.lose)):
        looked.add("sets")
        outcome = moved.setdefault(lost, move(plan, lost, looked, 1))
        if within_promise(looked.cluster, cluster.nodes, len(lost)):
            assert outcome.error is None, f"losing {lost}"
        for pattern in (0, 1, 2 + number % 2):
            finished = finished_by(plan, lost, pattern)
            found = check_course(plan, lost, finished, looked, 1)
            looked.add("courses")
            if found.plan is not None and (cluster.nodes < 8 or pattern == (0, 1, 2 + number % 2)[number % 3]):
                second_loss_in_the_same_step(plan, lost, finished, found, looked, moved)
        yield plan, lost, outcome


def second_loss_in_the_same_step(
    plan: Plan,
    lost: tuple[int, ...],
    finished: Mapping[int, tuple[int, ...]],
    found: Course,
    looked: Looked,
    moved: dict[tuple[int, ...], Outcome],
) -> None:
    """Another set while the rest of the step runs: some pipelines have run what they took over, some have not begun it."""
    assert found.plan is not None
    survivors = [n for n in plan.nodes if n not in lost]
    index = {p.islands: i for i, p in enumerate(plan.pipelines)}
    for number, second in enumerate(loss_sets(survivors, looked.cluster.lose)):
        both = tuple(sorted({*lost, *second}))
        later: dict[int, tuple[int, ...]] = {}
        for at, p in enumerate(found.plan.pipelines):
            i = index.get(p.islands)
            if i is None or i not in whole_pipelines(plan, both):
                continue
            has = finished.get(i, ())
            later[i] = (*has, *found.run[at]) if (number + at) % 2 else has
        looked.add("second losses while the step is redone")
        check_course(plan, both, later, looked, 2)
        if both not in moved:
            moved[both] = move(plan, both, looked, 2)
        if within_promise(looked.cluster, looked.cluster.nodes, len(both)):
            assert moved[both].error is None


def second_loss_after_the_move(plan: Plan, looked: Looked) -> None:
    """Another set once the new plan is in force: the promise is whole again as long as there are nodes for it."""
    for number, lost in enumerate(loss_sets(plan.nodes, looked.cluster.lose)):
        looked.add("second losses after the move")
        check_course(plan, lost, finished_by(plan, lost, number), looked, 2)
        outcome = move(plan, lost, looked, 2)
        if within_promise(looked.cluster, len(plan.nodes), len(lost)):
            assert outcome.error is None, f"losing {lost}"
        else:
            looked.add("second losses beyond the promise")


@pytest.fixture(scope="module")
def total(request) -> Iterator[Counter[str]]:
    """Adds up what was looked at, and prints it at the end."""
    found: Counter[str] = Counter()
    yield found
    if found:
        told = ", ".join(f"{n:,} {what}" for what, n in found.most_common())
        with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            print(f"\nlosses of nodes: {told}")


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_every_loss_and_every_two_losses_keep_all_layers_use_all_nodes_and_run_the_batch_once(cluster, total, record_property):
    looked = Looked(cluster)
    for _, _, outcome in every_loss(looked):
        looked.add("kept" if outcome.error is None else outcome.error.__name__)
        if outcome.plan is not None:
            second_loss_after_the_move(outcome.plan, looked)
    record_property("cases", looked.counts)
    total.update(looked.counts)
    assert looked.counts["sets"] == sum(comb(cluster.nodes, k) for k in range(1, cluster.lose + 1))


def test_programs_depend_on_the_numbers_of_ranks_and_microbatches_as_names_only():
    for cluster in (Cluster(7, 2, 2), Cluster(7, 2, 1, layers=10, shard=2, islands=2)):
        plan = cluster.plan
        for lost in loss_sets(plan.nodes, cluster.lose):
            found = course(plan, reports_of(plan, lost, {}), [n for n in plan.nodes if n not in lost], generation=1).plan
            if found is None:
                continue
            numbers = in_order(found)
            places = {m: i for i, m in enumerate(m for p in found.pipelines for m in p.microbatches)}
            other = renumbered(found, numbers, places)
            for rank in found.ranks:
                assert named(program(found, rank), numbers, places) == named(program(other, numbers[rank]))


def renumbered(plan: Plan, numbers: Mapping[int, int], places: Mapping[int, int]) -> Plan:
    """The same plan with other numbers of ranks and microbatches."""
    made = tuple(
        evolve(
            p,
            islands=tuple(tuple(numbers[r] for r in island) for island in p.islands),
            microbatches=tuple(places[m] for m in p.microbatches),
        )
        for p in plan.pipelines
    )
    return evolve(plan, pipelines=made)


def in_order(plan: Plan) -> dict[int, int]:
    """Numbers for the ranks from 0, pipeline by pipeline, the last first."""
    return {rank: i for i, rank in enumerate(r for p in reversed(plan.pipelines) for island in p.islands for r in island)}


def named(made: Program, numbers: Mapping[int, int] | None = None, places: Mapping[int, int] | None = None) -> tuple[object, ...]:
    """A program with other numbers of ranks and microbatches; sums are over sets of ranks."""
    n = (lambda rank: numbers.get(rank, rank)) if numbers is not None else (lambda rank: rank)
    m = (lambda number: places.get(number, number)) if places is not None else (lambda number: number)
    actions = tuple(evolve(a, peer=n(a.peer), microbatch=m(a.microbatch)) for a in made.actions)
    return actions, tuple((b.parameters, frozenset(map(n, b.ranks)), b.stages) for b in made.buckets)


# --- re-routing ----------------------------------------------------------------------------------------------------------------------------------------


def test_microbatches_of_a_broken_pipeline_go_to_the_pipeline_that_would_be_done_first():
    model = facts(10)
    plan = heterogeneous(((2, 3), (4, 3), (6, 3)), model=model)
    found = reroute(with_budget(plan), [0], generation=1)
    assert found is not None
    # the pipeline of six stages is the fastest: its largest stage is half of that of four
    assert [len(p.microbatches) for p in found.pipelines] == [0, 4, 5]
    assert [p.whole for p in found.pipelines] == [False, True, True]
    assert found.pipelines[0].islands == ((), (1,))
    orphans = [0, 1, 2]
    for k in range(4):
        other = redo(found, {1: (3, 4, 5, *orphans[:k]), 2: (6, 7, 8, *orphans[k:])})
        assert step_time(found) <= step_time(other)


def test_no_plan_is_found_if_every_pipeline_is_broken():
    plan = with_budget(heterogeneous(((2, 3), (3, 5))))
    assert reroute(plan, [1, 2], generation=1) is None
    assert reroute(plan, [0, 1], generation=1) is not None


def test_a_pipeline_that_is_lost_as_a_whole_is_no_part_of_the_plan():
    found = reroute(with_budget(heterogeneous(((2, 3), (3, 5)))), [0, 1], generation=4)
    assert found is not None
    assert (len(found.pipelines), found.nodes, found.generation) == (1, (2, 3, 4), 4)
    assert sorted(found.pipelines[0].microbatches) == list(range(8))


def test_gpipe_runs_what_it_takes_over_in_the_same_number_of_rounds():
    plan = Cluster(4, 2, 1, schedule="gpipe", microbatches=8).plan
    plan = evolve(plan, job=evolve(plan.job, accumulate=2))
    made = rescheduled(plan, plan.templates[0], 6)
    first = [str(o.op.value) for o in made.schedule.rows[0]]
    assert "".join(first) == "FFFBBBFFFBBB"  # six at once would hold twice the activations


def test_a_position_with_two_stages_takes_as_long_as_both():
    equal = facts(6)
    equal = evolve(equal, layers=tuple(evolve(layer, flops=10) for layer in equal.layers))
    bounds = ((0, 2), (2, 4), (4, 6), (6, 8))
    looped = Template(stage_cuts(bounds, 2), schedule_for("interleaved_1f1b", 2, 2, 2))
    plain = Template(stage_cuts(bounds, 4), schedule_for("one_f_one_b", 4, 1, 2))
    plan = evolve(
        with_budget(heterogeneous(((2, 2), (4, 2)), model=equal)),
        templates=(looped, plain),
        microbatches=6,
        pipelines=(
            Pipeline(0, ((0,), (1,)), (0, 1)),
            Pipeline(1, ((2,), (3,), (4,), (5,)), (2, 3)),
            Pipeline(1, ((6,), (7,), (8,), (9,)), (4, 5)),
        ),
    )
    found = reroute(plan, [9], generation=1)
    assert found is not None
    assert [p.microbatches for p in found.pipelines] == [(0, 1), (2, 3, 4, 5), ()]


# --- roles and copies ---------------------------------------------------------------------------------------------------------------------------------


def test_layers_and_copies_are_those_of_the_islands():
    plan = with_budget(heterogeneous(((2, 3), (3, 5)), model=facts(4, tied=True)))
    assert layers_held(plan) == {0: {0, 1, 2}, 1: {3, 4, 5}, 2: {0, 1}, 3: {2, 3}, 4: {4, 5}}
    assert copies(plan) == (4, 2, 2, 2, 2, 4)  # the embedding is the weight of the head too
    left = reroute(plan, [0], generation=1)
    assert left is not None
    assert layers_held(left) == {1: {3, 4, 5}, 2: {0, 1}, 3: {2, 3}, 4: {4, 5}}
    assert copies(left) == (3, 1, 1, 2, 2, 3)


def moved(before: Plan, after: Plan, node_of: Mapping[int, int]) -> int:
    """Bytes of weights that ranks of `after` lack if its nodes change places."""
    had = {(h.owner, h.tensor) for h in plan_holdings(before, 0, ("weight",))}
    size = {t.name: t.bytes for t in state_tensors(before, ("weight",))}
    each = before.ranks_per_node
    owners = [(node_of[after.node(n.owner)] * each + n.owner % each, n.tensor) for n in demand(after, ("weight",))]
    return sum(size[tensor] for owner, tensor in owners if (owner, tensor) not in had)


@pytest.mark.parametrize("vocabulary", [20, 5000])
@pytest.mark.parametrize(
    "cluster",
    [Cluster(5, 2, 1), Cluster(6, 2, 2), Cluster(5, 2, 1, layers=10, islands=2), Cluster(6, 2, 1, layers=8, count=4, microbatches=2)],
    ids=str,
)
def test_no_other_choice_of_roles_would_move_fewer_bytes(cluster, vocabulary):
    plan = cluster.plan
    shapes = {p.name: (vocabulary if p.name == "embed.weight" else p.shape[0], *p.shape[1:]) for p in plan.facts.parameters}
    plan = evolve(plan, facts=evolve(plan.facts, parameters=tuple(evolve(p, shape=shapes[p.name]) for p in plan.facts.parameters)))
    for lost in loss_sets(plan.nodes, 2):
        nodes = [n for n in plan.nodes if n not in lost]
        if lost_parameters(plan, lost) or not cluster.possible(len(nodes)):
            continue
        after = retemplate(plan, nodes, {n: layers for n, layers in layers_held(plan).items() if n in nodes}, generation=1)
        places = [dict(zip(nodes, order, strict=True)) for order in permutations(nodes)]
        assert moved(plan, after, dict(zip(nodes, nodes, strict=True))) == min(moved(plan, after, at) for at in places)


def test_a_plan_without_a_budget_is_not_changed():
    with pytest.raises(PlanError, match="has no fault budget: its plan cannot change while it runs"):
        retemplate(heterogeneous(), [0, 1], {}, generation=1)


def with_budget(plan: Plan, **kwargs: object) -> Plan:
    return evolve(plan, budget=evolve(Cluster(5, 2, 1).plan.budget, **kwargs))


# --- the same bytes everywhere ---------------------------------------------------------------------------------------------------------------------------

HASHES = """
from tests.lowering.test_replan import hashes
print(hashes())
"""


def hashes() -> str:
    """One digest of all plans and transitions after every loss of a few clusters."""
    found = hashlib.sha256()
    for cluster in (Cluster(7, 2, 1), Cluster(6, 2, 2, shard=2), Cluster(5, 2, 1, layers=8, islands=2)):
        looked = Looked(cluster)
        plan = cluster.plan
        found.update(plan.hash.encode())
        for lost in loss_sets(plan.nodes, cluster.lose):
            outcome = move(plan, lost, looked, 1)
            again = course(plan, reports_of(plan, lost, {}), [n for n in plan.nodes if n not in lost], generation=1).plan
            for part in (outcome.plan, outcome.moves, again):
                found.update(part.hash.encode() if part is not None else b"none")
    return found.hexdigest()


def test_plans_and_transitions_have_the_same_bytes_in_every_process():
    texts = {
        subprocess.run(
            [sys.executable, "-c", HASHES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert texts == {hashes()}
