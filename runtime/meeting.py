"""How a rank stops and meets the others again: its waits are ended, it reports, and gets the decision and a store for the next groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pdsl.lowering.recovery import Report
from pdsl.runtime.faults import PeerFault, in_words
from pdsl.runtime.groups import CROSS_SOCKETS, ISLAND_SOCKETS, PIPELINE_SOCKETS
from pdsl.runtime.link import Decision, Link
from pdsl.runtime.sockets import Interrupter
from pdsl.runtime.stores import join_store

__all__ = ["Meeting"]

_CONNECT = 6.0  # seconds; a host that dies while it is called holds a rank for a third of it, and nothing can interrupt that


class Meeting:
    """Of one rank. `generation` is the newest that it has heard of; `is_broken` tells whether its pipeline is hit by a loss of nodes."""

    def __init__(self, link: Link, nodes: Collection[int], silence: float, is_broken: Callable[[Collection[int]], bool]) -> None:
        self.interrupter = Interrupter()
        self.generation = -1
        self._link, self._silence, self._is_broken = link, silence, is_broken
        self._nodes = frozenset(nodes)
        link.on_lost = self._on_lost

    def _on_lost(self, lost: frozenset[int]) -> None:
        """In the listening thread: end what can no longer succeed. A pipeline that is whole finishes its own work first."""
        if not lost & self._nodes:
            return
        keys = (CROSS_SOCKETS, PIPELINE_SOCKETS) if self._is_broken(lost) else (CROSS_SOCKETS,)
        self.interrupter.interrupt(*keys)

    def leave(self, *, clean: bool) -> None:
        """End all waits with this rank, also of others for it. One that was cut short inside the model leaves its island behind too."""
        self.interrupter.interrupt(CROSS_SOCKETS, PIPELINE_SOCKETS, *(() if clean else (ISLAND_SOCKETS,)))

    def decision(self, report: Report) -> Decision:
        """Report, and wait for what all living ranks get alike."""
        self.interrupter.forget(CROSS_SOCKETS, PIPELINE_SOCKETS)
        self._link.report(self.generation, **report.to_data())
        found = self._link.decision()
        self._nodes = frozenset(found.nodes)
        self.interrupter.forget(CROSS_SOCKETS, PIPELINE_SOCKETS)  # what was lost before is left out of the decision
        if self._link.lost:
            self.interrupter.interrupt(CROSS_SOCKETS, PIPELINE_SOCKETS)
        return found

    @contextlib.contextmanager
    def store(self, decision: Decision) -> Iterator[Any]:
        """The store of a decision. Within, whatever torch says of connections is raised as PeerFault."""
        self.generation = decision.generation
        where = f"while generation {decision.generation} was formed"
        try:
            with self.interrupter.making(CROSS_SOCKETS):
                store = join_store(decision.host, decision.port, min(_CONNECT, self._silence))
                store.set_timeout(timedelta(seconds=self._silence))
            with in_words(lambda: where, self._silence):
                yield store
        except (dist.DistError, OSError) as error:
            raise PeerFault(f"{where}: {error}") from None
