"""Runs that lose more than the budget allows, that nodes join and leave, of models with more state than weights; a dead launcher, a cut network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdsl.grammar.errors import RankError
from pdsl.runtime.chaos import Fault
from pdsl.runtime.checkpoint import latest
from pdsl.runtime.resilient import Cluster, Nursery
from tests.runtime.storms import DEADLINE, GPT, TOLERANCE, Storm, await_gone, deviation, lives, plan_of, run
from tests.runtime.test_rendezvous import Network, network
from tests.tree import ROOT

__all__ = ["network"]  # a fixture

STEADY = "sgd(lr = 1e-2)"
"""With it differences of rounding do not grow over many steps."""

BEYOND = (Fault(0, "compute", 5, "node"), Fault(2, "compute", 5, "node"))
"""Of four nodes in two pipelines those that hold the first layers."""

Disturb = Callable[[Cluster, dict[str, Any]], None]

pytestmark = pytest.mark.timeout(300)  # a test may have two runs


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Callable[..., Storm]:
    """The reference for a job, run once; for all numbers of nodes."""
    found: dict[str, Storm] = {}

    def reference(**job: Any) -> Storm:
        key = json.dumps(job, sort_keys=True)
        if key not in found:
            found[key] = run(plan_of(4, **job), nursery, timeout=DEADLINE)
        return found[key]

    return reference


def saves(folder: Path, every: int) -> str:
    return f'path = "{folder}"; every = {every}; keep = 9'


# --- beyond the budget


def test_when_the_last_copy_is_lost_the_run_goes_back_to_a_checkpoint(nursery: Nursery, undisturbed: Callable[..., Storm], tmp_path: Path):
    storm = run(plan_of(4, checkpoint=saves(tmp_path, 2)), nursery, BEYOND, timeout=DEADLINE)
    assert storm.lost == [0, 2]
    assert {e["step"] for e in storm.named("restored")} <= {2, 4, 5}
    assert storm.named("restored")
    assert deviation(undisturbed(), storm) <= TOLERANCE


@pytest.mark.parametrize(
    ("recover", "checkpoint", "why"),
    [
        ("reroute, retemplate, restore", "", "there is no checkpoint to go back to: the spec has no checkpoint block"),
        ("reroute, retemplate, restore", "every = 900", "there is no checkpoint to go back to"),
        ("reroute, retemplate", "", "recover = [reroute, retemplate] does not allow to go back to a checkpoint"),
    ],
)
def test_without_a_way_back_the_run_says_what_is_lost_and_why(nursery: Nursery, recover: str, checkpoint: str, why: str, tmp_path: Path):
    plan = plan_of(4, recover=recover, checkpoint=saves(tmp_path, 900) if checkpoint else "")
    with pytest.raises(RankError, match=rf"no copy is left of weight/[\w.]+ .* held by ranks 0, 2; {re.escape(why)}$"):
        run(plan, nursery, BEYOND, timeout=DEADLINE)


@pytest.mark.parametrize(("every", "point", "step"), [(900, "backward", 3), (3, "applied", 3)])
def test_the_last_copy_of_a_layer_is_saved_at_once(nursery: Nursery, every: int, point: str, step: int, tmp_path: Path):
    """Also where the save of that very step was under way with the node that is lost: then the next step is saved."""
    storm = run(plan_of(4, steps=20, checkpoint=saves(tmp_path, every)), nursery, [Fault(0, point, step, "node")], timeout=DEADLINE)
    assert {e["copies"] for e in storm.named("rerouted")} == {1}
    assert min(e["saved"] for e in storm.named("saved")) in (3, 4)


def test_the_last_copy_is_saved_at_once_after_a_move_too(nursery: Nursery, tmp_path: Path):
    """Three nodes are one pipeline: every layer of it is on one node."""
    plan = plan_of(4, steps=20, recover="retemplate, restore", checkpoint=saves(tmp_path, 900))
    storm = run(plan, nursery, [Fault(0, "backward", 3, "node")], timeout=DEADLINE)
    assert {e["copies"] for e in storm.named("moved")} == {1}
    assert [e["saved"] for e in storm.named("saved")] == [3]


def test_a_node_is_lost_while_it_saves(nursery: Nursery, undisturbed: Callable[..., Storm], tmp_path: Path):
    """What the lost node has not written is no checkpoint; the one before it is still there, and the ones after it are whole."""
    plan = plan_of(5, checkpoint=saves(tmp_path, 1))
    storm = run(plan, nursery, [Fault(1, "applied", 4, "node")], timeout=DEADLINE)
    assert deviation(undisturbed(), storm) <= TOLERANCE
    whole = [f.name for f in tmp_path.iterdir() if (f / "metadata.json").exists()]
    assert "step-00000008" in whole
    for name in whole:
        found = latest(tmp_path, before=int(name[5:]) + 1, verify=True)
        assert found is not None
        assert (found.folder.name, found.damages()) == (name, ())


def test_a_run_begins_where_a_checkpoint_of_other_nodes_ends(nursery: Nursery, undisturbed: Callable[..., Storm], tmp_path: Path):
    first = run(plan_of(5, steps=4, checkpoint=saves(tmp_path, 2)), nursery, timeout=DEADLINE)
    rest = run(plan_of(4, checkpoint=saves(tmp_path, 2)), nursery, [Fault(3, "sums", 6, "node")], resume=True, timeout=DEADLINE)
    assert (sorted(first.losses), sorted(rest.losses)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    calm = undisturbed()
    for part in (first, rest):
        assert all(abs(part.losses[s] / calm.losses[s] - 1) <= TOLERANCE and part.digests[s] == calm.digests[s] for s in part.losses)


# --- nodes that come and leave


def joins(count: int, come: Path) -> Disturb:
    """So many nodes come once a step was taken (before that there is nothing to move to them); the file `come` tells when all are in."""
    joined: list[int] = []
    asked: list[int] = []

    def disturb(cluster: Cluster, event: dict[str, Any]) -> None:
        if event["event"] == "step" and not asked:
            asked.extend(cluster.join() for _ in range(count))
        if event["event"] == "decided":
            joined.extend(event["joined"])
            if len(joined) == count:
                come.touch()

    return disturb


LONG: dict[str, Any] = {"steps": 60, "optimizer": STEADY}


def patient(come: Path) -> dict[str, Any]:
    """The same job, reading slowly until a file is there."""
    return {**LONG, "data": f'data = source("tests.runtime.storm_models:patient_rows", context = 8, until = "{come}")'}


def test_two_nodes_join_while_the_run_goes_on(nursery: Nursery, undisturbed: Callable[..., Storm], tmp_path: Path):
    come = tmp_path / "come"
    storm = run(plan_of(4, **patient(come)), nursery, disturb=joins(2, come), timeout=DEADLINE)
    assert sorted(n for e in storm.named("decided") for n in e["joined"]) == [4, 5]
    assert sum(storm.named("moved")[-1]["pipelines"]) == 6
    assert storm.lost == []
    assert deviation(undisturbed(**LONG), storm) <= TOLERANCE


@pytest.mark.parametrize("rank", [1, 4])
def test_a_node_joins_and_a_node_is_lost_at_once(nursery: Nursery, undisturbed: Callable[..., Storm], rank: int, tmp_path: Path):
    """One that had state, or the one that is to get it."""
    come = tmp_path / "come"
    storm = run(plan_of(4, **patient(come)), nursery, [Fault(rank, "move", 0, "node")], disturb=joins(1, come), timeout=DEADLINE)
    assert storm.lost == [rank]
    assert [n for e in storm.named("decided") for n in e["joined"]] == [4]
    assert deviation(undisturbed(**LONG), storm) <= TOLERANCE


@pytest.mark.parametrize(("node", "ranks"), [(0, 1), (2, 2)])
def test_a_node_that_is_asked_to_leaves_at_the_end_of_a_step(nursery: Nursery, undisturbed: Callable[..., Storm], node: int, ranks: int):
    asked: list[int] = []

    def disturb(cluster: Cluster, event: dict[str, Any]) -> None:
        if event["event"] == "step" and not asked:
            asked.append(event["step"])
            cluster.drain(node)

    short = {**LONG, "steps": 20}
    storm = run(plan_of(4, ranks=ranks, **short), nursery, disturb=disturb, timeout=DEADLINE)
    ends = {e["node"]: (e["reason"], e["status"]) for e in storm.named("ended")}
    assert ends[node] == (f"node {node} has left", 0)
    assert storm.lost == []
    assert not storm.named("fault")
    assert deviation(undisturbed(**short), storm) <= TOLERANCE


# --- models and optimizers with more to carry

SHAPE = "layers = 4; width = 16; heads = 2; context = 8"
JOBS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd(lr = 1e-1, momentum = 0.9)"},
    "frozen": {"model": f'"tests.runtime.storm_models:frozen_blocks" {{ {SHAPE} }}'},
    "tied": {"model": GPT.format("tie = true")},
    "dropout": {"model": GPT.format("dropout = 0.2")},
    "normed": {
        "model": '"tests.runtime.storm_models:normed" {}',
        "data": 'data = source("tests.runtime.storm_models:normed_rows"); objective = mse',
        "optimizer": STEADY,
    },
}


@pytest.mark.parametrize("kind", JOBS)
def test_layers_that_move_take_all_of_their_state_along(nursery: Nursery, undisturbed: Callable[..., Storm], kind: str):
    """Momentum, parts that are not trained, a weight of two stages, masks drawn by step, microbatch and layer, running means."""
    plan = plan_of(4, recover="retemplate", **JOBS[kind])
    storm = run(plan, nursery, [Fault(2, "backward", 3, "rank")], timeout=DEADLINE)
    assert storm.lost == [2]
    assert {tuple(e["pipelines"]) for e in storm.named("moved")} == {(3,)}
    assert deviation(undisturbed(**JOBS[kind]), storm) <= TOLERANCE


# --- a launcher that dies, a network that is cut

COPIES = """pdsl 1
cluster {{ nodes = 3; ranks_per_node = 1; device = cpu }}
mesh {{ axis dp = rest }}
model "pdsl.models:gpt" {{ {shape} }}
shard {{ "**" => replicate() }}
fault_budget {{ lose = 1; silence = 8s }}
train {{ data = source("pdsl.data:python_source", context = 8); batch = 12; steps = {steps}; optimizer = sgd(lr = 1e-2); seed = 3 }}
"""


def copies(folder: Path, steps: int) -> Path:
    """A file with three copies of a model, one on each node."""
    path = folder / f"copies{steps}.pdsl"
    path.write_text(COPIES.format(shape=SHAPE, steps=steps))
    return path


def told(path: Path) -> list[dict[str, Any]]:
    """What a file of metrics says so far."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for_step(path: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + DEADLINE
    while not any(row.get("step", -1) >= step and "loss" in row for row in told(path)):
        assert time.monotonic() < limit, f"step {step} did not come: {told(path)[-1:]}"
        assert process.poll() is None, f"it ended with status {process.returncode} before step {step}"
        time.sleep(0.02)


