"""A run under a trace of failures, on paper: how much of the time it trains, and where the rest goes.

Time is walked from event to event; the steps between two events are counted, not visited, so that months of thousands of nodes take seconds. What
a *strategy* does about a loss is asked of its `Course`: how long everything stands still, how much of the step in flight is kept, whether
training falls back to the last checkpoint, and how long a step takes afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from attrs import evolve, field, frozen

from pdsl.lowering.traces import Instant, Trace

__all__ = ["CAUSES", "Change", "Checkpoints", "Course", "Goodput", "Strategy", "Workload", "simulate_run", "young"]

CAUSES = {
    "useful": "steps that count",
    "slow": "nodes idle or slower than the best plan for those alive",
    "redundant": "work done twice on purpose",
    "recovery": "standing still after a loss or a join",
    "lost step": "work of the step in flight thrown away",
    "fallback": "steps undone by falling back to a checkpoint",
    "checkpoint": "writing checkpoints",
    "down": "too few nodes to train",
}
"""Where the time goes, in the order of reports. The seconds of all causes add up to the length of the run."""

_EPSILON = 1e-9


@frozen
class Workload:
    """What is trained. `step_seconds` and `pipelines` are of the best plan for a number of nodes.

    `batch` is in samples. `step_seconds(n)` is None where n nodes cannot train. `pipelines(n)` are the nodes of each pipeline, in order; nodes
    beyond their sum are idle. `least` is the fewest nodes of a pipeline, `lose` how many may be lost at once.
    """

    batch: float
    step_seconds: Callable[[int], float | None]
    pipelines: Callable[[int], tuple[int, ...]]
    least: int
    lose: int = 0


@frozen
class Change:
    """What a strategy does about an event.

    `step`: seconds of a step from then on, None while nothing can be trained. `pause`: seconds that all stand still. `keep`: the share of the work
    of the step in flight that stays. `restore`: all since the last checkpoint is undone. `checkpoint`: write one at the next end of a step.
    `redundant`: share of the work that is done twice. `later`: asked at the next end of a step; None there means that nothing changes.
    """

    step: float | None
    pause: float = 0.0
    keep: float = 1.0
    restore: bool = False
    checkpoint: bool = False
    redundant: float = 0.0
    later: Callable[[], Change | None] | None = None


class Course(Protocol):
    """A strategy at work in one run: it remembers who does what."""

    def start(self, nodes: Sequence[str]) -> Change:
        """The first nodes are there."""

    def lose(self, nodes: Sequence[str]) -> Change:
        """These nodes are lost, at one instant."""

    def join(self, nodes: Sequence[str]) -> Change:
        """These nodes are there from now on."""


@frozen
class Checkpoints:
    """A checkpoint every `steps` steps or, if that is 0, at the first end of a step after `interval` seconds; `write` seconds of standing still each.

    Without either none is written.
    """

    steps: int = 0
    interval: float = math.inf
    write: float = 0.0


@frozen
class Strategy:
    """A way to live with failures: `begin` makes a fresh course for one run. `told` says in one line what is assumed."""

    name: str
    begin: Callable[[], Course]
    checkpoints: Checkpoints = Checkpoints()
    told: str = ""


@frozen
class Goodput:
    """What came of a run.

    Times are in seconds from the start of training to the end of the trace; `causes` adds up to `seconds`. `samples` are those that count, of the
    last step its part. `ideal` are the samples of a run that never stands still and always has the best plan for the nodes alive. `committed` are
    whole steps, the last at `last_commit` seconds after the start. `restores` counts falls back to a checkpoint. `curve` has pairs of seconds,
    counted from the start of the trace and evenly spaced, and the samples by then.
    """

    strategy: str
    seconds: float
    samples: float
    ideal: float
    committed: int
    last_commit: float
    batch: float
    losses: int
    restores: int
    checkpoints: int
    causes: tuple[tuple[str, float], ...]
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    @property
    def rate(self) -> float:
        """Samples a second, over the whole run."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def committed_rate(self) -> float:
        """Samples a second of whole steps, from the start to the end of the last one."""
        return self.committed * self.batch / self.last_commit if self.last_commit else 0.0

    @property
    def share(self) -> float:
        """Samples as a share of the ideal."""
        return self.samples / self.ideal if self.ideal else 0.0

    def seconds_of(self, cause: str) -> float:
        return dict(self.causes)[cause]

    @property
    def rates(self) -> tuple[tuple[float, float, float], ...]:
        """(from, to, samples a second) between the points of the curve, in seconds of the trace; 0 where more was undone than done."""
        return tuple((a, b, max(0.0, (y - x) / (b - a))) for (a, x), (b, y) in pairwise(self.curve))


