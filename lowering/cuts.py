"""Contiguous cuts of a chain of layers into stages, exact by dynamic programming.

The best cut has the smallest largest stage cost. Among cuts that are equal in that, the sizes of the other stages still matter to the step time,
so a score may choose: see `step_time`. What is left of a tie goes to the lexicographically smallest stage starts, so that the answer is
one and the same everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeAlias

from attrs import field, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.schedule import Number, Schedule
from pdsl.lowering.simulate import StageCosts, simulate

__all__ = ["Cut", "CutError", "LayerCost", "bottleneck", "cut", "cuts_for_all", "step_time"]

Cut: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of layers, one per stage, in order, without gaps."""

StageMemory: TypeAlias = Callable[[int, int, int, int], Number]
"""(stage, stages, start, stop) -> what layers [start, stop) take as that stage. More layers must never take less."""

Score: TypeAlias = Callable[[Cut], Any]
"""Anything comparable; smaller is better."""


class CutError(PlanError, ValueError):
    """No cut meets the conditions; the message says which one fails and what could be met."""


@frozen
class LayerCost:
    """Cost of one layer for one microbatch: times of forward and whole backward in any one unit, memory in any one unit. None is negative."""

    forward: Number
    backward: Number
    memory: Number = 0


@frozen
class _Chain:
    """A checked problem for one count of stages: prefix sums, where a stage may start, and the caps."""

    times: tuple[Number, ...]
    memory: tuple[Number, ...]
    starts: tuple[int, ...]
    stages: int
    slowness: tuple[Number, ...] | None
    limits: tuple[Number, ...] | None
    memory_of: StageMemory | None = field(default=None)

    @property
    def layers(self) -> int:
        return len(self.times) - 1

    def time(self, stage: int, start: int, stop: int) -> Number:
        total = self.times[stop] - self.times[start]
        return total if self.slowness is None else total * self.slowness[stage]

    def excess(self, stage: int, start: int, stop: int) -> Number:
        """How far a stage is above its memory limit; negative below it."""
        if self.limits is None:
            return 0
        need = self.memory[stop] - self.memory[start] if self.memory_of is None else self.memory_of(stage, self.stages, start, stop)
        return need - self.limits[stage]


def cut(
    layers: Sequence[LayerCost],
    stages: int,
    *,
    allowed: Sequence[bool] | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    memory_of: StageMemory | None = None,
    capacity: Sequence[Number] | None = None,
    score: Score | None = None,
    candidates: int = 256,
) -> Cut:
    """Cut a chain into `stages` runs of layers with the smallest largest cost (forward + backward, over capacity).

    `allowed[i]` says whether a stage may start at layer i (the first always does). `memory_limit` is a cap for every stage, or one per stage, on the
    sum of the layers' memory or, if given, on `memory_of`. `capacity[s]` is the speed of stage s, 1 by default. `score` decides between cuts of
    equal largest cost: among all of them if there are at most `candidates`, else among the ones that a search by moves of one boundary visits.

    Costs of int and Fraction are compared exactly. Raises CutError if there are too few layers or starts, or
    if no cut fits in memory.
    """
    chain = _chain(layers, stages, allowed, memory_limit, memory_of, capacity)
    tables: list[_Table] = []
    _extend(chain, tables, stages)
    if chain.layers not in tables[-1]:
        raise CutError(_too_little_memory(chain))
    return _choose(chain, tables, score, candidates)


def cuts_for_all(
    layers: Sequence[LayerCost],
    most: int | None = None,
    *,
    allowed: Sequence[bool] | None = None,
    memory_limit: Number | None = None,
    memory_of: StageMemory | None = None,
    score: Score | None = None,
    candidates: int = 256,
) -> tuple[Cut | None, ...]:
    """The cuts for 1, 2, ... `most` stages (all that the chain allows by default); None where `cut` raises CutError.

    Entry k is the cut into k + 1 stages, the same as `cut` gives. All of them come from one table unless `memory_of` is given, because that
    may depend on the count of stages.
    """
    places = sum(1 for i in range(len(layers)) if i == 0 or allowed is None or allowed[i])
    most = places if most is None else most
    found: list[Cut | None] = []
    tables: list[_Table] = []
    for stages in range(1, min(most, places) + 1):
        chain = _chain(layers, stages, allowed, memory_limit, memory_of, None)
        if memory_of is not None:
            tables.clear()
        _extend(chain, tables, stages)
        found.append(_choose(chain, tables, score, candidates) if chain.layers in tables[-1] else None)
    return (*found, *(None for _ in range(most - len(found))))


def bottleneck(layers: Sequence[LayerCost], ranges: Cut, capacity: Sequence[Number] | None = None) -> Number:
    """The largest stage cost of a cut."""
    sums = (sum((c.forward + c.backward for c in layers[start:stop]), start=_ZERO) for start, stop in ranges)
    slowness = _slowness(capacity)
    return max(total if slowness is None else total * slowness[stage] for stage, total in enumerate(sums))


