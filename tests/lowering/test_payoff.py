"""Whether new pipelines pay: what they gain and cost, against plans and transitions found by themselves."""

from __future__ import annotations

import pytest

from pdsl.lowering.holdings import demand, plan_holdings, state_tensors
from pdsl.lowering.payoff import BYTES_PER_SECOND, REGROUPING, Gain, gain
from pdsl.lowering.plan import Plan
from pdsl.lowering.replan import copies, layers_held, reroute, retemplate, step_time
from pdsl.lowering.transition import transition
from tests.plans import rectangular
from tests.replans import Cluster, loss_sets

ADAM = ("weight", "exp_avg", "exp_avg_sq")


def rerouted(cluster: Cluster, lost: tuple[int, ...]) -> Plan:
    found = reroute(cluster.plan, lost, generation=1)
    assert found is not None
    return found


def losses(cluster: Cluster) -> list[Plan]:
    """The re-routed plan after every loss that leaves a whole pipeline."""
    plan = cluster.plan
    return [found for lost in loss_sets(plan.nodes, cluster.lose) if (found := reroute(plan, lost, generation=1)) is not None]


@pytest.mark.parametrize(
    "cluster", [Cluster(5, 2, 1), Cluster(6, 2, 2), Cluster(7, 2, 1, shard=2), Cluster(6, 2, 1, layers=10, islands=2)], ids=str
)
def test_the_gain_is_that_of_the_plan_that_would_be_made_and_its_cost_that_of_the_transition(cluster):
    for plan in losses(cluster):
        found = gain(plan)
        assert found is not None
        after = retemplate(plan, plan.nodes, layers_held(plan), generation=2)
        assert found.share == pytest.approx(1 - float(step_time(after) / step_time(plan)))
        assert found.renews == (min(copies(after)) > min(copies(plan)))
        moves = transition(plan_holdings(plan, 0, ADAM), demand(after, ADAM), state_tensors(plan, ADAM), node_of=plan.node)
        incoming: dict[int, int] = {}
        for message in (m for messages in moves.rounds for m in messages):
            node = plan.node(message.target)
            incoming[node] = incoming.get(node, 0) + message.bytes
        assert found.cost == pytest.approx(REGROUPING + max(incoming.values(), default=0) / BYTES_PER_SECOND)


def test_new_pipelines_after_a_loss_renew_the_budget_where_nodes_allow():
    assert all(g is not None and g.renews for g in map(gain, losses(Cluster(5, 2, 1))))
    # of four nodes three are left, on which two pipelines of two cannot stand: they only gain speed
    assert all(g is not None and not g.renews and g.share > 0 for g in map(gain, losses(Cluster(4, 2, 1))))


def test_a_pipeline_that_is_gone_as_a_whole_is_no_reason_to_leave_the_budget_unkept():
    cluster = Cluster(4, 1, 1, count=3, microbatches=2)  # two pipelines, of 1 and 3 nodes or of 2 and 2
    plan = cluster.plan
    smallest = min(plan.pipelines, key=lambda p: len(p.islands))
    left = rerouted(cluster, tuple(plan.node(r) for island in smallest.islands for r in island))
    assert all(p.whole for p in left.pipelines)
    assert min(copies(left)) == 1
    found = gain(left)
    assert found is not None
    assert found.renews
    assert found.pays(1.0, 1)


def test_there_is_nothing_to_gain_while_nothing_is_lost():
    for cluster in (Cluster(5, 2, 1), Cluster(6, 2, 2), Cluster(9, 3, 2)):
        assert gain(cluster.plan) is None


def test_new_pipelines_that_are_not_wanted_or_cannot_be_made_gain_nothing():
    assert gain(rectangular()) is None
    assert gain(rerouted(Cluster(5, 2, 1, recover=("reroute", "restore")), (0,))) is None
    assert gain(rerouted(Cluster(6, 2, 1, count=1), (0,))) is None  # pipelines of two nodes: five cannot all be used


def test_the_budget_is_renewed_at_any_price_while_there_are_steps_to_go():
    assert Gain(share=-0.5, cost=1e6, renews=True).pays(1e-3, 1)
    assert not Gain(share=0.5, cost=0.0, renews=True).pays(1.0, 0)


def test_speed_pays_once_the_steps_that_are_left_save_more_than_the_move_costs():
    found = Gain(share=0.25, cost=2.0, renews=False)
    assert not found.pays(0.5, 16)  # 16 steps save 2 seconds: no more than it costs
    assert found.pays(0.5, 17)
    assert found.pays(5.0, 2)
    assert not found.pays(0.0, 10_000)


def test_slower_pipelines_never_pay_by_speed():
    assert not Gain(share=-0.1, cost=0.5, renews=False).pays(10.0, 1000)
    assert not Gain(share=0.0, cost=0.0, renews=False).pays(10.0, 1000)
