"""Models of what others do about a loss, to compare with: checkpoint-restart (Varuna), redundant computation (Bamboo), templates (Oobleck).

Seconds are those of the published simulation (`pdsl.lowering.published`), by model; for a spec at hand they are interpolated between those models by
the number of parameters, and held beyond the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from pdsl.lowering.goodput import Change, Checkpoints, Strategy, Workload
from pdsl.lowering.published import PUBLISHED, Published
from pdsl.lowering.strategies import Placement, Times, pays

__all__ = ["bamboo", "by_parameters", "oobleck", "published_oobleck", "published_varuna", "varuna"]


def by_parameters(parameters: float, seconds: Callable[[Published], float]) -> float:
    """Seconds for a model of so many parameters: interpolated between the published models, held beyond the ends."""
    known = sorted((p.parameters, seconds(p)) for p in PUBLISHED.values())
    if parameters <= known[0][0]:
        return known[0][1]
    for (small, a), (large, b) in pairwise(known):
        if parameters <= large:
            return a + (b - a) * (parameters - small) / (large - small)
    return known[-1][1]


# --- Oobleck --------------------------------------------------------------------------------------------------------------------------------


class _Oobleck:
    """Templates for every number of nodes; the step in flight is lost as a whole."""

    def __init__(self, job: Workload, times: Times, started: float) -> None:
        self._job, self._times, self._started = job, times, started
        self._at = Placement((), job.pipelines)

    def start(self, nodes: Sequence[str]) -> Change:
        self._at = Placement(nodes, self._job.pipelines)
        return Change(self._step(), self._started)

    def lose(self, nodes: Sequence[str]) -> Change:
        self._at.lose(nodes)
        lost = self._at.copies() < 1 or len(self._at.nodes) < self._job.least
        self._at.place_all()
        return Change(self._step(), self._times.restart if lost else self._times.retemplate, 0.0, restore=lost)

    def join(self, nodes: Sequence[str]) -> Change:
        before = self._step()
        self._at.join(nodes)
        if before is None:
            return self.lose(())
        return Change(before, later=self._grown)

    def _grown(self) -> Change:
        self._at.place_all()
        return Change(self._step(), self._times.retemplate)

    def _step(self) -> float | None:
        return self._job.step_seconds(sum(self._at.sizes)) if self._at.sizes else None


def oobleck(job: Workload, times: Times, checkpoints: Checkpoints = Checkpoints(), *, started: float = 0.0) -> Strategy:  # noqa: B008  frozen
    """Oobleck: as re-templating, but slower, and the step in flight is lost. `times.retemplate` is its pause, `started` that of the start.

    Where a layer has no copy left it is given a checkpoint to restart from, which its first version did not have.
    """
    return Strategy(
        "oobleck", lambda: _Oobleck(job, times, started), checkpoints, f"new templates in {times.retemplate:g} s, the step is lost"
    )


# --- Varuna ---------------------------------------------------------------------------------------------------------------------------------


class _Varuna:
    """Checkpoint and restart, on as many nodes as make whole pipelines of one length; the rest is idle."""

    def __init__(
        self, step: Callable[[int], float | None], restart: Callable[[int], float], write: float, gap: float, started: float
    ) -> None:
        self._step, self._restart, self._write, self._gap, self._started = step, restart, write, gap, started
        self._nodes = 0
        self._now: float | None = None

    def start(self, nodes: Sequence[str]) -> Change:
        self._nodes = len(nodes)
        return self._anew(self._started)

    def lose(self, nodes: Sequence[str]) -> Change:
        pause = self._restart(self._nodes)
        self._nodes -= len(nodes)
        return self._anew(pause, 0.0, restore=True)

    def join(self, nodes: Sequence[str]) -> Change:
        self._nodes += len(nodes)
        if self._now is None:
            return self._anew(self._restart(self._nodes), 0.0, restore=True)
        return Change(self._now, later=self._grown)

    def _grown(self) -> Change | None:
        best, pause = self._step(self._nodes), self._restart(self._nodes)
        if best is None or self._now is None or not pays(self._now, best, pause + self._write, self._gap):
            return None
        return self._anew(pause + self._write)

    def _anew(self, pause: float, keep: float = 1.0, *, restore: bool = False) -> Change:
        self._now = self._step(self._nodes)
        return Change(self._now, pause, keep, restore)


def varuna(job: Workload, times: Times, checkpoints: Checkpoints, *, pipeline: int) -> Strategy:
    """Varuna: restart from the last checkpoint at each loss, on pipelines of `pipeline` nodes each; nodes beyond are idle."""

    def step(nodes: int) -> float | None:
        return job.step_seconds(nodes - nodes % pipeline) if nodes >= pipeline else None

    told = f"restart from the last checkpoint in {times.restart:.0f} s, pipelines of {pipeline} node{'s' * (pipeline != 1)}, the rest idle"
    return Strategy("varuna", lambda: _Varuna(step, lambda _: times.restart, checkpoints.write, times.gap, 0.0), checkpoints, told)


# --- Bamboo ---------------------------------------------------------------------------------------------------------------------------------


class _Bamboo:
    """Each node also computes the stage of its neighbour, who takes over when it is lost; the job is put together anew after that step."""

    def __init__(self, job: Workload, times: Times, pipeline: int, slowdown: float) -> None:
        self._job, self._times, self._pipeline, self._slowdown = job, times, pipeline, slowdown
        self._at = Placement((), self._pipelines)
        self._taken = False

    def _pipelines(self, nodes: int) -> tuple[int, ...]:
        return (self._pipeline,) * (nodes // self._pipeline)

    def start(self, nodes: Sequence[str]) -> Change:
        self._at = Placement(nodes, self._pipelines)
        return self._change()

    def lose(self, nodes: Sequence[str]) -> Change:
        _, touched = self._at.lose(nodes)
        if self._step() is None:
            return Change(None)
        if self._neighbours():
            self._at.place_all()
            self._taken = False
            return self._change(self._times.restart, restore=True)
        self._taken = self._taken or touched
        return self._change(later=self._put_together if self._taken else None)

    def join(self, nodes: Sequence[str]) -> Change:
        before = self._step()
        self._at.join(nodes)
        if before is None:
            return self._put_together(restore=True)
        return self._change(later=self._put_together)

    def _neighbours(self) -> bool:
        """Whether two places side by side are gone, so that a stage is held by no one."""
        return any((p, (j + 1) % self._at.sizes[p]) in self._at.vacant for p, j in self._at.vacant)

    def _put_together(self, *, restore: bool = False) -> Change:
        self._at.place_all()
        self._taken = False
        return self._change(self._times.retemplate, restore=restore)

    def _step(self) -> float | None:
        step = self._job.step_seconds(sum(self._at.sizes)) if self._at.sizes else None
        return None if step is None else step * self._slowdown

    def _change(self, pause: float = 0.0, *, restore: bool = False, later: Callable[[], Change] | None = None) -> Change:
        step = self._step()
        if step is not None and self._taken:
            step *= _SHADOW
        return Change(step, pause, 0.0 if restore else 1.0, restore, redundant=1 - 1 / self._slowdown, later=later)


_SHADOW = 1.5
"""How much longer a step takes while one node runs two stages, as published."""


def bamboo(job: Workload, times: Times, checkpoints: Checkpoints, *, pipeline: int) -> Strategy:
    """Bamboo: redundant computation in pipelines of `pipeline` nodes. `times.retemplate` is its pause after the step, `times.restart` that after two
    neighbours are lost. A step takes as much longer than the best plan's as published for BERT-large with 30 nodes: 3.1 times.
    """
    bert = PUBLISHED["BERT-large"]
    told = f"neighbours hold each stage twice, put together anew in {times.retemplate:.0f} s, pipelines of {pipeline} node{'s' * (pipeline != 1)}"
    slowdown = bert.oobleck[0] / bert.bamboo[0]
    return Strategy("bamboo", lambda: _Bamboo(job, times, pipeline, slowdown), checkpoints, told)


# --- with published constants ---------------------------------------------------------------------------------------------------------------


def published_oobleck(model: Published) -> Strategy:
    """Oobleck as published for one of its models."""
    return oobleck(model.workload(), Times(retemplate=model.recovery, restart=model.restart), started=model.recovery)


def published_varuna(model: Published) -> Strategy:
    """Varuna as published for one of Oobleck's models: a checkpoint every ten steps; its write is a part of the restart."""

    def restart(nodes: int) -> float:
        return model.varuna_restart(nodes) - model.write

    def begin() -> _Varuna:
        return _Varuna(model.varuna_step, restart, model.write, float("inf"), model.restart - model.write)

    return Strategy("varuna", begin, Checkpoints(steps=10, write=model.write), "as published")
