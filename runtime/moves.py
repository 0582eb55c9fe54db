"""Carrying out a transition: what a rank keeps, reads and receives becomes the state of its next part; the old one stays untouched.

Rounds are gone through in order. The receive of a round is posted before the send, both without waiting, so a ring of moves cannot block. Every
message carries a checksum of its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from attrs import frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import Box, box_shape
from pdsl.lowering.cells import inside
from pdsl.lowering.holdings import SCALARS, Need
from pdsl.lowering.plan import Plan
from pdsl.lowering.transition import Message, Move, Transition
from pdsl.runtime.digest import checksum, digest
from pdsl.runtime.groups import CrossGroup
from pdsl.runtime.part import BUFFER

__all__ = ["Placed", "carry_out", "compare_digests", "dtype_in", "same_everywhere"]


@frozen(eq=False)
class Placed:
    """A local tensor and the box of the logical tensor that it is."""

    tensor: torch.Tensor
    box: Box

    def part(self, box: Box) -> torch.Tensor:
        """The view of a box that lies inside."""
        inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, self.box, strict=True))
        return self.tensor[inner]


def carry_out(
    transition: Transition,
    rank: int,
    needs: Mapping[str, Need],
    held: Mapping[str, Placed],
    dtype_of: Callable[[str], torch.dtype],
    group: CrossGroup | None,
    read: Callable[[Move], torch.Tensor] | None = None,
) -> dict[str, Placed]:
    """The state that a rank needs, by tensor name. What it holds already in the right box is handed on as it is, not copied.

    `needs` are this rank's, `held` is what it has. `read` gives the values of a move from a storage. Raises RunError if what arrives is not
    what was sent, or if something that a source should have is not there.
    """
    device = group.device if group is not None else torch.device("cpu")
    found: dict[str, Placed] = {}
    for name, need in needs.items():
        mine = held.get(name)
        if mine is not None and mine.box == need.box and _all_kept(transition, rank, need):
            found[name] = mine
            continue
        found[name] = Placed(torch.empty(box_shape(need.box), dtype=dtype_of(name), device=device), need.box)
    for kept in transition.kept:
        if kept.owner == rank and found[kept.tensor] is not held.get(kept.tensor):
            found[kept.tensor].part(kept.box).copy_(held[kept.tensor].part(kept.box))
    for move in transition.reads:
        if move.target == rank:
            if read is None:
                raise RunError(f"{move.tensor} is to be read from a storage, and there is none")
            found[move.tensor].part(move.box).copy_(read(move))
    for number, messages in enumerate(transition.rounds):
        _round(number, messages, rank, found, held, group)
    return found


def _all_kept(transition: Transition, rank: int, need: Need) -> bool:
    return (rank, need.tensor, need.box) in transition.kept_whole


def _round(
    number: int, messages: tuple[Message, ...], rank: int, found: Mapping[str, Placed], held: Mapping[str, Placed], group: CrossGroup | None
) -> None:
    incoming = next((m for m in messages if m.target == rank), None)
    outgoing = next((m for m in messages if m.source == rank), None)
    if incoming is None and outgoing is None:
        return
    if group is None:
        raise RunError("a transition has moves between ranks, and there is one rank")
    works = []
    buffer = torch.empty(incoming.bytes + _CHECK, dtype=torch.uint8, device=group.device) if incoming is not None else None
    if incoming is not None and buffer is not None:
        works.append(group.receive(buffer, incoming.source, number))
    if outgoing is not None:
        packed = _pack(outgoing, found, held)
        works.append(group.send(packed, outgoing.target, number))
    for work in works:
        work.wait()
    if incoming is not None and buffer is not None:
        _unpack(incoming, buffer, found)


_CHECK = 8  # bytes of the checksum behind the values


def _pack(message: Message, found: Mapping[str, Placed], held: Mapping[str, Placed]) -> torch.Tensor:
    parts = []
    for move in message.moves:
        if move.tensor not in held and move.tensor not in found:
            raise RunError(f"{move.tensor} is to be sent to rank {message.target}, and is not here")
        parts.append(_have(move.tensor, move.box, held, found).part(move.box).contiguous().reshape(-1).view(torch.uint8))
    values = torch.cat(parts)
    check = torch.tensor([checksum(values) & _MASK], dtype=torch.int64, device=values.device).view(torch.uint8)
    return torch.cat([values, check])


_MASK = (1 << 63) - 1


def dtype_in(plan: Plan, tensor: str) -> torch.dtype:
    """The dtype of a tensor of the state: that of its parameter, or fp32 for the numbers that an optimizer counts."""
    kind, _, name = tensor.partition("/")
    if kind in SCALARS:
        return torch.float32
    known = plan.facts.updated if kind == BUFFER else plan.facts.parameters
    found = next(facts.dtype for facts in known if facts.name == name)
    dtype: torch.dtype = getattr(torch, found)
    return dtype


def same_everywhere(group: CrossGroup | None, text: str) -> None:
    """All ranks of a group come here with the same text. Raises RunError if not."""
    if group is None:
        return
    mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _MASK
    others = [int(t) for t in group.gather(torch.tensor([mine], dtype=torch.int64, device=group.device))]
    different = [rank for rank, value in zip(group.ranks, others, strict=True) if value != mine]
    if different:
        raise RunError(f"rank {different[0]} has come to another plan or other moves than the rest: all ranks must find the same")


def compare_digests(
    group: CrossGroup | None,
    moves: Transition,
    rank: int,
    held: Mapping[str, Placed],
    found: Mapping[str, Placed],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """What moved is the same as a whole at those who gave it and at those who have it now. Raises RunError if not; all ranks come here."""
    if group is None or not moves.rounds:
        return
    before = sum(_digest(held[n.tensor], n.box, shapes[n.tensor]) for n in moves.cover_before if n.owner == rank)
    after = sum(_digest(found[n.tensor], n.box, shapes[n.tensor]) for n in moves.cover_after if n.owner == rank)
    mine = torch.tensor([before & _MASK, after & _MASK], dtype=torch.int64, device=group.device)
    everyone = torch.stack(group.gather(mine)).tolist()
    if (sum(b for b, _ in everyone) - sum(a for _, a in everyone)) & _MASK:
        raise RunError("tensors were moved, and together they are not what they were: the digests before and after differ")


def _digest(placed: Placed, box: Box, shape: tuple[int, ...]) -> int:
    return digest(placed.part(box), box, shape)


def _have(tensor: str, box: Box, held: Mapping[str, Placed], found: Mapping[str, Placed]) -> Placed:
    """What this rank has of a box: what it held, or what came in an earlier round and is sent on."""
    mine = held.get(tensor)
    return mine if mine is not None and inside(box, mine.box) else found[tensor]


def _unpack(message: Message, buffer: torch.Tensor, found: Mapping[str, Placed]) -> None:
    values = buffer[: message.bytes]
    told = int(buffer[message.bytes :].clone().view(torch.int64))
    if told != checksum(values) & _MASK:
        names = sorted({m.tensor for m in message.moves})
        raise RunError(
            f"{names[0]} and {len(names) - 1} more from rank {message.source} did not arrive as they were sent: the checksums differ"
        )
    offset = 0
    for move in message.moves:
        target = found[move.tensor].part(move.box)
        size = target.numel() * target.element_size()
        target.copy_(values[offset : offset + size].clone().view(target.dtype).view(target.shape))
        offset += size
