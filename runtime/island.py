"""The island of one rank: torch's WORLD, the mesh over it, and a group in which its ranks tell each other what they learned."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from pdsl.lowering.plan import Plan
from pdsl.runtime.engine import Totals
from pdsl.runtime.groups import ISLAND_SOCKETS, CrossGroup
from pdsl.runtime.meshes import IslandMesh, island_mesh, leave_island
from pdsl.runtime.sockets import Interrupter

__all__ = ["Island"]


class Island:
    """It stays together through all plans and dies with its node, so no loss elsewhere interrupts it."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, interrupter: Interrupter) -> None:
        size = plan.shard_size * plan.tensor_size
        first = rank - rank % plan.ranks_per_node % size
        self.ranks = tuple(range(first, first + size))
        self.mesh: IslandMesh | None = None
        self._plan, self._rank, self._device = plan, rank, device
        self._interrupter = interrupter
        self._mates: CrossGroup | None = None
        self.made = size == 1

    def make(self, store: dist.Store, generation: int) -> None:
        """Make its groups, at the start or after one of its ranks was cut short inside a collective. Blocks until all of them have come."""
        if len(self.ranks) == 1:
            return
        leave_island()
        self._interrupter.forget(ISLAND_SOCKETS)
        prefix = dist.PrefixStore(f"island{generation}", store)
        timeout = timedelta(seconds=self._plan.silence)
        with self._interrupter.making(ISLAND_SOCKETS):
            self.mesh = island_mesh(self._plan, self.ranks, self._rank, prefix, self._device, timeout)
            self._mates = CrossGroup(f"mates{self.ranks[0]}", self.ranks, self._rank, prefix, torch.device("cpu"), timeout)
        self.made = True

    def share(self, totals: Totals | None) -> Totals | None:
        """The agreed numbers of a step, if any rank of the island knows them; all of them come here at the end of every step."""
        if self._mates is None:
            return totals
        found = (_unpacked(row) for row in self._mates.gather(_packed(totals)))
        return next((t for t in found if t is not None), None)


_LENGTH = 9


def _packed(totals: Totals | None) -> torch.Tensor:
    """Agreed numbers as one row of integers; the first one tells whether they are known."""
    if totals is None:
        return torch.zeros(_LENGTH, dtype=torch.int64)
    floats = torch.tensor([totals.loss, totals.squared, totals.over, totals.seconds], dtype=torch.float64).view(torch.int64)
    return torch.cat(
        [
            torch.ones(1, dtype=torch.int64),
            floats,
            torch.tensor([totals.digest, totals.change, totals.saved, totals.coming], dtype=torch.int64),
        ]
    )


def _unpacked(row: torch.Tensor) -> Totals | None:
    if not int(row[0]):
        return None
    loss, squared, over, seconds = row[1:5].contiguous().view(torch.float64).tolist()
    return Totals(loss, squared, over, int(row[5]), bool(row[6]), seconds, int(row[7]), int(row[8]))
