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

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Factory, define, field, frozen

from pdsl.runtime.wire import Message

__all__ = [
    "BEATS",
    "Action",
    "Closed",
    "Connected",
    "End",
    "Event",
    "Heard",
    "Host",
    "Hosted",
    "Leave",
    "Membership",
    "Note",
    "RankBeat",
    "RankDone",
    "RankEnded",
    "RankReported",
    "Send",
    "TellRanks",
    "Tick",
    "majority",
    "side_that_stays",
]

BEATS = 10
"""Signs of life within one `silence`."""

_SETTLE = 2
"""Beats for which a suspicion must stand, so that those of the others have come."""


# --- what happens ---------------------------------------------------------------------------------------------------------------------------


@frozen
class Connected:
    """There is a connection to a node. `joining`: it is no member and wants to become one."""

    node: int
    joining: bool = False


@frozen
class Closed:
    """The connection to a node is closed and another one was refused: its agent, and with it the node, is dead."""

    node: int
    reason: str = "its agent is gone"


@frozen
class Heard:
    """A message of another agent."""

    node: int
    message: Message


@frozen
class Hosted:
    """A store listens for the proposal of that generation."""

    generation: int
    host: str
    port: int


@frozen
class RankReported:
    """A rank of this node stands still in a generation."""

    rank: int
    generation: int
    facts: Mapping[str, Any]


@frozen
class RankDone:
    """A rank of this node has finished well."""

    rank: int


@frozen
class RankBeat:
    """A rank of this node lives."""

    rank: int


@frozen
class RankEnded:
    """A rank of this node is gone, or has failed. `fatal`: the whole run ends with what it said."""

    rank: int
    reason: str
    fatal: bool = False


@frozen
class Leave:
    """This node is asked to leave at the next boundary."""


@frozen
class Tick:
    """Time has passed. To come at least every `silence / BEATS`."""


Event = Connected | Closed | Heard | Hosted | RankReported | RankDone | RankBeat | RankEnded | Leave | Tick


# --- what to do -----------------------------------------------------------------------------------------------------------------------------


@frozen
class Send:
    """A message to another agent; kept until there is a connection."""

    node: int
    message: Message


@frozen
class TellRanks:
    """A message to ranks of this node, all of them if none is named."""

    message: Message
    ranks: tuple[int, ...] = ()


@frozen
class Host:
    """Open a store for a proposal and answer with `Hosted`."""

    generation: int


@frozen
class End:
    """End all ranks of this node and its agent. `said` is the last word to the others. Status 0: as it should be."""

    reason: str
    said: Message
    status: int = 1


@frozen
class Note:
    """An event for the launcher."""

    event: Message


Action = Send | TellRanks | Host | End | Note


# --- votes ----------------------------------------------------------------------------------------------------------------------------------


def majority(side: frozenset[int], base: frozenset[int]) -> bool:
    """Whether a set of nodes may speak for `base`: more than half of it, or half with its lowest number."""
    both = side & base
    if 2 * len(both) != len(base):
        return 2 * len(both) > len(base)
    return bool(base) and min(base) in both


