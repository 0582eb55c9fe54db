"""Agents, ranks and launcher as real processes: every way in which a node can go, and what is left behind. Deadlines are the tests' own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from pdsl.grammar.errors import RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.resilient import Cluster, Nursery, launch_resilient
from tests.plans import rectangular
from tests.tree import ROOT

TASK = "tests.runtime.steps_task:keep_step"
SILENCE = 5.0
SHORT = 1.0  # for tests that wait for it
DEADLINE = 30.0


def plan_of(nodes: int, ranks_per_node: int = 1, silence: float = SILENCE) -> Plan:
    whole = rectangular(replicas=nodes, positions=1, shard=ranks_per_node, batch=4 * nodes * ranks_per_node)
    return evolve(whole, silence=silence)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(TASK)
    found.await_ready(60.0)
    yield found
    found.close()


Start = Callable[..., Cluster]


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Start]:
    clusters = []

    def begin(nodes: int = 3, ranks_per_node: int = 1, steps: int = 40, **arguments: Any) -> Cluster:
        silence = arguments.pop("silence", SILENCE)
        cluster = Cluster(plan_of(nodes, ranks_per_node, silence), TASK, {"steps": steps, **arguments}, nursery=nursery)
        clusters.append(cluster)
        cluster.start()
        return cluster

    yield begin
    pids = [pid for cluster in clusters for node in cluster.pids().values() for pid in (node["agent"], *node["ranks"].values())]
    for cluster in clusters:
        cluster.close()
    assert_gone(pids)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int], deadline: float = 5.0) -> None:
    limit = time.monotonic() + deadline
    while any(map(runs, pids)):
        assert time.monotonic() < limit, f"processes {[p for p in pids if runs(p)]} were left behind"
        time.sleep(0.01)


def at_step(cluster: Cluster, step: int) -> float:
    cluster.wait_for(lambda events: [e for e in events if e["event"] == "step" and e["step"] >= step], DEADLINE)
    return time.monotonic()


def decided(cluster: Cluster, generation: int) -> dict[str, Any]:
    found = cluster.wait_for(lambda events: [e for e in events if e["event"] == "decided" and e["generation"] >= generation], DEADLINE)
    return found[0]


def all_steps_once(cluster: Cluster, steps: int) -> None:
    """Every step was taken, by every node that told of it at most once, and never backwards."""
    told = [(e["node"], e["step"]) for e in cluster.events if e["event"] == "step"]
    assert {step for _, step in told} == set(range(1, steps + 1))
    assert len(told) == len(set(told))


def lost(cluster: Cluster) -> dict[int, str]:
    return {e["node"]: e["reason"] for e in cluster.events if e["event"] == "lost"}


# --- an undisturbed run


def test_results_of_all_ranks_come_back_in_order(start: Start):
    cluster = start(3, 2, steps=10)
    assert cluster.wait(DEADLINE) == dict.fromkeys(range(6), b"10")
    assert [e["event"] for e in cluster.events if e["event"] in {"started", "decided", "over"}] == ["started", "decided", "over"]
    assert not lost(cluster)
    all_steps_once(cluster, 10)


def test_decision_names_nodes_and_where_the_store_is(start: Start):
    cluster = start(2, steps=3)
    found = decided(cluster, 0)
    assert (found["generation"], found["nodes"], found["lost"], found["joined"]) == (0, [0, 1], [], [])
    assert found["host"] == "127.0.0.1"
    cluster.wait(DEADLINE)


# --- losses


@pytest.mark.parametrize("node", [0, 2])
def test_a_killed_node_is_found_in_milliseconds_and_the_others_go_on(start: Start, node: int):
    cluster = start(4, 2)
    moment = at_step(cluster, 5)
    cluster.kill(node)
    found = decided(cluster, 1)
    assert found["nodes"] == [n for n in range(4) if n != node]
    assert found["lost"] == [node]
    results = cluster.wait(DEADLINE)
    assert sorted(results) == [rank for rank in range(8) if rank // 2 != node]
    noticed = [e["at"] - moment for e in cluster.events if e["event"] == "on_lost"]
    assert len(noticed) == 6
    assert max(noticed) < SILENCE / 2, "found by silence and not by fact"
    all_steps_once(cluster, 40)


def test_an_agent_that_dies_takes_its_ranks_along(start: Start):
    cluster = start(3, 2)
    at_step(cluster, 5)
    node = cluster.pids()[1]
    os.kill(node["agent"], signal.SIGKILL)
    assert decided(cluster, 1)["nodes"] == [0, 2]
    assert_gone(list(node["ranks"].values()))
    cluster.wait(DEADLINE)
    all_steps_once(cluster, 40)


def test_a_rank_that_dies_takes_its_node_along(start: Start):
    cluster = start(3, 2)
    at_step(cluster, 5)
    node = cluster.pids()[1]
    os.kill(node["ranks"][3], signal.SIGKILL)
    assert decided(cluster, 1)["nodes"] == [0, 2]
    assert_gone([node["agent"], *node["ranks"].values()])
    cluster.wait(DEADLINE)
    assert lost(cluster) == {1: "rank 3: its process was ended by SIGKILL"}


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_stands_still_is_lost_and_stays_lost_when_it_wakes(start: Start, node: int):
    cluster = start(3, 2, steps=60, silence=SHORT)
    at_step(cluster, 5)
    pids = cluster.pids()[node]
    cluster.stop(node)
    moment = time.monotonic()
    found = decided(cluster, 1)
    assert SHORT * 0.8 < found["time"] - moment < SHORT * 4
    assert found["nodes"] == [n for n in range(3) if n != node]
    cluster.resume(node)
    assert_gone([pids["agent"], *pids["ranks"].values()])
    results = cluster.wait(DEADLINE)
    assert sorted(results) == [rank for rank in range(6) if rank // 2 != node]
    heard = [e for e in cluster.events if e.get("node") == node and e["event"] in {"step", "took"} and e["time"] > found["time"]]
    assert not heard
    all_steps_once(cluster, 60)


def test_a_rank_that_stands_still_takes_its_node_along(start: Start):
    cluster = start(3, 2, fault={"rank": 2, "step": 5, "how": "stop"}, silence=SHORT)
    assert decided(cluster, 1)["nodes"] == [0, 2]
    cluster.wait(DEADLINE)
    assert lost(cluster) == {1: "rank 2 of node 1 gave no sign of life for 1 s"}


def test_a_rank_that_exits_cleanly_too_early_is_lost(start: Start):
    cluster = start(3, fault={"rank": 1, "step": 5, "how": "exit"})
    assert decided(cluster, 1)["nodes"] == [0, 2]
    cluster.wait(DEADLINE)
    assert lost(cluster) == {1: "rank 1: its process ended before the run was over"}


def test_an_exception_that_is_not_fatal_costs_the_node(start: Start):
    cluster = start(3, fault={"rank": 1, "step": 5, "how": "raise mildly"})
    assert decided(cluster, 1)["nodes"] == [0, 2]
    cluster.wait(DEADLINE)
    assert lost(cluster) == {1: "rank 1: ConnectionError: the cable is loose"}


def test_a_fatal_exception_ends_the_run_with_its_traceback(start: Start):
    cluster = start(3, fault={"rank": 1, "step": 5, "how": "raise"})
    with pytest.raises(RankError, match="the step is unlucky") as found:
        cluster.wait(DEADLINE)
    assert found.value.rank == 1
    assert "in misbehave" in found.value.traceback


def test_two_nodes_are_lost_at_one_instant(start: Start):
    cluster = start(5)
    at_step(cluster, 5)
    cluster.kill(0)
    cluster.kill(3)
    results = cluster.wait(DEADLINE)
    assert sorted(results) == [1, 2, 4]
    all_steps_once(cluster, 40)


def test_nodes_are_lost_one_after_another_until_one_is_left(start: Start):
    cluster = start(4, steps=80)
    for count, node in enumerate((2, 0, 3), 1):
        at_step(cluster, 10 * count)
        cluster.kill(node)
    assert cluster.wait(DEADLINE) == {1: b"80"}
    all_steps_once(cluster, 80)


def test_a_leader_is_lost_while_it_decides_about_another_loss(start: Start):
    cluster = start(5)
    at_step(cluster, 5)
    cluster.kill(4)
    cluster.wait_for(lambda events: any(e["event"] == "on_lost" for e in events), DEADLINE)
    cluster.kill(0)
    assert sorted(cluster.wait(DEADLINE)) == [1, 2, 3]
    all_steps_once(cluster, 40)


def test_a_minority_that_hears_nobody_ends_itself(start: Start):
    cluster = start(3, silence=SHORT)
    at_step(cluster, 5)
    cluster.stop(0)
    cluster.stop(1)
    with pytest.raises(RunError, match="no majority"):
        cluster.wait_for(lambda events: any(e["event"] == "ended" and e["node"] == 2 and raise_for(e) for e in events), DEADLINE)


def raise_for(event: dict[str, Any]) -> bool:
    raise RunError(event["reason"])


def test_all_nodes_lost_is_an_error_that_says_why(start: Start):
    cluster = start(2)
    at_step(cluster, 5)
    cluster.kill(0)
    cluster.kill(1)
    with pytest.raises(RunError, match="no node is left"):
        cluster.wait(DEADLINE)


# --- those who come and leave


def test_a_node_joins_at_a_step_boundary(start: Start):
    cluster = start(2, 2, steps=60)
    at_step(cluster, 5)
    node = cluster.join()
    found = decided(cluster, 1)
    assert (node, found["nodes"], found["joined"], found["lost"]) == (2, [0, 1, 2], [2], [])
    assert sorted(cluster.wait(DEADLINE)) == list(range(6))
    all_steps_once(cluster, 60)


def test_a_node_replaces_one_that_was_lost(start: Start):
    cluster = start(3, steps=80)
    at_step(cluster, 5)
    cluster.kill(0)
    decided(cluster, 1)
    assert cluster.join() == 3
    assert decided(cluster, 2)["nodes"] == [1, 2, 3]
    cluster.kill(1)
    assert sorted(cluster.wait(DEADLINE)) == [2, 3]
    all_steps_once(cluster, 80)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_asked_to_leave_does_so_at_a_step_boundary(start: Start, node: int):
    cluster = start(3)
    at_step(cluster, 5)
    cluster.drain(node)
    found = decided(cluster, 1)
    assert (found["nodes"], found["lost"]) == ([n for n in range(3) if n != node], [node])
    cluster.wait(DEADLINE)
    ends = {e["node"]: (e["reason"], e["status"]) for e in cluster.events if e["event"] == "ended"}
    assert ends[node] == (f"node {node} has left", 0)
    assert not lost(cluster)
    all_steps_once(cluster, 40)


# --- the launcher


def test_the_launcher_alone_starts_and_ends_everything(capfd: pytest.CaptureFixture[str]):
    events: list[dict[str, Any]] = []
    results = launch_resilient(plan_of(2), TASK, {"steps": 5}, on_event=events.append)
    assert results == {0: b"5", 1: b"5"}
    pids = next(e["nodes"] for e in events if e["event"] == "started")
    assert_gone([pid for node in pids.values() for pid in (node["agent"], *node["ranks"].values())])
    assert [e["step"] for e in events if e["event"] == "step" and e["node"] == 0] == [1, 2, 3, 4, 5]
    assert capfd.readouterr().err == ""


def test_a_task_that_does_not_exist_is_told():
    with pytest.raises(RunError, match="cannot be imported"):
        launch_resilient(plan_of(2), "tests.runtime.steps_task:nothing", {})


LAUNCHER = """
import sys, json
from tests.runtime.test_agents import plan_of, TASK
from pdsl.runtime.resilient import Cluster

if __name__ == "__main__":
    with Cluster(plan_of(2, 2), TASK, {"steps": 100000}) as cluster:
        cluster.wait_for(lambda events: any(e["event"] == "step" for e in events), 60.0)
        print(json.dumps(cluster.pids()), flush=True)
        cluster.wait()
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_that_ends_leaves_nothing_behind(sign: signal.Signals):
    import json

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert launcher.stdout is not None
        pids = json.loads(launcher.stdout.readline())
        launcher.send_signal(sign)
        launcher.wait(DEADLINE)
        assert_gone([pid for node in pids.values() for pid in (node["agent"], *node["ranks"].values())], 10.0)
    finally:
        launcher.kill()
        launcher.communicate()
