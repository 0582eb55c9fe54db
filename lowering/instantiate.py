"""How many pipelines of which size, and how many microbatches for each: the plan of a cluster without a look at all multisets of sizes.

Within a given step time a template runs a known count of microbatches. So a step time is enough if sizes that sum to the nodes
run the whole batch within it: a table over nodes and pipelines decides that, and a search over the step time finds the least one. The batch is then
dealt out so that the pipelines end as evenly as whole microbatches allow. Every tie is settled by number, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pdsl.grammar.errors import PlanError
from pdsl.lowering.coverage import pipeline_counts, usable
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.makespan import StepTimes
from pdsl.lowering.plan import Budget
from pdsl.lowering.schedules import SEARCHED
from pdsl.lowering.searched import stand_in
from pdsl.lowering.templates import forward_flops

__all__ = ["Assignment", "deal", "instantiate", "step_time_of"]

Assignment = tuple[tuple[int, int], ...]
"""(nodes, microbatches) of each pipeline, ascending."""

_Table = list[list[int]]


def instantiate(
    budget: Budget, facts: ModelFacts, nodes: int, microbatches: int, at_least: int | None = None, at_most: int | None = None
) -> Assignment:
    """The pipelines that use all of `nodes` nodes with the least simulated step time, each with its microbatches, which sum to `microbatches`.

    At least `at_least` pipelines (by default one more than the budget may lose) if nodes and microbatches allow so many, else as many as they do; at most
    `at_most`. For a plan: `instantiate(plan.budget, plan.facts, nodes, plan.microbatches)`. Deterministic: the same answer on every machine.
    Raises PlanError if no set of pipelines uses exactly these nodes, and says how many could be used.
    """
    limit = min(microbatches, nodes) if at_most is None else min(microbatches, at_most)
    counts = _counts(budget, nodes, budget.lose + 1 if at_least is None else at_least, limit)
    times = _times(budget, facts)
    low, high = 1, _equal_shares(times, nodes, microbatches, counts[-1])
    found, _ = _within(times, nodes, microbatches, counts, high)
    assert found is not None  # equal pipelines have it
    high = _step_time(times, found)
    while low < high:
        middle = (low + high) // 2
        better, later = _within(times, nodes, microbatches, counts, middle)
        if better is None:
            low = max(later, middle + 1)
        else:
            found, high = better, _step_time(times, better)
    return found


def deal(budget: Budget, facts: ModelFacts, sizes: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Microbatches for pipelines of these sizes (in nodes), in their order: at least one each, `microbatches` in all, the slowest as fast as possible.

    Raises PlanError if there are fewer microbatches than pipelines, IndexError for a size that the budget does not have.
    """
    if len(sizes) > microbatches or not sizes:
        raise PlanError(f"{len(sizes)} pipelines need at least {max(1, len(sizes))} microbatches, and there are {microbatches}")
    for size in sizes:
        budget.cut(size)
    times = _times(budget, facts)
    low = max(times[n].time(1) for n in sizes)
    high = max(times[n].time(-(-microbatches // len(sizes))) for n in sizes)  # equal shares
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(times[n].most(middle, microbatches) for n in sizes) >= microbatches else (middle + 1, high)
    return _trimmed(times, sizes, [times[n].most(high, microbatches) for n in sizes], microbatches)


def step_time_of(budget: Budget, facts: ModelFacts, assignment: Assignment) -> int:
    """The simulated step time of pipelines: that of the slowest, in FLOPs of one sample."""
    return _step_time(_times(budget, facts), assignment)


# --- counts and times -------------------------------------------------------------------------------------------------------------------------------


def _counts(budget: Budget, nodes: int, at_least: int, at_most: int) -> range:
    """The counts of pipelines to choose from."""
    least, sizes = budget.least, len(budget.cuts)
    possible = pipeline_counts(nodes, least, sizes, 1, at_most)
    if not possible:
        best = usable(nodes, least, sizes, at_most)
        does = f"{best} of them can be used" if best else f"the smallest pipeline has {least}"
        told = f"{least} to {least + sizes - 1} nodes" if sizes > 1 else f"{least} node{'s' if least > 1 else ''}"
        raise PlanError(f"no pipelines of {told}, and at most {at_most} of them, use exactly {nodes} nodes: {does}")
    return range(min(max(possible.start, at_least), possible.stop - 1), possible.stop)


@lru_cache(maxsize=16)
def _times(budget: Budget, facts: ModelFacts) -> dict[int, StepTimes]:
    """Step times of the template of each size."""
    positions = {n: max(s.position for s in budget.cut(n)) + 1 for n in budget.sizes}
    families = {n: stand_in(budget.cut(n)) if budget.schedule in SEARCHED else budget.schedule for n in budget.sizes}
    return {n: StepTimes(families[n], positions[n], forward_flops(facts, budget.cut(n))) for n in budget.sizes}


def _step_time(times: dict[int, StepTimes], assignment: Assignment) -> int:
    return max(times[n].time(count) for n, count in assignment)


def _equal_shares(times: dict[int, StepTimes], nodes: int, microbatches: int, count: int) -> int:
    """The step time of pipelines that are as equal as they can be."""
    each, more = divmod(nodes, count)
    share, extra = divmod(microbatches, count)
    return max(times[n].time(share + (extra > 0)) for n in ({each, each + 1} if more else {each}))


# --- within one step time -----------------------------------------------------------------------------------------------------------------------------


def _within(times: dict[int, StepTimes], nodes: int, microbatches: int, counts: range, deadline: int) -> tuple[Assignment | None, int]:
    """Pipelines that run the whole batch by the deadline; or None, and the next deadline at which anything changes.

    Of several the ones with most room, then with the smallest sizes. At first every size is taken at the bound of its room, which costs nothing; only the
    sizes that a solution rests on are computed exactly, until it rests on no bound.
    """
    rooms = {n: most for n, at in times.items() if n <= nodes and (most := min(microbatches, at.bound(deadline)))}
    exact: set[int] = set()
    while True:
        sizes = _sizes(rooms, nodes, microbatches, counts)
        if sizes is None:
            return None, _change(times, rooms, exact, microbatches)
        unsure = set(sizes) - exact
        if not unsure:
            dealt = _trimmed(times, sizes, [rooms[n] for n in sizes], microbatches)
            return tuple(sorted(zip(sizes, dealt, strict=True))), deadline
        for n in unsure:
            rooms[n] = times[n].most(deadline, microbatches)
        exact |= unsure


def _change(times: dict[int, StepTimes], rooms: dict[int, int], exact: set[int], microbatches: int) -> int:
    """The first deadline at which a size may have more room."""
    return min(
        (at.time(room + 1) if n in exact else at.least(room + 1) for n, at in times.items() if (room := rooms.get(n, 0)) < microbatches),
        default=0,
    )


def _sizes(rooms: dict[int, int], nodes: int, microbatches: int, counts: range) -> tuple[int, ...] | None:
    """The multiset of sizes that sums to the nodes and has room for the batch; None if there is none.

    Where the count of pipelines has no upper bound but the nodes, one row for "this many or more" is enough, and a size that two
    smaller ones replace without loss of room is not looked at.
    """
    rooms = {n: room for n, room in rooms.items() if room > 0}
    if not rooms:
        return None
    open_ended = counts[-1] >= nodes // min(rooms)
    if open_ended:
        rooms = _undominated(rooms)
    levels = counts.start if open_ended else counts[-1]
    tables = _tables(rooms, nodes, levels, open_ended)
    level = max(range(counts.start, levels + 1), key=lambda c: (tables[c][nodes], c))
    if tables[level][nodes] < microbatches:
        return None
    sizes: list[int] = []
    left = nodes
    while left:
        n, level = _step_back(tables, rooms, level, left, stays=open_ended and level == levels)
        sizes.append(n)
        left -= n
    return tuple(sizes)


def _undominated(rooms: dict[int, int]) -> dict[int, int]:
    best: dict[int, int] = {}  # the most room of any two or more sizes, or of one, with that sum
    kept = {}
    for n in range(min(rooms), max(rooms) + 1):
        split = max((best[a] + best[n - a] for a in range(1, n // 2 + 1) if a in best and n - a in best), default=-1)
        if rooms.get(n, -1) > split:
            kept[n] = rooms[n]
        best[n] = max(split, rooms.get(n, -1))
        if best[n] < 0:
            del best[n]
    return kept


def _step_back(tables: _Table, rooms: dict[int, int], level: int, left: int, *, stays: bool) -> tuple[int, int]:
    """The smallest size that a best multiset of `left` nodes may contain, and the level of what remains without it."""
    for n in sorted(rooms):
        rest = left - n
        for below in (level - 1, level) if stays else (level - 1,):
            if rest >= 0 and below >= 0 and tables[below][rest] >= 0 and tables[below][rest] + rooms[n] == tables[level][left]:
                return n, below
    raise AssertionError("a table of sizes cannot be walked back")


def _tables(rooms: dict[int, int], nodes: int, levels: int, open_ended: bool) -> _Table:
    """tables[c][v]: the most microbatches that c pipelines of v nodes together run, -1 if there are no such pipelines.

    With `open_ended` the last table is for that many pipelines or more.
    """
    none = -1
    tables: _Table = [[0] + [none] * nodes]
    for _ in range(levels):
        before, here = tables[-1], [none] * (nodes + 1)
        for n, room in rooms.items():
            for v in range(n, nodes + 1):
                rest = before[v - n]
                if rest >= 0 and rest + room > here[v]:
                    here[v] = rest + room
        tables.append(here)
    if open_ended:
        last = tables[-1]
        for v in range(nodes + 1):
            for n, room in rooms.items():
                if n <= v and last[v - n] >= 0 and last[v - n] + room > last[v]:
                    last[v] = last[v - n] + room
    return tables


def _trimmed(times: dict[int, StepTimes], sizes: Sequence[int], rooms: list[int], microbatches: int) -> tuple[int, ...]:
    """Takes back what the rooms have too many, each time from the pipeline that would end last; on a tie from the last of them."""
    counts = list(rooms)
    while (surplus := sum(counts) - microbatches) > 0:
        at = max((i for i in range(len(sizes)) if counts[i] > 1), key=lambda i: (times[sizes[i]].time(counts[i]), i))
        ends = [times[n].time(c) for i, (n, c) in enumerate(zip(sizes, counts, strict=True)) if i != at]
        floor = max(ends, default=0)
        step = 1
        while 2 * step <= min(surplus, counts[at] - 1) and times[sizes[at]].time(counts[at] - 2 * step + 1) > floor:
            step *= 2
        counts[at] -= step
    return tuple(counts)