def young(write: float, seconds: float, falls: int) -> float:
    """Seconds between checkpoints that lose least: sqrt(2 * write * time between two falls), after Young (1974).

    `falls` is how often the checkpoint is needed in `seconds`; one is added, since a run that saw none may still need one.
    """
    return math.sqrt(2 * write * seconds / (falls + 1))


def simulate_run(trace: Trace, strategy: Strategy, job: Workload, *, points: int = 120) -> Goodput:
    """Run a job under a trace with a strategy. Pure: same arguments, same result.

    Training starts at the first instant whose nodes can train, with the pause that the strategy needs to start; time is counted from the end of that
    pause. `points` is the length of the curve. Cost: O(events + checkpoints).
    """
    run = _Run(trace, strategy, job, points)
    for instant in trace.instants:
        run.advance(instant.seconds)
        run.happen(instant)
    run.advance(trace.end / 1000)
    return run.result()


@frozen
class _Work:
    """Seconds of work that may still be undone, with the parts of it that were slow and redundant."""

    seconds: float = 0.0
    slow: float = 0.0
    redundant: float = 0.0

    def plus(self, other: _Work) -> _Work:
        return _Work(self.seconds + other.seconds, self.slow + other.slow, self.redundant + other.redundant)

    def times(self, share: float) -> _Work:
        return _Work(self.seconds * share, self.slow * share, self.redundant * share)


_NONE = _Work()