def started(*command: str | Path, inside: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "pdsl", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )


def test_when_the_launcher_is_killed_everything_ends(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    launcher = started("run", copies(tmp_path, 100000), "--metrics", metrics)
    try:
        wait_for_step(metrics, 5, launcher)
        nodes = next(row["nodes"] for row in told(metrics) if row.get("event") == "started")
        launcher.kill()
        launcher.wait(DEADLINE)
        pids = [pid for node in nodes.values() for pid in (node["agent"], *node["ranks"].values())]
        await_gone(pids)
        assert not any(map(lives, pids))
    finally:
        launcher.kill()
        launcher.wait(DEADLINE)


@pytest.mark.parametrize("away", [0])
def test_a_node_behind_a_cut_network_ends_itself_and_the_majority_trains_on(network: Network, tmp_path: Path, away: int):
    spec = copies(tmp_path, 60)
    agents: list[subprocess.Popen[bytes]] = []
    metrics = [tmp_path / f"metrics{i}.jsonl" for i in range(3)]
    try:
        for i, space in enumerate(network.spaces):
            options = ("--rendezvous", "10.213.77.1:29577", "--node", str(i), "--metrics", metrics[i])
            agents.append(started("agent", spec, *options, inside=("ip", "netns", "exec", space), GLOO_SOCKET_IFNAME="eth0"))
        wait_for_step(metrics[away], 5, agents[away])
        moment = time.monotonic()
        network.cut(away)
        assert agents[away].wait(DEADLINE) == 1
        others = [i for i in range(3) if i != away]
        reached = max(row["step"] for row in told(metrics[away]) if "loss" in row)
        for i in others:
            wait_for_step(metrics[i], reached + 5, agents[i])
        assert time.monotonic() - moment < 30.0  # silence, an agreement, a few steps
        network.heal(away)
        assert [agents[i].wait(DEADLINE) for i in others] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(DEADLINE)
    lost = [row for row in told(metrics[others[0]]) if row.get("event") == "lost"]
    assert [(row["node"], row["reason"]) for row in lost] == [(away, "nothing was heard of it for 8 s")]
    found = [{row["step"]: row["loss"] for row in told(metrics[i]) if "loss" in row} for i in others]
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(60))
