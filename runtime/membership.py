"""Who belongs to the run: the state machine in every agent, without sockets, processes or a clock of its own.

`handle(event, now)` takes what happened and gives back what to do. The rules that make it safe:

- A node is *out* for good, in this view, once it is proven dead (its connection is closed and a new one is refused, or it said so itself) or
  declared lost for its silence. Nothing it says is heard any more.
- Silence needs a majority: nodes may be declared lost without proof only by a set of nodes that is more than half of the agreed members, or
  half with the lowest member. Members whose death was proven before there was any doubt (a silence, a pause of this process) do not count;
  those who die in doubt do, since they may have agreed to something before. Who finds himself outside of the majority ends himself.
- The living node with the lowest number leads. It proposes once every living node stands still; a node promises, and from then on everybody
  who is not in the proposal is out for it. The decision is made when all its nodes have promised. A node that promised and does not know the
  outcome needs a majority of the proposed nodes as well as of its members, so no two sets of nodes can both go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define

from pdsl.runtime.agreement import Agreement, Standing
from pdsl.runtime.happenings import (
    Action,
    Closed,
    Connected,
    Event,
    Heard,
    Hosted,
    Leave,
    RankBeat,
    RankDone,
    RankEnded,
    RankReported,
    Send,
    Tick,
)
from pdsl.runtime.view import LEFT
from pdsl.runtime.votes import ballot, voters
from pdsl.runtime.wire import Message

__all__ = ["Membership"]


@define
class Membership(Agreement):
    """The state of one agent.

    A machine that is `joining` is no member yet: it takes part in no vote and leads nobody.
    """

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event at the time `now` (any monotonic clock) and give the actions, in order. Nothing happens after an `End`."""
        if self.ended:
            return ()
        self._actions = []
        match event:
            case Tick():
                self._held = False
                self._tick(now)
            case Connected(node, joining):
                self._meet(node, joining, now)
            case Closed(node, reason):
                self._joiners.discard(node)
                self._connected.discard(node)
                self._lose({node: reason}, proven=True, own=True, now=now)
            case Heard(node, message):
                self._hear(node, message, now)
            case Hosted(generation, host, port):
                self._hosted(generation, host, port, now)
            case RankReported(rank, generation, facts):
                self._report(rank, generation, facts)
            case RankDone(rank):
                self._done.add(rank)
                self._reported.pop(rank, None)
            case RankBeat(rank):
                self._rank_heard[rank] = now
            case RankEnded(rank, reason, fatal):
                self._rank_ended(rank, reason, fatal=fatal)
            case Leave():
                self._leave()
        if not self.ended:
            self._settle(now)
        done, self._actions = self._actions, []
        return tuple(done)

    def _meet(self, node: int, joining: bool, now: float) -> None:
        if node in self.out:
            return
        self._connected.add(node)
        self._heard[node] = now
        if joining and node not in self.members:
            self._joiners.add(node)
        self._announced = ()
        if self._proposal is not None and "host" in self._proposal and node in voters(self._proposal):
            self._do(Send(node, self._proposal))
        if self._changing:
            self._do(Send(node, {"kind": "change"}))

    def _leave(self) -> None:
        if self.joining:
            self._end(f"node {self.node} was asked to leave before it had joined", {"kind": "bye", "reason": LEFT}, status=0)
            return
        if self.node in self._leaving:
            return
        self._leaving.add(self.node)
        self._announced = ()
        self._tell_all({"kind": "leave"})

    # --- messages

    def _hear(self, node: int, message: Message, now: float) -> None:
        if message.get("kind") == "out" and message["reason"] == LEFT and self.node in self._leaving:
            self._depart()  # this node knows of the decision before its leader has told
            return
        if message.get("kind") == "out" and node in self.members:
            self._end(f"node {self.node} was declared lost by node {node}: {message['reason']}", {"kind": "bye", "reason": "declared lost"})
            return
        if node in self.out or node not in self.members | self._joiners:
            return
        self._heard[node] = now
        match message.get("kind"):
            case "beat":
                self._hear_beat(node, message)
            case "lost":
                self._hear_lost(message, now)
            case "ready" | "done":
                self._hear_standing(node, message, now)
            case "propose":
                self._consider(node, message, now)
            case "ack" if self._proposal is not None and message["ballot"] == ballot(self._proposal):
                self._acks.add(node)
            case "nack":
                self._refused(node, message, now)
            case "commit":
                self._hear_commit(message["proposal"], now)
            case "bye" if message.get("left"):
                self._farewell([node])  # what was agreed with it is known, or comes
            case "bye" if not message.get("over"):
                self._lose({node: message["reason"]}, proven=True, own=True, now=now)
            case kind:
                self._hear_word(node, str(kind), message)

    def _hear_word(self, node: int, kind: str, message: Message) -> None:
        match kind:
            case "change":
                self._change()
            case "reopen":
                self._reopen()
            case "leave":
                self._leaving.add(node)
            case "over" | "bye":
                self._over()
            case "fatal":
                self._end(f"rank {message['rank']} failed: {message['reason']}", {"kind": "bye", "reason": "the run has failed"})

    def _hear_standing(self, node: int, message: Message, now: float) -> None:
        if message["decided"] is not None:
            self._hear_commit(message["decided"], now)  # whoever made that decision is gone and could not tell everybody
        done, reports = message["kind"] == "done", message.get("reports", {})
        self._standing[node] = Standing(message["stand"], done, reports, frozenset(message["connected"]))

    def _hear_beat(self, node: int, message: Message) -> None:
        self._suspects[node] = frozenset(message["suspects"])
        if message["leaving"]:
            self._leaving.add(node)
        if message["joining"]:
            return
        if self.joining and message["generation"] > self.generation:
            self.generation = message["generation"]
            self.members = frozenset(message["members"])
        late = self._committed is not None and node in self._committed["nodes"] and message["generation"] < self.generation
        if late and self._committed is not None and (self._committed["leader"] == self.node or self._committed["leader"] in self.out):
            self._do(Send(node, {"kind": "commit", "proposal": self._committed}))

    def _hear_lost(self, message: Message, now: float) -> None:
        nodes = {int(n): reason for n, reason in message["nodes"].items()}
        if self.node in nodes:
            self._end(f"node {self.node} was declared lost: {nodes[self.node]}", {"kind": "bye", "reason": "declared lost"})
            return
        if not message["proven"]:
            self._doubt = True
        self._lose(nodes, proven=message["proven"], own=False, now=now)

    # --- ranks of this node

    def _report(self, rank: int, generation: int, facts: Mapping[str, Any]) -> None:
        self._reported[rank] = {**facts, "generation": generation}
        self._done.discard(rank)
        self._announced = ()
        if self._done:
            self._reopen()

    def _rank_ended(self, rank: int, reason: str, *, fatal: bool) -> None:
        if fatal:
            self._tell_all({"kind": "fatal", "rank": rank, "reason": reason})
            self._end(f"rank {rank} failed: {reason}", {"kind": "bye", "reason": f"rank {rank}: {reason}"})
            return
        self._end_node(f"rank {rank}: {reason}")
