"""Agents that nobody launches: they meet at an address, as on machines of their own, and others join later."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import evolve

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.rendezvous import Place, addresses_of, meet
from tests.plans import rectangular
from tests.tree import ROOT

DEADLINE = 60.0


def plan_of(nodes: int, seed: int = 0, silence: float = 5.0) -> Plan:
    found = rectangular(replicas=nodes, positions=1, shard=1, batch=4 * nodes)
    return evolve(found, silence=silence, job=evolve(found.job, seed=seed))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(calls: list[Callable[[], Place]]) -> list[Place | RunError]:
    """What each call gives, made at the same time."""
    found: list[Place | RunError] = [RunError("nothing") for _ in calls]

    def make(index: int) -> None:
        try:
            found[index] = calls[index]()
        except RunError as error:
            found[index] = error

    threads = [threading.Thread(target=make, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    for place in found:
        if isinstance(place, Place):
            place.listener.close()
    return found


def quiet(text: str) -> None:
    return None


# --- addresses


def test_addresses_are_read():
    assert addresses_of("a:1, 10.0.0.2:29500,[::1]:7") == (("a", 1), ("10.0.0.2", 29500), ("::1", 7))


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:70000", "a:1,,b:2", "a:x"])
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        addresses_of(text)


# --- the meeting


def test_all_nodes_get_the_same_book_and_a_number_each(port: int):
    plan, at = plan_of(3), (("127.0.0.1", port),)
    places = together([lambda: meet(plan, at, patience=20.0, say=quiet)] * 3)
    assert all(isinstance(p, Place) for p in places)
    assert sorted(p.node for p in places) == [0, 1, 2]
    assert len({p.secret for p in places}) == 1
    assert all(p.roster == places[0].roster for p in places)
    assert (places[0].roster.members, places[0].roster.joining, places[0].roster.generation) == ((0, 1, 2), False, -1)
    assert len(set(places[0].roster.book.values())) == 3


def test_numbers_that_are_wanted_are_given(port: int):
    plan, at = plan_of(3), (("127.0.0.1", port),)
    wanted = [2, None, 0]
    places = together([lambda node=node: meet(plan, at, node=node, patience=20.0, say=quiet) for node in wanted])
    assert [p.node for p in places] == [2, 1, 0]


def test_another_plan_is_refused_before_anything_starts(port: int):
    at = (("127.0.0.1", port),)
    places = together([lambda seed=seed: meet(plan_of(2, seed), at, patience=3.0, say=quiet) for seed in (0, 1)])
    assert any("file, options and model must be the same everywhere" in str(p) for p in places)
    assert any("only 1 of 2 nodes have come" in str(p) for p in places)


def test_a_number_that_is_taken_or_not_in_the_plan_is_refused(port: int):
    plan, at = plan_of(2), (("127.0.0.1", port),)
    places = together([lambda: meet(plan, at, node=1, patience=3.0, say=quiet)] * 2)
    assert any("node 1 has come already" in str(p) for p in places)
    with pytest.raises(RunError, match="the plan has no node 7, it has 0, 1"):
        meet(plan, at, node=7, patience=3.0, say=quiet)


# --- whole nodes

NODE = """
import sys
from pdsl.runtime.node import NodeJob, become_node
from pdsl.runtime.rendezvous import addresses_of
from tests.runtime.test_rendezvous import plan_of

