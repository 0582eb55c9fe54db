"""The connections of an agent to all other agents: made, lost, looked for again, and kept from those who do not belong.

What is said over them is the state machine's affair. A connection that is lost is looked for at once: where it is refused, nobody lives.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, define, frozen

from pdsl.runtime import happenings as m
from pdsl.runtime.membership import Membership
from pdsl.runtime.wire import LIMIT, Channel, Message

__all__ = ["Identity", "Peers", "Roster", "Watch"]

_RETRY = 0.02
"""Seconds between two looks at a node that is not connected and not refused either."""

_STRANGE = 1 << 16
"""Bytes of the longest message from somebody who is not known yet."""

_LAST_WORDS = 0.2
"""Seconds that may be spent on telling somebody why."""


@frozen
class Identity:
    """Who an agent is. `host` is the address under which others reach it, `secret` what all agents of the run know.

    `plan` is the hash of the plan with which the run began: who joins must have the same.
    """

    node: int
    ranks: tuple[int, ...]
    host: str
    secret: str
    silence: float
    plan: str = ""


@frozen
class Roster:
    """Whom an agent finds: `members` as agreed in `generation`, their addresses, and whether it is `joining` them."""

    members: tuple[int, ...]
    book: Mapping[int, tuple[str, int]]
    joining: bool = False
    generation: int = -1


class Watch:
    """A selector with a call for each source, that can forget channels whose socket is closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, source: Any, call: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(source, events, call)

    def forget(self, source: Any) -> None:
        """Of a socket that is closed nobody knows the number any more, so it is looked for."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is source:
                self._selector.unregister(source)
                return

    def turn(self, patience: float) -> None:
        """Wait for what comes within some seconds, and make the calls."""
        for key, mask in self._selector.select(patience):
            current = self._selector.get_map().get(key.fd)
            if current is None or current.fileobj is not key.fileobj:
                continue  # what came before it in this turn has closed it: with a node that is lost goes all that leads to it
            if mask & selectors.EVENT_WRITE and isinstance(key.fileobj, Channel):
                key.fileobj.flush()
            if mask & selectors.EVENT_READ or not isinstance(key.fileobj, Channel):
                key.data()
        self._mind_writers()

    def close(self) -> None:
        self._selector.close()

    def _mind_writers(self) -> None:
        """Ask for the moment in which a full socket takes more, for those that need it."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, Channel):
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.fileobj.pending else 0)
            if wanted != key.events:
                self._selector.modify(key.fileobj, wanted, key.data)


@define(eq=False)
class _Peer:
    """Another agent: the connection to it, or what waits for one."""

    node: int
    address: tuple[str, int] | None = None
    channel: Channel | None = None
    attempt: socket.socket | None = None
    retry_at: float | None = None
    outbox: list[Message] = Factory(list)


