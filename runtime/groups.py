"""Process groups: the island is torch's WORLD; everything that crosses islands goes over groups that PDSL makes itself.

FSDP2, DTensor and DeviceMesh only ever see the island, so a loss elsewhere touches no module of a survivor. Cross-island groups are made from
a prefix of the store per generation and can be dropped and made anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Program
from pdsl.lowering.running import running_groups
from pdsl.runtime.sockets import Interrupter
from pdsl.runtime.waits import LARGE, Collective, Pending, Several, Transfer

__all__ = ["CROSS_SOCKETS", "ISLAND_SOCKETS", "PIPELINE_SOCKETS", "CrossGroup", "Groups", "device_of"]


def device_of(plan: Plan, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU where the plan asks for GPUs, or allows them and this machine has one for each of its ranks; else
    the CPU. Raises RunError if the plan asks for GPUs and there are too few.
    """
    if plan.device == "cpu":
        return torch.device("cpu")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))  # torchrun says how many of the ranks are here; else all are
    if available >= wanted:
        return torch.device("cuda", local_rank)
    if plan.device == "cuda":
        raise RunError(
            f"the plan needs {wanted} GPUs on this machine, {available} are visible; cluster.device = auto falls back to the CPU"
        )
    return torch.device("cpu")


PIPELINE_SOCKETS, CROSS_SOCKETS, ISLAND_SOCKETS = "pipeline", "cross", "island"


class _Transport(Protocol):
    """What a backend's process group can do; torch ships no annotations for it."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work: ...
    def allgather(self, found: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> dist.Work: ...


_left_behind: list[tuple[_Transport, tuple[Pending, ...]]] = []
"""Groups that were dropped with collectives under way: their end would wait for them, and the whole process with it."""


class CrossGroup:
    """A process group over a few global ranks that is not torch's WORLD. All calls are asynchronous and return what can be waited for.

    `cut` tells whether somebody has shut the sockets of this group; None if nobody ever does. Transfers of `watched` bytes or more are given up then.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        store: dist.Store,
        device: torch.device,
        timeout: timedelta,
        cut: Callable[[], bool] | None = None,
        watched: int = LARGE,
    ) -> None:
        self.ranks = tuple(ranks)
        self.device = device
        self._index = {r: i for i, r in enumerate(self.ranks)}
        self._cut = cut if device.type == "cpu" else None
        self._watched = watched
        self._under_way: list[Pending] = []
        prefix = dist.PrefixStore(name, store)
        self._group = _transport(prefix, self._index[rank], len(self.ranks), device, timeout)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._transfer(self._group.send([tensor], self._index[peer], tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._transfer(self._group.recv([tensor], self._index[peer], tag), tensor)

    def sum(self, tensor: torch.Tensor) -> Pending:
        """All-reduce in place."""
        return self._collective(self._group.allreduce([tensor]))

    def gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same-shaped tensor of every rank, in order of rank; blocks."""
        found = [torch.empty_like(tensor) for _ in self.ranks]
        self._collective(self._group.allgather([found], [tensor])).wait()
        return tuple(found)

    def watch(self, works: Sequence[Pending]) -> Pending:
        """All of some transfers; the wait is given up soon after the group was cut."""
        return Several(works) if self._cut is None else Transfer(Several(works), self._cut)

    def _transfer(self, work: dist.Work, tensor: torch.Tensor) -> Pending:
        return work if self._cut is None or tensor.nbytes < self._watched else Transfer(work, self._cut)

    def _collective(self, work: dist.Work) -> Pending:
        if self._cut is None:
            return work
        begun = Collective(work, self._cut)
        self._under_way = [c for c in self._under_way if not c.is_completed()]
        self._under_way.append(begun)
        return begun

    def __del__(self) -> None:
        """The group goes without waiting for what is under way, also if an error has dropped it."""
        _left_behind[:] = [entry for entry in _left_behind if not all(c.is_completed() for c in entry[1])]
        left = tuple(c for c in self._under_way if not c.is_completed())
        if left:
            _left_behind.append((self._group, left))


def _transport(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> _Transport:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast("_Transport", dist.ProcessGroupNCCL(store, rank, size, options))
    return cast("_Transport", dist.ProcessGroupGloo(store, rank, size, timeout))


class Groups:
    """The groups of one rank in one generation, beyond its island. A loss elsewhere ends those that cross pipelines; the transfers inside a
    pipeline that is whole go on, so that it can finish what it computes.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        store: dist.Store | None,
        device: torch.device,
        timeout: timedelta,
        interrupter: Interrupter | None = None,
    ) -> None:
        self.plan, self.rank, self.device = plan, program.rank, device
        store = store if store is not None else dist.HashStore()  # one rank meets nobody
        self._store = dist.PrefixStore(f"generation{plan.generation}", store)
        self._timeout = timeout
        self._interrupter = interrupter
        self._made: dict[tuple[int, ...], CrossGroup] = {}
        pipeline = plan.coordinate(self.rank).pipeline
        self.control = self._make("control", plan.ranks) if plan.world_size > 1 else None
        members = tuple(sorted(r for island in plan.pipelines[pipeline].islands for r in island))
        several = len(plan.pipelines[pipeline].islands) > 1 and plan.pipelines[pipeline].whole
        self.transfers = self._make(f"pipeline{pipeline}", members, PIPELINE_SOCKETS) if several else None
        self.running = running_groups(plan, self.rank)
        for ranks in sorted({bucket.ranks for bucket in program.buckets} | {ranks for ranks, _ in self.running if len(ranks) > 1}):
            # making a group waits for its members: one order for all ranks, or they wait for each other
            self._made[ranks] = self._make("sum" + "-".join(map(str, ranks)), ranks)

    def _make(self, name: str, ranks: tuple[int, ...], key: str = CROSS_SOCKETS) -> CrossGroup:
        interrupter = self._interrupter
        if interrupter is None:
            return CrossGroup(name, ranks, self.rank, self._store, self.device, self._timeout)
        watched = LARGE if key == PIPELINE_SOCKETS else 0  # moves are few, and their time does not count as that of a step
        with interrupter.making(key):
            cut = partial(interrupter.interrupted, key)
            return CrossGroup(name, ranks, self.rank, self._store, self.device, self._timeout, cut, watched)

    def summing(self, ranks: tuple[int, ...]) -> CrossGroup:
        """The group over which gradients or running statistics held by `ranks` are summed."""
        return self._made[ranks]

    def close(self) -> None:
        """Drop every group. Sockets close at once, so that peers that still wait see it."""
        self._made.clear()
        self.control = self.transfers = None
