"""Templates for every size that a pipeline may have: cuts of the layers, made before the run, so that a loss only has to pick one.

Each cut has the smallest largest stage that memory allows, exactly. Several cuts usually have it, and the sizes of the other stages matter to the step
time too: among them the simulated step decides, among all if they are few, else along moves of single boundaries. The count of evaluations
is fixed, so that all templates for 64 nodes and 96 layers take milliseconds; where not even a few are affordable the most even cut is taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise

from attrs import frozen

from pdsl.lowering.cuts import Cut, CutError, LayerCost, cut
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.makespan import makespan
from pdsl.lowering.plan import Budget, StageCut, Template
from pdsl.lowering.schedule import Operation, Schedule, ScheduleError
from pdsl.lowering.schedules import SCHEDULES, SEARCHED, Placement, placed, single
from pdsl.lowering.searched import searched_template

__all__ = ["Fits", "balanced_cut", "cuts_for_sizes", "forward_flops", "rescheduled_cut", "schedule_for", "stage_cuts", "template_of"]

Fits = Callable[[int, int, int, int], bool]
"""(stage, stages, start, stop) -> whether layers [start, stop) fit in memory as that stage. Fewer layers must fit where more do."""

_MOST_STEPS, _ALL_STEPS = 60_000, 320_000  # operations that may be walked to break ties: of one size, of all together
_FEWEST_SCORED = 3  # below so many evaluations a search would only see its seeds


# --- schedules and templates --------------------------------------------------------------------------------------------------------------------


def schedule_for(family: str, positions: int, virtual: int, microbatches: int, rounds: int = 1) -> Schedule:
    """The rows for exactly that count of microbatches, few or many, equal for all `rounds` or not.

    1F1B and interleaving take all at once; GPipe, which holds what it has begun, takes them in `rounds` parts that differ by one at most. `virtual`
    is what the spec says: a family with two stages in a V on each position has them either way.
    """
    known = SCHEDULES[family]
    each_position = known.per_position(virtual)
    if positions == 1 and each_position == 1:
        return single(microbatches)
    build = known.build
    parts = min(rounds, microbatches) if known.holds_all else 1
    if parts == 1:
        return build(positions, microbatches, virtual)
    each, more = divmod(microbatches, parts)
    rows: list[list[Operation]] = [[] for _ in range(positions)]
    first = 0
    for part in range(parts):
        made = build(positions, each + (part < more), virtual)
        for row, added in zip(rows, made.rows, strict=True):
            row += [Operation(o.op, o.stage, first + o.microbatch) for o in added]
        first += made.microbatches
    places = placed(known.placement, positions, each_position)
    return Schedule(family, len(places), microbatches, places, tuple(map(tuple, rows)))


def stage_cuts(bounds: Cut, positions: int, placement: Placement = "loop") -> tuple[StageCut, ...]:
    """The stages of a cut, placed on positions in a loop or in a V."""
    places = placed(placement, positions, len(bounds) // positions)
    return tuple(StageCut(a, b, at) for (a, b), at in zip(bounds, places, strict=True))


def template_of(budget: Budget, nodes: int, microbatches: int, rounds: int = 1) -> Template:
    """The template of a pipeline of `nodes` nodes that takes exactly `microbatches` microbatches in a step.

    `rounds` is `Plan.job.accumulate`. Raises IndexError for a size that the budget does not have, ScheduleError for no microbatch.
    """
    if microbatches < 1:
        raise ScheduleError(f"a pipeline takes at least 1 microbatch, not {microbatches}")
    return rescheduled_cut(budget, budget.cut(nodes), microbatches, rounds)


def rescheduled_cut(budget: Budget, stages: tuple[StageCut, ...], microbatches: int, rounds: int = 1) -> Template:
    """The template of stages, which must be among the cuts of a budget whose schedule is searched for, for another count of microbatches."""
    if budget.schedule in SEARCHED:
        return searched_template(stages, budget.bases[budget.cuts.index(stages)], microbatches, rounds)
    positions = max(s.position for s in stages) + 1
    return Template(stages, schedule_for(budget.schedule, positions, len(stages) // positions, microbatches, rounds))


def forward_flops(facts: ModelFacts, stages: Iterable[StageCut]) -> tuple[int, ...]:
    """FLOPs of a forward of each stage for one sample; at least 1, so that order and time stay defined."""
    return tuple(max(1, sum(layer.flops for layer in facts.layers[s.start : s.stop])) for s in stages)


# --- cuts ------------------------------------------------------------------------------------------------------------------------------------------


def cuts_for_sizes(
    facts: ModelFacts, sizes: Iterable[int], *, schedule: str = "one_f_one_b", virtual: int = 1, fits: Fits | None = None
) -> tuple[tuple[StageCut, ...] | None, ...]:
    """The stages for each count of positions in turn, as many on each as the schedule has (`virtual` if it says so), placed as it wants; None where
    the layers or the memory do not allow so many or so few.
    """
    family = SCHEDULES[schedule]
    chain, sizes = _Chain.of(facts), tuple(sizes)
    steps = min(_MOST_STEPS, _ALL_STEPS // max(1, len(sizes)))
    found = []
    for positions in sizes:
        bounds = _cut(chain, positions, schedule, virtual, fits, steps)
        found.append(stage_cuts(bounds, positions, family.placement) if bounds is not None else None)
    return tuple(found)


@frozen
class _Chain:
    """Layers as what cannot be cut further: `starts` are the layers where a stage may begin, then the count of layers; `sums` the FLOPs before them."""

    starts: tuple[int, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, facts: ModelFacts) -> _Chain:
        layers = facts.layers
        starts = (0, *(i for i, layer in enumerate(layers) if i and not layer.cut_before), len(layers))
        before = tuple(accumulate((layer.flops for layer in layers), initial=0))
        return cls(starts, tuple(before[i] for i in starts))

    @property
    def parts(self) -> int:
        return len(self.starts) - 1


def balanced_cut(
    facts: ModelFacts, positions: int, *, schedule: str = "one_f_one_b", virtual: int = 1, fits: Fits | None = None
) -> Cut | None:
    """The cut for one count of positions: the smallest largest stage, then the least simulated step time, then the smallest starts; None if there is none."""
    return _cut(_Chain.of(facts), positions, schedule, virtual, fits, _MOST_STEPS)


def _cut(chain: _Chain, positions: int, schedule: str, virtual: int, fits: Fits | None, steps: int) -> Cut | None:
    stages = positions * SCHEDULES[schedule].per_position(virtual)
    if not 1 <= stages <= chain.parts:
        return None
    evaluations = steps // (6 * stages * stages)
    ends = _choose(_Room(chain, stages), partial(_step_time, chain, schedule, positions), evaluations)
    bounds = tuple((chain.starts[a], chain.starts[b]) for a, b in pairwise((0, *ends)))
    if fits is None or all(fits(stage, stages, a, b) for stage, (a, b) in enumerate(bounds)):
        return bounds
    return _cut_in_memory(chain, schedule, positions, stages, fits, max(1, evaluations))


def _cut_in_memory(chain: _Chain, schedule: str, positions: int, stages: int, fits: Fits, evaluations: int) -> Cut | None:
    """By the slower table that knows of memory: only where the best cut of all does not fit."""
    places = {start: at for at, start in enumerate(chain.starts)}
    costs = [LayerCost(0, 0)] * chain.starts[-1]
    for (a, b), start in zip(pairwise(chain.sums), chain.starts, strict=False):
        costs[start] = LayerCost(b - a, 2 * (b - a))

    def score(bounds: Cut) -> int:
        return _step_time(chain, schedule, positions, tuple(places[stop] for _, stop in bounds))

    try:
        return cut(
            costs,
            stages,
            allowed=[i in places for i in range(len(costs))],
            memory_limit=0,
            memory_of=lambda stage, of, start, stop: 0 if fits(stage, of, start, stop) else 1,
            score=score,
            candidates=evaluations,
        )
    except CutError:
        return None


def _step_time(chain: _Chain, schedule: str, positions: int, ends: tuple[int, ...]) -> int:
    sums = chain.sums
    return makespan(schedule, positions, tuple(sums[b] - sums[a] for a, b in pairwise((0, *ends))), 2 * positions)


@frozen
class _Room:
    """How far a stage may reach. Ends are counted in parts of the chain; every stage takes at least one."""

    chain: _Chain
    stages: int

    def farthest(self, stage: int, start: int, most: int) -> int:
        """The last end of a stage that begins at `start` with FLOPs up to `most`; `start` itself if there is none."""
        last = self.chain.parts - (self.stages - 1 - stage)
        return min(last, bisect_right(self.chain.sums, self.chain.sums[start] + most) - 1)

    def greedy(self, most: int) -> tuple[int, ...] | None:
        """The ends if every stage reaches as far as it may; None if the last one does not get to the end of the chain."""
        ends, at = [], 0
        for stage in range(self.stages):
            stop = self.farthest(stage, at, most)
            if stop <= at:
                return None
            ends.append(stop)
            at = stop
        return tuple(ends) if at == self.chain.parts else None

    def first_ends(self, most: int) -> list[int]:
        """For each stage the smallest end from which the rest can still be cut, behind a leading 0: from the end on, as far back as possible."""
        first = [0] * self.stages + [self.chain.parts]
        for stage in range(self.stages - 1, 0, -1):
            first[stage] = max(stage, bisect_left(self.chain.sums, self.chain.sums[first[stage + 1]] - most))
        return first


def _bottleneck(room: _Room) -> int:
    """The least FLOPs within which all stages can be. Reaching as far as possible is best, so one walk decides."""
    sums = room.chain.sums
    widest = max(b - a for a, b in pairwise(sums))
    low = max(widest, -(-sums[-1] // room.stages))  # nothing below can do
    high = min(sums[-1], low + widest)
    while low < high:
        enough, nearest = _walk(sums, room.stages, (low + high) // 2)
        low, high = (low, nearest) if enough else (nearest, high)
    return high


def _walk(sums: tuple[int, ...], stages: int, most: int) -> tuple[bool, int]:
    """Whether so many stages of up to `most` FLOPs reach the end, and the nearest other value worth trying: the largest stage of that walk, or the
    least with which one of its stages would have reached farther.
    """
    last, at, largest, farther = len(sums) - 1, 0, 0, sums[-1]
    for _ in range(stages):
        begin = sums[at]
        at = bisect_right(sums, begin + most, at) - 1
        largest = max(largest, sums[at] - begin)
        if at == last:
            return True, largest
        farther = min(farther, sums[at + 1] - begin)
    return False, farther


def _choose(room: _Room, score: Callable[[tuple[int, ...]], int], evaluations: int) -> tuple[int, ...]:
    """Among all cuts with the smallest largest stage the one with the best score, as far as so many evaluations go."""
    if room.stages == 1:
        return (room.chain.parts,)
    most = _bottleneck(room)
    first = room.first_ends(most)
    even = _even(room, most, first)
    if evaluations < _FEWEST_SCORED:
        return even
    few = _all_up_to(room, most, first, evaluations)
    if few is not None:
        return min((score(ends), ends) for ends in few)[1]
    far = room.greedy(most)
    assert far is not None
    return _descend(room, most, first, (even, tuple(first[1:]), far), score, evaluations)


def _even(room: _Room, most: int, first: list[int]) -> tuple[int, ...]:
    """Every end as near as possible to its equal share of what is left."""
    sums, ends, at = room.chain.sums, [], 0
    for stage in range(room.stages - 1):
        wanted = sums[at] + (sums[-1] - sums[at]) // (room.stages - stage)
        low, high = max(first[stage + 1], at + 1), room.farthest(stage, at, most)
        stop = min(high, max(low, bisect_left(sums, wanted)))
        if stop > low and 2 * wanted < sums[stop] + sums[stop - 1]:
            stop -= 1
        ends.append(stop)
        at = stop
    return (*ends, room.chain.parts)


def _all_up_to(room: _Room, most: int, first: list[int], limit: int) -> list[tuple[int, ...]] | None:
    """All cuts, or None if there are more than `limit`. Every end that is tried can be completed, so nothing is walked in vain."""
    partial_ends: list[tuple[int, ...]] = [()]
    for stage in range(room.stages - 1):
        longer = []
        for ends in partial_ends:
            at = ends[-1] if ends else 0
            longer += [(*ends, stop) for stop in range(max(first[stage + 1], at + 1), room.farthest(stage, at, most) + 1)]
            if len(longer) > limit:
                return None
        partial_ends = longer
    return [(*ends, room.chain.parts) for ends in partial_ends]


def _descend(
    room: _Room,
    most: int,
    first: list[int],
    seeds: tuple[tuple[int, ...], ...],
    score: Callable[[tuple[int, ...]], int],
    evaluations: int,
) -> tuple[int, ...]:
    """From the best seed on by moves of one end to its neighbour, while they help and evaluations are left."""
    known = {ends: score(ends) for ends in seeds}
    best = min((value, ends) for ends, value in known.items())
    improved = True
    while improved:
        improved = False
        for at in range(room.stages - 1):
            for shift in (-1, 1):
                ends = best[1]
                moved = (*ends[:at], ends[at] + shift, *ends[at + 1 :])
                if moved in known or not _legal(room, most, first, moved, at):
                    continue
                if len(known) >= evaluations:
                    return best[1]
                known[moved] = score(moved)
                if (known[moved], moved) < best:
                    best = (known[moved], moved)
                    improved = True
    return best[1]


def _legal(room: _Room, most: int, first: list[int], ends: tuple[int, ...], at: int) -> bool:
    """Whether the two stages beside a moved end are still within bounds."""
    start = ends[at - 1] if at else 0
    return max(start + 1, first[at + 1]) <= ends[at] <= room.farthest(at, start, most) and ends[at] < ends[at + 1] <= room.farthest(
        at + 1, ends[at], most
    )
