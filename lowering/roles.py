"""Who plays which part: roles of a new plan matched to live nodes, so that most bytes are already where they are needed.

Choosing who plays which part fixes how many bytes must move at all; choosing sources only balances them. Exact, by the Hungarian method with
potentials, O(n^3); among all best matchings the one that is returned does not depend on anything but the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import intersect, volume
from pdsl.lowering.holdings import Holding, LogicalTensor, Need

__all__ = ["assign_roles", "role_weights"]


def role_weights(
    holdings: Iterable[Holding],
    demand: Iterable[Need],
    tensors: Sequence[LogicalTensor],
    *,
    roles: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Bytes that each node has of what each role needs: `weights[role][node]` for `assign_roles`.

    A role is a tuple of owners of `demand`, a node a tuple of ranks; the i-th rank of a node would take the part of the i-th owner of the role.
    Rows of older versions than the newest count nothing.
    """
    item = {t.name: t.item_bytes for t in tensors}
    seat = {owner: (r, i) for r, owners in enumerate(roles) for i, owner in enumerate(owners)}
    place = {rank: (n, i) for n, ranks in enumerate(nodes) for i, rank in enumerate(ranks)}
    rows = [h for h in holdings if h.owner in place]
    newest = max((h.version for h in rows), default=0)
    held: dict[tuple[str, int], list[tuple[int, Box]]] = {}
    for h in rows:
        if h.version == newest:
            node, index = place[h.owner]
            held.setdefault((h.tensor, index), []).append((node, h.box))
    weights = [[0] * len(nodes) for _ in roles]
    for need in demand:
        if need.owner not in seat:
            continue
        role, index = seat[need.owner]
        for node, box in held.get((need.tensor, index), ()):
            shared = intersect(need.box, box)
            if shared is not None:
                weights[role][node] += volume(shared) * item[need.tensor]
    return weights


def assign_roles(weights: Sequence[Sequence[int]], current: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """The node for each role such that the sum of `weights[role][node]` is largest.

    `weights` are the bytes that a node has of what the role needs, integers of 0 or more; there are at least as many nodes as roles.
    `current` is the node that has each role so far, or None. Of matchings of equal weight the one with most roles left where they are wins,
    of those the first in order of (node of role 0, node of role 1, ...). Raises ValueError for ragged rows, negative weights or too few nodes.
    """
    roles = len(weights)
    if not roles:
        return ()
    nodes = len(weights[0])
    if any(len(row) != nodes for row in weights):
        raise ValueError("rows of weights have different lengths: every role needs one weight for each node")
    if nodes < roles:
        raise ValueError(f"{roles} roles for {nodes} nodes: each role needs a node of its own")
    if any(w < 0 for row in weights for w in row):
        raise ValueError("weights are bytes, 0 or more")
    before = list(current) if current is not None else [None] * roles
    # a byte counts more than all roles that could stay; roles that exist only to make the table square weigh nothing
    costs = [[-(w * (roles + 1) + (before[r] == n)) for n, w in enumerate(row)] for r, row in enumerate(weights)]
    costs += [[0] * nodes for _ in range(nodes - roles)]
    matched, tight = _matching(costs)
    return _first(matched, tight, roles)


def _matching(costs: list[list[int]]) -> tuple[list[int], list[int]]:
    """A perfect matching of least cost (node of each row), and for each row the bits of nodes that a matching of least cost may give it.

    With potentials of an optimum, a matching is best exactly if all its entries cost the sum of their potentials.
    """
    n = len(costs)
    rows, columns = [0] * n, [0] * n
    owner = [-1] * n
    for row in range(n):
        reached, end = _shortest(row, costs, rows, columns, owner)
        length = reached[end][0]
        rows[row] += length
        for column, (distance, _) in reached.items():
            if column != end and owner[column] >= 0 and distance < length:
                rows[owner[column]] += length - distance
                columns[column] -= length - distance
        while end >= 0:
            before = reached[end][1]
            owner[end] = owner[before] if before >= 0 else row
            end = before
    matched = [0] * n
    for column, row in enumerate(owner):
        matched[row] = column
    tight = [sum(1 << j for j in range(n) if costs[r][j] == rows[r] + columns[j]) for r in range(n)]
    return matched, tight


def _shortest(
    row: int, costs: list[list[int]], rows: list[int], columns: list[int], owner: list[int]
) -> tuple[dict[int, tuple[int, int]], int]:
    """Dijkstra from a row to the nearest free column over reduced costs: (distance, column before) of what it settled, and that column."""
    left = list(range(len(columns)))
    reached: dict[int, tuple[int, int]] = {}
    distances: list[int | None] = [None] * len(columns)
    came = [-1] * len(columns)
    at, column, base = row, -1, 0
    while True:
        cost, shift = costs[at], base - rows[at]
        best: int | None = None
        nearest = -1
        for j in left:
            now = cost[j] + shift - columns[j]
            old = distances[j]
            if old is None or now < old:
                distances[j] = old = now
                came[j] = column
            if best is None or old < best:
                best, nearest = old, j
        assert best is not None
        reached[nearest] = (best, came[nearest])
        if owner[nearest] < 0:
            return reached, nearest
        left.remove(nearest)
        at, column, base = owner[nearest], nearest, best


def _first(matched: list[int], tight: list[int], roles: int) -> tuple[int, ...]:
    """The first matching in order of the roles' nodes, among those whose entries are all tight."""
    owner = {node: row for row, node in enumerate(matched)}
    for role in range(roles):
        lower = tight[role] & ((1 << matched[role]) - 1)
        while lower:
            node = (lower & -lower).bit_length() - 1
            lower &= lower - 1
            path = _path(owner[node], matched[role], role, matched, owner, tight)
            if path is None:
                continue
            for row, given in (*path, (role, node)):
                matched[row], owner[given] = given, row
            break
    return tuple(matched[:roles])


def _path(start: int, goal: int, role: int, matched: list[int], owner: dict[int, int], tight: list[int]) -> list[tuple[int, int]] | None:
    """How the row `start` and others after `role` can move over so that node `goal` is used and the node of `start` is not; None if not at all."""
    if start < role:
        return None
    unseen = ~sum(1 << matched[r] for r in range(role + 1)) | 1 << goal
    unseen &= ~(1 << matched[start])
    came: dict[int, int] = {}  # node -> the row that would take it
    queue = [start]
    for row in queue:
        fresh = tight[row] & unseen
        unseen &= ~fresh
        while fresh:
            node = (fresh & -fresh).bit_length() - 1
            fresh &= fresh - 1
            came[node] = row
            if node == goal:
                path = []
                while True:
                    path.append((came[node], node))
                    if came[node] == start:
                        return path
                    node = matched[came[node]]
            queue.append(owner[node])
    return None
