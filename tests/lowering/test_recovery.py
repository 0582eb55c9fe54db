"""What all ranks conclude from what they report: no committed step is lost, no microbatch counts twice or not at all, whatever the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

import pytest
from attrs import define, evolve, field

from pdsl.grammar.errors import PlanError
from pdsl.lowering.plan import Plan
from pdsl.lowering.recovery import Course, Report, Standing, course, standing
from pdsl.lowering.replan import retemplate
from tests.replans import COMMITTED, Cluster, holders, loss_sets, reports_of, whole_pipelines

pytestmark = pytest.mark.timeout(600)  # many cases, in one process

FIVE, SIX = Cluster(5, 2, 1), Cluster(6, 2, 2)
IDLE, DONE, CUT = "idle", "done", "cut"
"""How an event finds a rank: it has not begun what it was to run, has run it, was cut short in it."""


@define
class Rank:
    """What a rank has: committed steps, which microbatches it says are finished, what its own gradients are really made of, and whether it has the sums
    of all ranks' gradients.
    """

    committed: int = COMMITTED
    finished: frozenset[int] = frozenset()
    gradients: Counter[int] = field(factory=Counter)
    broken: bool = False
    summed: bool = False
    totals: tuple[float, ...] = (1.0,)

    def report(self) -> Report:
        return Report(self.committed, 0, finished=tuple(sorted(self.finished)), totals=self.totals, plan="same", broken=self.broken)


class World:
    """Ranks of a plan that keep the rules of a session: the gradients of what is finished stay where they are, what runs again begins with none."""

    def __init__(self, base: Plan) -> None:
        self.base = self.plan = base
        self.run = tuple(p.microbatches for p in base.pipelines)
        self.ranks = {rank: Rank() for rank in base.ranks}

    def copy(self) -> World:
        made = World(self.base)
        made.plan, made.run = self.plan, self.run
        made.ranks = {rank: evolve(r, gradients=Counter(r.gradients)) for rank, r in self.ranks.items()}
        return made

    def part(self, rank: int) -> tuple[int, ...]:
        return self.run[self.plan.coordinate(rank).pipeline]

    def work(self, states: Mapping[int, str]) -> None:
        """Each rank runs its part of the step, as far as its state says."""
        for rank, state in states.items():
            r = self.ranks[rank]
            if state == DONE:
                r.gradients.update(self.part(rank))
                r.finished |= frozenset(self.part(rank))
            if state == CUT:
                r.gradients.update(self.part(rank)[:1])
                r.finished, r.broken = frozenset(), True

    def commit(self, knows: Collection[int]) -> None:
        """All ranks have the sums; some hear that all have them."""
        self.assert_complete()
        for r in self.ranks.values():
            r.summed = True
        for rank in knows:
            self.advance(rank)

    def advance(self, rank: int) -> None:
        assert self.ranks[rank].summed
        self.ranks[rank] = Rank(self.ranks[rank].committed + 1, totals=(2.0,))

    def lose(self, nodes: Collection[int]) -> None:
        self.ranks = {rank: r for rank, r in self.ranks.items() if self.base.node(rank) not in nodes}

    def settle(self, generation: int) -> tuple[Standing, Course]:
        """All ranks report, and each does what the course says."""
        reports = {rank: r.report() for rank, r in self.ranks.items()}
        now = standing(reports)
        nodes = sorted({self.base.node(rank) for rank in self.ranks})
        found = course(self.base, reports, nodes, generation=generation)
        for rank in [rank for rank, r in self.ranks.items() if r.committed < now.committed]:
            self.advance(rank)
        assert {r.committed for r in self.ranks.values()} == {now.committed}
        if found.plan is None:
            return now, found
        self.plan, self.run = found.plan, found.run
        for rank, r in self.ranks.items():
            if self.part(rank) == found.plan.pipelines[found.plan.coordinate(rank).pipeline].microbatches:
                r.gradients, r.finished = Counter(), frozenset()
            r.broken = r.summed = False
        return now, found

    def assert_complete(self) -> None:
        """The sum of the gradients of each parameter is that of the batch, each microbatch once."""
        for p in self.base.facts.parameters:
            per_pipeline: dict[int, list[Counter[int]]] = {}
            for rank in holders(self.plan, p):
                if rank in self.ranks:
                    per_pipeline.setdefault(self.plan.coordinate(rank).pipeline, []).append(self.ranks[rank].gradients)
            total: Counter[int] = Counter()
            for mine in per_pipeline.values():
                assert all(g == mine[0] for g in mine)
                total += mine[0]
            assert total == Counter(range(self.base.microbatches))


def rank_states(ranks: Sequence[int]) -> Iterator[dict[int, str]]:
    """Every combination of states."""
    for states in product((IDLE, DONE, CUT), repeat=len(ranks)):
        yield dict(zip(ranks, states, strict=True))


def pipeline_states(world: World, lost: Collection[int]) -> Iterator[dict[int, str]]:
    """For pipelines that are whole without the lost nodes: all ranks idle, all done, one cut short, one idle while the others are done; every
    combination. The ranks of broken ones are done, so that they have most to drop.
    """
    groups = [[r for island in p.islands for r in island if r in world.ranks] for p in world.plan.pipelines]
    whole = whole_pipelines(world.plan, lost)
    choices = [range(4 if len(ranks) > 1 else 3) if i in whole else (1,) for i, ranks in enumerate(groups)]
    for kinds in product(*choices):
        found: dict[int, str] = {}
        for kind, ranks in zip(kinds, groups, strict=True):
            states = dict.fromkeys(ranks, IDLE if kind == 0 else DONE)
            if kind >= 2:
                states[ranks[-1]] = CUT if kind == 2 else IDLE
            found |= states
        yield found


def finish(world: World) -> None:
    """Run what is left, and look at the sums."""
    world.work(dict.fromkeys(world.ranks, DONE))
    world.assert_complete()


# --- microbatches -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [FIVE, SIX], ids=str)
def test_after_any_loss_with_any_ranks_idle_done_or_cut_short_every_microbatch_counts_once(cluster, record_property):
    base, cases = cluster.plan, 0
    for lost in loss_sets(base.nodes, cluster.lose):
        survivors = [r for r in base.ranks if base.node(r) not in lost]
        for states in rank_states(survivors):
            world = World(base)
            world.work(states)
            world.lose(lost)
            _, found = world.settle(1)
            assert (found.plan is not None) == bool(whole_pipelines(base, lost))
            cases += 1
            if found.plan is not None:
                finish(world)
    record_property("cases", cases)
    assert cases == {5: 5 * 3**4, 6: 6 * 3**5 + 15 * 3**4}[cluster.nodes]


@pytest.mark.parametrize("cluster", [FIVE, Cluster(6, 2, 1), Cluster(4, 1, 2), Cluster(5, 2, 1, islands=2, layers=8)], ids=str)
def test_after_a_second_loss_in_the_same_step_every_microbatch_counts_once(cluster, record_property):
    base, cases = cluster.plan, 0
    for lost in loss_sets(base.nodes, 1):
        for states in pipeline_states(World(base), lost):
            once = World(base)
            once.work(states)
            once.lose(lost)
            once.settle(1)
            for second in loss_sets([n for n in base.nodes if n not in lost], 1):
                for later in pipeline_states(once, (*lost, *second)):
                    world = once.copy()
                    world.work(later)
                    world.lose(second)
                    _, found = world.settle(2)
                    assert (found.plan is not None) == bool(whole_pipelines(base, (*lost, *second)))
                    cases += 1
                    if found.plan is not None:
                        finish(world)
    record_property("cases", cases)
    assert cases > 100


def test_what_is_finished_is_not_run_again_and_what_broke_is():
    base = FIVE.plan
    two, three = base.pipelines
    assert [len(p.islands) for p in base.pipelines] == [2, 3]
    lost = [base.node(two.islands[0][0])]
    found = course(
        base, reports_of(base, lost, {0: two.microbatches, 1: three.microbatches}), [n for n in base.nodes if n not in lost], generation=1
    )
    assert found.run == ((), two.microbatches)
    assert found.plan is not None
    assert found.plan.pipelines[1].microbatches == (*three.microbatches, *two.microbatches)


def test_microbatches_that_were_taken_over_and_finished_are_kept_at_the_next_loss():
    base = Cluster(6, 2, 2).plan
    world = World(base)
    world.lose([base.node(base.pipelines[0].islands[0][0])])
    _, first = world.settle(1)
    assert first.plan is not None
    taken = {i: p.microbatches for i, p in enumerate(first.plan.pipelines)}
    assert sum(map(len, taken.values())) == base.microbatches
    world.work(dict.fromkeys(world.ranks, DONE))
    world.lose([base.node(base.pipelines[1].islands[1][0])])
    _, second = world.settle(2)
    assert set(second.run[2]).isdisjoint(taken[2])
    assert len(second.run[2]) == base.microbatches - len(taken[2])
    finish(world)


def test_an_event_without_a_loss_changes_nothing_but_the_generation():
    base = FIVE.plan
    found = course(base, reports_of(base, [], {}), base.nodes, generation=5)
    assert found.plan == evolve(base, generation=5)
    assert found.run == tuple(p.microbatches for p in base.pipelines)


# --- commits ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [FIVE, SIX], ids=str)
def test_a_step_that_any_living_rank_knows_to_be_committed_is_committed_for_all(cluster):
    base = cluster.plan
    for lost in [(), *loss_sets(base.nodes, cluster.lose)]:
        for bits in range(2 ** len(base.ranks)):
            knows = [r for i, r in enumerate(base.ranks) if bits >> i & 1]
            world = World(base)
            world.work(dict.fromkeys(base.ranks, DONE))
            world.commit(knows)
            world.lose(lost)
            alive = [r for r in knows if r in world.ranks]
            now, found = world.settle(1)
            assert (now.committed, now.totals) == ((COMMITTED + 1, (2.0,)) if alive else (COMMITTED, (1.0,)))
            if found.plan is not None and alive:
                assert found.run == tuple(p.microbatches for p in found.plan.pipelines)
            if found.plan is not None:
                finish(world)


def test_ranks_that_lag_by_a_step_start_the_next_one_anew_with_the_numbers_of_the_others():
    base = SIX.plan
    for lost in loss_sets(base.nodes, 2):
        survivors = [r for r in base.ranks if base.node(r) not in lost]
        for bits in range(1, 2 ** len(survivors)):
            finished = {i: p.microbatches for i, p in enumerate(base.pipelines)}
            reports = {
                rank: evolve(r, committed=COMMITTED + 1, finished=(), totals=(2.0,)) if bits >> i & 1 else r
                for i, (rank, r) in enumerate(reports_of(base, lost, finished).items())
            }
            now = standing(reports)
            assert (now.committed, now.totals, now.holds) == (COMMITTED + 1, (2.0,), 0)
            found = course(base, reports, sorted({base.node(r) for r in survivors}), generation=1)
            if found.plan is not None:
                assert found.run == tuple(p.microbatches for p in found.plan.pipelines)


def test_what_a_pipeline_has_finished_of_the_next_step_is_kept_while_others_lag():
    base = FIVE.plan
    reports = reports_of(base, [], {1: base.pipelines[1].microbatches})
    ahead = {r for island in base.pipelines[1].islands for r in island}
    reports = {rank: evolve(r, committed=COMMITTED + 1) if rank in ahead else r for rank, r in reports.items()}
    found = course(base, reports, base.nodes, generation=1)
    assert found.run == (base.pipelines[0].microbatches, ())


def test_no_rank_can_be_two_steps_behind():
    reports = {0: Report(5, 0, plan="a"), 1: Report(3, 0, plan="a")}
    with pytest.raises(PlanError, match="rank 1 has committed 3 steps, others 5: no rank can be two steps behind"):
        standing(reports)


# --- plans that were voted on -------------------------------------------------------------------------------------------------------------------------


def test_a_plan_that_any_living_rank_knows_to_be_voted_for_holds_for_all():
    for bits in range(2**5):
        reports = {rank: Report(4, 9, plan="new") if bits >> rank & 1 else Report(4, 7, staged=9, plan="old") for rank in range(5)}
        now = standing(reports)
        assert (now.holds, now.committed, now.lacking) == (9 if bits else 7, 4, frozenset())


def test_a_step_under_the_new_plan_is_committed_for_all_that_hold_it():
    reports = {0: Report(5, 9, totals=(2.0,), plan="new"), 1: Report(4, 9, totals=(1.0,), plan="new")}
    assert standing(reports).committed == 5


def test_after_a_restore_the_steps_of_the_checkpoint_count_not_those_that_were_lost():
    reports = {0: Report(6, 9, plan="new"), 1: Report(8, 7, staged=9, totals=(8.0,), plan="old")}
    assert (standing(reports).committed, standing(reports).holds) == (6, 9)


@pytest.mark.parametrize("staged", [-1, 8, 10])
def test_a_rank_without_the_state_that_others_hold_contradicts_them(staged):
    reports = {0: Report(4, 9, plan="new"), 3: Report(4, 7, staged=staged, plan="old")}
    with pytest.raises(PlanError, match="rank 3 holds plan 7, others 9, which it never received in full"):
        standing(reports)


def test_different_plans_of_one_generation_are_told():
    with pytest.raises(PlanError, match="ranks 0 and 1 hold different plans of generation 2"):
        standing({0: Report(0, 2, plan="a"), 1: Report(0, 2, plan="b")})


def test_before_anything_is_held_all_ranks_lack_it():
    now = standing({0: Report(0, -1), 1: Report(0, -1)})
    assert (now.holds, now.committed, now.lacking) == (-1, 0, {0, 1})


def test_a_rank_that_joins_has_a_part_in_a_plan_only_after_it_received_its_state():
    """It is of the new plan in every case: others adopted it, and so it has received all it needs; or nobody did, and it has nothing that counts."""
    new = retemplate(FIVE.plan, range(6), {}, generation=9)
    for staged in (-1, 9):
        reports = {rank: Report(4, 9, plan="new") for rank in range(5)} | {5: Report(4, -1, staged=staged)}
        now = standing(reports)
        assert now.lacking == (frozenset() if staged == 9 else {5})
        found = course(new, reports, range(6), generation=10)
        assert (found.plan is None) == (staged == -1)


def test_a_rank_of_the_plan_that_has_nothing_of_its_state_gets_it_before_anything_else():
    base = FIVE.plan
    reports = reports_of(base, [], {}) | {2: Report(0, -1)}
    assert standing(reports).lacking == {2}
    assert course(base, reports, base.nodes, generation=1) == Course(None)


def test_what_the_optimizer_keeps_is_put_together_from_all_that_hold_the_plan():
    base = FIVE.plan
    a, b, *_ = (p.name for p in base.facts.parameters)
    reports = {
        0: Report(1, 0, kinds=("exp_avg", "step"), bare=(a,), plan="x"),
        1: Report(1, 0, kinds=("step",), plan="x"),
        2: Report(1, -1, staged=3, kinds=("other",), bare=(b,)),
    }
    now = standing(reports)
    assert (now.kinds, now.bare) == (("exp_avg", "step"), {a})
    kinds = now.kinds_in(base)
    assert (kinds[a], kinds[b]) == (("weight",), ("weight", "exp_avg", "step"))


# --- which answer -------------------------------------------------------------------------------------------------------------------------------------


def test_a_node_that_joined_gets_its_part_from_a_transition():
    base = FIVE.plan
    assert course(base, {**reports_of(base, [], {}), 5: Report(0, -1)}, range(6), generation=1) == Course(None)


def test_new_pipelines_that_somebody_asks_for_are_made_if_all_nodes_can_be_used():
    base = FIVE.plan
    for lost in [(), *loss_sets(base.nodes, 1)]:
        for asks in range(5):
            reports = {rank: evolve(r, asks=rank == asks) for rank, r in reports_of(base, lost, {}).items()}
            found = course(base, reports, [n for n in base.nodes if n not in lost], generation=1)
            assert (found.plan is None) == (asks in reports)


def test_new_pipelines_that_can_no_longer_be_made_do_not_end_a_run_that_can_go_on():
    base = Cluster(6, 2, 1, count=1).plan  # pipelines of two nodes: five of them cannot all be used
    reports = {rank: evolve(r, asks=True) for rank, r in reports_of(base, [0], {}).items()}
    found = course(base, reports, range(1, 6), generation=1)
    assert found.plan is not None
    assert found.plan.nodes == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("recover", "moves"),
    [
        (("reroute", "retemplate", "restore"), False),
        (("reroute", "restore"), False),
        (("reroute",), False),
        (("retemplate", "reroute"), True),
        (("retemplate",), True),
        (("restore",), True),
    ],
)
def test_the_first_answer_that_the_spec_names_is_taken(recover, moves):
    base = evolve(FIVE, recover=recover).plan
    found = course(base, reports_of(base, [0], {}), range(1, 5), generation=1)
    assert (found.plan is None) == moves
    undisturbed = course(base, reports_of(base, [], {}), base.nodes, generation=1)
    assert undisturbed.plan == evolve(base, generation=1)


def test_the_second_answer_is_taken_where_the_first_cannot_be():
    base = evolve(Cluster(6, 2, 1, count=1), recover=("retemplate", "reroute")).plan
    assert course(base, reports_of(base, [0], {}), range(1, 6), generation=1).plan is not None
    broken = [base.node(p.islands[0][0]) for p in FIVE.plan.pipelines]
    five = FIVE.plan
    assert course(five, reports_of(five, broken, {}), [n for n in range(5) if n not in broken], generation=1) == Course(None)


def test_a_spec_that_allows_nothing_but_to_reroute_says_so_when_no_pipeline_is_whole():
    base = evolve(FIVE, recover=("reroute",)).plan
    broken = sorted(base.node(p.islands[0][0]) for p in base.pipelines)
    with pytest.raises(PlanError, match=rf"without nodes {broken[0]}, {broken[1]} no pipeline is whole.*retemplate or restore would do"):
        course(base, reports_of(base, broken, {}), [n for n in range(5) if n not in broken], generation=1)


def test_reports_are_the_same_after_they_went_over_the_wire():
    report = Report(3, 2, 4, (1, 2), (0.5, 1.5), ("exp_avg",), ("a",), "hash", asks=True, broken=True)
    assert Report.from_data(report.to_data() | {"generation": 7}) == report
