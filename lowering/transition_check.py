"""What is wrong with a transition: looked at from the rows alone, without trust in how it was found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import box_text, inside, subtract, volume
from pdsl.lowering.holdings import Holding, Need
from pdsl.lowering.tables import meets
from pdsl.lowering.transition import Move, Transition

__all__ = ["check_transition"]


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
        stays = h.version == found.version and meets(h, kept)
        if h.owner >= 0 and volume(h.box) and stays == (h in dropped):
            yield f"rank {h.owner}: {h.tensor} {box_text(h.box)} is {'kept and dropped' if stays else 'neither kept nor dropped'}"
