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

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import pieces, volume
from pdsl.lowering.covers import covers, kept_boxes
from pdsl.lowering.holdings import Holding, LogicalTensor, Need
from pdsl.lowering.rounds import colour
from pdsl.lowering.sources import Delivery, Item, Limits, choose_sources
from pdsl.lowering.tables import StateLost, Table

__all__ = ["Limits", "Message", "Move", "StateLost", "Transition", "transition"]


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
    `cover_before` and `cover_after` are what to compare: the sums of digests over both are equal. `bytes_moved` counts messages, `bytes_read` reads, `bytes_kept` what stays. `busiest_sender` are the bytes that leave the busiest node for
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
    cover_before: tuple[Need, ...] = ()
    cover_after: tuple[Need, ...] = ()

    @cached_property
    def kept_whole(self) -> frozenset[tuple[int, str, Box]]:
        """(owner, tensor, box) of what is kept. A need that is kept whole has one row, whatever cells the needs of others cut it into."""
        return frozenset((n.owner, n.tensor, n.box) for n in self.kept)

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves between ranks, in the order of the rounds."""
        return tuple(move for messages in self.rounds for message in messages for move in message.moves)

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
    table = Table(holdings, demand, tensors)
    version = table.newest(tuple(former))
    bundles = table.bundles(version)
    items = [Item(index, cell, sum(t.item_bytes for t in bundle)) for index, (bundle, found) in enumerate(bundles) for cell in found]
    staying = kept_boxes(bundles, table)
    kept = tuple(Need(owner, t.name, box) for index, rows in staying.items() for owner, box in rows for t in bundles[index][0])
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
    before, after = covers(items, bundles, sources.deliveries, table, version)
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
        cover_before=before,
        cover_after=after,
    )


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
