"""The search behind `schedule = auto(...)`: the best schedule that can be found for given costs, latency and memory.

For each way to place the stages: all named schedules and their relatives, list schedules, local search from the best of them, and for small
problems an exact search. The result is the least of a set that holds every named schedule which fits, evaluated by one simulator, and every later
step only accepts what is no worse: so it is never slower than the best of them. The work is counted, not timed: the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from attrs import field, frozen

from pdsl.lowering.bounds import lower_bound
from pdsl.lowering.exact_search import exact_search
from pdsl.lowering.list_schedule import HOLDS, RANKS, list_schedule
from pdsl.lowering.local_search import fused, improve
from pdsl.lowering.periods import lengthened, shortened
from pdsl.lowering.portfolio import Seed, named, relatives
from pdsl.lowering.schedule import Number, Schedule, ScheduleError, loop_placement, v_placement
from pdsl.lowering.search_problem import Ops, Problem, problem_of
from pdsl.lowering.search_report import Tried
from pdsl.lowering.simulate import StageCosts

__all__ = ["Candidate", "Found", "NothingFits", "placement_text", "search"]

_LIST_WORK = 12_000  # operations that list schedules of one candidate may place
_QUICK_WORK = 2_500  # the same, where a plan is made anew in the middle of a run
_MOVE_WORK = 200_000  # operations that the local search of one candidate may visit
_FUSE_WORK = 30_000  # operations that joining halves of backwards may visit
_EXACT_NODES = 4_000  # states of the exact search
_EXACT_OPERATIONS = 110
_LONG = 1_200  # operations above which a shorter problem is solved and lengthened
_STARTS = 2  # where the local search begins, the first with three quarters of its work


class NothingFits(ScheduleError):
    """No schedule keeps to the caps. `short` is by candidate what the position that lacks most needs for one microbatch, and what it has."""

    def __init__(self, short: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__(short)
        self.short = short

    def __str__(self) -> str:
        told = (f"position {position} must hold {need} and has room for {cap}" for position, need, cap in self.short)
        return f"no schedule fits in memory: {'; '.join(told)}"


@frozen
class Candidate:
    """One way to place stages: where each is, what it costs, what a microbatch leaves on it and takes more between the halves of its backward (empty:
    nothing), and what each position may hold (None: any amount).
    """

    placement: tuple[int, ...]
    costs: StageCosts
    sizes: tuple[Number, ...]
    caps: tuple[Number, ...] | None = None
    between: tuple[Number, ...] = ()


@frozen
class Found:
    """What a search came to. Times are in the unit of the costs.

    `candidate` is the index of the placement, `peak` the most that a position holds. `way` says how it was found. No schedule of any
    candidate ends before `bound`. `tried` are the named schedules, best first.
    """

    schedule: Schedule
    candidate: int
    makespan: Fraction
    peak: int
    bound: Fraction
    way: str
    tried: tuple[Tried, ...] = field(default=())

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no schedule is faster."""
        return self.makespan == self.bound


@lru_cache(maxsize=256)
def search(
    candidates: tuple[Candidate, ...],
    microbatches: int,
    *,
    hop: Number = 0,
    rounds: int = 1,
    split: bool = True,
    thorough: bool = True,
) -> Found:
    """The best schedule by (step time, peak, changes between kinds of operations, name).

    `hop` is the latency between two positions, in the unit of the costs. `rounds` only concerns named schedules that hold all microbatches at once.
    `split` allows backwards in two halves. Without `thorough` local and exact search are left out. Raises NothingFits.
    """
    if not candidates:
        raise ScheduleError("there is no placement of stages to search")
    pools = [_pool(c, i, microbatches, hop, rounds, split) for i, c in enumerate(candidates)]
    for pool in pools:
        pool.begin(_LIST_WORK if thorough else _QUICK_WORK)
    fitting = [pool for pool in pools if pool.best is not None]
    if not fitting:
        raise NothingFits(tuple(_shortage(pool.problem) for pool in pools))
    if thorough:
        _deepen(fitting)
    best = min(fitting, key=lambda pool: pool.key())
    rows, way = best.result()
    tried = sorted(
        (t for pool in pools for t in pool.tried), key=lambda t: (t.makespan is None, t.makespan or 0, t.peak or 0, t.name, t.placement)
    )
    return Found(
        schedule=best.problem.schedule_of(rows, "auto"),
        candidate=best.index,
        makespan=best.key()[0],
        peak=max(best.problem.peaks(rows)),
        bound=min(pool.bound * pool.problem.unit for pool in fitting),
        way=way,
        tried=tuple(dict.fromkeys(tried)),
    )


def _deepen(pools: list[_Pool]) -> None:
    """Look further, the most promising placement first, wherever the bound leaves something to be found."""
    for pool in sorted(pools, key=lambda pool: pool.key()):
        best = min(other.key()[0] for other in pools)
        if pool.bound * pool.problem.unit < best:
            pool.deepen()


def placement_text(placement: Sequence[int]) -> str:
    """The placement of stages in a word or two: `loop`, `loop x 2`, `v`."""
    positions = max(placement) + 1
    each, rest = divmod(len(placement), positions)
    if not rest and tuple(placement) == loop_placement(positions, each):
        return f"loop x {each}" if each > 1 else "loop"
    return "v" if tuple(placement) == v_placement(positions) else "stages on " + " ".join(map(str, placement))


