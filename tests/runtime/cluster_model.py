"""A cluster without processes: state machines of agents, wires between them that keep order, ranks that report when they must.

`World` is copied, not changed, by `after`: so all that can happen can be tried out.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from attrs import asdict, evolve, frozen

from pdsl.runtime.happenings import (
    Action,
    Closed,
    Connected,
    End,
    Event,
    Heard,
    Host,
    Hosted,
    Note,
    RankDone,
    RankReported,
    Send,
    TellRanks,
)
from pdsl.runtime.membership import Membership
from pdsl.runtime.wire import Message

CLOSED: Message = {"kind": "the end of the wire"}


@frozen
class Rank:
    """The one rank of a node. `owes`: it must report, in `generation`. `lost` are all nodes of which it was told that they are lost."""

    generation: int = -1
    owes: bool = True
    waits: bool = False  # it has reported, or is done, and waits for what comes
    finishes: bool = False  # it says that it is done, instead of reporting
    lost: frozenset[int] = frozenset()
    decisions: tuple[Any, ...] = ()
    over: bool = False


@frozen
class Seat:
    """One node: the machine, pickled, with all that identifies it; `alive` for a process that runs."""

    machine: bytes
    key: Any
    rank: Rank
    alive: bool = True
    end: str | None = None

    def thaw(self) -> Membership:
        return pickle.loads(self.machine)  # noqa: TID251  what this process has pickled itself


Wires = tuple[tuple[tuple[int, int], tuple[Message, ...]], ...]


@frozen
class World:
    seats: tuple[Seat, ...]
    wires: dict[tuple[int, int], tuple[Message, ...]]
    kills: int = 0
    now: float = 0.0

    def key(self) -> Any:
        wires = tuple(sorted((pair, tuple(map(_plain, queue))) for pair, queue in self.wires.items() if queue))
        return (tuple((s.key, s.rank, s.alive) for s in self.seats), wires, self.kills)

    def machine(self, node: int) -> Membership:
        return self.seats[node].thaw()

    def living(self) -> frozenset[int]:
        return frozenset(i for i, s in enumerate(self.seats) if s.alive)

    def moves(self) -> Iterator[tuple[str, int, int]]:
        """All that can happen next, apart from faults."""
        for (source, target), queue in sorted(self.wires.items()):
            if queue and self.seats[target].alive:
                yield ("deliver", source, target)
        for node, seat in enumerate(self.seats):
            if seat.alive and seat.rank.owes:
                yield ("report", node, node)

    def after(self, move: tuple[str, int, int]) -> World:
        kind, source, target = move
        if kind == "kill":
            return self.kill(target)
        if kind == "report":
            seat = self.seats[target]
            world = self._seat(target, evolve(seat, rank=evolve(seat.rank, owes=False, waits=True)))
            return world.happen(target, RankDone(target) if seat.rank.finishes else RankReported(target, seat.rank.generation, {}))
        message, *rest = self.wires[source, target]
        world = evolve(self, wires={**self.wires, (source, target): tuple(rest)})
        reason = world.machine(target).knows_out(source)
        if reason is not None:  # nobody speaks with a node that is out; it is told so, if it can hear
            if message is CLOSED or message == CLOSED or not world.seats[source].alive:
                return world
            return world._put(target, source, {"kind": "out", "reason": reason})
        return world.happen(target, Closed(source) if message == CLOSED else Heard(source, message))

    def kill(self, node: int) -> World:
        """SIGKILL: what was sent arrives, then the end of the wire."""
        world = self._seat(node, evolve(self.seats[node], alive=False))
        wires = {pair: queue for pair, queue in world.wires.items() if pair[1] != node}
        for other in self.living() - {node}:
            wires[node, other] = (*wires.get((node, other), ()), CLOSED)
        return evolve(world, wires=wires, kills=self.kills + 1)

    def happen(self, node: int, event: Event) -> World:
        seat = self.seats[node]
        if not seat.alive:
            return self
        machine = seat.thaw()
        world, rank, events = self, seat.rank, [event]
        while events:
            actions = machine.handle(events.pop(0), self.now)
            events += [answer for answer in map(hosted, actions) if answer is not None]
            rank = told(rank, actions)
            world = world._perform(node, actions)
        end = next((a for a in actions if isinstance(a, End)), None)
        frozen_seat = evolve(seat_of(machine), rank=rank, end=seat.end if end is None else end.reason)
        world = world._seat(node, frozen_seat)
        return world if end is None else world._ended(node, end)

    def _ended(self, node: int, end: End) -> World:
        world = self
        for other in self.living() - {node}:
            world = world._put(node, other, end.said)
        dead = world.kill(node)
        return evolve(dead, kills=self.kills)

    def _perform(self, node: int, actions: tuple[Action, ...]) -> World:
        world = self
        for action in actions:
            assert isinstance(action, Send | TellRanks | Host | Note | End)
            if isinstance(action, Send) and world.seats[action.node].alive:
                world = world._put(node, action.node, action.message)
        return world

    def _put(self, source: int, target: int, message: Message) -> World:
        return evolve(self, wires={**self.wires, (source, target): (*self.wires.get((source, target), ()), message)})

    def _seat(self, node: int, seat: Seat) -> World:
        return evolve(self, seats=(*self.seats[:node], seat, *self.seats[node + 1 :]))


def told(rank: Rank, actions: tuple[Action, ...]) -> Rank:
    """What a rank does about what it is told: it reports after a loss, and again if a decision has nodes that are lost."""
    for action in actions:
        if not isinstance(action, TellRanks):
            continue
        message = action.message
        match message["kind"]:
            case "decision":
                decision = (
                    message["generation"],
                    tuple(message["nodes"]),
                    tuple(message["lost"]),
                    message["port"],
                    _plain(message["reports"]),
                )
                late = bool(rank.lost & set(message["nodes"]))
                rank = evolve(rank, generation=message["generation"], decisions=(*rank.decisions, decision), owes=late, waits=False)
            case "lost":
                rank = evolve(rank, lost=rank.lost | set(message["nodes"]))
                rank = evolve(rank, owes=rank.owes or not rank.waits)
            case "change":
                rank = evolve(rank, owes=rank.owes or not rank.waits)
            case "reopen":
                rank = evolve(rank, owes=True, waits=False, finishes=False)
            case "over":
                rank = evolve(rank, over=True)
    return rank


def hosted(action: Action) -> Event | None:
    """What comes of the wish for a store, at once."""
    return Hosted(action.generation, "host", 1000 + action.generation) if isinstance(action, Host) else None


def seat_of(machine: Membership) -> Seat:
    return Seat(pickle.dumps(machine), _plain(asdict(machine)), Rank(), alive=True)


def _plain(value: Any) -> Any:
    """Hashable, equal for equal states; moments do not count."""
    if isinstance(value, dict):
        return tuple(sorted((str(k), _plain(v)) for k, v in value.items() if k not in {"_heard", "_rank_heard", "_actions"}))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return str(value)


def cluster(nodes: int, silence: float = 1.0) -> World:
    """Machines that are connected with each other, before the first report."""
    everybody = frozenset(range(nodes))
    world = World(tuple(seat_of(Membership(n, frozenset({n}), everybody, silence)) for n in range(nodes)), {})
    for node in range(nodes):
        for other in everybody - {node}:
            world = world.happen(node, Connected(other))
    return world


def settled(world: World) -> World:
    """Let everything happen that can, in one order."""
    while (move := next(world.moves(), None)) is not None:
        world = world.after(move)
    return world


def running(nodes: int) -> World:
    """A cluster in generation 0, all ranks at work."""
    return settled(cluster(nodes))


def join(world: World) -> World:
    """One more node comes, connects with all, and its rank is ready."""
    node = len(world.seats)
    everybody = frozenset(range(node))
    joiner = Membership(node, frozenset({node}), everybody, 1.0, joining=True)
    world = evolve(world, seats=(*world.seats, seat_of(joiner)))
    for other in sorted(everybody):
        world = world.happen(other, Connected(node, joining=True)).happen(node, Connected(other))
    return world
