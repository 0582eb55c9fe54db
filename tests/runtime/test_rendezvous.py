"""Agents that nobody launches: they meet at an address, as on machines of their own, and others join later."""

from __future__ import annotations

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


def plan_of(nodes: int, seed: int = 0) -> Plan:
    found = rectangular(replicas=nodes, positions=1, shard=1, batch=4 * nodes)
    return evolve(found, silence=5.0, job=evolve(found.job, seed=seed))


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
    plan=plan_of(3).to_json(), arguments={"steps": int(sys.argv[2]), "pace": 0.02}, addresses=addresses_of(sys.argv[1]), node=None, host=None,
    threads=1, metrics=sys.argv[3], log_directory=None, patience=60.0, task="tests.runtime.steps_task:keep_step",
))
"""


class Machine:
    """A `pdsl agent`, as a process."""

    def __init__(self, folder: Path, at: str, steps: int, name: str) -> None:
        self.metrics = folder / f"{name}.jsonl"
        self.errors = folder / f"{name}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", NODE, at, str(steps), str(self.metrics)],
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


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def begin(at: str, steps: int) -> Machine:
        machines.append(Machine(tmp_path, at, steps, f"m{len(machines)}"))
        return machines[-1]

    yield begin
    for found in machines:
        try:
            os.killpg(found.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            found.process.wait(DEADLINE)


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
