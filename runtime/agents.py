"""The agent of one node of a run that survives losses: it forks the node's ranks, watches them, and agrees with the other agents.

One thread, one selector. All decisions are made by the state machine in `membership`; here are the sockets, the processes and the clock. Ranks
are forked before anything else is opened, and nothing is forked after the first store.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from attrs import Factory, define, frozen

from pdsl.runtime import happenings as m
from pdsl.runtime.membership import Membership
from pdsl.runtime.ranks import RankProcess, in_words_of_status
from pdsl.runtime.stores import open_store
from pdsl.runtime.view import BEATS
from pdsl.runtime.wire import Channel, Message

__all__ = ["Agent", "Identity", "Roster"]

_RETRY = 0.02
"""Seconds between two looks at a node that is not connected and not refused either."""

_LAST_WORDS = 0.2
"""Seconds that a node which ends may spend on telling the others why."""

_GOODBYE = 10.0
"""Seconds that ranks have to exit by themselves after the run is over."""


@frozen
class Identity:
    """Who an agent is. `host` is the address under which others reach it, `secret` what all agents of the run know."""

    node: int
    ranks: tuple[int, ...]
    host: str
    secret: str
    silence: float


@frozen
class Roster:
    """Whom an agent finds: `members` as agreed in `generation`, their addresses, and whether it is `joining` them."""

    members: tuple[int, ...]
    book: Mapping[int, tuple[str, int]]
    joining: bool = False
    generation: int = -1


@define(eq=False)
class _Peer:
    """Another agent: the connection to it, or what waits for one."""

    node: int
    address: tuple[str, int] | None = None
    channel: Channel | None = None
    attempt: socket.socket | None = None
    retry_at: float | None = None
    outbox: list[Message] = Factory(list)


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
        self._listener = listener
        self._upstream = upstream
        self._tell_launcher = tell or self._send_up
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._strangers: set[Channel] = set()
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
        self._listener.setblocking(False)
        self._watch(self._listener, self._accept)
        self._watch(self._awake, self._asked_to_leave)
        if self._upstream is not None:
            self._watch(self._upstream, self._hear_launcher)
        for rank in self._ranks.values():
            self._watch(rank.channel, partial(self._hear_rank, rank))
            self._watch(rank.pidfd, partial(self._rank_exited, rank))
        if roster is not None:
            self._begin(roster)
        while self._end is None:
            self._turn()
        return self._finish(self._end)

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._patience()):
            if self._end is not None:
                return
            current = self._selector.get_map().get(key.fd)
            if current is None or current.fileobj is not key.fileobj:
                continue  # what came before it in this turn has closed it: with a node that is lost goes all that leads to it
            if mask & selectors.EVENT_WRITE and isinstance(key.fileobj, Channel):
                key.fileobj.flush()
            if mask & selectors.EVENT_READ or not isinstance(key.fileobj, Channel):
                key.data()
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.retry_at is not None and now >= peer.retry_at:
                self._look_for(peer)
        if self._machine is not None and now - self._ticked >= self._tick:
            self._ticked = now
            self._happened(m.Tick())
        self._mind_writers()

    def _patience(self) -> float:
        now = time.monotonic()
        moments = [now + self._tick if self._machine is None else self._ticked + self._tick]
        moments += [peer.retry_at for peer in self._peers.values() if peer.retry_at is not None]
        return max(0.0, min(moments) - now)

    def _watch(self, source: Any, call: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(source, events, call)

    def _forget(self, source: Any) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _mind_writers(self) -> None:
        """Ask for the moment in which a full socket takes more, for those that need it."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, Channel):
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.fileobj.pending else 0)
            if wanted != key.events:
                self._selector.modify(key.fileobj, wanted, key.data)

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
        for node in roster.members:
            if node != me.node:
                self._peer(node).address = roster.book[node]
                self._look_for(self._peer(node))
        self._happened(m.Tick())
        early, self._early = self._early, []
        for event in early:
            self._happened(event)

    # --- ranks

    def _hear_rank(self, rank: RankProcess) -> None:
        for message in rank.channel.receive():
            self._rank_said(rank, message)
        if not rank.channel.open:
            self._forget_channel(rank.channel)

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
        self._forget(rank.pidfd)
        self._hear_rank(rank)
        status = rank.reap()
        self._happened(m.RankEnded(rank.rank, f"its process {in_words_of_status(status)}"))

    # --- other agents

    def _peer(self, node: int) -> _Peer:
        return self._peers.setdefault(node, _Peer(node))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        stranger = Channel(connection)
        self._strangers.add(stranger)
        self._watch(stranger, lambda: self._hear_stranger(stranger))

    def _hear_stranger(self, stranger: Channel) -> None:
        messages = stranger.receive()
        hello = messages[0] if messages else None
        if hello is None and stranger.open:
            return
        self._strangers.discard(stranger)
        self._forget_channel(stranger)
        if hello is None or self._machine is None:
            stranger.close()
            return
        reason = self._why_refused(hello)
        if reason is not None:
            stranger.send({"kind": "out", "reason": reason})
            stranger.drain(_LAST_WORDS)
            stranger.close()
            return
        peer = self._peer(hello["node"])
        peer.address = (hello["host"], hello["port"])
        self._adopt(peer, stranger, joining=hello["joining"])
        self._hear_peer(peer, stranger, messages[1:])

    def _why_refused(self, hello: Message) -> str | None:
        assert self._machine is not None
        if hello.get("kind") != "hello" or hello.get("secret") != self.identity.secret:
            return "it does not belong to this run"
        node = hello["node"]
        known = self._machine.knows_out(node)
        if known is not None:
            return known
        if node not in self._machine.members and not hello["joining"]:
            return "it is no member"
        return None

    def _look_for(self, peer: _Peer) -> None:
        """Try to connect: the node that joins, or has the higher number, keeps the connection; the other only sees whether anybody is there."""
        peer.retry_at = None
        if peer.channel is not None or peer.attempt is not None or peer.address is None or self._out(peer.node):
            return
        attempt = socket.socket(socket.AF_INET6 if ":" in peer.address[0] else socket.AF_INET, socket.SOCK_STREAM)
        attempt.setblocking(False)
        try:
            code = attempt.connect_ex(peer.address)
        except OSError as error:
            code = error.errno or errno.EIO
        peer.attempt = attempt
        if code == errno.EINPROGRESS:
            self._watch(attempt, lambda: self._answered(peer, attempt), selectors.EVENT_WRITE)
            return
        self._attempt_ended(peer, attempt, code)

    def _answered(self, peer: _Peer, attempt: socket.socket) -> None:
        self._forget(attempt)
        self._attempt_ended(peer, attempt, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _attempt_ended(self, peer: _Peer, attempt: socket.socket, code: int) -> None:
        peer.attempt = None
        if code == 0 and peer.channel is None and self._keeps(peer.node):
            channel = Channel(attempt)
            host, port = self.identity.host, self._listener.getsockname()[1]
            joining = self._machine is not None and self._machine.joining
            node, secret = self.identity.node, self.identity.secret
            channel.send({"kind": "hello", "node": node, "secret": secret, "joining": joining, "host": host, "port": port})
            self._adopt(peer, channel, joining=False)
            return
        attempt.close()
        if code == errno.ECONNREFUSED and peer.channel is None:
            self._happened(m.Closed(peer.node))
        elif peer.channel is None:
            peer.retry_at = time.monotonic() + _RETRY

    def _keeps(self, node: int) -> bool:
        return self._machine is not None and (self._machine.joining or node < self.identity.node)

    def _adopt(self, peer: _Peer, channel: Channel, *, joining: bool) -> None:
        if peer.channel is not None:
            self._forget_channel(peer.channel)
            peer.channel.close()
        peer.channel, peer.retry_at = channel, None
        self._watch(channel, lambda: self._hear_peer(peer, channel, channel.receive()))
        waiting, peer.outbox = peer.outbox, []
        for message in waiting:
            channel.send(message)
        self._happened(m.Connected(peer.node, joining))

    def _hear_peer(self, peer: _Peer, channel: Channel, messages: list[Message]) -> None:
        for message in messages:
            if self._end is not None or peer.channel is not channel:
                return
            for node, address in message.pop("book", {}).items():
                self._learn(int(node), (address[0], address[1]))
            self._happened(m.Heard(peer.node, message))
        if not channel.open and peer.channel is channel:
            self._forget_channel(channel)
            peer.channel = None
            self._look_for(peer)

    def _learn(self, node: int, address: tuple[str, int]) -> None:
        peer = self._peer(node)
        if peer.address is None and node != self.identity.node:
            peer.address = address
            self._look_for(peer)

    def _forget_channel(self, channel: Channel) -> None:
        """Unregister a channel, open or not: a closed socket has no number any more by which it could be found."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is channel:
                self._selector.unregister(channel)
                return

    def _out(self, node: int) -> bool:
        return self._machine is not None and self._machine.knows_out(node) is not None

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
        self._drop_the_lost()

    def _perform(self, action: m.Action) -> m.Event | None:
        match action:
            case m.Send(node, message):
                self._send(node, message)
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

    def _send(self, node: int, message: Message) -> None:
        peer = self._peer(node)
        if message["kind"] == "beat" and self._machine is not None and node not in self._machine.members:
            book = {n: self._peers[n].address for n in self._machine.members if n in self._peers and self._peers[n].address}
            message = {**message, "book": {str(n): address for n, address in book.items()}}
        if peer.channel is not None and peer.channel.open:
            peer.channel.send(message)
        elif message["kind"] not in {"beat", "out"} and not self._out(node):
            peer.outbox.append(message)

    def _tell_ranks(self, message: Message, ranks: tuple[int, ...]) -> None:
        if message["kind"] == "decision":
            for generation in [g for g in self._stores if g < message["generation"]]:
                del self._stores[generation]
        for number in ranks or tuple(self._ranks):
            self._ranks[number].channel.send(message)

    def _drop_the_lost(self) -> None:
        """Nobody speaks any longer with a node that is out."""
        for peer in self._peers.values():
            if not self._out(peer.node):
                continue
            peer.outbox.clear()
            peer.retry_at = None
            if peer.attempt is not None:
                self._forget(peer.attempt)
                peer.attempt.close()
                peer.attempt = None
            if peer.channel is not None:
                peer.channel.drain(0.01)
                self._forget_channel(peer.channel)
                peer.channel.close()
                peer.channel = None

    # --- the end

    def _finish(self, end: m.End) -> int:
        over = bool(end.said.get("over"))
        if not over:
            for rank in self._ranks.values():
                rank.kill()
        for peer in self._peers.values():
            if peer.channel is not None and peer.channel.open:
                peer.channel.send(end.said)
                peer.channel.drain(_LAST_WORDS)
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