class Peers:
    """All other agents, as this one reaches them. `happened` takes what the state machine must know."""

    def __init__(self, identity: Identity, listener: socket.socket, watch: Watch, happened: Callable[[m.Event], None]) -> None:
        self.identity = identity
        self._listener = listener
        self._watch = watch
        self._happened = happened
        self._machine: Membership | None = None
        self._peers: dict[int, _Peer] = {}
        self._strangers: set[Channel] = set()
        self._highest = -1  # number that was given to somebody who joins
        listener.setblocking(False)

    def begin(self, machine: Membership, roster: Roster) -> None:
        """Look for all members."""
        self._machine = machine
        self._watch.add(self._listener, self._accept)  # who came earlier has waited
        for node in roster.members:
            if node != self.identity.node:
                self._peer(node).address = roster.book[node]
                self._look_for(self._peer(node))

    def retry(self, now: float) -> None:
        """Look again for those whose time has come."""
        for peer in list(self._peers.values()):
            if peer.retry_at is not None and now >= peer.retry_at:
                self._look_for(peer)

    def next_retry(self) -> float | None:
        """The moment at which `retry` has something to do."""
        return min((peer.retry_at for peer in self._peers.values() if peer.retry_at is not None), default=None)

    def send(self, node: int, message: Message) -> None:
        peer = self._peer(node)
        if message["kind"] == "beat" and self._machine is not None and node not in self._machine.members:
            book = {n: self._peers[n].address for n in self._machine.members if n in self._peers and self._peers[n].address}
            message = {**message, "book": {str(n): address for n, address in book.items()}}
        if peer.channel is not None and peer.channel.open:
            peer.channel.send(message)
        elif message["kind"] not in {"beat", "out"} and not self._out(node):
            peer.outbox.append(message)

    def drop_the_lost(self) -> None:
        """Nobody speaks any longer with a node that is out."""
        for peer in self._peers.values():
            if not self._out(peer.node):
                continue
            peer.outbox.clear()
            peer.retry_at = None
            if peer.attempt is not None:
                self._watch.forget(peer.attempt)
                peer.attempt.close()
                peer.attempt = None
            if peer.channel is not None:
                peer.channel.drain(0.01)
                self._watch.forget(peer.channel)
                peer.channel.close()
                peer.channel = None

    def farewell(self, said: Message) -> None:
        """The last words to everybody."""
        for peer in self._peers.values():
            if peer.channel is not None and peer.channel.open:
                peer.channel.send(said)
                peer.channel.drain(_LAST_WORDS)

    # --- how connections come to be

    def _peer(self, node: int) -> _Peer:
        return self._peers.setdefault(node, _Peer(node))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        stranger = Channel(connection, _STRANGE)
        self._strangers.add(stranger)
        self._watch.add(stranger, lambda: self._hear_stranger(stranger))

    def _hear_stranger(self, stranger: Channel) -> None:
        messages = stranger.receive()
        hello = messages[0] if messages else None
        if hello is None and stranger.open:
            return
        self._strangers.discard(stranger)
        self._watch.forget(stranger)
        if hello is None:
            stranger.close()
            return
        if hello.get("kind") == "meet":
            stranger.send(self._seat_for(hello))
            stranger.drain(_LAST_WORDS)
            stranger.close()
            return
        reason = self._why_refused(hello)
        if reason is not None:
            stranger.send({"kind": "out", "reason": reason})
            stranger.drain(_LAST_WORDS)
            stranger.close()
            return
        stranger.widen(LIMIT)
        peer = self._peer(hello["node"])
        peer.address = (hello["host"], hello["port"])
        self._adopt(peer, stranger, joining=hello["joining"])
        self._hear_peer(peer, stranger, messages[1:])

    def _seat_for(self, guest: Message) -> Message:
        """The answer to somebody who wants to join: a number that was never used, if this node leads, or the way to the one that does."""
        machine, me = self._machine, self.identity
        assert machine is not None
        if guest.get("plan") != me.plan:
            return {"kind": "refused", "reason": f"it has the plan {str(guest.get('plan'))[:12]}, the run began with {me.plan[:12]}"}
        if machine.joining or machine.generation < 0 or machine.leader is None:
            return {"kind": "later"}
        if machine.leader != me.node:
            address = self._peer(machine.leader).address
            return {"kind": "later"} if address is None else {"kind": "elsewhere", "host": address[0], "port": address[1]}
        highest = max(self._highest, *machine.members, *machine.out, *self._peers) if self._peers else max(self._highest, me.node)
        wanted = guest.get("node")
        if wanted is not None and wanted <= highest:
            return {"kind": "refused", "reason": f"nodes are never numbered again, and {highest} was used; leave the number out"}
        self._highest = highest + 1 if wanted is None else wanted
        book = {n: peer.address for n, peer in self._peers.items() if n in machine.members and peer.address is not None}
        book[me.node] = (me.host, self._listener.getsockname()[1])
        return {
            "kind": "seat",
            "node": self._highest,
            "secret": me.secret,
            "members": sorted(machine.alive & book.keys()),
            "book": {str(n): address for n, address in book.items()},
            "joining": True,
            "generation": machine.generation,
        }

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
            self._watch.add(attempt, lambda: self._answered(peer, attempt), selectors.EVENT_WRITE)
            return
        self._attempt_ended(peer, attempt, code)

    def _answered(self, peer: _Peer, attempt: socket.socket) -> None:
        self._watch.forget(attempt)
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
            self._watch.forget(peer.channel)
            peer.channel.close()
        peer.channel, peer.retry_at = channel, None
        self._watch.add(channel, lambda: self._hear_peer(peer, channel, channel.receive()))
        waiting, peer.outbox = peer.outbox, []
        for message in waiting:
            channel.send(message)
        self._happened(m.Connected(peer.node, joining))

    def _hear_peer(self, peer: _Peer, channel: Channel, messages: list[Message]) -> None:
        for message in messages:
            if peer.channel is not channel:
                return
            for node, address in message.pop("book", {}).items():
                self._learn(int(node), (address[0], address[1]))
            self._happened(m.Heard(peer.node, message))
        if not channel.open and peer.channel is channel:
            self._watch.forget(channel)
            peer.channel = None
            self._look_for(peer)

    def _learn(self, node: int, address: tuple[str, int]) -> None:
        peer = self._peer(node)
        if peer.address is None and node != self.identity.node:
            peer.address = address
            self._look_for(peer)

    def _out(self, node: int) -> bool:
        return self._machine is not None and self._machine.knows_out(node) is not None
