"""How agents agree: standing still, proposal, promise, decision. The second part of the state machine; `membership` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, define, field, frozen

from pdsl.runtime.happenings import Host, Note, Send, TellRanks
from pdsl.runtime.view import LEFT, View
from pdsl.runtime.votes import ballot, named, voters
from pdsl.runtime.wire import Message

__all__ = ["Agreement", "Standing"]

_NO_MAJORITY = "it is no majority of what was promised before"


@frozen
class Standing:
    """What a node last said of its ranks: all stand still (`reports`), or all are done. `stand` is the generation of its last decision."""

    stand: int
    done: bool = False
    reports: Message = field(factory=dict)
    connected: frozenset[int] = frozenset()


@define
class Agreement(View):
    """A view that can propose, promise and decide."""

    _standing: dict[int, Standing] = Factory(dict)
    _announced: tuple[Any, ...] = ()
    _changing: bool = False
    _proposal: Message | None = None  # mine, open
    _acks: set[int] = Factory(set)
    _held: bool = False  # refused for a reason that only time mends; no proposal before the next tick
    _promised: tuple[int, int] = (-1, -1)  # generation and leader of the last promise
    _seen: int = -1  # highest generation that anybody proposed
    _promise: Message | None = None  # the proposal that was promised, until its outcome is known
    _committed: Message | None = None

    def _lose(self, nodes: Mapping[int, str], *, proven: bool, own: bool, now: float) -> None:
        super()._lose(nodes, proven=proven, own=own, now=now)
        for node in self._standing.keys() & self.out.keys():
            del self._standing[node]
        if self._proposal is not None and self.out.keys() & voters(self._proposal):
            self._proposal = None

    def _reopen(self) -> None:
        if not self._done:
            return
        self._do(TellRanks({"kind": "reopen"}, tuple(sorted(self._done))))
        self._done.clear()
        self._announced = ()

    def _change(self) -> None:
        if self._changing or self.joining:
            return
        self._changing = True
        self._do(TellRanks({"kind": "change"}))

    def _settle(self, now: float) -> None:
        """Say where this node stands if that is news; lead, if it leads."""
        self._announce()
        if self.leader is None:
            self._end(f"node {self.node}: no member is left to join", {"kind": "bye", "reason": "nobody is left"})
            return
        if self.leader == self.node and not self.joining:
            self._lead(now)

    def _my_standing(self) -> Standing | None:
        connected, stand = frozenset(self._connected), -1 if self.joining else self.generation
        if len(self._done) == len(self.ranks):
            return Standing(stand, done=True, connected=connected)
        if len(self._reported) == len(self.ranks):
            return Standing(stand, reports={str(r): self._reported[r] for r in sorted(self._reported)}, connected=connected)
        return None

    def _announce(self) -> None:
        mine = self._my_standing()
        if mine is None:
            self._standing.pop(self.node, None)
            self._announced = ()
            return
        self._standing[self.node] = mine
        news = (self.leader, mine.stand, mine.done, mine.connected if self.joining else frozenset())
        if news == self._announced or self.leader is None:
            return
        self._announced = news
        if self.leader == self.node:
            return
        decided = self._committed if self._committed is not None and self._committed["leader"] in self.out else None
        message = {"kind": "done" if mine.done else "ready", "stand": mine.stand, "connected": sorted(mine.connected), "decided": decided}
        self._do(Send(self.leader, message if mine.done else {**message, "reports": mine.reports}))

    def _lead(self, now: float) -> None:
        alive = self.alive
        stay = alive - self._leaving
        if not stay:
            self._end_node("all nodes that are left were asked to leave")
            return
        ready = {n: s for n, s in self._standing.items() if n in alive}
        if len(ready) == len(alive) and all(s.done for s in ready.values()):
            self._tell_all({"kind": "over"})
            self._over()
            return
        joiners = self._ready_joiners(stay)
        if (joiners or stay != alive) and not self._changing and self.generation >= 0:
            self._tell_all({"kind": "change"})
            self._change()
        if any(not s.done for s in ready.values()):
            self._wake_the_done(ready)
        if self._proposal is None and len(ready) == len(alive) and not any(s.done for s in ready.values()):
            self._propose(stay | joiners, stay)
        if self._proposal is not None and "host" in self._proposal and self._acks >= voters(self._proposal):
            self._commit(self._proposal, now)

    def _ready_joiners(self, stay: frozenset[int]) -> frozenset[int]:
        """Who can be a member now: its ranks stand still, and it is connected with all members and with the others that join with it."""
        found: frozenset[int] = frozenset()
        for node in sorted(self._joiners & self._standing.keys()):
            standing = self._standing[node]
            if not standing.done and stay | found <= standing.connected:
                found |= {node}
        return found

    def _wake_the_done(self, ready: Mapping[int, Standing]) -> None:
        """Some rank needs the others once more: those that were done report again."""
        for node in sorted(n for n, s in ready.items() if s.done):
            self._standing.pop(node, None)
            if node == self.node:
                self._reopen()
            else:
                self._do(Send(node, {"kind": "reopen"}))

    def _propose(self, nodes: frozenset[int], stay: frozenset[int]) -> None:
        if self._held or not self._may_go_on(self.alive):
            return
        known = {n: self._standing[n] for n in sorted(nodes | self.alive)}
        reports: Message = {}
        for standing in known.values():
            reports.update(standing.reports)
        newest = max([r["generation"] for r in reports.values()] + [self._promised[0], self._seen, self.generation])
        self._acks = set()
        self._proposal = {
            "kind": "propose",
            "generation": newest + 1,
            "leader": self.node,
            "nodes": sorted(nodes),
            "lost": sorted(self.members - nodes),
            "joined": sorted(nodes - self.members),
            "left": sorted(self.alive - nodes),
            "out": named({n: r for n, r in self.out.items() if n in self.members}),
            "proven": sorted(self.members & self._proven),
            "reports": reports,
            "stands": {str(n): s.stand for n, s in known.items()},
        }
        self._do(Host(newest + 1))

    def _hosted(self, generation: int, host: str, port: int, now: float) -> None:
        if self._proposal is None or self._proposal["generation"] != generation or "host" in self._proposal:
            return
        self._proposal = {**self._proposal, "host": host, "port": port}
        if self._objection(self._proposal) is not None:
            self._proposal = None
            return
        for node in sorted(voters(self._proposal) - {self.node}):
            self._do(Send(node, self._proposal))
        self._promise_to(self._proposal, now)
        self._acks.add(self.node)

    def _objection(self, proposal: Message) -> str | None:
        """Why this node does not promise, or None if it does."""
        if tuple(ballot(proposal)) < self._promised:
            return "another proposal came before"
        if proposal["generation"] <= self.generation:
            return "that generation is over"
        if self.out.keys() & voters(proposal):
            return "it has nodes that are lost"
        if not self.joining and not self._may_go_on(voters(proposal)):
            return _NO_MAJORITY
        mine = self._my_standing()
        if mine is None or mine.done or proposal["stands"].get(str(self.node)) != mine.stand:
            return "its ranks do not stand still any more"
        return None

    def _consider(self, node: int, proposal: Message, now: float) -> None:
        if self.node not in voters(proposal):
            return
        told = {int(n): reason for n, reason in proposal["out"].items()}
        self._lose({n: told[n] for n in proposal["proven"]}, proven=True, own=False, now=now)
        self._seen = max(self._seen, proposal["generation"])
        objection = self._objection(proposal)
        if objection is None:
            self._promise_to(proposal, now)
            self._do(Send(node, {"kind": "ack", "ballot": ballot(proposal)}))
            return
        mine = self._my_standing()
        out = {n: r for n, r in self.out.items() if n in voters(proposal)}
        refusal = {
            "kind": "nack",
            "ballot": ballot(proposal),
            "why": objection,
            "seen": max(self._seen, self._promised[0], self.generation),
            "proven": named({n: r for n, r in out.items() if n in self._proven}),
            "silent": named({n: r for n, r in out.items() if n not in self._proven}),
            "bases": [sorted(base) for base in self._open_bases],
            "stands": mine is not None and not mine.done,
        }
        self._do(Send(node, refusal))

    def _promise_to(self, proposal: Message, now: float) -> None:
        """From now on whoever is not in the proposal is out for this node, whatever becomes of it."""
        generation, leader = ballot(proposal)
        if (generation, leader) == self._promised:
            return
        self._promised = (generation, leader)
        self._promise = proposal
        nodes = frozenset(proposal["nodes"])
        if nodes not in self._open_bases:
            self._open_bases += (nodes,)
        told = {int(n): reason for n, reason in proposal["out"].items()}
        gone = {n: told.get(n, "it was left out") for n in self.members - nodes if n not in proposal["left"]}
        if any(n not in self.out for n in gone):
            self._doubt = True
        self._lose(gone, proven=False, own=False, now=now)

    def _refused(self, node: int, message: Message, now: float) -> None:
        if self._proposal is None or message["ballot"] != ballot(self._proposal):
            return
        self._proposal = None
        self._seen = max(self._seen, message["seen"])
        self._open_bases += tuple(b for b in map(frozenset, message["bases"]) if b not in self._open_bases)
        for found, proven in ((message["proven"], True), (message["silent"], False)):
            self._lose({int(n): r for n, r in found.items()}, proven=proven, own=True, now=now)
        if not message["stands"]:
            self._standing.pop(node, None)
        self._held = message["why"] == _NO_MAJORITY

    def _commit(self, proposal: Message, now: float) -> None:
        for node in sorted(voters(proposal) - {self.node}):
            self._do(Send(node, {"kind": "commit", "proposal": proposal}))
        self._take(proposal, now)

    def _hear_commit(self, proposal: Message, now: float) -> None:
        if self.node in proposal["left"] and proposal["generation"] > self.generation:
            self._depart()
            return
        if self._promise is None or ballot(proposal) != ballot(self._promise):
            return
        self._take(proposal, now)

    def _depart(self) -> None:
        """The others have agreed that this node leaves."""
        self._end(f"node {self.node} has left", {"kind": "bye", "reason": LEFT, "left": True}, status=0)

    def _take(self, proposal: Message, now: float) -> None:
        """A decision is made: these are the members now, and the ranks hear it."""
        self.generation = proposal["generation"]
        self.members = frozenset(proposal["nodes"])
        self.joining = False
        self._committed = proposal
        self._promise = None
        self._proposal = None
        self._open_bases = ()
        self._doubt = False
        late = sorted(self.out.keys() & self.members)
        self._fault_at = now if late else None
        self._changing = False
        self._announced = ()
        self._suspects.clear()
        self._standing.clear()
        self._reported.clear()
        self._acks.clear()
        self._joiners -= self.members
        self._leaving -= set(proposal["left"])
        self._farewell(proposal["left"])
        decision = {k: proposal[k] for k in ("generation", "nodes", "lost", "joined", "host", "port", "reports")}
        self._do(TellRanks({"kind": "decision", **decision}))
        if late:
            self._do(TellRanks({"kind": "lost", "nodes": late}))
        self._do(Note({"event": "decided", **{k: v for k, v in decision.items() if k != "reports"}, "leader": proposal["leader"]}))

    def _over(self) -> None:
        if self.ended:
            return
        self._do(TellRanks({"kind": "over"}), Note({"event": "over"}))
        self._end("the run is over", {"kind": "bye", "reason": "the run is over", "over": True}, status=0)
