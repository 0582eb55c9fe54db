"""Do rows with sends and receives run to their end on a given kind of backend, and does every message reach the right hands?

Backends differ in what a send promises. Each kind is turned into a graph over computations and transfers, a transfer being one event of two
positions; a circle in it is a deadlock. Matching without tags is by order: the n-th send of a direction meets the n-th receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from attrs import frozen

from pdsl.lowering.schedule import Op, Operation, Receive, Rows, Send, Transfer

__all__ = ["Semantics", "find_deadlock"]

Place: TypeAlias = tuple[int, int]
"""Position and index in its row."""


class Semantics(Enum):
    """What a backend promises, from weak to strong.

    `RENDEZVOUS`: a send blocks until it is received, a receive until it is sent. `PAIR_QUEUE`: posting returns at once, but all transfers between
    two positions, both ways, run one after another in the order of posting (NCCL on one communicator). `DIRECTION_QUEUE`: the same with one
    queue for each direction.
    """

    RENDEZVOUS = "blocking rendezvous"
    PAIR_QUEUE = "one queue per pair"
    DIRECTION_QUEUE = "one queue per direction"


@frozen
class _Edge:
    """In the row of `position`, action `later` waits for action `earlier`."""

    position: int
    earlier: int
    later: int


def find_deadlock(rows: Rows, semantics: Semantics) -> tuple[str, ...]:
    """Findings for rows under one kind of backend; empty if they run and every message arrives where it is meant.

    Told are sends without receives, operations before their receive or after their send, swapped messages, and a hang with the circle of
    actions that wait for each other; also operations that receive no input. Positions and actions count from 0.
    """
    matched, unmatched = _match(rows)
    misplaced = (*_misplaced(rows), *_starved(rows))
    if unmatched or misplaced:
        return (*unmatched, *misplaced)
    swapped = tuple(_swapped(rows, matched))
    partner = {receive: send for send, receive in matched}
    circle = _circle(rows, semantics, partner)
    return (*swapped, _tell(rows, semantics, circle)) if circle else swapped


def _match(rows: Rows) -> tuple[tuple[tuple[Place, Place], ...], tuple[str, ...]]:
    """Places of (send, receive) that meet, by their order in each direction; and what is left over."""
    sends: dict[tuple[int, int], list[Place]] = {}
    receives: dict[tuple[int, int], list[Place]] = {}
    for position, row in enumerate(rows):
        for index, item in enumerate(row):
            if isinstance(item, Send):
                sends.setdefault((position, item.transfer.receiver), []).append((position, index))
            elif isinstance(item, Receive):
                receives.setdefault((item.transfer.sender, position), []).append((position, index))
    matched: list[tuple[Place, Place]] = []
    findings: list[str] = []
    for way in sorted({*sends, *receives}):
        out, into = sends.get(way, []), receives.get(way, [])
        matched += zip(out, into, strict=False)
        findings += [f"{_at(rows, place)} meets no receive" for place in out[len(into) :]]
        findings += [f"{_at(rows, place)} meets no send" for place in into[len(out) :]]
    return tuple(matched), tuple(findings)


def _at(rows: Rows, place: Place) -> str:
    return f"position {place[0]}, action {place[1]}: {rows[place[0]][place[1]]}"


def _produced_by(transfer: Transfer) -> tuple[tuple[Op, int, int], ...]:
    ops = (Op.FORWARD,) if transfer.kind == "activation" else (Op.BACKWARD, Op.BACKWARD_INPUT)
    return tuple((op, transfer.from_stage, transfer.microbatch) for op in ops)


def _used_by(transfer: Transfer) -> tuple[tuple[Op, int, int], ...]:
    ops = (Op.FORWARD,) if transfer.kind == "activation" else (Op.BACKWARD, Op.BACKWARD_INPUT)
    return tuple((op, transfer.to_stage, transfer.microbatch) for op in ops)


def _misplaced(rows: Rows) -> Iterator[str]:
    for position, row in enumerate(rows):
        at = {(o.op, o.stage, o.microbatch): i for i, o in enumerate(row) if isinstance(o, Operation)}
        for index, item in enumerate(row):
            if isinstance(item, Send):
                made = [at[key] for key in _produced_by(item.transfer) if key in at]
                if not made or made[0] > index:
                    yield f"{_at(rows, (position, index))} before it is computed"
            elif isinstance(item, Receive):
                used = [at[key] for key in _used_by(item.transfer) if key in at]
                if not used or used[0] < index:
                    yield f"{_at(rows, (position, index))} after its use"


def _starved(rows: Rows) -> Iterator[str]:
    """Operations whose input is neither computed in their own row nor received by it."""
    last = max((o.stage for row in rows for o in row if isinstance(o, Operation)), default=0)
    for position, row in enumerate(rows):
        at_hand: set[tuple[Op, int, int]] = set()
        for item in row:
            if isinstance(item, Operation):
                at_hand.add((item.op, item.stage, item.microbatch))
            elif isinstance(item, Receive):
                at_hand.update(_produced_by(item.transfer))
        for index, item in enumerate(row):
            if not isinstance(item, Operation) or item.op is Op.BACKWARD_WEIGHT:
                continue
            forward = item.op is Op.FORWARD
            source = item.stage - 1 if forward else item.stage + 1
            ops = (Op.FORWARD,) if forward else (Op.BACKWARD, Op.BACKWARD_INPUT)
            if 0 <= source <= last and not at_hand.intersection((op, source, item.microbatch) for op in ops):
                yield f"{_at(rows, (position, index))} without its {'activation' if forward else 'gradient'} from stage {source}"


def _swapped(rows: Rows, matched: Sequence[tuple[Place, Place]]) -> Iterator[str]:
    for out, into in matched:
        sent, received = rows[out[0]][out[1]], rows[into[0]][into[1]]
        if isinstance(sent, Send) and isinstance(received, Receive) and sent.transfer != received.transfer:
            yield f"swapped messages: {_at(rows, out)} meets {_at(rows, into)}"


# --- the graph of waiting ---------------------------------------------------------------------------------------------------------------


def _edges(rows: Rows, semantics: Semantics) -> Iterator[_Edge]:
    """Who waits for whom inside each row; edges between rows arise because send and receive are one node."""
    for position, row in enumerate(rows):
        if semantics is Semantics.RENDEZVOUS:
            yield from (_Edge(position, i - 1, i) for i in range(1, len(row)))
            continue
        computed = -1
        last: dict[tuple[int, bool], int] = {}
        arriving: dict[tuple[Op, int, int], int] = {}
        for index, item in enumerate(row):
            if computed >= 0:
                yield _Edge(position, computed, index)
            if isinstance(item, Operation):
                computed = index
                source = arriving.pop((item.op, item.stage, item.microbatch), None)
                if source is not None:
                    yield _Edge(position, source, index)
                continue
            outward = isinstance(item, Send)
            peer = item.transfer.receiver if outward else item.transfer.sender
            queue = (peer, outward if semantics is Semantics.DIRECTION_QUEUE else False)
            if queue in last:
                yield _Edge(position, last[queue], index)
            last[queue] = index
            if not outward:
                arriving.update((key, index) for key in _used_by(item.transfer))


def _circle(rows: Rows, semantics: Semantics, partner: Mapping[Place, Place]) -> tuple[_Edge, ...]:
    """The shortest circle of waiting through any node that cannot finish, or nothing. A transfer is named by the place of its send."""
    waits: dict[Place, list[tuple[Place, _Edge]]] = {}
    users: dict[Place, list[Place]] = {}
    for edge in _edges(rows, semantics):
        earlier, later = (edge.position, edge.earlier), (edge.position, edge.later)
        source, target = partner.get(earlier, earlier), partner.get(later, later)
        waits.setdefault(target, []).append((source, edge))
        users.setdefault(source, []).append(target)
    counts = {node: len(sources) for node, sources in waits.items()}
    done = deque(node for node in users if node not in counts)
    while done:
        for target in users.get(done.popleft(), ()):
            counts[target] -= 1
            if not counts[target]:
                del counts[target]
                done.append(target)
    best: tuple[_Edge, ...] = ()
    # Nodes downstream of a circle are stuck too and lie on none, so several starts are tried; a bound keeps this cheap on huge rows.
    for start in sorted(counts)[:_STARTS]:
        found = _shortest(start, waits, counts)
        if found and (not best or len(found) < len(best)):
            best = found
    return best or _any_circle(waits, counts)


_STARTS = 64


def _shortest(start: Place, waits: Mapping[Place, list[tuple[Place, _Edge]]], stuck: Mapping[Place, int]) -> tuple[_Edge, ...]:
    """The shortest way from a node back to itself along who it waits for."""
    came: dict[Place, tuple[Place, _Edge]] = {}
    front = deque([start])
    while front:
        node = front.popleft()
        for source, edge in waits.get(node, ()):
            if source not in stuck or source in came:
                continue
            came[source] = (node, edge)
            if source == start:
                return _walk(start, came)
            front.append(source)
    return ()


def _walk(start: Place, came: Mapping[Place, tuple[Place, _Edge]]) -> tuple[_Edge, ...]:
    path = []
    node = start
    while True:
        node, edge = came[node]
        path.append(edge)
        if node == start:
            return tuple(reversed(path))


def _any_circle(waits: Mapping[Place, list[tuple[Place, _Edge]]], stuck: Mapping[Place, int]) -> tuple[_Edge, ...]:
    """Some circle: whoever is stuck waits for another that is, so following them must come back."""
    if not stuck:
        return ()
    order: dict[Place, int] = {}
    edges: list[_Edge] = []
    node = min(stuck)
    while node not in order:
        order[node] = len(edges)
        node, edge = next((source, edge) for source, edge in waits[node] if source in stuck)
        edges.append(edge)
    return tuple(edges[order[node] :])


def _tell(rows: Rows, semantics: Semantics, circle: Sequence[_Edge]) -> str:
    """One clause per position that takes part: what it cannot do before what."""
    merged: list[_Edge] = []
    for edge in circle:
        if merged and merged[-1].position == edge.position and merged[-1].earlier == edge.later:
            merged[-1] = _Edge(edge.position, edge.earlier, merged[-1].later)
        else:
            merged.append(edge)
    if len(merged) > 1 and merged[0].position == merged[-1].position and merged[-1].earlier == merged[0].later:
        merged[0] = _Edge(merged[0].position, merged[0].earlier, merged.pop().later)
    clauses = [
        f"position {e.position} does action {e.later} ({rows[e.position][e.later]}) only after action {e.earlier} ({rows[e.position][e.earlier]})"
        for e in merged
    ]
    return f"hang with {semantics.value}: " + "; ".join(clauses)