def step_time(layers: Sequence[LayerCost], schedule: Schedule, hop: Number = 0) -> Score:
    """A score for `cut`: the simulated time of one step of the schedule, whose stages are those of the cut. Backward passes count as whole."""

    def score(ranges: Cut) -> Number:
        forward = tuple(sum((c.forward for c in layers[start:stop]), start=_ZERO) for start, stop in ranges)
        backward = tuple(sum((c.backward for c in layers[start:stop]), start=_ZERO) for start, stop in ranges)
        return simulate(schedule, StageCosts(forward, backward, (0,) * len(ranges)), hop).makespan

    return score


_ZERO: Number = 0


# --- the problem ------------------------------------------------------------------------------------------------------------------------


def _chain(
    layers: Sequence[LayerCost],
    stages: int,
    allowed: Sequence[bool] | None,
    memory_limit: Number | Sequence[Number] | None,
    memory_of: StageMemory | None,
    capacity: Sequence[Number] | None,
) -> _Chain:
    count = len(layers)
    if stages < 1:
        raise CutError(f"a chain is cut into at least 1 stage, not {stages}")
    if stages > count:
        raise CutError(f"{stages} stages need at least {stages} layers, but there are {count}")
    if allowed is not None and len(allowed) != count:
        raise CutError(f"{len(allowed)} marks of allowed cuts for {count} layers")
    for i, layer in enumerate(layers):
        if layer.forward < 0 or layer.backward < 0 or layer.memory < 0:
            raise CutError(f"layer {i} has a negative cost: {layer}")
    starts = tuple(i for i in range(count) if i == 0 or allowed is None or allowed[i])
    if stages > len(starts):
        raise CutError(f"{stages} stages need {stages - 1} places to cut, but the {count} layers allow {len(starts) - 1}")
    if capacity is not None and (len(capacity) != stages or min(capacity) <= 0):
        raise CutError(f"capacities {tuple(capacity)} for {stages} stages: one positive number per stage is needed")
    limits = None
    if memory_limit is not None:
        limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * stages
        if len(limits) != stages:
            raise CutError(f"{len(limits)} memory limits for {stages} stages")
    times = tuple(accumulate((c.forward + c.backward for c in layers), initial=_ZERO))
    memory = tuple(accumulate((c.memory for c in layers), initial=_ZERO))
    return _Chain(times, memory, starts, stages, _slowness(capacity), limits, memory_of)


def _slowness(capacity: Sequence[Number] | None) -> tuple[Number, ...] | None:
    """One over capacity, exact unless it is a float: a division of integers would turn exact costs into floats."""
    return None if capacity is None else tuple(1 / c if isinstance(c, float) else 1 / Fraction(c) for c in capacity)


_Table: TypeAlias = dict[int, Number]
"""Stop -> smallest largest cost of the stages up to here that end exactly there; a stop that cannot be reached is absent."""


def _extend(chain: _Chain, tables: list[_Table], stages: int) -> None:
    """Add tables until there is one for each of `stages` stages. Table s holds the best cuts of [0, stop) into s + 1 stages.

    The cost of a last stage grows as its start moves left, so the walk to the left ends once that cost alone reaches the best found: near
    L * L / s steps for stage s instead of L * L.
    """
    stops = (*chain.starts[1:], chain.layers)
    while len(tables) < stages:
        stage = len(tables)
        before: _Table = tables[-1] if tables else {0: 0}
        table: _Table = {}
        reach = [start for start in chain.starts if start in before]
        for stop in stops:
            best: Number | None = None
            for start in reversed(reach):
                if start >= stop:
                    continue
                own = chain.time(stage, start, stop)
                if (best is not None and own >= best) or chain.excess(stage, start, stop) > 0:
                    break
                worst = max(before[start], own)
                if best is None or worst < best:
                    best = worst
            if best is not None:
                table[stop] = best
        tables.append(table)


def _choose(chain: _Chain, tables: Sequence[_Table], score: Score | None, candidates: int) -> Cut:
    steps = _optimal_steps(chain, tables, tables[-1][chain.layers])
    first = _extreme(steps, smallest=True)
    if score is None:
        return _ranges(first, chain.layers)
    if _count(steps) <= candidates:
        starts = min(_all(steps), key=lambda s: (score(_ranges(s, chain.layers)), s))
        return _ranges(starts, chain.layers)
    seeds = (first, _extreme(steps, smallest=False), _most_even(chain, steps))
    return _ranges(_search(chain, steps, seeds, score, candidates), chain.layers)


