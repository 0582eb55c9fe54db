"""The transition: what must move so that holdings meet a demand. One operation for a loss, a join, a planned change and a checkpoint.

Holdings in, verified moves out; the old plan is not needed. Pure and deterministic: every rank computes the same transition and compares hashes
before the first byte. Rows of different versions never mix: the newest version of which every needed cell is left somewhere wins as a whole.

Rounds are gone through in order by all ranks. In one round a rank has at most one message to send and one to receive; the receive is posted
first. A message is a run of moves between the same two ranks, packed back to back in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import ceil

from attrs import evolve, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import Cell, box_text, cells, inside, intersect, pieces, subtract, volume
from pdsl.lowering.holdings import Holding, LogicalTensor, Need
from pdsl.lowering.rounds import colour
from pdsl.lowering.sources import Delivery, Item, Limits, choose_sources

__all__ = ["Limits", "Message", "Move", "StateLost", "Transition", "check_transition", "transition"]


@frozen
class Move:
    """A box of a tensor on its way; `source` below zero is a storage, from which the target reads by itself."""

    tensor: str
    box: Box
    source: int
    target: int


@frozen
class Message:
    """What one rank sends to another in one round: the boxes of its moves, back to back, `bytes` in all."""

    source: int
    target: int
    bytes: int
    moves: tuple[Move, ...]


@frozen(slots=False)
class Transition:
    """What to do so that every need is met with the state of `version`.

    `kept`: boxes that stay where they are. `reads`: what targets read from storages, by themselves and in any order. `rounds`: messages between
    ranks. `dropped`: rows of ranks of which their owner keeps nothing; they may still be sources, and are freed after the commit.
    `bytes_moved` counts messages, `bytes_read` reads, `bytes_kept` what stays. `busiest_sender` are the bytes that leave the busiest node for
    other nodes, `optimum` is the least that these could be, were cells cut at will and no receiver sent on.
    """

    version: int
    kept: tuple[Need, ...]
    reads: tuple[Move, ...]
    rounds: tuple[tuple[Message, ...], ...]
    dropped: tuple[Holding, ...]
    bytes_moved: int
    bytes_read: int
    bytes_kept: int
    busiest_sender: int
    optimum: int

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves between ranks, in the order of the rounds."""
        return tuple(move for messages in self.rounds for message in messages for move in message.moves)

    @cached_property
    def kept_whole(self) -> frozenset[tuple[int, str, Box]]:
        """(owner, tensor, box) of all that stays, to look up."""
        return frozenset((n.owner, n.tensor, n.box) for n in self.kept)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything in it, in hex: equal on all ranks, or no byte may flow."""
        digest = hashlib.sha256()
        for part in self._lines():
            digest.update(part.encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def _lines(self) -> Iterator[str]:
        yield f"transition 1 {self.version} {self.bytes_moved} {self.bytes_read} {self.bytes_kept} {self.busiest_sender} {self.optimum}"
        yield from (f"kept {n.owner} {n.tensor} {n.box}" for n in self.kept)
        yield from (f"read {m.source} {m.target} {m.tensor} {m.box}" for m in self.reads)
        for number, messages in enumerate(self.rounds):
            for message in messages:
                yield f"message {number} {message.source} {message.target} {message.bytes}"
                yield from (f"move {m.source} {m.target} {m.tensor} {m.box}" for m in message.moves)
        yield from (f"dropped {h.owner} {h.tensor} {h.box} {h.version}" for h in self.dropped)


class StateLost(PlanError):
    """No copy of a part of the state is left. `tensor` and `box` say which part, `version` of which step, `former` who had it."""

    def __init__(self, tensor: str, box: Box, version: int, former: tuple[int, ...], others: tuple[tuple[int, int], ...] = ()) -> None:
        """`others` are (owner, version) of copies of another version."""
        super().__init__(tensor, box, version, former, others)
        self.tensor = tensor
        self.box = box
        self.version = version
        self.former = former
        self.others = others

    def __str__(self) -> str:
        text = f"no copy is left of {self.tensor} {box_text(self.box)} at step {self.version}"
        if self.former:
            text += f": it was held by {_owners(self.former)}"
        if self.others:
            older = sorted({v for _, v in self.others}, reverse=True)
            text += "; " + "; ".join(f"{_owners(tuple(sorted({o for o, w in self.others if w == v})))} has it at step {v}" for v in older)
        return text


def _owners(owners: tuple[int, ...]) -> str:
    ranks = [str(o) for o in owners if o >= 0]
    words = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"] if ranks else []
    return " and ".join([*words, *(f"storage {-o}" for o in owners if o < 0)])


def transition(
    holdings: Iterable[Holding],
    demand: Iterable[Need],
    tensors: Sequence[LogicalTensor],
    *,
    node_of: Callable[[int], int],
    chunk_bytes: int = 4 << 20,
    limits: Limits | None = None,
    former: Iterable[Holding] = (),
) -> Transition:
    """The moves that bring every needed box to its owner.

    `holdings` are the rows of the live ranks and of storages; `former` are rows that were lost, for the message alone. `node_of` tells the node
    of a rank, `chunk_bytes` the largest message (one element may be larger). Neither the order of rows nor their doubles matter.

    Raises StateLost if no version is complete, naming a cell that the newest one lacks; ValueError for a need of an unknown tensor.
    """
    limits = evolve(limits or Limits(), chunk=chunk_bytes)
    table = _Table(holdings, demand, tensors)
    version = table.newest(former)
    bundles = table.bundles(version)
    items = [Item(index, cell, sum(t.item_bytes for t in bundle)) for index, (bundle, found) in enumerate(bundles) for cell in found]
    kept = tuple(Need(n, t.name, i.cell.box) for i in items for n in i.cell.needers if n in i.cell.holders for t in bundles[i.bundle][0])
    sources = choose_sources(items, node_of, limits)
    moves = _Moves(items, [bundle for bundle, _ in bundles])
    reads = tuple(m for d in sources.reads for m, _ in moves.of(d, None))
    rounds: list[tuple[Message, ...]] = []
    for level in range(1 + max((d.level for d in sources.deliveries), default=-1)):
        rounds += _rounds(_messages((d for d in sources.deliveries if d.level == level), moves, chunk_bytes))
    leaving: dict[int, int] = {}
    for message in (m for messages in rounds for m in messages):
        node = node_of(message.source)
        if node != node_of(message.target):
            leaving[node] = leaving.get(node, 0) + message.bytes
    size = {t.name: t.item_bytes for t in tensors}
    return Transition(
        version=version,
        kept=kept,
        reads=reads,
        rounds=tuple(rounds),
        dropped=table.dropped(kept, version),
        bytes_moved=sum(m.bytes for messages in rounds for m in messages),
        bytes_read=sum(volume(m.box) * size[m.tensor] for m in reads),
        bytes_kept=sum(volume(n.box) * size[n.tensor] for n in kept),
        busiest_sender=max(leaving.values(), default=0),
        optimum=ceil(sources.optimum),
    )


_Rows = tuple[tuple[int, Box], ...]
_Bundle = tuple[tuple[LogicalTensor, ...], tuple[Cell, ...]]


class _Table:
    """Rows by tensor and version. Tensors with the same rows have the same cells, which are found once."""

    def __init__(self, holdings: Iterable[Holding], demand: Iterable[Need], tensors: Sequence[LogicalTensor]) -> None:
        self._tensors = tensors
        known = {t.name for t in tensors}
        held: dict[str, dict[int, set[tuple[int, Box]]]] = {t.name: {} for t in tensors}
        needed: dict[str, set[tuple[int, Box]]] = {t.name: set() for t in tensors}
        self._rows = tuple(h for h in holdings if volume(h.box))
        for h in self._rows:
            if h.tensor in known:
                held[h.tensor].setdefault(h.version, set()).add((h.owner, h.box))
        for n in demand:
            if n.tensor not in known:
                raise ValueError(f"{n.tensor} is needed by rank {n.owner}, and is none of the tensors that were given")
            if volume(n.box):
                needed[n.tensor].add((n.owner, n.box))
        self._held = held
        self._needed: dict[str, _Rows] = {name: tuple(sorted(rows)) for name, rows in needed.items()}
        self._cells: dict[tuple[_Rows, _Rows], tuple[Cell, ...]] = {}

    def newest(self, former: Iterable[Holding]) -> int:
        """The newest complete version; 0 if nothing is needed and nothing is held."""
        versions = sorted({v for by_version in self._held.values() for v in by_version}, reverse=True)
        lost: StateLost | None = None
        for version in versions:
            found = self._missing(version)
            if found is None:
                return version
            lost = lost or self._lost(*found, version, former)
        nothing = self._missing(0)
        if nothing is not None:
            raise lost or self._lost(*nothing, max((h.version for h in former), default=0), former)
        return 0

    def bundles(self, version: int) -> list[_Bundle]:
        """Tensors of one group that have the same cells, with those, in the order of the tensors."""
        found: dict[tuple[str, int], list[LogicalTensor]] = {}
        shared: dict[int, tuple[Cell, ...]] = {}
        for t in self._tensors:
            parts = self._of(t.name, version)
            shared[id(parts)] = parts
            found.setdefault((t.group, id(parts)), []).append(t)
        return [(tuple(members), shared[key]) for (_, key), members in found.items() if shared[key]]

    def dropped(self, kept: Sequence[Need], version: int) -> tuple[Holding, ...]:
        """Rows of ranks of which the owner keeps nothing."""
        staying: dict[tuple[int, str], list[Box]] = {}
        for n in kept:
            staying.setdefault((n.owner, n.tensor), []).append(n.box)
        gone = {h for h in self._rows if h.owner >= 0 and (h.version != version or not _meets(h, staying))}
        return tuple(sorted(gone, key=lambda h: (h.tensor, h.owner, h.box, h.version)))

    def _of(self, tensor: str, version: int) -> tuple[Cell, ...]:
        held = tuple(sorted(self._held[tensor].get(version, ())))
        key = (held, self._needed[tensor])
        if key not in self._cells:
            self._cells[key] = cells(*key)
        return self._cells[key]

    def _missing(self, version: int) -> tuple[str, Cell] | None:
        for t in self._tensors:
            for cell in self._of(t.name, version):
                if not cell.holders:
                    return t.name, cell
        return None

    def _lost(self, tensor: str, cell: Cell, version: int, former: Iterable[Holding]) -> StateLost:
        theirs = {h.owner for h in former if h.tensor == tensor and h.version == version and intersect(h.box, cell.box) is not None}
        others = {
            (owner, v)
            for v, rows in self._held[tensor].items()
            if v != version
            for owner, box in rows
            if intersect(box, cell.box) is not None
        }
        return StateLost(tensor, cell.box, version, tuple(sorted(theirs)), tuple(sorted(others)))


def _meets(row: Holding, boxes: dict[tuple[int, str], list[Box]]) -> bool:
    return any(intersect(row.box, b) is not None for b in boxes.get((row.owner, row.tensor), []))


class _Moves:
    """From deliveries of bundles to moves of tensors."""

    def __init__(self, items: Sequence[Item], bundles: Sequence[tuple[LogicalTensor, ...]]) -> None:
        self._items = items
        self._bundles = bundles

    def of(self, delivery: Delivery, chunk: int | None) -> Iterator[tuple[Move, int]]:
        """Moves with their bytes, each of at most `chunk` bytes."""
        for t in self._bundles[self._items[delivery.item].bundle]:
            most = volume(delivery.box) if chunk is None else max(1, chunk // t.item_bytes)
            for box in pieces(delivery.box, most):
                yield Move(t.name, box, delivery.source, delivery.target), volume(box) * t.item_bytes


def _messages(deliveries: Iterable[Delivery], moves: _Moves, chunk: int) -> list[Message]:
    """Moves between the same two ranks packed into messages, in the order of sender and receiver."""
    by_pair: dict[tuple[int, int], list[tuple[Move, int]]] = {}
    for d in deliveries:
        by_pair.setdefault((d.source, d.target), []).extend(moves.of(d, chunk))
    found = []
    for (source, target), pending in sorted(by_pair.items()):
        batch: list[Move] = []
        total = 0
        for move, size in pending:
            if batch and total + size > chunk:
                found.append(Message(source, target, total, tuple(batch)))
                batch, total = [], 0
            batch.append(move)
            total += size
        found.append(Message(source, target, total, tuple(batch)))
    return found


def _rounds(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    numbers = colour([(m.source, m.target) for m in messages])
    found: list[list[Message]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for message, number in zip(messages, numbers, strict=True):
        found[number].append(message)
    return [tuple(messages) for messages in found]


def check_transition(found: Transition, holdings: Iterable[Holding], demand: Iterable[Need]) -> tuple[str, ...]:
    """What is wrong with a transition; empty if nothing is.

    Every needed box is covered exactly once by what is kept, read and moved; every source has what it sends, at the version of the
    transition, before the round in which it sends it; nobody sends or receives twice in a round; every row of a rank is kept in part or dropped.
    """
    rows = tuple(holdings)
    needs = {(n.owner, n.tensor): n.box for n in demand if volume(n.box)}
    held: dict[tuple[int, str], list[Box]] = {}
    for h in rows:
        if h.version == found.version:
            held.setdefault((h.owner, h.tensor), []).append(h.box)
    return (
        *_covered(found, needs),
        *(f"rank {n.owner} keeps {n.tensor} {box_text(n.box)}, which it does not hold" for n in found.kept if not _has(held, n.owner, n)),
        *(f"storage {-m.source} does not have {m.tensor} {box_text(m.box)}" for m in found.reads if not _has(held, m.source, m)),
        *_played(found, held),
        *_accounted(found, rows),
    )


def _has(held: dict[tuple[int, str], list[Box]], owner: int, row: Need | Move) -> bool:
    return not subtract(row.box, held.get((owner, row.tensor), []))


def _covered(found: Transition, needs: dict[tuple[int, str], Box]) -> Iterator[str]:
    given: dict[tuple[int, str], list[Box]] = {}
    for n in found.kept:
        given.setdefault((n.owner, n.tensor), []).append(n.box)
    for m in (*found.reads, *found.moves):
        given.setdefault((m.target, m.tensor), []).append(m.box)
    for key in sorted(given.keys() | needs.keys()):
        owner, tensor = key
        if key not in needs:
            yield f"rank {owner} is given {tensor}, which it does not need"
            continue
        box, parts = needs[key], sorted(given.get(key, []))
        yield from (f"rank {owner} is given {tensor} {box_text(p)}, of which it needs {box_text(box)}" for p in parts if not inside(p, box))
        for left in subtract(box, parts):
            yield f"rank {owner} is not given {tensor} {box_text(left)}"
        if sum(map(volume, parts)) > volume(box):
            yield f"rank {owner} is given parts of {tensor} {box_text(box)} twice"


def _played(found: Transition, held: dict[tuple[int, str], list[Box]]) -> Iterator[str]:
    """Go through the rounds: what was received may be sent from the next round on."""
    now = {key: list(boxes) for key, boxes in held.items()}
    for number, messages in enumerate(found.rounds):
        for what, ends in (("sends", [m.source for m in messages]), ("receives", [m.target for m in messages])):
            yield from (f"rank {r} {what} twice in round {number}" for r in sorted({r for r in ends if ends.count(r) > 1}))
        for message in messages:
            if any((m.source, m.target) != (message.source, message.target) for m in message.moves):
                yield f"a message from rank {message.source} to rank {message.target} in round {number} holds moves of others"
        for move in (m for message in messages for m in message.moves):
            if not _has(now, move.source, move):
                yield f"rank {move.source} sends {move.tensor} {box_text(move.box)} in round {number}, and does not have it"
        for move in (m for message in messages for m in message.moves):
            now.setdefault((move.target, move.tensor), []).append(move.box)


def _accounted(found: Transition, rows: Sequence[Holding]) -> Iterator[str]:
    kept: dict[tuple[int, str], list[Box]] = {}
    for n in found.kept:
        kept.setdefault((n.owner, n.tensor), []).append(n.box)
    dropped = set(found.dropped)
    for h in rows:
        stays = h.version == found.version and _meets(h, kept)
        if h.owner >= 0 and volume(h.box) and stays == (h in dropped):
            yield f"rank {h.owner}: {h.tensor} {box_text(h.box)} is {'kept and dropped' if stays else 'neither kept nor dropped'}"
