"""What `pdsl chaos` asks: runs with faults on purpose, each compared with an undisturbed one.

Losses are compared from the first fault on through a few steps, samples through the whole run. Sums are taken in another order once nodes are gone,
and what that rounds differently, about one part in 10 million, training itself doubles every step or two: after many steps it says nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.deadlines import recovered
from pdsl.lowering.plan import Plan
from pdsl.lowering.proof import outline_of, prove
from pdsl.runtime.chaos import Fault, random_faults
from pdsl.runtime.record import Recorder
from pdsl.runtime.report import Reporter
from pdsl.runtime.resilient import Cluster, Nursery, Overtime

__all__ = ["STEPS", "WINDOW", "Storm", "Trial", "compared", "storm", "within_budget"]

STEPS = 12
"""Steps of a run, where the spec has more and nobody said otherwise."""

WINDOW = 10
"""Steps whose losses are compared, from the first that a fault could change."""

_START = 120.0
"""Seconds that the first step may take beyond what the deadlines allow: models are built, data is read."""

_SLOWER = 5
"""How many times longer than in the undisturbed run a step may take: fewer nodes share its work, and other programs run."""


@frozen
class Trial:
    """What a run left behind, of its own faults and of the comparison. Seconds throughout.

    `struck` are the nodes that were lost, in order; `answers` what was done about it: re-routed, moved, restored, or nothing where no step was left.
    `end` is empty if the run came to its end, else how it ended; `hung` says that it had to be ended from outside. `deviation` is the largest
    relative difference of the losses of `compared` steps; `samples` tells whether every step took the same samples as undisturbed. `promised`: no more
    nodes were lost at once than the budget allows. `allowed` are the seconds that one recovery may take.
    """

    seed: int | None
    faults: tuple[Fault, ...] = ()
    struck: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    end: str = ""
    hung: bool = False
    promised: bool = True
    deviation: float = 0.0
    compared: int = 0
    samples: bool = True
    seconds: float = 0.0
    recoveries: tuple[float, ...] = ()
    allowed: float = float("inf")
    losses: tuple[float, ...] = field(default=(), repr=False)
    digests: tuple[str, ...] = field(default=(), repr=False)

    def verdict(self, tolerance: float) -> str:
        """One of equal, unequal, late, hung, ended, and beyond: it ended, and more was lost than the budget allows."""
        if self.hung:
            return "hung"
        if self.end:
            return "ended" if self.promised else "beyond"
        if not self.samples or not self.deviation <= tolerance:
            return "unequal"
        return "late" if any(seconds > self.allowed for seconds in self.recoveries) else "equal"

    def ok(self, tolerance: float) -> bool:
        """Whether the run did what was promised."""
        return self.verdict(tolerance) in ("equal", "beyond")


@frozen
class Storm:
    """All runs over one plan: `undisturbed`, then one for each seed."""

    name: str
    nodes: int
    ranks_per_node: int
    lose: int
    steps: int
    tolerance: float
    undisturbed: Trial
    trials: tuple[Trial, ...] = ()

    @property
    def ok(self) -> bool:
        return all(t.ok(self.tolerance) for t in self.trials)


def storm(plan: Plan, *, kills: int, runs: int, seed: int = 0, steps: int | None = None, tolerance: float = 1e-6) -> Iterator[Storm]:
    """Run a plan once undisturbed and `runs` times with `kills` random faults each, of the seeds `seed`, `seed + 1`, ...

    Yields after every run what there is so far; the first has no trials. Nodes are simulated on this machine, one thread a rank, and checkpoints go
    to a folder that is gone afterwards. Every process has ended when the iterator is at its end or closed.

    Raises RunError if the plan has no fault budget to be tried, asks for more losses than there are nodes, or fails undisturbed.
    """
    if plan.budget is None or plan.budget.lose < 1:
        raise RunError(f"{plan.name} promises nothing that could be tried: chaos needs a fault_budget with lose = 1 or more")
    total = min(plan.job.steps, STEPS) if steps is None else steps
    drawn = [(number, random_faults(plan, kills, total, number)) for number in range(seed, seed + runs)]
    nursery = Nursery("train", threads=1)
    try:
        calm = _Run(plan, total, nursery, patience=recovered(plan.silence) + _START)
        begin = Storm(plan.name, len(plan.nodes), plan.ranks_per_node, plan.budget.lose, total, tolerance, calm.trial())
        if begin.undisturbed.end:
            raise RunError(f"undisturbed, the run did not come to its end: {begin.undisturbed.end}")
        yield begin
        trials: tuple[Trial, ...] = ()
        for number, faults in drawn:
            patience = (kills + 1) * recovered(plan.silence) + _SLOWER * calm.slowest + calm.start
            disturbed = _Run(plan, total, nursery, faults, patience=patience)
            trials += (disturbed.trial(number, begin.undisturbed, slowest=calm.slowest),)
            yield evolve(begin, trials=trials)
    finally:
        nursery.close()


class _Run:
    """One run to its end. `patience` are the seconds without a step after which it is taken for hanging and ended."""

    def __init__(self, plan: Plan, steps: int, nursery: Nursery, faults: tuple[Fault, ...] = (), *, patience: float) -> None:
        self._plan, self._faults, self._patience = plan, faults, patience
        self._record = Recorder(Reporter(steps, metrics=None, progress=False, generation=0, active=False))
        self._moved = 0.0
        self._end, self._hung = "", False
        self.events: list[dict[str, Any]] = []
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pdsl-chaos-") as folder:
            told = {"steps": steps, "faults": [fault.to_data() for fault in faults]}
            cluster = Cluster(_saving_in(plan, folder), "train", told, on_event=self._hear, nursery=nursery, threads=1)
            try:
                with cluster:
                    self._wait(cluster)
            except Overtime as late:
                self._end, self._hung = str(late), True
            except RunError as error:
                self._end = str(error)
        self.seconds = time.monotonic() - begin
        self.events = list(cluster.events)
        at = [begin, *(e["time"] for e in self.events if e["event"] == "step")]
        gaps = [b - a for a, b in pairwise(at)]
        self.start, self.slowest = gaps[0] if gaps else 0.0, max(gaps[1:], default=0.0)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self._moved = time.monotonic()
        self._record(event)

    def _wait(self, cluster: Cluster) -> None:
        """A run that goes on without committing a step hangs, however lively its processes are."""
        self._moved = time.monotonic()
        while True:
            try:
                cluster.wait(max(0.0, self._moved + self._patience - time.monotonic()))
                return
            except Overtime:
                if time.monotonic() - self._moved >= self._patience:
                    raise Overtime(f"no step within {self._patience:.0f} s, {len(self._record.losses)} were done") from None

    def trial(self, seed: int | None = None, calm: Trial | None = None, *, slowest: float = 0.0) -> Trial:
        """What is to be told of it, against the undisturbed run. `slowest` is the longest step of that one."""
        losses, digests = self._record.losses, self._record.digests
        struck = tuple(dict.fromkeys(e["node"] for e in self.events if e["event"] == "lost"))
        answers = [_ANSWERS[e["event"]] for e in self.events if e["event"] in _ANSWERS]
        trial = Trial(
            seed,
            self._faults,
            struck,
            tuple(dict.fromkeys(answers)),
            self._end,
            self._hung,
            within_budget(self._plan, self._faults, self.events),
            seconds=self.seconds,
            recoveries=tuple(self._record.recoveries),
            losses=tuple(losses[s] for s in sorted(losses)),
            digests=tuple(digests[s] for s in sorted(losses)),
        )
        if calm is None or self._end:
            return trial
        steps = compared(self.events, len(calm.losses))
        deviation = max((_relative(calm.losses[s], losses.get(s, float("inf"))) for s in steps), default=0.0)
        allowed = recovered(self._plan.silence) + _SLOWER * slowest
        same = trial.digests == calm.digests
        return evolve(trial, deviation=deviation, compared=len(steps), samples=same, allowed=allowed)


_ANSWERS = {"rerouted": "re-routed", "moved": "moved", "restored": "restored"}


def _saving_in(plan: Plan, folder: str) -> Plan:
    """What the user has saved is neither read nor overwritten."""
    return plan if plan.saving is None else evolve(plan, saving=evolve(plan.saving, path=str(Path(folder))))


def _relative(expected: float, found: float) -> float:
    if expected == found:
        return 0.0
    difference = abs(found - expected) / abs(expected) if expected else float("inf")
    return float("inf") if isnan(difference) else difference


def compared(events: Sequence[Mapping[str, Any]], steps: int) -> range:
    """The steps whose losses are compared: `WINDOW` of them from the first that a fault could change on, all of them if there was none."""
    first = min((e["step"] for e in events if e["event"] == "agreed" and e["lost"]), default=None)
    return range(steps) if first is None else range(first, min(steps, first + WINDOW))


def within_budget(plan: Plan, faults: Sequence[Fault], events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the plan had promised to survive what was lost, in the order in which it was: never more nodes at once than the budget says.

    The count begins anew when every layer is again on more nodes than may be lost, and the promise holds for as many nodes as are left then. Nodes
    that fall silent without a proof of their end must leave a majority besides.
    """
    budget, proof = plan.budget, prove(plan)
    if budget is None or proof is None or sum(f.how == "stop" for f in faults) > proof.silent:
        return False
    left, at_once, holds, renewed = len(plan.nodes), 0, proof.holds, -1
    for event in events:
        if event["event"] == "lost":
            left, at_once = left - 1, at_once + 1
            if not holds or at_once > budget.lose:
                return False
        elif event["event"] in _ANSWERS and event.get("copies", 0) > budget.lose and event["generation"] > renewed:
            at_once, renewed = 0, event["generation"]
            holds = evolve(outline_of(plan, budget), nodes=left).holds
    return True