def _too_little_memory(chain: _Chain) -> str:
    """How far the limits are from what can be met: the smallest largest excess over all cuts, by the same recurrence on memory."""
    least: _Table = {0: 0}
    for stage in range(chain.stages):
        table: _Table = {}
        for stop in (*chain.starts[1:], chain.layers):
            options = [
                chain.excess(stage, start, stop) if stage == 0 else max(least[start], chain.excess(stage, start, stop))
                for start in chain.starts
                if start in least and start < stop
            ]
            if options:
                table[stop] = min(options)
        least = table
    missing = least[chain.layers]
    limits = chain.limits or ()
    if len(set(limits)) == 1:
        return (
            f"no cut into {chain.stages} stages fits in memory {limits[0]} per stage: the smallest that can be had is {limits[0] + missing}"
        )
    told = ", ".join(map(str, limits))
    return f"no cut into {chain.stages} stages fits in the memory of its stages ({told}): at best one of them lacks {missing}"


# --- the cuts of equal largest cost -----------------------------------------------------------------------------------------------------

_Steps: TypeAlias = list[dict[int, tuple[int, ...]]]
"""Per stage: start -> stops, ascending, of all steps that lie on some optimal cut."""


def _optimal_steps(chain: _Chain, tables: Sequence[_Table], best: Number) -> _Steps:
    """All (stage, start, stop) of optimal cuts, backwards from the end, so that every step left can be completed on both sides."""
    steps: _Steps = []
    times, plain = chain.times, chain.slowness is None
    ends = [chain.layers]
    for stage in reversed(range(chain.stages)):
        before: _Table = tables[stage - 1] if stage else {0: 0}
        here: dict[int, tuple[int, ...]] = {}
        for start, reached in before.items():
            if reached > best:
                continue
            stops: list[int] = []
            for at in range(bisect_right(ends, start), len(ends)):
                stop = ends[at]
                if (times[stop] - times[start] if plain else chain.time(stage, start, stop)) > best:
                    break
                if chain.limits is not None and chain.excess(stage, start, stop) > 0:
                    break
                stops.append(stop)
            if stops:
                here[start] = tuple(stops)
        steps.append(here)
        ends = list(here)  # ascending, as tables are filled from the left
    steps.reverse()
    return steps


def _ranges(starts: Sequence[int], layers: int) -> Cut:
    return tuple(zip(starts, (*starts[1:], layers), strict=True))


def _extreme(steps: _Steps, smallest: bool) -> tuple[int, ...]:
    """The optimal cut with the lexicographically smallest or largest starts."""
    starts = [0]
    for here in steps[:-1]:
        stops = here[starts[-1]]
        starts.append(stops[0] if smallest else stops[-1])
    return tuple(starts)


def _count(steps: _Steps) -> int:
    """How many optimal cuts there are, without listing them."""
    ways: dict[int, int] = {}
    for stage in reversed(range(len(steps))):
        last = stage == len(steps) - 1
        ways = {start: len(stops) if last else sum(ways[stop] for stop in stops) for start, stops in steps[stage].items()}
    return ways[0]


def _all(steps: _Steps) -> list[tuple[int, ...]]:
    """All optimal cuts by their starts, in lexicographic order."""
    cuts: list[tuple[int, ...]] = [(0,)]
    for here in steps[:-1]:
        cuts = [(*starts, stop) for starts in cuts for stop in here[starts[-1]]]
    return cuts


def _most_even(chain: _Chain, steps: _Steps) -> tuple[int, ...]:
    """The optimal cut with the least sum of squared stage costs: a good first guess for a score."""
    tail: dict[int, tuple[Number, tuple[int, ...]]] = {chain.layers: (0, ())}
    for stage in reversed(range(len(steps))):
        tail = {
            start: min((chain.time(stage, start, stop) ** 2 + tail[stop][0], (start, *tail[stop][1])) for stop in stops)
            for start, stops in steps[stage].items()
        }
    return tail[0][1]


def _search(chain: _Chain, steps: _Steps, seeds: Sequence[tuple[int, ...]], score: Score, budget: int) -> tuple[int, ...]:
    """Descent from the best seed by moving one boundary to the next optimal place, with at most about `budget` evaluations."""
    places = sorted(chain.starts)
    index = {place: i for i, place in enumerate(places)}
    known: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {}

    def rank(starts: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        if starts not in known:
            known[starts] = (score(_ranges(starts, chain.layers)), starts)
        return known[starts]

    def legal(starts: tuple[int, ...]) -> bool:
        return all(stop in steps[stage].get(start, ()) for stage, (start, stop) in enumerate(_ranges(starts, chain.layers)))

    best = min(rank(seed) for seed in seeds)
    improved = True
    while improved and len(known) < budget:
        improved = False
        for boundary in range(1, chain.stages):
            for shift in (-1, 1):
                at = index[best[1][boundary]] + shift
                if not 0 < at < len(places):
                    continue
                moved = (*best[1][:boundary], places[at], *best[1][boundary + 1 :])
                if moved not in known and legal(moved) and rank(moved) < best:
                    best = rank(moved)
                    improved = True
    return best[1]