class _Run:
    """The state of the walk. `now` is in seconds of the trace."""

    def __init__(self, trace: Trace, strategy: Strategy, job: Workload, points: int) -> None:
        self.job, self.strategy, self.course = job, strategy, strategy.begin()
        self.saving = strategy.checkpoints
        self.now = 0.0
        self.started: float | None = None  # when the first step began
        self.alive = 0
        self.best: float | None = None
        self.change = Change(None)
        self.running = False  # whether the course was started
        self.pause = self.write = 0.0
        self.progress = 0.0  # share of the step in flight that is done
        self.steps = self.saved = 0
        self.due = False
        self.since = 0.0  # seconds of work since the last checkpoint
        self.last_commit = 0.0
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.flight = self.unsaved = _NONE
        self.ideal = 0.0
        self.losses = self.restores = self.written = 0
        self.edges = [trace.end / 1000 * i / points for i in range(1, points + 1)]
        self.edges.reverse()
        self.curve: list[tuple[float, float]] = [(0.0, 0.0)]

    # --- time -----------------------------------------------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        while self.edges and self.edges[-1] <= until:
            edge = self.edges.pop()
            self._walk(edge)
            self.curve.append((edge, (self.steps + self.progress) * self.job.batch))
        self._walk(until)

    def _walk(self, until: float) -> None:
        while until - self.now > _EPSILON:
            room = until - self.now
            if self.started is None:
                self._before_the_start(room)
            elif self.pause > 0:
                self.pause -= self._spend("recovery", min(room, self.pause))
            elif self.change.step is None:
                self._spend("down", room)
            elif self.write > 0:
                self.write -= self._spend("checkpoint", min(room, self.write))
                if self.write <= _EPSILON:
                    self._written()
            else:
                self._work(room, self.change.step)
            if self.pause <= _EPSILON:
                self.pause = 0.0

    def _before_the_start(self, room: float) -> None:
        if self.change.step is None:
            self.now += room
            return
        spent = min(room, self.pause)
        self.now += spent
        self.pause -= spent
        if self.pause <= _EPSILON:
            self.pause, self.started = 0.0, self.now

    def _spend(self, cause: str, seconds: float) -> float:
        self.now += seconds
        self.spent[cause] += seconds
        self._dream(seconds)
        return seconds

    def _dream(self, seconds: float) -> None:
        if self.best is not None:
            self.ideal += seconds / self.best * self.job.batch

    def _work(self, room: float, step: float) -> None:
        """Work on steps until the time is over or something is due at the end of a step."""
        first = (1 - self.progress) * step
        if room < first - _EPSILON:
            self.flight = self.flight.plus(self._worked(room, step))
            self.progress += room / step
            return
        count = min(1 + int((room - first + _EPSILON) / step), self._steps_until_due(step, first))
        seconds = first + (count - 1) * step
        done = self.flight.plus(self._worked(seconds, step))
        self.unsaved = self.unsaved.plus(done)
        self.since += done.seconds
        self.flight, self.progress = _NONE, 0.0
        self.steps += count
        assert self.started is not None
        self.last_commit = self.now - self.started
        self._end_of_step()

    def _worked(self, seconds: float, step: float) -> _Work:
        self.now += seconds
        self._dream(seconds)
        redundant = self.change.redundant
        useful = min(1 - redundant, self.best / step) if self.best is not None else 1 - redundant
        return _Work(seconds, (1 - redundant - useful) * seconds, redundant * seconds)

    def _steps_until_due(self, step: float, first: float) -> int:
        if self.due or self.change.later is not None:
            return 1
        if self.saving.steps:
            return max(1, self.saving.steps - (self.steps - self.saved))
        if self.saving.interval < math.inf:
            return 1 + max(0, math.ceil((self.saving.interval - self.since - self.flight.seconds - first) / step - _EPSILON))
        return 1 << 62

    def _end_of_step(self) -> None:
        by_steps = 0 < self.saving.steps <= self.steps - self.saved
        if self.due or by_steps or self.since >= self.saving.interval - _EPSILON:
            self.due = False
            self.write = self.saving.write
            if self.write <= 0:
                self._written()
            if self.write > 0:
                return
        self._ask_later()

    def _written(self) -> None:
        self.write, self.since = 0.0, 0.0
        self.written += 1
        self.saved = self.steps
        self._settle()
        self._ask_later()

    def _ask_later(self) -> None:
        if self.change.later is None:
            return
        change = self.change.later()
        if change is None:
            self.change = evolve(self.change, later=None)
            return
        self._apply(change)

    def _settle(self) -> None:
        """What was not saved counts for good."""
        work, self.unsaved = self.unsaved, _NONE
        self.spent["slow"] += work.slow
        self.spent["redundant"] += work.redundant
        self.spent["useful"] += work.seconds - work.slow - work.redundant

    # --- events -----------------------------------------------------------------------------------------------------------------------------

    def happen(self, instant: Instant) -> None:
        self.alive += len(instant.added) - len(instant.removed)
        self.best = self.job.step_seconds(self.alive)
        if instant.removed and self.running:
            self.losses += len(instant.removed)
            self._apply(self.course.lose(instant.removed))
        if instant.added:
            self._apply(self.course.join(instant.added) if self.running else self.course.start(instant.added))
            self.running = True

    def _apply(self, change: Change) -> None:
        if change.keep < 1:
            self.spent["lost step"] += (1 - change.keep) * self.flight.seconds
            self.flight = self.flight.times(change.keep)
            self.progress *= change.keep
        if change.restore:
            self._fall_back()
        if self.write > 0 and (change.pause > 0 or change.restore):  # a checkpoint that was being written is not whole
            self.write, self.due = 0.0, not change.restore
        self.due = self.due or change.checkpoint
        self.pause = max(change.pause, self.pause if change.later is not None and self.pause > 0 else 0.0)
        self.change = change

    def _fall_back(self) -> None:
        self.spent["fallback"] += self.unsaved.seconds
        self.restores += self.started is not None
        self.unsaved = _NONE
        self.steps, self.since, self.due = self.saved, 0.0, False

    # --- the end ------------------------------------------------------------------------------------------------------------------------------

    def result(self) -> Goodput:
        self.unsaved = self.unsaved.plus(self.flight)
        self._settle()
        seconds = self.now - self.started if self.started is not None else 0.0
        return Goodput(
            self.strategy.name,
            seconds,
            (self.steps + self.progress) * self.job.batch,
            self.ideal,
            self.steps,
            self.last_commit,
            self.job.batch,
            self.losses,
            self.restores,
            self.written,
            tuple(self.spent.items()),
            tuple(self.curve),
        )
