"""How agents on real machines find each other: at an address that all were given, until every node of the plan has come.

The first agent that can listen at the first address hosts the meeting; it is no longer needed once everybody has a seat. Each agent listens at
one of the addresses if it is its own, so that whoever comes later finds any that lives, and is sent to the leader, who knows the next number.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from attrs import define, field, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.peers import Roster
from pdsl.runtime.wire import Channel, Lines, Message, WireError, encode, listen

__all__ = ["Address", "Place", "addresses_of", "meet"]

Address = tuple[str, int]

_KNOCK = 1.0
"""Seconds within which whoever lives answers."""

_AGAIN = 0.2
"""Seconds between two rounds of asking."""


@frozen
class Place:
    """What an agent has after the meeting: its number, the socket on which it listens at `host`, the secret of the run, and the others."""

    node: int
    listener: socket.socket
    host: str
    secret: str
    roster: Roster


def addresses_of(text: str) -> tuple[Address, ...]:
    """`HOST:PORT[,HOST:PORT]` as addresses. Raises ValueError with a message for the user."""
    found = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{part.strip()!r} is not HOST:PORT, such as 10.0.0.1:29500")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def meet(
    plan: Plan,
    addresses: tuple[Address, ...],
    *,
    node: int | None = None,
    host: str | None = None,
    patience: float = 300.0,
    say: Callable[[str], None] = print,
) -> Place:
    """Find the other agents of a plan, as one of its nodes or as one that joins. Blocks until all have come, at most `patience` seconds.

    `node` is the number that is wanted; `host` the address under which others reach this machine, found by itself if None. Raises RunError if
    nobody comes in time, or if this agent is refused: another plan, a number that is taken.
    """
    search = _Search(plan, addresses, node, host, time.monotonic() + patience, say)
    try:
        return search.find()
    except BaseException:
        if search.listener is not None:
            search.listener.close()
        raise


# --- the one who comes ----------------------------------------------------------------------------------------------------------------------


def _listen(addresses: tuple[Address, ...], host: str | None) -> socket.socket:
    """Listen at the first of the addresses that is of this machine and free, at any port otherwise."""
    for address in addresses:
        with suppress(OSError):
            return listen(*address)
    try:
        return listen(host or _route(addresses[0]), 0)
    except OSError as error:
        raise RunError(f"nobody can be heard at {host}: {error.strerror or error}; --host takes an address of this machine") from None


def _route(address: Address) -> str:
    """The address of this machine that leads to another one. Raises RunError if none does."""
    try:
        family = socket.getaddrinfo(address[0], address[1], type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise RunError(f"there is no way to {address[0]}:{address[1]}: {error.strerror or error}") from None


def _own_host(listener: socket.socket, address: Address, host: str | None) -> str:
    bound: str = listener.getsockname()[0]
    return host or (_route(address) if bound in {"0.0.0.0", "::"} else bound)  # noqa: S104


def _at(listener: socket.socket, address: Address) -> bool:
    with suppress(OSError):
        resolved = {entry[4][:2] for entry in socket.getaddrinfo(address[0], address[1], type=socket.SOCK_STREAM)}
        return listener.getsockname()[:2] in resolved
    return False


def _seated(seat: Message, listener: socket.socket, host: str) -> Place:
    book = {int(node): (address[0], address[1]) for node, address in seat["book"].items()}
    roster = Roster(tuple(seat["members"]), book, seat["joining"], seat["generation"])
    return Place(seat["node"], listener, host, seat["secret"], roster)


def _ask(address: Address, guest: Message, limit: float, say: Callable[[str], None]) -> Message | None:
    """Ask for a seat at an address; None if nobody there can give one. Raises RunError if it is refused."""
    for _ in range(4):  # the leader may have changed while one was sent to it
        answer = _answer(address, guest, limit, say)
        match answer:
            case {"kind": "seat"}:
                return answer
            case {"kind": "refused", "reason": str(reason)}:
                raise RunError(f"refused at {address[0]}:{address[1]}: {reason}")
            case {"kind": "elsewhere", "host": str(host), "port": int(port)}:
                address = (host, port)
            case _:
                return None
    return None


def _answer(address: Address, guest: Message, limit: float, say: Callable[[str], None]) -> Message | None:
    try:
        with socket.create_connection(address, timeout=_KNOCK) as connection:
            connection.sendall(encode(guest))
            lines = Lines()
            while True:
                data = connection.recv(1 << 16)
                for message in lines.feed(data) if data else ():
                    if message.get("kind") != "wait":
                        return message
                    say(f"met at {address[0]}:{address[1]}; waiting until all nodes have come")
                    connection.settimeout(max(0.1, limit - time.monotonic()))
                if not data:
                    return None
    except (OSError, WireError):
        return None


@define(eq=False)
class _Search:
    """Asks at all addresses, takes one that is free for its own, and asks again."""

    plan: Plan
    addresses: tuple[Address, ...]
    node: int | None
    host: str | None
    limit: float
    say: Callable[[str], None]
    listener: socket.socket | None = None

    def find(self) -> Place:
        """Raises RunError if this agent is refused or the time is up."""
        place = self._ask_all()  # a run that goes on already is joined, also by one that could host a meeting
        if place is not None:
            return place
        self.listener = _listen(self.addresses, self.host)
        if _at(self.listener, self.addresses[0]):
            own = _own_host(self.listener, self.addresses[0], self.host)
            return _Meeting(self.plan, self.listener, own, self.limit, self.say).hold(self.node)
        self.say(f"waiting for the meeting at {self.addresses[0][0]}:{self.addresses[0][1]}")
        while (place := self._ask_all()) is None:
            if time.monotonic() > self.limit:
                raise RunError(f"nobody was met in time at {', '.join(f'{host}:{port}' for host, port in self.addresses)}")
            time.sleep(_AGAIN)
        return place

    def _ask_all(self) -> Place | None:
        for address in self.addresses:
            if self.listener is not None and _at(self.listener, address):
                continue
            seat = _ask(address, self._guest(address), self.limit, self.say)
            if seat is not None:
                self.listener = self.listener or _listen(self.addresses, self.host)
                return _seated(seat, self.listener, _own_host(self.listener, address, self.host))
        return None

    def _guest(self, address: Address) -> Message:
        guest: Message = {"kind": "meet", "plan": self.plan.hash, "node": self.node}
        if self.listener is None:
            return {**guest, "only_join": True}
        return {**guest, "host": _own_host(self.listener, address, self.host), "port": self.listener.getsockname()[1]}


# --- the one who hosts ----------------------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Arrival:
    """Somebody who came to the meeting. Without a channel it is the host."""

    wanted: int | None
    address: Address
    channel: Channel | None = None


@define(eq=False)
class _Meeting:
    """Collects the nodes of a plan."""

    plan: Plan
    listener: socket.socket
    host: str
    limit: float
    say: Callable[[str], None]
    arrivals: list[_Arrival] = field(factory=list)

    def hold(self, node: int | None) -> Place:
        """Until all have come. Raises RunError if they do not in time, or if the host wants to be a node that the plan does not have."""
        address = (self.host, self.listener.getsockname()[1])
        reason = self._objection(self.plan.hash, node)
        if reason is not None:
            raise RunError(reason)
        self.arrivals.append(_Arrival(node, address))
        self.say(f"the meeting is at {address[0]}:{address[1]}; {len(self.plan.nodes) - 1} more to come")
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while len(self.arrivals) < len(self.plan.nodes):
                if time.monotonic() > self.limit:
                    raise RunError(f"only {len(self.arrivals)} of {len(self.plan.nodes)} nodes have come to {address[0]}:{address[1]}")
                for key, _ in selector.select(0.5):
                    self._turn(selector, key.fileobj)
        return self._seat_all()

    def _turn(self, selector: selectors.BaseSelector, source: object) -> None:
        if not isinstance(source, Channel):
            with suppress(OSError):
                connection, _ = self.listener.accept()
                selector.register(Channel(connection), selectors.EVENT_READ)
            return
        fd = source.fileno()
        messages = source.receive()
        if messages:
            self._hear(source, messages[0])
        if not source.open:
            selector.unregister(fd)
            self.arrivals = [a for a in self.arrivals if a.channel is not source]

    def _hear(self, channel: Channel, message: Message) -> None:
        if message.get("kind") != "meet":
            channel.send({"kind": "refused", "reason": "the run has not begun"})
            return
        reason = self._objection(message["plan"], message["node"])
        if reason is not None:
            channel.send({"kind": "refused", "reason": reason})
            return
        if message.get("only_join"):
            channel.send({"kind": "later"})  # it has no place yet at which others reach it
            return
        self.arrivals.append(_Arrival(message["node"], (message["host"], message["port"]), channel))
        channel.send({"kind": "wait"})
        self.say(f"{len(self.arrivals)} of {len(self.plan.nodes)} nodes have come")

    def _objection(self, plan: str, node: int | None) -> str | None:
        if plan != self.plan.hash:
            return (
                f"it has the plan {plan[:12]}, the others have {self.plan.hash[:12]}: file, options and model must be the same everywhere"
            )
        if node is None:
            return None
        if node not in self.plan.nodes:
            return f"the plan has no node {node}, it has {', '.join(map(str, self.plan.nodes))}"
        if any(arrival.wanted == node for arrival in self.arrivals):
            return f"node {node} has come already"
        return None

    def _seat_all(self) -> Place:
        taken = {a.wanted for a in self.arrivals if a.wanted is not None}
        free = iter(n for n in self.plan.nodes if n not in taken)
        seats = [(a.wanted if a.wanted is not None else next(free), a) for a in self.arrivals]
        secret = secrets.token_hex(16)
        book = {node: arrival.address for node, arrival in seats}
        common = {"kind": "seat", "secret": secret, "members": list(self.plan.nodes), "joining": False, "generation": -1}
        for node, arrival in seats:
            if arrival.channel is not None:
                arrival.channel.send({**common, "node": node, "book": {str(n): list(address) for n, address in book.items()}})
                arrival.channel.drain(5.0)
                arrival.channel.close()
        mine = next(node for node, arrival in seats if arrival.channel is None)
        return Place(mine, self.listener, self.host, secret, Roster(self.plan.nodes, book))