def _pool(candidate: Candidate, index: int, microbatches: int, hop: Number, rounds: int, split: bool) -> _Pool:
    c = candidate
    problem = problem_of(c.placement, microbatches, c.costs, hop=hop, sizes=c.sizes, caps=c.caps, split=split, between=c.between)
    return _Pool(problem, index, rounds)


def _shortage(problem: Problem) -> tuple[int, int, int]:
    """(position, need, cap) of the position that lacks most for a single microbatch."""
    assert problem.caps is not None
    needs = [sum(problem.sizes[s] for s in stages) for stages in problem.stages_at]
    worst = max(range(problem.positions), key=lambda r: (needs[r] - problem.caps[r], -r))  # type: ignore[index]
    return worst, needs[worst], problem.caps[worst]


@frozen
class _Entry:
    """Rows with what they are compared by."""

    makespan: int
    peak: int
    changes: int
    name: str
    rows: Ops = field(eq=False)

    @property
    def key(self) -> tuple[int, int, int, str]:
        return self.makespan, self.peak, self.changes, self.name


class _Pool:
    """All that was found for one placement."""

    def __init__(self, problem: Problem, index: int, rounds: int) -> None:
        self.problem, self.index, self.rounds = problem, index, rounds
        self.bound = lower_bound(problem)
        self.entries: dict[tuple[tuple[int, ...], ...], _Entry] = {}
        self.tried: list[Tried] = []

    @property
    def best(self) -> _Entry | None:
        return min(self.entries.values(), key=lambda e: e.key, default=None)

    def key(self) -> tuple[Fraction, int, int, str]:
        assert self.best is not None
        makespan, *rest = self.best.key
        return (makespan * self.problem.unit, *rest)  # type: ignore[return-value]

    def add(self, name: str, rows: Ops) -> _Entry | None:
        """Take rows in, if they are valid; the simulator has the last word on all of them."""
        made = tuple(map(tuple, rows))
        if made in self.entries:
            return self.entries[made]
        makespan = self.problem.makespan(rows)
        if makespan is None or not self.problem.fits(rows) or not self.problem.in_order(rows):
            return None
        entry = _Entry(makespan, max(self.problem.peaks(rows)), self.problem.changes(rows), name, rows)
        self.entries[made] = entry
        return entry

    def begin(self, work: int) -> None:
        """Named schedules, relatives and list schedules, the last with so much work."""
        where = placement_text(self.problem.placement)
        for seed in named(self.problem, self.rounds):
            entry = self.add(seed.name, seed.rows) if seed.rows is not None else None
            if entry is None:
                self.tried.append(Tried(seed.name, where, reason=seed.reason or "its rows do not fit this placement"))
            else:
                self.tried.append(Tried(seed.name, where, entry.makespan * self.problem.unit, entry.peak))
        for seed in (*relatives(self.problem), *_lists(self.problem, work)):
            if seed.rows is not None:
                self.add(seed.name, seed.rows)

    def deepen(self) -> None:
        """Lengthened shorter problems, local search, exact search; until the bound is met."""
        if self.problem.operations > _LONG:
            self._from_shorter()
        starts = sorted(self.entries.values(), key=lambda e: e.key)[:_STARTS]
        for start in starts:
            if starts[0].makespan == self.bound:
                return
            share = 3 if start is starts[0] else 1
            found = improve(self.problem, start.rows, visits=_MOVE_WORK * share // 4, goal=self.bound)
            if found.moves:
                self.add(f"{start.name}, {found.moves} move{'s' if found.moves > 1 else ''}", found.rows)
        best = self.best
        if best is None or best.makespan == self.bound or self.problem.operations > _EXACT_OPERATIONS:
            return
        exact = exact_search(self.problem, below=best.makespan, nodes=_EXACT_NODES)
        if exact.rows is not None:
            self.add("exact search", exact.rows)
        if exact.proven:
            assert self.best is not None
            self.bound = self.best.makespan

    def _from_shorter(self) -> None:
        short = shortened(self.problem)
        if short is None:
            return
        pool = _Pool(short, self.index, 1)
        pool.begin(_LIST_WORK)
        if pool.best is None:
            return
        pool.deepen()
        for entry in sorted(pool.entries.values(), key=lambda e: e.key)[:_STARTS]:
            rows = lengthened(short, entry.rows, self.problem)
            if rows is not None:
                self.add(f"{entry.name}, repeated", rows)

    def result(self) -> tuple[Ops, str]:
        """The best rows, with whole backwards where halves gain nothing, and how they were found."""
        best = self.best
        assert best is not None
        if best.name in {t.name for t in self.tried}:
            return best.rows, best.name
        return fused(self.problem, best.rows, visits=_FUSE_WORK), best.name


def _lists(problem: Problem, work: int) -> Iterator[Seed]:
    """List schedules, those first that win most often, as far as the work goes."""
    count = max(1, work // problem.operations)
    ways = [(rank, hold) for hold in (HOLDS if problem.split else HOLDS[:1]) for rank in RANKS]
    for rank, hold in ways[:count]:
        yield Seed(f"list, {rank} first" + (f", hold {float(hold):g}" if hold else ""), list_schedule(problem, rank, hold))
