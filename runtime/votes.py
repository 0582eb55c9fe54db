"""Who may speak for whom: votes of nodes, and proposals as they go over the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pdsl.runtime.wire import Message

__all__ = ["ballot", "majority", "named", "side_that_stays", "voters"]


def majority(side: frozenset[int], base: frozenset[int]) -> bool:
    """Whether a set of nodes may speak for `base`: more than half of it, or half with its lowest number."""
    both = side & base
    if 2 * len(both) != len(base):
        return 2 * len(both) > len(base)
    return bool(base) and min(base) in both


def side_that_stays(nodes: frozenset[int], suspicions: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The nodes that are left when suspicions are settled.

    If they part the nodes into sides, it is the largest side, of equals the one with the lowest number. Inside of it, who has most suspicions
    goes first, of equals the highest number. The same on every node that knows the same suspicions.
    """
    edges = {frozenset(pair) for pair in suspicions if set(pair) <= nodes and pair[0] != pair[1]}
    left = _largest_side(nodes, edges)
    edges = {edge for edge in edges if edge <= left}
    while edges:
        worst = max(left, key=lambda n: (sum(n in edge for edge in edges), n))
        left.remove(worst)
        edges = {edge for edge in edges if worst not in edge}
    return frozenset(left)


def _largest_side(nodes: frozenset[int], edges: AbstractSet[frozenset[int]]) -> set[int]:
    """The largest set of nodes that hold together through nodes that do not suspect each other."""
    sides, unseen = [], set(nodes)
    while unseen:
        side, fresh = set(), {min(unseen)}
        while fresh:
            side |= fresh
            unseen -= fresh
            fresh = {n for n in unseen if any(frozenset((n, known)) not in edges for known in fresh)}
        sides.append(side)
    return max(sides, key=lambda side: (len(side), -min(side)), default=set())


def voters(proposal: Mapping[str, Any]) -> frozenset[int]:
    """Who must promise: the nodes that go on, and those that leave on purpose with it."""
    return frozenset(proposal["nodes"]) | frozenset(proposal["left"])


def ballot(proposal: Mapping[str, Any]) -> list[int]:
    """What tells proposals apart and orders them: generation, then leader."""
    return [proposal["generation"], proposal["leader"]]


def named(nodes: Mapping[int, str]) -> Message:
    """As JSON has it: keys are text."""
    return {str(n): nodes[n] for n in sorted(nodes)}
