"""Who is there, as one agent sees it: who lives, who is out, who is silent, and what follows from silence.

The first half of the state machine in every agent; `membership` has the rules and the other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import Factory, define

from pdsl.runtime.happenings import Action, End, Note, Send, TellRanks
from pdsl.runtime.votes import majority, named, side_that_stays
from pdsl.runtime.wire import Message

__all__ = ["BEATS", "LEFT", "View"]

LEFT = "it left"
"""Why a node is out that asked to leave."""

BEATS = 10
"""Signs of life within one `silence`."""

_SETTLE = 2
"""Beats for which a suspicion must stand, so that those of the others have come."""


@define
class View:
    """The view of one agent. `members` are agreed, as of `generation` (-1 before the first decision). Seconds throughout."""

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
    _reported: dict[int, Message] = Factory(dict)
    _done: set[int] = Factory(set)
    _rank_heard: dict[int, float] = Factory(dict)
    _open_bases: tuple[frozenset[int], ...] = ()
    _fault_at: float | None = None
    _stuck_since: float | None = None
    _ticked: float | None = None
    _beaten: float | None = None
    _actions: list[Action] = Factory(list)

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

    def _end_node(self, reason: str) -> None:
        self._end(reason, {"kind": "bye", "reason": reason})

    # --- time

    def _tick(self, now: float) -> None:
        beat = self.silence / BEATS
        if self._ticked is not None and now - self._ticked > self.silence / 2:
            self._paused(now - self._ticked)
        self._ticked = now
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

    # --- nodes go

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
            self._heard.pop(node, None)
            self._suspects.pop(node, None)
            self._connected.discard(node)
            self._joiners.discard(node)
        ours = {n: new[n] for n in new if n in self.members}
        if own and ours:
            self._tell_all({"kind": "lost", "nodes": named(ours), "proven": proven})
        if not proven:
            for node, reason in new.items():
                self._do(Send(node, {"kind": "out", "reason": reason}))
        if not ours:
            return
        self._do(Note({"event": "lost", "nodes": named(ours), "proven": proven}))
        if self.joining:
            return
        self._fault_at = now
        self._do(TellRanks({"kind": "lost", "nodes": sorted(ours)}))

    def _farewell(self, nodes: Iterable[int]) -> None:
        """Nodes have left on purpose, as was agreed: they are out, and nothing is lost."""
        for node in nodes:
            self.out.setdefault(node, LEFT)
            self._proven.add(node)
            self._connected.discard(node)
            self._joiners.discard(node)
            self._heard.pop(node, None)
            self._suspects.pop(node, None)
