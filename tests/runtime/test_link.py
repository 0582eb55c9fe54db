"""A rank's link to its agent, and the lines it speaks: without processes, over a socket pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pdsl.grammar.errors import RunError
from pdsl.runtime.link import Link
from pdsl.runtime.wire import Channel, Lines, Message, WireError, encode

# --- lines


def test_lines_come_whole_however_they_were_cut():
    data = encode({"a": 1}) + encode({"b": "line\nbreak"}) + encode({"c": [1.5, None]})
    for size in (1, 2, 7, 1000):
        lines = Lines()
        found = [message for i in range(0, len(data), size) for message in lines.feed(data[i : i + size])]
        assert found == [{"a": 1}, {"b": "line\nbreak"}, {"c": [1.5, None]}]


@pytest.mark.parametrize("data", [b"no json\n", b"[1]\n", b"\xff\xfe\n", b"\n", b"{" * 100 + b"\n"])
def test_what_is_no_object_is_refused(data: bytes):
    with pytest.raises(WireError):
        Lines().feed(data)


def test_lines_that_are_too_long_are_refused_before_they_end():
    lines = Lines(limit=10)
    assert lines.feed(b"x" * 10) == []
    with pytest.raises(WireError, match="longer than 10 bytes"):
        lines.feed(b"x")
    with pytest.raises(WireError, match="too long"):
        encode({"a": "x" * 100}, limit=50)


def test_a_channel_keeps_what_does_not_go_and_gives_all_that_came_before_the_end():
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    text = "x" * 1_000_000
    for number in range(5):
        sender.send({"number": number, "text": text})
    assert sender.pending
    found: list[Message] = []
    while len(found) < 5:
        sender.flush()
        found += receiver.receive()
    assert [m["number"] for m in found] == [0, 1, 2, 3, 4]
    sender.send({"last": True})
    sender.close()
    assert receiver.receive() == [{"last": True}]
    assert not receiver.open


def test_a_channel_to_one_that_talks_nonsense_is_closed():
    ours, theirs = socket.socketpair()
    receiver = Channel(theirs)
    ours.sendall(b'{"good": 1}\nnonsense\n')
    receiver.receive()
    assert not receiver.open
    ours.close()


# --- the link

DECISION = {"kind": "decision", "generation": 1, "nodes": [0, 2], "lost": [1], "joined": [], "host": "h", "port": 7}


class Agent:
    """The other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = Lines()
        self._heard: list[Message] = []

    def hear(self, kind: str) -> Message:
        """The next message of a kind; signs of life in between do not count."""
        while True:
            for i, message in enumerate(self._heard):
                if message["kind"] == kind:
                    del self._heard[: i + 1]
                    return message
            self._heard += self._lines.feed(self.socket.recv(4096))

    def say(self, message: Message) -> None:
        self.socket.sendall(encode(message))


@pytest.fixture
def ends() -> Iterator[tuple[Link, Agent]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10.0)
    link = Link(theirs, 3, beat=0.05)
    yield link, Agent(ours)
    link.close()
    ours.close()
    theirs.close()


def test_a_report_goes_out_and_the_decision_comes_back(ends: tuple[Link, Agent]):
    link, agent = ends
    link.report(0, committed=5)
    assert agent.hear("report") == {"kind": "report", "generation": 0, "facts": {"committed": 5}}
    agent.say({**DECISION, "reports": {"10": {"generation": 0}, "2": {"generation": 0, "committed": 5}}})
    decision = link.decision(10.0)
    assert (decision.generation, decision.nodes, decision.lost, decision.joined) == (1, (0, 2), (1,), ())
    assert (decision.host, decision.port) == ("h", 7)
    assert list(decision.reports) == [2, 10]
    assert decision.reports[2] == {"generation": 0, "committed": 5}


def test_losses_are_called_once_each_in_another_thread(ends: tuple[Link, Agent]):
    link, agent = ends
    calls: list[tuple[frozenset[int], str]] = []
    link.on_lost = lambda nodes: calls.append((nodes, threading.current_thread().name))
    agent.say({"kind": "lost", "nodes": [1]})
    agent.say({"kind": "lost", "nodes": [1]})
    agent.say({"kind": "lost", "nodes": [1, 4]})
    agent.say({**DECISION, "reports": {}})
    link.decision(10.0)
    assert [nodes for nodes, _ in calls] == [{1}, {4}]
    assert {thread for _, thread in calls} == {"pdsl-link"}


def test_lost_names_nodes_of_the_decision_that_was_taken(ends: tuple[Link, Agent]):
    link, agent = ends
    agent.say({"kind": "lost", "nodes": [1]})
    agent.say({**DECISION, "reports": {}})
    link.decision(10.0)
    assert link.lost == frozenset()
    agent.say({"kind": "lost", "nodes": [2]})
    agent.say({**DECISION, "generation": 2, "nodes": [0, 2], "reports": {}})
    link.decision(10.0)
    assert link.lost == {2}


def test_a_change_is_asked_until_the_next_decision(ends: tuple[Link, Agent]):
    link, agent = ends
    assert not link.change_asked
    seen = threading.Event()
    agent.say({"kind": "change"})
    link.on_lost = lambda nodes: seen.set()
    agent.say({"kind": "lost", "nodes": [9]})  # comes after the change
    assert seen.wait(10.0)
    assert link.change_asked
    agent.say({**DECISION, "reports": {}})
    link.decision(10.0)
    assert not link.change_asked


@pytest.mark.parametrize(("word", "over"), [("over", True), ("reopen", False)])
def test_done_waits_for_the_word_of_the_agent(ends: tuple[Link, Agent], word: str, over: bool):
    link, agent = ends
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(link.done(b"\x00\xff", 10.0)))
    thread.start()
    assert agent.hear("done")["result"] == "AP8="
    assert not found
    agent.say({"kind": word})
    thread.join(10.0)
    assert found == [over]
    assert link.over is over


def test_signs_of_life_come_by_themselves(ends: tuple[Link, Agent]):
    _, agent = ends
    assert [agent.hear("beat")["kind"] for _ in range(3)] == ["beat"] * 3


def test_an_agent_that_is_gone_is_an_error_and_not_a_wait(ends: tuple[Link, Agent]):
    link, agent = ends
    closed = threading.Event()
    link.on_closed = closed.set
    agent.socket.close()
    with pytest.raises(RunError, match="the agent of this node is gone"):
        link.decision(10.0)
    assert closed.wait(10.0)
    with pytest.raises(RunError, match="the agent of this node is gone"):
        link.done(None, 10.0)


def test_no_decision_in_time_is_an_error(ends: tuple[Link, Agent]):
    with pytest.raises(RunError, match=r"no decision within 0\.01 s"):
        ends[0].decision(0.01)
