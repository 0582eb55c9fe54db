"""Rounds: every rank talks to one peer in each direction at a time, in as few rounds as the busiest rank has messages.

Koenig: the edges of a bipartite multigraph can be coloured with as many colours as its largest degree. Senders stand on one side, receivers on
the other, a colour is a round.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["colour"]


def colour(edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """A round for each message (sender, receiver), 0-based: no sender and no receiver has two in one round, and there are exactly as many
    rounds as the largest number of messages that one of them has. The same edges in the same order give the same rounds.
    """
    degree: dict[tuple[int, int], int] = {}
    for a, b in edges:
        degree[0, a] = degree.get((0, a), 0) + 1
        degree[1, b] = degree.get((1, b), 0) + 1
    rounds = max(degree.values(), default=0)
    every = (1 << rounds) - 1
    free = dict.fromkeys(degree, every)  # bits of the rounds that a vertex has free
    at: dict[tuple[int, int], list[int]] = {v: [-1] * rounds for v in degree}  # vertex, round -> edge
    found = [-1] * len(edges)

    def put(edge: int, number: int) -> None:
        bit = 1 << number
        for vertex in ((0, edges[edge][0]), (1, edges[edge][1])):
            free[vertex] &= ~bit
            at[vertex][number] = edge
        found[edge] = number

    for edge, (a, b) in enumerate(edges):
        sender, receiver = (0, a), (1, b)
        both = free[sender] & free[receiver]
        if not both:
            mine, theirs = _lowest(free[sender]), _lowest(free[receiver])
            _swap(receiver, mine, theirs, edges, free, at, found)
            both = 1 << mine
        put(edge, _lowest(both))
    return tuple(found)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _swap(
    start: tuple[int, int],
    mine: int,
    theirs: int,
    edges: Sequence[tuple[int, int]],
    free: dict[tuple[int, int], int],
    at: dict[tuple[int, int], list[int]],
    found: list[int],
) -> None:
    """Exchange two rounds along the path that begins at a receiver with round `mine`, so that the receiver has it free.

    The path cannot reach the sender of the new edge: it would come there by round `mine`, which that sender has free.
    """
    path, vertex, number = [], start, mine
    while at[vertex][number] >= 0:
        edge = at[vertex][number]
        path.append(edge)
        vertex = (0, edges[edge][0]) if vertex[0] == 1 else (1, edges[edge][1])
        number = theirs if number == mine else mine
    for edge in path:
        for vertex in ((0, edges[edge][0]), (1, edges[edge][1])):
            at[vertex][found[edge]] = -1
            free[vertex] |= 1 << found[edge]
    for edge in path:
        number = theirs if found[edge] == mine else mine
        for vertex in ((0, edges[edge][0]), (1, edges[edge][1])):
            at[vertex][number] = edge
            free[vertex] &= ~(1 << number)
        found[edge] = number
