"""PDSL's own answers to a loss, for `simulate_run`: re-route and re-template, each alone, or restore from a checkpoint.

- *Re-route*: pipelines that lost a node take no more microbatches, the whole ones share them; no state moves, and what the whole ones have
  finished of the step in flight stays.
- *Re-template*: all nodes alive are cut into pipelines anew; state moves from the copies that are left, and the step in flight begins anew.
- `pdsl`: re-route at once, and re-template at the end of the step if what it gains until the next loss is more than it costs.

Only when a layer has no copy left, or too few nodes are, do these fall back to a checkpoint. Nodes are placed in the order in which they came,
pipeline by pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from attrs import frozen

from pdsl.lowering.goodput import Change, Checkpoints, Strategy, Workload

__all__ = ["Placement", "Times", "pays", "pdsl", "reroute", "restore", "retemplate"]


@frozen
class Times:
    """What answers cost, in seconds of standing still: from the loss to the next microbatch, beyond work that is done again.

    `restart` is from the loss until a job that was started anew from a checkpoint trains. `gap` is the expected time to the next loss.
    """

    reroute: float = 0.5
    retemplate: float = 0.5
    restart: float = 60.0
    gap: float = float("inf")


def pays(before: float, after: float, pause: float, gap: float) -> bool:
    """Whether steps of `after` seconds in place of `before` gain more until the next loss, `gap` seconds away, than the pause costs."""
    return after < before and (1 - after / before) * gap > pause


class Placement:
    """Which node stands where: pipelines as runs of nodes in the order in which the nodes came, and the places that were lost since.

    Node j of a pipeline of s nodes holds the layers from j/s to (j + 1)/s of the chain; so the copies of a layer can be counted across pipelines
    of different size.
    """

    def __init__(self, nodes: Iterable[str], pipelines: Callable[[int], tuple[int, ...]]) -> None:
        self._pipelines = pipelines
        self.nodes: dict[str, None] = dict.fromkeys(nodes)
        self.place_all()

    def place_all(self) -> None:
        """Cut all nodes that are there into pipelines anew."""
        self.sizes = self._pipelines(len(self.nodes))
        self.vacant: set[tuple[int, int]] = set()
        places = ((p, j) for p, size in enumerate(self.sizes) for j in range(size))
        self._place = dict(zip(self.nodes, places, strict=False))

    def lose(self, nodes: Iterable[str]) -> tuple[tuple[int, ...], bool]:
        """Take nodes away. Returns the pipelines that were whole and are hit, and whether any of the nodes had a place."""
        broken = {p for p, _ in self.vacant}
        gone = []
        for node in nodes:
            self.nodes.pop(node, None)
            place = self._place.pop(node, None)
            if place is not None:
                gone.append(place)
        self.vacant.update(gone)
        return tuple(sorted({p for p, _ in gone} - broken)), bool(gone)

    def join(self, nodes: Iterable[str]) -> None:
        """Nodes that are there without a place."""
        self.nodes.update(dict.fromkeys(nodes))

    def fill(self) -> bool:
        """Give lost places to nodes without one. Returns whether any was filled."""
        free = [node for node in self.nodes if node not in self._place]
        filled = list(zip(sorted(self.vacant), free, strict=False))
        for place, node in filled:
            self._place[node] = place
            self.vacant.discard(place)
        return bool(filled)

    def whole(self) -> int:
        """Nodes of the pipelines that lost nothing."""
        broken = {p for p, _ in self.vacant}
        return sum(self.sizes) - sum(self.sizes[p] for p in broken)

    def copies(self) -> int:
        """Of the layer that has fewest: how many nodes still hold it."""
        # The count falls by one where a vacant place begins and rises where it ends; ends come first at equal layers.
        turns = []
        for p, j in self.vacant:
            size = self.sizes[p]
            turns += [(j / size, 1), ((j + 1) / size, 0)]
        missing = most = 0
        for _, begins in sorted(turns):
            missing += 1 if begins else -1
            most = max(most, missing)
        return len(self.sizes) - most

    def share(self, pipelines: Iterable[int]) -> float:
        """The share of a step's microbatches that these pipelines run, of all that were whole before they were hit."""
        hit = sum(self.sizes[p] for p in pipelines)
        total = self.whole() + hit
        return hit / total if total else 0.0


Mode = Literal["pdsl", "retemplate", "reroute", "restore"]


