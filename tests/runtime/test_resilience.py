"""Nodes that are really lost while they train: whatever is lost, and whenever, the losses and the samples are those of an undisturbed run.

The whole product of points and kinds of faults is a command, tests/benchmarks/kills.py; here is a spread of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdsl.grammar.errors import RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.chaos import Fault
from pdsl.runtime.checkpoint import latest
from pdsl.runtime.resilient import Cluster, Nursery
from tests.runtime.storms import DEADLINE, TOLERANCE, Storm, await_gone, deviation, plan_of, processes, run

RECOVERED = 15.0
"""Seconds from a loss to the next committed step. Below the silence of the plans: nothing that is found by fact may wait for it."""

pytestmark = pytest.mark.timeout(300)  # a test may have two runs


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Storm:
    """The reference of all runs of 8 steps: what is trained depends neither on the number of nodes nor on how they are used."""
    return run(plan_of(5), nursery, timeout=DEADLINE)


class Survivor:
    """Runs plans with faults and compares them."""

    def __init__(self, nursery: Nursery, undisturbed: Storm) -> None:
        self.nursery, self.undisturbed = nursery, undisturbed

    def __call__(self, plan: Plan, faults: Sequence[Fault], lost: Sequence[int], **more: Any) -> Storm:
        storm = run(plan, self.nursery, faults, timeout=DEADLINE, **more)
        assert deviation(self.undisturbed, storm) <= TOLERANCE
        assert storm.lost == list(lost)
        assert max(storm.recoveries, default=0.0) < RECOVERED
        return storm


@pytest.fixture(scope="module")
def survives(nursery: Nursery, undisturbed: Storm) -> Survivor:
    return Survivor(nursery, undisturbed)


# --- without faults


def test_other_nodes_and_ranks_train_the_same(survives: Survivor):
    storm = survives(plan_of(4, ranks=2), (), ())
    assert not storm.named("fault")
    assert sorted(e["node"] for e in storm.named("ended")) == [0, 1, 2, 3]


# --- one loss, in each state of a step


@pytest.mark.parametrize(
    ("rank", "point", "how"),
    [(1, "compute", "node"), (4, "backward", "rank"), (3, "sums", "exit"), (2, "commit", "node"), (4, "applied", "raise")],
)
def test_a_node_is_lost_in_any_state_of_a_step(survives: Survivor, rank: int, point: str, how: str):
    storm = survives(plan_of(5), [Fault(rank, point, 3, how)], [rank])
    reason = storm.named("lost")[0]["reason"]
    if how in ("exit", "raise"):
        assert {"exit": "ended before the run was over", "raise": f"a fault on purpose: rank {rank}"}[how] in reason
    assert storm.named("decided")[1]["lost"] == [rank]


@pytest.mark.parametrize(("rank", "point", "how"), [(3, "backward", "rank"), (0, "commit", "exit")])
def test_a_rank_takes_the_other_of_its_node_along(survives: Survivor, rank: int, point: str, how: str):
    storm = survives(plan_of(4, ranks=2), [Fault(rank, point, 3, how)], [rank // 2])
    assert storm.named("decided")[1]["nodes"] == [n for n in range(4) if n != rank // 2]


def test_the_ranks_of_a_node_are_lost_at_different_times(survives: Survivor):
    faults = [Fault(2, "backward", 3, "rank"), Fault(3, "sums", 3, "exit"), Fault(3, "agree", 3, "rank")]
    storm = survives(plan_of(4, ranks=2), faults, [1])
    assert storm.named("decided")[1]["nodes"] == [0, 2, 3]


def test_the_first_rank_which_leads_is_lost(survives: Survivor):
    storm = survives(plan_of(5), [Fault(0, "sums", 3, "node")], [0])
    assert [e["leader"] for e in storm.named("decided")][:2] == [0, 1]


# --- a second loss while the run recovers from one


@pytest.mark.parametrize(
    ("rank", "point", "how"), [(4, "agree", "node"), (0, "group", "exit"), (2, "move", "rank"), (5, "vote", "node"), (0, "enter", "rank")]
)
def test_another_node_is_lost_in_any_state_of_a_recovery(survives: Survivor, rank: int, point: str, how: str):
    plan = plan_of(6, lose=2, recover="retemplate, reroute, restore")
    storm = survives(plan, [Fault(1, "backward", 3, "node"), Fault(rank, point, 3, how)], sorted((1, rank)))
    if point != "agree":  # there the second loss may still come together with the first
        assert len(storm.named("decided")) >= 3


def test_two_nodes_are_lost_at_one_instant(survives: Survivor):
    storm = survives(plan_of(6, lose=2), [Fault(0, "commit", 3, "node"), Fault(3, "commit", 3, "node")], [0, 3])
    assert storm.named("decided")[-1]["nodes"] == [1, 2, 4, 5]


def test_nodes_are_lost_one_after_another_until_one_pipeline_is_left(survives: Survivor):
    faults = [Fault(0, "compute", 1, "node"), Fault(5, "sums", 3, "rank"), Fault(2, "applied", 5, "node")]
    plan = plan_of(6, lose=2, recover="retemplate, restore")  # every loss is followed by new pipelines that hold all layers again
    storm = survives(plan, faults, [0, 2, 5])
    assert storm.named("moved")[-1]["pipelines"] == [3]


# --- the ends of a run


def test_a_node_is_lost_before_the_first_step(survives: Survivor):
    storm = survives(plan_of(5), [Fault(1, "group", 0, "node")], [1])
    assert storm.named("decided")[-1]["nodes"] == [0, 2, 3, 4]


def test_a_node_is_lost_in_the_first_step(survives: Survivor):
    storm = survives(plan_of(5), [Fault(3, "backward", 0, "node")], [3])
    assert storm.named("decided")[-1]["nodes"] == [0, 1, 2, 4]


@pytest.mark.parametrize(("point", "step"), [("commit", 7), ("applied", 8)])
def test_a_node_is_lost_in_the_last_step_or_after_it(survives: Survivor, point: str, step: int):
    storm = survives(plan_of(5), [Fault(1, point, step, "node")], [1])
    assert storm.named("over")


# --- nodes that stand still, and wake up


STEADY: dict[str, Any] = {"steps": 24, "optimizer": "sgd(lr = 1e-2)"}
"""Over so many steps Adam would make differences that count out of rounding."""


@pytest.fixture(scope="module")
def steady(nursery: Nursery) -> Storm:
    return run(plan_of(4, **STEADY), nursery, timeout=DEADLINE)


@pytest.mark.parametrize(("rank", "point", "step", "ranks"), [(3, "backward", 3, 2), (0, "applied", 4, 1)])
def test_a_node_that_wakes_up_among_the_others_ends_itself(
    nursery: Nursery, steady: Storm, rank: int, point: str, step: int, ranks: int, tmp_path: Path
):
    saves = f'path = "{tmp_path}"; every = 4; keep = 9'
    plan = plan_of(4, ranks=ranks, silence="2s", checkpoint=saves, **STEADY)
    node = rank // ranks
    zombies: list[int] = []
    woken: list[float] = []

    def disturb(cluster: Cluster, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            zombies.extend(processes(cluster, node))
        if event["event"] == "lost":
            assert event["node"] == node
            cluster.resume(node)
            woken.append(time.monotonic())

    storm = run(plan, nursery, [Fault(rank, point, step, "stop")], timeout=DEADLINE, disturb=disturb, watch=lambda _: await_gone(zombies))
    assert len(zombies) == 1 + ranks
    assert "nothing was heard of it for 2 s" in storm.named("lost")[0]["reason"]
    assert any(e["event"] == "step" and e["time"] > woken[0] for e in storm.events)
    assert deviation(steady, storm) <= TOLERANCE
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert (found.step, found.damages()) == (24, ())


# --- errors that are everybody's


def test_an_exception_on_every_node_at_once_ends_the_run_with_it(nursery: Nursery):
    with pytest.raises(RankError, match=r"ValueError: a fault on purpose: rank . at compute of step 3") as found:
        run(plan_of(5), nursery, [Fault(r, "compute", 3, "raise") for r in range(5)], timeout=DEADLINE)
    assert "in _strike" in found.value.traceback


def test_data_that_nobody_can_read_ends_the_run_after_one_pipeline(nursery: Nursery):
    data = 'data = source("tests.runtime.storm_models:cursed_rows", context = 8)'
    lost: list[int] = []

    def disturb(cluster: Cluster, event: dict[str, Any]) -> None:
        lost.extend([event["node"]] if event["event"] == "lost" else [])

    with pytest.raises(RankError, match="ValueError: row 7 is damaged"):
        run(plan_of(5, data=data), nursery, timeout=DEADLINE, disturb=disturb)
    assert len(lost) <= 3  # the nodes of the pipeline that met it first


# --- only some answers are allowed


def test_without_new_pipelines_those_that_are_whole_go_on(survives: Survivor):
    storm = survives(plan_of(5, recover="reroute"), [Fault(1, "backward", 3, "node")], [1])
    assert storm.named("rerouted")
    assert not storm.named("moved")


def test_without_rerouting_layers_move_at_once(survives: Survivor):
    storm = survives(plan_of(5, recover="retemplate"), [Fault(1, "backward", 3, "node")], [1])
    assert {e["step"] for e in storm.named("moved")} == {3}
    assert not storm.named("rerouted")


def test_without_new_pipelines_nothing_goes_on_when_none_is_whole(nursery: Nursery):
    faults = [Fault(0, "compute", 3, "node"), Fault(3, "compute", 4, "node")]
    with pytest.raises(
        RunError, match=r"no pipeline is whole, and recover = \[reroute\] allows no new ones; retemplate or restore would do"
    ):
        run(plan_of(4, recover="reroute"), nursery, faults, timeout=DEADLINE)