def side_that_stays(nodes: frozenset[int], suspicions: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The nodes that are left when suspicions are settled: who has most of them goes first, of equals the highest number.

    The same on every node that knows the same suspicions.
    """
    left = set(nodes)
    edges = {frozenset(pair) for pair in suspicions if set(pair) <= left and pair[0] != pair[1]}
    while edges:
        worst = max(left, key=lambda n: (sum(n in edge for edge in edges), n))
        left.remove(worst)
        edges = {edge for edge in edges if worst not in edge}
    return frozenset(left)


# --- the machine ----------------------------------------------------------------------------------------------------------------------------


@frozen
class _Standing:
    """What a node last said of its ranks: all stand still (`reports`), or all are done. `stand` is the generation of its last decision."""

    stand: int
    done: bool = False
    reports: Message = field(factory=dict)
    connected: frozenset[int] = frozenset()


@define
class Membership:
    """The state of one agent. `members` are agreed, as of `generation` (-1 before the first decision). Seconds throughout.

    A machine that is `joining` is no member yet: it takes part in no vote and leads nobody.
    """

    node: int
    ranks: frozenset[int]
    members: frozenset[int]
    silence: float
    joining: bool = False
    generation: int = -1
    out: dict[int, str] = Factory(dict)
    ended: bool = False
    _proven: set[int] = Factory(set)
    _counted: set[int] = Factory(set)  # proven dead before there was any doubt
    _doubt: bool = False
    _leaving: set[int] = Factory(set)
    _connected: set[int] = Factory(set)
    _joiners: set[int] = Factory(set)
    _heard: dict[int, float] = Factory(dict)
    _suspects: dict[int, frozenset[int]] = Factory(dict)
    _suspicions: frozenset[tuple[int, int]] = frozenset()
    _suspicions_since: float = 0.0
    _standing: dict[int, _Standing] = Factory(dict)
    _reported: dict[int, Message] = Factory(dict)
    _done: set[int] = Factory(set)
    _rank_heard: dict[int, float] = Factory(dict)
    _announced: tuple[Any, ...] = ()
    _changing: bool = False
    _proposal: Message | None = None  # mine, open
    _acks: set[int] = Factory(set)
    _held: bool = False  # refused for a reason that only time mends; no proposal before the next tick
    _promised: tuple[int, int] = (-1, -1)  # generation and leader of the last promise
    _seen: int = -1  # highest generation that anybody proposed
    _promise: Message | None = None  # the proposal that was promised, until its outcome is known
    _open_bases: tuple[frozenset[int], ...] = ()
    _committed: Message | None = None
    _fault_at: float | None = None
    _stuck_since: float | None = None
    _ticked: float | None = None
    _beaten: float | None = None
    _actions: list[Action] = Factory(list)

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event at the time `now` (any monotonic clock) and give the actions, in order. Nothing happens after an `End`."""
        if self.ended:
            return ()
        self._actions = []
        match event:
            case Tick():
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

    # --- views

    @property
    def alive(self) -> frozenset[int]:
        """Members that are not out."""
        return self.members - self.out.keys()

    @property
    def leader(self) -> int | None:
        """The node that leads, as far as this one knows: the lowest living member that does not want to leave."""
        stay = self.alive - self._leaving
        return min(stay or self.alive, default=None)

    def knows_out(self, node: int) -> str | None:
        """Why a node may not speak here, or None if it may."""
        return self.out.get(node)

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _tell_all(self, message: Message) -> None:
        """To every living member and everybody who wants to become one."""
        for node in sorted((self.alive | self._joiners) - {self.node} - self.out.keys()):
            self._do(Send(node, message))

    def _end(self, reason: str, said: Message, status: int = 1) -> None:
        if self.ended:
            return
        self.ended = True
        self._do(End(reason, said, status))

    # --- time

    def _tick(self, now: float) -> None:
        beat = self.silence / BEATS
        if self._ticked is not None and now - self._ticked > self.silence / 2:
            self._paused(now - self._ticked)
        self._ticked = now
        self._held = False
        if self._beaten is None or now - self._beaten >= beat * 0.9:
            self._beaten = now
            self._tell_all(self._beat(now))
        self._watch_ranks(now)
        self._watch_peers(now)
        self._watch_majority(now)

    def _paused(self, gap: float) -> None:
        """This process did not run for a while: what it did not hear in that time says nothing about the others."""
        self._doubt = True
        for heard in (self._heard, self._rank_heard):
            for key in heard:
                heard[key] += gap
        self._suspicions_since += gap
        if self._fault_at is not None:
            self._fault_at += gap

    def _beat(self, now: float) -> Message:
        return {
            "kind": "beat",
            "generation": self.generation,
            "members": sorted(self.members),
            "suspects": sorted(self._silent(now)),
            "leaving": self.node in self._leaving,
            "joining": self.joining,
        }

    def _silent(self, now: float) -> frozenset[int]:
        limit = now - self.silence
        return frozenset(n for n in self.alive - {self.node} if self._heard.setdefault(n, now) < limit)

    def _watch_ranks(self, now: float) -> None:
        for rank in sorted(self.ranks):
            if now - self._rank_heard.setdefault(rank, now) > self.silence:
                self._end_node(f"rank {rank} of node {self.node} gave no sign of life for {self.silence:g} s")
                return
        if self._fault_at is None or now - self._fault_at <= self.silence or self.generation < 0:
            return  # before the first decision ranks still build what they need, for as long as that takes
        late = sorted(self.ranks - self._reported.keys() - self._done)
        if late:
            self._end_node(f"rank {late[0]} of node {self.node} did not stand still within {self.silence:g} s of a loss")

    def _watch_peers(self, now: float) -> None:
        nodes = self.alive
        silent = self._silent(now)
        found = {(self.node, n) for n in silent} | {(a, b) for a, seen in self._suspects.items() for b in seen if a in nodes and b in nodes}
        suspicions = frozenset((min(p), max(p)) for p in found)
        if suspicions != self._suspicions:
            self._suspicions, self._suspicions_since = suspicions, now
        if not suspicions:
            return
        self._doubt = True
        if now - self._suspicions_since < _SETTLE * self.silence / BEATS:
            return
        if self.joining:
            if silent == nodes:
                self._end(f"node {self.node} hears none of the members that it wants to join", {"kind": "bye", "reason": "heard nobody"})
            return
        stays = side_that_stays(nodes, suspicions)
        gone = nodes - stays
        if self.node not in stays or not self._may_go_on(stays):
            self._fence(silent)
            return
        self._lose(dict.fromkeys(gone, f"nothing was heard of it for {self.silence:g} s"), proven=False, own=True, now=now)

    def _watch_majority(self, now: float) -> None:
        """A side that became too small to decide, because of what others had promised, does not wait for ever."""
        if self.joining or self._may_go_on(self.alive):
            self._stuck_since = None
            return
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since > self.silence:
            self._fence(frozenset())

    def _may_go_on(self, side: frozenset[int]) -> bool:
        """Whether nodes may go on without all others, in every set of members that may be in force."""
        return all(not ((base - side) - self._proven) or majority(side, base - self._counted) for base in (self.members, *self._open_bases))

    def _fence(self, silent: frozenset[int]) -> None:
        hears = len(self.alive - silent)
        reason = f"node {self.node} hears only {hears} of {len(self.members)} nodes (itself counted), which is no majority; it ends itself"
        self._end(reason, {"kind": "bye", "reason": "it was cut off"})

    # --- nodes come and go

    def _meet(self, node: int, joining: bool, now: float) -> None:
        if node in self.out:
            return
        self._connected.add(node)
        self._heard[node] = now
        if joining and node not in self.members:
            self._joiners.add(node)
        self._announced = ()
        if self._proposal is not None and "host" in self._proposal and node in _voters(self._proposal):
            self._do(Send(node, self._proposal))
        if self._changing:
            self._do(Send(node, {"kind": "change"}))

    def _lose(self, nodes: Mapping[int, str], *, proven: bool, own: bool, now: float) -> None:
        """Nodes are out from now on. `own`: this node found it, and tells the others."""
        if proven:
            self._proven |= nodes.keys()
            if not self._doubt:
                self._counted |= nodes.keys() & self.members
        new = {n: reason for n, reason in nodes.items() if n not in self.out and n != self.node}
        if not new:
            return
        self.out.update(new)
        for node in new:
            for known in (self._heard, self._suspects, self._standing):
                known.pop(node, None)
            self._connected.discard(node)
            self._joiners.discard(node)
        ours = {n: new[n] for n in new if n in self.members}
        if own and ours:
            self._tell_all({"kind": "lost", "nodes": _named(ours), "proven": proven})
        if not proven:
            for node, reason in new.items():
                self._do(Send(node, {"kind": "out", "reason": reason}))
        if self._proposal is not None and new.keys() & _voters(self._proposal):
            self._proposal = None
        if not ours:
            return
        self._do(Note({"event": "lost", "nodes": _named(ours), "proven": proven}))
        if self.joining:
            return
        self._fault_at = now
        self._do(TellRanks({"kind": "lost", "nodes": sorted(ours)}))

    def _leave(self) -> None:
        if self.joining:
            self._end(f"node {self.node} was asked to leave before it had joined", {"kind": "bye", "reason": "it left"}, status=0)
            return
        if self.node in self._leaving:
            return
        self._leaving.add(self.node)
        self._announced = ()
        self._tell_all({"kind": "leave"})

    # --- messages

    def _hear(self, node: int, message: Message, now: float) -> None:
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
            case "ack" if self._proposal is not None and message["ballot"] == _ballot(self._proposal):
                self._acks.add(node)
            case "nack":
                self._refused(node, message, now)
            case "commit":
                self._hear_commit(message["proposal"], now)
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
                self._end(f"rank {message['rank']} failed", {"kind": "bye", "reason": "the run has failed"})

    def _hear_standing(self, node: int, message: Message, now: float) -> None:
        if message["decided"] is not None:
            self._hear_commit(message["decided"], now)  # whoever made that decision is gone and could not tell everybody
        done, reports = message["kind"] == "done", message.get("reports", {})
        self._standing[node] = _Standing(message["stand"], done, reports, frozenset(message["connected"]))

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

    def _reopen(self) -> None:
        if not self._done:
            return
        self._do(TellRanks({"kind": "reopen"}, tuple(sorted(self._done))))
        self._done.clear()
        self._announced = ()

    def _rank_ended(self, rank: int, reason: str, *, fatal: bool) -> None:
        if fatal:
            self._tell_all({"kind": "fatal", "rank": rank})
            self._end(f"rank {rank} failed: {reason}", {"kind": "bye", "reason": f"rank {rank}: {reason}"})
            return
        self._end_node(f"rank {rank}: {reason}")

    def _end_node(self, reason: str) -> None:
        self._end(reason, {"kind": "bye", "reason": reason})

    def _change(self) -> None:
        if self._changing or self.joining:
            return
        self._changing = True
        self._do(TellRanks({"kind": "change"}))

    # --- agreement

    def _settle(self, now: float) -> None:
        """Say where this node stands if that is news; lead, if it leads."""
        self._announce()
        if self.leader is None:
            self._end(f"node {self.node}: no member is left to join", {"kind": "bye", "reason": "nobody is left"})
            return
        if self.leader == self.node and not self.joining:
            self._lead(now)

    def _my_standing(self) -> _Standing | None:
        connected, stand = frozenset(self._connected), -1 if self.joining else self.generation
        if len(self._done) == len(self.ranks):
            return _Standing(stand, done=True, connected=connected)
        if len(self._reported) == len(self.ranks):
            return _Standing(stand, reports={str(r): self._reported[r] for r in sorted(self._reported)}, connected=connected)
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
        if self._proposal is not None and "host" in self._proposal and self._acks >= _voters(self._proposal):
            self._commit(self._proposal, now)

    def _ready_joiners(self, stay: frozenset[int]) -> frozenset[int]:
        """Who can be a member now: its ranks stand still, and it is connected with all members and with the others that join with it."""
        found: frozenset[int] = frozenset()
        for node in sorted(self._joiners & self._standing.keys()):
            standing = self._standing[node]
            if not standing.done and stay | found <= standing.connected:
                found |= {node}
        return found

    def _wake_the_done(self, ready: Mapping[int, _Standing]) -> None:
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
            "out": _named({n: r for n, r in self.out.items() if n in self.members}),
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
        for node in sorted(_voters(self._proposal) - {self.node}):
            self._do(Send(node, self._proposal))
        self._promise_to(self._proposal, now)
        self._acks.add(self.node)

    def _objection(self, proposal: Message) -> str | None:
        """Why this node does not promise, or None if it does."""
        if tuple(_ballot(proposal)) < self._promised:
            return "another proposal came before"
        if proposal["generation"] <= self.generation:
            return "that generation is over"
        if self.out.keys() & _voters(proposal):
            return "it has nodes that are lost"
        if not self.joining and not self._may_go_on(_voters(proposal)):
            return "it is no majority of what was promised before"
        mine = self._my_standing()
        if mine is None or mine.done or proposal["stands"].get(str(self.node)) != mine.stand:
            return "its ranks do not stand still any more"
        return None

    def _consider(self, node: int, proposal: Message, now: float) -> None:
        if self.node not in _voters(proposal):
            return
        told = {int(n): reason for n, reason in proposal["out"].items()}
        self._lose({n: told[n] for n in proposal["proven"]}, proven=True, own=False, now=now)
        self._seen = max(self._seen, proposal["generation"])
        if self._objection(proposal) is None:
            self._promise_to(proposal, now)
            self._do(Send(node, {"kind": "ack", "ballot": _ballot(proposal)}))
            return
        mine = self._my_standing()
        out = {n: r for n, r in self.out.items() if n in _voters(proposal)}
        refusal = {
            "kind": "nack",
            "ballot": _ballot(proposal),
            "seen": max(self._seen, self._promised[0]),
            "proven": _named({n: r for n, r in out.items() if n in self._proven}),
            "silent": _named({n: r for n, r in out.items() if n not in self._proven}),
            "bases": [sorted(base) for base in self._open_bases],
            "stands": mine is not None and not mine.done,
        }
        self._do(Send(node, refusal))

    def _promise_to(self, proposal: Message, now: float) -> None:
        """From now on whoever is not in the proposal is out for this node, whatever becomes of it."""
        ballot = tuple(_ballot(proposal))
        if ballot == self._promised:
            return
        self._promised = (ballot[0], ballot[1])
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
        if self._proposal is None or message["ballot"] != _ballot(self._proposal):
            return
        self._proposal = None
        self._seen = max(self._seen, message["seen"])
        self._open_bases += tuple(b for b in map(frozenset, message["bases"]) if b not in self._open_bases)
        for found, proven in ((message["proven"], True), (message["silent"], False)):
            self._lose({int(n): r for n, r in found.items()}, proven=proven, own=True, now=now)
        if not message["stands"]:
            self._standing.pop(node, None)
        self._held = message["stands"] and not message["proven"] and not message["silent"]

    def _commit(self, proposal: Message, now: float) -> None:
        for node in sorted(_voters(proposal) - {self.node}):
            self._do(Send(node, {"kind": "commit", "proposal": proposal}))
        self._take(proposal, now)

    def _hear_commit(self, proposal: Message, now: float) -> None:
        if self.node in proposal["left"] and proposal["generation"] > self.generation:
            self._end(f"node {self.node} has left", {"kind": "bye", "reason": "it left"}, status=0)
            return
        if self._promise is None or _ballot(proposal) != _ballot(self._promise):
            return
        self._take(proposal, now)

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


def _voters(proposal: Mapping[str, Any]) -> frozenset[int]:
    """Who must promise: the nodes that go on, and those that leave on purpose with it."""
    return frozenset(proposal["nodes"]) | frozenset(proposal["left"])


def _ballot(proposal: Mapping[str, Any]) -> list[int]:
    return [proposal["generation"], proposal["leader"]]


def _named(nodes: Mapping[int, str]) -> Message:
    """As JSON has it: keys are text."""
    return {str(n): nodes[n] for n in sorted(nodes)}