class _Course:
    """One run of one of the four. What differs between them is what `_after_loss` and `join` do."""

    def __init__(self, mode: Mode, job: Workload, times: Times, write: float) -> None:
        self._mode, self._job, self._times, self._write = mode, job, times, write
        self._at = Placement((), job.pipelines)
        self._step: float | None = None  # of the placement, before anything was lost from it

    # --- what the engine asks -------------------------------------------------------------------------------------------------------------

    def start(self, nodes: Sequence[str]) -> Change:
        self._at = Placement(nodes, self._job.pipelines)
        return self._anew(0.0)

    def lose(self, nodes: Sequence[str]) -> Change:
        running = self._step is not None
        hit, touched = self._at.lose(nodes)
        keep = 1 - self._at.share(hit)
        if not running:
            return Change(None)
        if not touched:
            return Change(self._rerouted(), later=self._on_join)
        if self._mode == "restore" or self._at.copies() < 1 or len(self._at.nodes) < self._job.least:
            return self._restored()
        return self._after_loss(keep)

    def join(self, nodes: Sequence[str]) -> Change:
        self._at.join(nodes)
        if self._step is None:
            return self._restored()
        return Change(self._rerouted(), later=self._on_join)

    def _on_join(self) -> Change | None:
        return self._filled() if self._mode == "reroute" else self._improved()

    # --- answers --------------------------------------------------------------------------------------------------------------------------

    def _anew(self, pause: float, keep: float = 1.0) -> Change:
        """All nodes placed anew."""
        self._at.place_all()
        self._step = self._job.step_seconds(len(self._at.nodes)) if self._at.sizes else None
        return Change(self._step, pause, keep, checkpoint=self._alarm())

    def _restored(self) -> Change:
        self._at.place_all()
        self._step = self._job.step_seconds(len(self._at.nodes)) if self._at.sizes else None
        return Change(self._step, self._times.restart, 0.0, restore=True)

    def _after_loss(self, keep: float) -> Change:
        rerouted = self._rerouted()
        if self._mode == "retemplate" or (rerouted is None and self._mode == "pdsl"):
            return self._anew(self._times.retemplate, 0.0)
        if rerouted is None:  # copies are left, but no whole pipeline: without moving state nothing can run
            return self._restored()
        return Change(rerouted, self._times.reroute, keep, checkpoint=self._alarm(), later=self._on_join)

    def _rerouted(self) -> float | None:
        """Seconds of a step that the whole pipelines run alone."""
        whole = self._at.whole()
        if self._step is None or not whole:
            return None
        return self._step * sum(self._at.sizes) / whole

    def _improved(self) -> Change | None:
        """At the end of a step: all placed anew, if it pays. A planned restart writes a checkpoint first."""
        best = self._job.step_seconds(len(self._at.nodes))
        now = self._rerouted()
        pause = self._times.restart + self._write if self._mode == "restore" else self._times.retemplate
        if best is None or (now is not None and not pays(now, best, pause, self._times.gap)):
            return None
        return self._anew(pause)

    def _filled(self) -> Change | None:
        """At the end of a step: nodes that joined take the places of lost ones."""
        if not self._at.fill():
            return None
        return Change(self._rerouted(), self._times.retemplate)

    def _alarm(self) -> bool:
        """Whether a checkpoint must be written at once: a layer is down to its last copy, and the budget asks for more than one."""
        return self._job.lose > 0 and self._step is not None and self._at.copies() == 1


def _strategy(mode: Mode, job: Workload, times: Times, checkpoints: Checkpoints, told: str) -> Strategy:
    return Strategy(mode, lambda: _Course(mode, job, times, checkpoints.write), checkpoints, told)


def pdsl(job: Workload, times: Times, checkpoints: Checkpoints = Checkpoints()) -> Strategy:  # noqa: B008  frozen
    """Re-route at once, re-template at the end of the step when it pays."""
    told = (
        f"re-route in {times.reroute:g} s, only lost microbatches run again; "
        f"re-template in {times.retemplate:g} s at the end of the step when it pays"
    )
    return _strategy("pdsl", job, times, checkpoints, told)


def retemplate(job: Workload, times: Times, checkpoints: Checkpoints = Checkpoints()) -> Strategy:  # noqa: B008
    """Re-template at every loss."""
    return _strategy("retemplate", job, times, checkpoints, f"re-template in {times.retemplate:g} s, the step begins anew")


def reroute(job: Workload, times: Times, checkpoints: Checkpoints = Checkpoints()) -> Strategy:  # noqa: B008
    """Re-route at every loss; nodes that join take lost places, others stay idle."""
    return _strategy("reroute", job, times, checkpoints, f"re-route in {times.reroute:g} s, only lost microbatches run again")


def restore(job: Workload, times: Times, checkpoints: Checkpoints) -> Strategy:
    """Start anew from the last checkpoint at every loss, with the best plan for the nodes left."""
    return _strategy("restore", job, times, checkpoints, f"restart from the last checkpoint in {times.restart:g} s")
