"""Transitions carried out on tensors in one process: what the ranks have, and what they have after the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pdsl.lowering.boxes import Box
from pdsl.lowering.holdings import Holding, LogicalTensor, Need
from pdsl.lowering.transition import Move, Transition

__all__ = ["State", "apply", "index_tensors", "local", "part", "placed"]

State = dict[tuple[int, str], list[tuple[Box, torch.Tensor]]]


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in box)]


def index_tensors(tensors: Iterable[LogicalTensor]) -> dict[str, torch.Tensor]:
    """Tensors whose elements are all different: their global index, and a number of the tensor."""
    return {t.name: torch.arange(t.bytes // t.item_bytes).reshape(t.shape) + 1_000_000 * (i + 1) for i, t in enumerate(tensors)}


def placed(wholes: Mapping[str, torch.Tensor], rows: Iterable[Holding]) -> State:
    """What every owner has of them."""
    found: State = {}
    for h in rows:
        found.setdefault((h.owner, h.tensor), []).append((h.box, part(wholes[h.tensor], h.box).clone()))
    return found


def local(state: State, owner: int, tensor: str, box: Box) -> torch.Tensor:
    """A box of what an owner has, put together from its parts. Fails where a part is missing."""
    parts = state[owner, tensor]
    found = torch.full([b - a for a, b in box], -1, dtype=parts[0][1].dtype)
    for theirs, values in parts:
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, theirs, strict=True))
        if all(a < b for a, b in shared):
            into = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, box, strict=True))
            out = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, theirs, strict=True))
            found[into] = values[out]
    assert (found != -1).all(), f"{owner} lacks a part of {tensor} {box}"
    return found


def apply(found: Transition, state: State, needs: Iterable[Need]) -> State:
    """The state after a transition: only what is needed, each need as one box."""
    now: State = {key: list(parts) for key, parts in state.items()}

    def give(move: Move) -> None:
        now.setdefault((move.target, move.tensor), []).append((move.box, local(now, move.source, move.tensor, move.box)))

    for move in found.reads:
        give(move)
    for messages in found.rounds:
        for move in [m for message in messages for m in message.moves]:
            give(move)
    return {(n.owner, n.tensor): [(n.box, local(now, n.owner, n.tensor, n.box))] for n in needs}