become_node(NodeJob(
    plan=plan_of(3, silence=float(sys.argv[4])).to_json(), arguments={"steps": int(sys.argv[2]), "pace": 0.02}, addresses=addresses_of(sys.argv[1]), node=None, host=None,
    threads=1, metrics=sys.argv[3], log_directory=None, patience=60.0, task="tests.runtime.steps_task:keep_step",
))
"""


class Machine:
    """A `pdsl agent`, as a process."""

    def __init__(self, folder: Path, at: str, steps: int, name: str, silence: float = 5.0, inside: tuple[str, ...] = ()) -> None:
        self.metrics = folder / f"{name}.jsonl"
        self.errors = folder / f"{name}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-c", NODE, at, str(steps), str(self.metrics), str(silence)],
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,
            )

    def wait_for(self, text: str) -> None:
        limit = time.monotonic() + DEADLINE
        while not (self.metrics.exists() and text in self.metrics.read_text()) and text not in self.errors.read_text():
            assert time.monotonic() < limit, f"no {text!r} in {self.errors.read_text()}"
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def end(self) -> int:
        return self.process.wait(DEADLINE)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait(DEADLINE)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def begin(at: str, steps: int) -> Machine:
        machines.append(Machine(tmp_path, at, steps, f"m{len(machines)}"))
        return machines[-1]

    yield begin
    for found in machines:
        found.kill()


def test_nodes_meet_lose_the_first_take_another_in_and_let_one_leave(machine: Callable[..., Machine], port: int):
    at = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    first = machine(at, 1500)
    first.wait_for("the meeting is at")
    others = [machine(at, 1500) for _ in range(2)]
    first.wait_for('"step": 5,')
    os.killpg(first.process.pid, signal.SIGKILL)
    others[0].wait_for("node 0 is lost: its agent is gone")
    joiner = machine(at, 1500)
    joiner.wait_for("this is node 3, which joins")
    joiner.wait_for('"step": ')
    others[1].process.terminate()
    assert others[1].end() == 0
    assert "has left" in others[1].errors.read_text()
    joiner.process.terminate()
    assert joiner.end() == 0
    others[0].process.terminate()
    assert others[0].end() == 1
    assert "all nodes that are left were asked to leave" in others[0].errors.read_text()


# --- a network that is cut


COUNT = itertools.count()  # names are free again only some time after their namespace is deleted


class Network:
    """Namespaces of this machine, each with an address of its own, on one bridge."""

    def __init__(self, count: int) -> None:
        self.name = f"pd{os.getpid() % 10000}n{next(COUNT)}"
        self.spaces = [f"{self.name}-{i}" for i in range(count)]

    def open(self) -> None:
        run("ip", "link", "add", self.name, "type", "bridge")
        run("ip", "link", "set", self.name, "up")
        for i, space in enumerate(self.spaces):
            run("ip", "netns", "add", space)
            run("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", space, "master", self.name, "up")
            run("ip", "-n", space, "address", "add", f"10.213.77.{i + 1}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def cut(self, index: int) -> None:
        run("ip", "link", "set", self.spaces[index], "down")

    def heal(self, index: int) -> None:
        run("ip", "link", "set", self.spaces[index], "up")

    def close(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    found = Network(3)
    try:
        found.open()
    except (OSError, subprocess.CalledProcessError):
        found.close()
        pytest.skip("network namespaces need rights that this machine does not give")
    yield found
    found.close()


@pytest.mark.parametrize("away", [0, 2])
def test_a_node_that_is_cut_off_ends_itself_and_the_others_go_on(network: Network, tmp_path: Path, away: int):
    at = "10.213.77.1:29577"
    machines = []
    try:
        for i, space in enumerate(network.spaces):
            machines.append(Machine(tmp_path, at, 1500, f"m{i}", 2.0, ("ip", "netns", "exec", space)))
            machines[0].wait_for("the meeting is at")
        for machine in machines:
            machine.wait_for('"step": 5,')
        number = machines[away].errors.read_text().split("this is node ")[1][0]
        network.cut(away)
        assert machines[away].end() == 1
        assert "no majority" in machines[away].errors.read_text()
        network.heal(away)
        others = [machine for machine in machines if machine is not machines[away]]
        for machine in others:
            machine.wait_for(f"node {number} is lost: nothing was heard of it for 2 s")
        taken = max(len(machine.metrics.read_text().splitlines()) for machine in others)
        for machine in others:
            machine.wait_for(f'"step": {taken + 20},')
    finally:
        for machine in machines:
            machine.kill()
