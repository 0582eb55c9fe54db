"""The agent of one node of a run that survives losses: it forks the node's ranks, watches them, and agrees with the other agents.

One thread, one selector. All decisions are made by the state machine in `membership`; here are the sockets, the processes and the clock. Ranks
are forked before anything else is opened, and nothing is forked after the first store.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pdsl.runtime import happenings as m
from pdsl.runtime.membership import Membership
from pdsl.runtime.peers import Identity, Peers, Roster, Watch
from pdsl.runtime.ranks import RankProcess, Work, fork_rank, in_words_of_status
from pdsl.runtime.stores import open_store
from pdsl.runtime.view import BEATS
from pdsl.runtime.wire import Channel, Message

__all__ = ["Agent", "host_node"]

_LAST_WORDS = 0.2
"""Seconds that a node which ends may spend on telling the others why."""

_GOODBYE = 10.0
"""Seconds that ranks have to exit by themselves after the run is over."""


class Agent:
    """Runs one node until it ends. `listener` accepts other agents; `upstream` leads to the launcher, or is None where there is none.

    `tell` gets what the launcher would be told: messages with `kind` event, tell, result, failed or end.
    """

    def __init__(
        self,
        identity: Identity,
        ranks: tuple[RankProcess, ...],
        listener: socket.socket,
        *,
        upstream: Channel | None = None,
        tell: Callable[[Message], None] | None = None,
    ) -> None:
        self.identity = identity
        self._ranks = {rank.rank: rank for rank in ranks}
        self._upstream = upstream
        self._tell_launcher = tell or self._send_up
        self._watch = Watch()
        self._peers = Peers(identity, listener, self._watch, self._happened)
        self._stores: dict[int, Any] = {}
        self._machine: Membership | None = None
        self._early: list[m.Event] = []
        self._end: m.End | None = None
        self._tick = identity.silence / BEATS
        self._ticked = 0.0
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    # --- the loop

    def run(self, roster: Roster | None = None) -> int:
        """Work until the end; the exit status. Without a roster it comes from upstream."""
        for sign in (signal.SIGTERM, signal.SIGINT) if self._upstream is None else (signal.SIGTERM,):
            signal.signal(sign, self._signalled)
        self._watch.add(self._awake, self._asked_to_leave)
        if self._upstream is not None:
            self._watch.add(self._upstream, self._hear_launcher)
        for rank in self._ranks.values():
            self._watch.add(rank.channel, partial(self._hear_rank, rank))
            self._watch.add(rank.pidfd, partial(self._rank_exited, rank))
        if roster is not None:
            self._begin(roster)
        while self._end is None:
            self._turn()
        return self._finish(self._end)

    def _turn(self) -> None:
        self._watch.turn(self._patience())
        now = time.monotonic()
        self._peers.retry(now)
        if self._machine is not None and now - self._ticked >= self._tick:
            self._ticked = now
            self._happened(m.Tick())

    def _patience(self) -> float:
        now = time.monotonic()
        moments = [now + self._tick if self._machine is None else self._ticked + self._tick]
        retry = self._peers.next_retry()
        return max(0.0, min(moments if retry is None else [*moments, retry]) - now)

    def _signalled(self, sign: int, frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def _asked_to_leave(self) -> None:
        os.read(self._awake, 4096)
        self._happened(m.Leave())

    # --- the launcher

    def _send_up(self, message: Message) -> None:
        if self._upstream is not None:
            self._upstream.send(message)

    def _hear_launcher(self) -> None:
        assert self._upstream is not None
        for message in self._upstream.receive():
            if message.get("kind") == "start":
                book = {int(node): (address[0], address[1]) for node, address in message["book"].items()}
                self._begin(Roster(tuple(message["members"]), book, message["joining"], message["generation"]))
            elif message.get("kind") == "leave":
                self._happened(m.Leave())
        if not self._upstream.open:
            self._end = m.End("the launcher is gone", {"kind": "bye", "reason": "the launcher is gone"})

    def _begin(self, roster: Roster) -> None:
        me = self.identity
        self._machine = Membership(
            node=me.node,
            ranks=frozenset(me.ranks),
            members=frozenset(roster.members),
            silence=me.silence,
            joining=roster.joining,
            generation=roster.generation,
        )
        self._ticked = time.monotonic()
        self._peers.begin(self._machine, roster)
        self._happened(m.Tick())
        early, self._early = self._early, []
        for event in early:
            self._happened(event)

    # --- ranks

    def _hear_rank(self, rank: RankProcess) -> None:
        for message in rank.channel.receive():
            self._rank_said(rank, message)
        if not rank.channel.open:
            self._watch.forget(rank.channel)

    def _rank_said(self, rank: RankProcess, message: Message) -> None:
        match message.get("kind"):
            case "beat":
                self._happened(m.RankBeat(rank.rank))
            case "report":
                self._happened(m.RankReported(rank.rank, message["generation"], message["facts"]))
            case "tell":
                self._tell_launcher({"kind": "tell", "rank": rank.rank, "event": message["event"]})
            case "done":
                self._tell_launcher({"kind": "result", "rank": rank.rank, "result": message["result"]})
                self._happened(m.RankDone(rank.rank))
            case "failed":
                self._tell_launcher({"kind": "failed", "rank": rank.rank, "fatal": message["fatal"], "outcome": message["outcome"]})
                outcome = message["outcome"]
                first = outcome["message"].splitlines()[0]
                self._happened(m.RankEnded(rank.rank, f"{outcome['type']}: {first}", message["fatal"]))

    def _rank_exited(self, rank: RankProcess) -> None:
        self._watch.forget(rank.pidfd)
        self._hear_rank(rank)
        status = rank.reap()
        self._happened(m.RankEnded(rank.rank, f"its process {in_words_of_status(status)}"))

    # --- what the machine wants

    def _happened(self, event: m.Event) -> None:
        if self._machine is None:
            self._early.append(event)
            if isinstance(event, m.RankEnded):
                self._end = m.End(f"rank {event.rank}: {event.reason}", {"kind": "bye", "reason": event.reason})
            return
        queue = [event]
        while queue and self._end is None:
            for action in self._machine.handle(queue.pop(0), time.monotonic()):
                found = self._perform(action)
                if found is not None:
                    queue.append(found)
        self._peers.drop_the_lost()

    def _perform(self, action: m.Action) -> m.Event | None:
        match action:
            case m.Send(node, message):
                self._peers.send(node, message)
            case m.TellRanks(message, ranks):
                self._tell_ranks(message, ranks)
            case m.Host(generation):
                store, port = open_store(self.identity.host)
                self._stores[generation] = store
                return m.Hosted(generation, self.identity.host, port)
            case m.Note(event):
                self._tell_launcher({"kind": "event", "event": event})
            case m.End():
                self._end = action
        return None

    def _tell_ranks(self, message: Message, ranks: tuple[int, ...]) -> None:
        if message["kind"] == "decision":
            for generation in [g for g in self._stores if g < message["generation"]]:
                del self._stores[generation]
        for number in ranks or tuple(self._ranks):
            self._ranks[number].channel.send(message)

    # --- the end

    def _finish(self, end: m.End) -> int:
        over = bool(end.said.get("over"))
        if not over:
            for rank in self._ranks.values():
                rank.kill()
        self._peers.farewell(end.said)
        limit = time.monotonic() + _GOODBYE
        for rank in self._ranks.values():
            rank.channel.drain(_LAST_WORDS)
            if rank.status is None and not rank.wait(max(0.0, limit - time.monotonic())):
                rank.kill()
                rank.wait(_GOODBYE)
        self._tell_launcher({"kind": "end", "reason": end.reason, "status": end.status})
        if self._upstream is not None:
            self._upstream.drain(1.0)
        return end.status


def host_node(
    work: Work,
    identity: Identity,
    listener: socket.socket,
    *,
    upstream: Channel | None = None,
    tell: Callable[[Message], None] | None = None,
) -> Agent:
    """Fork the ranks of this node and make their agent, which listens on `listener`."""
    foreign = [listener] if upstream is None else [listener, upstream.socket]
    ranks = []
    for rank in identity.ranks:
        found = fork_rank(work, rank, foreign)
        ranks.append(found)
        foreign.append(found.channel.socket)
    if upstream is not None:
        hello = {
            "kind": "hello",
            "node": identity.node,
            "secret": identity.secret,
            "host": identity.host,
            "port": listener.getsockname()[1],
        }
        upstream.send({**hello, "pid": os.getpid(), "ranks": {str(rank.rank): rank.pid for rank in ranks}})
    return Agent(identity, tuple(ranks), listener, upstream=upstream, tell=tell)
